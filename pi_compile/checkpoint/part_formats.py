"""Number format of each part of an artifact, from the checkpoint's formats and the recipe's."""

from collections.abc import Mapping

from pi_runtime.artifact.formats import FORMATS, WEIGHT_FORMATS

KEEP = "keep"
"""The checkpoint's own format."""
AUTO = "auto"
"""The one of `PREDICTOR_FORMATS` that training finds best; before training it means `KEEP`. For predictors only."""
PREDICTOR_FORMATS = ("f16", *(name for name in WEIGHT_FORMATS if FORMATS[name].quantised))
"""The formats that `AUTO` tries."""


def resolve_formats(stored: Mapping[str, str], wanted: Mapping[str, str], *, tied_head: bool) -> dict[str, str]:
    """The format of every part, with `keep` replaced by the checkpoint's own.

    `stored` has the checkpoint's formats of embedding, attention, ffn, and of the head unless it is tied. A tied head
    has the format of the embedding. Predictors, which no checkpoint has, keep the format of the FFN.
    """
    formats = {part: stored[part] if wanted[part] == KEEP else wanted[part] for part in stored if part != "head"}
    kept = formats["embedding"] if tied_head else stored["head"]
    formats["head"] = kept if wanted["head"] == KEEP or tied_head else wanted["head"]
    formats["predictor"] = formats["ffn"] if wanted["predictor"] in (KEEP, AUTO) else wanted["predictor"]
    return formats
