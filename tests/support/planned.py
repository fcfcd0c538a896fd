"""A small model, known from its config alone, and a small machine to plan it for."""

from typing import Any

from pi_compile.machine.profile import Cpu, Gpu, Link, Machine

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "relu",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 500,
    "max_position_embeddings": 128,
    "torch_dtype": "float16",
}
MACHINE = Machine(
    name="small",
    source="test",
    cpu=Cpu(name="c", cores=2, ram_gib=1.0, bandwidth_gb_per_s=10.0),
    gpu=Gpu(name="g", vram_gib=1.0, bandwidth_gb_per_s=100.0),
    link=Link(pcie_gb_per_s=10.0, sync_us=0.0),
)
