"""An artifact that says what it is told: after token i comes token next[i], whatever came before."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pi_runtime.artifact.schema import Text
from pi_runtime.artifact.sizes import PARTS, array_specs
from pi_runtime.artifact.writer import ArtifactWriter
from support.synthetic import END_ID, bare_manifest, byte_tokenizer, small_decoder

VOCABULARY = END_ID + 1


def saying(text: str, then: int = END_ID) -> dict[int, int]:
    """The rule that makes a model go through `text` from its first byte on; no byte may come twice."""
    data = text.encode()
    assert len(set(data)) == len(data), f"{text!r} repeats a byte"
    return dict(zip(data, [*data[1:], then], strict=True))


def scripted_artifact(
    path: Path,
    following: Mapping[int, int],
    *,
    context: int = 64,
    end_ids: tuple[int, ...] = (END_ID,),
    prefix_ids: tuple[int, ...] = (),
    files: Mapping[str, bytes] | None = None,
    preferred: str = "",
) -> Path:
    """Tokens are bytes. Embeddings are unit vectors, the layer adds nothing, the head permutes: logits of token i are
    largest at `following[i]`, or at the end of text. Where a grammar forbids that, `preferred` bytes come next, the
    first of them first."""
    one = {"d_model": VOCABULARY, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 4, "d_ff": 3}
    decoder = small_decoder(**one, context_length=context)
    head = np.zeros((VOCABULARY, VOCABULARY), np.float32)
    for n, byte in enumerate(preferred.encode()):
        head[byte] = 0.9 / (n + 1)
    for token in range(VOCABULARY):
        head[following.get(token, END_ID), token] = 1
    values: dict[str, Any] = {"embedding": np.eye(VOCABULARY, dtype=np.float32), "head": head}
    manifest = bare_manifest(decoder, dict.fromkeys(PARTS, "f32"), [None])
    with ArtifactWriter(path) as writer:
        for name, spec in array_specs(decoder, manifest.formats, [None], False).items():
            plain = np.full(spec.shape, name.endswith("norm/weight"), np.float32)
            writer.add_array(name, spec, [values.get(name, plain)])
        for name, data in {"tokenizer.json": byte_tokenizer(), **(files or {})}.items():
            writer.add_file(name, data)
        text = Text(prefix_ids=prefix_ids, end_ids=end_ids, eos_token="<|end|>")  # noqa: S106
        writer.finish(replace(manifest, text=text))
    return path


def tool_user(path: Path) -> Path:
    """A model for chats with Qwen's form of calls. It says "abc", strings of JSON are "SF", and lists are short."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
        "{% if tools %}Use <tool_call> with name and arguments: {{ tools | tojson }}\n{% endif %}assistant:"
    )
    following = {**saying("abc"), **saying('"SF', then=ord('"')), ord(":"): ord("a")}
    files = {"chat_template.jinja": template.encode()}
    return scripted_artifact(path, following, context=2048, files=files, preferred='}]:",[t')
