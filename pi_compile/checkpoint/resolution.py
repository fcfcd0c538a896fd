"""Resolving a checkpoint: its family, its decoder, and a tensor of the right shape for every array."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pi_compile.checkpoint.config import Config, check_keys, ignored_notices, read_json
from pi_compile.checkpoint.families.adapter import Adapter, SourceTensor
from pi_compile.checkpoint.families.registry import find_adapter
from pi_compile.checkpoint.folder import CONFIG_FILE
from pi_compile.checkpoint.gguf.architectures import apply_rope_divisors, gguf_adapter
from pi_compile.checkpoint.gguf.config import gguf_config
from pi_compile.checkpoint.gguf.file import GgufFile, open_gguf
from pi_compile.checkpoint.gguf.tensors import GgufTensors
from pi_compile.checkpoint.quantised.scheme import KEY, Scheme, read_scheme
from pi_compile.checkpoint.quantised.tensors import QuantisedTensors
from pi_compile.checkpoint.tensors import FORMATS, FolderTensors, RowReader, TensorSource
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.artifact.guess_head import guess_layer_arrays
from pi_runtime.artifact.sizes import BY_NEURON, PARTS, ArraySpec, array_specs

_COMPARED_ROWS = 4096
_MOST_NAMES = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedCheckpoint:
    """A checkpoint in which every config key and every tensor is known; `Checkpoint` adds the values."""

    location: Path
    """Its folder, or its GGUF file."""
    adapter: Adapter
    prefix: str
    """Prefix of its tensor names."""
    config: Config
    """Its config.json; of a GGUF file, what its metadata say of it."""
    gguf: GgufFile | None
    decoder: Decoder
    source: TensorSource
    notices: tuple[str, ...]
    """Lines for the user about things that are no errors."""
    can_draft: bool
    """Whether the layer behind the last drafts further tokens, and is understood."""
    ignored_config: tuple[str, ...]
    """Unknown config keys that, as the user says, have no effect."""
    declared_activation: str
    """The activation of a GGUF file, as the user says; empty for what its architecture has."""


def resolve_checkpoint(
    location: Path, ignore_config: Collection[str], activation: str = "", *, in_recipe: bool = False
) -> ResolvedCheckpoint:
    """Read the config and the tensor names of a folder or a GGUF file, and check that they fit.

    See `check_keys` for the keys to ignore, and `open_checkpoint` for `activation`. Raises CheckpointError for the
    first kind of fault, naming all faults of that kind.
    """
    file = open_gguf(location) if location.is_file() else None
    if activation and file is None:
        raise CheckpointError(
            f"{location}: activation {activation!r} is declared for it, but {CONFIG_FILE} says its own",
            expected="a GGUF file, which does not say it",
            remedy=f"take the activation out of {'[model]' if in_recipe else 'the command'}",
        )
    config = gguf_config(file) if file else Config(location / CONFIG_FILE, read_json(location / CONFIG_FILE))
    scheme = read_scheme(config)
    adapter = gguf_adapter(file, activation) if file else _adapter(config, scheme)
    config = adapter.text_config(config)
    ignored = check_keys(config, adapter.read_keys | {KEY}, adapter.neutral_keys, ignore_config, in_recipe=in_recipe)
    notices = ignored_notices(config, ignored)
    if config.get("auto_map"):
        notices.append("config.json: auto_map is ignored: the checkpoint's own code is never run")
    decoder = adapter.decoder(config)
    notices += config.notices
    source: TensorSource
    if file is None:
        stored = FolderTensors(location)
        source = stored if scheme is None else QuantisedTensors(stored, scheme)
    else:
        decoder = apply_rope_divisors(decoder, file)
        source = GgufTensors(file, decoder)
    notices += source.notices
    if decoder.n_layers > len(source.names):
        raise CheckpointError(
            f"{location}: too few tensors for its layers",
            expected=f"more tensors than {decoder.n_layers} layers",
            found=len(source.names),
            remedy="some of its files are missing, or the number of layers is wrong",
        )
    prefix = _prefix(adapter, decoder, source)
    adapter = _as_saved(adapter, decoder, prefix, source)
    if decoder.tied_head and _head(adapter) in source.names:
        decoder = _resolve_tied_head(decoder, adapter, prefix, source, notices)
    _check_tensors(decoder, adapter, prefix, source)
    problem = _draft_problem(decoder, adapter, prefix, source)
    notices += _unused(adapter, source, problem)
    return ResolvedCheckpoint(
        location=location,
        adapter=adapter,
        prefix=prefix,
        config=config,
        gguf=file,
        decoder=decoder,
        source=source,
        notices=tuple(notices),
        can_draft=problem == "",
        ignored_config=tuple(ignored),
        declared_activation=activation,
    )


def _unused(adapter: Adapter, source: TensorSource, draft_problem: str | None) -> Iterator[str]:
    """Yield a line for the user about each kind of tensors that are not used."""
    if draft_problem:
        yield f"layers behind the last, which draft further tokens, are left out: {draft_problem}"
    for pattern, notice in adapter.unused_tensors.items():
        if any(re.search(pattern, name) for name in source.names):
            yield notice


def _adapter(config: Config, scheme: Scheme | None) -> Adapter:
    adapter = find_adapter(config)
    if adapter.plan_only:
        raise CheckpointError(
            f"{config.path}: a {adapter.family} model can be planned for, but not read",
            found=adapter.plan_only,
            remedy="use a checkpoint of it in Llama's form, with these in its weights",
        )
    architectures = config.get("architectures", [])
    wrong = not isinstance(architectures, list) or [a for a in architectures if a not in adapter.architectures]
    if wrong:
        raise config.error("architectures", architectures, expected=f"one of {', '.join(adapter.architectures)}")
    if scheme is not None and scheme.method in adapter.quantised:
        return replace(adapter, layer_tensors=adapter.quantised[scheme.method])
    return adapter


def _prefix(adapter: Adapter, decoder: Decoder, source: TensorSource) -> str:
    """The prefix of this checkpoint's tensor names; the family's first one if no tensor has any of them."""
    array = "layers/0/attention/out" if decoder.of_layer(0).has_mixer else "layers/0/ffn/norm/weight"
    for prefix in adapter.prefixes:
        if adapter.source_tensors(array, prefix, decoder)[0].name in source.names:
            return prefix
    return adapter.prefixes[0]


def _as_saved(adapter: Adapter, decoder: Decoder, prefix: str, source: TensorSource) -> Adapter:
    """The adapter with the layers' tensors in the form that the checkpoint has."""
    forms = [adapter, *(replace(adapter, layer_tensors=form) for form in adapter.other_layers)]
    if len(forms) == 1:
        return adapter
    return min(forms, key=lambda form: len(_expected_tensors(decoder, form, prefix).keys() - source.names))


