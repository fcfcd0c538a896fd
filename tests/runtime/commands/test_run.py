"""`pi-run` as its user meets it: results, talk, variables and flags."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.documents import assert_as_documented
from support.paths import GOLDEN
from support.scripted import saying, scripted_artifact
from support.synthetic import END_ID, random_artifact, small_decoder

from pi_runtime import console
from pi_runtime.commands import chat, warm_up
from pi_runtime.commands.run import app
from pi_runtime.execution.kv_cache import KVCache

Run = Callable[..., tuple[int, str, str]]

STATS = {
    "load_s",
    "first_token_s",
    "prompt_tokens",
    "prefill_tokens_per_s",
    "generated_tokens",
    "decode_tokens_per_s",
    "rows_read_share",
    "active_share",
    "guessed_tokens",
    "accepted_tokens",
    "acceptance",
    "accepted_length",
    "drafts_won_s",
    "head_guessed_tokens",
    "head_accepted_tokens",
}


def test_a_prompt_goes_on(run: Run, alphabet: Path) -> None:
    assert run(alphabet, "--prompt", "uv") == (0, "wxyz\n", "")
    assert run(alphabet, "-p", "u", "-n", 3) == (0, "vwx\n", "")


def test_a_prompt_from_stdin(run: Run, alphabet: Path) -> None:
    assert run(alphabet, "-p", "-", stdin="wx") == (0, "yz\n", "")


def test_stop_strings(run: Run, alphabet: Path) -> None:
    assert run(alphabet, "-p", "a", "--stop", "xy", "--stop", "de") == (0, "bc\n", "")


def test_json(run: Run, alphabet: Path) -> None:
    code, out, err = run(alphabet, "-p", "abc", "-n", 4, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert_as_documented("pi-run", report)
    assert (report["text"], report["finish_reason"], report["mode"]) == ("defg", "length", "auto")
    assert sum(report["rungs"].values()) == 1
    assert report["stats"].keys() == STATS
    assert (report["stats"]["prompt_tokens"], report["stats"]["generated_tokens"]) == (3, 4)
    assert report["stats"]["first_token_s"] > report["stats"]["load_s"] > 0
    assert report["stats"]["rows_read_share"] == 1


def test_json_of_one_token(run: Run, alphabet: Path) -> None:
    stats = json.loads(run(alphabet, "-p", "a", "-n", 1, "--json")[1])["stats"]
    assert stats["decode_tokens_per_s"] is None
    assert stats["rows_read_share"] is None


def test_stats_go_to_stderr(run: Run, alphabet: Path) -> None:
    code, out, err = run(alphabet, "-p", "x", "--stats", "--mode", "gate")
    assert (code, out) == (0, "yz\n")
    lines = dict(line.split() for line in err.splitlines())
    assert lines.keys() == {"mode", "seed", "dense_reads_times", *STATS}
    assert (lines["mode"], lines["generated_tokens"], lines["rows_read_share"]) == ("gate", "2", "1.000")


def test_a_full_context_is_told(run: Run, endless: Path) -> None:
    code, out, err = run(endless, "-p", "a", "--ctx-size", 4)
    assert (code, out) == (0, "baba\n")
    assert err == "(stopped: the context of 4 tokens is full; see --ctx-size)\n"


def test_cold_kernels_are_told(run: Run, alphabet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "is_cold", lambda: True)
    code, out, err = run(alphabet, "-p", "x")
    assert (code, out) == (0, "yz\n")
    assert err.startswith("compiling kernels for this processor, once")


def test_sampling_flags(run: Run, random_path: Path) -> None:
    def text(*flags: object) -> str:
        code, out, _ = run(random_path, "-p", "a", "-n", 12, *flags)
        assert code == 0
        return out

    greedy, hot = text(), ("--temperature", 5.0)
    assert text("--temperature", 0) == greedy
    assert text(*hot, "--top-k", 1) == greedy
    assert text(*hot, "--top-p", 0.0) == greedy
    assert text(*hot, "--min-p", 1.0) == greedy
    assert text(*hot, "--seed", 3) == text(*hot, "--seed", 3) != text(*hot, "--seed", 4)
    assert text("--repetition-penalty", 1e6) != greedy


def test_penalties_and_biases(run: Run, alphabet: Path) -> None:
    assert run(alphabet, "-p", "a", "-n", 3, "--logit-bias", "122=100", "--logit-bias", "120=-5")[1] == "zzz\n"
    penalised = run(alphabet, "-p", "a", "-n", 9, "--logit-bias", "122=100", "--presence-penalty", 2)[1]
    assert penalised == "z" * 9 + "\n"
    assert run(alphabet, "-p", "x", "--min-tokens", 4)[1].startswith("yz")
    assert run(alphabet, "-p", "x")[1] == "yz\n"


def test_answers_in_a_grammar(run: Run, alphabet: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["größe", 7]}', "utf-8")
    lark.write_text('start: "b" "c"+ "z"')
    assert run(alphabet, "-p", "a", "--json-schema", schema)[1] in ('"größe"\n', "7\n")
    schema.write_text('{"const": [1, 2]}')
    assert run(alphabet, "-p", "a", "--json-schema", schema, "--fixed-separators")[1] == "[1, 2]\n"
    assert run(alphabet, "-p", "a", "--regex", "bcX")[1] == "bcX\n"
    assert json.loads(run(alphabet, "-p", "a", "--lark", lark, "--json", "-n", 3)[1])["text"].startswith("bc")
    schema.write_text("{")
    for flags, code, message in (
        (("--regex", "a(b"), 2, "--regex: cannot be used"),
        (("--fixed-separators",), 2, "--fixed-separators goes with --json-schema or --prompts"),
        (("--json-schema", schema), 3, f"--json-schema {schema}: not JSON"),
        (("--json-schema", tmp_path / "none"), 3, f"--json-schema {tmp_path / 'none'}: no such file\n  try: "),
        (("--lark", tmp_path / "none"), 3, f"--lark {tmp_path / 'none'}: no such file\n  try: "),
        (("--lark", tmp_path), 3, f"--lark {tmp_path}: cannot be read\n  found: Is a directory\n  try: "),
        (("--lark", lark, "--regex", "a"), 2, "give one of --json-schema, --regex and --lark"),
    ):
        found = run(alphabet, "-p", "a", *flags)
        assert (found[0], found[1]) == (code, "")
        assert message in found[2]


def test_logprobs(run: Run, alphabet: Path) -> None:
    found = json.loads(run(alphabet, "-p", "ab", "-n", 2, "--json", "--logprobs", 1, "--prompt-logprobs", 0)[1])
    assert_as_documented("pi-run", found, {"logprobs", "prompt_logprobs"})
    assert [(x["id"], x["token"]) for x in found["logprobs"]] == [(99, "c"), (100, "d")]
    assert [x["top"] for x in found["logprobs"]] == [
        [{k: x[k] for k in ("id", "token", "logprob")}] for x in found["logprobs"]
    ]
    (second,) = found["prompt_logprobs"]
    assert (second["token"], second["top"]) == ("b", [])
    assert second["logprob"] == found["logprobs"][0]["logprob"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--logit-bias", "a=1"), "--logit-bias a=1"),
        (("--logit-bias", "7"), "--logit-bias 7"),
        (("--logit-bias", "999=1"), "--logit-bias: token id 999"),
        (("--presence-penalty", 3), "--presence-penalty 3"),
        (("--frequency-penalty", -3), "--frequency-penalty -3"),
        (("--min-tokens", 300), "--min-tokens 300"),
        (("--answers", 2), "--answers goes with --prompts alone"),
        (("--logprobs", 2), "--logprobs goes with --json or --prompts"),
        (("--json", "--logprobs", -2), "--logprobs -2"),
        (("--json", "--prompt-logprobs", -2), "--prompt-logprobs -2"),
    ],
    ids=str,
)
def test_impossible_settings(run: Run, alphabet: Path, flags: tuple[object, ...], message: str) -> None:
    code, out, err = run(alphabet, "-p", "a", *flags)
    assert (code, out) == (2, "")
    assert message in err


def test_end_of_text_is_not_shown(run: Run, tmp_path: Path) -> None:
    """Not even where it is not an end: special tokens have no text."""
    path = scripted_artifact(tmp_path / "a.pi", {ord("a"): END_ID, END_ID: ord("b"), ord("b"): 0}, end_ids=(0,))
    assert run(path, "-p", "a") == (0, "b\n", "")


def test_a_flipped_byte_is_found_where_it_is_asked_for(run: Run, alphabet: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pi"
    data = bytearray(alphabet.read_bytes())
    data[data.index(b"{{ messages")] ^= 1
    damaged.write_bytes(data)
    assert run(damaged, "-p", "u", "-n", 2)[:2] == (0, "vw\n")
    code, out, err = run(damaged, "-p", "u", "-n", 2, "--verify")
    assert (code, out) == (3, "")
    assert "damaged" in err
    assert run(alphabet, "-p", "u", "-n", 2, "--verify") == (0, "vw\n", "")


def test_chat(run: Run, alphabet: Path) -> None:
    code, out, err = run(alphabet, "--chat", stdin="uv\nx\n\nnever read\n")
    assert (code, out) == (0, "wxyz\nyz\n")
    assert "Your turn" in err
    assert run(alphabet, "--chat", stdin="")[:2] == (0, "")
    assert run(alphabet, "--chat", "-n", 1, "--stats", stdin="a\n")[2].count("generated_tokens") == 1


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--system", "be"], 0), (["--json"], 2), (["--md"], 2)])
def test_the_model_alone_starts_a_chat_on_a_terminal(
    alphabet: Path,
    no_variables: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("uv\n"))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert console.run(app, [str(alphabet), *arguments]) == code
    assert ("wxyz" in capsys.readouterr().out) == (code == 0)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        ("<|channel|>", "<|channel|>analysis<|message|>hm{}<|end|><|start|>assistant<|channel|>final<|message|>yes"),
        ("</think>", "<think>hm{}</think>yes"),
    ],
)
def test_thoughts_of_a_talk_go_to_stderr(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, answer: str
) -> None:
    """Of harmony's channels, and of tags; the next turn has the answer alone."""
    files = {"chat_template.jinja": f"{{{{ messages[-1].content }}}}{{# {template} #}}".encode()}
    path, saved, plain = (
        random_artifact(tmp_path / "a.pi", small_decoder(), files=files),
        tmp_path / "t.json",
        chat._text,
    )
    monkeypatch.setattr(chat, "_text", lambda parser, _: plain(parser, answer.format("…")))
    code, out, err = run(path, "--chat", "-n", 1, stdin=f"a\n/save {saved}\n")
    assert (code, out) == (0, "yes\n")
    assert "\nhm…\n" in err
    assert json.loads(saved.read_text())[-1] == {"role": "assistant", "content": "yes"}


