"""What profiling announces, and what it takes: run as a script it profiles a checkpoint, and prints both as JSON.

python profile_memory.py CHECKPOINT WINDOW BATCH
"""

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pi_compile.torch_model import PROCESS_BYTES


@dataclass(frozen=True)
class Profiled:
    """Bytes of one profiling in a process of its own."""

    announced: int
    before: int
    """Resident memory when all modules are there, for which `PROCESS_BYTES` is announced."""
    peak: int
    """The most that was resident, files that are mapped included."""

    @property
    def ratio(self) -> float:
        return self.announced / (PROCESS_BYTES + self.peak - self.before)


def profile_in_child(checkpoint: Path, window: int = 512, batch: int = 8) -> Profiled:
    """Profile in a process of its own, so that nothing else is counted."""
    command = [sys.executable, __file__, str(checkpoint), str(window), str(batch)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Profiled(**json.loads(done.stdout.splitlines()[-1]))


def resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def main() -> None:
    import numpy as np
    import torch

    from pi_compile.calibration.profiling import ProfileSpec, memory_bytes, profile
    from pi_compile.checkpoint import open_checkpoint
    from pi_compile.workers import work_folder

    window, batch = int(sys.argv[2]), int(sys.argv[3])
    checkpoint = open_checkpoint(sys.argv[1])
    tokens = np.arange(window * batch) * 7919 % checkpoint.decoder.vocab_size
    spec = ProfileSpec(window=window, batch=batch, shard=batch)
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = resident("VmRSS")
    with work_folder(None) as work:
        profile(checkpoint, tokens, spec, work=work, inputs="", progress=lambda _done, _total: None)
    announced = memory_bytes(checkpoint.decoder, spec)
    print(json.dumps(asdict(Profiled(announced, before, resident("VmHWM")))))


if __name__ == "__main__":
    main()
