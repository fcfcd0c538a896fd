"""Task files: their forms, and what is wrong with those of no form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.commands import INPUT, USAGE

from pi_compile.errors import TaskError
from pi_compile.evaluation.task_files import LAST_WORD, MULTIPLE_CHOICE, read_task

Fails = Callable[..., str]
CHOICES = {"ctx": "Question: What is wet?\nAnswer:", "choices": [" fire", " the sea"], "label": 1}
WORD = {"ctx": "It is wet in the", "target": " sea"}
ARC = {
    "id": "Mercury_1",
    "question": "What is wet?",
    "choices": {"text": ["fire", "the sea"], "label": ["A", "B"]},
    "answerKey": "B",
}


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "task.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_multiple_choice(tmp_path: Path) -> None:
    task = read_task(written(tmp_path, {"id": 0, **CHOICES}, "", {**CHOICES, "label": 0, "source": "x"}))
    assert (task.kind, [item.right for item in task.items]) == (MULTIPLE_CHOICE, [1, 0])
    assert task.items[0].context == CHOICES["ctx"]
    assert task.items[0].answers == (" fire", " the sea")
    assert task.items[1].location.endswith("task.jsonl: line 3")


@pytest.mark.parametrize(("labels", "key"), [(["A", "B"], "B"), (["1", "2"], "2"), ([1, 2], 2)])
def test_arc_as_published_is_the_same_item(tmp_path: Path, labels: list[Any], key: Any) -> None:
    row = {**ARC, "choices": {"text": ["fire", "the sea"], "label": labels}, "answerKey": key}
    (found,), (plain,) = (read_task(written(tmp_path, r)).items for r in (row, CHOICES))
    assert found == plain


def test_lambada_as_published_is_the_same_item(tmp_path: Path) -> None:
    whole, parts = (read_task(written(tmp_path, row)) for row in ({"text": WORD["ctx"] + WORD["target"]}, WORD))
    assert whole == parts
    assert (whole.kind, whole.items[0].answers) == (LAST_WORD, (" sea",))


def test_a_limit_takes_the_first_items(tmp_path: Path) -> None:
    path = written(tmp_path, *({"ctx": f"{n} and", "target": f" {n + 1}"} for n in range(5)))
    assert [item.context for item in read_task(path, 2).items] == ["0 and", "1 and"]
    assert len(read_task(path, 9).items) == 5


def test_answers_that_no_space_parts_from_the_context_are_counted(tmp_path: Path) -> None:
    glued, parted = {**CHOICES, "choices": [" fire", "the sea"]}, {**CHOICES, "ctx": "a ", "choices": ["b", "c"]}
    assert read_task(written(tmp_path, CHOICES, glued, parted, glued)).joined == 2
    assert read_task(written(tmp_path, ARC)).joined == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{'ctx': 'single quotes'}", "is not JSON"),
        ('{"ctx": "cut', "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ({"prompt": "a", "completion": "b"}, "a task of unknown form"),
        ({"text": "a b", "choices": ["a", "b"], "label": 0}, "no key 'ctx'|a task of unknown form"),
        ({**CHOICES, "target": " sea"}, "a task of unknown form"),
        ({"ctx": "a", "choices": [" b", " c"]}, r"no key 'label'[^\0]*expected: \{ctx, choices, label\}"),
        ({k: v for k, v in ARC.items() if k != "answerKey"}, "no key 'answerKey'"),
        ({"ctx": "a"}, "no key 'target'"),
        (WORD, r"another form[^\0]*expected: \{ctx, choices, label\}, as above[^\0]*found: \{ctx, target\}"),
        ({**CHOICES, "label": 2}, r"label[^\0]*expected: one of \[0, 1\][^\0]*found: 2"),
        ({**CHOICES, "label": -1}, "label"),
        ({**CHOICES, "label": True}, r"label[^\0]*found: true"),
        ({**CHOICES, "label": "1"}, r'label[^\0]*found: "1"'),
        ({**CHOICES, "choices": [" fire", ""]}, r'choices\[1\][^\0]*text that is not empty[^\0]*found: ""'),
        ({**CHOICES, "choices": [" fire", " "]}, r"choices\[1\]"),
        ({**CHOICES, "choices": [" fire", 3]}, r"choices\[1\][^\0]*found: 3"),
        ({**CHOICES, "choices": [" fire"]}, "choices[^\0]*two or more texts"),
        ({**CHOICES, "choices": "fire"}, "choices[^\0]*two or more texts"),
        ({**CHOICES, "ctx": "  "}, "ctx[^\0]*not empty"),
        ({**CHOICES, "ctx": "\ud800"}, "ctx is not Unicode text"),
        ({**ARC, "answerKey": "C"}, r'answerKey[^\0]*one of \["A", "B"\][^\0]*found: "C"'),
        ({**ARC, "choices": ["fire", "the sea"]}, r"choices[^\0]*\{text: \[...\], label: \[...\]\}"),
        ({**ARC, "choices": {"text": ["a", "b"], "label": ["A"]}}, r"choices\.label[^\0]*a list of 2"),
        ({"text": "alone"}, "text has no last word"),
        ({"text": "a space follows "}, "text has no last word"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: Any, message: str) -> None:
    first = CHOICES if isinstance(row, str) or "text" not in row else {"text": "a good line"}
    first = ARC if isinstance(row, dict) and "question" in row else first
    with pytest.raises(TaskError, match=message) as error:
        read_task(written(tmp_path, first, row))
    assert str(error.value).startswith(f"{tmp_path / 'task.jsonl'}: line 2: ")


def test_mistakes_on_the_command_line(fails: Fails, artifact: Path, tmp_path: Path) -> None:
    assert "expected: --text FILE or --task FILE, or both" in fails(USAGE, "eval", artifact)
    assert "--tokens limits" in fails(USAGE, "eval", artifact, "--text", tmp_path / "a.txt", "--limit", 3)
    none = tmp_path / "none.jsonl"
    assert f"--task {none}: no such file\n  try: " in fails(INPUT, "eval", artifact, "--task", none)
    assert f"--task {tmp_path}: cannot be read" in fails(INPUT, "eval", artifact, "--task", tmp_path)
    none.write_bytes(b"\n")
    assert "no items" in fails(INPUT, "eval", artifact, "--task", none)
    none.write_bytes(b'{"ctx": "\xff"}')
    assert "cannot be read" in fails(INPUT, "eval", artifact, "--task", none)
    # The golden model's tokens are bytes, its context 64 of them.
    task = written(tmp_path, {"ctx": "It was a", "target": " " + "very " * 13 + "long word"})
    message = fails(INPUT, "eval", artifact, "--task", task)
    assert "line 1: the answer" in message
    assert "try: mend this line" in message
    assert "1 to 64 of answer (the model's context)" in message