def test_a_template_in_place_of_the_model_s_own(run: Run, alphabet: Path, tmp_path: Path) -> None:
    file, bare = tmp_path / "t.jinja", scripted_artifact(tmp_path / "bare.pi", saying("abc"))
    file.write_text("{{ messages[-1].content }}a", "utf-8")
    for path, said in ((alphabet, "bcdefghijklmnopqrstuvwxyz\n"), (bare, "bc\n")):
        assert run(path, "--chat", "--chat-template", file, stdin="x\n")[:2] == (0, said)
    code, out, err = run(alphabet, "--chat", "--chat-template", tmp_path / "none", stdin="x\n")
    assert (code != 0, out) == (True, "")
    assert "--chat-template" in err


def test_commands_of_a_talk(run: Run, alphabet: Path, tmp_path: Path) -> None:
    saved, odd = tmp_path / "talk.json", tmp_path / "odd.json"
    odd.write_text('[{"role": 1}]')
    typed = ["uv", f"/save {saved}", "/stats", "/help", "/frobnicate", f"/load {odd}", f"/load {tmp_path / 'none'}"]
    typed += ["/set top_k no", "/set n 1", "/set top_p 7", "/set max_tokens 3"]
    typed += ["x", "/set max_tokens=1", "x", "/bye", "y"]
    code, out, err = run(alphabet, "--chat", "--system", "be", stdin="\n".join(typed))
    assert (code, out) == (0, "wxyz\nyz\ny\n")  # the talk goes on after every mistake, and ends with /bye
    assert json.loads(saved.read_text()) == [
        {"role": "system", "content": "be"}, {"role": "user", "content": "uv"}, {"role": "assistant", "content": "wxyz"}
    ]  # fmt: skip
    assert err.count("generated_tokens") == 1
    assert err.count("/system TEXT") == 2
    assert all(said in err for said in (f"/load {odd}: not a saved talk", "/set n 1: no setting", "top_p=7"))
    assert f"/load {tmp_path / 'none'}: " in err
    again = tmp_path / "again.json"
    typed = [f"/load {saved}", "x", f"/save {again}", "/clear", "/system go", "y", f"/save {saved}"]
    assert run(alphabet, "--chat", stdin="\n".join(typed))[0] == 0
    assert [m["content"] for m in json.loads(again.read_text())] == ["be", "uv", "wxyz", "x", "yz"]
    assert [m["content"] for m in json.loads(saved.read_text())] == ["go", "y", "z"]