def _resolve_tied_head(
    decoder: Decoder, adapter: Adapter, prefix: str, source: TensorSource, notices: list[str]
) -> Decoder:
    """The decoder; it has a head of its own if the checkpoint stores one that differs from the tied embedding.

    This is the rule of transformers. If only the head is stored, it is the embedding too.
    """
    embedding, head = prefix + adapter.global_tensors["embedding"][0].name, _head(adapter)
    if embedding not in source.names:
        source.alias(embedding, head)
    if source.dtype(embedding) == source.dtype(head) and _equal(source.rows(embedding), source.rows(head)):
        return decoder
    notices.append(f"config.json ties the head to the embedding, but {head} differs from it and is used")
    return replace(decoder, tied_head=False)


def _head(adapter: Adapter) -> str:
    return f"{adapter.head}.weight"


def _equal(a: RowReader, b: RowReader) -> bool:
    if tuple(a.shape) != tuple(b.shape):
        return False
    starts = range(0, a.shape[0], _COMPARED_ROWS)
    return all(np.array_equal(a[n : n + _COMPARED_ROWS], b[n : n + _COMPARED_ROWS]) for n in starts)


def _expected_tensors(decoder: Decoder, adapter: Adapter, prefix: str) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape, for every tensor that the decoder needs."""
    formats = dict.fromkeys(PARTS, "f32")
    specs = array_specs(decoder, formats, [None] * decoder.n_layers, profiled=False)
    return _tensors_of(specs, decoder, adapter, prefix)


def _tensors_of(
    specs: Mapping[str, ArraySpec], decoder: Decoder, adapter: Adapter, prefix: str
) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape, for every tensor that some arrays are made of."""
    expected: dict[str, tuple[int, ...]] = {}
    for array, spec in specs.items():
        tensors = adapter.source_tensors(array, prefix, decoder)
        for tensor, shape in zip(tensors, _shapes(decoder, array, spec.shape, len(tensors)), strict=True):
            expected[tensor.name] = _stored_shape(tensor, shape)
    return expected


