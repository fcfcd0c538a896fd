"""Text as an endless row of packed sequences from a weighted mixture of sources, the same whatever reads it.

    documents → passages → blocks of passages, in an order of their own → tokens → sequences of one length

The source of sequence i, and the order of each block, come from generators keyed by the seed and their numbers. So the
row depends on nothing else, a position in it is a few integers, and any number of processes can share it out. What is
held out is decided by a passage's content, and its words are taken out of all other text (`corpus.held_out`).
"""

import hashlib
import itertools
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from pi_compile.corpus import HELD_OUT, HUB, PASSAGE, PYTHON, TRAIN, HeldOut, check_disjoint, documents, source_files
from pi_compile.errors import CorpusError
from pi_compile.files import file_digest
from pi_compile.sparsification.recipe import MixtureSection

Ids = npt.NDArray[np.int64]

BLOCK = 2048
"""Passages that are read and put in order together: 8 MB of text."""
PARTS, TUNE, REPORT = 20, 0, 1
"""The parts that passages fall into by their hash, and those that are held out to tune and to report on."""


@dataclass(frozen=True)
class Packing:
    """How text becomes sequences."""

    tokenizer: tokenizers.Tokenizer
    end_id: int | None
    """The token between two documents; None for none."""
    window: int
    """Tokens of a sequence."""
    held_out: HeldOut | None = None
    """What no sequence may have."""

    def without(self, sequences: Ids) -> "Packing":
        """The same, with these sequences held out of those that are made."""
        held_out = self.held_out or HeldOut.nothing(self.tokenizer)
        return replace(self, held_out=held_out.plus(sequences.ravel()))

    def sequences(self, passages: Sequence[tuple[str, bool]]) -> Ids:
        """Passages, each with whether its document ends with it → (n, window) sequences; what is over is dropped."""
        encoded = self.tokenizer.encode_batch([text for text, _ in passages], add_special_tokens=False)
        ids: list[int] = []
        for found, (_, ends) in zip(encoded, passages, strict=True):
            ids += found.ids if self.held_out is None else self.held_out.rest(np.array(found.ids, np.int32)).tolist()
            if ends and self.end_id is not None:
                ids.append(self.end_id)
        n = len(ids) // self.window
        return np.array(ids[: n * self.window], np.int64).reshape(n, self.window)


class Source:
    """One source's sequences without an end: after its last document it begins again, in another order."""

    def __init__(
        self, name: str, key: Sequence[int], read: Callable[[], Iterator[str]], packing: Packing, kept: Sequence[int]
    ) -> None:
        self.name, self._key, self._read, self._packing, self._kept = name, key, read, packing, frozenset(kept)
        self.position = {"epoch": 0, "document": 0, "sequence": 0}
        """Times it was read through; documents before the present block; sequences taken from that block."""
        self._next_document = 0
        self._waiting: Iterator[str] | None = None
        self._block: Ids | None = None

    def restore(self, position: dict[str, int]) -> None:
        """Go on from a position that another source of the same key and text had."""
        self.position = dict(position)
        self._block, self._waiting = None, None

    def take(self) -> Ids:
        """The next sequence. Raises CorpusError where the text is shorter than one."""
        if self._block is None:
            self._read_block()
        while self._block is not None and self.position["sequence"] >= len(self._block):
            self.position |= {"document": self._next_document, "sequence": 0}
            self._read_block()
        assert self._block is not None
        self.position["sequence"] += 1
        sequence: Ids = self._block[self.position["sequence"] - 1]
        return sequence

    def _read_block(self) -> None:
        """Read the block that begins at the position's document, or the first one of the next time through."""
        passages = self._passages()
        if not passages:
            if self.position["document"] == 0:
                raise self._too_short()
            self.position = {"epoch": self.position["epoch"] + 1, "document": 0, "sequence": 0}
            self._waiting = None
            passages = self._passages()
        key = [*self._key, self.position["epoch"], self.position["document"]]
        order = np.random.default_rng(key).permutation(len(passages))
        self._block = self._packing.sequences([passages[i] for i in order])
        if len(self._block) == 0 and self.position["document"] == 0 and self._at_end():
            raise self._too_short()

    def _passages(self) -> list[tuple[str, bool]]:
        if self._waiting is None:
            self._waiting = itertools.islice(self._read(), self.position["document"], None)
            self._next_document = self.position["document"]
        found: list[tuple[str, bool]] = []
        for document in self._waiting:
            self._next_document += 1
            found += passages_of(document, self._kept)
            if len(found) >= BLOCK:
                break
        return found

    def _at_end(self) -> bool:
        assert self._waiting is not None
        rest = next(self._waiting, None)
        if rest is not None:
            self._waiting = itertools.chain([rest], self._waiting)
        return rest is None

    def _too_short(self) -> CorpusError:
        return CorpusError(
            f"{self.name}: too little text",
            expected=f"at least one sequence of {self._packing.window} tokens that is not held out",
            remedy="add text, or lower [train] window",
        )


