"""Arguments and options that several commands of `pi-compile` share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pi_runtime import console
from pi_runtime.errors import DeviceError, UsageError

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe (see init); for pack --plain any model.", show_default=False)
]
ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A packed model.", show_default=False)]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        metavar="neurons|matrices",
        help="Pack plain, with FFNs by neuron, to be placed or read from disk, or as the model's own matrices. "
        "Default: matrices, unless the model is sparse or has experts.",
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Where to write. Default: the recipe's name with .pi")
]
Export = Annotated[
    Path | None, typer.Option(help="Write what placing needs of the model: an activation profile.", show_default=False)
]
IgnoreConfig = Annotated[
    list[str] | None,
    typer.Option(
        help="A key of config.json that does not change the function; may be given again.", show_default=False
    ),
]
EVERY = "all"
"""What `plan --format` has where formats are compared."""
# How an artifact is run, as `pi-run` has it.
RunDevice = Annotated[
    str | None,
    typer.Option(
        "--device", envvar="PI_DEVICE", help="auto, cpu, cuda:N or stand-in. Default: cpu; auto with a budget."
    ),
]
RunVramBudget = Annotated[
    str | None,
    typer.Option("--vram-budget", envvar="PI_VRAM_BUDGET", metavar="SIZE", help="GPU memory to use, like 8GiB."),
]
RunCtxSize = Annotated[int | None, typer.Option("--ctx-size", envvar="PI_CTX_SIZE", help="Context length in tokens.")]
RunCacheFormat = Annotated[
    str,
    typer.Option(
        "--cache-format", envvar="PI_CACHE_FORMAT", help="Number format of keys and values: auto, f32, f16, q8 or q4."
    ),
]
Threads = Annotated[int | None, typer.Option(envvar="PI_THREADS", help="CPU threads.")]
Json = Annotated[bool, console.JSON]
Debug = Annotated[bool, console.DEBUG]


_WORKERS: dict[str, Any] = {"rich_help_panel": "Workers"}


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How the stages of a recipe are run: the options of `profile`, `train`, `place`, `pack` and `build`."""

    recipe: RecipePath
    device: Annotated[
        str,
        typer.Option(
            envvar="PI_DEVICE", help="Where profile and train compute: cpu, cuda:N, or cuda:all, one a worker."
        ),
    ] = "cpu"
    workers: Annotated[
        int | None,
        typer.Option(
            envvar="PI_WORKERS",
            min=1,
            help="Processes to share the work. Default: as many as there is room for.",
            **_WORKERS,
        ),
    ] = None
    ray: Annotated[
        str, typer.Option(help="Workers on a Ray cluster: its address, or auto.", show_default=False, **_WORKERS)
    ] = ""
    numa: Annotated[
        str | None,
        typer.Option(
            envvar="PI_NUMA",
            help="NUMA node to run on: its number; or spread, for workers on all nodes in turns.",
            **_WORKERS,
        ),
    ] = None
    heartbeat: Annotated[
        float,
        typer.Option(envvar="PI_HEARTBEAT", min=0.01, help="Seconds between a worker's signs of life.", **_WORKERS),
    ] = 10.0


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan depends on: the options of `plan` and `report`."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A recipe, a config.json or its folder, or a hub name OWNER/NAME.", show_default=False
        ),
    ]
    machine: Annotated[
        list[str] | None,
        typer.Option(
            help="A machine profile; plan takes several. Default: the recipe's, else this machine.", show_default=False
        ),
    ] = None
    vram_budget: Annotated[
        str | None,
        typer.Option(
            envvar="PI_VRAM_BUDGET", metavar="SIZE", help="GPU memory to use, like 8GiB. Default: all but 1 GiB."
        ),
    ] = None
    ram_budget: Annotated[
        str | None,
        typer.Option(envvar="PI_RAM_BUDGET", metavar="SIZE", help="Memory to use, like 24GiB. Default: all."),
    ] = None
    curve: Annotated[str | None, typer.Option(help="A published activation curve; needs --density.")] = None
    density: Annotated[str | None, typer.Option(help="Share of the neurons that fire for a token.")] = None
    counts: Annotated[Path | None, typer.Option(help="An activation profile of the model.", show_default=False)] = None
    number_format: Annotated[
        str | None,
        typer.Option(
            "--format", help="Number format of all weights; all compares them. Default: the recipe's, the config's."
        ),
    ] = None
    ctx_size: Annotated[
        int | None,
        typer.Option(envvar="PI_CTX_SIZE", min=1, help="Context length in tokens. Default: the recipe's; 2048."),
    ] = None
    ignore_config: IgnoreConfig = None


def torch_device(name: str) -> str:
    """The device `cpu`, `cuda:N` or `cuda:all`, checked to be there. Raises DeviceError, UsageError."""
    # PI_DEVICE may be set for pi-run, which knows two more.
    if name in ("cpu", "auto", "stand-in"):
        return "cpu"
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index in ("", "all") or index.isdecimal()):
        raise UsageError(f"--device {name}: unknown device", expected="cpu, cuda:N or cuda:all")
    import torch

    if int(index if index.isdecimal() else 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"--device {name}: no such GPU", found=f"{torch.cuda.device_count()} CUDA devices", remedy="--device cpu"
        )
    return f"cuda:{index or 0}"
