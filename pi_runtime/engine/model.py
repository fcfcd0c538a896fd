"""An open artifact as a model: logits and text.

Shape letters: T tokens, V vocabulary, L layers.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, Unpack, get_args

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Plan
from pi_runtime.artifact.sizes import parameters
from pi_runtime.engine.chat import ChatModel
from pi_runtime.engine.generation import Generation, run_alone
from pi_runtime.errors import PromptError, Setting, UsageError
from pi_runtime.execution.executor import Executor, Observer, SequenceResult, SequenceStep
from pi_runtime.execution.firing import Firing
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.execution.plan_choice import Allocation
from pi_runtime.sequence.answer import AnswerSequence, check_prompt
from pi_runtime.sequence.drafts import Acceptance, Speculation, StepTimes
from pi_runtime.sequence.embedding import EmbeddingSequence, Pooling
from pi_runtime.sequence.head_draft import HEAD_RIGHT, HeadDraft
from pi_runtime.sequence.sampling import Sampling, TokenLogprobs
from pi_runtime.sequence.sequence import ReadSequence, ScoreSequence
from pi_runtime.sequence.settings import AnswerSettings, names_settings
from pi_runtime.sequence.stats import Stats
from pi_runtime.text.tokenizer import Tokenizer


class Model(ChatModel):
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
        self._artifact, self.executor, self.mode = artifact, executor, mode
        self.context = executor.context
        self._classes = executor.new_pool().classes
        self._step_times = StepTimes()
        head = executor.guess_head
        self._head = None if head is None else partial(HeadDraft, head, Acceptance(right=HEAD_RIGHT))
        self.tokenizer = Tokenizer(
            artifact.file("tokenizer.json"), artifact.manifest.text, vocab_size=artifact.manifest.decoder.vocab_size
        )

    def __repr__(self) -> str:
        name, layers, mib = self._artifact.path.name, self.manifest.decoder.n_layers, self.nbytes / 2**20
        return f"<Model {name}: {layers} layers, mode {self.mode}, context {self.context}, {mib:,.1f} MiB>"

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
    def name(self) -> str:
        """The name of the artifact's file."""
        return self._artifact.path.name

    @property
    def parameters(self) -> int:
        """How many numbers its weights are."""
        return parameters(self.manifest.decoder)

    @property
    def nbytes(self) -> int:
        """Bytes of the artifact."""
        return self._artifact.nbytes

    @names_settings
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        cache: KVCache | None = None,
        speculate: str | int = "auto",
        **settings: Unpack[AnswerSettings],
    ) -> Generation:
        """Continue a prompt: text, or token ids taken as they are. Yields the text in parts.

        `max_tokens`: None goes on until the model ends or the context is full. `min_tokens`: up to so many neither
        the model nor a stop string ends the text. `sampling`: None takes the checkpoint's generation defaults.
        `stop`: texts that end the answer. `logprobs`: keep the log-probability of each token, and of so many likeliest
        ones. `grammar`: what the text must be. `expected`: tokens that are likely to come, as a help for drafts.
        `cache`: one that earlier calls used; the part of the prompt that it holds is not computed again. `speculate`:
        how many tokens are drafted at a time and checked together, which changes no text: `auto` as many as pay,
        `off`, or a number.

        Raises PromptError where the prompt is empty, outside the vocabulary, or leaves no room, and UsageError for an
        impossible setting.
        """
        speculation = self.speculation(speculate, self._step_times)
        sequence = self.new_answer(prompt, **settings)
        cache = self.new_cache() if cache is None else self._checked_cache(cache)
        return Generation(self.executor, cache, sequence, speculation)

    def speculation(self, setting: str | int, times: StepTimes) -> Speculation:
        """The rule for drafts that a setting of `speculate` names. Raises UsageError for an impossible one."""
        most = self.executor.draft_tokens
        return Speculation(setting, times, can_gain=most > 1, max_tokens=most)

    @names_settings
    def new_answer(
        self,
        prompt: str | Sequence[int],
        **settings: Unpack[AnswerSettings],
    ) -> AnswerSequence:
        """An answer that has not begun, with all that `generate` was asked for checked."""
        if settings.get("sampling") is None:
            settings["sampling"] = Sampling.from_generation_config(self.manifest.generation)
        if settings.get("expected"):
            settings["expected"] = self._checked_ids(settings["expected"]).tolist()
        return AnswerSequence(
            self.tokenizer,
            self._prompt_ids(prompt),
            context=self.context,
            vocab_size=self.manifest.decoder.vocab_size,
            end_ids=self.manifest.text.end_ids,
            head=self._head,
            **settings,
        )

    def score(
        self, prompt: str | Sequence[int], *, first: int = 1, top: int = 0, cache: KVCache | None = None
    ) -> list[TokenLogprobs]:
        """Log-probabilities of a prompt's tokens from number `first` on, and of the `top` likeliest in their places.

        They are those of `logits`, with the mode's selection at every position. `cache`: one that earlier calls of
        `logits` or `score` used; positions before `first` that it holds are not computed again.
        """
        sequence = self.new_scoring(prompt, first=first, top=top)
        cache = self.new_cache() if cache is None else self._checked_cache(cache)
        if not sequence.complete:
            for _ in run_alone(self.executor, cache, sequence, self.speculation("off", self._step_times)):
                pass  # it has no text
        return sequence.logprobs

    def new_scoring(self, prompt: str | Sequence[int], *, first: int, top: int) -> ScoreSequence:
        """A scoring that has not begun, with all that `score` was asked for checked."""
        return ScoreSequence(self._prompt_ids(prompt), context=self.context, first=first, top=top)

    def read(self, prompt: str | Sequence[int], cache: KVCache) -> Stats:
        """Read a prompt ahead into a cache: it is computed, and nothing is drawn; returns the figures.

        A later prompt that begins with the same tokens is continued from there, by `generate` with this cache.
        """
        sequence, speculation = self.new_reading(prompt), self.speculation("off", self._step_times)
        for _ in run_alone(self.executor, self._checked_cache(cache), sequence, speculation):
            pass  # it has no text
        return sequence.stats

    def new_reading(self, prompt: str | Sequence[int]) -> ReadSequence:
        """A prompt to be read ahead, checked. Raises errors as `new_answer` does."""
        ids = self._prompt_ids(prompt)
        check_prompt(ids, self.context)
        sequence = ReadSequence(ids)
        sequence.ends_of_messages = self.manifest.text.end_ids
        return sequence

    def embed(self, prompt: str | Sequence[int], pooling: Pooling = "mean") -> list[float]:
        """The vector of a text, of length 1: what the model computes of its tokens behind the last layer and its norm.

        `pooling`: the mean over all tokens, or the `last` one. A model that was trained to write is a poor judge of
        likeness; one that was trained for embeddings says which pooling it wants. Raises UsageError on a GPU.
        """
        sequence, speculation = self.new_embedding(prompt, pooling), self.speculation("off", self._step_times)
        for _ in run_alone(self.executor, self.new_cache(), sequence, speculation):
            pass  # it has no text
        return sequence.vector

    def new_embedding(self, prompt: str | Sequence[int], pooling: Pooling) -> EmbeddingSequence:
        """A text to be embedded, checked. Raises errors as `embed` does."""
        if not self.executor.keeps_states:
            raise UsageError(f"embeddings on {self.device}", remedy=("run it on the CPU: ", Setting("device", "cpu")))
        if pooling not in get_args(Pooling):
            raise UsageError(f"pooling {pooling!r}", expected=" or ".join(get_args(Pooling)))
        decoder = self.manifest.decoder
        norm = partial(_final_norm, decoder=decoder, array=self._artifact.array)
        ids = self._prompt_ids(prompt)
        return EmbeddingSequence(ids, context=self.context, layers=decoder.n_layers, norm=norm, pooling=pooling)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return [*self._checked_ids(prompt).tolist()]

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

    def examine(
        self, token_ids: npt.ArrayLike, *, cache: KVCache | None = None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Logits as `logits` gives them, and what was selected.

        The second array (L, 3) has for each layer the sums over all tokens of neurons that fire, rows of `first` that
        the mode reads, and neurons that fire and are kept. `cache`: one that holds the first tokens; they are left out.
        """
        ids, cache = self._checked_ids(token_ids), self.new_cache() if cache is None else self._checked_cache(cache)
        firing = Firing(self._artifact, self.mode)
        logits_TV = np.concatenate([block.logits_TV for block in self._blocks(ids, cache, firing)])
        return logits_TV, firing.counts_L3

    def _blocks(
        self, ids: npt.NDArray[np.int64], cache: KVCache, observer: Observer | None = None
    ) -> Iterator[SequenceResult]:
        """Run the tokens that the cache does not hold yet, with logits of all; yields a result for each block."""
        if len(ids) > self.context:
            raise PromptError(
                f"{len(ids)} tokens",
                expected=f"at most the context of {self.context}",
                remedy=("shorten the text, or raise ", Setting("context")),
            )
        for start in range(cache.length, len(ids), BLOCK_TOKENS):
            block = ids[start : start + BLOCK_TOKENS]
            yield self._step(SequenceStep(cache=cache, tokens=block, select=True, logits="all", observer=observer))

    def _step(self, sequence: SequenceStep) -> SequenceResult:
        sequence.cache.kept = None  # of an answer, whose place it is no more
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
            raise PromptError(
                f"the context of {cache.context} tokens is full", remedy=("begin anew, or raise ", Setting("context"))
            )
        found = self._step(SequenceStep(cache=cache, tokens=self._checked_ids([token]), select=True))
        assert found.rows_L2 is not None
        return found.logits_TV[0], found.rows_L2

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
        if (cache.pool.classes, cache.context) != (self._classes, self.context):
            raise UsageError("the cache was made for another model, context or format", remedy="model.new_cache()")
        return cache

    def _checked_ids(self, token_ids: Any) -> npt.NDArray[np.int64]:
        return _checked_ids(token_ids, self.manifest.decoder.vocab_size)


def _checked_ids(token_ids: Any, vocabulary: int) -> npt.NDArray[np.int64]:
    """Token ids as an array. Raises PromptError for anything but a list of ids of a vocabulary of this size."""
    ids = np.ascontiguousarray(token_ids)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise PromptError("token ids must be a non-empty list of integers", found=f"{ids.dtype} {ids.shape}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise PromptError(f"token id {ids.max() if ids.min() >= 0 else ids.min()}", expected=f"0 to {vocabulary - 1}")
    return ids.astype(np.int64)


def _final_norm(
    x_TD: npt.NDArray[np.float32], decoder: Decoder, array: Callable[[str], npt.NDArray[Any]]
) -> npt.NDArray[np.float64]:
    """What the head would read: x · weight / √(mean(x²) + eps), less the mean and with a bias where the norm is
    LayerNorm; x itself where there is no norm. Each row by itself, in float64."""
    found_TD = x_TD.astype(np.float64)
    if not decoder.final_norm:
        return found_TD
    if decoder.norm != "rms":
        found_TD -= found_TD.mean(axis=1, keepdims=True)
    found_TD /= np.sqrt(np.square(found_TD).mean(axis=1, keepdims=True) + decoder.norm_eps)
    found_TD *= array("final_norm/weight")
    return found_TD if decoder.norm == "rms" else found_TD + array("final_norm/bias")
