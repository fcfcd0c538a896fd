"""Number format of each part of an artifact, from the checkpoint's formats and the recipe's."""

from collections.abc import Mapping

from pi_compile.errors import CheckpointError
from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS
from pi_runtime.artifact.sizes import ArraySpec, misfits

KEEP = "keep"
"""The checkpoint's own format."""
AUTO = "auto"
"""The one of `PREDICTOR_FORMATS` that training finds best; before training it means `KEEP`. For predictors only."""
PREDICTOR_FORMATS = ("f16", "q8", "q4")
"""The formats that `AUTO` tries."""
AGAIN = "q8"
"""The format in which blocks that no format keeps are quantised again: q4 would round their values by 5 % and more."""


def resolve_formats(stored: Mapping[str, str], wanted: Mapping[str, str], *, tied_head: bool) -> dict[str, str]:
    """The format of every part, with `keep` replaced by the checkpoint's own.

    `stored` has the checkpoint's formats of embedding, attention, ffn, and of the head unless it is tied; the names of
    block types where no format keeps them. A tied head has the format of the embedding. Predictors, which no checkpoint
    has, keep the format of the FFN, or have `AGAIN` where that is for whole matrices. Raises CheckpointError for `keep`
    where nothing keeps what is stored.
    """
    formats = {part: _resolved(part, stored[part], wanted[part]) for part in stored if part != "head"}
    formats["head"] = formats["embedding"] if tied_head else _resolved("head", stored["head"], wanted["head"])
    kept = formats["ffn"] if FORMATS.get(formats["ffn"], FORMATS["f32"]).summed else AGAIN
    formats["predictor"] = kept if wanted["predictor"] in (KEEP, AUTO) else wanted["predictor"]
    return formats


def _resolved(part: str, stored: str, wanted: str) -> str:
    if wanted != KEEP:
        return wanted
    if stored not in WEIGHT_FORMATS:
        raise CheckpointError(
            f"[pack] {part} = {KEEP!r}: the checkpoint has it in {stored}, which no number format keeps",
            expected='"q8" or "q4", with a loss that `pack` states; or "f32", without loss, in 32 bits a value',
            remedy="write one of them; `pi-compile init` writes q8, and says what each would take",
        )
    return stored


def check_rows(specs: Mapping[str, ArraySpec]) -> None:
    """Raise CheckpointError for a format whose rows are no whole groups as it needs, or are summed."""
    for name in misfits(specs):
        raise CheckpointError(
            f"{name}: not in {specs[name].format}",
            expected="a matrix as checkpoints have it, not by neuron; with scales of groups, a multiple of 256 columns",
            found=f"shape {specs[name].shape}",
            remedy=f'in the recipe: [pack] with "{AGAIN}" for this part',
        )
