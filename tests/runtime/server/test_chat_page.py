"""The chat page as a file: what it may load, and what it must not have. Needs no browser."""

import base64
import hashlib
import re

from pi_runtime.server.chat_page import chat_page

TEXT = chat_page().body.decode()


def directives() -> dict[str, str]:
    policy = chat_page().headers["content-security-policy"]
    return {name: value for name, _, value in (part.partition(" ") for part in policy.split("; "))}


def test_the_policy_allows_the_page_s_own_style_and_script_and_nothing_else() -> None:
    found = directives()
    assert found["default-src"] == "'none'"
    assert found["connect-src"] == "'self'"
    assert "unsafe" not in chat_page().headers["content-security-policy"]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", TEXT, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert found[directive] == f"'sha256-{digest}'"


def test_the_page_has_no_address_but_its_own() -> None:
    # A name of SVG's, which is never loaded.
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+", TEXT)) - {"http://www.w3.org"}
    assert addresses == set()
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=\"(?!data:)", TEXT)


def test_nothing_that_a_policy_would_refuse() -> None:
    assert not re.findall(r"<[^>]+\s(?:style|on\w+)=", TEXT)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", TEXT)


def test_the_page_is_small_and_its_lines_are_short() -> None:
    assert len(chat_page().body) < 100_000
    assert max(map(len, TEXT.splitlines())) <= 120
