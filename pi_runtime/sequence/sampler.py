"""From logits to the next token: what `sampling` says, then one draw.

A draw depends on the seed, the number of the answer and the position alone, not on the draws before it.

Log-probabilities that are reported are those of the model's own logits, before all of this, as vLLM's are by default:
they say what the model holds of a token whatever the settings, and agree with those of a prompt.
"""

from collections.abc import Callable, Iterable

import numpy as np

from pi_runtime.errors import Setting, UsageError
from pi_runtime.sequence.logprobs import check_finite
from pi_runtime.sequence.sampling import Float32s, Ids, Mask, Sampling, candidates, penalise, penalise_repeats


class Sampler:
    """Chooses the next token of a sequence. It has no state: the same tokens before it give the same choice.

    `prompt_tokens`: how many of these are the prompt's. `end_ids`: tokens that end a text, which come only once the
    answer has `min_tokens` tokens, or where a grammar lets nothing else follow. `allowed`: says for the
    tokens so far, prompt included, which ones a grammar lets follow.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        *,
        prompt_tokens: int = 0,
        end_ids: Iterable[int] = (),
        min_tokens: int = 0,
        allowed: Callable[[Ids], Mask] | None = None,
    ) -> None:
        self._allowed = allowed
        self.sampling, self._vocab_size = sampling.seeded(), vocab_size
        self._prompt_tokens, self._min_tokens = prompt_tokens, min_tokens
        self._end_ids = np.array(list(end_ids), np.int64)
        self._bias_ids = np.array(list(sampling.logit_bias), np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), np.float32)
        outside = [token for token in sampling.logit_bias if token >= vocab_size]
        if outside:
            raise UsageError(f"token id {outside[0]}", setting=Setting("logit_bias"), expected=f"0 to {vocab_size - 1}")
        streams = np.random.SeedSequence(self.sampling.seed, spawn_key=(sampling.number,))
        self._key = streams.generate_state(2, np.uint64)

    def __call__(self, logits: Float32s, seen_ids: Ids) -> int:
        """Choose the next id from float32 logits (vocabulary,) and every id so far, prompt included.

        Raises ArtifactError for logits without meaning: a NaN, +inf, or −inf everywhere. `logits` is not changed.
        """
        assert logits.shape == (self._vocab_size,), logits.shape
        s = self.sampling
        scores = self._scores(logits, seen_ids)
        check_finite(scores)
        scores = self._constrained(scores, seen_ids)
        if s.temperature == 0 or (self._allowed is not None and np.isfinite(scores).sum() == 1):
            # Where a grammar leaves one token there is nothing to draw.
            return int(scores.argmax())
        ids, p = candidates(scores, s)
        cumulated = p.cumsum()
        # Below the total even where the product rounds up to it, so that an id of probability 0 is never drawn.
        point = min(self.draw(len(seen_ids)) * cumulated[-1], np.nextafter(cumulated[-1], 0))
        return int(ids[np.searchsorted(cumulated, point, side="right")])

    def _scores(self, logits: Float32s, seen_ids: Ids) -> Float32s:
        """The logits with penalties and biases; the given ones where nothing changes them."""
        s = self.sampling
        scores = penalise(logits, seen_ids, s.repetition_penalty)
        if s.presence_penalty or s.frequency_penalty:
            answer_ids = seen_ids[self._prompt_tokens :]
            scores = penalise_repeats(scores, answer_ids, s.presence_penalty, s.frequency_penalty)
        if self._bias_ids.size:
            scores = scores.copy()
            scores[self._bias_ids] += self._bias
        return scores

    def _constrained(self, scores: Float32s, seen_ids: Ids) -> Float32s:
        """The scores, −∞ for tokens that may not follow. Raises UsageError where none is left."""
        if self._allowed is not None:
            scores = np.where(self._allowed(seen_ids), scores, np.float32(-np.inf))
        if len(seen_ids) < self._prompt_tokens + self._min_tokens and self._end_ids.size:
            others = scores.copy()
            others[self._end_ids] = -np.inf
            if self._allowed is None or others.max() > -np.inf:
                scores = others
        if scores.max() == -np.inf:
            raise UsageError(
                "no token may follow",
                found="the grammar rules out every token that the model's logits do not",
                remedy="a grammar whose texts can be spelled with the model's tokens",
            )
        return scores

    def draw(self, position: int) -> float:
        """The random number in [0, 1) for a position: a counter-based generator's, keyed by seed and number."""
        return float(np.random.Generator(np.random.Philox(key=self._key, counter=position)).random())
