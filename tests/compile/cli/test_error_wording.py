"""What mistakes about models, recipes and outputs are answered: the whole message and its exit code, in one table.

Other tests of the same mistakes look at the type of the error, and at what distinguishes theirs.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.commands import INPUT, USAGE
from support.hf import edit_json, edit_tensors, random_llama

from pi_compile.checkpoint.families import family_names

Fails = Callable[..., str]
Prepare = Callable[[Path], object]
FAMILIES = f"  expected: one of the families {', '.join(family_names())}"
SUPPORTED = "  try: use a checkpoint of a supported family"
ANOTHER = "  try: use another checkpoint of the model; a quantised one can be replaced by the one it was made from"
ANGLES = "  expected: angles that do not depend on how long the text is"
KNOWN = "  expected: keys whose meaning is known, so that the artifact computes the checkpoint's function"
PACK, BUILD = ["pack", "--plain", "{recipe}"], ["build", "{recipe}"]
INIT, PLAN = ["init", "{model}", "-o", "{new}"], ["plan", "{model}/config.json", "--machine", "pc-low"]
CHANGES = "would change the function, and this is not supported"


@dataclass(frozen=True)
class Mistake:
    """A command that fails after `prepare` has changed the folder of model and recipe."""

    arguments: list[str]
    lines: tuple[str, ...]
    prepare: Prepare = lambda _folder: None
    code: int = INPUT


def config(*removed: str, **changed: Any) -> Prepare:
    return lambda folder: edit_json(folder / "model" / "config.json", *removed, **changed)


def tensor(**changed: torch.Tensor) -> Prepare:
    return lambda folder: edit_tensors(folder / "model", **changed)


def in_recipe(old: str, new: str) -> Prepare:
    def change(folder: Path) -> None:
        path = folder / "tiny.toml"
        path.write_text(path.read_text().replace(old, new))

    return change


def no_shard(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    random_llama(folder / "model", shard="20KB")
    (folder / "model" / "model-00002-of-00014.safetensors").unlink()


def half_a_download(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def pickle_with_code(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()
    torch.save({"weights": torch.nn.Linear(2, 2)}, folder / "model" / "pytorch_model.bin")


def large_value(folder: Path) -> None:
    edit_tensors(folder / "model", model__layers__1__self_attn__v_proj__weight=torch.full((10, 48), 70000.0))
    in_recipe('attention = "keep"', 'attention = "f16"')(folder)


MISTAKES = {
    "no such model": Mistake(
        ["init", "{folder}/nothing", "-o", "{new}"],
        (
            "{folder}/nothing: no such folder",
            "  expected: a folder with config.json and weights, a GGUF file, or a hub name OWNER/NAME",
        ),
    ),
    "file instead of a folder": Mistake(
        ["init", "{model}/model.safetensors", "-o", "{new}"],
        (
            "{model}/model.safetensors: is a file",
            "  expected: a checkpoint folder",
            "  try: name the folder: {model}",
        ),
    ),
    "artifact instead of a checkpoint": Mistake(
        ["init", "{artifact}", "-o", "{new}"],
        (
            "{artifact}: is a file",
            "  expected: a checkpoint folder",
            "  try: this is already an artifact: run it with `pi-run`",
        ),
    ),
    "model that has moved": Mistake(
        PACK,
        (
            "[model] path = 'model': no such folder or file",
            "  expected: a folder or a GGUF file, from the recipe's own on; or a hub name with its revision",
            "  found: no {model}",
            "  try: correct the path; for a hub name `pi-compile init` finds the revision",
        ),
        lambda folder: (folder / "model").rename(folder / "elsewhere"),
    ),
    "revision of a folder": Mistake(
        [*INIT, "--revision", "main"],
        (
            "{model}: revision 'main' is given for a local folder",
            "  expected: a revision only with a hub name",
            "  try: drop the revision, or name the hub model",
        ),
    ),
    "unsupported family": Mistake(
        INIT,
        (
            "{model}/config.json: model type 'mamba' is not supported",
            FAMILIES,
            "  found: model_type = 'mamba', architectures = ['LlamaForCausalLM']",
            SUPPORTED,
        ),
        config(model_type="mamba"),
    ),
    "code without an adapter": Mistake(
        PACK,
        (
            "{model}/config.json: model type 'mine' is not supported through its own code (auto_map), which is never "
            "run",
            FAMILIES,
            "  found: model_type = 'mine', architectures = ['LlamaForCausalLM']",
            SUPPORTED,
        ),
        config(model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}),
    ),
    "window": Mistake(
        PACK,
        (
            f"{{model}}/config.json: sliding_window {CHANGES}",
            "  expected: sliding_window no shorter than max_position_embeddings",
            "  found: sliding_window = 8",
            ANOTHER,
        ),
        config(sliding_window=8),
    ),
    "rope type": Mistake(
        PACK,
        (
            "{model}/config.json: rope_scaling: rope type",
            ANGLES,
            "  found: 'dynamic'",
            "  try: no such type is supported",
        ),
        config(rope_scaling={"type": "dynamic", "factor": 2.0}),
    ),
    "key that changes the function": Mistake(
        PACK,
        (
            f"{{model}}/config.json: final_logit_softcapping {CHANGES}",
            "  expected: final_logit_softcapping = None",
            "  found: final_logit_softcapping = 30.0",
            ANOTHER,
        ),
        config(final_logit_softcapping=30.0),
    ),
    "unknown key, in a recipe": Mistake(
        PACK,
        (
            "{model}/config.json: moon_phase is not understood",
            KNOWN,
            "  found: moon_phase = 0.5",
            '  try: if this does not change the function, write in the recipe: [model] ignore_config = ["moon_phase"]',
        ),
        config(moon_phase=0.5),
    ),
    **{
        f"unknown keys, {command[0]}": Mistake(
            command,
            (
                "{model}/config.json: moon_phase, tide are not understood",
                KNOWN,
                "  found: moon_phase = 0.5, tide = 1",
                "  try: if this does not change the function, add --ignore-config moon_phase --ignore-config tide",
            ),
            config(moon_phase=0.5, tide=1),
        )
        for command in (INIT, PLAN)
    },
    "misspelt key to ignore": Mistake(
        [*PLAN, "--ignore-config", "moonphase"],
        (
            "--ignore-config moonphase: {model}/config.json has no such key",
            "  expected: a key of it, such as moon_phase",
            "  try: correct the name, or leave it out",
        ),
        config(moon_phase=0.5),
        USAGE,
    ),
    "key that cannot be ignored": Mistake(
        [*INIT, "--ignore-config", "hidden_size"],
        (
            "{model}/config.json: hidden_size cannot be ignored: the model is read with it",
            "  try: take it out of --ignore-config",
        ),
    ),
    "flag beside a recipe": Mistake(
        ["plan", "{recipe}", "--ignore-config", "moon_phase"],
        (
            "--ignore-config moon_phase: a recipe has its own",
            "  expected: the flag with a config.json or its folder",
            "  try: write it in the recipe: [model] ignore_config",
        ),
        code=USAGE,
    ),
    "pickle with code": Mistake(
        PACK,
        (
            "{model}/pytorch_model.bin: holds more than weights, and a pickle's code is never run",
            "  expected: a file that torch.load(weights_only=True) reads",
            "  try: use a checkpoint in safetensors form",
        ),
        pickle_with_code,
    ),
    "missing shard": Mistake(
        PACK,
        (
            "{model}: 1 of 14 shards are missing",
            "  expected: every file that model.safetensors.index.json names",
            "  found: no model-00002-of-00014.safetensors",
            "  try: fetch the missing files of the checkpoint",
        ),
        no_shard,
    ),
    "half a download": Mistake(
        PACK,
        (
            "{model}/model.safetensors: not a whole safetensors file",
            "  found: Error while deserializing header: incomplete metadata, file not fully covered",
            "  try: the file is damaged or was not fetched whole: fetch it again",
        ),
        half_a_download,
    ),
    "no number": Mistake(
        [*PACK, "-o", "{artifact}"],
        (
            "{model}/model.safetensors: tensor model.layers.1.mlp.down_proj.weight holds NaN or infinity",
            "  expected: finite weights",
            "  try: the checkpoint is damaged, or its training diverged: use another",
        ),
        tensor(model__layers__1__mlp__down_proj__weight=torch.full((48, 83), float("nan"))),
    ),
    "value too large": Mistake(
        [*PACK, "-o", "{artifact}"],
        (
            "{model}: values of model.layers.1.self_attn.v_proj.weight are too large for f16",
            "  expected: values that f16 can hold",
            "  found: 70000",
            '  try: in the recipe: [pack] attention = "bf16"',
        ),
        large_value,
    ),
    "no tokenizer": Mistake(
        INIT,
        (
            "{model}: no tokenizer",
            "  expected: one of tokenizer.json, vocab.json with merges.txt, tokenizer.model",
            "  try: copy the tokenizer's files of the model into the folder",
        ),
        lambda folder: (folder / "model" / "tokenizer.json").unlink(),
    ),
    "no such recipe": Mistake(
        ["build", "{folder}/none/r.toml"],
        ("{folder}/none/r.toml: no such recipe", "  try: pi-compile init MODEL -o {folder}/none/r.toml"),
    ),
    "folder instead of a recipe": Mistake(
        ["build", "{model}"],
        ("{model}: a folder, not a recipe", "  try: pi-compile init {model} -o RECIPE.toml"),
    ),
    "value instead of a section": Mistake(
        PACK,
        (
            "{recipe}: not a valid recipe:",
            "    model: should be a table [model] (found 3)",
            "  try: docs/reference/recipe.md explains every key; "
            "`pi-compile init` writes a complete recipe to compare with",
        ),
        lambda folder: (folder / "tiny.toml").write_text(
            "model = 3\n" + (folder / "tiny.toml").read_text().split("\n\n", 1)[1]
        ),
    ),
    "recipe that is there": Mistake(
        ["init", "{model}", "-o", "{recipe}"],
        ("-o {recipe}: exists already", "  try: --force replaces it; or name another file"),
        code=USAGE,
    ),
    "text that is not there": Mistake(
        [*INIT, "--corpus", "{folder}/book.txt"],
        (
            "--corpus {folder}/book.txt: no such file or folder",
            "  expected: a path, python, or hub:OWNER/NAME@REVISION",
        ),
        code=USAGE,
    ),
    "output in no folder": Mistake(
        [*BUILD, "-o", "{folder}/no/where"],
        ("-o {folder}/no/where: no folder {folder}/no", "  try: create it, or name another output"),
        code=USAGE,
    ),
    "output that is a folder": Mistake(
        [*BUILD, "-o", "{model}"],
        ("-o {model}: is a folder", "  expected: a file to write", "  try: -o {model}/NAME"),
        code=USAGE,
    ),
    "output that is no artifact": Mistake(
        [*BUILD, "-o", "{recipe}"],
        (
            "-o {recipe}: exists and is no artifact",
            "  expected: a new file, or an artifact to replace",
            "  try: name another output, or remove the file",
        ),
        code=USAGE,
    ),
    "misspelt artifact": Mistake(
        ["verify", "{folder}/b.pi"], ("{folder}/b.pi: no such file", "  try: did you mean {artifact}?")
    ),
    "checkpoint instead of an artifact": Mistake(
        ["inspect", "{model}/model.safetensors"],
        (
            "{model}/model.safetensors: not an artifact",
            "  expected: a .pi file",
            "  found: a safetensors file",
            "  try: pack a checkpoint with `pi-compile build`, and name the artifact it writes",
        ),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_messages(fails: Fails, model: Path, recipe: Path, artifact: Path, tmp_path: Path, mistake: str) -> None:
    m = MISTAKES[mistake]
    m.prepare(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    names = {"folder": tmp_path, "model": model, "recipe": recipe, "artifact": artifact, "new": tmp_path / "new"}
    message = fails(m.code, *(argument.format(**names) for argument in m.arguments))
    wanted = ("error: " + "\n".join(m.lines)).format(**names)
    assert message[message.index("error: ") :].splitlines() == wanted.splitlines()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before, "a file was changed"
