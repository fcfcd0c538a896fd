"""The GPU's side of a run: Triton kernels, and the executor that keeps GPU and CPU at work together.

Everything here needs torch and Triton, the extra `cuda`. Nothing outside imports it before a GPU is asked for.
"""

import os

# Products and sums in one instruction, as Triton has had them so far: unless told, it warns that this will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# cuBLAS's own memory: 8 MiB, of which budgets know, instead of 32 on some GPUs. It is read when first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
