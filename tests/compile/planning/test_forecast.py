"""`pi-compile plan`: what fits where and how fast, from a config alone; and what users get wrong about it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.commands import FIT, INPUT, USAGE, assert_a_message
from support.documents import assert_as_documented
from support.paths import ROOT
from support.planned import CONFIG, MACHINE
from support.synthetic import small_decoder

from pi_compile.cli.main import app
from pi_compile.cli.planning import plan_text
from pi_compile.cost_model.workload import PREDICTOR_SHARE, Workload, untrained_layers
from pi_compile.errors import CheckpointError
from pi_compile.files import bundled_folder
from pi_compile.machine.profile import Disk, Machine, find_machine
from pi_compile.pipeline.lock_file import lock_path
from pi_compile.placement.formulation import Assignment, Problem
from pi_compile.planning.forecast import PlanSpec, block_ps
from pi_compile.planning.forecast import plan as planned
from pi_compile.planning.model_config import bundled_models, find_planned
from pi_compile.recipe import read_recipe
from pi_compile.results.activation_profile import ActivationProfile, LayerWork
from pi_runtime import console
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.sizes import PARTS, array_specs, parameters

RECIPES = sorted((ROOT / "recipes").glob("*-*.toml"))
FIRES = ("--curve", "reglu-70b", "--density", "0.2")
Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "m.toml").write_text(MACHINE.to_toml())
    alone = MACHINE.model_copy(update={"gpu": None, "link": None, "name": "alone"})
    (tmp_path / "alone.toml").write_text(alone.to_toml())
    return tmp_path


@pytest.fixture
def plan(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Runs `plan` in the folder; its JSON."""
    monkeypatch.chdir(folder)

    def run(*arguments: object) -> dict[str, Any]:
        code = console.run(app, ["plan", *map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return dict(json.loads(captured.out))

    return run


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs `plan`, which must fail with this exit code; its message."""
    monkeypatch.chdir(folder)

    def run(code: int, *arguments: object) -> str:
        assert console.run(app, ["plan", *map(str, arguments)]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert_a_message(captured.err)
        return captured.err

    return run


def stored(decoder: Decoder, rank: int | None, fmt: str = "f16") -> int:
    specs = array_specs(decoder, dict.fromkeys(PARTS, fmt), [rank] * decoder.n_layers, profiled=False)
    return sum(spec.nbytes for spec in specs.values())


def test_every_byte_is_somewhere_once(plan: Plan) -> None:
    found = plan("config.json", "--machine", "m.toml", "--vram-budget", "300KiB", *FIRES)
    model = find_planned("config.json", Path())
    for budget in found["budgets"]:
        assert budget["fits"]
        assert sum(budget["gpu_bytes_by_part"].values()) <= budget["vram_bytes"]
        parts = {
            part: budget["ram_bytes_by_part"][part] + budget["gpu_bytes_by_part"][part]
            for part in budget["ram_bytes_by_part"]
        }
        weights = sum(n for part, n in parts.items() if part not in ("cache", "scratch", "process"))
        assert weights == stored(model.decoder, found["predictor_rank"])
        assert parts["cache"] == 4 * 2 * 128 * 64 * 2  # layers, keys and values, positions, width, float16


def test_more_memory_is_never_slower(plan: Plan) -> None:
    found = plan("config.json", "--machine", "m.toml", "--vram-budget", "400KiB", *FIRES)
    less, same, more = found["budgets"]
    assert [b["vram_bytes"] for b in found["budgets"]] == [307200, 409600, 512000]
    assert less["decode_tokens_per_s"] <= same["decode_tokens_per_s"] <= more["decode_tokens_per_s"]
    assert less["decode_tokens_per_s"] < more["decode_tokens_per_s"]
    assert same["decode_tokens_per_s"] > same["layer_split_tokens_per_s"]
    assert sum(same["milliseconds"].values()) == pytest.approx(1000 / same["decode_tokens_per_s"])


def test_the_keys_are_documented(plan: Plan) -> None:
    assert_as_documented("plan", plan("config.json", "--machine", "m.toml", *FIRES))


def test_a_folder_is_its_config(plan: Plan, folder: Path) -> None:
    arguments = ("--machine", "m.toml", *FIRES)
    assert plan(folder, *arguments) | {"model": ""} == plan("config.json", *arguments) | {"model": ""}


def test_counts_go_before_curves(plan: Plan, folder: Path) -> None:
    decoder = small_decoder("llama", d_model=64, d_ff=256, n_layers=4, n_kv_heads=4, head_dim=16, vocab_size=500)
    counts = np.full((4, 256), 100, np.uint64)
    order = np.tile(np.arange(256, dtype=np.uint32), (4, 1))
    profile = ActivationProfile(decoder=decoder, tokens=1000, counts=counts, order=order, inputs="x")
    profile.save(folder / "p.npz")
    found = plan("config.json", "--machine", "m.toml", "--counts", "p.npz")
    assert (found["density"], found["activation"]) == (0.1, "counts of 1000 tokens in p.npz")


def test_a_model_without_zeros_is_dense(plan: Plan, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": "silu"}))
    found = plan("config.json", "--machine", "m.toml")
    assert (found["rung"], found["predictor_rank"], found["density"]) == ("dense", None, 1.0)


def test_formats_and_context_are_as_asked(plan: Plan) -> None:
    usual = plan("config.json", "--machine", "alone.toml", *FIRES)
    small = plan("config.json", "--machine", "alone.toml", *FIRES, "--format", "q4", "--ctx-size", "64")
    assert set(small["formats"].values()) == {"q4"}
    a, b = (found["budgets"][1]["ram_bytes_by_part"] for found in (usual, small))
    assert b["cache"] * 2 == a["cache"]
    assert b["ffn"] < 0.6 * a["ffn"]


def test_without_a_gpu_the_memory_varies(plan: Plan) -> None:
    needed = sum(plan("config.json", "--machine", "alone.toml", *FIRES)["budgets"][1]["ram_bytes_by_part"].values())
    found = plan("config.json", "--machine", "alone.toml", "--ram-budget", needed, *FIRES)
    assert [b["fits"] for b in found["budgets"]] == [False, True, True]
    assert [b["ram_bytes"] for b in found["budgets"]] == [needed * 75 // 100, needed, needed * 125 // 100]


@pytest.fixture
def with_disk(folder: Path) -> Path:
    """A machine with a disk and no GPU, and a model whose FFNs are worth reading from it."""
    disk = Disk(name="nvme", sizes_kib=[4, 64], depths=[1, 16], read_mb_per_s=[[40.0, 200.0], [400.0, 1000.0]])
    machine = MACHINE.model_copy(update={"gpu": None, "link": None, "disk": disk})
    (folder / "disk.toml").write_text(machine.to_toml())
    wide = {**CONFIG, "hidden_size": 256, "intermediate_size": 4096}
    (folder / "wide.json").write_text(json.dumps(wide))
    return folder


@pytest.mark.usefixtures("with_disk")
def test_rows_that_do_not_fit_are_planned_on_disk(plan: Plan) -> None:
    found = plan("wide.json", "--machine", "disk.toml", "--ram-budget", "220MiB", *FIRES)
    main, ladder = found["budgets"][1], found["ram_budgets"]
    assert found["disk"] == "nvme"
    assert 0 < main["pinned_share"] + main["cached_share"] < 1
    assert 0 < main["hit_rate"] < 1
    assert main["read_bytes"] > 0
    assert main["milliseconds"]["disk"] > 0
    assert sum(main["milliseconds"].values()) == pytest.approx(1000 / main["decode_tokens_per_s"])
    assert sum(main["ram_bytes_by_part"].values()) <= 220 << 20
    for key, rising in (("ram_bytes", 1), ("decode_tokens_per_s", 1), ("hit_rate", 1), ("read_bytes", -1)):
        values = [rising * budget[key] for budget in ladder]
        assert values == sorted(values), key
    assert (ladder[-1]["hit_rate"], ladder[-1]["read_bytes"], ladder[-1]["pinned_share"]) == (1.0, 0, 1.0)


@pytest.mark.usefixtures("with_disk")
def test_too_little_ram_names_the_smallest_that_does(plan: Plan, refused: Callable[..., str]) -> None:
    message = refused(4, "wide.json", "--machine", "disk.toml", "--ram-budget", "1MiB", *FIRES)
    least = int(re.findall(r"(\d+) bytes of RAM \(", message)[-1])
    assert plan("wide.json", "--machine", "disk.toml", "--ram-budget", least, *FIRES)["budgets"][1]["fits"]
    refused(4, "wide.json", "--machine", "disk.toml", "--ram-budget", least - 1, *FIRES)


@pytest.mark.usefixtures("with_disk")
def test_the_text_says_what_is_on_disk(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = ("plan", str(folder / "wide.json"), "--machine", str(folder / "disk.toml"), *FIRES)
    assert console.run(app, [*arguments, "--ram-budget", "220MiB"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"rows in RAM +\d+% pinned, a cache for \d+%, the rest on disk", text)
    assert re.search(r"RAM, CPU alone +pinned +cached +found in RAM +read a token +decode", text)
    none = ("plan", str(folder / "wide.json"), "--machine", str(folder / "alone.toml"), *FIRES)
    assert console.run(app, list(none)) == 0
    assert "none in the machine profile: all is planned in memory" in capsys.readouterr().out


def test_the_text_says_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, machine = folder / "config.json", folder / "m.toml"
    assert console.run(app, ["plan", str(config), "--machine", str(machine), *FIRES]) == 0
    text = capsys.readouterr().out
    titles = [line.split("  ")[0] for line in text.splitlines() if line[:1] not in ("", " ")]
    assert titles[:6] == ["answer", "model", "machine", "activation", "ffn", "part"]
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "\n0 %" in text


@pytest.mark.slow
def test_no_torch_is_needed(folder: Path) -> None:
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'numba', 'safetensors'): sys.modules[name] = None\n"
        "from pi_compile.cli.main import main\nmain()"
    )
    arguments = ["plan", "config.json", "--machine", "m.toml", *FIRES]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub with one config, and nobody asked."""

    def fetched(name: str) -> Path:
        if name != "owner/model":
            raise CheckpointError(f"{name}: the hub cannot be reached")
        return folder / "config.json"

    monkeypatch.setitem(sys.modules, "pi_compile.checkpoint.folder", SimpleNamespace(fetched_config=fetched))


@pytest.mark.usefixtures("hub")
def test_the_config_of_a_hub_name_is_fetched(plan: Plan, refused: Callable[..., str]) -> None:
    assert plan("owner/model", "--machine", "m.toml", *FIRES)["model"] == "owner/model"
    message = refused(INPUT, "nothing/here", "--machine", "m.toml")
    assert "no config to plan from" in message
    assert "found: nothing/here: the hub cannot be reached" in message


@pytest.mark.usefixtures("hub")
def test_mistakes(refused: Callable[..., str], folder: Path) -> None:
    model = ("config.json", "--machine", "m.toml")
    assert "no config to plan from" in refused(INPUT, "nothing/here", "--machine", "m.toml")
    assert "did you mean facebook/opt-6.7b?" in refused(INPUT, "facebook/opt-6.7", "--machine", "m.toml")
    assert "facebook/opt-6.7b" in refused(INPUT, "facebook/opt-6.6b", "--machine", "m.toml")
    assert "error: pc-medium: no such machine profile" in refused(INPUT, "config.json", "--machine", "pc-medium")
    assert "no such recipe" in refused(INPUT, "r.toml")
    assert "pi-compile train RECIPE --export" in refused(USAGE, "model.pi", "--machine", "m.toml")
    assert "of another model" in refused(INPUT, *model, "--counts", ROOT / "profiles" / "activations" / "demo.npz")
    assert "go together" in refused(USAGE, *model, "--density", "0.1")
    assert "--density much" in refused(USAGE, *model, "--curve", "opt-30b", "--density", "much")
    assert "--curve opt-30b" in refused(USAGE, *model, "--curve", "opt30b", "--density", "0.1")
    assert "nothing is known of how its neurons fire" in refused(USAGE, *model)
    assert "--format q3" in refused(USAGE, *model, *FIRES, "--format", "q3")
    assert "at most 128" in refused(USAGE, *model, *FIRES, "--ctx-size", "129")
    assert "has no GPU" in refused(USAGE, "config.json", "--machine", "alone.toml", "--vram-budget", "1GiB", *FIRES)
    assert "--vram-budget much" in refused(USAGE, *model, "--vram-budget", "much", *FIRES)
    assert "does not fit" in refused(FIT, *model, "--ram-budget", "100KB", "--vram-budget", "100KB", *FIRES)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": None}))
    assert "--format f16" in refused(USAGE, *model, *FIRES)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 0}))
    assert "config.json: hidden_size" in refused(INPUT, *model, *FIRES)


