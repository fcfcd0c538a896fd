"""The manifest: one spelling, every problem named with its path."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fact_table
from support.paths import GOLDEN, ROOT

from pi_runtime.artifact.decoder import Decoder, facts
from pi_runtime.artifact.decoding import MAX_DEPTH, canonical_json, parse_json
from pi_runtime.artifact.manifest_file import read_manifest
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import FORMAT_VERSION, ArrayEntry, FileEntry, Layer, Manifest, Plan, RowPlan, Text
from pi_runtime.errors import ArtifactError

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
texts = st.text(st.characters(codec="utf-8"), max_size=5)
values = st.recursive(
    scalars | texts, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3), max_leaves=8
)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    with Artifact.open(GOLDEN) as artifact:
        return artifact.manifest


def refused(manifest: Manifest, change: Callable[[Any], object]) -> str:
    value = json.loads(canonical_json(manifest))
    change(value)
    with pytest.raises(ArtifactError) as caught:
        read_manifest(canonical_json(value), "a.pi")
    assert caught.value.exit_code == 3
    return str(caught.value)


@given(values)
def test_canonical_json_round_trips(value: Any) -> None:
    data = canonical_json(value)
    assert parse_json(data) == value
    assert canonical_json(parse_json(data)) == data


def test_canonical_spelling() -> None:
    assert canonical_json({"b": (1, 2.0), "a": {"ü": None}}) == '{"a":{"ü":null},"b":[1,2.0]}'.encode()


@given(recipe=st.dictionaries(texts, values, max_size=3))
def test_manifest_round_trips(manifest: Manifest, recipe: dict[str, Any]) -> None:
    changed = Manifest(**{**{f.name: getattr(manifest, f.name) for f in fields(manifest)}, "recipe": recipe})
    assert read_manifest(canonical_json(changed), "a.pi") == changed


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff", b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}', b"[" * 100000, b"1" * 5000, b"\xef\xbb\xbf{}"],
)
def test_not_json(text: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"a\.pi: the manifest is not JSON"):
        read_manifest(text, "a.pi")


@pytest.mark.parametrize("text", [b"[]", b"null", b"{}", b'{"format":"other"}', b'"pi-artifact"'])
def test_not_a_manifest(text: bytes) -> None:
    with pytest.raises(ArtifactError, match="not a pi-artifact manifest"):
        read_manifest(text, "a.pi")


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, "1", None, [1], {}])
def test_other_versions_are_refused_by_name(manifest: Manifest, version: Any) -> None:
    message = refused(manifest, lambda m: m.update(version=version))
    assert "artifact format version" in message
    assert f"expected: version {FORMAT_VERSION}" in message


def test_nesting_has_an_end(manifest: Manifest) -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert "nested too deeply" in refused(manifest, lambda m: m.update(recipe={"a": deep}))


@pytest.mark.parametrize(
    "spelling",
    [
        lambda text: text.replace(b",", b", ", 1),
        lambda text: text + b"\n",
        lambda text: text.replace(b'"family":"llama"', b'"family":"l\\u006cama"'),
        lambda text: text.replace(b'"n_heads":3', b'"n_heads":3,"n_heads":3'),
        lambda text: text.replace(b'"temperature":1.0', b'"temperature":1e0'),
        lambda text: text.replace(b'"rung":"gate"', b'"rank":null,"rung":"gate"'),
        lambda text: text.replace(b'"recipe":{}', b'"recipe":{"a":"\\ud800"}'),
    ],
)
def test_one_spelling_only(manifest: Manifest, spelling: Callable[[bytes], bytes]) -> None:
    text = spelling(canonical_json(manifest))
    assert text != canonical_json(manifest)
    with pytest.raises(ArtifactError, match="not in canonical JSON"):
        read_manifest(text, "a.pi")


def row_plan(**changes: Any) -> dict[str, Any]:
    """A row plan as a manifest has it."""
    usual = {
        "pinned": (0, 8),
        "cached": (3, 32),
        "first": (False, True),
        "ram_bytes": 1,
        "slot_bytes": 1,
        "context": 64,
    }
    return {**usual, "read_bytes": 1, "predicted_ns": 1, "digest": "0" * 64, **changes}


def test_row_plans_are_left_out_where_there_are_none(manifest: Manifest) -> None:
    assert b"row_plans" not in canonical_json(manifest)
    held = replace(manifest, row_plans=(RowPlan(**row_plan()),))
    assert read_manifest(canonical_json(held), "a.pi") == held


LIES: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: m.pop("decoder"), "manifest.decoder: missing"),
    (lambda m: m.update(extra=1), "manifest.extra: unknown key"),
    (lambda m: m["decoder"].update(n_heads=3.0), "manifest.decoder.n_heads: expected int, found 3.0"),
    (lambda m: m["decoder"].update(n_heads=True), "manifest.decoder.n_heads: expected int, found True"),
    (lambda m: m["decoder"].update(norm_eps=1), "manifest.decoder.norm_eps: expected float, found 1"),
    (lambda m: m.update(decoder=[]), "manifest.decoder: expected an object"),
    (lambda m: m.update(layers={}), "manifest.layers: expected"),
    (lambda m: m.update(arrays=[]), "manifest.arrays: expected"),
    (lambda m: m["layers"][0].update(rank="3"), "manifest.layers[0].rank: expected int, found '3'"),
    (lambda m: m["arrays"]["embedding"].update(offset="64"), "manifest.arrays.embedding.offset: expected int"),
    (lambda m: m["decoder"].update(norm="batch"), "decoder.norm: 'batch', expected one of rms, layer"),
    (lambda m: m["decoder"].update(d_ff=0), "decoder.d_ff: 0, expected integer in 1…2³¹−1"),
    (lambda m: m["decoder"].update(vocab_size=2**31), "decoder.vocab_size: 2147483648, expected integer in"),
    (lambda m: m["decoder"].update(n_kv_heads=2), "decoder.n_kv_heads: 2, allowed only as a divisor of n_heads"),
    (lambda m: m["decoder"].update(n_kv_heads=0), "decoder.n_kv_heads: 0, expected integer in"),
    (lambda m: m["decoder"].update(norm_eps=0.0), "decoder.norm_eps: 0.0, expected float > 0"),
    (lambda m: m["decoder"].update(head_dim=7), "decoder.rotary_frequencies: (1.0, 0.1"),
    (lambda m: m["decoder"].update(rotary_frequencies=[]), "decoder.positions: 'rope', allowed only rope where"),
    (lambda m: m["decoder"].update(rotary_scale=0.0), "decoder.rotary_scale: 0.0, expected float > 0"),
    (lambda m: m["decoder"].update(block="twin"), "decoder.block: 'twin', expected one of sequential"),
    (lambda m: m["decoder"].update(shared_norm=True), "decoder.shared_norm: True, allowed only in a parallel"),
    (lambda m: m["decoder"].update(experts_per_token=2), "decoder.experts_per_token: 2, allowed only up to n_experts"),
    (lambda m: m["decoder"].update(joint_qk_norm=True), "decoder.joint_qk_norm: True, allowed only with qk_norm"),
    (lambda m: m["decoder"].update(router_normalised=False), "decoder.router_normalised: False, allowed only with n_"),
    (
        lambda m: m["decoder"].update(rotary_frequencies=[1.0, -1.0]),
        "decoder.rotary_frequencies: (1.0, -1.0), expected",
    ),
    (lambda m: m["decoder"].update(embedding_scale=-1.0), "decoder.embedding_scale: -1.0, expected float > 0"),
    (lambda m: m["decoder"].update(logit_softcap=-1.0), "decoder.logit_softcap: -1.0, expected float ≥ 0"),
    (
        lambda m: m["decoder"].update(unrotated_layers=[1, 0]),
        "decoder.unrotated_layers: (1, 0), expected list of layers",
    ),
    (lambda m: m["decoder"].update(unrotated_layers=[2]), "decoder.unrotated_layers: (2,), expected list of layers"),
    (
        lambda m: m["decoder"].update(activation="drelu", ffn="plain"),
        "decoder.activation: 'drelu', allowed only in a gated",
    ),
    (lambda m: m["decoder"].update(activation="silu", threshold=0.5), "decoder.threshold: 0.5, allowed only with relu"),
    (lambda m: m["decoder"].update(threshold=-0.5), "decoder.threshold: -0.5, expected float ≥ 0"),
    (lambda m: m["decoder"].update(position_offset=2), "decoder.position_offset: 2, allowed only with learned"),
    (lambda m: m["decoder"].update(positions="learned"), "decoder.positions: 'learned', allowed only"),
    (lambda m: m["formats"].update(ffn="u32"), "formats: each of embedding"),
    (lambda m: m["formats"].pop("head"), "formats: each of embedding"),
    (lambda m: m["formats"].update(more="f32"), "formats: each of embedding"),
    (
        lambda m: m["formats"].update({"layers/0/ffn/first": "f32"}),
        "formats.layers/0/ffn/first: 'f32' is no other one",
    ),
    (
        lambda m: m["formats"].update({"layers/0/ffn/first": "q9"}),
        "formats.layers/0/ffn/first: 'q9' is no other one",
    ),
    (lambda m: m["formats"].update({"layers/9/ffn/first": "q4"}), "formats.layers/9/ffn/first: no matrix"),
    (lambda m: m["formats"].update({"layers/00/ffn/first": "q4"}), "formats.layers/00/ffn/first: no matrix"),
    (lambda m: m["formats"].update({"layers/0/ffn/norm": "q4"}), "formats.layers/0/ffn/norm: no matrix"),
    (lambda m: m["layers"].pop(), "layers: 1 entries for 2 layers"),
    (lambda m: m["layers"][0].update(rung="magic"), "layers[0].rung: 'magic' is none of dense, gate, threshold"),
    (lambda m: m["layers"][1].update(threshold=0.5), "layers[1].threshold: 0.5 on the rung gate"),
    (lambda m: m["layers"][1].update(rung="threshold", threshold=-1.0), "layers[1].threshold: -1.0 on the rung"),
    (lambda m: m["layers"][1].update(rung="predicted"), "layers[1]: rung predicted without a predictor"),
    (lambda m: m["layers"][0].update(rank=73), "layers[0].rank: 73 is not in 1…72"),
    (lambda m: m["plans"][0].update(cuts=[8]), "plans[0].cuts: not one cut"),
    (lambda m: m["plans"][0].update(cuts=[8, 41]), "plans[0].cuts: not one cut"),
    (lambda m: m["plans"][0].update(used_bytes=2**40), "plans[0]: 1099511627776 bytes used of a budget of 32768"),
    (lambda m: m["plans"][0].update(objective="best"), "plans[0].objective: 'best' is none of time, hot-mass"),
    (lambda m: m["plans"][0].update(attention=["gpu"]), "plans[0].attention: 1 sides for 2 layers"),
    (lambda m: m["plans"][0].update(attention=["gpu", "npu"]), "plans[0].attention: 'npu' is none of cpu, gpu"),
    (lambda m: m["plans"][0].update(embedding="disk"), "plans[0].embedding: 'disk' is none of cpu, gpu"),
    (lambda m: m["plans"][0].update(head=""), "plans[0].head: '' is none of cpu, gpu"),
    (lambda m: m["plans"][0].update(context=65), "plans[0].context: 65 is not in 1…64"),
    (lambda m: m["plans"][0].update(predicted_ns=-1), "plans[0].predicted_ns: -1 is not a size"),
    (lambda m: m["plans"][0].update(digest="x"), "plans[0].digest: not a digest"),
    (lambda m: m["plans"].reverse(), "plans: budgets [65536, 32768] do not rise"),
    (lambda m: m.update(row_plans=[]), "the manifest is not in canonical JSON"),
    (lambda m: m.update(row_plans=[row_plan(cached=(3,))]), "row_plans[0].cached: 1 values for 2 layers"),
    (lambda m: m.update(row_plans=[row_plan(cached=(3, 41))]), "row_plans[0].pinned, cached: 8 and 41 rows of a"),
    (lambda m: m.update(row_plans=[row_plan(pinned=(-1, 0))]), "row_plans[0].pinned, cached: -1 and 3 rows of a"),
    (lambda m: m.update(row_plans=[row_plan(context=65)]), "row_plans[0].context: 65 is not in 1…64"),
    (lambda m: m.update(row_plans=[row_plan(slot_bytes=-1)]), "row_plans[0].slot_bytes: -1 is not a size"),
    (lambda m: m.update(row_plans=[row_plan(digest="x")]), "row_plans[0].digest: not a digest"),
    (lambda m: m.update(row_plans=[row_plan(ram_bytes=9), row_plan()]), "row_plans: budgets [9, 1] do not rise"),
    (lambda m: m.update(profiled_tokens=-1), "profiled_tokens: -1 is not a count"),
    (lambda m: m.update(profiled_tokens=0), "arrays.layers/0/ffn/counts: not an array of this decoder"),
    (lambda m: m["arrays"].pop("head"), "arrays.head: missing"),
    (lambda m: m["arrays"].update(tail=m["arrays"]["head"]), "arrays.tail: not an array of this decoder"),
    (lambda m: m["arrays"]["head"].update(shape=[257, 73]), "arrays.head: f16 (257, 73) in 49344 bytes, expected"),
    (lambda m: m["arrays"]["head"].update(format="bf16"), "arrays.head: bf16 (257, 72)"),
    (lambda m: m["arrays"]["head"].update(nbytes=1), "arrays.head: f16 (257, 72) in 1 bytes"),
    (lambda m: m["arrays"].pop("layers/0/ffn/first_scales"), "arrays.layers/0/ffn/first_scales: missing"),
    (
        lambda m: (m["formats"].update(ffn="f16"), m["features"].remove("formats.q4")),
        "arrays.layers/0/ffn/first_scales: not an array of this decoder",
    ),
    (lambda m: m["formats"].update(ffn="scale"), "formats: each of embedding"),
    (lambda m: m["arrays"]["head"].update(sha256="A" * 64), "arrays.head.sha256: not a digest"),
    (lambda m: m["files"].pop("tokenizer.json"), "files.tokenizer.json: missing"),
    (lambda m: m["files"].update({"../x.py": m["files"]["tokenizer.json"]}), "files.../x.py: not a file name"),
    (lambda m: m["files"].update({"/a.json": m["files"]["tokenizer.json"]}), "files./a.json: not a file name"),
    (lambda m: m["files"].update({"layers": m["files"]["tokenizer.json"]}), "files.layers: not a file name"),
    (lambda m: m["files"].update({"zarr.json": m["files"]["tokenizer.json"]}), "files.zarr.json: not a file name"),
    (lambda m: m["files"].update({"a.b\n": m["files"]["tokenizer.json"]}), "not a file name"),
    (lambda m: m["files"]["tokenizer.json"].update(sha256=""), "files.tokenizer.json.sha256: not a digest"),
    (lambda m: m["files"]["tokenizer.json"].update(nbytes=-1), "files.tokenizer.json.nbytes: -1 is not a size"),
    (lambda m: m["text"].update(end_ids=[257]), "text: token ids (257,) outside the vocabulary of 257"),
    (lambda m: m["text"].update(prefix_ids=[-1]), "text: token ids (-1, 256) outside the vocabulary"),
    (lambda m: m["generation"].update(temperature="hot"), "generation.temperature: 'hot' is no value for it"),
    (lambda m: m["generation"].update(top_p=1.5), "generation.top_p: 1.5 is no value for it"),
    (lambda m: m["generation"].update(top_k=True), "generation.top_k: True is no value for it"),
    (lambda m: m["generation"].update(beams=4), "generation.beams: unknown key"),
]


@pytest.mark.parametrize(("change", "problem"), LIES, ids=[problem for _, problem in LIES])
def test_each_lie_is_named(manifest: Manifest, change: Callable[[Any], object], problem: str) -> None:
    assert problem in refused(manifest, change)


def test_every_problem_is_reported(manifest: Manifest) -> None:
    def change(m: Any) -> None:
        m["decoder"].update(n_heads="3", zzz=1)
        m["layers"][1].pop("rung")
        m["text"]["end_ids"] = [None]

    message = refused(manifest, change)
    for problem in ("decoder.n_heads:", "decoder.zzz:", "layers[1].rung: missing", "text.end_ids[0]:"):
        assert problem in message


def test_messages_carry_no_control_characters_and_end(manifest: Manifest) -> None:
    message = refused(manifest, lambda m: m.update({f"\x1b[2J{n}": 1 for n in range(1000)}))
    assert "\x1b" not in message
    assert "… and 950 more" in message


@pytest.mark.parametrize("kind", [Manifest, Decoder, Layer, Plan, RowPlan, Text, ArrayEntry, FileEntry])
def test_the_page_on_the_format_names_every_field(kind: type[Any]) -> None:
    page = (ROOT / "docs" / "reference" / "format.md").read_text(encoding="utf-8")
    assert [f.name for f in fields(kind) if f"`{f.name}`" not in page] == []
    assert f"version {FORMAT_VERSION}\n" in page.splitlines(keepends=True)[0]


def test_the_table_of_facts_is_made_of_their_records() -> None:
    page = fact_table.PAGE.read_text(encoding="utf-8")
    assert fact_table.written(page) == page, "python tests/support/fact_table.py writes it"
    assert all(own.of in ("", *facts()) for own in facts().values())
