"""`pi-run`: answer a prompt, or a file of prompts, from one artifact, or measure it."""

import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pi_runtime import console
from pi_runtime.commands.options import (
    ENGINE_FLAGS,
    FILE_FLAGS,
    MODEL_FLAGS,
    TITLES,
    AnswerOptions,
    BenchOptions,
    ModelCommand,
    SamplingOptions,
    TaskOptions,
    read_file,
)
from pi_runtime.engine.options import EngineOptions, ModelOptions
from pi_runtime.errors import InputError, Setting, UsageError

if TYPE_CHECKING:
    from pi_runtime.commands.prompts import PromptFile
    from pi_runtime.engine.model import Model
    from pi_runtime.sequence.settings import AnswerSettings

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    # Nothing that is imported becomes garbage, and looking for some takes a third of a warm start.
    gc.disable()
    if sys.argv[1:2] in (["list"], ["rm"]):
        from pi_runtime.commands.model_cache import app as cache

        raise SystemExit(console.run(cache))
    if sys.argv[1:2] == ["flood"]:
        from pi_runtime.commands.flood import app as flood

        raise SystemExit(console.run(flood, sys.argv[2:]))
    raise SystemExit(console.run(app))


_EPILOG = """
Commands:
  pi-run list         Show the models that were packed on the way.
  pi-run rm NAME      Remove one of them.
  pi-run flood URL    Ask a server whether a text depends on its company.

Examples:
  pi-run model.gguf --chat
  pi-run model.pi --prompt "Once upon a time" --stats
  pi-run model.pi --prompts prompts.jsonl -o answers.jsonl

More: docs/how-to/from-llama-cpp.md and docs/tutorials/larger-than-memory.md
"""


@app.command(cls=ModelCommand, epilog=_EPILOG, context_settings=console.HELP)
@console.takes(
    *(TaskOptions, AnswerOptions, SamplingOptions, ModelOptions, EngineOptions, BenchOptions),
    flags={**MODEL_FLAGS, **ENGINE_FLAGS, **FILE_FLAGS},
    titles=TITLES,
)
def run(
    task: TaskOptions,
    answer: AnswerOptions,
    sampling: SamplingOptions,
    model_options: ModelOptions,
    engine_options: EngineOptions,
    bench: BenchOptions,
    invocation: typer.Context,
    stats: Annotated[bool, typer.Option("--stats", help="Say afterwards how long it took.")] = False,
    as_json: Annotated[bool, console.JSON] = False,
    debug: Annotated[bool, console.DEBUG] = False,
    version: Annotated[bool, console.VERSION] = False,
) -> None:
    """Continue a prompt, answer a file of prompts, chat, or measure. Text goes to stdout as it comes.

    On a terminal the model alone starts a chat."""
    if not (task.asked or as_json) and sys.stdin.isatty() and sys.stdout.isatty():
        task = replace(task, chat=True)
    _check_task(task, bench, as_json)
    _check_output(task, answer, as_json)
    _check_flags_of_tasks(task, invocation)
    from pi_runtime.commands.chat import read_text

    text = read_text(sys.stdin.read) if task.prompt == "-" else task.prompt
    grammar, template = _grammar(answer), read_file("chat_template", task.chat_template, "a chat template")
    from pi_runtime.commands.model_cache import checked_artifact

    task = replace(task, artifact=checked_artifact(task))
    if task.bench:
        _measure(task.artifact, model_options, bench, as_json=as_json)
        return
    began = time.perf_counter()
    with _opened(task.artifact, model_options) as model:
        if template is not None:
            model.use_template(template)
        report = _reporter(model, time.perf_counter() - began)
        drawn = _drawn(sampling)
        settings = _settings(model, answer, drawn, grammar)
        if task.prompts is not None:
            from pi_runtime.commands.prompts import PromptFile

            shared = {**drawn, **_common(answer), **grammar}
            shared |= {"prompt_logprobs": answer.prompt_logprobs, "answers": answer.answers}
            file = PromptFile(task.prompts, model, shared)
            _answer_file(model, file, task.output, engine_options, model_options.kv_budget, stats)
            return
        generate = partial(model.generate, speculate=engine_options.speculate)
        if text is None:
            from pi_runtime.commands.chat import chat

            chat(model, generate, settings, task.system, report, stats)
        elif as_json:
            from pi_runtime.commands.printing import print_answer

            top = answer.prompt_logprobs
            print_answer(model, generate(text, **settings), report, None if top is None else model.score(text, top=top))
        else:
            from pi_runtime.commands.printing import print_text

            print_text(model, generate(text, **settings), report if stats else None)


_FLAGS_OF = {
    "--chat": ("system",),
    "--prompts": ("slots", "piece", "kv_disk", "kv_disk_budget"),
    "--bench": ("batches", "prompt_tokens", "repetitions", "seconds", "beside"),
}
"""Options that no other task takes."""


def _check_task(task: TaskOptions, bench: BenchOptions, as_json: bool) -> None:
    """Raise UsageError for options that do not go together."""
    if task.asked != 1:
        raise UsageError(
            "give one of --prompt TEXT, --prompts FILE, --chat and --bench",
            remedy="pi-run MODEL --chat, or pi-run MODEL --prompt 'Once upon a time'",
        )
    if bench.as_markdown and (as_json or not task.bench):
        raise UsageError("--md goes with --bench alone" if not task.bench else "--md does not go with --json")
    if as_json and not task.bench and task.prompt is None:
        raise UsageError(f"{'--chat' if task.chat else '--prompts'} does not go with --json")


