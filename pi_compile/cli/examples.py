"""Examples of each command, which stand at the end of its help, with the page that says more."""

EXAMPLES = {
    "init": (
        "tutorials/own-model.md",
        "init checkpoint --corpus texts/ -o model.toml",
        "init model.gguf --activation relu -o model.toml",
        "init checkpoint --sparsify -o sparsify.toml",
    ),
    "sparsify": (
        "how-to/sparsify.md",
        "sparsify sparsify.toml -o sparse",
        "sparsify --resume sparse --steps 1000 -o more",
    ),
    "profile": ("explanation/pipeline.md", "profile model.toml", "profile model.toml --export counts.npz"),
    "train": ("explanation/pipeline.md", "train model.toml --device cuda:0", "train model.toml --workers 4"),
    "place": ("explanation/placement.md", "place model.toml", "place model.toml --lock", "place model.toml --locked"),
    "pack": (
        "how-to/convert-from-gguf.md",
        "pack --plain model.gguf -o model.pi",
        "pack --plain OWNER/NAME:Q4_K_M",
        "pack model.toml -o model.pi",
    ),
    "build": ("tutorials/own-model.md", "build model.toml -o model.pi", "build model.toml --workers 2 --numa spread"),
    "status": ("how-to/workers.md", "status model.toml", "status model.toml --watch 30"),
    "eval": (
        "explanation/fidelity.md",
        "eval model.pi --text held-out.txt",
        "eval model.pi --text held-out.txt --model checkpoint",
        "eval model.pi --task arc_easy_test.jsonl --limit 100",
    ),
    "plan": (
        "how-to/plan.md",
        "plan OWNER/NAME",
        "plan OWNER/NAME --machine laptop --format q4 --ram-budget 12GiB",
        "plan model.toml --machine pc-high --machine pc-low",
    ),
    "report": ("how-to/plan.md", "report model.toml -o model.html", "report OWNER/NAME --machine pc-low -o model.html"),
    "inspect": ("reference/output.md", "inspect model.pi", "inspect model.pi --json"),
    "verify": ("how-to/operate.md", "verify model.pi"),
    "machine": ("how-to/write-a-machine-profile.md", "machine -o mine.toml", "machine -o mine.toml --disk /models"),
    "doctor": ("how-to/troubleshoot.md", "doctor", "doctor --json"),
}
"""The page of each command, and how it is called."""


def epilog(name: str) -> str:
    """What ends the help of a command."""
    more, *lines = EXAMPLES[name]
    return "\n".join(["Examples:", *(f"  pi-compile {line}" for line in lines), "", f"More: docs/{more}"])
