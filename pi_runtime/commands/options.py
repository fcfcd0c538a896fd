"""The options of `pi-run` and `pi-serve`. What only one of the two takes is grouped by what it is for.

`MODEL_FLAGS` and `ENGINE_FLAGS` say how the command line spells the options that Python has too. `LLAMA_CPP` says what
to write for flags of llama.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pi_runtime.console import GroupedCommand, parse_size
from pi_runtime.engine.options import EngineOptions, ModelOptions
from pi_runtime.errors import Setting, UsageError, read_error


def _size(name: str) -> Callable[[str], int]:
    """What reads the size of a setting."""

    def size(text: str) -> int:
        return parse_size(text, name)

    return size


def _drafts(text: str) -> str | int:
    """Parse the value of `--speculate`: a number of tokens to draft, or a word such as auto."""
    return int(text) if text.isdecimal() else text


def read_file(name: str, path: Path | None, kind: str) -> str | None:
    """The text of the file that a setting names, if it does. Raises InputError where it cannot be read."""
    try:
        return None if path is None else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise read_error(Setting(name, path), error, f"name a text file with {kind}") from None


def _budget(name: str, help_text: str, **more: Any) -> Any:
    return typer.Option(envvar=f"PI_{name.upper()}", help=help_text, parser=_size(name), metavar="SIZE", **more)


_OTHER = {"rich_help_panel": ""}
"""Of an option that stands with those that belong to no group."""


def _one_of(*words: str) -> Callable[[], list[str]]:
    """What Tab completes."""
    return lambda: [*words]


def _cache_formats() -> list[str]:
    """What a cache may hold numbers in; not imported for help, which is light."""
    from pi_runtime.artifact.buffers import CACHE_FORMATS

    return ["auto", *CACHE_FORMATS]


MODEL_FLAGS: Mapping[str, Any] = {
    "context": typer.Option(
        "--ctx-size", envvar="PI_CTX_SIZE", help="Context length in tokens. Default: the model's, at most 4096."
    ),
    "mode": typer.Option(
        envvar="PI_MODE",
        help="dense computes every neuron, gate skips exact zeros, predicted skips what predictors expect to be zero, "
        "auto takes for each layer what was compiled.",
        autocompletion=_one_of("auto", "dense", "gate", "predicted"),
    ),
    "device": typer.Option(
        envvar="PI_DEVICE",
        help="auto, cpu, cuda:N, or stand-in: the CPU in a GPU's place, for tests.",
        autocompletion=_one_of("auto", "cpu", "stand-in", "cuda:0"),
    ),
    "vram_budget": _budget("vram_budget", "GPU memory to use, like 8GiB: picks the placement. Default: what is free."),
    "ram_budget": _budget("ram_budget", "Memory to use, like 3GiB; the rest stays on disk. Default: all, if it fits."),
    "kv_budget": _budget("kv_budget", "Memory for keys and values, like 2GiB."),
    "cache_format": typer.Option(
        envvar="PI_CACHE_FORMAT",
        help="Number format of keys and values: auto, f32, f16, q8 or q4.",
        autocompletion=_cache_formats,
    ),
    "threads": typer.Option(envvar="PI_THREADS", help="CPU threads. Default: all."),
}
KV_DISK = typer.Option(
    envvar="PI_KV_DISK",
    metavar="FOLDER",
    help="Folder for keys and values that memory has no room for.",
    show_default=False,
)
ENGINE_FLAGS: Mapping[str, Any] = {
    "slots": typer.Option(help="Requests that run at once.", min=1),
    "piece": typer.Option(help="Prompt tokens processed per step. Default: adaptive."),
    "speculate": typer.Option(
        envvar="PI_SPECULATE",
        help="Speculative decoding: tokens to draft and check together; auto, off or a number.",
        parser=_drafts,
        metavar="TEXT",
        autocompletion=_one_of("auto", "off"),
    ),
    "kv_disk": KV_DISK,
    "kv_disk_budget": _budget("kv_disk_budget", "Most that they take there, like 50GiB. Default: 8GiB."),
}
FILE_FLAGS: Mapping[str, Any] = {
    "slots": typer.Option(help="Requests of --prompts that run at once."),
    "piece": typer.Option(help="Prompt tokens processed per step, with --prompts. Default: adaptive."),
    "kv_budget": _budget("kv_budget", "Memory for keys and values of --prompts, like 2GiB."),
}
"""The same options where only a file of prompts has a use for them."""


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What is run, and how it comes to be an artifact that can be trusted."""

    artifact: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="An artifact of pi-compile; or a GGUF file, a checkpoint's folder or a hub name, to be packed once.",
            show_default=False,
        ),
    ]
    cache_limit: Annotated[
        int | None, _budget("cache_limit", "Most that packed models take, like 50GiB; older ones go.", **_OTHER)
    ] = None
    chat_template: Annotated[
        Path | None, typer.Option(help="A chat template in place of the model's own.", show_default=False, **_OTHER)
    ] = None
    verify: Annotated[bool, typer.Option("--verify", help="First check every byte against its digest.", **_OTHER)] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class TaskOptions(SourceOptions):
    """What `pi-run` does with an artifact."""

    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue; - reads stdin.")] = None
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines, a prompt each, answered together.", show_default=False)
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where answers to --prompts go; continued if it is there.")
    ] = None
    bench: Annotated[bool, typer.Option("--bench", help="Measure speed, alone and in batches.")] = False
    chat: Annotated[bool, typer.Option("--chat", help="Talk, through the model's own chat template.")] = False
    system: Annotated[str | None, typer.Option(help="System message of a chat.")] = None

    @property
    def asked(self) -> int:
        """How many tasks are asked for; there should be one."""
        return [self.prompt is not None, self.prompts is not None, self.chat, self.bench].count(True)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What an answer may be, and which of its figures are shown."""

    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 256
    min_tokens: Annotated[int, typer.Option(help="Tokens before which nothing ends the answer.")] = 0
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")] = None
    json_schema: Annotated[
        Path | None, typer.Option(help="The answer is JSON by the schema in this file.", show_default=False)
    ] = None
    fixed_separators: Annotated[
        bool,
        typer.Option(
            "--fixed-separators", help="Of --json-schema: ', ' and ': ' between parts, and no other white space."
        ),
    ] = False
    regex: Annotated[str | None, typer.Option(help="The answer matches this regular expression.")] = None
    lark: Annotated[
        Path | None, typer.Option(help="The answer follows the Lark grammar in this file.", show_default=False)
    ] = None
    logprobs: Annotated[
        int | None, typer.Option(help="Give each token's log-probability, and those of so many likeliest.")
    ] = None
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the tokens of the prompt.")] = None
    answers: Annotated[int, typer.Option(help="Answers to each of --prompts, with draws of their own.")] = 1


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn: fields of `Sampling`; None keeps the model's default."""

    temperature: Annotated[float | None, typer.Option(help="Temperature of sampling; 0 is greedy.")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this total probability.")] = None
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages repeats.")] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken off the logit of what the answer has already, -2 to 2.")
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, once for each time that the answer has it.")
    ] = None
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=BIAS, added to a token's logit, -100 to 100; may be given again.")
    ] = None
    seed: Annotated[int | None, typer.Option(envvar="PI_SEED", help="Same seed, same text.")] = None


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What `pi-run --bench` measures."""

    batches: Annotated[str, typer.Option(help="Sequences that --bench decodes together.")] = "1,2,4,8,16,32"
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of the prompts of --bench.")] = "64,512"
    repetitions: Annotated[int, typer.Option(help="Runs of each test of --bench.")] = 5
    seconds: Annotated[float, typer.Option(help="Most time that --bench takes; 0 sets no limit.")] = 60
    beside: Annotated[
        Path | None, typer.Option(help="A GGUF file for llama.cpp, measured in turns with --bench.", show_default=False)
    ] = None
    as_markdown: Annotated[bool, typer.Option("--md", help="Print the result of --bench as Markdown.")] = False


TITLES: Mapping[type[Any], str] = {
    TaskOptions: "What to do",
    AnswerOptions: "The answer",
    SamplingOptions: "How tokens are drawn (default: as the model's makers say)",
    ModelOptions: "Where it runs, and in how much memory",
    EngineOptions: "Several at once, and drafts",
    BenchOptions: "--bench",
}
"""Titles of groups of options in a help."""

_ALWAYS, _OF_SERVE = "nothing: this is always so", "pi-serve, which has this flag"
LLAMA_CPP: Mapping[str, str] = {
    name: instead
    for names, instead in (
        ("-m --model -hf -hfr --hf-repo -hff --hf-file -mu", "the model without a flag: FILE, or OWNER/NAME:Q4_K_M"),
        ("-c", "--ctx-size N"),
        ("-n --predict --n-predict", "--max-tokens N"),
        ("-t -tb --threads-batch", "--threads N"),
        ("-b --batch-size -ub --ubatch-size", "--piece N, or nothing: steps are sized by what they take"),
        ("-np --parallel", "--slots N"),
        ("-p", "pi-run MODEL --prompt TEXT"),
        ("-f --file", "--prompt - < FILE"),
        ("-sys --system-prompt", "--chat --system TEXT"),
        ("-cnv --conversation -i --interactive -st --single-turn", "--chat"),
        ("--temp", "--temperature N"),
        ("--repeat-penalty", "--repetition-penalty N"),
        ("-s", "--seed N"),
        ("-l", "--logit-bias ID=BIAS"),
        ("-r --reverse-prompt", "--stop TEXT"),
        ("-j -jf --json-schema-file", "--json-schema FILE"),
        ("--grammar --grammar-file", "--regex TEXT or --lark FILE; a request's field grammar takes GBNF"),
        ("-ngl --gpu-layers --n-gpu-layers -ts --tensor-split -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe",
         "--device cuda:0 --vram-budget SIZE: the budget decides what the GPU holds"),
        ("-dev -sm --split-mode -mg --main-gpu", "--device cuda:N: one GPU is used"),
        ("-ctk --cache-type-k -ctv --cache-type-v", "--cache-format q8"),
        ("-fa --flash-attn -cb --cont-batching --jinja --metrics --props -kvu --kv-unified", _ALWAYS),
        ("--mlock --no-mmap", "nothing: files are mapped; --ram-budget SIZE reads the rest from disk"),
        ("--slot-save-path --cache-reuse", "--kv-disk FOLDER: stored prefixes are found by themselves"),
        ("--chat-template-file", "--chat-template FILE"),
        ("-md --model-draft --draft --draft-n --draft-max", "--speculate N"),
        ("--embedding --pooling", "--embeddings mean, or last, of pi-serve"),
        ("--api-key", "--api-key-file FILE of pi-serve"),
        ("-a", "--name TEXT of pi-serve"),
        ("--host --port --alias --api-key-file --ssl-cert-file --ssl-key-file", _OF_SERVE),
        ("--lora --lora-scaled --mmproj", "nothing: adapters and images are not read; merge an adapter into its model"),
        ("-v --verbose -lv --verbosity", "--stats of pi-run, --log-requests of pi-serve"),
    )
    for name in names.split()
}  # fmt: skip
"""What to write for each flag of llama.cpp that is not ours, or that only one of our programs has."""


class ModelCommand(GroupedCommand):
    """A command that runs a model. Flags of llama.cpp get an error that says what to write."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what the user wrote. Raises UsageError for a flag of llama.cpp that is not ours."""
        ours = {name: one for one in self.get_params(ctx) for name in one.opts}
        given = iter(args)
        for argument in given:
            name, has_value, _ = argument.partition("=")
            if name == "--":
                break
            if name in ours:
                if not (has_value or getattr(ours[name], "is_flag", True)):
                    next(given, None)
            elif name in LLAMA_CPP:
                raise UsageError(f"{name} is a flag of llama.cpp", remedy=LLAMA_CPP[name])
        return super().parse_args(ctx, args)
