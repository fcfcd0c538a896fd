"""ProSparse's Llamas, with FATReLU as activation; the modelling code in their repositories is not needed."""

from dataclasses import replace

from pi_compile.checkpoint.families import llama

ADAPTER = replace(
    llama.ADAPTER,
    family="sparsellama",
    architectures=("SparseLlamaForCausalLM", "SparseLlamaModel"),
    decoder=lambda config: llama.decoder(config, "sparsellama"),
)
