"""The table of a decoder's facts in the page on the format, made of their records. `fact_table.py` writes it."""

from dataclasses import MISSING

from pi_runtime.artifact.decoder import ALL, Fact, facts
from pi_runtime.artifact.decoding import canonical_json
from support.documents import DOCS

PAGE = DOCS / "reference" / "format.md"
BEGIN, END = "<!-- facts -->\n", "<!-- end of facts -->\n"


def table() -> str:
    """A row for each fact: its key, its values and default, what it means and needs, and who does not compute it."""
    head = "| key | type; value unless given | meaning | not computed by |\n| --- | --- | --- | --- |\n"
    return head + "".join(_row(name, own) for name, own in facts().items())


def _row(name: str, own: Fact) -> str:
    default = "" if own.default is MISSING else f"; {canonical_json(own.default).decode()}"
    needs = [*([f"with `{own.of}`"] if own.of else []), *(rule.text for rule in own.rules)]
    meaning = f"{own.meaning}; only {', and '.join(needs)}" if needs else own.meaning
    lacking = [body for body in ALL if body not in own.bodies]
    lacking += [f"{body} (`{v}`)" for v, bodies in own.later.items() for body in ALL if body not in bodies]
    return f"| `{name}` | {own.values.text}{default} | {meaning} | {', '.join(lacking) or '–'} |\n"


def written(page: str) -> str:
    """A page with its table anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
