"""ProSparse's Llamas, whose activation is FATReLU; their repositories ship modelling code, which is not needed."""

from dataclasses import replace

from pi_compile.checkpoint.families import llama

ADAPTER = replace(
    llama.ADAPTER,
    family="sparsellama",
    architectures=("SparseLlamaForCausalLM", "SparseLlamaModel"),
    decoder=lambda config: llama.decoder(config, "sparsellama"),
)
