"""Scores of tasks: against transformers on the checkpoint, and against the same counted by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.hf import TEXT, random_llama, random_opt
from transformers import AutoModelForCausalLM, AutoTokenizer

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError, TaskError
from pi_compile.evaluation.task_accuracy import evaluate_tasks, likelihood, requests, score
from pi_compile.evaluation.task_files import LAST_WORD, MULTIPLE_CHOICE, Item, Task, read_task
from pi_compile.packing import PackSpec, pack
from pi_runtime import load
from pi_runtime.artifact.sizes import PARTS

FAMILIES: dict[str, Callable[..., Any]] = {"llama": random_llama, "opt": random_opt}
LONG = " ".join(TEXT)
ITEMS = (
    Item("line 1", "Once upon a time there was", (" a neuron", " a little neuron that did not fire", " it"), 1),
    Item("line 2", "It waited, and ", ("waited", "waited; then it did!"), 0),
    Item("line 3", "Once upon a time there was a lit", ("tle neuron", "tl"), 0),
    Item("line 4", LONG[:400], (" fire", " waited; then it did, upon a time"), 0),
)
WORDS = tuple(Item(item.location, item.context, item.answers[:1], 0) for item in ITEMS)


class Theirs:
    """transformers on a checkpoint: its own tokenizer, one text at a time."""

    def __init__(self, folder: Path, context: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.context = context

    def logp(self, context: str, answer: str) -> tuple[float, bool]:
        """Log-likelihood of the answer, and whether greedy decoding gives it."""
        moved = context[len(context.rstrip()) :]
        start = len(self.tokenizer(context.rstrip())["input_ids"])
        whole = torch.tensor(self.tokenizer(context.rstrip() + moved + answer)["input_ids"])
        wanted = whole[start:]
        with torch.inference_mode():
            logits = self.model(whole[-self.context - 1 : -1][None]).logits[0, -len(wanted) :]
        loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        return -float(loss), bool((logits.argmax(1) == wanted).all())


def packed(folder: Path) -> Path:
    pack(open_checkpoint(folder), PackSpec(), folder.with_suffix(".pi"), recipe={})
    return folder.with_suffix(".pi")


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    FAMILIES[request.param](tmp_path / "model")
    return tmp_path / "model"


def test_log_likelihoods_are_those_of_transformers(checkpoint: Path) -> None:
    """Spaces at the border, answers inside a word, answers of many tokens, a context longer than the model's."""
    truncated = []
    with load(packed(checkpoint)) as model:
        theirs = Theirs(checkpoint, model.context)
        for item in ITEMS:
            asked = requests(item, model.tokenizer.encode, model.context)
            for text, request in zip(item.answers, asked, strict=True):
                wanted, greedy = theirs.logp(item.context, text)
                found = likelihood(model.logits, request)
                assert found.logp == pytest.approx(wanted, rel=1e-4, abs=1e-4), (item.context, text)
                assert (found.best == tuple(request.ids_T[-request.answer :].tolist())) == greedy
            truncated.append(any(one.truncated for one in asked))
    assert truncated == [False, False, False, True]


def test_any_border_is_cut_as_transformers_cuts_it(checkpoint: Path) -> None:
    """A border at every character of a sentence; where the answer has no token of its own, it is refused."""
    refused = 0
    with load(packed(checkpoint)) as model:
        theirs = AutoTokenizer.from_pretrained(checkpoint)
        for cut in range(1, len(TEXT[0]) - 1):
            item = Item("line 1", TEXT[0][:cut], (TEXT[0][cut : cut + 3],), 0)
            known = item.context.rstrip()
            whole, start = theirs(TEXT[0][: cut + 3])["input_ids"], len(theirs(known)["input_ids"])
            if len(whole) <= start:
                refused += 1
                with pytest.raises(TaskError, match=r"line 1: the answer .* cannot be scored"):
                    requests(item, model.tokenizer.encode, model.context)
                continue
            (request,) = requests(item, model.tokenizer.encode, model.context)
            assert request.ids_T.tolist() == whole
            assert request.answer == len(whole) - start
    assert refused < 40


