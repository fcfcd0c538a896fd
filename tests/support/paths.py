"""Where tests find what is committed."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
BENCHMARKS = ROOT / "tests" / "benchmarks"
GOLDEN = ROOT / "tests" / "runtime" / "artifact" / "golden.pi"
"""The pinned artifact of the present format."""
GOLDEN_LOGITS = ROOT / "tests" / "runtime" / "kernels" / "golden_logits.npz"
"""What small models compute, to the last bit."""
