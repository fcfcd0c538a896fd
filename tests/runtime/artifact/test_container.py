"""What is written is what is read: bytes, alignment, order, views."""

import hashlib
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import GOLDEN
from support.synthetic import bare_manifest, byte_letters, byte_tokenizer, random_artifact, random_values, small_decoder

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import FORMATS, ROW_FORMATS
from pi_runtime.artifact.layout import manifest_specs, place_arrays
from pi_runtime.artifact.quantisation import dequantise, quantise
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS, array_specs, is_scales, scales_name
from pi_runtime.artifact.verification import verify
from pi_runtime.artifact.writer import ArtifactWriter
from pi_runtime.errors import ArtifactError

GOLDEN_SHA256 = "dec9ea963711b5d95a420aaf21274165f9ce73b32abf18416359e44c42c59b1c"


@st.composite
def decoders(draw: st.DrawFn) -> Decoder:
    n_kv_heads = draw(st.integers(1, 2))
    return small_decoder(
        draw(st.sampled_from(["llama", "opt"])),
        vocab_size=draw(st.integers(257, 400)),
        d_model=draw(st.integers(1, 70)),
        n_layers=draw(st.integers(1, 3)),
        n_kv_heads=n_kv_heads,
        n_heads=n_kv_heads * draw(st.integers(1, 3)),
        head_dim=2 * draw(st.integers(1, 5)),
        d_ff=draw(st.integers(1, 70)),
        tied_head=draw(st.booleans()),
        ffn_bias=draw(st.booleans()),
    )


def write(path: Path, decoder: Decoder, fmt: str, ranks: list[int | None], profiled: bool, step: int) -> dict[str, Any]:
    """An artifact written in blocks of `step` rows; returns the values written."""
    manifest = bare_manifest(decoder, dict.fromkeys(PARTS, fmt), ranks, 5 if profiled else 0)
    rng, values = np.random.default_rng(0), {}
    with ArtifactWriter(path) as writer:
        for name, spec in array_specs(decoder, manifest.formats, ranks, profiled).items():
            if is_scales(name):
                continue
            values[name] = random_values(name, spec, rng)
            writer.add_array(name, spec, (values[name][n : n + step] for n in range(0, spec.shape[0], step)))
        writer.add_file("tokenizer.json", b"{}")
        writer.add_file("empty.txt", b"")
        writer.finish(manifest)
    return values


def assert_stored(artifact: Artifact, name: str, written: npt.NDArray[Any]) -> None:
    """An array's bytes, its scales' where it has some, and its values are those of the format's definition."""
    fmt = FORMATS[artifact.manifest.arrays[name].format]
    if not fmt.quantised:
        np.testing.assert_array_equal(artifact.array(name), fmt.encode(written))
        np.testing.assert_array_equal(artifact.values(name), fmt.decode(fmt.encode(written), written.shape[-1]))
        return
    stored, scales = quantise(fmt, written)
    np.testing.assert_array_equal(artifact.array(name), stored)
    np.testing.assert_array_equal(artifact.array(scales_name(name)), scales)
    np.testing.assert_array_equal(artifact.values(name), dequantise(fmt, stored, scales, written.shape[-1]))


@given(decoders(), st.sampled_from(ROW_FORMATS), st.booleans(), st.booleans(), st.integers(1, 100))
def test_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, decoder: Decoder, fmt: str, predicted: bool, profiled: bool, step: int
) -> None:
    path = tmp_path_factory.mktemp("artifact") / "a.pi"
    ranks: list[int | None] = [1 if predicted else None] * decoder.n_layers
    values = write(path, decoder, fmt, ranks, profiled, step)
    report = verify(path)
    assert (report.files, report.nbytes) == (2, path.stat().st_size)
    with Artifact.open(path) as artifact:
        assert artifact.manifest.decoder == decoder
        assert artifact.file("empty.txt") == b""
        names = list(manifest_specs(artifact.manifest))
        assert report.arrays == len(names)
        assert [name for name in names if not is_scales(name)] == list(values)
        for name, written in values.items():
            assert_stored(artifact, name, written)
    first = path.read_bytes()
    write(path, decoder, fmt, ranks, profiled, 1000)
    assert path.read_bytes() == first, "the bytes depend on how the rows were cut into blocks"


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("tied", [False, True])
def test_synthetic_artifacts(tmp_path: Path, family: str, tied: bool) -> None:
    decoder = small_decoder(family, tied_head=tied)
    path = random_artifact(tmp_path / "a.pi", decoder, ranks=[4, None], profiled=True)
    verify(path)
    with Artifact.open(path) as artifact:
        assert ("head" in artifact.manifest.arrays) != tied
        assert [layer.rung for layer in artifact.manifest.layers] == ["predicted", "gate"]
        assert artifact.file("tokenizer.json") == byte_tokenizer()
    again = random_artifact(tmp_path / "b.pi", decoder, ranks=[4, None], profiled=True)
    other = random_artifact(tmp_path / "c.pi", decoder, ranks=[4, None], profiled=True, seed=1)
    assert path.read_bytes() == again.read_bytes() != other.read_bytes()


def test_golden_artifact_is_pinned() -> None:
    assert hashlib.sha256(GOLDEN.read_bytes()).hexdigest() == GOLDEN_SHA256
    verify(GOLDEN)


