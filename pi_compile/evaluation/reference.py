"""The checkpoint that an artifact was packed from, run in float32: the reference of an evaluation.

Shape letter: T tokens.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.schema import Manifest
from pi_runtime.errors import Setting, Text

Logits = Callable[[npt.NDArray[np.int64], int], npt.NDArray[np.float32]]
"""Token ids (T,) and the number of last positions wanted → logits (positions, vocabulary)."""


def check_origin(m: Manifest, model: Path) -> Checkpoint:
    """The checkpoint, opened as an artifact's was. Raises CheckpointError if the artifact was not packed from it."""
    made_from = m.provenance.get("checkpoint", {})
    ignored = [str(key) for key in made_from.get("ignored_config", ())]
    activation = str(made_from.get("declared_activation", ""))
    checkpoint = open_checkpoint(model, ignore_config=ignored, activation=activation, in_recipe=True)
    if not _is_origin(made_from, checkpoint):
        raise CheckpointError(
            "the artifact was not packed from this checkpoint",
            setting=Setting("model", model),
            expected=f"digest {str(made_from.get('digest'))[:16]}…",
            found=f"{checkpoint.digest()[:16]}…",
            remedy="name the checkpoint that it was packed from, or pack it anew",
        )
    return checkpoint


def _is_origin(made_from: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether an artifact's provenance names this checkpoint.

    Of a GGUF file the contents decide: in older artifacts its name was part of the digest.
    """
    if made_from.get("digest") == checkpoint.digest():
        return True
    files = made_from.get("files")
    contents = list(files.values()) if isinstance(files, dict) else []
    return checkpoint.location.is_file() and contents == list(checkpoint.file_digests.values())


def reference_logits(checkpoint: Checkpoint) -> Logits:
    """The logits of a checkpoint in float32: by transformers, or by the decoder of profiling where that reads less.

    That is for GGUF files, and for quantised layers, for which transformers needs other packages. Raises
    CheckpointError if transformers cannot load the folder.
    """
    is_plain = checkpoint.location.is_dir() and not checkpoint.source.block_types
    return _by_transformers(checkpoint.location) if is_plain else _by_decoder(checkpoint)


def _by_transformers(folder: Path) -> Logits:
    import torch  # noqa: PLC0415  only where a checkpoint is compared

    loaded = stock_model(folder, Setting("model", folder))

    def logits(ids_T: npt.NDArray[np.int64], last: int) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            return np.asarray(loaded(torch.from_numpy(ids_T)[None]).logits[0, -last:])

    return logits


def stock_model(folder: Path, name: Text) -> Any:
    """A checkpoint as transformers runs it, in float32. Raises CheckpointError, which has its `name`, if it cannot."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, "local_files_only": True}
    try:
        return AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            (name, ": transformers cannot load it"),
            found=error,
            remedy="see that its files are whole, and that transformers is new enough for the model",
        ) from None


def _by_decoder(checkpoint: Checkpoint) -> Logits:
    """Logits of the stored values; transformers does not take over all that a GGUF file says, and loads fewer."""
    import torch  # noqa: PLC0415  only where a checkpoint is compared

    from pi_compile.torch_model import decoder as td  # noqa: PLC0415

    d, global_w = checkpoint.decoder, td.global_weights(checkpoint, "cpu")
    weights = list(td.stored_layers(checkpoint, "cpu"))

    def logits(ids_T: npt.NDArray[np.int64], last: int) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            states = [td.embed(d, global_w, torch.from_numpy(ids_T)[None])]
            *_, (x_BTD,) = td.layers(d, weights, states)
            return np.asarray(td.logits(d, global_w, x_BTD[:, -last:])[0])

    return logits
