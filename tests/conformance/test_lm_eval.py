"""lm-evaluation-harness through a server, beside this project's own scoring: every log-likelihood, every `is_greedy`.

The harness sends tokens to `/v1/completions` with `echo` and `logprobs`. Its tasks and ours read the same files: made
of this repository's documents for the bundled model, and public tasks for the model beside the repository, if it is
there. Nothing is fetched. With `--long` the public tasks are taken whole.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.serve_process import ServeProcess, serve_process

from pi_compile.checkpoint import open_checkpoint
from pi_compile.evaluation.task_accuracy import likelihood, requests
from pi_compile.evaluation.task_files import read_task
from pi_compile.packing import PackSpec, pack
from pi_runtime import Model, Sampling, load

ROOT = Path(__file__).parents[2]
ITEMS, TEXTS, CONTEXT = 40, 3, 512
LARGEST_ERROR = 1e-4
PREFIX = 0
"""A token that both models put before a text or after one."""
FORMS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{ctx}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
    "target": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{ctx}}",
        "doc_to_target": "{{target}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
"""The harness's words for a task, by the key that tells its rows."""
Rows = list[dict[str, Any]]
Answer = tuple[float, bool]
"""A log-likelihood, and whether each token was the likeliest one."""


@dataclass(frozen=True)
class Case:
    """A model, and rows for tasks."""

    checkpoint: Path
    rows: dict[str, Rows]


def of_documents(demo: Path) -> Case:
    """Paragraphs cut in two, with the ends of others as wrong answers, and whole texts."""
    rng = random.Random(1)
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    parts = [part.split() for text in texts for part in text.split("\n\n") if 20 < len(part.split()) < 80]
    rng.shuffle(parts)
    rows: dict[str, Rows] = {"docs_choices": [], "docs_words": [], "docs_texts": [{"text": t} for t in texts[:TEXTS]]}
    for words in parts[:ITEMS]:
        at, label = rng.randint(8, len(words) - 6), rng.randrange(4)
        others = [" " + " ".join(rng.choice(parts)[:5]) for _ in range(3)]
        choices = [*others[:label], " " + " ".join(words[at : at + 5]), *others[label:]]
        rows["docs_choices"].append({"ctx": " ".join(words[:at]), "choices": choices, "label": label})
        rows["docs_words"].append({"ctx": " ".join(words[:-1]), "target": " " + words[-1]})
    return Case(demo, rows)


def of_public_tasks(shared: Path, items: int | None) -> Case:
    """So many items of each public task."""
    rows = {}
    for path in sorted((shared / "data" / "eval").glob("*.jsonl")):
        lines = itertools.islice(path.read_text("utf-8").splitlines(), items)
        rows[path.stem] = [json.loads(line) for line in lines]
    return Case(shared / "models" / "novels-relu", rows)


def continued(model: Model, rows: Rows) -> Rows:
    """The same contexts, with what the model itself goes on with: greedy answers, where their text is cut alike."""
    greedy = Sampling(temperature=0)
    found = [{**row, "target": "".join(model.generate(row["ctx"], max_tokens=4, sampling=greedy))} for row in rows]
    return [row for row in found if row["target"].startswith(" ") and row["target"].strip()]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["dense", "gate"])
@pytest.mark.parametrize("source", ["documents", "public tasks"])
def test_the_harness_finds_the_likelihoods_that_we_do(
    source: str, mode: str, demo: Path, request: pytest.FixtureRequest, long: bool, tmp_path: Path
) -> None:
    if source == "documents":
        case = of_documents(demo)
    else:
        case = of_public_tasks(request.getfixturevalue("shared"), None if long else ITEMS)
    artifact, tasks = tmp_path / "model.pi", tmp_path / "tasks"
    pack(open_checkpoint(case.checkpoint), PackSpec(), artifact, recipe={})
    with load(artifact, mode=mode) as model:
        if source == "documents":
            case.rows["docs_greedy"] = continued(model, case.rows["docs_words"])
        write_tasks(tasks, case.rows)
        begins = bool(model.manifest.text.prefix_ids)
        with serve_process(artifact, "--mode", mode, log=tmp_path / "log") as served:
            theirs = harness(served, tasks, case, begins, tmp_path / "out")
        for name, rows in case.rows.items():
            if "text" in rows[0]:
                own = [(rolling(model, row["text"]), True) for row in rows]
            else:
                own = answers(model, tasks / f"{name}.jsonl")
            compare(f"{mode}, {name}", theirs[name], own)