def test_scores_are_those_of_transformers(checkpoint: Path) -> None:
    """Tasks from file to result: what each mode gets right; the checkpoint agrees."""
    artifact, steps = packed(checkpoint), []
    tasks = [Task(Path("choices"), MULTIPLE_CHOICE, ITEMS), Task(Path("words"), LAST_WORD, WORDS)]
    choices, words = evaluate_tasks(artifact, tasks, checkpoint, progress=lambda *step: steps.append(step))
    json.dumps([choices, words])
    assert steps == [(n, 24) for n in range(25)]  # 8 items in dense, gate and by transformers
    with load(artifact) as model:
        theirs = Theirs(checkpoint, model.context)
    logp = [[theirs.logp(item.context, text)[0] for text in item.answers] for item in ITEMS]
    right = [int(np.argmax(row)) == item.right for row, item in zip(logp, ITEMS, strict=True)]
    normed = [
        int(np.argmax([value / len(text.strip(" ")) for value, text in zip(row, item.answers, strict=True)]))
        == item.right
        for row, item in zip(logp, ITEMS, strict=True)
    ]
    word, greedy = zip(*(theirs.logp(item.context, item.answers[0]) for item in WORDS), strict=True)
    for mode in ("checkpoint", "dense", "gate"):
        assert choices["modes"][mode]["acc"] == np.mean(right)
        assert choices["modes"][mode]["acc_norm"] == np.mean(normed)
        assert words["modes"][mode]["acc"] == np.mean(greedy)
        assert words["modes"][mode]["perplexity"] == pytest.approx(math.exp(-np.mean(word)), rel=1e-3)
    for row in (choices, words):
        assert row["truncated"] == 1
        assert {mode: row["modes"][mode]["agreement"] for mode in row["modes"]} == {
            "checkpoint": None,
            "dense": 1.0,
            "gate": 1.0,
        }
    assert choices["chance"] == pytest.approx((1 / 3 + 3 / 2) / 4)


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    random_llama(tmp_path / "model")
    random_llama(tmp_path / "other", hidden_act="silu")
    task = Task(Path("choices"), MULTIPLE_CHOICE, ITEMS)
    with pytest.raises(CheckpointError, match="not packed from this checkpoint"):
        evaluate_tasks(packed(tmp_path / "model"), [task], tmp_path / "other", progress=lambda *_: None)


# By hand: tokens are letters, and the model says each time what its table says, whatever came before.

LETTERS = "abcdefgh .?"
LOGP = np.log(np.array([8, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1]) / 22)


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def by_table(ids_T: np.ndarray, last: int) -> np.ndarray:
    return np.tile((LOGP + 5).astype(np.float32), (last, 1))


def scored(kind: str, *items: Item) -> Any:
    return score(Task(Path("t"), kind, items), [requests(item, encode, 99) for item in items], by_table)


def test_choices_by_hand() -> None:
    """The answer b costs 3.1 + 1.7, aaa 3.1 + 3.0: the shorter is likelier. Per letter b costs 4.8, aaa 2.0."""
    found = scored(MULTIPLE_CHOICE, Item("1", "b?", (" b", " aaa"), 0), Item("2", "b?", (" b", " aaa"), 1))
    assert found.answers == (0, 0)
    assert found.right_N.tolist() == [True, False]
    assert found.right_norm_N.tolist() == [False, True]


def test_the_space_before_an_answer_is_no_character_of_it() -> None:
    """Per letter a costs 4.1 and cb 3.6; had the space counted, 2.1 and 2.4."""
    one, two = " a", " cb"
    cost = {text: -sum(LOGP[token] for token in encode(text)) for text in (one, two)}
    assert cost[one] / 1 > cost[two] / 2
    assert cost[one] / 2 < cost[two] / 3
    assert scored(MULTIPLE_CHOICE, Item("1", "b?", (one, two), 1)).right_norm_N.tolist() == [True]


def test_last_words_by_hand() -> None:
    found = scored(LAST_WORD, Item("1", "b", ("a",), 0), Item("2", "b", ("aa",), 0), Item("3", "b", ("ab",), 0))
    assert found.right_N.tolist() == [True, True, False]
    assert found.answers == ((0,), (0, 0), (0, 0))
    assert found.perplexity == pytest.approx(math.exp(-(4 * LOGP[0] + LOGP[1]) / 3))


def test_a_context_is_cut_on_the_left_to_what_the_model_takes() -> None:
    """The last token needs no logits: five tokens fit in a context of four."""
    five, six = Item("1", "abc", ("de",), 0), Item("1", "habc", ("de",), 0)
    for item, truncated in ((five, False), (six, True)):
        (request,) = requests(item, encode, 4)
        assert "".join(LETTERS[token] for token in request.ids_T) == "abcde"
        assert (request.answer, request.truncated) == (2, truncated)
    with pytest.raises(TaskError, match=r"(?s)1 to 4 of answer.*found: 1 tokens of context, 6 with the answer"):
        requests(Item("1", "a", ("bcdef",), 0), encode, 4)


# Real questions.


@pytest.mark.shared
@pytest.mark.parametrize("name", ["novels-relu", "stories260K"])
def test_real_questions_are_answered_as_transformers_answers_them(shared: Path, tmp_path: Path, name: str) -> None:
    folder, artifact = shared / "models" / name, tmp_path / "model.pi"
    pack(
        open_checkpoint(folder), PackSpec(formats=dict.fromkeys(PARTS, "f32")), artifact, recipe={}
    )  # keys and values not rounded
    found: list[list[float]] = []
    wanted: list[list[float]] = []
    with load(artifact, mode="dense") as model:
        theirs = Theirs(folder, model.manifest.decoder.context_length)
        for file in ("arc_easy_test", "piqa_valid", "lambada_openai_test"):
            for item in read_task(shared / "data" / "eval" / f"{file}.jsonl", 3).items:
                asked = requests(item, model.tokenizer.encode, model.context)
                found.append([likelihood(model.logits, request).logp for request in asked])
                wanted.append([theirs.logp(item.context, text)[0] for text in item.answers])
    for ours, other in zip(found, wanted, strict=True):
        assert ours == pytest.approx(other, rel=1e-4)
        assert np.argmax(ours) == np.argmax(other)