def passages_of(document: str, kept: frozenset[int]) -> Iterator[tuple[str, bool]]:
    """The passages of a document that fall into the parts kept, each with whether it is the document's last one."""
    for start in range(0, len(document), PASSAGE):
        text = document[start : start + PASSAGE]
        if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % PARTS in kept:
            yield text, start + PASSAGE >= len(document)


class Mixture:
    """Sequences of several sources, each as often as its weight says."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int) -> None:
        self._sources, self._seed = sources, seed
        self._shares = np.array(weights) / np.sum(weights)
        self._taken, self._digest = 0, ""

    def take(self, n: int) -> Ids:
        """The next n sequences, (n, window)."""
        rows = []
        for i in range(self._taken, self._taken + n):
            source = np.random.default_rng([self._seed, 0, i]).choice(len(self._shares), p=self._shares)
            rows.append(self._sources[source].take())
        self._taken += n
        taken = np.stack(rows)
        self._digest = hashlib.sha256(self._digest.encode() + taken.astype("<i4").tobytes()).hexdigest()
        return taken

    @property
    def position(self) -> dict[str, Any]:
        """What `restore` takes; `digest` is a hash of all sequences taken, each step's on top of those before."""
        return {
            "taken": self._taken,
            "digest": self._digest,
            "sources": {source.name: dict(source.position) for source in self._sources},
        }

    def restore(self, position: dict[str, Any]) -> None:
        """Go on from a position."""
        self._taken, self._digest = position["taken"], position["digest"]
        for source in self._sources:
            source.restore(position["sources"][source.name])


@dataclass(frozen=True)
class EvaluationText:
    """Text that is never trained on, as (n, window) sequences."""

    tune: Ids
    """For evaluations during the training, steering, and the choice of a threshold."""
    held_out: Ids
    """For the figures at the end, and nothing else."""

    def left_out(self, packing: Packing) -> Packing:
        """How text becomes sequences that have nothing of this text."""
        return packing.without(self.tune).without(self.held_out)


def open_mixture(corpus: MixtureSection, folder: Path, packing: Packing, seed: int) -> Mixture:
    """The mixture of a recipe, from its first sequence. Raises CorpusError for a source that is not there."""
    check_disjoint(corpus.text, corpus.report, folder)
    kept = set(range(PARTS)) - ({TUNE} if corpus.report else {TUNE, REPORT})

    def reader(name: str) -> Callable[[], Iterator[str]]:
        return lambda: documents([name], folder, corpus.field, TRAIN)

    sources = [Source(name, [seed, 1 + n], reader(name), packing, sorted(kept)) for n, name in enumerate(corpus.text)]
    return Mixture(sources, corpus.weights, seed)


def read_evaluation_text(corpus: MixtureSection, folder: Path, packing: Packing) -> EvaluationText:
    """The tune text and the held-out text of a recipe, from each source as much as its weight says.

    Raises CorpusError where there is too little.
    """

    def read(
        sources: Sequence[str], weights: Sequence[float], kept: set[int], tokens: int, split: str, packing: Packing
    ) -> Ids:
        found = []
        for name, weight in zip(sources, weights, strict=True):
            wanted = max(1, round(tokens * weight / sum(weights) / packing.window))
            texts = documents([name], folder, corpus.field, split)
            passages = (p for text in texts for p in passages_of(text, frozenset(kept)))
            found.append(_first(passages, wanted, packing))
        sequences = np.concatenate(found)
        if len(sequences) < 2:
            raise CorpusError(
                f"[corpus] {', '.join(sources)}: too little text that is not trained on",
                expected=f"at least two sequences of {packing.window} tokens",
                found=f"{len(sequences)}",
                remedy="add text, name [corpus] report, or lower [train] window",
            )
        return sequences

    if corpus.report:
        equal = [1.0] * len(corpus.report)
        held_out = read(corpus.report, equal, set(range(PARTS)), corpus.report_tokens, HELD_OUT, packing)
    else:
        held_out = read(corpus.text, corpus.weights, {REPORT}, corpus.report_tokens, TRAIN, packing)
    tune = read(corpus.text, corpus.weights, {TUNE}, corpus.tune_tokens, TRAIN, packing.without(held_out))
    return EvaluationText(tune, held_out)


def _first(passages: Iterator[tuple[str, bool]], wanted: int, packing: Packing) -> Ids:
    """The first sequences of some passages, up to the number wanted."""
    found: list[tuple[str, bool]] = []
    sequences = packing.sequences([])
    while len(sequences) < wanted:
        more = list(itertools.islice(passages, max(1, len(found))))
        if not more:
            break
        found += more
        sequences = packing.sequences(found)
    return sequences[:wanted]


def source_digests(corpus: MixtureSection, folder: Path) -> dict[str, str]:
    """What says which text was read: sha256 of local files, the revision of hub data, and Python's version."""
    names = [*corpus.text, *corpus.report]
    files = {file.as_posix(): file_digest(file) for file in source_files(names, folder)}
    hub = {name.partition("@")[0]: name.partition("@")[2] for name in names if name.startswith(HUB)}
    return files | hub | ({PYTHON: platform.python_version()} if PYTHON in names else {})
