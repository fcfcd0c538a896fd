"""What users get wrong: every mistake ends in its exit code and a message that says what to do, never a traceback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hf import edit_json, edit_tensors, random_llama
from synthetic import random_artifact, small_decoder

from pi_compile.cli import app as pi_compile
from pi_compile.recipe import default_recipe
from pi_runtime import console
from pi_runtime.artifact import verify
from pi_runtime.cli import app as pi_run
from pi_runtime.outcomes import EXTRA_OF

USAGE, INPUT, FIT = 2, 3, 4
GOLDEN = Path(__file__).parents[1] / "artifact" / "golden.pi"
linux = pytest.mark.skipif(sys.platform != "linux", reason="signals and limits of POSIX")
Fails = Callable[..., str]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "model"
    random_llama(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path, original: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(default_recipe(model.name).to_toml())
    return path


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return Path(shutil.copy(GOLDEN, tmp_path / "a.pi"))


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Runs a command that must fail with a code; returns its message."""

    def run(code: int, *arguments: object, app: typer.Typer = pi_compile) -> str:
        found = console.run(app, [str(a) for a in arguments])
        captured = capsys.readouterr()
        assert found == code, captured.err
        assert_a_message(captured.err)
        assert captured.out == ""
        return captured.err

    return run


def assert_a_message(err: str) -> None:
    assert "error: " in err
    assert "internal error" not in err
    assert "Traceback" not in err


