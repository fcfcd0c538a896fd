"""What every mistake of a user of `pi-run` is answered: the whole message and its exit code, once, in one table.

Other tests of the same mistakes look at the type of the error alone.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numba
import pytest

MOST = numba.config.NUMBA_NUM_THREADS
NO_PLACEMENT = (
    "{artifact}: holds no placement: it was packed without profile and placements (pi-compile pack --plain)",
    "  try: run it on the CPU (--device cpu, no --vram-budget), or build it: pi-compile build RECIPE",
)
CONTEXT = "  expected: 2 to 64, the context this model was made for"
THREADS = f"  expected: 1 to {MOST}", "  try: NUMBA_NUM_THREADS sets the most"
SHORTEN = "  try: shorten it, or raise --ctx-size if the model allows"
NO_ARTIFACT = "{file}: not an artifact", "  expected: a .pi file"
PACK = "  try: pack a checkpoint with `pi-compile build`, and name the artifact it writes"
ONE_OF = (
    "give one of --prompt TEXT, --prompts FILE, --chat and --bench",
    "  try: pi-run MODEL --chat, or pi-run MODEL --prompt 'Once upon a time'",
)
COPY = "  try: copy or download it again, or pack it anew with `pi-compile build`"

ARGUMENTS: dict[str, tuple[int, list[str], tuple[str, ...]]] = {
    "neither prompt nor chat": (
        2, [], ONE_OF
    ),
    "both": (
        2, ["-p", "a", "--chat"],
        ONE_OF,
    ),
    "all three": (
        2, ["-p", "a", "--chat", "--prompts", "p.jsonl"],
        ONE_OF,
    ),
    "prompt and bench": (
        2, ["-p", "a", "--bench"],
        ONE_OF,
    ),
    "Markdown of a prompt": (2, ["-p", "a", "--md"], ("--md goes with --bench alone",)),
    "Markdown as JSON": (2, ["--bench", "--md", "--json"], ("--md does not go with --json",)),
    "no batches": (
        2, ["--bench", "--batches", "0"],
        ("--batches 0", "  expected: numbers of 1 or more, like 1,2,4"),
    ),
    "no lengths": (
        2, ["--bench", "--prompt-tokens", "64,long"],
        ("--prompt-tokens 64,long", "  expected: numbers of 1 or more, like 1,2,4"),
    ),
    "no repetitions": (2, ["--bench", "--repetitions", "0"], ("--repetitions 0", "  expected: 1 or more")),
    "no time": (
        2, ["--bench", "--seconds", "-1"], ("--seconds -1.0", "  expected: a number ≥ 0; 0 sets no limit")
    ),
    "no context to measure in": (
        2, ["--bench", "--ctx-size", "11"],
        ("measuring needs a context of 12 tokens", "  found: 11", "  try: raise --ctx-size"),
    ),
    "prompts as JSON": (2, ["--prompts", "p.jsonl", "--json"], ("--prompts does not go with --json",)),
    "output of one prompt": (2, ["-p", "a", "-o", "b.jsonl"], ("--output goes with --prompts alone",)),
    "chat as JSON": (2, ["--chat", "--json"], ("--chat does not go with --json",)),
    "mode": (
        2, ["-p", "a", "--mode", "sparse"],
        ("--mode sparse: unknown mode", "  expected: auto, dense, gate, predicted"),
    ),
    "mode without predictors": (
        2, ["-p", "a", "--mode", "predicted"],
        (
            "{artifact}: --mode predicted, but the artifact has no predictors",
            "  try: --mode auto, or train predictors: pi-compile train RECIPE, then pack again",
        ),
    ),
    "device": (
        2, ["-p", "a", "--device", "gpu"],
        ("--device gpu: unknown device", "  expected: auto, cpu, stand-in or cuda:N"),
    ),
    "size": (
        2, ["-p", "a", "--vram-budget", "much"],
        ("--vram-budget much: not a size", "  expected: a number with B, KiB, MiB, GiB or TiB, like 8GiB"),
    ),
    "GPU budget without a unit": (
        2, ["-p", "a", "--vram-budget", "8"],
        (
            "--vram-budget 8: a number without a unit counts bytes, and so few hold nothing",
            "  expected: a number with B, KiB, MiB, GiB or TiB, like 8GiB",
            "  try: did you mean 8GiB?",
        ),
    ),
    "RAM budget without a unit": (
        2, ["-p", "a", "--ram-budget", "1.5"],
        (
            "--ram-budget 1.5: a number without a unit counts bytes, and so few hold nothing",
            "  expected: a number with B, KiB, MiB, GiB or TiB, like 8GiB",
            "  try: did you mean 1.5GiB?",
        ),
    ),
    "GPU budget of a CPU": (
        2, ["-p", "a", "--vram-budget", "1GiB", "--device", "cpu"],
        ("--vram-budget does not go with --device cpu", "  try: --device stand-in, or leave it out"),
    ),
    "temperature": (
        2, ["-p", "a", "--temperature", "nan"],
        ("--temperature nan", "  expected: a number ≥ 0", "  found: nan"),
    ),
    "top-p": (
        2, ["-p", "a", "--top-p", "1.5"], ("--top-p 1.5", "  expected: a number in 0…1", "  found: 1.5")
    ),
    "top-k": (
        2, ["-p", "a", "--top-k", "-3"],
        ("--top-k -3", "  expected: an integer ≥ 0 (0 keeps all)", "  found: -3"),
    ),
    "min-p": (2, ["-p", "a", "--min-p", "2"], ("--min-p 2.0", "  expected: a number in 0…1", "  found: 2.0")),
    "repetition penalty": (
        2, ["-p", "a", "--repetition-penalty", "0"],
        ("--repetition-penalty 0.0", "  expected: a number > 0", "  found: 0.0"),
    ),
    "seed": (2, ["-p", "a", "--seed", "-1"], ("--seed -1", "  expected: an integer ≥ 0", "  found: -1")),
    "max-tokens": (2, ["-p", "a", "--max-tokens", "0"], ("--max-tokens 0", "  expected: 1 or more")),
    "longest context": (2, ["-p", "a", "--ctx-size", "65"], ("--ctx-size 65", CONTEXT)),
    "shortest context": (2, ["-p", "a", "--ctx-size", "1"], ("--ctx-size 1", CONTEXT)),
    "no threads": (2, ["-p", "a", "--threads", "0"], ("--threads 0", *THREADS)),
    "too many threads": (2, ["-p", "a", "--threads", str(MOST + 1)], (f"--threads {MOST + 1}", *THREADS)),
    "stop string": (
        2, ["-p", "a", "--stop", ""], ("--stop: an empty stop string", "  expected: at least one character")
    ),
    "stand-in without a placement": (4, ["-p", "a", "--device", "stand-in"], NO_PLACEMENT),
    "budget without a placement": (4, ["-p", "a", "--vram-budget", "1GiB"], NO_PLACEMENT),
    "long prompt": (
        3, ["-p", "a" * 64], ("the prompt has 64 tokens", "  expected: fewer than the context of 64", SHORTEN)
    ),
    "prompt of --ctx-size tokens": (
        3, ["-p", "abc", "--ctx-size", "3"],
        ("the prompt has 3 tokens", "  expected: fewer than the context of 3", SHORTEN),
    ),
    "empty prompt": (
        3, ["-p", ""],
        (
            "the prompt is empty, and the model has no begin-of-text token to start from",
            "  try: give a prompt of at least one character",
        ),
    ),
    "prompt that is not Unicode": (
        3, ["-p", "\udcff"],
        ("the prompt is not Unicode text at character 0", "  found: surrogates not allowed"),
    ),
}  # fmt: skip

FILES: dict[str, tuple[Callable[[bytes], bytes], tuple[str, ...]]] = {
    "text": (lambda _: b"no artifact", (*NO_ARTIFACT, "  found: a text file", PACK)),
    "empty": (lambda _: b"", (*NO_ARTIFACT, "  found: an empty file", PACK)),
    "cut": (
        lambda data: data[:-500],
        (
            "{file}: damaged at the end of the file",
            "  found: {bytes} bytes that do not end with an end record: truncated, or with bytes after its end",
            COPY,
        ),
    ),
    "headless": (
        lambda data: data[500:],
        (
            "{file}: damaged at the end record",
            "  expected: a directory inside {bytes} bytes",
            "  found: at {directory}",
            COPY,
        ),
    ),
}

Run = Callable[..., tuple[int, str, str]]


def assert_answer(found: tuple[int, str, str], code: int, lines: tuple[str, ...], **names: object) -> None:
    """Exit code, nothing on stdout, and the whole message on stderr."""
    assert found[:2] == (code, "")
    told = json.loads(found[2])["error"] if found[2].startswith("{") else found[2].removeprefix("error: ")
    assert told.splitlines() == "\n".join(lines).format(**names).splitlines()


@pytest.mark.parametrize("mistake", ARGUMENTS)
def test_arguments(run: Run, alphabet: Path, mistake: str) -> None:
    code, arguments, lines = ARGUMENTS[mistake]
    assert_answer(run(alphabet, *arguments), code, lines, artifact=alphabet)


@pytest.mark.parametrize("how", FILES)
def test_files(run: Run, alphabet: Path, tmp_path: Path, how: str) -> None:
    damage, lines = FILES[how]
    whole = alphabet.read_bytes()
    path, data = tmp_path / "bad.pi", damage(whole)
    path.write_bytes(data)
    directory = whole.index(b"PK\1\2")
    assert_answer(run(path, "-p", "a"), 3, lines, file=path, bytes=f"{len(data):,}", directory=f"{directory:,}")


def test_names(run: Run, alphabet: Path, tmp_path: Path) -> None:
    remedy = "  try: name an artifact that `pi-compile build` wrote, a GGUF file, a checkpoint or a hub name"
    for path in (tmp_path / "none.pi", tmp_path / "none" / "none.pi"):
        assert_answer(run(path, "-p", "a"), 3, ("{path}: no such file", remedy), path=path)
    folder = "{path}: not an artifact", "  expected: a .pi file", "  found: a folder", remedy
    assert_answer(run(tmp_path, "-p", "a"), 3, folder, path=tmp_path)
    misspelt = alphabet.with_name("alfabet.pi")
    lines = "{path}: no such file", "  try: did you mean {artifact}?"
    assert_answer(run(misspelt, "-p", "a"), 3, lines, path=misspelt, artifact=alphabet)


def test_a_talk_without_a_template(run: Run, random_path: Path) -> None:
    lines = "{path}: the model has no chat template", "  try: give the text with --prompt"
    assert_answer(run(random_path, "--chat", stdin="hi\n"), 3, lines, path=random_path)
