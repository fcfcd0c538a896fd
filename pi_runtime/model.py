"""An open artifact as a model: logits and text.

Shape letters: T tokens, V vocabulary, L layers.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack

import numba
import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.buffers import CACHE_FORMATS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Manifest, Plan
from pi_runtime.errors import (
    ArtifactError,
    DeviceError,
    DoesNotFitError,
    PromptError,
    Setting,
    TemplateError,
    UsageError,
    spelled,
)
from pi_runtime.execution.cpu import CpuExecutor
from pi_runtime.execution.devices import ram_budget_for, resolve_device
from pi_runtime.execution.executor import Executor, SequenceResult, SequenceStep
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.plan_choice import Allocation, choose_plan
from pi_runtime.execution.stand_in import StandInExecutor
from pi_runtime.generation import Answer, AnswerSettings, Generation, Scoring
from pi_runtime.guesses import Speculation, StepTimes
from pi_runtime.kernels.data.workspace import BLOCK_TOKENS
from pi_runtime.options import ModelOptions
from pi_runtime.sampling import Sampling, TokenLogprobs
from pi_runtime.text.chat_template import ChatTemplate
from pi_runtime.text.tokenizer import Tokenizer

MODES = ("auto", "dense", "gate", "predicted")
DEFAULT_CONTEXT = 4096
"""Positions held unless asked otherwise, where the model allows as many."""


def load(
    path: str | Path,
    *,
    mode: str = "auto",
    context: int | None = None,
    threads: int | None = None,
    device: str = "auto",
    vram_budget: int | None = None,
    ram_budget: int | None = None,
    kv_budget: int | None = None,
    cache_format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> "Model":
    """Open an artifact for running.

    `mode`: `dense` computes every neuron; `gate` skips `rest` where a neuron does not fire, which changes nothing;
    `auto` runs each layer on the rung that its compiler chose; `predicted` does the same, but refuses an artifact
    whose rungs all leave out nothing.
    `device`: `cpu`; `cuda:N` runs by the best stored plan that fits `vram_budget` bytes and the card's free memory;
    `stand-in` runs the same plan with the CPU in the GPU's place; `auto` is the first GPU where there is one and a plan
    fits it, else `stand-in` where a budget is given, else `cpu`. `progress` is called with (done, total) bytes while
    weights go to a GPU.
    `ram_budget`: bytes of memory that the run may take, on the CPU: rows of FFNs that have no room are read from the
    file when they are needed, which changes no text. None maps the whole file into memory where it fits, and else takes
    what is free. `kv_budget`: bytes of it for keys and values, of all caches and engines together; None: as many as
    one sequence takes.
    `context`: positions to hold, prompt and answer together. `cache_format`: how keys and values are held, `f16` or
    `q8`, which takes about half as much and is no longer exact; `auto` is float32 beside attention weights in float32,
    else `f16`. A GPU has `auto` alone. `threads`: CPU threads; results do not depend on it.

    Raises ArtifactError for a file that is not an artifact of this version, UsageError for an impossible argument,
    DeviceError for a device that is not there.

    >>> with load("artifact.pi", mode="dense", device="cpu") as model:
    ...     model.mode, model.device
    ('dense', 'cpu')
    """
    options = ModelOptions(
        mode=mode,
        context=context,
        threads=threads,
        device=device,
        vram_budget=vram_budget,
        ram_budget=ram_budget,
        kv_budget=kv_budget,
        cache_format=cache_format,
    )
    return open_model(path, options, progress)


def open_model(path: str | Path, options: ModelOptions, progress: Callable[[int, int], None] | None = None) -> "Model":
    """Open an artifact for running, as `load` does with these options as keywords."""
    device, threads = _device(options), _threads(options.threads)
    if options.mode not in MODES:
        raise UsageError("unknown mode", setting=Setting("mode", options.mode), expected=", ".join(MODES))
    if options.cache_format not in CACHE_FORMATS:
        held = Setting("cache_format", options.cache_format)
        raise UsageError("unknown format", setting=held, expected=", ".join(CACHE_FORMATS))
    artifact = Artifact.open(Path(path))
    try:
        context = _context(artifact.manifest, options.context)
        _check_mode(artifact, options.mode)
        notice = None
        try:
            executor = _executor(artifact, replace(options, device=device), context, threads, progress)
        except (DoesNotFitError, DeviceError) as error:
            if options.device != "auto" or options.vram_budget is not None or options.ram_budget is not None:
                raise
            notice = f"the GPU is not used: {spelled(error.what)}"
            if error.expected is not None:
                notice += f" (expected: {spelled(error.expected)}; found: {error.found})"
            executor = CpuExecutor(artifact, options.mode, context, threads, options.cache_format)
        return Model(artifact, options.mode, executor, notice)
    except BaseException:
        artifact.close()
        raise


def _threads(wanted: int | None) -> int:
    """The threads that a run takes. Raises UsageError for more than there are."""
    available = int(numba.config.NUMBA_NUM_THREADS)
    if wanted is not None and not 1 <= wanted <= available:
        remedy = "NUMBA_NUM_THREADS sets the most"
        raise UsageError(setting=Setting("threads", wanted), expected=f"1 to {available}", remedy=remedy)
    return wanted or available


def _device(options: ModelOptions) -> str:
    """The device that a run takes. Raises UsageError for budgets that do not go with it."""
    wanted, within_ram, on_gpu = options.device, options.ram_budget is not None, options.vram_budget is not None
    device = "cpu" if wanted == "auto" and within_ram else resolve_device(wanted)
    vram, on_cpu = Setting("vram_budget"), Setting("device", "cpu")
    if within_ram and (device != "cpu" or on_gpu):
        other = vram if device == "cpu" else Setting("device", wanted)
        raise UsageError((Setting("ram_budget"), " does not go with ", other), remedy=(on_cpu, " without ", vram))
    if wanted == "auto" and device == "cpu" and on_gpu:
        return "stand-in"
    if device == "cpu" and on_gpu:
        remedy = (Setting("device", "stand-in"), ", or leave it out")
        raise UsageError((vram, " does not go with ", on_cpu), remedy=remedy)
    return device


def _executor(
    artifact: Artifact,
    options: ModelOptions,
    context: int,
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> Executor:
    """What computes the model: `options.device` is a device that is there."""
    device, mode, held, vram = options.device, options.mode, options.cache_format, options.vram_budget
    budget = options.ram_budget
    if budget is None and device == "cpu":
        budget = ram_budget_for(artifact.nbytes)
    if budget is not None:
        from pi_runtime.execution.disk import open_from_disk  # noqa: PLC0415  few runs need it

        # So little may be free that mapping the file is no worse.
        with nullcontext() if options.ram_budget is not None else suppress(DoesNotFitError):
            found = open_from_disk(artifact, mode, context, threads, held, budget, options.kv_budget)
            if options.ram_budget is None:
                found.notice = "the model is larger than the free memory: neurons come from disk"
            return found
    if device == "cpu":
        return CpuExecutor(artifact, mode, context, threads, held)
    if device == "stand-in":
        taken = choose_plan(artifact, context, sys.maxsize if vram is None else vram)
        return StandInExecutor(artifact, mode, threads, taken, held)
    if held != "auto":
        raise DeviceError(
            (Setting("cache_format", held), " does not go with a GPU"),
            remedy=(Setting("device", "cpu"), ", or leave the format out"),
        )
    from pi_runtime.cuda.opening import open_on_gpu  # noqa: PLC0415  needs torch

    index = int(device.partition(":")[2])
    return open_on_gpu(artifact, mode, context, threads, index=index, vram_budget=vram, progress=progress)


def _check_mode(artifact: Artifact, mode: str) -> None:
    if mode == "predicted" and all(RUNGS[layer.rung].exact for layer in artifact.manifest.layers):
        raise UsageError(
            (f"{artifact.path}: ", Setting("mode", "predicted"), ", but the artifact has no predictors"),
            remedy=(Setting("mode", "auto"), ", or train predictors: pi-compile train RECIPE, then pack again"),
        )


def _context(manifest: Manifest, wanted: int | None) -> int:
    longest = manifest.decoder.context_length
    if wanted is None:
        return min(longest, DEFAULT_CONTEXT)
    if not 2 <= wanted <= longest:
        raise UsageError(
            setting=Setting("context", wanted), expected=f"2 to {longest}, the context this model was made for"
        )
    return wanted


class Model:
    """A loaded artifact; a context manager that closes the file. Make one with `load`.

    Several threads may use one model, each with a cache or a generation of its own: its steps take turns.

    >>> with load("artifact.pi", device="cpu") as model:
    ...     logits = model.logits([1, 2, 3])
    ...     text = "".join(model.generate("Once upon", max_tokens=4))
    >>> logits.dtype, logits.shape
    (dtype('float32'), (3, 257))
    """

    def __init__(self, artifact: Artifact, mode: str, executor: Executor, notice: str | None = None) -> None:
        self.notice = executor.notice if notice is None else notice
        """A message for the user about where it runs, if there is one."""
        self._artifact, self.executor = artifact, executor
        self.mode = mode
        self.context = executor.context
        self._page = executor.new_pool().page
        self._step_times = StepTimes()
        self.tokenizer = Tokenizer(
            artifact.file("tokenizer.json"), artifact.manifest.text, vocab_size=artifact.manifest.decoder.vocab_size
        )

    @property
    def allocation(self) -> Allocation | None:
        """The plan that this run follows, and the bytes of GPU memory it takes; None where the CPU has everything."""
        return self.executor.allocation

    @property
    def plan(self) -> Plan | None:
        """The stored plan that this run follows; None where the CPU has everything."""
        return None if self.allocation is None else self.allocation.plan

    @property
    def device(self) -> str:
        """The device it runs on: `cpu`, `stand-in`, or a GPU by its name."""
        return self.executor.device_name

    @property
    def digest(self) -> str:
        """The digest of the artifact's content."""
        return self._artifact.digest

    @property
    def nbytes(self) -> int:
        """Bytes of the artifact."""
        return self._artifact.nbytes

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest."""
        return self._artifact.manifest

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        cache: KVCache | None = None,
        speculate: str | int = "auto",
        **settings: Unpack[AnswerSettings],
    ) -> Generation:
        """Continue a prompt: text, or token ids taken as they are. Yields pieces of text.

        `max_tokens`: None goes on until the model ends or the context is full. `min_tokens`: up to so many neither
        the model nor a stop string ends the text. `sampling`: None takes the checkpoint's generation defaults.
        `stop`: texts that end the answer. `logprobs`: keep the log-probability of each token, and of so many likeliest
        ones. `grammar`: what the text must be. `expected`: tokens that are likely to come, as a help for guesses.
        `cache`: one that earlier calls used; the part of the prompt that it holds is not computed again. `speculate`:
        how many tokens are guessed at a time and checked together, which changes no text: `auto` as many as pay,
        `off`, or a number.

        Raises PromptError where the prompt is empty, outside the vocabulary, or leaves no room, and UsageError for an
        impossible setting.
        """
        speculation = self.speculation(speculate, self._step_times)
        answer = self.new_answer(prompt, **settings)
        held = self.new_cache() if cache is None else self._checked_cache(cache)
        return Generation(self.executor, held, answer, speculation)

    def speculation(self, setting: str | int, times: StepTimes) -> Speculation:
        """The rule for guesses that a setting of `speculate` names. Raises UsageError for an impossible one."""
        # A plan divides the work of one token; several tokens with selection would run one after the other.
        return Speculation(setting, times, can_gain=self.plan is None, most=BLOCK_TOKENS)

    def new_answer(
        self,
        prompt: str | Sequence[int],
        *,
        selected: Sequence[bool] = (),
        stop_tokens: Sequence[int] = (),
        **settings: Unpack[AnswerSettings],
    ) -> Answer:
        """An answer that has not begun, with all that `generate` was asked for checked.

        `selected` and `stop_tokens` are those of `Answer`.
        """
        if settings.get("sampling") is None:
            settings["sampling"] = Sampling.from_generation_config(self.manifest.generation)
        if settings.get("expected"):
            settings["expected"] = self._checked_ids(settings["expected"]).tolist()
        return Answer(
            self.tokenizer,
            self._prompt_ids(prompt),
            context=self.context,
            vocab_size=self.manifest.decoder.vocab_size,
            end_ids=self.manifest.text.end_ids,
            selected=selected,
            stop_tokens=self._checked_ids(stop_tokens).tolist() if len(stop_tokens) else (),
            **settings,
        )

    def score(
        self, prompt: str | Sequence[int], *, first: int = 1, top: int = 0, cache: KVCache | None = None
    ) -> list[TokenLogprobs]:
        """Log-probabilities of a prompt's tokens from number `first` on, and of the `top` likeliest in their places.

        They are those of `logits`, with the mode's selection at every position. `cache`: one that earlier calls of
        `logits` or `score` used; positions before `first` that it holds are not computed again.
        """
        scoring = self.new_scoring(prompt, first=first, top=top)
        cache = self.new_cache() if cache is None else self._checked_cache(cache)
        if not scoring.complete:
            cache.keep_common_prefix(scoring.tokens)
            cache.truncate(scoring.reusable)
            for block in self._blocks(np.array(scoring.tokens, np.int64), cache):
                scoring.take(block.logits_TV, cache.length)
        return scoring.logprobs

    def new_scoring(self, prompt: str | Sequence[int], *, first: int, top: int) -> Scoring:
        """A scoring that has not begun, with all that `score` was asked for checked."""
        return Scoring(self._prompt_ids(prompt), context=self.context, first=first, top=top)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids: list[int] = self._checked_ids(prompt).tolist()
        return ids

    def logits(
        self, token_ids: npt.ArrayLike, last: int | None = None, *, cache: KVCache | None = None
    ) -> npt.NDArray[np.float32]:
        """Float32 logits (T, V) for a sequence of T token ids, with the mode's selection at every position.

        `last`: return only the rows of so many positions at the end. `cache`: one that earlier calls of `logits` used;
        the positions before those rows that it holds are not computed again.
        """
        ids = self._checked_ids(token_ids)
        last = len(ids) if last is None else last
        if not 1 <= last <= len(ids):
            raise UsageError(f"logits of the last {last} positions", expected=f"1 to {len(ids)}, the tokens given")
        cache = self.new_cache() if cache is None else self._checked_cache(cache)
        cache.keep_common_prefix(ids.tolist())
        cache.truncate(len(ids) - last)
        return np.concatenate([block.logits_TV for block in self._blocks(ids, cache)])[-last:]

    def examine(self, token_ids: npt.ArrayLike) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Logits as `logits` gives them, and what was selected.

        The second array (L, 3) has for each layer the sums over all tokens of neurons that fire, rows of `first` that
        the mode reads, and neurons that fire and are kept.
        """
        blocks = list(self._blocks(self._checked_ids(token_ids), self.new_cache(), count=True))
        counts = [block.counts_L3 for block in blocks if block.counts_L3 is not None]
        return np.concatenate([block.logits_TV for block in blocks]), np.sum(counts, axis=0)

    def _blocks(self, ids: npt.NDArray[np.int64], cache: KVCache, *, count: bool = False) -> Iterator[SequenceResult]:
        """Run the tokens that the cache does not hold yet, with logits of all; yields a result for each block."""
        if len(ids) > self.context:
            raise PromptError(f"{len(ids)} tokens", expected=f"at most the context of {self.context}")
        for start in range(cache.length, len(ids), BLOCK_TOKENS):
            block = ids[start : start + BLOCK_TOKENS]
            yield self._step(SequenceStep(cache=cache, tokens=block, select=True, logits="all", count=count))

    def _step(self, sequence: SequenceStep) -> SequenceResult:
        return self.executor.step([sequence])[0]

    def warm_up(self) -> None:
        """Compile what a generation will run, or load it from the cache, so that its times do not include this."""
        cache = self.new_cache()
        for tokens, select in (([0, 0], False), ([0], True)):
            if cache.room >= len(tokens):
                self._step(SequenceStep(cache=cache, tokens=np.array(tokens, np.int64), select=select))

    def decode(self, token: int, cache: KVCache) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Run one token; returns logits (V,) after it, and (L, 2) rows of `first` read and neurons kept."""
        if self._checked_cache(cache).room == 0:
            raise PromptError(f"the context of {cache.context} tokens is full")
        found = self._step(SequenceStep(cache=cache, tokens=self._checked_ids([token]), select=True))
        assert found.rows_L2 is not None
        return found.logits_TV[0], found.rows_L2

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's own template (Jinja). Raises TemplateError where it has none."""
        if "chat_template.jinja" not in self.manifest.files:
            raise TemplateError(
                f"{self._artifact.path}: the model has no chat template",
                remedy=("give the text with ", Setting("prompt")),
            )
        try:
            return ChatTemplate(self._artifact.file("chat_template.jinja").decode())
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self._artifact.path}: the chat template is not UTF-8", found=error) from None

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation written by the model's own template, ready for the assistant's turn.

        Messages, `tools` and the template's further `variables`, such as `enable_thinking`, are those of
        `ChatTemplate.render`, which says what it raises. Without `add_generation_prompt` the assistant's turn does not
        begin.
        """
        text = self.manifest.text
        names = {"bos_token": text.bos_token, "eos_token": text.eos_token, **text.special_tokens, **(variables or {})}
        return self.chat_template.render(
            messages, variables=names, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def new_cache(self) -> KVCache:
        """An empty key-value cache for one sequence."""
        return self.executor.new_cache()

    def close(self) -> None:
        """Unmap the file. Using the model afterwards, or a generation that has not ended, is a UsageError."""
        if "chat_template" in vars(self):
            self.chat_template.close()
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked_cache(self, cache: KVCache) -> KVCache:
        """Check that the cache has this model's shape: kernels do not."""
        if (cache.pool.page, cache.context) != (self._page, self.context):
            raise UsageError("the cache was made for another model, context or format", remedy="model.new_cache()")
        return cache

    def _checked_ids(self, token_ids: Any) -> npt.NDArray[np.int64]:
        ids = np.ascontiguousarray(token_ids)
        vocabulary = self.manifest.decoder.vocab_size
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise PromptError("token ids must be a non-empty list of integers", found=f"{ids.dtype} {ids.shape}")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise PromptError(
                f"token id {ids.max() if ids.min() >= 0 else ids.min()}", expected=f"0 to {vocabulary - 1}"
            )
        return ids.astype(np.int64)
