"""The look of the report page: colours for light and dark, and the style sheet."""

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
    "handover": ("#c23b55", "#ee6f87"),
    "embedding": ("#9aa5b0", "#8b96a1"),
    "head": ("#5f6b76", "#bcc5ce"),
    "scratch": ("#c4cbd2", "#545e68"),
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

_SHEET = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main,header,footer{max-width:68rem;margin:0 auto;padding:0 1rem}
header{padding-top:2rem}
h1{font-size:1.5rem;line-height:1.25;margin:0;overflow-wrap:anywhere;text-wrap:balance}
h2{font-size:1.15rem;margin:2.75rem 0 .5rem}
h3{font-size:1rem;margin:0 0 .4rem}
p{margin:.5rem 0;max-width:46rem;overflow-wrap:anywhere}
.about{color:var(--muted)}
.answer{font-size:1.1rem;margin:1rem 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem;margin:1.25rem 0 0;padding:0}
.tiles div{background:var(--panel);border-radius:.5rem;padding:.7rem .9rem}
.tiles dt{color:var(--muted);font-size:.85rem}
.tiles dd{margin:0;font-size:1.35rem;font-weight:600;line-height:1.3}
.tiles dd span{font-size:1rem}
.tiles small{display:block;font-size:.85rem;font-weight:400;color:var(--muted)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:2rem 2.5rem}
figure{margin:0;min-width:0;max-width:31rem}
svg{display:block;width:100%;height:auto;overflow:visible;font-family:inherit;
stroke-linejoin:round;stroke-linecap:butt}
figcaption{color:var(--muted);font-size:.9rem;margin-top:.5rem}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem .9rem;margin:0 0 .4rem;padding:0;font-size:.85rem}
.key i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em}
.key i.line,.key i.dash,.key i.points{height:0;vertical-align:.25em;width:1.5em;border-radius:0;border-top:3px solid}
.key i.dash{border-top-style:dashed}
.key i.points{border-top-style:dotted}
.key i.dot{border-radius:50%}
.key i.pale{opacity:.3}
.scroll{overflow-x:auto;margin:.5rem 0;border:1px solid var(--line);border-radius:.5rem}
.scroll:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.84rem;white-space:nowrap}
th,td{text-align:right;padding:.35rem .45rem;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left;padding-left:.75rem}
th:last-child,td:last-child{padding-right:.75rem}
tbody th,tfoot th{position:sticky;left:0;background:var(--paper)}
tfoot th{white-space:normal}
thead th{background:var(--panel);font-weight:600;vertical-align:bottom;white-space:normal}
tbody tr:last-child>*{border-bottom:0}
tfoot>tr>*{border-top:2px solid var(--line);border-bottom:0;font-weight:600}
tbody th{font-weight:400}
tr.asked>*{font-weight:600;background:var(--panel)}
details>summary{cursor:pointer;font-weight:600;padding:.4rem 0}
dl.facts{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1rem;font-size:.9rem;margin:.5rem 0}
dl.facts dt{color:var(--muted)}
dl.facts dd{margin:0;min-width:0;overflow-wrap:anywhere}
footer{color:var(--muted);font-size:.85rem;padding-top:2rem;padding-bottom:3rem}
@media (max-width:30rem){dl.facts{grid-template-columns:1fr;gap:0}dl.facts dd{margin-bottom:.5rem}}
@media print{.figures{display:block}figure{break-inside:avoid;margin-bottom:1.5rem}}
"""


def style_sheet() -> str:
    """The page's CSS, which fetches nothing."""
    light, dark = (";".join(f"--{name}:{pair[n]}" for name, pair in COLOURS.items()) for n in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{_SHEET}"
