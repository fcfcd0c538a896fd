"""MiniCPM: a Llama with scaled embedding, residual and logits; it can be planned for, not read."""

from dataclasses import replace

from pi_compile.checkpoint.families import llama

ADAPTER = replace(
    llama.ADAPTER,
    family="minicpm",
    architectures=("MiniCPMForCausalLM", "MiniCPMModel"),
    plan_only="its scale_emb, scale_depth and dim_model_base scale embedding, residual and logits",
    decoder=lambda config: llama.llama_like(config, "minicpm", tied=True),
)
