"""llama.cpp as an engine, through its C interface: no tokenizer, no sampling."""

import ctypes
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from side_by_side.gguf_file import dense_bytes
from side_by_side.llama_cpp_build import PATCHED
from side_by_side.process import threads

BATCH = 512
_rng = np.random.default_rng(0)


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


class _Session:
    def __init__(self, path: str, context: int, sequences: int, repack: bool) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = 0, repack
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        assert self.model, path
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = context
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_threads = settings.n_threads_batch = threads()
        settings.offload_kqv = False
        settings.n_seq_max, settings.kv_unified = sequences, True  # a little faster in batches than apart
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        assert self.context, path
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.nbytes = dense_bytes(Path(path))
        heads, groups = llama_cpp.llama_model_n_head(self.model), llama_cpp.llama_model_n_head_kv(self.model)
        width = llama_cpp.llama_model_n_embd(self.model) // heads * groups
        self.cache_row_bytes = 2 * 2 * llama_cpp.llama_model_n_layer(self.model) * width  # keys and values in f16
        self.batch = llama_cpp.llama_batch_init(sequences, 0, 1)
        self.held = 0

    def keep(self, tokens: int) -> None:
        """Forget all but the first `tokens` positions."""
        assert llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, tokens, -1)
        self.held = min(self.held, tokens)

    def run(self, tokens: int) -> float:
        """Append so many pseudo-random tokens; logits of the last. Seconds."""
        return self.append(_rng.integers(0, self.vocabulary, tokens).tolist())

    def append(self, token_T: Sequence[int]) -> float:
        """Append tokens; logits of the last. Seconds."""
        tokens = len(token_T)
        ids = (ctypes.c_int32 * tokens)(*token_T)
        began = time.perf_counter()
        for start in range(0, tokens, BATCH):
            part = (ctypes.c_int32 * min(BATCH, tokens - start)).from_buffer(ids, 4 * start)
            code = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(part, len(part)))
            assert code == 0, code
        llama_cpp.llama_get_logits_ith(self.context, -1)
        self.held += tokens
        return time.perf_counter() - began

    def share(self, sequences: int) -> None:
        """Let so many sequences hold what the first one holds."""
        memory = llama_cpp.llama_get_memory(self.context)
        for n in range(1, sequences):
            llama_cpp.llama_memory_seq_rm(memory, n, -1, -1)
            llama_cpp.llama_memory_seq_cp(memory, 0, n, -1, -1)

    def step(self, sequences: int, position: int) -> float:
        """Append a pseudo-random token to each sequence; logits of all. Seconds."""
        batch, ids = self.batch, _rng.integers(0, self.vocabulary, sequences).tolist()
        batch.n_tokens = sequences
        for n, token in enumerate(ids):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, position, 1, 1
            batch.seq_id[n][0] = n
        began = time.perf_counter()
        code = llama_cpp.llama_decode(self.context, batch)
        assert code == 0, code
        llama_cpp.llama_get_logits_ith(self.context, sequences - 1)
        return time.perf_counter() - began


_sessions: list[_Session] = []


def describe() -> dict[str, str]:
    """What the library was compiled with, by its own account."""
    found = " ".join(re.findall(r"(\w+) = 1\b", llama_cpp.llama_print_system_info().decode()))
    return {"build": f"with AMX: {found} {PATCHED}" if "AMX_INT8" in found else f"without AMX: {found}"}


def open_model(path: str, context: int, sequences: int = 1, repack: bool = True) -> None:
    """`context`: positions of all sequences together; `repack`: copy 4-bit weights into a faster order."""
    _sessions.append(_Session(path, context, sequences, repack))


def prefill(tokens: int) -> dict[str, Any]:
    session = _sessions[0]
    session.keep(0)
    return {"seconds": session.run(tokens), "bytes_per_token": session.nbytes / tokens}


def decode(context: int, tokens: int) -> dict[str, Any]:
    session = _sessions[0]
    if session.held < context:
        prefill(context)
    session.keep(context)
    seconds = [session.run(1) for _ in range(tokens + 1)][1:]
    session.keep(context)
    held = session.cache_row_bytes * (context + tokens / 2)
    return {"seconds": seconds, "read": 1.0, "density": 1.0, "bytes_per_token": session.nbytes, "cache_bytes": held}


def decode_text(tokens: list[int], warm: int) -> dict[str, Any]:
    """Decode these tokens one by one: what those after the first `warm` took."""
    return {"seconds": [_sessions[0].append([token]) for token in tokens][warm:]}


def decode_batch(batch: int, context: int, tokens: int) -> dict[str, Any]:
    """Steps of some sequences after a context that they share: seconds of each, without the first."""
    session = _sessions[0]
    if session.held < context:
        prefill(context)
    session.share(batch)
    seconds = [session.step(batch, context + n) for n in range(tokens + 1)][1:]
    session.keep(context)
    return {"seconds": seconds}


HANDLERS = {f.__name__: f for f in (describe, open_model, prefill, decode, decode_text, decode_batch)}
