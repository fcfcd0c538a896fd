"""`pi-serve` as a command: its flags, and what it says where they cannot be."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import INPUT, USAGE, assert_a_message

from pi_runtime import console
from pi_runtime.commands import access
from pi_runtime.commands import serve as cli
from pi_runtime.errors import ArtifactError, UsageError

for name in ("starlette", "uvicorn", "pydantic", "llguidance"):
    pytest.importorskip(name)

GOOD_KEY = "0123456789abcdef"


def run(*arguments: object) -> int:
    return console.run(cli.app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--host", "192.0.2.1"], USAGE, "--api-key-file"),
        (["--host", "::"], USAGE, "--api-key-file"),
        (["--host", "example.org"], USAGE, "--api-key-file"),
        (["--cors"], USAGE, "--allowed-origin"),
        (["--api-key-file", "nowhere"], INPUT, "--api-key-file nowhere: no such file\n  try: "),
        (["--ssl-certfile", "nowhere"], USAGE, "--ssl-keyfile"),
        (["--ssl-certfile", "nowhere", "--ssl-keyfile", "nowhere"], INPUT, "nowhere: no such file\n  try: "),
        (["--ssl-certfile", __file__, "--ssl-keyfile", __file__], INPUT, "not a certificate with its key"),
        (["--allowed-host", ""], USAGE, "--allowed-host ''"),
        (["--allowed-host", "https://chat.example"], USAGE, "--allowed-host 'https"),
        (["--allowed-host", "chat.example:8080"], USAGE, "--allowed-host 'chat.example:8080'"),
        (["--allowed-host", "*.example"], USAGE, "--allowed-host '*.example'"),
        (["--allowed-origin", "foo"], USAGE, "--allowed-origin 'foo'"),
        (["--allowed-origin", ""], USAGE, "--allowed-origin ''"),
        (["--allowed-origin", "https://chat.example/"], USAGE, "--allowed-origin 'https://chat.example/'"),
        (["--allowed-origin", "https://Chat.example"], USAGE, "--allowed-origin 'https://Chat.example'"),
        (["--port", "65536"], USAGE, "65535"),
        (["--slots", "0"], USAGE, "slots"),
        (["--temperature", "-1"], USAGE, "--temperature"),
        (["--temperature", "nan"], USAGE, "--temperature"),
        (["--top-p", "1.5"], USAGE, "--top-p"),
        (["--max-tokens", "0"], USAGE, "--max-tokens"),
        (["--kv-budget", "much"], USAGE, "--kv-budget"),
        (["--ram-budget", "much"], USAGE, "--ram-budget"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_opened(
    alphabet: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert run(alphabet, *arguments) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        *(
            ["--allowed-host", name]
            for name in ("*", "chat.example", "Chat.example", "192.0.2.1", "2001:db8::1", "a_b")
        ),
        *(["--allowed-origin", origin] for origin in ("*", "null", "https://chat.example", "http://[::1]:8080")),
        ["--allowed-origin", "chrome-extension://abcdefghijklmnop"],
    ],
    ids=lambda flags: flags[1],
)
def test_names_that_requests_can_have_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert run(tmp_path / "nowhere.pi", *flags) == INPUT
    assert "nowhere.pi: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nowhere.pi", "text.pi"])
def test_what_is_no_artifact_is_refused_before_it_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "text.pi").write_text("no artifact")
    assert run(tmp_path / name) == INPUT
    said = capsys.readouterr().err
    assert name in said
    assert "listening" not in said


def test_a_file_without_a_key(alphabet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("\n  \n")
    assert run(alphabet, "--host", "0.0.0.0", "--api-key-file", tmp_path / "keys") == USAGE  # noqa: S104
    assert_a_message(capsys.readouterr().err)


@pytest.mark.parametrize("key", ["secret", "fifteen-letters"])
def test_a_key_that_can_be_guessed_is_refused(
    alphabet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    (tmp_path / "keys").write_text(f"# comment\n{GOOD_KEY}\n{key}\n")
    assert run(alphabet, "--api-key-file", tmp_path / "keys") == USAGE
    said = capsys.readouterr().err
    assert_a_message(said)
    assert "keys, line 3: the key can be guessed" in said
    assert "16 characters or more" in said
    assert key not in said


def test_a_comment_behind_a_key_is_no_part_of_it_in_silence(
    alphabet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text(f"{GOOD_KEY}  # a laptop\n")
    assert run(alphabet, "--api-key-file", tmp_path / "keys") == USAGE
    assert "keys, line 1: a key has no spaces" in capsys.readouterr().err


def test_comments_and_blank_lines_are_no_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# keys of our team\n\n{GOOD_KEY}\n  # another\n  {GOOD_KEY[::-1]}  \n{GOOD_KEY}\n")
    assert access.keys_in(tmp_path / "keys") == (GOOD_KEY, GOOD_KEY[::-1])


def test_a_file_of_comments_has_no_key(alphabet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("# a comment that is as long as a key\n")
    assert run(alphabet, "--api-key-file", tmp_path / "keys") == USAGE
    assert "there is no key in it" in capsys.readouterr().err


def test_without_the_extra_it_says_which(
    alphabet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("starlette", "pi_runtime.server."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert run(alphabet) == USAGE
    assert "pip install '.[serve]', in your clone" in capsys.readouterr().err


def test_an_artifact_is_checked_while_it_is_served(random_path: Path, tmp_path: Path) -> None:
    said, failed = [], []
    service: Any = SimpleNamespace(on_event=said.append, fail=failed.append)
    cli.verify_meanwhile(random_path, service)
    assert (said, failed) == (["every byte of the artifact is as it was written"], [])
    damaged = bytearray(random_path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "a.pi").write_bytes(damaged)
    cli.verify_meanwhile(tmp_path / "a.pi", service)
    assert [type(error) for error in failed] == [ArtifactError]


def test_defaults_of_answers(alphabet: Path) -> None:
    flags = cli.DefaultOptions(temperature=0.0, top_k=5, max_tokens=9)
    settings = cli._settings(cli.ListenOptions(artifact=alphabet), flags, 2)
    assert (settings.sampling, settings.max_tokens) == ({"temperature": 0, "top_k": 5}, 9)
    unsaid = cli._settings(cli.ListenOptions(artifact=alphabet), cli.DefaultOptions(), 2)
    assert (unsaid.sampling, unsaid.max_tokens) == ({}, None)


@pytest.mark.parametrize(
    ("host", "needs_key"), [("127.0.0.1,::1", False), ("127.0.0.1,0.0.0.0", True), ("192.0.2.1,127.0.0.1", True)]
)
def test_every_address_is_looked_at(host: str, needs_key: bool) -> None:
    access.check_reach(host, ["key"])
    with pytest.raises(UsageError, match="other machines") if needs_key else nullcontext():
        access.check_reach(host, [])
