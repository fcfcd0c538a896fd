"""Number format of each part of an artifact, from what the checkpoint has and what the recipe wants."""

from collections.abc import Mapping

KEEP = "keep"
AUTO = "auto"
"""Of predictors: whichever of `PREDICTOR_FORMATS` training finds best; before it, as `KEEP`."""
PREDICTOR_FORMATS = ("f16", "q8", "q4")


def resolve(own: Mapping[str, str], wanted: Mapping[str, str], *, tied_head: bool) -> dict[str, str]:
    """Every part's format, with `keep` replaced by the checkpoint's own.

    `own` has embedding, attention, ffn, and head where it is not the embedding. A tied head has the embedding's
    format; predictors, which no checkpoint has, keep that of the FFN.
    """
    formats = {part: own[part] if wanted[part] == KEEP else wanted[part] for part in own if part != "head"}
    kept = formats["embedding"] if tied_head else own["head"]
    formats["head"] = kept if wanted["head"] == KEEP or tied_head else wanted["head"]
    formats["predictor"] = formats["ffn"] if wanted["predictor"] in (KEEP, AUTO) else wanted["predictor"]
    return formats
