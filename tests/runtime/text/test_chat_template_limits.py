"""A hostile chat template is refused or killed, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.templates import render

from pi_runtime.errors import TemplateError
from pi_runtime.text import chat_template, sandbox
from pi_runtime.text.chat_template import ChatTemplate, SandboxLimits

pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "hi"}]
# Minutes for what memory, output or the sandbox must stop, so that a busy machine changes no result.
PATIENT = SandboxLimits(seconds=120.0, memory_bytes=128 << 20, output_bytes=100_000)
HASTY = SandboxLimits(seconds=0.3, memory_bytes=128 << 20, output_bytes=100_000)

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "huge power": "{{ 10 ** (10 ** 9) }}",
    "slow filter": "{% for a in range(99999) %}{% set b = range(99999) | sum %}{% endfor %}",
    "regular expression": "{{ ('(' * 9999 ~ 'http://a.b') | urlize | length }}" * 999,
    "sorting": "{% for a in range(99999) %}{% set b = range(99999) | map('string') | sort %}{% endfor %}",
    "tautology": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
}
GROW = "{%% set n = namespace(x=%s) %%}{%% for a in range(99) %%}{%% set n.x = n.x %s n.x %%}{%% endfor %%}"
BOMBS = {
    "string": ("{{ 'a' * 10**9 }}", "memory"),
    "list": ("{{ [0] * 10**10 }}", "memory"),
    "growing list": (GROW % ("[0]", "+"), "memory"),
    "doubling": (GROW % ("'a'", "~"), "memory"),
    "width": ("{{ '%999999999d' % 1 }}", "memory"),
    "format width": ("{{ '{:999999999}'.format(1) }}", "memory"),
    "center": ("{{ 'a' | center(999999999) }}", "memory"),
    "replace": ("{{ ('a' * 99999).replace('', 'a' * 99999) }}", "memory"),
    "indent": ("{{ ('a\n' * 99999) | indent(99999) }}", "memory"),
    "output": ("{% for a in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "output"),
    "wide output": ("{{ '😀' * 30000 }}", "output"),
    "control characters": ("{{ '\\x01' * 100001 }}", "output"),
}
REFUSED = {
    "range": "{% for a in range(9**9) %}{% endfor %}",
    "long message": "{{ raise_exception('x' * 10**7) }}",
    "big number": "{{ (10 ** 9999) | string }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "globals of lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "globals of ours": "{{ raise_exception.__globals__.sys.exit() }}",
    "attr filter": "{{ (messages | attr('__class__')).__mro__ }}",
    "map filter": "{{ messages | map(attribute='__class__.__mro__') | list | tojson }}",
    "format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "stored format": "{% set f = '{0.__class__.__mro__}'.format %}{{ f(1) }}",
    "format filter": "{{ ['{0.__class__.__mro__}'] | map('format', 1) | list }}",
    "context": "{{ self._TemplateReference__context.environment.x }}",
    "private namespace": "{% set n = namespace() %}{% set n.__class__ = dict %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "builtin import": "{{ __import__('os').getpid() }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "mutation": "{{ messages.append(1) }}",
    "dict mutation": "{{ messages[0].update(role='x') }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for a in [[[]]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "deep expression": "{{ " + "(" * 20_000 + ")" * 20_000 + " }}",
    "deep list": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "many loops": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "long sum": "{{ " + "1+" * 20_000 + "1 }}",
}


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes started; when the test ends, none of them nor any of their group is left."""
    started: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(original(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(sandbox.subprocess, "Popen", popen)
    threads = threading.active_count()
    yield started
    assert threading.active_count() == threads
    for process in started:
        assert process.returncode is not None
        if sys.platform != "win32":
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_template_is_killed(name: str, children: list[Any]) -> None:
    with pytest.raises(TemplateError, match=r"time limit\n  expected: at most 0.3 s"):
        render(ENDLESS[name], USER, variables={}, limits=HASTY)
    assert len(children) == 1


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited on Linux only")
def test_bomb_meets_its_limit(name: str, children: list[Any]) -> None:
    template, limit = BOMBS[name]
    with pytest.raises(TemplateError, match=f"exceeds its {limit} limit"):
        render(template, USER, variables={}, limits=PATIENT)
    assert len(children) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_escape_is_refused(name: str, children: list[Any]) -> None:
    with pytest.raises(TemplateError, match="failed") as caught:
        render(REFUSED[name], USER, variables={}, limits=PATIENT)
    assert len(str(caught.value)) < 2000
    assert len(children) == 1


def test_the_process_survives_a_chat_that_is_too_long() -> None:
    limits = SandboxLimits(seconds=120.0, output_bytes=1000)
    with ChatTemplate("{{ messages[0].content }}", limits) as template:
        assert template.render([{"role": "user", "content": "a"}], variables={}) == "a"
        child = template._sandboxes[0]._child
        with pytest.raises(TemplateError, match="exceeds its output limit"):
            template.render([{"role": "user", "content": "a" * 1001}], variables={})
        assert template.render([{"role": "user", "content": "b"}], variables={}) == "b"
        assert template._sandboxes[0]._child is child


def test_a_chat_that_takes_long_leaves_a_process_to_others() -> None:
    nothing = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    source = f"{{% if messages[0].content == 'slow' %}}{nothing}{{% endif %}}{{{{ messages[0].content }}}}"
    with ChatTemplate(source, SandboxLimits(seconds=60.0)) as template, ThreadPoolExecutor(1) as pool:
        template.start()
        slow = pool.submit(template.render, [{"role": "user", "content": "slow"}], variables={})
        while not template._sandboxes[0]._lock.locked():
            time.sleep(0.01)
        assert template.render([{"role": "user", "content": "quick"}], variables={}) == "quick"
        assert not slow.done()
        assert template._sandboxes[0]._child is not None
        template._sandboxes[0]._child.kill()
        with pytest.raises(TemplateError):
            slow.result()


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited on Linux only")
def test_messages_that_do_not_fit_the_memory_meet_its_limit() -> None:
    limits = SandboxLimits(seconds=120.0, memory_bytes=64 << 20, output_bytes=1000)
    with ChatTemplate("a", limits) as template, pytest.raises(TemplateError, match="exceeds its memory limit"):
        template.render([{"role": "user", "content": "a", "x": [{}] * 2_000_000}], variables={})


def test_output_up_to_its_limit_passes() -> None:
    for text in ("\x01" * 60, "😀" * 15, "é" * 30):
        limits = SandboxLimits(seconds=60, output_bytes=60)
        assert (
            render("{{ messages[0].content }}", [{"role": "user", "content": text}], variables={}, limits=limits)
            == text
        )


# What a template would meet that got through the sandbox.


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Another program in the child's place."""
    child = tmp_path / "child.py"
    child.write_text(f"import os, sys, time\n{body}\n")
    monkeypatch.setattr(chat_template, "CHILD", child)


MISBEHAVIOUR = {
    "flood": ("print(flush=True)\nwhile True: os.write(1, b'x' * 65536)", "output limit"),
    "sleep": ("print(flush=True)\nwhile True: time.sleep(9)", "time limit"),
    "closed output": ("print(flush=True)\nos.close(1)\nwhile True: time.sleep(9)", "without an answer"),
    "crash": ("print(flush=True)\nos.abort()", "without an answer.*\n.*-6"),
    "no JSON": ("print()\nprint('[' * 9999)", "without an answer"),
    "wrong type": ("print()\nprint('{\"text\": 1}')", "without an answer"),
    "unknown limit": ('print()\nprint(\'{"limit": "x"}\')', "without an answer"),
    "no start": ("sys.exit(3)", "did not start"),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes")
def test_a_child_that_misbehaves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Any]
) -> None:
    body, words = MISBEHAVIOUR[name]
    stand_in(tmp_path, monkeypatch, body)
    with pytest.raises(TemplateError, match=words):
        render("", USER, variables={}, limits=SandboxLimits(seconds=0.5 if "time" in words else 60, output_bytes=1000))
    assert len(children) == 1


def test_a_child_that_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Any]) -> None:
    stand_in(tmp_path, monkeypatch, "print(flush=True)\nwhile True: time.sleep(9)")
    more_than_a_pipe_holds = "x" * 1_000_000
    with pytest.raises(TemplateError, match="time limit"):
        render(more_than_a_pipe_holds, USER, variables={}, limits=HASTY)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes")
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="where a child cannot be looked at without waiting for it")
def test_a_group_is_killed_while_its_number_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a child has been waited for, its number may be that of somebody else's processes."""
    ended_before: list[bool] = []
    killpg = os.killpg

    def kill(group: int, signal_number: int) -> None:
        # Raises where the child has been waited for.
        ended_before.append(os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        killpg(group, signal_number)

    with ChatTemplate("hi", PATIENT) as kept:
        kept.start()
        assert kept._sandboxes[0]._child is not None
        ended = kept._sandboxes[0]._child
        os.kill(ended.pid, signal.SIGKILL)
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(sandbox.os, "killpg", kill)
        assert kept.render(USER, variables={}) == "hi"
        assert ended_before == [True]
        sandbox._kill(ended)
        assert ended_before == [True]
    assert ended_before == [True, False]


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="signals")
def test_a_child_whose_end_is_ignored_is_replaced() -> None:
    """Where a process ignores its children's ends the system waits for them."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with ChatTemplate("hi", PATIENT) as kept:
            kept.start()
            assert kept._sandboxes[0]._child is not None
            os.kill(kept._sandboxes[0]._child.pid, signal.SIGKILL)
            assert kept._sandboxes[0]._child.stdout is not None
            kept._sandboxes[0]._child.stdout.read()  # its end
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, kept._sandboxes[0]._child.pid, os.WEXITED | os.WNOWAIT)
            assert kept.render(USER, variables={}) == "hi"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_grandchild_is_killed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the output open: `render` could not return while it lives."""
    stand_in(tmp_path, monkeypatch, "print(flush=True)\nif os.fork(): os._exit(0)\nwhile True: time.sleep(9)")
    with pytest.raises(TemplateError, match="time limit"):
        render("", USER, variables={}, limits=HASTY)


def test_the_child_sees_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI_SECRET", "1")
    stand_in(tmp_path, monkeypatch, "import json\nprint()\nprint(json.dumps({'text': ' '.join(os.environ)}))")
    assert "PI_SECRET" not in render("", USER, variables={})


@pytest.mark.parametrize(
    "deed",
    ["open('/dev/null')", "import socket; socket.socket()", "os.pipe()", "os.dup(1)", "b'x' * (1 << 30)"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_the_confined_process_can_do_nothing(deed: str) -> None:
    folder = str(Path(sandbox.__file__).parent)
    program = f"""
import os, socket, sys
sys.path.append({folder!r})
import _confined
{deed}
_confined.confine(5, 256 << 20)
try:
    {deed}
except (OSError, MemoryError):
    os._exit(7)
"""
    if "1 << 30" in deed:
        program = program.replace(f"{deed}\n_render", "_confined")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7


def test_importing_is_cheap() -> None:
    heavy = {"jinja2", "torch", "numpy", "numba"}
    program = f"import sys, pi_runtime.text.chat_template; assert not {heavy} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