def test_a_message_of_several_lines(run: Run, alphabet: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    for text in ('"""a\n\nw\n"""\n', '"""a\n\nw"""\n'):
        assert run(alphabet, "--chat", stdin=f"{text}/save {saved}\n")[:2] == (0, "xyz\n")
        assert json.loads(saved.read_text())[0]["content"] == "a\n\nw"
    assert run(alphabet, "--chat", stdin='"""a\nw')[:2] == (0, "xyz\n")


def test_an_interrupt_stops_the_answer_and_not_the_talk(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(answer: Iterator[str], parts: list[str]) -> None:
        parts += [next(answer), next(answer)]
        raise KeyboardInterrupt

    saved, path = tmp_path / "talk.json", tmp_path / "endless.pi"
    scripted_artifact(path, saying("ab", then=ord("a")), files={"chat_template.jinja": b"{{ messages[-1].content }}"})
    monkeypatch.setattr(chat, "stream", interrupted)
    code, out, _ = run(path, "--chat", "--speculate", "off", stdin=f"b\na\n/save {saved}\n")
    assert (code, out) == (0, "\n\n")
    assert [m["content"] for m in json.loads(saved.read_text())] == ["b", "ab", "a", "ba"]


def test_a_talk_is_remembered_and_not_computed_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = b"{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    path = random_artifact(tmp_path / "a.pi", small_decoder(), files={"chat_template.jinja": template})
    prompts, cached, keep = [], [], KVCache.keep_common_prefix

    def spy(self: KVCache, tokens: list[int]) -> int:
        prompts.append(bytes(tokens).decode(errors="replace"))
        cached.append(keep(self, tokens))
        return cached[-1]

    monkeypatch.setattr(KVCache, "keep_common_prefix", spy)
    code, out, _ = run(path, "--chat", "--system", "be", "-n", 2, stdin="hi\nyo\n")
    first, second = prompts
    assert code == 0
    assert first == "s:be;u:hi;a:"
    # The answer comes back through its text, in which bytes that are no character are replaced.
    assert second == f"{first}{out[: out.index(chr(10))]};u:yo;a:"
    assert cached[0] == 0
    assert cached[1] >= len(first)


def test_a_talk_ends_with_its_context(run: Run, tmp_path: Path) -> None:
    files = {"chat_template.jinja": b"{{ messages[-1].content }}"}
    path = scripted_artifact(tmp_path / "a.pi", saying("ab", then=ord("a")), context=8, files=files)
    code, out, err = run(path, "--chat", stdin="a\nb\n")
    assert (code, out) == (0, "babababa\n")
    assert "the context of 8 tokens is full" in err


def test_an_answer_of_nothing(run: Run, tmp_path: Path) -> None:
    assert run(scripted_artifact(tmp_path / "a.pi", {}), "-p", "q") == (0, "\n", "")


@pytest.mark.parametrize(
    ("variable", "wrong", "flags"),
    [
        ("PI_MODE", "sparse", ["--mode", "gate"]),
        ("PI_DEVICE", "gpu", ["--device", "cpu"]),
        ("PI_CTX_SIZE", "1", ["--ctx-size", "32"]),
        ("PI_THREADS", "0", ["--threads", "1"]),
        ("PI_SEED", "-1", ["--seed", "1"]),
    ],
)
def test_variables_stand_in_for_flags(
    run: Run, alphabet: Path, monkeypatch: pytest.MonkeyPatch, variable: str, wrong: str, flags: list[str]
) -> None:
    monkeypatch.setenv(variable, wrong)
    code, _, err = run(alphabet, "-p", "x")
    assert code == 2
    assert flags[0] in err
    assert run(alphabet, "-p", "x", *flags) == (0, "yz\n", "")


def test_a_variable_of_the_wrong_kind(run: Run, alphabet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI_THREADS", "many")
    code, _, err = run(alphabet, "-p", "x")
    assert code == 2
    assert "PI_THREADS" in err


def test_the_budget_may_be_a_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = GOLDEN
    monkeypatch.setenv("PI_VRAM_BUDGET", "1KiB")
    assert run(golden, "-p", "x")[0] == 4
    code, out, err = run(golden, "-p", "x", "-n", 4, "--vram-budget", "1GiB")
    assert code == 0
    assert "the CPU stands in for one" in err
    monkeypatch.delenv("PI_VRAM_BUDGET")
    assert run(golden, "-p", "x", "-n", 4) == (0, out, "")