def child(script: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """`script`, then `pi-compile ARGUMENTS`, in another process."""
    code = f"{textwrap.dedent(script)}\nfrom pi_compile.cli import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# The model.


def test_no_such_model(fails: Fails, tmp_path: Path) -> None:
    message = fails(INPUT, "init", tmp_path / "nothing", "-o", tmp_path / "r.toml")
    assert f"{tmp_path / 'nothing'}: no such folder" in message
    assert "config.json" in message
    assert not (tmp_path / "r.toml").exists()


def test_a_file_instead_of_a_folder(fails: Fails, model: Path, tmp_path: Path) -> None:
    message = fails(INPUT, "init", model / "model.safetensors", "-o", tmp_path / "r.toml")
    assert "is a file" in message
    assert f"try: name the folder: {model}" in message


def test_an_artifact_instead_of_a_checkpoint(fails: Fails, artifact: Path, tmp_path: Path) -> None:
    assert "run it with `pi-run`" in fails(INPUT, "init", artifact, "-o", tmp_path / "r.toml")


def test_a_recipe_whose_model_has_moved(fails: Fails, recipe: Path, model: Path) -> None:
    model.rename(model.with_name("elsewhere"))
    message = fails(INPUT, "pack", "--plain", recipe)
    assert "[model] path = 'model': no such folder" in message
    assert f"no {model}" in message


def test_a_revision_of_a_local_folder(fails: Fails, model: Path, tmp_path: Path) -> None:
    message = fails(INPUT, "init", model, "-o", tmp_path / "r.toml", "--revision", "main")
    assert "drop the revision" in message


@pytest.mark.parametrize("command", ["init", "pack"])
def test_an_unsupported_family(fails: Fails, recipe: Path, model: Path, command: str) -> None:
    edit_json(model / "config.json", model_type="mamba")
    arguments = ["init", model, "-o", recipe, "--force"] if command == "init" else ["pack", "--plain", recipe]
    message = fails(INPUT, *arguments)
    assert f"{model / 'config.json'}: model type 'mamba' is not supported" in message
    assert "llama, opt" in message


@pytest.mark.parametrize(
    "field",
    [
        {"sliding_window": 8},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"final_logit_softcapping": 30.0},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_config_field_that_changes_the_function(
    fails: Fails, recipe: Path, model: Path, field: dict[str, Any]
) -> None:
    edit_json(model / "config.json", **field)
    message = fails(INPUT, "pack", "--plain", recipe)
    assert str(model / "config.json") in message
    assert next(iter(field)) in message
    assert "expected: " in message


def test_a_config_field_nobody_knows(fails: Fails, recipe: Path, model: Path) -> None:
    edit_json(model / "config.json", moon_phase=0.5)
    message = fails(INPUT, "pack", "--plain", recipe)
    assert 'write in the recipe: [model] ignore_config = ["moon_phase"]' in message
    recipe.write_text(recipe.read_text().replace("ignore_config = []", 'ignore_config = ["moon_phase"]'))
    assert console.run(pi_compile, ["pack", "--plain", str(recipe), "-o", str(recipe.with_suffix(".pi"))]) == 0


def test_code_in_a_checkpoint_is_refused_without_an_adapter(fails: Fails, recipe: Path, model: Path) -> None:
    edit_json(model / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    assert "its own code (auto_map), which is never run" in fails(INPUT, "pack", "--plain", recipe)


def test_code_in_a_checkpoint_is_ignored_with_a_notice(
    recipe: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "modeling_mine.py").write_text("raise SystemExit('ran')")
    edit_json(model / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    for arguments in (["pack", "--plain", str(recipe), "-o", str(tmp_path / "a.pi")], ["init", str(model)]):
        output = [] if "-o" in arguments else ["-o", str(tmp_path / "again.toml")]
        assert console.run(pi_compile, [*arguments, *output]) == 0
        assert "auto_map is ignored: the checkpoint's own code is never run" in capsys.readouterr().err


def test_a_pickle_with_code(fails: Fails, recipe: Path, model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"weights": torch.nn.Linear(2, 2)}, model / "pytorch_model.bin")
    message = fails(INPUT, "pack", "--plain", recipe)
    assert f"{model / 'pytorch_model.bin'}: holds more than weights" in message
    assert "safetensors" in message


def test_a_missing_shard(fails: Fails, recipe: Path, model: Path) -> None:
    shutil.rmtree(model)
    random_llama(model, shard="20KB")
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.unlink()
    message = fails(INPUT, "pack", "--plain", recipe)
    assert "shards are missing" in message
    assert f"no {shard.name}" in message


def test_half_a_download(fails: Fails, recipe: Path, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights}: not a whole safetensors file" in fails(INPUT, "pack", "--plain", recipe)


def test_wrong_shapes(fails: Fails, recipe: Path, model: Path) -> None:
    edit_json(model / "config.json", intermediate_size=84)
    message = fails(INPUT, "pack", "--plain", recipe)
    assert "expected: model.layers.0.mlp.gate_proj.weight (84, 48)" in message
    assert "found: model.layers.0.mlp.gate_proj.weight (83, 48)" in message


def test_weights_that_are_no_numbers(fails: Fails, recipe: Path, model: Path, artifact: Path) -> None:
    edit_tensors(model, model__layers__1__mlp__down_proj__weight=torch.full((48, 83), float("nan")))
    before = artifact.read_bytes()
    message = fails(INPUT, "pack", "--plain", recipe, "-o", artifact)
    assert "model.layers.1.mlp.down_proj.weight holds NaN" in message
    assert artifact.read_bytes() == before
    assert not list(artifact.parent.glob(".*.tmp"))


def test_values_too_large_for_the_format(fails: Fails, recipe: Path, model: Path, tmp_path: Path) -> None:
    edit_tensors(model, model__layers__1__self_attn__v_proj__weight=torch.full((10, 48), 70000.0))
    recipe.write_text(recipe.read_text().replace('attention = "keep"', 'attention = "f16"'))
    message = fails(INPUT, "pack", "--plain", recipe, "-o", tmp_path / "a.pi")
    assert "model.layers.1.self_attn.v_proj.weight are too large for f16" in message
    assert "found: 70000" in message
    assert '[pack] attention = "bf16"' in message
    assert not (tmp_path / "a.pi").exists()


def test_no_tokenizer_is_noticed_at_once(fails: Fails, model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    message = fails(INPUT, "init", model, "-o", tmp_path / "r.toml")
    assert f"{model}: no tokenizer" in message
    assert not (tmp_path / "r.toml").exists()


# The recipe.


def test_no_such_recipe(fails: Fails, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "r.toml"
    message = fails(INPUT, "build", path)
    assert f"{path}: no such recipe" in message
    assert f"try: pi-compile init MODEL -o {path}" in message
    assert not path.parent.exists()


def test_a_folder_instead_of_a_recipe(fails: Fails, model: Path) -> None:
    assert f"{model}: cannot be read" in fails(INPUT, "build", model)


@pytest.mark.parametrize("text", ["[model", "path = ", '{"model": 3}', "\ufeff"], ids=["cut", "empty", "json", "bom"])
def test_not_toml(fails: Fails, recipe: Path, text: str) -> None:
    recipe.write_text(text + recipe.read_text())
    message = fails(INPUT, "pack", "--plain", recipe)
    assert f"{recipe}: not TOML" in message
    assert "line 1" in message


def test_an_artifact_instead_of_a_recipe(fails: Fails, artifact: Path) -> None:
    assert f"{artifact}: cannot be read" in fails(INPUT, "build", artifact)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ffn =", "fnn =", "pack.fnn: unknown key; did you mean ffn?"),
        ("[quality]", "[qualities]", "qualities: unknown key; did you mean quality?"),
        ("[pack]", "[pack]\nzzz = 1", "pack.zzz: unknown key; known: embedding, attention, ffn, head, predictor"),
        ("seed = 0\n", "", "train.seed: missing"),
        ("seed = 0", "seed = true", "train.seed: should be a valid integer (found True)"),
        ("batch = 8", 'batch = "8"', "profile.batch: should be a valid integer (found '8')"),
        ("batch = 8", "batch = 0", "profile.batch: should be greater than or equal to 1 (found 0)"),
        ('ffn = "keep"', 'ffn = "q8"', "pack.ffn: should be 'keep', 'f32', 'f16' or 'bf16' (found 'q8')"),
        ("vram_gib = []", "vram_gib = [8, nan]", "place.vram_gib.1: should be a finite number (found nan)"),
        ("vram_gib = []", "vram_gib = [-8]", "place.vram_gib.0: should be greater than 0 (found -8)"),
        ("ignore_config = []", 'ignore_config = "x"', "model.ignore_config: should be a valid list (found 'x')"),
    ],
    ids=lambda value: value if ":" in value else "",
)
def test_a_recipe_with_a_wrong_key(fails: Fails, recipe: Path, old: str, new: str, problem: str) -> None:
    text = recipe.read_text()
    assert text.count(old) == 1
    recipe.write_text(text.replace(old, new))
    message = fails(INPUT, "pack", "--plain", recipe)
    assert str(recipe) in message
    assert problem in message
    assert "docs/recipes.md" in message


def test_a_value_instead_of_a_section(fails: Fails, recipe: Path) -> None:
    recipe.write_text("model = 3\n" + recipe.read_text().split("\n\n", 1)[1])
    assert "model: should be a table [model] (found 3)" in fails(INPUT, "pack", "--plain", recipe)


def test_all_problems_of_a_recipe_are_named_at_once(fails: Fails, recipe: Path) -> None:
    recipe.write_text("")
    message = fails(INPUT, "pack", "--plain", recipe)
    assert all(f"\n    {section}: missing" in message for section in tomllib.loads(default_recipe("m").to_toml()))


def test_init_onto_an_existing_recipe(fails: Fails, recipe: Path, model: Path) -> None:
    before = recipe.read_bytes()
    message = fails(USAGE, "init", model, "-o", recipe)
    assert f"-o {recipe}: exists already" in message
    assert "--force" in message
    assert recipe.read_bytes() == before


def test_text_that_is_not_there(fails: Fails, model: Path, tmp_path: Path) -> None:
    message = fails(USAGE, "init", model, "-o", tmp_path / "r.toml", "--corpus", tmp_path / "book.txt")
    assert f"--corpus {tmp_path / 'book.txt'}: no such file" in message


# The output.

Writes = dict[str, Callable[[Path, Path, Path], list[object]]]
WRITES: Writes = {
    "init": lambda model, _, output: ["init", model, "--force", "-o", output],
    "pack": lambda _, recipe, output: ["pack", "--plain", recipe, "-o", output],
    "build": lambda _, recipe, output: ["build", recipe, "-o", output],
    "machine": lambda _, __, output: ["machine", "-o", output],
}


@pytest.mark.parametrize("command", WRITES)
def test_an_output_in_no_folder(fails: Fails, model: Path, recipe: Path, tmp_path: Path, command: str) -> None:
    output = tmp_path / "no" / "where"
    message = fails(USAGE, *WRITES[command](model, recipe, output))
    assert f"-o {output}: no folder {tmp_path / 'no'}" in message
    assert "create it" in message


@pytest.mark.parametrize("command", WRITES)
def test_an_output_that_is_a_folder(fails: Fails, model: Path, recipe: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "out").mkdir()
    message = fails(USAGE, *WRITES[command](model, recipe, tmp_path / "out"))
    assert f"-o {tmp_path / 'out'}: is a folder" in message
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("command", WRITES)
def test_an_output_where_writing_is_not_allowed(
    fails: Fails, model: Path, recipe: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    if os.access(tmp_path / "out", os.W_OK):  # we are root, to whom everything is allowed
        monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    message = fails(USAGE, *WRITES[command](model, recipe, tmp_path / "out" / "x"))
    assert f"no permission to write in {tmp_path / 'out'}" in message


@pytest.mark.parametrize("command", ["pack", "build"])
def test_only_artifacts_are_replaced(fails: Fails, model: Path, recipe: Path, command: str) -> None:
    for precious in (recipe, model / "model.safetensors"):
        before = precious.read_bytes()
        message = fails(USAGE, *WRITES[command](model, recipe, precious))
        assert f"-o {precious}: exists and is no artifact" in message
        assert precious.read_bytes() == before


@linux
def test_a_full_disk_keeps_the_older_artifact(recipe: Path, tmp_path: Path) -> None:
    old = random_artifact(tmp_path / "a.pi", small_decoder())
    before = old.read_bytes()
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))"
    process = child(limit, "pack", "--plain", recipe, "-o", old)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (FIT, ""), err
    assert_a_message(err)
    assert f"{old}: the file system or a limit allows no larger file" in err
    assert "name an output on another disk" in err
    assert old.read_bytes() == before
    assert not list(tmp_path.glob(".*.tmp"))
    verify(old)


@linux
def test_interrupted(recipe: Path, tmp_path: Path) -> None:
    old = random_artifact(tmp_path / "a.pi", small_decoder())
    before = old.read_bytes()
    wait = """
        import time
        from pi_runtime.artifact.writer import ArtifactWriter
        def add_file(self, name, data):
            print("packing", flush=True)
            time.sleep(100)
        ArtifactWriter.add_file = add_file
    """
    process = child(wait, "pack", "--plain", recipe, "-o", old)
    assert process.stdout is not None
    assert process.stdout.readline() == "packing\n"
    assert list(tmp_path.glob(".a.pi.*.tmp"))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert old.read_bytes() == before
    assert not list(tmp_path.glob(".a.pi.*.tmp"))


# The artifact.


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_such_artifact(fails: Fails, artifact: Path, command: str) -> None:
    message = fails(INPUT, command, artifact.with_name("b.pi"))
    assert f"{artifact.with_name('b.pi')}: no such file" in message
    assert f"did you mean {artifact}?" in message


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "an empty file"),
        (b"[model]\n", "a text file"),
        (b"GGUF\x03\0\0\0", "a GGUF model"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"\x10\0\0\0\0\0\0\0" + b'{"a":{}}        ', "a safetensors file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("command", ["inspect", "verify", "pi-run"])
def test_not_an_artifact(fails: Fails, tmp_path: Path, command: str, content: bytes, kind: str) -> None:
    path = tmp_path / "a.pi"
    path.write_bytes(content)
    run = [path, "--prompt", "x"]
    message = fails(INPUT, *run, app=pi_run) if command == "pi-run" else fails(INPUT, command, path)
    assert f"{path}: not an artifact" in message
    assert f"found: {kind}" in message


def test_a_checkpoint_instead_of_an_artifact(fails: Fails, model: Path) -> None:
    message = fails(INPUT, model, "--prompt", "x", app=pi_run)
    assert "this looks like a checkpoint: `pi-compile init` makes a recipe of it" in message


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_truncated(fails: Fails, artifact: Path, command: str) -> None:
    artifact.write_bytes(artifact.read_bytes()[:50000])
    message = fails(INPUT, command, artifact)
    assert f"{artifact}: damaged at the end of the file" in message
    assert "truncated" in message
    assert "pack it anew" in message


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


FLIPS: dict[str, tuple[Callable[[bytes], int], str]] = {
    "data": (lambda data: data.index(b"layers/0/ffn/rest/c/0/0/0") + 4096, "array layers/0/ffn/rest"),
    "row-padding": (lambda data: data.index(b"layers/0/attention/out/c/0/0") + 160, "array layers/0/attention/out"),
    "header-padding": (lambda data: data.index(b"embedding/c/0/0") + 22, "local header of embedding/c/0/0 or its"),
    "tokenizer": (lambda data: data.index(b"tokenizer.json") + 100, "file tokenizer.json"),
    "directory": (lambda data: data.rindex(b"layers/0/ffn/rest/zarr.json") - 1, "layers/0/ffn/rest/zarr.json"),
    "digest": (lambda data: len(data) - 7, "the digest in the end record"),
}


@pytest.mark.parametrize("part", FLIPS)
def test_one_flipped_bit(fails: Fails, artifact: Path, part: str) -> None:
    offset, named = FLIPS[part]
    flip(artifact, offset(artifact.read_bytes()))
    message = fails(INPUT, "verify", artifact)
    assert f"{artifact}: damaged" in message
    assert named in message
    assert "copy or download it again" in message


def test_an_artifact_of_a_newer_version(fails: Fails, artifact: Path) -> None:
    data = artifact.read_bytes()
    artifact.write_bytes(data.replace(b"pi-artifact/1 ", b"pi-artifact/9 "))
    message = fails(INPUT, "inspect", artifact)
    assert f"{artifact}: artifact format version 9" in message
    assert "expected: version 1" in message
    assert "use the release that wrote it" in message


# Running.


def test_a_gpu_that_is_not_there(fails: Fails, artifact: Path) -> None:
    message = fails(USAGE, artifact, "--prompt", "x", "--device", "cuda:99", app=pi_run)
    assert "--device cuda:99: no such GPU" in message
    assert "try: --device cpu" in message


def test_profiling_on_a_gpu_that_is_not_there(fails: Fails, recipe: Path) -> None:
    message = fails(USAGE, "profile", recipe, "--device", "cuda:99")
    assert "--device cuda:99: no such GPU" in message
    assert not (recipe.parent / ".pi-build").exists()


@pytest.mark.parametrize("command", [["profile", "--device"], ["pi-run", "--prompt", "x", "--device"]])
def test_a_device_nobody_knows(fails: Fails, artifact: Path, recipe: Path, command: list[str]) -> None:
    name, *flags = command
    arguments = [artifact, *flags, "gpu"] if name == "pi-run" else [name, recipe, *flags, "gpu"]
    message = fails(USAGE, *arguments, app=pi_run if name == "pi-run" else pi_compile)
    assert "--device gpu: unknown device" in message
    assert "cuda:N" in message


def test_a_prompt_longer_than_the_context(fails: Fails, artifact: Path) -> None:
    message = fails(INPUT, artifact, "--prompt", "x" * 100, app=pi_run)
    assert "the prompt has 100 tokens" in message
    assert "fewer than the context of 64" in message
    assert "--ctx-size" in message


def test_a_context_longer_than_the_model_has(fails: Fails, artifact: Path) -> None:
    assert "--ctx-size 65" in fails(USAGE, artifact, "--prompt", "x", "--ctx-size", 65, app=pi_run)


def test_neither_prompt_nor_chat(fails: Fails, artifact: Path) -> None:
    assert "give either --prompt TEXT or --chat" in fails(USAGE, artifact, app=pi_run)


# The command line and the installation.


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["compile", "x"], "No such command 'compile'"),
        (["inspect"], "Missing argument 'ARTIFACT'"),
        (["inspect", "a.pi", "--jsn"], "No such option: --jsn"),
        (["init", "m"], "Missing option '--output'"),
    ],
)
def test_a_command_line_that_is_none(fails: Fails, arguments: list[str], named: str) -> None:
    message = fails(USAGE, *arguments)
    assert named in message
    assert "--help" in message


