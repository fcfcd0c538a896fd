"""What an answer is, from the definition: logits, sampler, stop strings. Nothing here is quick, and nothing is shared.

The prompt runs dense and each token of the answer with the mode's selection, one after the other. So an engine that
serves many, and `Model.generate`, can be held against something that is no relative of theirs.
"""

from collections.abc import Sequence

import numpy as np

from pi_runtime import Grammar, Model, Sampling
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.sequence.sampling import Sampler, TokenLogprobs, token_logprobs
from pi_runtime.text.tokenizer import TextStream

Found = tuple[str, list[int], str | None, list[TokenLogprobs]]
"""Text, tokens, the reason of the end, and log-probabilities."""


def before_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that is complete first, the longest of several; None where none is."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return None


def answer_of(
    model: Model,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> Found:
    """The answer to a prompt; the settings are those of `Model.generate`."""
    manifest, cache = model.manifest, model.new_cache()
    ends, vocabulary = manifest.text.end_ids, manifest.decoder.vocab_size
    state = None if grammar is None else model.tokenizer.grammars.start(grammar, len(prompt))
    allowed = None if state is None else state.allowed
    draw = Sampler(
        sampling, vocabulary, prompt_tokens=len(prompt), end_ids=ends, min_tokens=min_tokens, allowed=allowed
    )
    text, pieces, kept, reason = TextStream(model.tokenizer, after=prompt), list[str](), list[TokenLogprobs](), None
    tokens, waiting, block = list(prompt), list(prompt), model.executor.block_tokens
    while reason is None:
        while waiting:
            now, waiting = waiting[:block], waiting[block:]
            select = len(tokens) > len(prompt)
            (result,) = model.executor.step([SequenceStep(cache=cache, tokens=np.array(now), select=select)])
        logits = result.logits_TV[-1]
        token = draw(logits, tokens)
        if logprobs is not None:
            kept.append(token_logprobs(logits, token, logprobs))
        if token in ends:
            reason = "end"
            break
        tokens.append(token)
        pieces.append(text.push(token))
        waiting = [token]
        if before_stop("".join(pieces[min_tokens:]), stop) is not None:
            reason = "stop"
        elif state is not None and state.is_complete(tokens):
            reason = "end"
        elif len(pieces) == max_tokens:
            reason = "length"
        elif len(tokens) > model.context:
            reason = "context"
    rest = "".join(pieces[min_tokens:]) + ("" if reason == "stop" else text.finish())
    shown = before_stop(rest, stop)
    whole = "".join(pieces[:min_tokens]) + (rest if shown is None else shown)
    return whole, tokens[len(prompt) :], reason, kept[: len(pieces)]
