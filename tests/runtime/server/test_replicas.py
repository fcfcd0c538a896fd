"""Several servers of one artifact: what they share, where they run, and the proxy before them that the docs show."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from support.paths import ROOT
from support.serve_process import ServeProcess, free_port, serve_process
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.schema import Text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of pages and of nodes"),
]
NAMES = ("one", "two")
OPTIONS = ("--kv-budget", "8MiB", "--slots", "2", "--drain-seconds", "60")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which more is weights than a process takes for anything else."""
    decoder = small_decoder(
        d_model=512, d_ff=2048, n_layers=12, n_heads=8, n_kv_heads=1, head_dim=64, context_length=1024
    )
    path = tmp_path_factory.mktemp("replicas") / "talker.pi"
    return random_artifact(path, decoder, scale=3.0, text=Text(prefix_ids=(), end_ids=()))


Start = Callable[..., ServeProcess]


@pytest.fixture(scope="module")
def start(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:

        def start(*options: object, before: str = "") -> ServeProcess:
            log = folder / f"{len(list(folder.iterdir()))}.log"
            return stack.enter_context(serve_process(artifact, *OPTIONS, *options, log=log, before=before))

        yield start


@pytest.fixture(scope="module")
def replicas(start: Start) -> tuple[ServeProcess, ...]:
    return tuple(start() for _ in NAMES)


def ask(url: str, prompt: str, **body: object) -> httpx.Response:
    body = {"model": "talker", "prompt": prompt, "max_tokens": 2, **body}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


def mapped(pid: int, artifact: Path) -> dict[str, int]:
    """Bytes of a process's mapping of a file, by Linux's names."""
    found: dict[str, int] = {}
    counts = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(str(artifact))
        elif counts and line.endswith(" kB"):
            key, kib, _ = line.split()
            found[key[:-1]] = found.get(key[:-1], 0) + (int(kib) << 10)
    return found


def private_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kib) << 10 for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))


def test_replicas_share_the_pages_of_their_artifact(artifact: Path, replicas: tuple[ServeProcess, ...]) -> None:
    """Beside what any process takes, which does not grow with the model."""
    for replica in replicas:
        ask(replica.url, "a" * 200)
    size = artifact.stat().st_size
    for replica in replicas:
        found = mapped(replica.process.pid, artifact)
        assert found["Rss"] > 0.9 * size
        assert found["Private_Clean"] + found["Private_Dirty"] < 0.01 * size


def test_a_second_replica_takes_less_than_a_tenth_of_the_model(
    artifact: Path, replicas: tuple[ServeProcess, ...], tmp_path: Path
) -> None:
    """Of its own, beyond what a replica of a model takes that has nearly no weights."""
    decoder = small_decoder(context_length=1024)
    small = random_artifact(tmp_path / "talker.pi", decoder, scale=3.0, text=Text(prefix_ids=(), end_ids=()))
    with serve_process(small, *OPTIONS, log=tmp_path / "log") as other:
        found = []
        for replica in (replicas[1], other):
            ask(replica.url, "a" * 200)
            found.append(private_bytes(replica.process.pid))
    assert found[0] - found[1] < 0.1 * artifact.stat().st_size


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_replica_stays_on_its_node(start: Start, tmp_path: Path) -> None:
    """All its threads, those of libraries too; the nodes are made up."""
    cores = sorted(os.sched_getaffinity(0))
    for node, core in enumerate(cores[:2]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{core}\n")
    before = f"from pathlib import Path; from pi_runtime.execution import numa; numa.NODES = Path({str(tmp_path)!r})"
    replica = start("--numa", "1", before=before)
    ask(replica.url, "a" * 200)
    threads = [thread.id for thread in psutil.Process(replica.process.pid).threads()]
    assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset(cores[1:2])}


# The proxy.


@pytest.fixture(scope="module")
def proxy(replicas: tuple[ServeProcess, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The docs' configuration, with the ports of the replicas that run here; answers tell which one it was."""
    haproxy = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    if haproxy is None:
        pytest.skip("no haproxy here")
    port = free_port()
    text = (ROOT / "docs" / "examples" / "haproxy.cfg").read_text()
    for old, new in (("8080", port), *((8081 + n, r.url.rpartition(":")[2]) for n, r in enumerate(replicas))):
        assert f"127.0.0.1:{old}" in text
        text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    path = tmp_path_factory.mktemp("proxy") / "haproxy.cfg"
    # The last section of the file is that of the replicas.
    path.write_text(f"{text.rstrip()}\n    http-response set-header x-replica %s\n")
    checked = subprocess.run([haproxy, "-c", "-f", path], capture_output=True, text=True, check=False)
    assert (checked.returncode, "warning" in checked.stderr.lower()) == (0, False), checked.stderr
    process = subprocess.Popen([haproxy, "-db", "-f", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    yield url
    process.terminate()
    process.wait()


def test_texts_that_begin_alike_go_to_one_replica(proxy: str) -> None:
    beginnings = [f"{n}: " + "x" * 520 for n in range(12)]
    went = [{ask(proxy, text + end).headers["x-replica"] for end in ("", " a", " and b")} for text in beginnings]
    assert all(len(names) == 1 for names in went)
    assert set.union(*went) == set(NAMES)


def test_a_stream_comes_as_it_is_made(proxy: str) -> None:
    body = {"model": "talker", "prompt": "ab", "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{proxy}/v1/completions", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2
    assert "choices" in json.loads(lines[0].removeprefix("data: "))


def test_a_replica_drains_while_the_other_answers(proxy: str, replicas: tuple[ServeProcess, ...]) -> None:
    """Comes last: one replica ends. No request fails, and what it had begun comes to its end."""
    body = {"model": "talker", "prompt": "ab", "max_tokens": 300, "stream": True, "min_tokens": 300}
    with httpx.stream("POST", f"{proxy}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        ending = NAMES.index(answer.headers["x-replica"])
        replicas[ending].process.send_signal(signal.SIGTERM)
        found = [ask(proxy, f"{n}: " + "y" * 520) for n in range(24)]
        assert {answer.headers["x-replica"] for answer in found} == {NAMES[1 - ending]}
        assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
    assert replicas[ending].process.wait(60) == 0