def test_no_command_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(pi_compile, []) == USAGE
    err = capsys.readouterr().err
    assert err.startswith("Usage: ")
    assert "verify" in err


BLOCK = """
    import sys
    class Blocked:
        '''Hides packages as if they were not installed.'''
        def __init__(self, finder): self.finder = finder
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in {names}:
                return self.finder.find_spec(name, path, target)
    sys.meta_path[:] = [Blocked(f) for f in sys.meta_path]
"""


OPTIONAL = set(EXTRA_OF) - {"pydantic"}  # some versions of typer bring that one themselves


@pytest.mark.parametrize("names", [{"torch"}, OPTIONAL], ids=["torch", "all"])
@pytest.mark.parametrize("command", ["init", "pack"])
def test_a_missing_extra(recipe: Path, model: Path, names: set[str], command: str) -> None:
    arguments = ["init", model, "-o", recipe, "--force"] if command == "init" else ["pack", "--plain", recipe]
    process = child(BLOCK.format(names=names), *arguments)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (USAGE, ""), err
    assert_a_message(err)
    assert "is not installed, and this command needs it" in err
    assert "try: pip install 'pi-toolchain[compile]'" in err


def test_without_any_extra_an_artifact_can_be_examined(artifact: Path) -> None:
    process = child(BLOCK.format(names=OPTIONAL), "inspect", artifact)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "llama" in out