# Bundled models and recipes.


@pytest.mark.parametrize("name", bundled_models())
def test_a_bundled_model_is_known_by_its_name(name: str) -> None:
    model = find_planned(name, Path())
    assert (model.activation is not None) == model.decoder.sparse
    assert model.activation is None or "density: " in model.activation.source
    assert find_planned(name.split("/")[1].lower(), Path()).decoder == model.decoder
    assert model.dtype in ("f16", "bf16", "f32")


def test_what_a_gpu_does_not_compute_is_planned_for_the_cpu(plan: Plan) -> None:
    config = ROOT / "tests" / "compile" / "checkpoint" / "configs" / "openai--gpt-oss-20b.json"
    found = plan(config, "--machine", "pc-low", "--format", "q4")
    assert {"decoder.attention_sinks", "decoder.window"} < set(found["gpu_lacks"])
    assert [budget["vram_bytes"] for budget in found["budgets"]] == [0, 0, 0]
    assert "the GPU tier does not compute what this model does (decoder.act" in plan_text(found)


def test_a_mixture_is_answered_for_first(plan: Plan, folder: Path) -> None:
    """Four layers of Qwen3-30B-A3B."""
    config = json.loads((bundled_folder("profiles/models") / "Qwen/Qwen3-30B-A3B/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    found = plan("config.json", "--machine", "laptop", "--format", "q4", "--ram-budget", "1536MiB")
    rates = {b["ram_bytes"]: b["decode_tokens_per_s"] for b in found["ram_budgets"]}
    assert list(rates.values()) == sorted(rates.values())
    assert rates[3 << 29] == found["budgets"][1]["decode_tokens_per_s"]
    assert found["budgets"][1]["layer_split_tokens_per_s"] is None
    assert found["more_ram"] == {"ram_bytes": 19 << 29, "decode_tokens_per_s": max(rates.values())}
    text = plan_text(found)
    assert text.startswith("answer ")
    assert f"at {rates[3 << 29]:.1f} tokens/s; 8.0 GiB more RAM would give {max(rates.values()):.1f}" in text


def test_layers_with_a_mixer_or_an_ffn_alone_are_planned(plan: Plan, folder: Path) -> None:
    """Layers of Nemotron-3 Super: the first one has no FFN, and experts are narrower than the model."""
    path = ROOT / "tests/compile/checkpoint/configs/nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4.json"
    cut = {"hybrid_override_pattern": "ME*", "num_hidden_layers": 3, "n_routed_experts": 32}
    (folder / "config.json").write_text(json.dumps(json.loads(path.read_text()) | cut))
    found = plan("config.json", "--machine", "pc-low", "--format", "q4", "--curve", "opt-30b", "--density", "0.2")
    assert {"decoder.expert_width", "decoder.beside_ff"} < set(found["gpu_lacks"])
    assert found["budgets"][1]["prefill_tokens_per_s"] > 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_what_there_is(path: Path) -> None:
    recipe = read_recipe(path)
    model = find_planned(recipe.model.path, path.parent)
    machine = find_machine(recipe.place.machine, path.parent)
    assert path.stem.endswith(machine.name)
    formats = model.formats(recipe.pack.model_dump())
    budget = sum(recipe.place.vram_gib)
    weights = stored(model.decoder, untrained_layers(model.decoder)[0].rank, formats["ffn"])
    assert weights < (machine.cpu.ram_gib + budget) * 2**30, "its weights do not fit"
    assert f"pi-compile plan recipes/{path.name}" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["opt-125m-laptop", "bamboo-7b-pc-low"])
def test_a_recipe_is_planned(plan: Plan, name: str) -> None:
    found = plan(ROOT / "recipes" / f"{name}.toml")
    assert all(budget["fits"] for budget in found["budgets"])
    assert found["budgets"][1]["decode_tokens_per_s"] > found["budgets"][1]["layer_split_tokens_per_s"]


def test_a_recipe_is_planned_as_it_is_placed(plan: Plan) -> None:
    """With the activations, table and context that it names; flags go before."""
    recipe = ROOT / "recipes" / "demo.toml"
    lock = lock_path(recipe).read_text(encoding="utf-8")
    found = plan(recipe, "--vram-budget", f"{re.findall(r'^vram_bytes = (.+)', lock, re.M)[2]}B")
    budget = found["budgets"][1]
    assert f"predicted_ns = {ceil(1e9 / budget['decode_tokens_per_s'])}\n" in lock
    assert (found["context"], found["trained"], found["predictor_rank"]) == (512, True, 64)
    assert plan(recipe, "--ctx-size", "64")["context"] == 64
    assert plan(recipe, *FIRES)["trained"] is False


def test_experts_are_planned_at_the_bytes_of_their_arrays() -> None:
    """Two layers of TurboSparse-Mixtral-47B: the parts that are placed are the arrays of the file, each once."""
    name = "PowerInfer/TurboSparse-Mixtral"
    model = find_planned(name, Path())
    model = replace(model, decoder=replace(model.decoder, n_layers=2))
    formats = dict.fromkeys(PARTS, "q4")
    machine = find_machine("pc-low", Path())
    spec = PlanSpec(model=model, machine=machine, formats=formats, context=2048, vram=2**30, ram=2**36)
    found = planned(spec)
    experts, budget = model.decoder.n_experts, found["budgets"][1]
    assert (experts, found["experts"], found["density"]) == (8, 8, 0.15)
    parts = ("embedding", "attention", "predictor", "ffn", "head")
    placed = sum(budget["gpu_bytes_by_part"][part] + budget["ram_bytes_by_part"][part] for part in parts)
    assert placed == stored(model.decoder, found["predictor_rank"], "q4")
    cuts = np.array(budget["expert_cuts"]).reshape(2, experts)
    assert cuts.sum(1).tolist() == budget["cuts"]
    assert cuts.min() > 0
    assert (np.ptp(cuts, axis=1) <= 64).all(), "experts that are alike have like cuts"
    text = plan_text(found)
    assert "of the neurons of its experts fire for a token" in text
    assert "of an expert's" in text
    assert "neurons of its experts fire" not in plan_text({**found, "density": 1.0})


# The rule for models that are not trained yet, and prefill.


def test_ranks_by_rule() -> None:
    decoder = find_planned("facebook/opt-30b", Path()).decoder
    layers = untrained_layers(decoder)
    rank = layers[0].rank
    assert rank is not None
    assert (len(layers), rank % 32, {layer.rung for layer in layers}) == (48, 0, {"predicted"})
    weights = [48 * r * (decoder.d_model + decoder.d_ff) for r in (rank, rank + 32)]
    assert weights[0] <= parameters(decoder) * PREDICTOR_SHARE < weights[1]
    assert untrained_layers(replace(decoder, activation="gelu")) == (LayerWork(rung="dense"),) * 48
    assert Fraction(PREDICTOR_SHARE) == Fraction("0.0709")


def test_prefill_is_bound_by_memory_or_by_arithmetic() -> None:
    """One layer on the CPU, by hand: 4 · 32² + 3 · 40 · 32 weights of f16, and twice as many operations a token."""
    decoder = replace(small_decoder("llama", n_kv_heads=4), n_layers=1, d_ff=64)
    work = Workload(
        decoder=decoder,
        formats=dict.fromkeys(PARTS, "f16"),
        tokens=10,
        counts=np.zeros((1, 64), np.int64),
        layers=(LayerWork(rung="dense"),),
        context=16,
    )
    assignment = Assignment(sides=(0,), cuts=(0,), embedding=0, head=0)
    slow = Machine(name="s", source="t", cpu=MACHINE.cpu.model_copy(update={"products_gflop_per_s": 0.001}))
    operations = 2 * 8 * (4 * 32 * 32 + 3 * 64 * 32)
    assert block_ps(Problem.of(work, slow), assignment, 8) == operations * 10**6
    memory = block_ps(Problem.of(work, slow.model_copy(update={"cpu": MACHINE.cpu})), assignment, 8)
    assert memory == block_ps(Problem.of(work, slow.model_copy(update={"cpu": MACHINE.cpu})), assignment, 800)
    assert memory == 100 * (2 * 4 * 32 * 32 + 2 * 4 * 32 + 2 * 3 * 64 * 32)  # at 10 GB/s, both norms included


def test_a_density_keeps_its_digits() -> None:
    activation = find_planned("facebook/opt-30b", Path()).activation
    assert activation is not None
    assert activation.density == Decimal("0.03")
