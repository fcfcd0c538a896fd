"""How long the docs and their sentences are: limits that a reader feels."""

import re
from collections.abc import Iterator

import pytest
from support.documents import DOCS
from support.paths import ROOT

PAGES = {path.relative_to(ROOT).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
PAGES |= {name: ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")}
GENERATED = 1
"""Pages that are made of the command lines alone; README, CHANGELOG and CONTRIBUTING are pages of the site too."""
MOST_PAGES, MOST_WORDS, LONGEST = 40, 65_000, 40


def paragraphs(text: str) -> Iterator[str]:
    """Prose of a page in Markdown: paragraphs and items of lists, without blocks, tables, headings and comments."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->", "", text, flags=re.M | re.S)
    text = re.sub(r"^(?: *\||#|    |!\[).*$", "", text, flags=re.M)
    for part in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", text):
        if part.strip():
            yield " ".join(part.split())


def sentences(paragraph: str) -> list[str]:
    """A paragraph's sentences. A link is its text; code, and a list of codes, is one word."""
    plain = re.sub(r"\]\([^)]*\)", "", paragraph.replace("[", ""))
    plain = re.sub(r"`[^`]+`(?:(?:,| and| or| to|,? …| …) ?`[^`]+`)*", "CODE", plain)
    return re.split(r"(?<=[.?!])[)*\"]* +|(?<=:) +(?=[\"(*]*[A-Z])", plain)


def too_long(text: str) -> list[str]:
    found = [sentence for part in paragraphs(text) for sentence in sentences(part)]
    return [sentence for sentence in found if len(sentence.split()) > LONGEST]


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_too_long(page: str) -> None:
    assert too_long(PAGES[page].read_text(encoding="utf-8")) == []


def test_a_long_sentence_is_found() -> None:
    words = "A" + " word" * (LONGEST - 1)
    assert too_long(f"# Title\n\nShort. {words} more.\n\n- item {words}\n\n| {words} {words} |\n") == [
        f"{words} more.",
        f"- item {words}",
    ]
    assert too_long(f"Short.\n\n```text\n{words} {words}\n```\n\n    {words} {words}\n") == []


def test_the_docs_are_short() -> None:
    assert len(PAGES) + GENERATED <= MOST_PAGES
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in PAGES.values()) <= MOST_WORDS


def test_the_glossary_is_short() -> None:
    rows = re.findall(
        r"^\| (?!word|letter|---)", (DOCS / "reference" / "glossary.md").read_text(encoding="utf-8"), re.M
    )
    assert len(rows) <= 60 + len("TDLHRB"), "60 words, and the letters of shapes"
