"""Text as three disjoint token streams.

Documents are split into passages, which are shuffled: any stretch of a stream is a sample of the whole. Streams are
filled one after the other, what is held out first, and each without the text that those before it hold (`held_out`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import tokenizers

from pi_compile.corpus import python_docs
from pi_compile.corpus.held_out import HeldOut
from pi_compile.corpus.sources import PASSAGE, Notice, check_disjoint, sampled, units
from pi_compile.errors import CorpusError
from pi_compile.files import read_arrays, write_arrays
from pi_runtime.errors import size
from pi_runtime.files import CHARACTERS

Stream = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """The sources of a corpus, and how much of their text is taken."""

    text: tuple[str, ...]
    """Sources to fit on; the tune stream is a part of theirs."""
    report: tuple[str, ...]
    """Sources to report on; () to report on a part of the first stream."""
    field: str
    """The column with the text, in JSON, Parquet and hub data."""
    fit_tokens: int
    tune_tokens: int
    report_tokens: int
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Streams:
    """Three disjoint token streams."""

    fit: Stream
    tune: Stream
    report: Stream

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_arrays(path, {"fit": self.fit, "tune": self.tune, "report": self.report})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote. Raises ProfileError for a damaged one."""
        stored = read_arrays(path)
        return cls(stored["fit"], stored["tune"], stored["report"])


def read_streams(
    spec: CorpusSpec,
    folder: Path,
    tokenizer: tokenizers.Tokenizer,
    window: int,
    notice: Notice = lambda _line: None,
) -> Streams:
    """Tokenise the corpus. Relative paths start from `folder`; each stream must have at least `window` tokens.

    `notice` gets what is read, and what is left out. Raises CorpusError if there is no text, a file cannot be read,
    a text is in both corpora, or one is too short.
    """
    check_disjoint(spec.text, spec.report, folder)
    for name in ("fit_tokens", "tune_tokens", "report_tokens"):
        if getattr(spec, name) < window:
            raise CorpusError(
                f"[corpus] {name}",
                expected=f"at least one window of {window} tokens",
                found=getattr(spec, name),
                remedy=f"raise {name}, or lower [profile] window",
            )
    return _Reading(spec, folder, tokenizer, window, cache(notice)).streams()  # a line is told once


@dataclass(frozen=True)
class _Reading:
    """One reading of a corpus."""

    spec: CorpusSpec
    folder: Path
    tokenizer: tokenizers.Tokenizer
    window: int
    notice: Notice

    def streams(self) -> Streams:
        spec, held_out, apart = self.spec, HeldOut.nothing(self.tokenizer), dict[str, Stream]()
        if spec.report:
            amounts = {"report": spec.report_tokens}
            apart, held_out, _ = self._filled(spec.report, amounts, python_docs.HELD_OUT, held_out, self.window)
            if len(apart["report"]) < self.window:
                raise CorpusError(
                    f"[corpus] report has {len(apart['report']):,} tokens",
                    expected=f"at least one window of {self.window}",
                    remedy="add text to it, or lower [profile] window",
                )
        amounts = {"tune": spec.tune_tokens, "report": 0 if spec.report else spec.report_tokens, "fit": spec.fit_tokens}
        least = amounts["tune"] + amounts["report"] + self.window
        found, _, left_out = self._filled(spec.text, amounts, python_docs.TRAIN, held_out, least)
        self._enough(sum(map(len, found.values())), least, left_out)
        if left_out:
            self.notice(f"left out: {left_out:,} tokens of [corpus] text, whose words are in what is held out too")
        return Streams(**found | apart)

    def _enough(self, total: int, least: int, left_out: int) -> None:
        if total < least:
            also = f"; {left_out:,} more are left out, whose words are in what is held out too" if left_out else ""
            raise CorpusError(
                f"[corpus] text has {total:,} tokens{also}",
                expected=f"at least {least:,}: tune_tokens, report_tokens and one window",
                remedy="add text, or lower tune_tokens and report_tokens",
            )

    def _filled(
        self, sources: Sequence[str], amounts: dict[str, int], split: str, held_out: HeldOut, least: int
    ) -> tuple[dict[str, Stream], HeldOut, int]:
        """Streams of at most so many tokens each, in this order, from a sample of some sources.

        All text is read where a sample has fewer than `least` tokens. Returns what is held out then, too, and the
        tokens that were left out.
        """
        known = units(sources, self.folder, self.spec.field, split, self.notice)
        wanted, there = CHARACTERS * sum(amounts.values()), sum(unit.nbytes or 0 for unit in known)
        much = (
            [f"a sample of about {size(wanted)} of {size(there)}" if there > wanted else size(there)] if there else []
        )
        much += [f"up to {size(wanted)} of {unit.name}" for unit in known if unit.nbytes is None]
        self.notice(f"reading [corpus] {', '.join(sources)}: {', '.join(much)}")
        found = _filled(self._passages(sampled(known, wanted, self.spec.seed), sources), amounts, held_out)
        if there > wanted and sum(map(len, found[0].values())) < least:
            self.notice("the sample has too little text: all of it is read")
            found = _filled(self._passages(sampled(known, there, self.spec.seed), sources), amounts, held_out)
        return found

    def _passages(self, documents: Iterator[str], sources: Sequence[str]) -> Iterator[Stream]:
        """The tokens of the passages, shuffled."""
        passages = [
            document[start : start + PASSAGE] for document in documents for start in range(0, len(document), PASSAGE)
        ]
        if not passages:
            raise CorpusError(
                "the corpus has no text", found=", ".join(sources), remedy="name files that are not empty"
            )
        for index in np.random.default_rng(self.spec.seed).permutation(len(passages)):
            yield np.array(self.tokenizer.encode(passages[index], add_special_tokens=False).ids, np.int32)


def _filled(
    passages: Iterator[Stream], amounts: dict[str, int], held_out: HeldOut
) -> tuple[dict[str, Stream], HeldOut, int]:
    """Streams of at most so many tokens, each held out from the next; what is held out then, and tokens left out."""
    streams, left_out = {}, 0
    for name, amount in amounts.items():
        found, count = [np.zeros(0, np.int32)], 0
        while count < amount and (passage := next(passages, None)) is not None:
            found.append(held_out.rest(passage))
            count += len(found[-1])
            left_out += len(passage) - len(found[-1])
        stream = np.concatenate(found)
        streams[name] = stream[:amount]
        held_out = held_out.plus(streams[name])
        passages = itertools.chain([stream[amount:]], passages)
    return streams, held_out, left_out
