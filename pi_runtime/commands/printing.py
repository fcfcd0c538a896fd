"""How `pi-run` shows answers and figures: text to stdout as it comes, everything else to stderr, or all as JSON."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pi_runtime import console
from pi_runtime.errors import size

if TYPE_CHECKING:
    from pi_runtime.engine.generation import Generation
    from pi_runtime.engine.model import Model
    from pi_runtime.execution.executor import DiskStats
    from pi_runtime.execution.plan_choice import Allocation
    from pi_runtime.sequence.sampling import TokenLogprobs

Report = Callable[["Generation"], dict[str, Any]]
"""Makes the figures of an answer."""


def print_text(model: "Model", answer: "Generation", report: Report | None) -> None:
    """Print an answer as it comes, and then its figures if a report is given."""
    stream(answer)
    if answer.finish_reason == "context":
        console.say(f"(stopped: the context of {model.context} tokens is full; see --ctx-size)")
    if report is not None:
        print_stats(model, report(answer))


def print_answer(model: "Model", answer: "Generation", report: Report, scores: "list[TokenLogprobs] | None") -> None:
    """Print an answer as JSON, with log-probabilities where they were asked for."""
    from pi_runtime.commands.prompts import logprobs_json

    found: dict[str, Any] = {"text": "".join(answer), **report(answer)}
    if answer.logprobs:
        found["logprobs"] = logprobs_json(model, answer.logprobs)
    if scores is not None:
        found["prompt_logprobs"] = logprobs_json(model, scores)
    console.print_json(found)


def announce(model: "Model") -> None:
    """Say what the user should know before the first token."""
    if model.notice is not None:
        console.say(model.notice)
    if model.allocation is not None:
        console.say(_placement_line(model.device, model.allocation))


def _placement_line(device: str, taken: "Allocation") -> str:
    where, plan = "no GPU in use: the CPU stands in for one" if device == "stand-in" else device, taken.plan
    solved = "" if taken.context == plan.context else f" with a context of {taken.context} (solved for {plan.context})"
    return (
        f"{where}. Placement: {plan.objective} for {size(plan.vram_bytes)}, "
        f"{size(taken.total)} used{solved}; to solve another budget: [place] vram_gib, then pi-compile build"
    )


def stream(answer: Iterable[str], parts: list[str] | None = None) -> None:
    """Print the text of an answer as it comes, and gather it in `parts`."""
    for part in answer:
        if parts is not None:
            parts.append(part)
        sys.stdout.write(part)
        sys.stdout.flush()
    sys.stdout.write("\n")


FIGURES = (
    *("prompt_tokens", "prefill_tokens_per_s", "generated_tokens", "decode_tokens_per_s"),
    *("rows_read_share", "active_share"),
    *("guessed_tokens", "accepted_tokens", "acceptance", "accepted_length", "drafts_won_s"),
    *("head_guessed_tokens", "head_accepted_tokens"),
)
"""Figures of an answer that are shown as they are."""


def report(model: "Model", load_s: float, disk: "DiskStats | None", answer: "Generation") -> dict[str, Any]:
    """The figures of an answer; of the disk those since `disk`, what it had been before."""
    s = answer.stats
    figures: dict[str, Any] = {"load_s": load_s, "first_token_s": load_s + s.first_token_s}
    figures |= {name: getattr(s, name) for name in FIGURES}
    if disk is not None and model.executor.disk is not None:
        figures |= (model.executor.disk - disk).figures()
    run = {"mode": model.mode, "rungs": model.manifest.rungs_in(model.mode), "seed": answer.seed}
    return {"finish_reason": answer.finish_reason, **run, "stats": figures}


def print_stats(model: "Model", report: Mapping[str, Any]) -> None:
    """Print the figures of an answer on stderr."""
    taken = {} if model.allocation is None else {"gpu_bytes": model.allocation.total}
    mode, rungs = report["mode"], report["rungs"]
    if list(rungs) != [mode]:  # what it comes to, layer by layer
        mode += f" ({', '.join(f'{count} {rung}' for rung, count in rungs.items())})"
    figures, share = report["stats"], report["stats"]["rows_read_share"]
    beside = {"dense_reads_times": 1 / share} if share else {}
    print_figures({"mode": mode, "seed": report["seed"], **taken, **figures, **beside})


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print figures on stderr, one a line."""
    for name, value in figures.items():
        shown = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else value
        console.say(f"  {name:22}{shown}")
