"""A model whose FFNs never were sparse becomes one: its activation is changed, and it is trained on (`sparsify`).

A Hugging Face folder goes in and one comes out, which `init` and `build` take.
"""
