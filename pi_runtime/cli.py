"""`pi-run`: answer a prompt, or a file of prompts, from one artifact, or measure it."""

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pi_runtime import console
from pi_runtime.errors import InputError, PromptError, UsageError, read_error

if TYPE_CHECKING:
    from pi_runtime.execution.executor import DiskStats
    from pi_runtime.execution.plan_choice import Allocation
    from pi_runtime.generation import AnswerSettings, Generation
    from pi_runtime.model import Model
    from pi_runtime.prompt_file import PromptFile
    from pi_runtime.sampling import TokenLogprobs

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    # Nothing that is imported becomes garbage, and looking for some takes a third of a warm start.
    gc.disable()
    raise SystemExit(console.run(app))


@app.command()
def run(
    context: typer.Context,
    artifact: Annotated[Path, typer.Argument(help="An artifact made by pi-compile.", show_default=False)],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue; - reads stdin.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines, a prompt each, answered together.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where answers to --prompts go; continued if it is there.")
    ] = None,
    bench: Annotated[bool, typer.Option("--bench", help="Measure speed, alone and in batches.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Talk, through the model's own chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of a chat.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 256,
    min_tokens: Annotated[int, typer.Option(help="Tokens before which nothing ends the answer.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="The answer is JSON by the schema in this file.", show_default=False)
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches this regular expression.")] = None,
    lark: Annotated[
        Path | None, typer.Option(help="The answer follows the Lark grammar in this file.", show_default=False)
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this total probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages repeats.")] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken off the logit of what the answer has already, -2 to 2.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, once for each time that the answer has it.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=BIAS, added to a token's logit, -100 to 100; may be given again.")
    ] = None,
    seed: Annotated[int | None, typer.Option(envvar="PI_SEED", help="Same seed, same text.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Give each token's log-probability, and those of so many likeliest.")
    ] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the tokens of the prompt.")] = None,
    answers: Annotated[int, typer.Option(help="Answers to each of --prompts, with draws of their own.")] = 1,
    ctx_size: Annotated[int | None, typer.Option(envvar="PI_CTX_SIZE", help="Positions to hold.")] = None,
    mode: Annotated[str, typer.Option(envvar="PI_MODE", help="auto, dense, gate or predicted.")] = "auto",
    device: Annotated[str, typer.Option(envvar="PI_DEVICE", help="auto, cpu, stand-in or cuda:N.")] = "auto",
    vram_budget: Annotated[
        str | None, typer.Option(envvar="PI_VRAM_BUDGET", help="GPU memory to use, like 8GiB: picks the placement.")
    ] = None,
    ram_budget: Annotated[
        str | None, typer.Option(envvar="PI_RAM_BUDGET", help="Memory to use, like 3GiB; the rest stays on disk.")
    ] = None,
    cache_format: Annotated[
        str, typer.Option(envvar="PI_CACHE_FORMAT", help="How keys and values are held: auto, f16 or q8.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(envvar="PI_THREADS", help="CPU threads.")] = None,
    slots: Annotated[int, typer.Option(help="Most of --prompts that run at once.")] = 8,
    kv_budget: Annotated[
        str | None, typer.Option(envvar="PI_KV_BUDGET", help="Memory for keys and values of --prompts, like 2GiB.")
    ] = None,
    piece: Annotated[
        int | None, typer.Option(help="Most tokens of new --prompts that a step reads; else as many as it can.")
    ] = None,
    batches: Annotated[str, typer.Option(help="Sequences that --bench decodes together.")] = "1,2,4,8,16,32",
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of the prompts of --bench.")] = "64,512",
    repetitions: Annotated[int, typer.Option(help="Runs of each test of --bench.")] = 5,
    seconds: Annotated[float, typer.Option(help="Most time that --bench takes; 0 sets no limit.")] = 60,
    as_markdown: Annotated[bool, typer.Option("--md", help="Print the result of --bench as Markdown.")] = False,
    speculate: Annotated[
        str, typer.Option(envvar="PI_SPECULATE", help="Tokens to guess and check together: auto, off or a number.")
    ] = "auto",
    stats: Annotated[bool, typer.Option("--stats", help="Say afterwards how long it took.")] = False,
    as_json: Annotated[bool, console.JSON] = False,
    debug: Annotated[bool, console.DEBUG] = False,
    version: Annotated[bool, console.VERSION] = False,
) -> None:
    """Continue a prompt, answer a file of prompts, chat, or measure, with a packed model. Text goes to stdout as it
    comes."""
    import time

    began = time.perf_counter()
    _check_flags(prompt, prompts, output, chat, bench, as_json, as_markdown)
    _check_output_flags(prompts, as_json, answers, logprobs, prompt_logprobs)
    for way, chosen in (("--chat", chat), ("--prompts", prompts is not None), ("--bench", bench)):
        for name in _FLAGS_OF[way]:
            source = context.get_parameter_source(name)
            if not chosen and source is not None and source.name == "COMMANDLINE":
                raise UsageError(f"--{name.replace('_', '-')} goes with {way} alone")
    text = _read(sys.stdin.read) if prompt == "-" else prompt
    grammar = {"json_schema": _read_schema(json_schema), "regex": regex, "lark": _read_file("--lark", lark)}
    from pi_runtime.execution.devices import gpu_kernels_are_cold, resolve_device
    from pi_runtime.execution.plan_choice import parse_size
    from pi_runtime.guesses import parse_setting
    from pi_runtime.model import load
    from pi_runtime.sampling import Sampling, parse_logit_bias
    from pi_runtime.text.grammar import Grammar
    from pi_runtime.warm_up import warm_up

    given = {"vram_budget": vram_budget, "ram_budget": ram_budget, "kv_budget": kv_budget}
    vram, ram, held = (None if size is None else parse_size(size, name) for name, size in given.items())
    to_gpu = ram is None and resolve_device(device).startswith("cuda")
    if to_gpu and gpu_kernels_are_cold():
        console.say("kernels for the GPU are compiled once, after the weights are there (a minute or two)")
    opening = partial(
        load,
        artifact,
        context=ctx_size,
        threads=threads,
        device=device,
        vram_budget=vram,
        kv_budget=held,
        cache_format=cache_format,
    )
    if bench:
        what = batches, prompt_tokens, repetitions, seconds, threads
        _measure(artifact, opening, mode, ram, what, as_json=as_json, as_markdown=as_markdown)
        return
    with console.progress("to the GPU") if to_gpu else nullcontext() as bar:
        opened = opening(mode=mode, ram_budget=ram, progress=bar)
    with opened as model:
        settings = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": parse_logit_bias(pair.split("=", 1) for pair in logit_bias or ()),
            "seed": seed,
        }
        sampling = Sampling.from_generation_config(model.manifest.generation, **settings)
        common: AnswerSettings = {
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "stop": stop or [],
            "logprobs": logprobs,
        }
        alone: AnswerSettings = {**common, "sampling": sampling, "grammar": Grammar.of(**grammar)}
        guesses = parse_setting(speculate)
        generate = partial(model.generate, speculate=guesses, **alone)
        _announce(model)
        warm_up(model)
        report = partial(_report, model, time.perf_counter() - began, model.executor.disk)
        if prompts is not None:
            from pi_runtime.prompt_file import PromptFile

            shared = {**settings, **common, **grammar, "prompt_logprobs": prompt_logprobs, "answers": answers}
            _answer_file(model, PromptFile(prompts, model, shared), output, slots, held, piece, guesses, stats)
        elif text is None:
            _chat(model, generate, system, report if stats else None)
        elif as_json:
            scores = None if prompt_logprobs is None else model.score(text, top=prompt_logprobs)
            _print_answer(model, generate(text), report, scores)
        else:
            _print_text(model, generate(text), report if stats else None)


_FLAGS_OF = {
    "--chat": ("system",),
    "--prompts": ("slots", "piece"),
    "--bench": ("batches", "prompt_tokens", "repetitions", "seconds"),
}
"""Flags that nothing else takes."""


def _check_flags(
    prompt: str | None,
    prompts: Path | None,
    output: Path | None,
    chat: bool,
    bench: bool,
    as_json: bool,
    as_markdown: bool,
) -> None:
    """Raise UsageError for flags that do not go together."""
    if [prompt is not None, prompts is not None, chat, bench].count(True) != 1:
        raise UsageError(
            "give one of --prompt TEXT, --prompts FILE, --chat and --bench",
            remedy="pi-run ARTIFACT --prompt 'Once upon a time'",
        )
    if as_markdown and (as_json or not bench):
        raise UsageError("--md goes with --bench alone" if not bench else "--md does not go with --json")
    if as_json and not bench and prompt is None:
        raise UsageError(f"{'--chat' if chat else '--prompts'} does not go with --json")
    if output is not None and prompts is None:
        raise UsageError("--output goes with --prompts alone")
    if output is not None and prompts is not None and output.exists() and prompts.exists() and output.samefile(prompts):
        raise UsageError(f"{output}: the answers would overwrite the prompts", remedy="name another output")


def _measure(
    artifact: Path,
    opening: "Callable[..., Model]",
    mode: str,
    ram_budget: int | None,
    what: tuple[str, str, int, float, int | None],
    *,
    as_json: bool,
    as_markdown: bool,
) -> None:
    """Measure speed, or the curve of speed over budgets; `what` is what `BenchSpec.parse` takes."""
    from pi_runtime.bench.command import run_bench, run_sweep
    from pi_runtime.bench.measurement import BenchSpec

    spec = BenchSpec.parse(*what)
    if ram_budget is None:
        run_bench(artifact, partial(_opened, opening), mode, spec, as_json=as_json, as_markdown=as_markdown)
    else:
        within = partial(_opened, opening, mode)
        run_sweep(artifact, within, ram_budget, spec, as_json=as_json, as_markdown=as_markdown)


def _opened(opening: "Callable[..., Model]", mode: str, ram_budget: int | None = None) -> "Model":
    from pi_runtime.warm_up import warm_up

    model = opening(mode=mode, ram_budget=ram_budget)
    _announce(model)
    warm_up(model)
    return model


def _check_output_flags(
    prompts: Path | None, as_json: bool, answers: int, logprobs: int | None, prompt_logprobs: int | None
) -> None:
    """Raise UsageError for results that the chosen form of output cannot show."""
    if answers != 1 and prompts is None:
        raise UsageError("--answers goes with --prompts alone")
    for flag, count in (("--logprobs", logprobs), ("--prompt-logprobs", prompt_logprobs)):
        if count is not None and prompts is None and not as_json:
            raise UsageError(f"{flag} goes with --json or --prompts")


def _answer_file(
    model: "Model",
    file: "PromptFile",
    output: Path | None,
    slots: int,
    kv_budget: int | None,
    piece: int | None,
    speculate: str | int,
    stats: bool,
) -> None:
    from dataclasses import asdict

    from pi_runtime.engine.engine import Engine

    # Nobody waits for the next token here: with prompts first, more answers are written together.
    with Engine(model, slots=slots, kv_budget=kv_budget, piece=piece, decode_share=0, speculate=speculate) as engine:
        try:
            with console.progress("answers", "prompts") as bar:
                file.answer(engine, output, bar)
        finally:
            if stats:
                found = engine.stats
                disk = found.disk.figures() if found.disk is not None else {}
                own = {name: value for name, value in asdict(found).items() if name != "disk"}
                _print_figures({**own, "tokens_per_s": found.tokens_per_s, **disk})


def _print_text(model: "Model", answer: "Generation", report: "Callable[[Generation], dict[str, Any]] | None") -> None:
    """Print an answer as it comes, and then its figures if a report is given."""
    _stream(answer)
    if answer.finish_reason == "context":
        console.say(f"(stopped: the context of {model.context} tokens is full; see --ctx-size)")
    if report is not None:
        _print_stats(model, report(answer))


def _print_answer(
    model: "Model",
    answer: "Generation",
    report: "Callable[[Generation], dict[str, Any]]",
    scores: "list[TokenLogprobs] | None",
) -> None:
    """Print an answer as JSON, with log-probabilities where they were asked for."""
    from pi_runtime.prompt_file import logprobs_json

    found: dict[str, Any] = {"text": "".join(answer), **report(answer)}
    if answer.logprobs:
        found["logprobs"] = logprobs_json(model, answer.logprobs)
    if scores is not None:
        found["prompt_logprobs"] = logprobs_json(model, scores)
    console.print_json(found)


def _announce(model: "Model") -> None:
    """Say what the user should know before the first token."""
    if model.notice is not None:
        console.say(model.notice)
    if model.allocation is not None:
        console.say(_placement_line(model.device, model.allocation))


def _placement_line(device: str, taken: "Allocation") -> str:
    where, plan = "no GPU in use: the CPU stands in for one" if device == "stand-in" else device, taken.plan
    solved = "" if taken.context == plan.context else f" with a context of {taken.context} (solved for {plan.context})"
    return (
        f"{where}. Placement: {plan.objective} for {console.size(plan.vram_bytes)}, "
        f"{console.size(taken.total)} used{solved}; to solve another budget: [place] vram_gib, then pi-compile build"
    )


def _stream(answer: "Generation") -> str:
    pieces = []
    for piece in answer:
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(pieces)


def _chat(
    model: "Model",
    generate: Callable[..., "Generation"],
    system: str | None,
    report: "Callable[[Generation], dict[str, Any]] | None",
) -> None:
    _ = model.chat_template  # before anybody types: a model without one cannot talk
    messages = [{"role": "system", "content": system}] if system else []
    cache = model.new_cache()
    console.say("Your turn; an empty line or end of input ends the talk.")
    while line := _read_turn():
        messages.append({"role": "user", "content": line})
        answer = generate(model.chat_prompt(messages), cache=cache)
        messages.append({"role": "assistant", "content": _stream(answer)})
        if answer.finish_reason == "context":
            console.say(f"(the context of {model.context} tokens is full; start again, or raise --ctx-size)")
            return
        if report is not None:
            _print_stats(model, report(answer))


def _read_turn() -> str:
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return _read(sys.stdin.readline).strip()


def _read(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise PromptError("the text on stdin cannot be decoded", expected=error.encoding, found=error) from None


def _read_file(flag: str, path: Path | None) -> str | None:
    """The text of the file that a flag names, if it does."""
    try:
        return None if path is None else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        kind = "a Lark grammar" if flag == "--lark" else "a JSON schema"
        raise read_error(f"{flag} {path}", error, f"name a text file with {kind}") from None


def _read_schema(path: Path | None) -> str | None:
    text = _read_file("--json-schema", path)
    if text is None:
        return None
    import json

    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--json-schema {path}: not JSON", found=error, remedy="correct the file") from None
    return text


def _report(model: "Model", load_s: float, disk: "DiskStats | None", answer: "Generation") -> dict[str, Any]:
    """The figures of an answer; those of the disk since it had been asked for `disk`."""
    s = answer.stats
    figures = {
        "load_s": load_s,
        "first_token_s": load_s + s.first_token_s,
        "prompt_tokens": s.prompt_tokens,
        "prefill_tokens_per_s": s.prefill_tokens_per_s,
        "generated_tokens": s.generated_tokens,
        "decode_tokens_per_s": s.decode_tokens_per_s,
        "rows_read_share": s.rows_read_share,
        "active_share": s.active_share,
        "guessed_tokens": s.guessed_tokens,
        "accepted_tokens": s.accepted_tokens,
    }
    if disk is not None and model.executor.disk is not None:
        figures |= (model.executor.disk - disk).figures()
    return {"finish_reason": answer.finish_reason, "mode": model.mode, "seed": answer.seed, "stats": figures}


def _print_stats(model: "Model", report: dict[str, Any]) -> None:
    taken = {} if model.allocation is None else {"gpu_bytes": model.allocation.total}
    _print_figures({"mode": report["mode"], "seed": report["seed"], **taken, **report["stats"]})


def _print_figures(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        shown = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else value
        console.say(f"  {name:22}{shown}")
