"""What a grammar takes."""

from pi_runtime.text.grammar import Grammar
from pi_runtime.text.tokenizer import Tokenizer
from support.synthetic import END_ID


def takes(tokenizer: Tokenizer, grammar: Grammar | None, text: str) -> bool:
    """Whether a text, and then its end, follows from the grammar."""
    assert grammar is not None
    state, ids = tokenizer.grammars.start(grammar), [*tokenizer.encode(text), END_ID]
    return all(state.allowed(ids[:n])[token] for n, token in enumerate(ids))
