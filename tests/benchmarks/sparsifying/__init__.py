"""Parts of the benchmark `sparsify`: its base model, its arms, and the road from a folder to tokens."""
