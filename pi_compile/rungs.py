"""The rule that gives an untrained layer its rung."""

from pi_runtime.artifact.decoder import Decoder


def exact_rung(decoder: Decoder) -> str:
    """The best rung that needs no training and loses nothing: `gate` where the activation has zeros, else `dense`."""
    return "gate" if decoder.sparse else "dense"
