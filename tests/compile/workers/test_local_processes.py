"""Workers that this process starts end with it, whatever state they are in."""

import os
import signal
import sys
import threading

import pytest

from pi_compile.workers import LONE
from pi_compile.workers.local_processes import LocalProcesses


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_stopped_worker_is_not_waited_for() -> None:
    workers, ended = LocalProcesses(repr, LONE, 2), threading.Event()
    workers.start()
    (stopped,) = workers._started
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGSTOP)

    def end() -> None:
        workers.end()
        ended.set()

    ending = threading.Thread(target=end)
    ending.start()
    try:
        assert ended.wait(60)
        assert stopped.exitcode == -signal.SIGKILL
    finally:
        stopped.kill()
        ending.join()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_while_a_worker_imports_is_its_parents_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """It comes before the worker's first line of ours, which may be seconds after its start."""
    workers = LocalProcesses(repr, LONE, 2)
    workers.start()
    (worker,) = workers._started
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGINT)
    worker.join(60)
    workers.end()
    assert worker.exitcode == 0
    assert capfd.readouterr().err == ""
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
