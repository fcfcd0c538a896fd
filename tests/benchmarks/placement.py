"""Time, memory and gap of placing at the size of real models. Checks the solution before it prints a figure.

python tests/benchmarks/placement.py
"""

import resource
import time

import numpy as np

from pi_compile.placement import Layer, place

SIZES = {"7B": (32, 16384, 4096), "66B": (64, 36864, 9216), "OPT-175B": (96, 49152, 12288)}


def layers(n_layers: int, d_ff: int, d_model: int, *, same: bool) -> list[Layer]:
    """Power-law counts; f16 neurons of a plain FFN."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(n_layers):
        exponent = 1.0 if same else rng.uniform(0.5, 1.5)
        counts = (1e6 / np.arange(1, d_ff + 1) ** exponent).astype(np.int64)
        cuts = np.arange(0, d_ff + 1, 64)
        masses = np.concatenate([[0], np.cumsum(counts)])[cuts]
        made.append(Layer(cuts=cuts, masses=masses, nbytes=cuts * (4 * d_model + 4)))
    return made


def main() -> None:
    print(f"{'model':10} {'layers':10} {'budget':>7} {'seconds':>8} {'gap':>9} {'peak MiB':>9}")
    for name, shape in SIZES.items():
        for same in (False, True):
            made = layers(*shape, same=same)
            whole = sum(int(layer.nbytes[-1]) for layer in made)
            for percent in (10, 50):
                began = time.perf_counter()
                found = place(made, whole * percent // 100, sum(int(layer.masses[-1]) for layer in made))
                seconds = time.perf_counter() - began
                assert found.used_bytes <= whole * percent // 100
                assert found.hot_mass <= found.bound
                gap = (found.bound - found.hot_mass) / found.bound
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
                kind = "identical" if same else "differing"
                print(f"{name:10} {kind:10} {percent:>6}% {seconds:8.2f} {gap:9.1e} {peak:9}")


if __name__ == "__main__":
    main()
