"""Decode and prefill on the CPU beside llama.cpp and transformers, and beside what the memory allows.

nox -s bench -- cpu [--full] [--formats f16,q8,q4] [--shape Llama-3.2-1B-Instruct [--layers 4]] [--json PATH] [--quick]

A synthetic Llama whose neurons fire at a set density (recipes/demo/sparse_model), with a predictor by construction,
runs dense, gate and predicted, and dense as a plain file of whole matrices.
llama.cpp and transformers run random weights of the same shape, dense. Our results are
held against the reference first. `--full` adds cost against density, model size and context length. Where llama.cpp or
transformers fails, its row says how.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from side_by_side.case import OURS, Case, check, run
from side_by_side.rounds import FailedRow, Row
from side_by_side.shape import add_shape, decoder_of, head_share
from side_by_side.table import print_rows, write_json
from sparse_model import Spec

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.kernels.codegen.isa import ISA

DENSITIES = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
CONTEXTS = (64, 1024, 4096)
# (layers, d_model, d_ff, heads)
SIZES = ((16, 1024, 4096, 16), (16, 2048, 8192, 32), (26, 3072, 8192, 24))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also density, size and context length")
    parser.add_argument("--quick", action="store_true", help="few rounds and no long prompt")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--folder", type=Path, help="for the models, some GB; default: a temporary one")
    parser.add_argument("--formats", default="f16,q8,q4")
    parser.add_argument("--predictor-format", default="q4")
    parser.add_argument(
        "--isa", help="instruction sets to force, like avxvnni,avx512; default: the widest and the 256-bit one"
    )
    parser.add_argument(
        "--peer-limit", type=float, default=600, metavar="SECONDS", help="that a request to another engine may take"
    )
    add_shape(parser)
    return parser.parse_args()


def core(a: argparse.Namespace) -> list[Case]:
    """One case a format; transformers beside the first 16-bit one."""
    decoder = decoder_of(a)
    names = a.formats.split(",")
    # Those without tiles and with 256 bits too where there is more: the machines this is for have no more.
    own = {"amx": ("amx", "avx512", "avxvnni"), "avx512": ("avx512", "avxvnni")}.get(ISA.name, (ISA.name,))
    isas = tuple(a.isa.split(",")) if a.isa else own
    sixteen = next((name for name in names if name in ("f16", "bf16")), None)
    brief = {"rounds": 3, "prompts": (64,)} if a.quick else {}
    return [
        Case(
            spec=Spec(
                decoder=decoder,
                formats={**dict.fromkeys(PARTS, name), "predictor": a.predictor_format},
                density=a.density,
                rank=a.rank,
            ),
            format=name,
            isas=isas,
            transformers=name == sixteen,
            start_up=True,
            peer_limit_s=a.peer_limit,
            **brief,
        )
        for name in names
    ]


def void_rows(case: Case) -> list[FailedRow]:
    """Prompts by AMX's tiles where the processor has none: they are measured nowhere else."""
    if "amx" in case.isas or not FORMATS[case.format].quantised:
        return []
    told = {"engine": OURS, "version": None, "build": None, "format": case.format, "mode": "dense", "isa": "amx"}
    told |= {"phase": "prefill", "parameters": case.parameters, "failure": "void: no AMX here"}
    return [FailedRow(tokens=tokens, **told) for tokens in case.prompts]


def sweeps(case: Case) -> Iterator[tuple[str, Case]]:
    """What `--full` adds for one format: decode only, with the exact predictor and our own instruction set."""
    brief = replace(case, isas=case.isas[:1], over_reads=(1.0,), prompts=(), transformers=False, start_up=False)
    for density in DENSITIES:
        yield f"density {density}", replace(brief, spec=replace(case.spec, density=density))
    for layers, d_model, d_ff, heads in SIZES:
        decoder = replace(
            case.spec.decoder, n_layers=layers, d_model=d_model, d_ff=d_ff, n_heads=heads, n_kv_heads=heads,
            head_dim=d_model // heads,
        )  # fmt: skip
        sized = replace(brief, spec=replace(case.spec, decoder=decoder, rank=min(case.spec.rank, d_model // 4)))
        yield f"size {sized.parameters / 1e9:.1f} B", sized
    decoder = replace(case.spec.decoder, context_length=max(CONTEXTS) + 64)
    yield "context length", replace(brief, spec=replace(case.spec, decoder=decoder), contexts=CONTEXTS, rounds=5)


def main() -> None:
    a = arguments()
    cases = core(a)
    rows: list[Row] = []

    def compare(what: str, case: Case, folder: Path) -> None:
        share, sparse = (head_share(case.spec.decoder, density) for density in (1, case.spec.density))
        print(f"\n{what}, {case.format}, {case.parameters / 1e9:.2f} B parameters", flush=True)
        print(f"the head's share of a token's weights: {share:.0%} dense, {sparse:.0%} at density {case.spec.density}")
        found = [*run(case, folder), *void_rows(case)]
        print_rows(found)
        rows.extend(found)
        if a.json:
            write_json(a.json, rows)

    with tempfile.TemporaryDirectory(dir=a.folder) as name:
        folder = Path(name)
        for case in cases:
            check(case, folder)
        for case in cases:
            compare("core", case, folder)
        for case in cases if a.full else ():
            for what, swept in sweeps(case):
                compare(what, swept, folder)


if __name__ == "__main__":
    main()
