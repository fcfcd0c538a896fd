"""Held out by content: what stands in one stream in the same words is taken out of the streams that are filled later.

A run of `RUN` words in a row that both have counts as the same text: a sentence or two, as in the check for
contamination of Brown et al. 2020, *Language Models are Few-Shot Learners*, appendix C. So a copy is found wherever its
passages begin, and where it is indented or wrapped differently. A word is a token without the blanks at its ends;
tokens of blanks alone do not count. A text that is spelled differently is another one.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import tokenizers

RUN = 13
"""Words in a row that two texts must share to count as the same."""
_BLANKS = " \t\r\n\u2581\u0120\u0109\u010a\u010d"
"""Blanks, and how the alphabets of SentencePiece and of byte-level BPE write them."""
_BLANK_BYTES = {"<0x09>", "<0x0A>", "<0x0D>", "<0x20>"}
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The text that is held out, as numbers of its words and runs."""

    words_V: npt.NDArray[np.uint64]
    """A number for the word of each token of the vocabulary; 0 for blanks."""
    runs: npt.NDArray[np.uint64]
    """A number for each run of words that is held out, rising."""

    @classmethod
    def nothing(cls, tokenizer: tokenizers.Tokenizer) -> Self:
        """Nothing is held out yet of what this tokenizer makes of text."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        words_V = np.zeros(max(vocabulary.values(), default=0) + 1, np.uint64)
        for token, number in vocabulary.items():
            words_V[number] = _word(token)
        return cls(words_V, np.zeros(0, np.uint64))

    def plus(self, ids: npt.NDArray[np.integer]) -> Self:
        """These tokens held out too."""
        return replace(self, runs=np.union1d(self.runs, _runs(self._words(ids)[0])))

    def rest(self, ids: Ids) -> Ids:
        """The tokens without what is held out, and without scraps shorter than `RUN` tokens beside it."""
        words, places = self._words(ids)
        found = np.flatnonzero(self._holds(_runs(words)))
        if not len(found):
            return ids
        edges = np.zeros(len(ids) + 1, np.int64)
        np.add.at(edges, places[found], 1)
        np.add.at(edges, places[found + RUN - 1] + 1, -1)
        kept = np.cumsum(edges[:-1]) == 0
        pieces = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(kept)) + 1)
        rest = [piece for piece in pieces if kept[piece[0]] and len(piece) >= RUN]
        left: Ids = ids[np.concatenate(rest)] if rest else ids[:0]
        return left

    def _holds(self, runs: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        if not len(self.runs):
            return np.zeros(len(runs), bool)
        place = np.minimum(np.searchsorted(self.runs, runs), len(self.runs) - 1)
        found: npt.NDArray[np.bool_] = self.runs[place] == runs
        return found

    def _words(self, ids: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The words of some tokens, as numbers, and their places."""
        words = self.words_V[ids]
        places = np.flatnonzero(words)
        return words[places], places


def _word(token: str) -> int:
    """A number for the word of a token; 0 for blanks alone."""
    word = token.strip(_BLANKS)
    if not word or word in _BLANK_BYTES:
        return 0
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") or 1


def _runs(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A number for each run of `RUN` words: Σ wᵢ₊ⱼ mʲ modulo 2⁶⁴."""
    n = len(words) - RUN + 1
    found = np.zeros(max(n, 0), np.uint64)
    for j in range(RUN if n > 0 else 0):
        found = found * _MULTIPLIER + words[j : j + n]
    return found
