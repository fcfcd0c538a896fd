"""What a test asks of llama.cpp, in a process of its own: `logits MODEL IDS.npy LOGITS.npy`, `quantise IN OUT TYPE`.

Keys and values are held in float32, and attention is computed in the plain way. TYPE is a name such as Q4_K_M.
"""

import ctypes
import sys

import llama_cpp
import numpy as np


@llama_cpp.llama_log_callback
def _warnings(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    if level >= 3:
        sys.stderr.write(text.decode(errors="replace"))


def quantise(path: str, output: str, name: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    assert llama_cpp.llama_model_quantize(path.encode(), output.encode(), ctypes.byref(params)) == 0


def logits(path: str, ids_file: str, logits_file: str) -> None:
    ids = np.load(ids_file).astype(np.int32)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    assert model, path
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = len(ids)
    settings.type_k = settings.type_v = 0
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, settings)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for n, token in enumerate(ids.tolist()):
        batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n], batch.seq_id[n][0] = token, n, 1, 1, 0
    assert llama_cpp.llama_decode(context, batch) == 0
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, n), (vocabulary,)) for n in range(len(ids))]
    np.save(logits_file, np.stack(rows))


llama_cpp.llama_log_set(_warnings, ctypes.c_void_p(0))
{f.__name__: f for f in (logits, quantise)}[sys.argv[1]](*sys.argv[2:])