def _check_output(task: TaskOptions, answer: AnswerOptions, as_json: bool) -> None:
    """Raise UsageError for an output, or for results, that the task does not have."""
    output, prompts = task.output, task.prompts
    if output is not None and prompts is None:
        raise UsageError("--output goes with --prompts alone")
    if output is not None and prompts is not None and output.exists() and prompts.exists() and output.samefile(prompts):
        raise UsageError(f"{output}: the answers would overwrite the prompts", remedy="name another output")
    if answer.answers != 1 and prompts is None:
        raise UsageError("--answers goes with --prompts alone")
    if answer.fixed_separators and answer.json_schema is None and prompts is None:
        raise UsageError("--fixed-separators goes with --json-schema or --prompts")
    for flag, count in (("--logprobs", answer.logprobs), ("--prompt-logprobs", answer.prompt_logprobs)):
        if count is not None and prompts is None and not as_json:
            raise UsageError(f"{flag} goes with --json or --prompts")


def _check_flags_of_tasks(task: TaskOptions, invocation: typer.Context) -> None:
    """Raise UsageError for an option of another task."""
    for way, chosen in (("--chat", task.chat), ("--prompts", task.prompts is not None), ("--bench", task.bench)):
        for name in _FLAGS_OF[way]:
            source = invocation.get_parameter_source(name)
            if not chosen and source is not None and source.name == "COMMANDLINE":
                raise UsageError(f"--{name.replace('_', '-')} goes with {way} alone")


def _grammar(answer: AnswerOptions) -> dict[str, Any]:
    """The grammars that are given, by the names of settings."""
    schema = read_file("json_schema", answer.json_schema, "a JSON schema")
    if schema is not None:
        import json

        try:
            json.loads(schema)
        except (ValueError, RecursionError) as error:
            asked = Setting("json_schema", answer.json_schema)
            raise InputError((asked, ": not JSON"), found=error, remedy="correct the file") from None
    fixed = {"fixed_separators": True} if answer.fixed_separators else {}
    lark = read_file("lark", answer.lark, "a Lark grammar")
    return {"json_schema": schema, "regex": answer.regex, "lark": lark, **fixed}


def _drawn(sampling: SamplingOptions) -> dict[str, Any]:
    """The settings of `Sampling` that are given; None for the others."""
    from pi_runtime.sequence.sampling import parse_logit_bias

    biases = parse_logit_bias(pair.split("=", 1) for pair in sampling.logit_bias or ())
    return {**asdict(sampling), "logit_bias": biases}


def _common(answer: AnswerOptions) -> "AnswerSettings":
    return {
        "max_tokens": answer.max_tokens,
        "min_tokens": answer.min_tokens,
        "stop": answer.stop or [],
        "logprobs": answer.logprobs,
    }


def _settings(
    model: "Model", answer: AnswerOptions, drawn: dict[str, Any], grammar: dict[str, Any]
) -> "AnswerSettings":
    from pi_runtime.sequence.sampling import Sampling
    from pi_runtime.text.grammar import Grammar

    return {
        **_common(answer),
        "sampling": Sampling.from_generation_config(model.manifest.generation, **drawn),
        "grammar": Grammar.of(**grammar),
    }


def _opened(artifact: Path, options: ModelOptions) -> "Model":
    """The model, with its kernels compiled. What the user should know is said."""
    from pi_runtime.commands.printing import announce
    from pi_runtime.commands.warm_up import warm_up
    from pi_runtime.engine.loading import device_of, open_model
    from pi_runtime.execution.devices import gpu_kernels_are_cold

    to_gpu = device_of(options).startswith("cuda")
    if to_gpu and gpu_kernels_are_cold():
        console.say("kernels for the GPU are compiled once, after the weights are there (a minute or two)")
    with console.progress("to the GPU") if to_gpu else nullcontext() as bar:
        model = open_model(artifact, options, bar)
    try:
        announce(model)
        warm_up(model)
    except BaseException:
        model.close()
        raise
    return model


def _reporter(model: "Model", load_s: float) -> Callable[..., dict[str, Any]]:
    from pi_runtime.commands.printing import report

    return partial(report, model, load_s, model.executor.disk)


def _measure(artifact: Path, options: ModelOptions, bench: BenchOptions, *, as_json: bool) -> None:
    """Measure speed, or the curve of speed over budgets."""
    from pi_runtime.commands.bench.command import run_bench, run_sweep
    from pi_runtime.commands.bench.measurement import BenchSpec

    spec = BenchSpec.parse(bench.batches, bench.prompt_tokens, bench.repetitions, bench.seconds, options.threads)
    shown = {"as_json": as_json, "as_markdown": bench.as_markdown}
    if options.ram_budget is None:
        opened = lambda mode: _opened(artifact, replace(options, mode=mode))  # noqa: E731
        run_bench(artifact, opened, options.mode, spec, beside=bench.beside, **shown)
    else:
        within = lambda budget: _opened(artifact, replace(options, ram_budget=budget))  # noqa: E731
        run_sweep(artifact, within, options.ram_budget, spec, **shown)


def _answer_file(
    model: "Model",
    file: "PromptFile",
    output: Path | None,
    options: EngineOptions,
    kv_budget: int | None,
    stats: bool,
) -> None:
    from pi_runtime.commands.printing import print_figures
    from pi_runtime.engine.engine import Engine

    # Nobody waits for the next token here: with prompts first, more answers are written together.
    chosen = asdict(replace(options, decode_share=0))
    with Engine(model, kv_budget=kv_budget, say=console.say_now, **chosen) as engine:
        try:
            with console.progress("answers", "prompts") as bar:
                file.answer(engine, output, bar)
        finally:
            if stats:
                found = engine.stats
                disk = found.disk.figures() if found.disk is not None else {}
                own = {name: value for name, value in asdict(found).items() if name != "disk"}
                print_figures({**own, "tokens_per_s": found.tokens_per_s, **disk})
