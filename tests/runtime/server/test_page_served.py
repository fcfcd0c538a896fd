"""The chat page in a browser, served by the real server with models whose words are known."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.scripted import saying, scripted_artifact
from support.serving import Served, slowed, wait_until

pytestmark = pytest.mark.slow
Serve = Callable[..., Served]


def seen(locator: Any) -> Any:
    from playwright.sync_api import expect

    return expect(locator)


def visit(chromium: Any, served: Served) -> Any:
    page = chromium.new_page()
    page.goto(served.url + "/")
    return page


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


@pytest.fixture
def slow(serve: Serve, tmp_path: Path) -> Served:
    """Says abab… slowly to whoever asks."""
    template = {"chat_template.jinja": b"{{ messages[-1].content }}"}
    path = scripted_artifact(tmp_path / "slow.pi", saying("ab", then=ord("a")), context=1 << 16, files=template)
    return serve(path, slots=1, queue=0, changed=slowed(0.02))


def test_a_conversation(chromium: Any, serve: Serve, alphabet: Path) -> None:
    page = visit(chromium, serve(alphabet))
    seen(page.get_by_role("heading", level=1)).to_have_text("alphabet")
    ask(page, "abc")
    seen(page.locator(".body").last).to_have_text("defghijklmnopqrstuvwxyz")
    figures = r"tokens/s · \d+ % of rows read · 23 tokens · prompt 3"
    seen(page.locator("article .figures")).to_have_text(re.compile(figures))
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("wx")
    page.keyboard.press("Enter")
    seen(page.locator(".body").last).to_have_text("yz")
    page.get_by_role("button", name="Answer again").click()
    seen(page.locator("article.assistant .versions")).to_have_text("2 / 2")
    seen(page.locator(".body").last).to_have_text("yz")
    page.reload()
    seen(page.locator(".body").last).to_have_text("yz")
    page.close()


def test_stop_and_reload_free_the_slot(chromium: Any, slow: Served) -> None:
    page = visit(chromium, slow)
    ask(page, "a")
    seen(page.locator(".body").last).to_contain_text("bab")
    seen(page.locator("article .figures")).to_have_text(re.compile(r"\d+ tokens/s · \d+ % of rows read"))
    page.keyboard.press("Escape")
    seen(page.locator(".remark")).to_contain_text("Stopped.")
    wait_until(slow.is_idle)
    ask(page, "b")
    seen(page.locator(".body").last).to_contain_text("aba")
    page.reload()
    seen(page.locator(".body").last).to_contain_text("aba")
    seen(page.locator(".remark").last).to_contain_text("closed before the answer was complete")
    wait_until(slow.is_idle)
    page.close()


def test_a_busy_server(chromium: Any, slow: Served) -> None:
    with slow.streaming(max_tokens=60000) as response:
        lines = response.iter_lines()  # kept: without it the stream would close
        next(lines)
        page = visit(chromium, slow)
        ask(page, "a")
        seen(page.get_by_role("alert")).to_contain_text("the server is busy")
    wait_until(slow.is_idle)
    page.get_by_role("button", name=re.compile("Try again")).click()
    seen(page.locator(".body").last).to_contain_text("bab")
    page.close()


def test_a_key(chromium: Any, serve: Serve, alphabet: Path) -> None:
    page = visit(chromium, serve(alphabet, api_keys=("right",)))
    for key in ("wrong", "right"):
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        if key == "wrong":
            seen(page.get_by_role("alert")).to_contain_text("does not know this key")
    ask(page, "xy")
    seen(page.locator(".body").last).to_have_text("z")
    page.close()


def test_errors_in_the_server_s_words(chromium: Any, serve: Serve, alphabet: Path) -> None:
    page = visit(chromium, serve(alphabet))
    ask(page, "a" * 100)
    seen(page.get_by_role("alert")).to_contain_text(re.compile("context|tokens"))
    page.close()


def test_settings_reach_the_model(chromium: Any, serve: Serve, alphabet: Path) -> None:
    page = visit(chromium, serve(alphabet))
    page.get_by_role("button", name="Settings").click()
    values = {"Temperature": "0.5", "Top p": "0.9", "Top k": "1", "Min p": "0.1", "Most tokens": "4", "Seed": "7"}
    values |= {"Repetition penalty": "1.1", "Presence penalty": "0.5", "Frequency penalty": "-0.5"}
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)
    page.keyboard.press("Escape")
    ask(page, "a")
    seen(page.locator(".body").last).to_have_text("bcde")
    seen(page.locator(".remark")).to_contain_text("Cut at the limit of tokens.")
    page.close()


def test_a_cut_answer_goes_on(chromium: Any, serve: Serve, tmp_path: Path) -> None:
    template = {"chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}"}
    path = scripted_artifact(tmp_path / "model.pi", saying("abcdefg"), files=template)
    page = visit(chromium, serve(path))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill("2")
    page.keyboard.press("Escape")
    ask(page, "ab")
    seen(page.locator(".body").last).to_have_text("cd")
    page.get_by_role("button", name="Go on").click()
    seen(page.locator(".body").last).to_have_text("cdef")
    page.close()


def test_a_model_without_a_template(chromium: Any, serve: Serve, tmp_path: Path) -> None:
    path = scripted_artifact(tmp_path / "plain.pi", saying("abcdefg"))
    page = visit(chromium, serve(path))
    text = page.get_by_label("Text", exact=True)
    text.fill("ab")
    page.keyboard.press("Control+Enter")
    seen(text).to_have_value("abcdefg")
    seen(page.locator("#textfigures")).to_contain_text("5 tokens")
    page.close()


def test_the_page_needs_no_key_and_says_what_it_may(serve: Serve, alphabet: Path) -> None:
    served = serve(alphabet, api_keys=("k",))
    response = served.get("/", headers={"accept": "text/html"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
