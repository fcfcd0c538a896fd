"""What rounding costs is measured before anything is packed, and refused where it is more than the recipe allows.

Measured is every recipe with a part that is not kept bit for bit. In 8 bits and more little is lost as a rule, but not
where values of very different size share a block, or lie below what binary16 has: a few windows tell.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.calibration import quantising
from pi_compile.calibration.quantising import RoundingLoss, coarse
from pi_compile.checkpoint import Checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.packing import ALL_KEPT, PackSpec, part_formats, rounded_parts, specs_of
from pi_compile.pipeline.division import divide
from pi_compile.recipe import Recipe
from pi_compile.results import QuantisedWeights
from pi_runtime.artifact.formats import FORMATS, ROW_FORMATS
from pi_runtime.artifact.layout import place_arrays
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.console import Progress
from pi_runtime.errors import NotMetError, size

Tokens = npt.NDArray[np.integer]
DIVIDED_BY = 2048
"""Tokens that say what an error costs, where a division is proposed."""
FINE_TOKENS = 1024
"""Tokens that are enough where no part goes to a coarse format: what they are to find is large."""
FEW_TOKENS = 64
"""Tokens of a window, of which four are tried first there."""
SURE = 3
"""Standard errors that a loss is below the limit where no more tokens are needed."""
LEAVE_OUT = "[quality] rounding_increase = 0"


@dataclass(frozen=True)
class RoundingCheck:
    """One recipe's check: what is rounded, and how much it may cost."""

    checkpoint: Checkpoint
    recipe: Recipe
    wanted: Mapping[str, str]
    """Number format of every part, and of matrices that have another one."""
    notice: Callable[[str], None]
    progress: Callable[..., AbstractContextManager[Progress]]

    @property
    def limit(self) -> float:
        return self.recipe.quality.rounding_increase

    @property
    def formats(self) -> dict[str, str]:
        """Number format of every part of the artifact."""
        return part_formats(self.checkpoint, PackSpec(formats=self.wanted))

    @property
    def parts(self) -> dict[str, list[str]]:
        """The parts of which something is rounded, with their formats."""
        return rounded_parts(self.checkpoint, self.formats)

    @property
    def is_coarse(self) -> bool:
        """Whether something is rounded to a block format below 8 bits."""
        return any(coarse(FORMATS[name]) for names in self.parts.values() for name in names)

    def report(self, text: Callable[[], Tokens], quantised: QuantisedWeights | None) -> dict[str, Any]:
        """What rounding costs on held-out `text`, as a report names it; nothing where it is not measured."""
        if not self.parts:
            self.notice(ALL_KEPT)
        if self.limit == 0 or not self.parts:
            return {}
        loss = self._run(text(), quantised)
        found = {"perplexity_increase": loss.increase, "standard_error": loss.error, "tokens": loss.tokens}
        return {"rounding_loss": found}

    def _run(self, tokens: Tokens, quantised: QuantisedWeights | None) -> RoundingLoss:
        """Measure what rounding costs on held-out tokens.

        Raises NotMetError beyond the recipe's limit, with what would keep it and what that takes.
        """
        d, names = self.checkpoint.decoder, self._named(self.formats)
        some = self._amounts(tokens)
        ids = [quantising.text_windows(d, *amount) for amount in some]
        seconds = 2 * quantising.seconds_of_a_pass(d, *ids[0].shape)
        self.notice(
            f"measuring what {names} costs, on {ids[0].numel():,} tokens: about {seconds:,.0f} s; "
            f"{LEAVE_OUT} leaves it out"
        )
        packed = quantising.packed_values(self.checkpoint, self.formats, quantised)
        for number, ids_NT in enumerate(ids, 1):
            source_N, packed_N = self._losses(names, ids_NT, [quantising.source_values, packed])
            found = RoundingLoss.between(packed_N, source_N, ids_NT.numel())
            if found.error is not None and found.increase + SURE * found.error <= self.limit:
                break
            if number < len(ids):
                self.notice(f"{_percent(found)} on {found.tokens:,} tokens is too close: measuring on more")

        def loss(formats: Mapping[str, str]) -> RoundingLoss:
            values = quantising.packed_values(self.checkpoint, formats)
            (tried_N,) = self._losses(self._named(formats), ids_NT, [values])
            return RoundingLoss.between(tried_N, source_N, ids_NT.numel())

        if found.increase > self.limit:
            raise self._refusal(found, loss, some[-1][0])
        self.notice(f"rounding costs {_percent(found)} of perplexity; at most {self.limit:.2%} may be lost")
        return found

    def _amounts(self, tokens: Tokens) -> list[tuple[Tokens, int]]:
        """Tokens and their windows: a few that are enough where the figure is far below the limit, and all."""
        window = self.recipe.profile.window
        few = window if self.is_coarse else min(window, FEW_TOKENS)
        if not self.is_coarse:
            tokens = tokens[: max(FINE_TOKENS, 2 * window)]
        return [(tokens[: 4 * few], few), (tokens, window)][2 * 4 * few > len(tokens) :]

    def _named(self, formats: Mapping[str, str]) -> str:
        found = rounded_parts(self.checkpoint, formats)
        return ", ".join(f"{part} in {' and '.join(names)}" for part, names in found.items()) or "formats that keep all"

    def _losses(
        self, what: str, ids_NT: torch.Tensor, ways: Sequence[quantising.Values]
    ) -> list[npt.NDArray[np.float64]]:
        with self.progress(f"measuring {what}", "layers") as progress:
            return quantising.text_losses(self.checkpoint, ids_NT, ways, progress)

    def _refusal(
        self, found: RoundingLoss, loss: Callable[[Mapping[str, str]], RoundingLoss], tokens: Tokens
    ) -> NotMetError:
        here = self._bytes(self.formats)
        kept = "no other format keeps it"
        self.notice(f"perplexity rises by {_percent(found)}: finding a format that keeps {self.limit:.2%}")
        for formats in self._finer():
            try:
                tried = loss(formats)
            except CheckpointError:  # values that this format cannot hold
                continue
            if tried.increase <= self.limit:
                keys = ", ".join(f'{part} = "{formats[part]}"' for part in self.parts)
                much = f"{size(self._bytes(formats))} in place of {size(here)}"
                kept = f"[pack] {keys} keeps it, at {_percent(tried)}: {much}"
                break
        if self.is_coarse:
            kept += self._divided(tokens[:DIVIDED_BY])
        if self.is_coarse and not self.recipe.quantise.tokens:
            kept += "; `build` with [quantise] tokens = 65536 loses less at the same size"
        return NotMetError(
            "rounding loses too much",
            expected=f"[quality] rounding_increase, a perplexity at most {self.limit:.2%} higher",
            found=f"{_percent(found)} on {found.tokens:,} tokens",
            remedy=f"{kept}; a larger rounding_increase accepts the loss, and 0 does not measure it",
        )

    def _divided(self, tokens: Tokens) -> str:
        """What a division of the bits is expected to take that keeps the limit."""
        formats = {**{part: self.formats[part] for part in PARTS}, **dict.fromkeys(self.parts, "q8")}
        window, kept = (
            self.recipe.profile.window,
            f"[bits] perplexity_increase = {self.limit:g}, with q8 there in [pack],",
        )
        try:
            with self.progress("dividing the bits", "steps") as bar:
                found = divide(
                    self.checkpoint,
                    tokens,
                    formats=formats,
                    perplexity_increase=self.limit,
                    window=window,
                    progress=bar,
                )
        except NotMetError:
            return ""
        return f"; {kept} takes about {size(found.nbytes)}"

    def _finer(self) -> list[dict[str, str]]:
        """The formats with all these parts in another format that takes no fewer bytes, by rising bytes."""
        here, parts = self._bytes(self.formats), {part: self.formats[part] for part in PARTS}
        found = [parts | dict.fromkeys(self.parts, name) for name in ROW_FORMATS]
        larger = (formats for formats in found if formats != self.formats and self._bytes(formats) >= here)
        return sorted(larger, key=self._bytes)

    def _bytes(self, formats: Mapping[str, str]) -> int:
        return place_arrays(specs_of(self.checkpoint, formats))[1]


def _percent(found: RoundingLoss) -> str:
    known = "of one window alone" if found.error is None else f"standard error {found.error:.2%}"
    return f"{found.increase:+.2%} ({known})"
