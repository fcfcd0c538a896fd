"""Task files: questions with known answers, a JSON object a line.

A line is an *item*: a context, and the answers that may follow it, of which one is right. A last word to predict is an
item with one answer. The forms, by their keys (others are ignored):

    {ctx, choices, label}              multiple choice; the choices follow the context as they stand, `label` from 0
    {question, choices, answerKey}     ARC as published: choices {text, label}, the key one of the labels
    {ctx, target}                      last word; the target follows the context as it stands
    {text}                             LAMBADA as published: the last word is what follows the last space

Contexts that are made here (for ARC) have the wording of EleutherAI's lm-evaluation-harness.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_compile.errors import TaskError
from pi_runtime.errors import Setting, read_error

MULTIPLE_CHOICE, LAST_WORD = "multiple choice", "last word"
Form = tuple[str, ...]
_FORMS: tuple[Form, ...] = (
    ("ctx", "choices", "label"),
    ("question", "choices", "answerKey"),
    ("ctx", "target"),
    ("text",),
)


@dataclass(frozen=True)
class Item:
    """One question."""

    location: str
    """Its file and line, for messages."""
    context: str
    answers: tuple[str, ...]
    """What may follow the context, leading space included."""
    right: int
    """Index of the right answer."""


@dataclass(frozen=True)
class Task:
    """The items of one file."""

    path: Path
    kind: str
    """MULTIPLE_CHOICE or LAST_WORD."""
    items: tuple[Item, ...]

    @property
    def joined(self) -> int:
        """Number of items with an answer that no space separates from its context, which is seldom intended."""
        return sum(
            not item.context[-1].isspace() and not all(text[0].isspace() for text in item.answers)
            for item in self.items
        )


def read_task(path: Path, limit: int | None = None) -> Task:
    """Read a task file, or its first `limit` items.

    Raises TaskError, naming file and line, for a line that is not JSON, has no known form or another form than the
    lines before it; for an empty context or answer; for a label that names no choice; and for a file without items.
    """
    first: Form | None = None
    items: list[Item] = []
    for location, row in itertools.islice(_rows(path), limit):
        form = _form(row, location)
        first = first or form
        if form != first:
            raise TaskError(f"{location}: another form", expected=f"{_keys(first)}, as above", found=_keys(form))
        items.append(_item(row, form, location))
    if first is None:
        expected = "a JSON object a line: " + _KNOWN
        raise TaskError("no items", setting=Setting("task", path), expected=expected, remedy=_OTHER_FILE)
    return Task(path, MULTIPLE_CHOICE if "choices" in first else LAST_WORD, tuple(items))


def _keys(form: Form) -> str:
    return "{" + ", ".join(form) + "}"


_OTHER_FILE = "name a file with a JSON object on each line"
_KNOWN = "one of " + ", ".join(map(_keys, _FORMS))


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    location = f"{path}: line {number}"
                    yield location, _object(line, location)
    except (OSError, UnicodeDecodeError) as error:
        raise read_error(Setting("task", path), error, _OTHER_FILE, TaskError) from None


def _object(line: str, location: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{location}: is not JSON", expected="a JSON object a line", found=error) from None
    if not isinstance(row, dict):
        raise TaskError(f"{location}: is not a JSON object", expected=_KNOWN, found=_short(row))
    return row


def _form(row: dict[str, Any], location: str) -> Form:
    """The form of a row: the row has its keys, and none of another form. An error names what the nearest form lacks."""
    found = row.keys() & set(itertools.chain(*_FORMS))
    nearest = max(_FORMS, key=lambda form: len(found & set(form)) - len(found ^ set(form)))
    if found == set(nearest):
        return nearest
    missing = [key for key in nearest if key not in row]
    what = f"no key {', '.join(map(repr, missing))}" if found and missing else "a task of unknown form"
    raise TaskError(
        f"{location}: {what}",
        expected=_keys(nearest) if found and missing else _KNOWN,
        found=f"keys {', '.join(row) or 'none'}",
    )


def _item(row: dict[str, Any], form: Form, location: str) -> Item:
    if "text" in form:
        context, space, word = _text(row["text"], "text", location).rpartition(" ")
        if not context.strip() or not word.strip():
            raise TaskError(
                f"{location}: text has no last word", expected="a space before it", found=_short(row["text"])
            )
        return Item(location, context, (space + word,), 0)
    if "target" in form:
        return Item(location, _text(row["ctx"], "ctx", location), (_text(row["target"], "target", location),), 0)
    if "question" in form:
        context = "Question: " + _text(row["question"], "question", location) + "\nAnswer:"
        texts, labels = _published_choices(row["choices"], location)
        answers = tuple(" " + text for text in texts)
        return Item(location, context, answers, _index(row["answerKey"], labels, "answerKey", location))
    answers = _texts(row["choices"], "choices", location)
    label = _index(row["label"], range(len(answers)), "label", location)
    return Item(location, _text(row["ctx"], "ctx", location), answers, label)


def _published_choices(value: Any, location: str) -> tuple[tuple[str, ...], list[Any]]:
    if not isinstance(value, dict) or not {"text", "label"} <= value.keys():
        raise TaskError(f"{location}: choices", expected="{text: [...], label: [...]}", found=_short(value))
    texts, labels = _texts(value["text"], "choices.text", location), value["label"]
    if not isinstance(labels, list) or len(labels) != len(texts):
        raise TaskError(f"{location}: choices.label", expected=f"a list of {len(texts)}", found=_short(labels))
    return texts, labels


def _texts(value: Any, name: str, location: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise TaskError(f"{location}: {name}", expected="a list of two or more texts", found=_short(value))
    return tuple(_text(text, f"{name}[{number}]", location) for number, text in enumerate(value))


def _text(value: Any, name: str, location: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"{location}: {name}", expected="text that is not empty", found=_short(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TaskError(f"{location}: {name} is not Unicode text", found=error.reason) from None
    return value


def _index(value: Any, labels: Any, name: str, location: str) -> int:
    """Position of `value` among the labels; a number is not a text, nor is true 1."""
    for n, label in enumerate(labels):
        if type(label) is type(value) and label == value:
            return n
    raise TaskError(f"{location}: {name}", expected=f"one of {_short(list(labels))}", found=_short(value))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:59] + "…"
