"""Configs of published checkpoints, fine-tunes and conversions: each is read, planned for, or refused by name.

`configs/SOURCES.tsv` says where each was found, what is notable about it, and what is expected.
"""

import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest
from support.documents import page

from pi_compile.checkpoint.config import Config, read_json
from pi_compile.checkpoint.families.registry import decoder_of, find_adapter
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.decoder import Decoder

CONFIGS = Path(__file__).parent / "configs"
with (CONFIGS / "SOURCES.tsv").open(encoding="utf-8") as table:
    ROWS = {row["file"].removesuffix(".json"): row for row in csv.DictReader(table, delimiter="\t")}
READ = [name for name, row in ROWS.items() if row["expected"] == "read"]


def config_of(name: str, **changes: object) -> Config:
    path = CONFIGS / f"{name}.json"
    return Config(path, {**read_json(path), **changes})


def decoder(name: str, *ignore: str, **changes: object) -> Decoder:
    return decoder_of(config_of(name, **changes), ignore)


@pytest.mark.parametrize("name", ROWS)
def test_a_published_config(name: str) -> None:
    expected, config = ROWS[name]["expected"], config_of(name)
    if expected in ("read", "planned"):
        adapter = find_adapter(config)
        assert decoder_of(config).family == adapter.family
        assert set(config.get("architectures", [])) <= set(adapter.architectures)
        assert bool(adapter.plan_only) == (expected == "planned")
    else:
        with pytest.raises(CheckpointError) as caught:
            decoder_of(config)
        assert f"{name}.json: {expected}" in str(caught.value)


def test_every_config_has_a_source() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(ROWS)
    assert all(row["source"] for row in ROWS.values())


def test_the_documented_table_counts_them() -> None:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    known = {n: row for n, row in ROWS.items() if not row["expected"].startswith("model type ")}
    for name, row in known.items():
        counts[find_adapter(config_of(name)).family][row["expected"] not in ("read", "planned")] += 1
    text = page("reference/models.md").split("## Configurations tried")[1]
    rows = re.findall(r"^\| `(\w+)` \| (?:only planned: )?(\d+) \| (\d*)", text, re.M)
    assert {family: [int(read), int(refused or 0)] for family, read, refused in rows} == counts
    assert f"{len(ROWS)} configs" in text
    unknown = {config_of(name).get("model_type") for name in ROWS.keys() - known.keys()}
    row = text.split(f"| none | | {len(ROWS) - len(known)}, by their model types: ")[1].split("|")[0]
    assert {*re.findall(r"`(\w[\w-]*)`", row)} == unknown


@pytest.mark.parametrize("name", READ)
def test_an_unknown_key_of_any_family_is_refused_until_it_is_ignored(name: str) -> None:
    with pytest.raises(CheckpointError, match="moon_phase is not understood"):
        decoder(name, moon_phase=0.5)
    assert decoder(name, "moon_phase", moon_phase=0.5) == decoder(name)


DERIVED = {
    "rotary_dim": ("microsoft--phi-1", 31, "partial_rotary_factor × head_dim = 32"),
    "kv_channels": ("nvidia--Nemotron-Mini-4B-Instruct", 96, "head_dim, or hidden_size / num_attention_heads = 128"),
    "layer_norm_eps": ("leafspark--Nemotron-340B-Instruct-hf", 1e-6, "norm_eps, or its default = 1e-05"),
    "ff_factor": ("ssmits--Falcon2-5.5B-Swedish", "4", "ffn_hidden_size / hidden_size = 4"),
}


@pytest.mark.parametrize("key", DERIVED)
def test_a_redundant_key_that_contradicts_what_it_follows_from(key: str) -> None:
    name, value, expected = DERIVED[key]
    without = decoder(name, **{key: None})
    assert decoder(name) == without
    with pytest.raises(CheckpointError) as caught:
        decoder(name, **{key: value})
    message = str(caught.value)
    assert f"{name}.json: {key}" in message
    assert f"expected: {expected}" in message
    assert f"found: {value!r}" in message
    with pytest.raises(CheckpointError, match=f"{key} cannot be ignored"):
        decoder(name, key)


def test_finetuned_does_not_change_the_angles_of_yarn() -> None:
    """jquesnelle/yarn reads it for the dynamic type only, transformers for none."""
    name = "NousResearch--Yarn-Llama-2-7b-64k"
    scaling = {**config_of(name).fields["rope_scaling"], "finetuned": False}
    assert decoder(name) == decoder(name, rope_scaling=scaling)
    with pytest.raises(CheckpointError, match="rope_scaling: finetuned"):
        decoder(name, rope_scaling={"type": "linear", "factor": 16.0, "finetuned": True})