def write_tasks(folder: Path, tasks: dict[str, Rows]) -> None:
    """Rows for both, and beside them what the harness is to make of them."""
    folder.mkdir()
    for name, rows in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (form,) = (form for key, form in FORMS.items() if key in rows[0])
        # JSON is YAML too. Answers bring their own space.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "target_delimiter": "", **where, **form}))


def harness(served: ServeProcess, tasks: Path, case: Case, begins: bool, out: Path) -> dict[str, list[Answer]]:
    """Run the harness in a process of its own: what it found of each task's answers, in order."""
    model = {
        "model": served.name,
        "base_url": f"{served.url}/v1/completions",
        "tokenizer": case.checkpoint,
        "tokenizer_backend": "huggingface",
        "max_length": CONTEXT,
        "num_concurrent": 4,
        "add_bos_token": begins,
        "custom_prefix_token_id": PREFIX,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--log_samples"]
    options = ["--model_args", ",".join(f"{key}={value}" for key, value in model.items()), "--output_path", str(out)]
    which = ["--tasks", ",".join(case.rows), "--include_path", str(tasks)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "home")}
    done = subprocess.run(
        [*command, *options, *which], env={**os.environ, **offline}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for name in case.rows:
        (path,) = out.rglob(f"samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        rows.sort(key=lambda row: row["doc_id"])
        found[name] = [_answer(response) for row in rows for response in row["resps"]]
    return found


def _answer(response: Any) -> Answer:
    """An answer as the harness logs it: numbers as text, and of a whole text the number alone."""
    first, *_ = response
    logp, is_greedy = first if isinstance(first, list) else (first, "True")
    return float(logp), str(is_greedy) == "True"


def answers(model: Model, task: Path) -> list[Answer]:
    """What `pi-compile eval` computes of each answer of a task."""
    logits, found = partial(model.logits, cache=model.new_cache()), []
    for item in read_task(task).items:
        # The harness keeps a place for a token that is not asked for.
        for request in requests(item, model.tokenizer.encode, CONTEXT - 2):
            own = likelihood(logits, request)
            found.append((own.logp, own.best == tuple(request.ids_T[-request.answer :].tolist())))
    return found


def rolling(model: Model, text: str) -> float:
    """The log-likelihood of a text in windows as the harness cuts it.

    A window begins with a token of context; the last one is filled up with earlier tokens, which do not count again.
    """
    ids, size, total = [PREFIX, *model.tokenizer.encode(text)], CONTEXT - 2, 0.0
    for done in range(1, len(ids), size):
        end = min(done + size, len(ids))
        first = max(0, end - size - 1)
        total += sum(token.logprob for token in model.score(ids[first:end], first=done - first))
    return total


def compare(name: str, theirs: list[Answer], own: list[Answer]) -> None:
    """Raise AssertionError where they differ."""
    assert len(theirs) == len(own)
    errors = [abs(a - b) for (a, _), (b, _) in zip(theirs, own, strict=True)]
    greedy = sum(is_greedy for _, is_greedy in own)
    print(f"\n{name}: {len(own)} log-likelihoods, largest difference {max(errors):.1e}; {greedy} greedy")
    assert max(errors) < LARGEST_ERROR
    assert [is_greedy for _, is_greedy in theirs] == [is_greedy for _, is_greedy in own]
