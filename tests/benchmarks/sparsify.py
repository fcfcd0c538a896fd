"""What sparsity costs: a dense model made sparse in several ways, each beside a control on the same tokens.

nox -s bench -- sparsify --work FOLDER (--model FOLDER | --text PATH…) [--arms ARM,…] [--seeds N,…]
                         [--steps N] [--base-steps N] [--road ARM]

The base is the model of `--model`, on text that it samples from itself, or a SwiGLU Llama of 1.5 M parameters on
`--text`; it is trained on the text first, so that the control has little more to learn. What is done lies in `--work`,
and a run that was interrupted goes on from there; so a table can be completed arm by arm and seed by seed. Arms:
`control`, `relu`, `drelu`, `progressive-WEIGHT`, `constant-WEIGHT`, `steered-PERCENT`, the same with `drelu-` before
it, `fatrelu-PERCENT`, and each with `-kl` at its end.
`--road` then builds the artifacts of the base and of an arm's first seed, and evaluates both through the runtime.
"""

import argparse
import json
from pathlib import Path

import torch
from sparsifying.arms import Setting, table
from sparsifying.base import random_model, trained_base
from sparsifying.own_text import write_own_text
from sparsifying.road import built, held_out_file, measured

from pi_compile.cli.sparsifying import training_bar

ARMS = "control,fatrelu-87-kl,relu,drelu,progressive-1,constant-1"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for everything that is made")
    parser.add_argument("--model", type=Path, help="a small model to train on its own text")
    parser.add_argument("--text", nargs="+", type=Path, default=[], help="text to train a base on first")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=400, help="of 2,048 tokens, in each arm")
    parser.add_argument("--base-steps", type=int, default=5000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--road", help="an arm whose artifact is built and compared with the base's")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    with training_bar() as watch:
        if args.model is not None:
            write_own_text(args.model, args.work / "own.jsonl", 900_000)
            text, start, rate = ["own.jsonl"], args.model, 2e-3
        else:
            text = [str(path.resolve()) for path in args.text]
            start, rate = random_model(args.work / "base.work" / "random", text), 3e-3
        base = trained_base(args.work, text, start, rate, args.base_steps, watch)
        setting = Setting(args.work, text, args.steps, watch)
        results = [setting.run(arm, int(seed)) for seed in args.seeds.split(",") for arm in args.arms.split(",")]
    print(table(results))
    if args.road:
        sparse = setting.output(args.road, int(args.seeds.split(",")[0]))
        held_out = held_out_file(text, args.work)
        rows = {
            "base": measured(built(base, text, args.work, ["dense"]), held_out),
            args.road: measured(built(sparse, text, args.work, ["dense", "gate", "predicted"]), held_out),
        }
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
