"""The checkpoint that an artifact was packed from, run by transformers: the reference of an evaluation.

Shape letter: T tokens.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.schema import Manifest

Logits = Callable[[npt.NDArray[np.int64], int], npt.NDArray[np.float32]]
"""Token ids (T,) and the number of last positions wanted → logits (positions, vocabulary)."""


def check_origin(m: Manifest, model: Path) -> None:
    """Check that an artifact was packed from a checkpoint; else raise CheckpointError."""
    made_from = m.provenance.get("checkpoint", {})
    ignored = [str(key) for key in made_from.get("ignored_config", ())]
    origin, found = made_from.get("digest"), open_checkpoint(model, ignore_config=ignored, in_recipe=True).digest()
    if origin != found:
        raise CheckpointError(
            f"--model {model}: the artifact was not packed from this checkpoint",
            expected=f"digest {str(origin)[:16]}…",
            found=f"{found[:16]}…",
        )


def reference_logits(model: Path) -> Logits:
    """Load a checkpoint in float32, and return its logits. Raises CheckpointError if transformers cannot load it."""
    import torch  # noqa: PLC0415  only where a checkpoint is compared
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--model {model}: transformers cannot load it", found=error) from None

    def logits(ids_T: npt.NDArray[np.int64], last: int) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            return np.asarray(loaded(torch.from_numpy(ids_T)[None]).logits[0, -last:])

    return logits