def _shapes(decoder: Decoder, array: str, shape: tuple[int, ...], tensors: int) -> Iterator[tuple[int, ...]]:
    """Shapes of the tensors that an array of this shape is made of, before transposing and fusing."""
    if not tensors:
        return
    if array.endswith("ffn/rest"):
        yield from [(shape[0] * shape[1] // tensors, shape[2])] * tensors
    elif array.endswith("ffn/router") and tensors == 2:
        yield (decoder.experts_routed, *shape[1:])
        yield (1, *shape[1:])
    elif array.endswith(("attention/qkv", "attention/qkv_bias")) and tensors in (2, 3):
        own = decoder.of_layer(int(array.split("/")[1])) if array.startswith("layers/") else decoder
        for rows in own.qkv_parts[:tensors]:
            yield (rows, *shape[1:])
    else:
        yield from [(shape[0] // tensors, *shape[1:])] * tensors


def _stored_shape(tensor: SourceTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the checkpoint of a tensor whose wanted part has this shape."""
    if tensor.rows is not None:
        turned = (shape[0] // tensor.rows.groups,)
        shape = (tensor.rows.groups * tensor.rows.size, *(turned if tensor.rows.transposed else shape[1:]))
    if tensor.stacked:
        rows, *columns = shape[0] // (1 if tensor.item is not None else tensor.stacked), *shape[1:]
        return (tensor.stacked, *((*columns, rows) if tensor.transposed else (rows, *columns)))
    return shape[::-1] if tensor.transposed else shape


def _check_tensors(decoder: Decoder, adapter: Adapter, prefix: str, source: TensorSource) -> None:
    expected = _expected_tensors(decoder, adapter, prefix)
    missing = [name for name in expected if name not in source.names]
    if missing:
        raise CheckpointError(
            f"{source.location}: {len(missing)} tensors that {source.described_by} calls for are missing",
            expected=f"{len(expected)} tensors of a {adapter.family} model",
            found=f"no {_shortened(missing)}",
            remedy=f"{source.described_by} and weights are of different models, or the checkpoint is incomplete",
        )
    ignorable = (*adapter.ignored_tensors, *adapter.unused_tensors)
    # With a tied head, a stored head is a copy of the embedding: `_resolve_tied_head` has compared them.
    known = expected.keys() | ({_head(adapter)} if decoder.tied_head else set())
    left = source.names - known - source.without_effect
    left -= _draft_tensors(decoder, adapter, prefix, source) | _unread(decoder, adapter, prefix)
    extra = sorted(n for n in left if not any(re.search(pattern, n) for pattern in ignorable))
    if extra:
        raise CheckpointError(
            f"{source.location}: {len(extra)} tensors that {source.described_by} does not account for",
            expected=f"the tensors of a {adapter.family} model with these settings",
            found=_shortened(extra),
            remedy=f"they may change the function: correct {source.described_by}, or save the checkpoint without them",
        )
    _check_shapes(expected, source)
    _check_dtypes(expected, source)


def _unread(decoder: Decoder, adapter: Adapter, prefix: str) -> set[str]:
    """Routers of a single expert, to which a softmax gives the weight 1 whatever it reads; and keys and values of
    layers that read those of others."""
    every, arrays = decoder.without("shared_key_layers"), ("attention/qkv", "attention/qkv_bias", "attention/k_norm")
    of_layers = dict.fromkeys(decoder.shared_key_layers, arrays)
    if decoder.n_experts == 1 and (decoder.router_score, decoder.router_scale) == ("softmax", 1.0):
        of_layers = {n: ("ffn/router", *of_layers.get(n, ())) for n in range(decoder.n_layers)}
    tables = {n: adapter.layer_tensors(every.of_layer(n)) for n in of_layers}
    found = ((n, tensor) for n, names in of_layers.items() for name in names for tensor in tables[n].get(name, ()))
    return {prefix + tensor.name.replace("{n}", str(n)) for n, tensor in found}


def _draft_tensors(decoder: Decoder, adapter: Adapter, prefix: str, source: TensorSource) -> set[str]:
    """Tensors of the layers behind the last that draft further tokens."""
    found: set[str] = set()
    layer = decoder.n_layers
    while adapter.draft_layer and (mark := prefix + _draft_name(adapter, "fc", layer)) in source.names:
        start = mark[: mark.index(f".{layer}.") + len(f".{layer}.")]
        found |= {name for name in source.names if name.startswith(start)}
        layer += 1
    return found


def _draft_name(adapter: Adapter, array: str, layer: int) -> str:
    return adapter.draft_layer[array][0].name.replace("{n}", str(layer))


def _draft_problem(decoder: Decoder, adapter: Adapter, prefix: str, source: TensorSource) -> str | None:
    """Why the layer behind the last, which drafts further tokens, cannot be used; "" if it can, None if there is none.

    Its embedding and its head are taken to be the model's; layers behind it are not used.
    """
    first, found = f".{decoder.n_layers}.", _draft_tensors(decoder, adapter, prefix, source)
    if not found:
        return None
    if decoder.recurs:
        return "beside layers with a state they draft nothing yet"
    specs = dict(guess_layer_arrays(decoder, dict.fromkeys(PARTS, "f32"), BY_NEURON))
    expected = _tensors_of(specs, decoder, adapter, prefix)
    copies = {prefix + _draft_name(adapter, name, decoder.n_layers) for name in ("embedding", "head")}
    own = {name for name in found - source.without_effect if first in name}
    own = {name for name in own if not any(re.search(pattern, name) for pattern in adapter.ignored_tensors)}
    differing = (own - copies) ^ expected.keys()
    differing |= {name for name, shape in expected.items() if name in own and source.shape(name) != shape}
    return _shortened(sorted(differing))


def _check_shapes(expected: dict[str, tuple[int, ...]], source: TensorSource) -> None:
    wrong = [name for name, shape in expected.items() if source.shape(name) != shape]
    if wrong:
        raise CheckpointError(
            f"{source.path(wrong[0])}: {len(wrong)} tensors do not have the shape that {source.described_by} calls for",
            expected=_shortened([f"{name} {expected[name]}" for name in wrong]),
            found=_shortened([f"{name} {source.shape(name)}" for name in wrong]),
            remedy=f"{source.described_by} and weights are of different models",
        )


def _check_dtypes(expected: dict[str, tuple[int, ...]], source: TensorSource) -> None:
    wrong = [name for name in expected if source.dtype(name) not in (*WEIGHT_FORMATS, *source.block_types)]
    if wrong:
        raise CheckpointError(
            f"{source.path(wrong[0])}: {len(wrong)} tensors are not in a float format that is read",
            expected=", ".join(FORMATS.values()),
            found=_shortened([f"{name} {source.dtype(name)}" for name in wrong]),
            remedy="use the checkpoint before quantisation, or save it as float32, float16 or bfloat16",
        )


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