def test_a_missing_module_of_our_own_is_an_internal_error(capsys: pytest.CaptureFixture[str]) -> None:
    broken = typer.Typer()

    @broken.command()
    def command() -> None:
        raise ModuleNotFoundError("No module named 'pi_compile.lost'", name="pi_compile.lost")

    assert console.run(broken, []) == 1
    err = capsys.readouterr().err
    assert "internal error: ModuleNotFoundError" in err
    assert "--debug" in err
    assert "Traceback" not in err
    assert console.run(broken, ["--debug"]) == USAGE  # no flag of this app


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (MemoryError("Unable to allocate 3 TiB"), FIT, "not enough memory\n  found: Unable to allocate 3 TiB"),
        (OSError(28, "No space left on device", "x/counts"), FIT, "x/counts: the disk is full"),
        (PermissionError(13, "Permission denied", "x/counts"), USAGE, "x/counts: Permission denied"),
        (EOFError("ran out"), 1, "internal error"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_the_system_refuses(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    broken = typer.Typer()

    @broken.command()
    def command() -> None:
        raise error

    assert console.run(broken, []) == code
    assert text in capsys.readouterr().err


def test_a_traceback_only_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.run(pi_compile, ["verify", str(tmp_path / "a.pi"), "--debug"]) == INPUT
    assert "Traceback" in capsys.readouterr().err


def test_a_message_as_a_user_sees_it(tmp_path: Path) -> None:
    """In another process, through the installed entry point: message on stderr, nothing on stdout, exit code 3."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    done = subprocess.run(
        [sys.executable, "-m", "pi_compile", "init", "model", "-o", "r.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (INPUT, "")
    assert done.stderr.splitlines() == [
        "error: model/config.json: model type 'mamba' is not supported",
        "  expected: one of the families llama, opt",
        "  found: model_type = 'mamba', architectures = None",
        "  try: use a checkpoint of a supported family",
    ]
