"""The report page's colours, each for a light page and for a dark one."""

COLOURS = {
    "paper": ("#ffffff", "#14171a"),
    "panel": ("#f6f7f8", "#1c2024"),
    "ink": ("#1b1f23", "#e8eaed"),
    "muted": ("#59626b", "#a3adb7"),
    "line": ("#d5dae0", "#39414a"),
    "accent": ("#0b6e63", "#4fd0bf"),
    "warn": ("#b3261e", "#ff8a80"),
    # Parts of time and of bytes.
    "attention": ("#2f6db5", "#5b9be6"),
    "cache": ("#7fb2e5", "#a9cdf3"),
    "predictor": ("#8a5fb8", "#b792e0"),
    "ffn": ("#d9822b", "#eea04e"),
    "disk": ("#8a7a2e", "#cdb95a"),
    "handover": ("#c23b55", "#ee6f87"),
    "embedding": ("#9aa5b0", "#8b96a1"),
    "head": ("#5f6b76", "#bcc5ce"),
    "scratch": ("#c4cbd2", "#545e68"),
    "process": ("#e3d9c6", "#6b5f4a"),
    # Processors.
    "gpu": ("#17877b", "#3fc0b0"),
    "cpu": ("#a8762a", "#d9a957"),
    # Layers, first to last.
    "layer0": ("#46327e", "#8d7fe0"),
    "layer1": ("#365c8d", "#6aa2ee"),
    "layer2": ("#277f8e", "#45bccb"),
    "layer3": ("#1fa187", "#3fd0a8"),
    "layer4": ("#6aa43a", "#9adf6a"),
    "layer5": ("#b79a00", "#f0d84a"),
}
"""Name: (on a light page, on a dark one)."""
LAYER_COLOURS = tuple(name for name in COLOURS if name.startswith("layer"))
