"""llama.cpp's own quantiser and importance matrix, as the programs that `llama_cpp_build.py --quantiser` builds."""

import subprocess
import sys
from pathlib import Path

QUANTISER, IMPORTANCE = (Path(sys.prefix, name) for name in ("llama-quantize", "llama-imatrix"))


def missing() -> str | None:
    """Why llama.cpp cannot be asked; None where it can."""
    absent = [program.name for program in (QUANTISER, IMPORTANCE) if not program.is_file()]
    return (
        f"{' and '.join(absent)}: not there, see tests/benchmarks/side_by_side/llama_cpp_build.py" if absent else None
    )


def importance_matrix(source: Path, text: str, folder: Path) -> Path | None:
    """The mean squares of all inputs on a text; None where llama.cpp cannot run the model."""
    (folder / "fit.txt").write_text(text, encoding="utf-8")
    output = folder / "importance.gguf"
    command = [IMPORTANCE, "-m", source, "-f", folder / "fit.txt", "-o", output, "-c", "512", "-t", "1"]
    found = subprocess.run(list(map(str, command)), capture_output=True, check=False)
    return output if found.returncode == 0 and output.is_file() else None


def quantised(source: Path, kind: str, folder: Path, importance: Path | None) -> Path:
    """The GGUF file again in a kind such as Q4_K_M."""
    output = folder / f"{kind}.gguf"
    weighted = [] if importance is None else ["--imatrix", importance]
    command = [QUANTISER, "--allow-requantize", *weighted, source, output, kind, "1"]
    subprocess.run(list(map(str, command)), capture_output=True, check=True)
    return output
