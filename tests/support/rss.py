"""Anonymous memory of a packing process: run as a script it packs and prints what it measured, as JSON.

python rss.py CHECKPOINT ARTIFACT FORMAT
"""

import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Measured:
    """Bytes of RssAnon and seconds of one packing."""

    before: int
    """Memory when everything is imported, and checkpoint and tokenizer are open."""
    peak: int
    seconds: float
    nbytes: int
    """Size of the artifact."""


def rss_anon() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def pack_in_child(checkpoint: Path, artifact: Path, fmt: str = "keep") -> Measured:
    """Pack in a process of its own, so that nothing else is counted."""
    command = [sys.executable, __file__, str(checkpoint), str(artifact), fmt]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Measured(**json.loads(done.stdout))


def layer_bytes(d_model: int, d_ff: int, itemsize: int) -> int:
    """Bytes of one synthetic layer's matrices."""
    return (4 * d_model * d_model + 3 * d_model * d_ff) * itemsize


def synthetic_llama(
    folder: Path, *, d_model: int, d_ff: int, n_layers: int, vocab_size: int, dtype: torch.dtype, per_shard: int
) -> int:
    """Write a sharded Llama of repeated random values, `per_shard` layers a shard. Returns its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype)

    def matrix(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return tile.repeat(-(-count // tile.numel()))[:count].view(shape)

    weight_map: dict[str, str] = {}

    def write(shard: str, tensors: dict[str, torch.Tensor]) -> int:
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard))
        return sum(t.nbytes for t in tensors.values())

    total = write("model-embed.safetensors", {"model.embed_tokens.weight": matrix(vocab_size, d_model)})
    head = {"lm_head.weight": matrix(vocab_size, d_model), "model.norm.weight": matrix(d_model)}
    total += write("model-head.safetensors", head)
    for start in range(0, n_layers, per_shard):
        tensors: dict[str, torch.Tensor] = {}
        for n in range(start, min(start + per_shard, n_layers)):
            shapes = {f"self_attn.{p}_proj": (d_model, d_model) for p in "qkvo"}
            shapes |= {f"mlp.{p}_proj": (d_ff, d_model) for p in ("gate", "up")} | {"mlp.down_proj": (d_model, d_ff)}
            shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (d_model,))
            tensors |= {f"model.layers.{n}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        total += write(f"model-{start}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "llama", "hidden_size": d_model, "intermediate_size": d_ff, "num_hidden_layers": n_layers}
    config |= {"num_attention_heads": d_model // 128, "vocab_size": vocab_size, "hidden_act": "relu"}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    return total


def main() -> None:
    from pi_compile.checkpoint import open_checkpoint
    from pi_compile.packing import PackSpec, pack
    from pi_runtime.artifact.sizes import PARTS

    checkpoint = open_checkpoint(sys.argv[1])
    _ = checkpoint.text_files  # imports much of transformers
    before, peak, done = rss_anon(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, rss_anon())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    result = pack(checkpoint, PackSpec(formats=dict.fromkeys(PARTS, sys.argv[3])), Path(sys.argv[2]), recipe={})
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    print(json.dumps(asdict(Measured(before, max(peak, before), seconds, result.nbytes))))


if __name__ == "__main__":
    main()
