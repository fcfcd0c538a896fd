"""Arguments and options that several commands of `pi-compile` share."""

from pathlib import Path
from typing import Annotated

import typer

from pi_runtime import console

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (see init).", show_default=False)]
ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A packed model.", show_default=False)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: the recipe's name .pi")]
Export = Annotated[
    Path | None, typer.Option(help="Write what placing needs of the model: an activation file.", show_default=False)
]
Device = Annotated[str, typer.Option(envvar="PI_DEVICE", help="Where profile and train compute: cpu or cuda:N.")]
# Where an artifact is run, as `pi-run` has it.
RunDevice = Annotated[
    str | None,
    typer.Option(
        "--device", envvar="PI_DEVICE", help="auto, cpu, stand-in or cuda:N. Default: cpu; auto with a budget."
    ),
]
RunVramBudget = Annotated[
    str | None,
    typer.Option("--vram-budget", envvar="PI_VRAM_BUDGET", help="GPU memory to use, like 8GiB: picks the placement."),
]
RunCtxSize = Annotated[int | None, typer.Option("--ctx-size", envvar="PI_CTX_SIZE", help="Positions to hold.")]
Threads = Annotated[int | None, typer.Option(envvar="PI_THREADS", help="CPU threads.")]
Json = Annotated[bool, console.JSON]
Debug = Annotated[bool, console.DEBUG]

# What a plan depends on (see `plan_request`).
Planned = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A recipe, a config.json or its folder, or a bundled OWNER/NAME.", show_default=False
    ),
]
MachineName = Annotated[str | None, typer.Option("--machine", help="A machine profile; default: the recipe's.")]
VramBudget = Annotated[
    str | None, typer.Option(envvar="PI_VRAM_BUDGET", help="GPU memory to use, like 8GiB. Default: all but 1 GiB.")
]
RamBudget = Annotated[str | None, typer.Option(envvar="PI_RAM_BUDGET", help="Memory to use, like 24GiB. Default: all.")]
Curve = Annotated[str | None, typer.Option(help="A published activation curve; with --density.")]
Density = Annotated[str | None, typer.Option(help="Share of the neurons that fire for a token.")]
Counts = Annotated[Path | None, typer.Option(help="An activation profile of the model.", show_default=False)]
NumberFormat = Annotated[
    str | None, typer.Option("--format", help="Number format of all weights. Default: the recipe's, the config's.")
]
CtxSize = Annotated[
    int | None,
    typer.Option(envvar="PI_CTX_SIZE", min=1, help="Positions to make room for. Default: the recipe's; 2048."),
]
