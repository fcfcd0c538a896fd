"""The model in torch, block by block, for profiling and training.

It computes what the definition in NumPy does (`pi_runtime/kernels/reference.py`), on the CPU or a GPU.
"""

from pi_compile.torch_model.decoder import ResidentLayers, computing_with
from pi_compile.torch_model.predictor import (
    DENSE,
    Predictor,
    SparseFfn,
    WarmStarts,
    energy,
    initial_rank,
    routed_neurons,
    second_moment,
    train,
)
from pi_compile.torch_model.throughput import (
    PROCESS_BYTES,
    Estimate,
    activation_values,
    flops_per_s,
    layer_parameters,
    values_per_s,
)
