"""This project as an engine: several open artifacts and modes, one key-value cache."""

import re
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sparse_model

from pi_runtime import Engine, Model, Sampling, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.pages import PAGE_POSITIONS
from pi_runtime.kernels import reference
from pi_runtime.kernels.codegen.isa import ISA
from side_by_side.kept_neurons import KeptNeurons
from side_by_side.process import threads

_models: dict[str, Model] = {}
_paths: dict[str, Path] = {}
_engines: dict[str, Engine] = {}
_caches: list[KVCache] = []
_rng = np.random.default_rng(0)


def open_model(name: str, path: str, mode: str, context: int) -> dict[str, Any]:
    """Open an artifact under a name. All models of one process have one shape and share the cache."""
    model = load(path, mode=mode, context=context, threads=threads())
    model.warm_up()
    _models[name], _paths[name] = model, Path(path)
    if not _caches:
        _caches.append(model.new_cache())
    return {"isa": ISA.name}


def prefill(name: str, tokens: int) -> dict[str, Any]:
    """Run a new prompt of `tokens` tokens, which then is the context."""
    model, cache = _models[name], _caches[0]
    cache.truncate(0)
    generation = model.generate(_ids(model, tokens), max_tokens=1, sampling=Sampling(temperature=0), cache=cache)
    for _ in generation:
        pass
    return {
        "seconds": generation.stats.prefill_s,
        "bytes_per_token": sparse_model.bytes_per_token(model.manifest) / tokens,
    }


def decode(name: str, context: int, tokens: int) -> dict[str, Any]:
    """Single tokens after a context: seconds of each, without the first, which wakes the threads."""
    model, cache = _models[name], _caches[0]
    if cache.length < context:
        prefill(name, context)
    cache.truncate(context)
    found = sparse_model.decode(model, cache, _ids(model, tokens + 1))
    cache.truncate(context)
    held = cache.pool.page_nbytes * (context + tokens / 2) / PAGE_POSITIONS
    return asdict(found) | {"cache_bytes": held}


def decode_batch(name: str, batch: int, context: int, tokens: int) -> dict[str, Any]:
    """Steps of some sequences after a context that they share: seconds of each, without the first."""
    model, caches, seconds = _models[name], _forks(name, batch, context), []
    for n in range(tokens + 1):
        steps = _steps(model, caches)
        began = time.perf_counter()
        model.executor.step(steps)
        if n:
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}


def changed_by_company(name: str, batch: int, context: int) -> int:
    """How many sequences of a batch get other logits than alone."""
    model, caches, alone = _models[name], _forks(name, batch, context), _forks(name, batch, context)
    steps, changed = _steps(model, caches), 0
    for step, cache, found in zip(steps, alone, model.executor.step(steps), strict=True):
        (wanted,) = model.executor.step([replace(step, cache=cache)])
        changed += not np.array_equal(found.logits_TV, wanted.logits_TV)
    return changed


def shares(name: str, batches: list[int], context: int, steps: int) -> list[dict[str, float]]:
    """For each batch the mean share of the neurons that a token keeps, and the union's: mean, least and most of the
    layers."""
    model = _models[name]
    kept = KeptNeurons(_paths[name], model.mode, context=model.context, threads=threads(), cache_format="auto")
    caches = _forks(name, max(batches), context)
    listed = [kept.step(_steps(model, caches)) for _ in range(steps)]
    kept.close()
    found = []
    for batch in batches:
        union_L = np.mean([kept_LBN[:, :batch].any(1).mean(1) for kept_LBN in listed], axis=0)
        own = np.mean([kept_LBN[:, :batch].mean() for kept_LBN in listed])
        told = {"own": own, "union": union_L.mean(), "least": union_L.min(), "most": union_L.max()}
        found.append({key: float(value) for key, value in told.items()})
    return found


def _forks(name: str, batch: int, context: int) -> list[KVCache]:
    if _caches[0].length < context:
        prefill(name, context)
    _caches[0].truncate(context)
    return [_caches[0].fork() for _ in range(batch)]


def _steps(model: Model, caches: list[KVCache]) -> list[SequenceStep]:
    ids = np.array(_ids(model, len(caches)), np.int64)
    return [SequenceStep(cache=c, tokens=ids[n : n + 1], select=True) for n, c in enumerate(caches)]


def answer(name: str, engine: bool, tokens: int) -> dict[str, Any]:
    """Seconds of one answer to a short prompt, through an engine or by `generate`."""
    model = _models[name]
    if engine and name not in _engines:
        _engines[name] = Engine(model, slots=1, speculate="off")
    generate = _engines[name].generate if engine else partial(model.generate, speculate="off")
    began = time.perf_counter()
    for _ in generate(_ids(model, 4), max_tokens=tokens, sampling=Sampling(temperature=0)):
        pass
    return {"seconds": time.perf_counter() - began}


def first_token(name: str, prompt: list[int], tokens: int) -> dict[str, float]:
    """Seconds to the first token of a greedy answer, and to its last, in an engine with nothing else to do."""
    if name not in _engines:
        _engines[name] = Engine(_models[name], speculate="off")
    began = time.perf_counter()
    stream = _engines[name].generate(prompt, max_tokens=tokens, sampling=Sampling(temperature=0))
    next(stream)
    first_s = time.perf_counter() - began
    "".join(stream)
    return {"first_s": first_s, "seconds": time.perf_counter() - began}


def check(path: str, tokens: int) -> dict[str, float]:
    """Relative distance of our logits from the reference's, the largest over tokens: decoding in each mode, and the
    last token of a prompt."""
    errors = {}
    for mode in ("dense", "gate", "predicted"):
        with Artifact.open(Path(path)) as artifact, load(path, mode=mode, threads=threads()) as model:
            ids = _ids(model, tokens)
            wanted_TV, cache = reference.forward(artifact, ids, mode), model.new_cache()
            found_TV = np.stack([model.decode(token, cache)[0] for token in ids])
            errors[mode] = float(_distance(found_TV, wanted_TV).max())
            if mode == "dense":
                # The last token alone after a prompt of the others, so that prefill's cache is what is checked.
                cache = model.new_cache()
                list(model.generate(ids[:-1], max_tokens=1, sampling=Sampling(temperature=0), cache=cache))
                errors["prefill"] = float(_distance(model.decode(ids[-1], cache)[0], wanted_TV[-1]))
    return errors


def _distance(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


def memory() -> dict[str, int]:
    """Resident bytes beyond mapped files, and the size of the cache's pages."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    cache = _caches[0]
    return {"anonymous": int(found[1]) * 1024, "cache": cache.pool.in_use * cache.pool.page_nbytes}


def _ids(model: Model, tokens: int) -> list[int]:
    return _rng.integers(0, model.manifest.decoder.vocab_size, tokens).tolist()


HANDLERS = {
    f.__name__: f
    for f in (open_model, prefill, decode, decode_batch, changed_by_company, shares, answer, first_token, check, memory)
}
