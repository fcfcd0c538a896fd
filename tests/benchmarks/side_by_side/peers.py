"""The engines that ours is compared with. One that fails becomes a row that says so, and the others go on."""

from contextlib import ExitStack
from importlib import metadata
from typing import Any

from side_by_side.process import EngineError, Worker
from side_by_side.rounds import LLAMA_CPP, Contender

TRANSFORMERS = "transformers"
# The module that runs each, and the package that must be installed.
PEERS = {
    LLAMA_CPP: ("side_by_side.llama_cpp_engine", "llama-cpp-python"),
    TRANSFORMERS: ("side_by_side.transformers_engine", "transformers"),
}


def open_peer(engine: str, format_name: str, stack: ExitStack, *, limit_s: float, **arguments: Any) -> Contender:
    """The engine with its model opened with the arguments; one that fails here fails at every later request too."""
    module, package = PEERS[engine]
    worker = stack.enter_context(Worker(engine, module, limit_s=limit_s))
    build = None
    try:
        build = worker.ask("describe")["build"]
        worker.ask("open_model", **arguments)
    except EngineError as failure:
        print(failure, flush=True)
    return Contender(engine, format_name, "dense", None, worker, may_fail=True, version=_version(package), build=build)


def _version(package: str) -> str | None:
    """Looked up among what is installed: an engine that dies at its start cannot be asked."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return None
