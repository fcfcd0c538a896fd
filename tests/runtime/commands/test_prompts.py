"""`pi-run --prompts`: order, settings of a line, errors of a line, and outputs that are continued."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.schema import Text
from pi_runtime.engine.engine import Engine
from pi_runtime.engine.stream import Stream

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    files = {"chat_template.jinja": b"{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"}
    text = Text(prefix_ids=(), end_ids=())
    return random_artifact(tmp_path / "a.pi", small_decoder(), scale=3.0, text=text, files=files)


@pytest.fixture
def ask(run: Run, artifact: Path, tmp_path: Path) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    """Answer these lines; returns exit code, the lines of the output and stderr."""

    def ask(lines: list[Any], *flags: object) -> tuple[int, list[dict[str, Any]], str]:
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), "utf-8")
        code, out, err = run(artifact, "--prompts", source, "-o", output, *flags)
        assert out == ""
        found = output.read_text("utf-8").splitlines() if output.exists() else []
        return code, [json.loads(line) for line in found], err

    return ask


def test_answers_stand_in_the_order_of_the_prompts(ask: Any, run: Run, artifact: Path) -> None:
    lines = [{"prompt": f"prompt {n}", "id": f"x{n}", "max_tokens": 1 + n % 7} for n in range(25)]
    code, found, err = ask(lines, "--slots", 3, "--piece", 5, "--kv-budget", "64KiB")
    assert (code, err) == (0, "")
    assert [row["index"] for row in found] == list(range(25))
    for line, row in zip(lines, found, strict=True):
        assert row.keys() == {
            "index", "id", "text", "finish_reason", "prompt_tokens", "generated_tokens", "digest",
        }  # fmt: skip
        assert row["id"] == line["id"]
        assert (row["finish_reason"], row["generated_tokens"]) == ("length", line["max_tokens"])
        assert row["prompt_tokens"] == len(line["prompt"])
        assert run(artifact, "-p", line["prompt"], "-n", line["max_tokens"])[1] == row["text"] + "\n"


def test_flags_are_for_lines_without_values_of_their_own(ask: Any, run: Run, artifact: Path) -> None:
    flags = ("-n", 12, "--temperature", 2.0, "--seed", 3)
    own = {"temperature": 0.0, "seed": 5, "stop": "\n", "max_tokens": 20, "top_k": 9, "top_p": 1.0, "min_p": 0.0}
    lines = [{"prompt": "ab"}, {"prompt": "ab", "seed": 4}, {"prompt": "ab", **own, "repetition_penalty": 1.5}]
    code, found, _ = ask(lines, *flags)
    assert code == 0
    texts = [row["text"] + "\n" for row in found]
    assert [row.get("seed") for row in found] == [3, 4, None]
    assert texts[0] == run(artifact, "-p", "ab", *flags)[1]
    assert texts[1] == run(artifact, "-p", "ab", *flags[:-1], 4)[1] != texts[0]
    alone = ("-n", 20, "--temperature", 0.0, "--top-k", 9, "--repetition-penalty", 1.5, "--stop", "\n")
    assert texts[2] == run(artifact, "-p", "ab", *alone)[1]


def test_messages_go_through_the_template(ask: Any, run: Run, artifact: Path) -> None:
    code, found, _ = ask([{"messages": [{"role": "user", "content": "hi"}]}], "-n", 5)
    assert code == 0
    assert found[0]["text"] + "\n" == run(artifact, "-p", "u:hi;a:", "-n", 5)[1]


def test_several_answers_and_log_probabilities(ask: Any, run: Run, artifact: Path) -> None:
    flags = ("-n", 6, "--temperature", 2.0, "--logprobs", 1, "--prompt-logprobs", 0)
    lines = [
        {"prompt": "ab", "answers": 3, "seed": 3},
        {"prompt": "abc", "seed": 4, "logit_bias": {"65": 100}, "min_tokens": 2, "frequency_penalty": 0.5},
    ]
    code, found, _ = ask(lines, *flags)
    assert code == 0
    alone = json.loads(run(artifact, "-p", "ab", *flags, "--seed", 3, "--json")[1])
    answers = found[0]["answers"]
    assert len({answer["text"] for answer in answers}) == 3
    assert (answers[0]["text"], answers[0]["logprobs"]) == (alone["text"], alone["logprobs"])
    assert found[0]["prompt_logprobs"] == alone["prompt_logprobs"]
    assert found[0].keys() == {"index", "prompt_tokens", "answers", "seed", "prompt_logprobs", "digest"}
    assert (found[1]["text"], len(found[1]["prompt_logprobs"])) == ("AAAAAA", 2)


def test_a_line_may_have_a_grammar_of_its_own(ask: Any, run: Run, artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    lines: list[Any] = [
        {"prompt": "ab"},
        {"prompt": "ab", "json_schema": {"type": "integer", "minimum": 10, "maximum": 99}},
        {"prompt": "ab", "lark": 'start: "<" /[a-z]/ ">"'},
        {"prompt": "ab", "regex": "("},
        {"prompt": "ab", "regex": "a", "lark": "start: foo"},
        {"prompt": "ab", "json_schema": [1]},
        {"prompt": "ab", "regex": 1},
        {"prompt": "ab", "json_schema": {"const": [1, 2]}, "fixed_separators": "yes"},
        {"prompt": "ab", "json_schema": {"const": [1, 2]}, "fixed_separators": True},
    ]
    code, found, _ = ask(lines, "--regex", "[0-9]{3}")
    assert code == 3
    assert found[0]["text"] + "\n" == run(artifact, "-p", "ab", "--regex", "[0-9]{3}")[1]
    texts = [row.get("text", "") for row in found]
    assert (len(texts[0]), 10 <= int(texts[1]) <= 99, texts[2][0] + texts[2][2:]) == (3, True, "<>")
    messages = ("regex: cannot be used", "give one of", "json_schema", "regex", "true or false")
    assert all(message in row["error"] for message, row in zip(messages, found[3:-1], strict=True))
    assert texts[-1] == "[1, 2]"


BAD = {
    "no JSON": ("{", "line 2: not a JSON object"),
    "a list": ([1], "line 2: not a JSON object"),
    "unknown key": ({"prompt": "a", "maxtokens": 3}, "line 2: unknown key maxtokens"),
    "neither": ({"id": 1}, "line 2: give either prompt or messages"),
    "both": ({"prompt": "a", "messages": []}, "line 2: give either prompt or messages"),
    "no text": ({"prompt": 3}, "line 2: prompt\n  expected: text\n  found: 3"),
    "bad message": ({"messages": [{"role": "user"}]}, "line 2: messages"),
    "bad number": ({"prompt": "a", "temperature": "hot"}, "temperature='hot'"),
    "no count": ({"prompt": "a", "max_tokens": True}, "line 2: max_tokens"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens=0"),
    "bad stop": ({"prompt": "a", "stop": [1]}, "stop: not a list of strings"),
    "no answers": ({"prompt": "a", "answers": 0}, "0 answers"),
    "no number": ({"prompt": "a", "logprobs": "2"}, "line 2: logprobs"),
    "bad bias": ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias='x=1'"),
    "no bias": ({"prompt": "a", "logit_bias": [1]}, "logit_bias=[1]"),
    "long": ({"prompt": "a" * 64}, "the prompt has 64 tokens"),
    "empty": ({"prompt": ""}, "the prompt is empty"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_its_own_error(ask: Any, kind: str, tmp_path: Path) -> None:
    line, message = BAD[kind]
    code, found, err = ask([{"prompt": "a"}, line, {"prompt": "b"}], "-n", 3)
    assert code == 3
    assert "1 of 3 prompts could not be answered" in err
    assert [("text" in row, "error" in row) for row in found] == [(True, False), (False, True), (True, False)]
    assert message in found[1]["error"]
    # Its error stays where the output is complete.
    assert ask([{"prompt": "a"}, line, {"prompt": "b"}], "-n", 3) == (3, found, err)


def test_an_output_is_continued_after_its_last_whole_line(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, output = [{"prompt": f"p {n}"} for n in range(9)], tmp_path / "out.jsonl"
    _, wanted, _ = ask(lines, "-n", 4)
    whole = output.read_bytes()
    ran: list[str] = []
    generate = Engine.generate_many
    monkeypatch.setattr(Engine, "generate_many", lambda self, p, n, **kw: ran.append(p) or generate(self, p, n, **kw))
    for kept in (0, 1, len(whole) // 2, whole.rfind(b"\n", 0, -1) + 1, len(whole) - 1, len(whole)):
        output.write_bytes(whole[:kept])
        ran.clear()
        assert ask(lines, "-n", 4, "--slots", 2) == (0, wanted, "")
        assert output.read_bytes() == whole
        assert len(ran) == 9 - whole[:kept].count(b"\n")


def test_an_interrupted_run_keeps_its_answers(ask: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines, output = [{"prompt": f"p {n}"} for n in range(6)], tmp_path / "out.jsonl"
    _, wanted, _ = ask(lines, "-n", 4)
    output.unlink()
    following, left = Stream.__next__, iter(range(12))

    def interrupt(self: Stream) -> str:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return following(self)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "__next__", interrupt)
        code, found, err = ask(lines, "-n", 4)
    assert (code, err) == (130, "interrupted\n")
    assert 0 < len(found) < 6
    assert found == wanted[: len(found)]
    assert ask(lines, "-n", 4) == (0, wanted, "")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [(("--slots", 0), 2), (("--piece", 0), 2), (("--kv-budget", "1B"), 4), (("--kv-budget", "much"), 2)],
)
def test_impossible_settings(ask: Any, flags: tuple[object, ...], wanted: int) -> None:
    code, found, err = ask([{"prompt": "a"}], *flags)
    assert (code, found) == (wanted, [])
    assert flags[0] in err


def test_an_output_of_something_else_is_refused(ask: Any, run: Run, tmp_path: Path, artifact: Path) -> None:
    lines, output = [{"prompt": "a"}, {"prompt": "b"}], tmp_path / "out.jsonl"
    ask(lines, "-n", 4)
    written = output.read_bytes()
    changed = [([{"prompt": "a"}, {"prompt": "c"}], 4, 2), (lines, 5, 1), (lines[:1], 4, 2)]
    for other, count, line in changed:
        code, _, err = ask(other, "-n", count)
        assert code == 2
        assert f"its line {line} is no answer to this prompt with these settings" in err
        assert output.read_bytes() == written
    random_artifact(artifact, small_decoder(), seed=9)
    assert ask(lines, "-n", 4)[0] == 2
    output.write_bytes(b"something else\n")
    assert run(artifact, "--prompts", tmp_path / "in.jsonl", "-o", output, "-n", 4)[0] == 2
    assert output.read_bytes() == b"something else\n"


def test_without_an_output_answers_go_to_stdout(run: Run, artifact: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    code, out, err = run(artifact, "--prompts", source, "-n", 2, "--stats")
    assert code == 0
    assert [json.loads(line)["index"] for line in out.splitlines()] == [0, 1]
    figures = dict(line.split() for line in err.splitlines())
    assert (figures["finished"], figures["generated_tokens"], figures["prompt_tokens"]) == ("2", "4", "2")


def test_files_that_cannot_be_used(run: Run, artifact: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    assert run(artifact, "--prompts", source)[0] == 3
    source.write_text('{"prompt": "a"}\n')
    assert run(artifact, "--prompts", source, "-o", tmp_path / "none" / "out.jsonl")[0] == 2
    code, _, err = run(artifact, "--prompts", source, "-o", source)
    assert code == 2
    assert "would overwrite the prompts" in err
    source.write_text("")
    assert run(artifact, "--prompts", source) == (0, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
def test_an_output_that_another_writes_to_is_refused(ask: Any, tmp_path: Path) -> None:
    """Both would continue it at the same place."""
    import fcntl

    with (tmp_path / "out.jsonl").open("w+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, lines, err = ask([{"prompt": "a"}])
    assert (code, lines) == (2, [])
    assert "another process writes answers to it" in err
    assert ask([{"prompt": "a"}])[0] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no such device")
def test_an_output_that_is_no_file_is_refused(run: Run, artifact: Path, tmp_path: Path) -> None:
    """It cannot be read to its end."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}')
    code, _, err = run(artifact, "--prompts", tmp_path / "in.jsonl", "-o", "/dev/null")
    assert code == 2
    assert "/dev/null: not a file" in err
