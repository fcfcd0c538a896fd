"""The folder that comes out: the model as transformers saves it, in the form that says what it computes; with its card.

A form is never one that stock transformers would load and compute otherwise. Where it has no such activation, it is the
published form where that holds the architecture, else `hidden_act` has a name that transformers does not know.

Shape letters: W tokens, V words.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.config import read_json
from pi_compile.checkpoint.folder import CLIENT_ERROR, TOKENIZER_FILES
from pi_compile.errors import CheckpointError
from pi_compile.files import library_writes
from pi_compile.sparsification.activation import Activation
from pi_compile.torch_model import decoder as torch_decoder
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.errors import InputError, Setting, UsageError, write_error

Tensor = torch.Tensor
RECORD = "sparsify.json"
"""The file of the folder that says how it was made."""
CLOSE = 1e-3
"""Largest difference of a logit between the trained model and the folder, of the largest logit."""


_CHANGED = {"family", "activation", "threshold", "ffn_bias", "tied_head"}
"""Fields of the decoder that training may change: the constants of `target.constant` are a bias."""


@dataclass(frozen=True)
class Form:
    """How config.json says what a model computes."""

    fields: dict[str, Any]
    stock: bool
    """Whether transformers computes it without code of others."""
    words: str
    """What to say where it does not; empty where it does."""


def form_of(config: dict[str, Any], activation: Activation) -> Form:
    """The form of a model whose config was of a stock family."""
    name, threshold = activation.name, activation.threshold
    if name in ("relu", "relu2") or (name == "fatrelu" and not threshold):
        return Form({"hidden_act": "relu2" if name == "relu2" else "relu"}, True, "")
    published = _published(config, name)
    parameter = {"hidden_act_param": threshold} if threshold else {}
    if published is not None:
        family, model_class, origin, act = published
        fields = {"model_type": family, "architectures": [model_class], "hidden_act": act, **parameter}
        # Their code has other defaults than the base's, and keys that transformers does not write any more.
        fields["sliding_window"] = config.get("sliding_window")
        fields |= {key: value for key, value in (config.get("rope_parameters") or {}).items() if key == "rope_theta"}
        return Form(fields, False, f"the folder has the form of {origin}, whose modelling code transformers needs")
    fields = {"hidden_act": name, **parameter}
    return Form(fields, False, f'config.json has hidden_act = "{name}", which only this project reads')


def _published(config: dict[str, Any], name: str) -> tuple[str, str, str, str] | None:
    """model_type, class, origin and hidden_act of a published architecture with the activation, if it has the model's.

    Bamboo is Mistral with dReLU, which is Llama with a window; it knows neither biases nor scaled positions.
    """
    family = config["model_type"]
    plain = not (config.get("attention_bias") or config.get("mlp_bias"))
    unscaled = (config.get("rope_parameters") or {}).get("rope_type", "default") == "default"
    if name == "fatrelu" and family == "llama" and plain and unscaled:
        return "sparsellama", "SparseLlamaForCausalLM", "SparseLLM/prosparse-llama-2-7b", "fatrelu"
    if name == "drelu" and family in ("mistral", "llama") and plain and unscaled:
        return "bamboo", "BambooForCausalLM", "PowerInfer/Bamboo-base-v0_1", "relu"
    if name == "drelu" and family == "mixtral" and unscaled:
        return "turbosparsemixtral", "TurboSparseMixtralForCausalLM", "PowerInfer/TurboSparse-Mixtral", "relu"
    return None


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A hidden folder beside `output`, which takes its place at the end: it appears whole or not at all."""
    hidden = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        yield hidden
        hidden.rename(output)
    except OSError as error:
        raise write_error(output, error) from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def check_folder(output: Path) -> None:
    """Check that a folder can be made. Raises UsageError where something is in its place, or it cannot be written."""
    parent, asked = Path(os.path.realpath(output)).parent, Setting("output", output)
    if os.path.lexists(output):  # a link that leads nowhere is in its place too
        raise UsageError("exists already", setting=asked, remedy="name another output, or remove it")
    if not parent.is_dir():
        raise UsageError(f"no folder {parent}", setting=asked, remedy="create it, or name another output")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"no permission to write in {parent}", setting=asked, remedy="name an output elsewhere")


def stored_dtype(base: Checkpoint) -> torch.dtype:
    """The number format that the base's config names."""
    config = read_json(base.folder / "config.json")
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    assert isinstance(found, torch.dtype)
    return found


def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Give every weight the value that it will have in a number format."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def save_model(model: Any, state: dict[str, Tensor], base: Checkpoint, activation: Activation, folder: Path) -> Form:
    """Write config, weights in the base's number format, and the base's tokenizer files."""
    dtype = stored_dtype(base)
    model.config.dtype, model.config.use_cache = dtype, True
    # A tied head stays one tensor with the embedding.
    converted = {tensor.data_ptr(): tensor.to(dtype) for tensor in state.values()}
    weights = {name: converted[tensor.data_ptr()] for name, tensor in state.items()}
    with library_writes(folder):
        model.save_pretrained(folder, state_dict=weights)
    for path in folder.glob("*.safetensors"):  # which their library lets nobody else read
        shutil.copymode(folder / "config.json", path)
    for name in TOKENIZER_FILES:
        if (base.folder / name).is_file():
            shutil.copyfile(base.folder / name, folder / name)
    config = read_json(folder / "config.json")
    form = form_of(config, activation)
    config |= form.fields
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return form