def test_golden_artifact_is_rebuilt_byte_for_byte(tmp_path: Path) -> None:
    from support.synthetic import golden_artifact

    assert golden_artifact(tmp_path / "golden.pi").read_bytes() == GOLDEN.read_bytes()


def test_the_digest_is_the_documented_one() -> None:
    data = GOLDEN.read_bytes()
    comment = data[-len("pi-artifact/1 sha256-4MiB ") - 64 :]
    covered = data[:-64]
    chunks = [covered[n : n + (4 << 20)] for n in range(0, len(covered), 4 << 20)]
    digest = hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).hexdigest()
    assert comment == b"pi-artifact/1 sha256-4MiB " + digest.encode()


def test_digest_of_several_chunks(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(vocab_size=50000, d_model=48))
    covered = path.read_bytes()[:-64]
    assert len(covered) > 3 * (4 << 20)
    chunks = [covered[n : n + (4 << 20)] for n in range(0, len(covered), 4 << 20)]
    digest = hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).hexdigest()
    steps: list[tuple[int, int]] = []
    assert verify(path, lambda done, total: steps.append((done, total))).digest == digest
    assert steps[-1] == (len(covered), len(covered))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_zip_tools_accept_it_and_data_is_aligned(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(vocab_size=1000))
    data = path.read_bytes()
    names, large = [], 0
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            names.append(info.filename)
            assert info.compress_type == zipfile.ZIP_STORED
            assert info.date_time == (1980, 1, 1, 0, 0, 0)
            name_nbytes, extra_nbytes = struct.unpack_from("<HH", data, info.header_offset + 26)
            start = info.header_offset + 30 + name_nbytes + extra_nbytes
            if "/c/" in info.filename:
                large += info.file_size >= 65536
                assert start % (4096 if info.file_size >= 65536 else 64) == 0
            else:
                assert extra_nbytes == 0
        assert archive.infolist()[0].header_offset == 0
    assert large
    assert names[-1] == "manifest.json"
    kinds = ["array" if "/c/" in n else "node" if n.endswith("zarr.json") else "file" for n in names]
    assert [k for n, k in enumerate(kinds) if not n or kinds[n - 1] != k] == ["array", "file", "node", "file"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("unzip"), reason="no unzip")
def test_unzip_accepts_it() -> None:
    done = subprocess.run(["unzip", "-tq", GOLDEN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_extra_fields_are_well_formed() -> None:
    data, at, records = GOLDEN.read_bytes(), 0, 0
    while data[at : at + 4] == b"PK\3\4":
        size, name_nbytes, extra_nbytes = struct.unpack_from("<IHH", data, at + 22)
        extra = data[at + 30 + name_nbytes : at + 30 + name_nbytes + extra_nbytes]
        while extra:
            kind, length = struct.unpack_from("<HH", extra)
            assert kind == 0xD935
            assert len(extra) >= 4 + length
            extra, records = extra[4 + length :], records + 1
        at += 30 + name_nbytes + extra_nbytes + size
    assert data[at : at + 4] == b"PK\1\2"
    assert records


def test_views_are_read_only_and_outlive_the_artifact() -> None:
    artifact = Artifact.open(GOLDEN)
    view = artifact.array("layers/0/ffn/first")
    copy = view.copy()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0
    artifact.close()
    artifact.close()
    np.testing.assert_array_equal(view, copy)


def test_arrays_are_not_copied() -> None:
    with Artifact.open(GOLDEN) as artifact:
        one, two = artifact.array("embedding"), artifact.array("embedding")
        assert one.ctypes.data == two.ctypes.data
        assert one.ctypes.data % 64 == 0
        assert artifact.nbytes == GOLDEN.stat().st_size
        assert artifact.path == GOLDEN


def test_unknown_names() -> None:
    with Artifact.open(str(GOLDEN)) as artifact:
        for ask in (artifact.array, artifact.values, artifact.file):
            with pytest.raises(KeyError):
                ask("nothing")


def test_a_damaged_file_is_noticed_when_it_is_asked_for(tmp_path: Path) -> None:
    data = bytearray(GOLDEN.read_bytes())
    data[data.index(b"{{ messages")] ^= 1
    (tmp_path / "a.pi").write_bytes(data)
    with (
        Artifact.open(tmp_path / "a.pi") as artifact,
        pytest.raises(ArtifactError, match=r"damaged at chat_template\.jinja"),
    ):
        artifact.file("chat_template.jinja")


def test_predicted_size_is_nearly_the_real_one(tmp_path: Path) -> None:
    decoder = small_decoder(vocab_size=5000)
    specs = array_specs(decoder, dict.fromkeys(PARTS, "f32"), [None, None], False)
    _, predicted = place_arrays(specs)
    actual = random_artifact(tmp_path / "a.pi", decoder).stat().st_size
    assert predicted < actual < predicted + 4096 + 1024 * len(specs) + len(byte_tokenizer())


def test_tokenizer_maps_bytes() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(byte_tokenizer())
    text = "Once → Ünïcode 🌍\n\t end"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|end|>").ids == [97, 256]
    assert tokenizer.get_vocab_size() == 257
    assert len(set(byte_letters())) == 256