def check_model(folder: Path, ids_W: Tensor, wanted_WV: Tensor, base: Decoder) -> float:
    """Read the folder as `build` does and compare logits; return the largest difference.

    Its decoder must be the base's in all but its activation, which also tells of positions behind those of `ids_W`.
    Raises CheckpointError where it is not, or where logits are not close: a form that says something else than what was
    trained.
    """
    checkpoint = open_checkpoint(folder)
    d, device = checkpoint.decoder, "cpu"
    kept = {f.name for f in fields(Decoder)} - _CHANGED
    other = [f"{name} = {getattr(d, name)}" for name in sorted(kept) if getattr(d, name) != getattr(base, name)]
    if other:
        expected = ", ".join(f"{name.split()[0]} = {getattr(base, name.split()[0])}" for name in other)
        raise _unlike(folder, expected, ", ".join(other))
    global_w = torch_decoder.global_weights(checkpoint, device)
    states = [torch_decoder.embed(d, global_w, ids_W[None])]
    *_, (x,) = torch_decoder.layers(d, torch_decoder.stored_layers(checkpoint, device), states)
    found_WV = torch_decoder.logits(d, global_w, x)[0]
    difference = float((found_WV - wanted_WV).abs().max())
    if difference > CLOSE * float(wanted_WV.abs().max()):
        raise _unlike(folder, "logits that differ by rounding", f"a difference of {difference:g}")
    return difference


def _unlike(folder: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: does not compute what was trained",
        expected=expected,
        found=found,
        remedy="report it with the recipe and the model's config.json; the checkpoints are kept",
    )


_LICENSE = re.compile(r"^license:\s*(\S+)\s*$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def license_of(base: Path) -> str:
    """The licence that the card of the base model names; `unknown` where it names none."""
    card = base / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    front = _FRONT_MATTER.match(text)
    found = _LICENSE.search(front[1]) if front else None
    return found[1] if found else "unknown"


def model_card(record: dict[str, Any], base: Path) -> str:
    """The card, from the record of a run and the folder of its base model."""
    perplexity, recipe = record["perplexity"], record["recipe"]
    control = perplexity["control"]
    against = "the base model" if control is None else "the control"
    low, high = record["interval"] or (None, None)
    spread = "" if low is None else f" (95 % interval over windows: {low:+.2%} to {high:+.2%})"
    of_control = "–" if control is None else f"{control:.3f}"
    rows = "\n".join(
        f"| {n} | {sparsity:.1%} | {dead:.1%} |"
        for n, (sparsity, dead) in enumerate(zip(record["sparsity_by_layer"], record["dead_by_layer"], strict=True))
    )
    threshold = f" with threshold {record['threshold']:g}" if record["threshold"] else ""
    form = "" if record["stock"] else f"\n**Note**: {record['form']}.\n"
    return f"""---
license: {license_of(base)}
base_model: {recipe["model"]["path"]}
tags: [sparse, {record["activation"]}]
---

# {Path(recipe["model"]["path"]).name}, made sparse

The FFNs of {recipe["model"]["path"]} with the activation {record["activation"]}{threshold}, trained on for
{record["tokens"]:,} tokens ({record["steps"]:,} steps, {record["seconds"] / 60:.1f} minutes). Made by
`pi-compile sparsify`; `pi-compile init` and `build` make an artifact of it.
{form}
| | |
| --- | --- |
| sparsity, mean over layers | {record["sparsity"]:.1%} |
| neurons that never fired in {record["held_out"]["tokens"]:,} tokens | {record["dead"]:.1%} |
| perplexity of the base model | {perplexity["base"]:.3f} |
| perplexity of this model | {perplexity["model"]:.3f} |
| perplexity of the control: the base model, trained on the same tokens | {of_control} |
| perplexity against {against} | {record["perplexity_increase"]:+.2%}{spread} |

All figures are of the held-out text, {record["held_out"]["windows"]:,} windows that were not trained on.

| layer | sparsity | never fired |
| --- | --- | --- |
{rows}

Recipe: `SPARSIFY.toml`. Everything as plain values, with the hashes of the text: `sparsify.json`. Curves:
`training.html`.
"""


def check_login(repository: str) -> None:
    """Check before a training that its result can be uploaded. Raises InputError where the hub knows nobody."""
    with _faults(repository, "hf auth login, or set HF_TOKEN"):
        HfApi().whoami()


def push(folder: Path, repository: str) -> str:
    """Upload a folder with its card to a repository, private if it is new; return its address. Raises InputError."""
    with _faults(repository, f"{folder} is whole: hf upload {repository} {folder}"):
        api = HfApi()
        found = api.create_repo(repository, private=True, exist_ok=True)
        message = "Made sparse by pi-compile sparsify"
        api.upload_folder(repo_id=found.repo_id, folder_path=folder, commit_message=message)
    return str(found)


@contextmanager
def _faults(repository: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (OSError, HFValidationError, CLIENT_ERROR) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{repository}: the hub does not take it", found=reason, remedy=remedy) from None
