"""The chat page, in a browser, against a server that plays what it is told."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Mount
from support.chat_server import GATE, LOST, PROPS, Script, event, refusal, scripted_app, served

pytestmark = pytest.mark.slow
Open = Callable[..., Any]


@pytest.fixture
def script() -> Script:
    """What the server says, until a test wants something else."""
    return Script(turns=[["Good ", "morning."]])


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with served(scripted_app(script)) as address:
        yield address


@pytest.fixture
def visit(chromium: Any, address: str) -> Iterator[Open]:
    """Opens the page in a browser of its own; at the end, nothing may have gone wrong there or spoken to others."""
    contexts, faults, others = [], [], []

    def visit(width: int = 1100, height: int = 800, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(15000)
        contexts.append(context)
        context.on("request", lambda request: others.append(request.url) if is_elsewhere(request.url) else None)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if "Security Policy" in said.text else None)
        page.goto(address)
        return page

    def is_elsewhere(url: str) -> bool:
        return not url.startswith((address, "data:", "blob:"))

    yield visit
    for context in contexts:
        context.close()
    assert not faults
    assert not others


@pytest.fixture(scope="module")
def renderer(chromium: Any) -> Iterator[Any]:
    """The page once for all tests that only call its functions."""
    with served(scripted_app(Script())) as address:
        page = chromium.new_page()
        page.goto(address)
        yield page
        page.close()


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def seen(locator: Any) -> Any:
    """playwright's assertions, which wait for what is to come."""
    from playwright.sync_api import expect

    return expect(locator)


def answers(page: Any) -> Any:
    return page.locator("article.assistant .body")


def done(page: Any) -> None:
    """Wait until no answer is under way."""
    page.get_by_role("button", name="Send", exact=True).wait_for()


def test_an_answer_streams_with_its_figures(script: Script, visit: Open) -> None:
    script.turns = [["Good ", "**morning", GATE, "**."]]
    page = visit()
    ask(page, "Hello?")
    seen(answers(page)).to_have_text("Good **morning")
    seen(page.locator("article .figures")).to_have_text("25 tokens/s · 38 % of rows read · 2 tokens")
    script.gate.set()
    seen(answers(page)).to_have_text("Good morning.")
    seen(answers(page).locator("strong")).to_have_text("morning")
    seen(page.locator("article .figures")).to_contain_text("3 tokens · prompt 21 (16 cached)")
    seen(page.get_by_label("Message", exact=True)).to_be_focused()
    (asked,) = script.asked
    assert asked["messages"] == [{"role": "user", "content": "Hello?"}]
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})
    assert page.title() == "Hello? – demo"


def test_what_was_said_before_is_sent_again(script: Script, visit: Open) -> None:
    page = visit()
    ask(page, "one")
    done(page)
    ask(page, "two")
    done(page)
    contents = [message["content"] for message in script.asked[1]["messages"]]
    assert contents == ["one", "Good morning.", "two"]


def test_what_is_typed_is_read_ahead_at_most_once_a_second(script: Script, visit: Open) -> None:
    """Each request is the one that Enter would send, but for its length; the newest text is in it."""
    page = visit()
    page.clock.install(time=0)
    page.reload()
    message = page.get_by_label("Message", exact=True)
    page.clock.pause_at(1000)

    def typed(text: str) -> None:
        with page.expect_response("**/v1/chat/completions"):
            message.fill(text[:-1])
            page.clock.run_for(900)
            message.fill(text)
            page.clock.run_for(100)

    typed("Hello")
    typed("Hello there")
    assert [asked["messages"][-1]["content"] for asked in script.ahead] == ["Hello", "Hello there"]
    message.fill("Hello there!")
    page.keyboard.press("Enter")
    page.clock.run_for(5000)
    page.clock.resume()
    seen(answers(page)).to_have_text("Good morning.")
    done(page)
    with page.expect_response("**/v1/chat/completions"):
        message.fill("And now")
    (asked,), last = script.asked, script.ahead[-1]
    assert len(script.ahead) == 3, "what was sent is read no more"
    assert [message["content"] for message in last["messages"]] == ["Hello there!", "Good morning.", "And now"]
    streams = ("messages", "stream", "stream_options", "timings_per_token", "return_progress", "max_tokens")
    assert {k: v for k, v in last.items() if k not in streams} == {k: v for k, v in asked.items() if k not in streams}


def test_what_is_typed_goes_to_no_other_machine_unless_that_is_switched_on(script: Script, visit: Open) -> None:
    page = visit()
    hosts = [
        "localhost",
        "127.0.0.1",
        "[::1]",
        "example.org",
        "localhost.example.org",
        "127.0.0.1.example.org",
        "10.0.0.1",
    ]

    def read_by() -> list[bool]:
        return [page.evaluate("host => readsAhead(host)", host) for host in hosts]

    assert read_by() == [True] * 3 + [False] * 4
    for choice, wanted in (("Always", True), ("Never", False)):
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("Read what is typed").select_option(choice)
        page.get_by_label("Close settings").click()
        page.reload()
        assert read_by() == [wanted] * len(hosts)
    page.clock.install()
    page.reload()
    page.get_by_label("Message", exact=True).fill("Hello")
    page.clock.run_for(5000)
    assert not script.ahead


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stop_keeps_the_text_and_the_server_hears_of_it(script: Script, visit: Open, way: str) -> None:
    script.turns = [["Half a ", GATE, "sentence."], ["Whole."]]
    page = visit()
    ask(page, "Go")
    seen(answers(page)).to_have_text("Half a")
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop", exact=True).click()
    done(page)
    seen(page.locator(".remark")).to_have_text("Stopped. Go on")
    assert script.left.wait(10)
    ask(page, "Again")
    seen(answers(page).last).to_have_text("Whole.")


def test_a_reload_in_mid_answer_loses_nothing(script: Script, visit: Open) -> None:
    script.turns = [["The first half ", GATE, "and the second."], ["All of it."]]
    page = visit()
    ask(page, "Tell me")
    seen(answers(page)).to_have_text("The first half")
    page.get_by_label("Message", exact=True).fill("typed meanwhile")
    page.reload()
    seen(answers(page)).to_have_text("The first half")
    seen(page.locator(".remark")).to_contain_text("closed before the answer was complete")
    seen(page.get_by_label("Message", exact=True)).to_have_value("typed meanwhile")
    assert script.left.wait(10)
    page.get_by_role("button", name="Answer again").click()
    seen(answers(page)).to_have_text("All of it.")
    seen(page.locator(".versions")).to_have_text("2 / 2")


def test_edited_questions_and_new_answers_are_versions(script: Script, visit: Open) -> None:
    script.turns = [["first"], ["second"], ["third"]]
    page = visit()
    ask(page, "Question")
    done(page)
    page.get_by_role("button", name="Answer again").click()
    seen(answers(page)).to_have_text("second")
    done(page)
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit").click()
    page.keyboard.type(" two?")
    page.keyboard.press("Enter")
    seen(answers(page)).to_have_text("third")
    assert script.asked[2]["messages"] == [{"role": "user", "content": "Question two?"}]
    done(page)
    page.reload()
    seen(answers(page)).to_have_text("third")
    page.get_by_role("button", name="Previous version").click()
    seen(answers(page)).to_have_text("second")
    page.locator("article.assistant").get_by_role("button", name="Previous version").click()
    seen(answers(page)).to_have_text("first")
    seen(page.get_by_role("button", name="Next version").last).to_be_focused()


def test_edit_can_be_given_up(script: Script, visit: Open) -> None:
    page = visit()
    ask(page, "Question")
    done(page)
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit").click()
    page.keyboard.type("other")
    page.keyboard.press("Escape")
    seen(page.locator("article.user .body")).to_have_text("Question")
    seen(page.get_by_role("button", name="Edit")).to_be_focused()


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_a_refusal_stands_in_the_place_of_the_answer(script: Script, visit: Open, status: int) -> None:
    script.turns = [refusal(status, f"Not now: {status}."), ["At last."]]
    page = visit()
    ask(page, "Please")
    seen(page.get_by_role("alert")).to_contain_text(f"Not now: {status}.")
    done(page)
    page.get_by_role("button", name="Try again").click()
    seen(answers(page)).to_have_text("At last.")
    seen(page.get_by_role("alert")).to_have_count(0)
    seen(page.locator(".versions")).to_have_count(0)


def test_a_busy_server_says_when_to_come_back(script: Script, visit: Open) -> None:
    script.turns = [refusal(429, "All slots are taken.", **{"Retry-After": "2"})]
    page = visit()
    ask(page, "Please")
    seen(page.get_by_role("button", name=re.compile(r"Try again \(in [12] s\)"))).to_be_visible()
    seen(page.get_by_role("button", name="Try again", exact=True)).to_be_visible()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lost_connection_keeps_what_came(script: Script, visit: Open) -> None:
    script.turns = [["The beginning ", 1.0, LOST], ["The whole."]]
    page = visit()
    ask(page, "Please")
    seen(page.get_by_role("alert")).to_contain_text("connection was lost")
    seen(answers(page)).to_have_text("The beginning")
    page.get_by_role("button", name="Try again").click()
    seen(answers(page)).to_have_text("The whole.")
    seen(page.locator(".versions")).to_have_text("2 / 2")


def test_an_unfinished_answer_goes_on(script: Script, visit: Open) -> None:
    script.turns = [["The first ", GATE, "-"], ["half, ", 1.0, LOST], ["the rest."]]
    page = visit()
    ask(page, "Please")
    seen(answers(page)).to_have_text("The first")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Go on").click()
    seen(answers(page)).to_have_text("The first half,")
    seen(page.get_by_role("alert")).to_be_visible()
    page.get_by_role("button", name="Go on").click()
    seen(answers(page)).to_have_text("The first half, the rest.")
    done(page)
    asked = script.asked[2]
    assert asked["messages"][1] == {"role": "assistant", "content": "The first half, "}
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
    seen(page.get_by_role("button", name="Go on")).to_have_count(0)


def test_an_error_within_the_stream_is_shown(script: Script, visit: Open) -> None:
    said = event({"delta": {"content": "So "}}) + event(error={"message": "Shutting down."})
    script.turns = [Response(said, media_type="text/event-stream")]
    page = visit()
    ask(page, "Please")
    seen(page.get_by_role("alert")).to_contain_text("Shutting down.")
    seen(answers(page)).to_have_text("So")


def test_a_server_that_is_gone(script: Script, visit: Open) -> None:
    page = visit()
    seen(page.get_by_role("heading", level=1)).to_have_text("demo")
    page.route("**/v1/**", lambda route: route.abort())
    ask(page, "Anybody there?")
    seen(page.get_by_role("alert")).to_contain_text("cannot be reached")
    seen(page.locator("article.user .body")).to_have_text("Anybody there?")
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    seen(answers(page)).to_have_text("Good morning.")


def test_two_questions_without_an_answer_between_become_one(script: Script, visit: Open) -> None:
    script.turns = [refusal(500, "Broken."), ["Yes."]]
    page = visit()
    ask(page, "one")
    seen(page.get_by_role("alert")).to_be_visible()
    done(page)
    ask(page, "two")
    seen(answers(page).last).to_have_text("Yes.")
    assert script.asked[1]["messages"] == [{"role": "user", "content": "one\n\ntwo"}]


def test_the_key_is_asked_for_and_kept_for_the_tab_alone(script: Script, visit: Open) -> None:
    script.key = "secret-1"
    page = visit()
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    seen(page.get_by_role("alert")).to_have_text("The server does not know this key.")
    page.get_by_label("API key").fill("secret-1")
    page.keyboard.press("Enter")
    seen(page.get_by_role("heading", level=1)).to_have_text("demo")
    ask(page, "Hello")
    seen(answers(page)).to_have_text("Good morning.")
    page.reload()
    seen(page.get_by_role("heading", level=1)).to_have_text("demo")
    assert "secret-1" not in json.dumps(page.evaluate("({...localStorage})"))
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Forget the API key").click()
    ask(page, "Hello again")
    seen(page.get_by_label("API key")).to_be_focused()
    page.get_by_role("button", name="Not now").click()
    seen(page.get_by_role("alert")).to_contain_text("A key is needed.")


def test_loading_is_said_and_waited_for(script: Script, visit: Open) -> None:
    script.loading = 2
    page = visit()
    seen(page.get_by_role("status").first).to_have_text("The model is loading…")
    seen(page.get_by_role("heading", level=1)).to_have_text("demo")
    seen(page.get_by_label("Message", exact=True)).to_be_focused()


TABLE = "\n".join("|" + f" {cell} |" * 30 for cell in ("column", "---", "cell"))
WIDE = "\n\n".join(
    [
        "Word" * 60,
        "```python\n" + "x = 1 + " * 60 + "1\n```",
        TABLE,
        "`" + "code" * 60 + "`",
        "https://example.org/" + "a" * 200,
    ]
)
OVERFLOWING = """() => [...document.querySelectorAll("body *")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5)
    .filter((e) => !e.closest("pre, .table, nav, dialog, .unseen, svg[hidden]"))
    .map((e) => e.outerHTML.slice(0, 80))"""


def test_nothing_scrolls_sideways_on_a_narrow_page(script: Script, visit: Open) -> None:
    script.turns = [[WIDE]]
    page = visit(360, 740)
    ask(page, "Long" * 80)
    done(page)
    assert page.locator(".table table").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("#log").evaluate("e => e.scrollWidth <= e.clientWidth")
    assert page.evaluate(OVERFLOWING) == []
    page.get_by_role("button", name="Settings").click()
    assert page.locator("#settings").evaluate("e => e.scrollWidth <= e.clientWidth")


def test_the_list_is_a_drawer_on_a_narrow_page(script: Script, visit: Open) -> None:
    page = visit(360, 740)
    ask(page, "First talk")
    done(page)
    menu = page.get_by_role("button", name="Conversations")
    seen(page.get_by_role("navigation")).to_be_hidden()
    menu.click()
    seen(page.get_by_role("button", name="New conversation")).to_be_focused()
    page.keyboard.press("Escape")
    seen(menu).to_be_focused()
    menu.click()
    page.get_by_role("button", name="New conversation").click()
    seen(page.get_by_role("navigation")).to_be_hidden()
    seen(page.get_by_label("Message", exact=True)).to_be_focused()
    menu.click()
    page.get_by_role("button", name="First talk", exact=True).click()
    seen(answers(page)).to_have_text("Good morning.")


def test_the_keyboard_alone_reaches_everything(script: Script, visit: Open) -> None:
    page = visit()
    seen(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    done(page)
    assert script.asked[0]["messages"][0]["content"] == "two\nlines"
    names = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        names.add(page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.innerText"))
        assert page.evaluate("getComputedStyle(document.activeElement).opacity") == "1"
    wanted = {"New conversation", "two lines", "Delete: two lines", "Dark colours", "Settings"}
    assert wanted | {"Messages", "Copy", "Edit", "Answer again", "Message", "Send"} <= names
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    page.get_by_label("Temperature").focus()
    page.keyboard.press("Escape")
    seen(page.get_by_role("button", name="Settings")).to_be_focused()


def violations(page: Any, *ignored: str) -> list[str]:
    """What axe finds of WCAG 2.2 A and AA and of good practice, contrast and names of controls included."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = [violation for violation in axe.run(page).response["violations"] if violation["id"] not in ignored]
    return [f"{v['id']}: {node['html']} {node['failureSummary']}" for v in found for node in v["nodes"]]


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing(script: Script, visit: Open, colours: str, width: int) -> None:
    text = "# A\n\n> quote\n\n`code` and **bold**\n\n```py\nx\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n\n- [link](https://example.org)"
    script.thoughts = ["hm"]
    script.turns = [[text], refusal(429, "Busy.", **{"Retry-After": "60"})]
    page = visit(width, color_scheme=colours, reduced_motion="reduce")
    seen(page.get_by_role("heading", level=1)).to_have_text("demo")
    assert violations(page) == []
    ask(page, "Hello")
    done(page)
    ask(page, "More")
    done(page)
    page.locator("article.user").first.hover()
    assert violations(page) == []
    page.locator("summary").first.click()
    page.get_by_role("button", name="Settings").click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    if width == 360:
        page.get_by_role("button", name="Conversations").click()
        # Beside the open drawer all is inert, heading and main part included.
        assert violations(page, "landmark-one-main", "page-has-heading-one") == []


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing_of_key_and_text(script: Script, visit: Open, colours: str) -> None:
    script.key = "k"
    script.props["chat_template"] = None
    page = visit(color_scheme=colours)
    page.get_by_label("API key").fill("x")
    page.keyboard.press("Enter")
    seen(page.get_by_role("alert")).to_be_visible()
    assert violations(page) == []
    page.get_by_label("API key").fill("k")
    page.keyboard.press("Enter")
    page.get_by_label("Text", exact=True).fill("Once")
    page.keyboard.press("Control+Enter")
    seen(page.get_by_role("button", name="Take back")).to_be_enabled()
    assert violations(page) == []


def test_a_screen_reader_hears_whole_paragraphs_once(script: Script, visit: Open) -> None:
    script.turns = [["One ", "two.\n\n", "Three", GATE, " four.\n\n", "- five"]]
    page = visit()
    ask(page, "Count")
    spoken = page.locator("#spoken p")
    seen(spoken).to_have_text(["Answering.", "One two."])
    script.gate.set()
    seen(spoken).to_have_text(["Answering.", "One two.", "Three four.", "five", "End of the answer."])
    seen(page.get_by_role("log")).to_have_attribute("aria-live", "off")
    seen(page.locator("article h2")).to_have_text(["You", "demo"])


@pytest.mark.parametrize(
    ("source", "html"),
    [
        ("a *b* **c** `d` ~~e~~", "<p>a <em>b</em> <strong>c</strong> <code>d</code> <s>e</s></p>"),
        ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
        ("_a_ __b__ ***c***", "<p><em>a</em> <strong>b</strong> <strong><em>c</em></strong></p>"),
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# A\n## B ##", "<h3>A</h3><h4>B</h4>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("---", "<hr>"),
        ("`` a`b ``", "<p><code>a`b</code></p>"),
        (r"\*a\*", "<p>*a*</p>"),
        ("**open `half", "<p>**open `half</p>"),
        ("<b>x</b> &amp;", "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp;</p>"),
        ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
        (
            "see https://a.org/b_c_d.",
            '<p>see <a href="https://a.org/b_c_d" target="_blank" rel="noopener noreferrer" title="https://a.org/b_c_d">'
            "https://a.org/b_c_d</a>.</p>",
        ),
    ],
)
def test_markdown(renderer: Any, source: str, html: str) -> None:
    show = "(text) => { const e = document.createElement('div'); new Markdown(e).show(text); return e.innerHTML; }"
    assert renderer.evaluate(show, source) == html


def test_code_is_shown_as_it_is_and_can_be_copied(script: Script, visit: Open) -> None:
    script.turns = [["```python\n", "if x:\n", "    y **= 2\n", "```\n", "Done."]]
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    ask(page, "Code")
    done(page)
    seen(page.get_by_role("region", name="Code, python")).to_have_text("if x:\n    y **= 2")
    page.locator(".code").get_by_role("button", name="Copy").click()
    seen(page.locator("#notice")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == "if x:\n    y **= 2"


@pytest.mark.parametrize(
    ("read", "tokens", "shown"),
    [(0, 0, "0 % of the prompt read"), (1250, 0, "50 % of the prompt read"), (2000, 0, ""), (1250, 1, "1 token")],
)
def test_how_much_of_a_prompt_has_been_read_is_shown(renderer: Any, read: int, tokens: int, shown: str) -> None:
    """Of the 2,000 tokens 500 were stored."""
    show = "([step, tokens]) => { const s = { tokens }; measure(s, { prompt_progress: step }); return figures(s)[0]; }"
    step = {"total": 2000, "cache": 500, "processed": max(read, 500)}
    assert renderer.evaluate(show, [step, tokens]) == shown


def test_growing_text_is_shown_as_the_whole_would_be(renderer: Any) -> None:
    """The fast path, which makes only changed blocks anew, against a slow twin."""
    text = "# T\n\n- a\n- b\n\n  c\n1. *d*\n\n> q\n> r\n\npara **bold**\nline\n\n~~~\n```\n~~~\n\nend\n" + WIDE[240:]
    grow = """(text) => {
        const [grown, whole] = [0, 0].map(() => document.createElement("div"));
        const growing = new Markdown(grown);
        for (let end = 1; end <= text.length; end++) {
            growing.show(text.slice(0, end));
            new Markdown(whole.appendChild(document.createElement("div"))).show(text.slice(0, end));
            if (grown.innerHTML !== whole.lastChild.innerHTML) return text.slice(0, end);
            whole.replaceChildren();
        }
        return null;
    }"""
    assert renderer.evaluate(grow, text[:1200]) is None


HARD = ["*" * 20000, "`" * 20000, "[" * 20000, "> " * 5000, "- " * 5000, "|" * 20000, "_a" * 9000]


@pytest.mark.parametrize("text", HARD, ids=[text[:2] for text in HARD])
def test_no_text_takes_the_page_long(renderer: Any, text: str) -> None:
    took = renderer.evaluate(
        """(text) => {
        const began = performance.now();
        new Markdown(document.createElement("div")).show(text);
        return performance.now() - began;
    }""",
        text,
    )
    assert took < 20_000


def test_hostile_text_stays_text(script: Script, visit: Open) -> None:
    bad = "<img src=x onerror=alert(1)><script>alert(2)</script>\n\n[a](javascript:alert(3)) [b](data:text/html,x)"
    script.turns = [[bad]]
    script.thoughts = [bad]
    page = visit()
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    ask(page, bad)
    done(page)
    assert page.locator("article img, article script, article a").count() == 0
    seen(answers(page)).to_contain_text("<script>alert(2)</script>")


def test_settings_are_sent_and_kept(script: Script, visit: Open) -> None:
    page = visit()
    page.get_by_role("button", name="Settings").click()
    values = {"Temperature": "0.7", "Top p": "0.9", "Top k": "40", "Min p": "0.05", "Most tokens": "99", "Seed": "7"}
    values |= {"Repetition penalty": "1.1", "Presence penalty": "0.5", "Frequency penalty": "-0.5"}
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Thinking").select_option("off")
    page.keyboard.press("Escape")
    page.reload()
    ask(page, "Hello")
    done(page)
    (asked,) = script.asked
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}
    numbers = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 99, "seed": 7}
    numbers |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    assert asked.items() >= numbers.items()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("9")
    page.get_by_role("button", name="Empty these fields").click()
    seen(page.get_by_label("Top k", exact=True)).to_have_value("")
    page.keyboard.press("Escape")
    ask(page, "Hello")
    done(page)
    assert not script.asked[1].keys() & numbers.keys()


def test_settings_that_are_open_before_the_server_answers(script: Script, visit: Open) -> None:
    script.loading = 1000
    page = visit()
    page.get_by_role("button", name="Settings").click()
    seen(page.get_by_label("System prompt")).to_be_hidden()
    script.loading = 0
    seen(page.get_by_label("System prompt")).to_be_visible()
    seen(page.locator("#server")).to_contain_text("demo")


def test_thoughts_are_folded(script: Script, visit: Open) -> None:
    script.thoughts = ["They greet. ", "So do I."]
    page = visit()
    ask(page, "Hello")
    done(page)
    seen(answers(page)).to_have_text("Good morning.")
    seen(page.get_by_text("They greet. So do I.")).to_be_hidden()
    page.get_by_text("Thought for").click()
    seen(page.get_by_text("They greet. So do I.")).to_be_visible()
    ask(page, "More")
    done(page)
    assert script.asked[1]["messages"][1] == {"role": "assistant", "content": "Good morning."}


def test_colours_follow_the_system_until_one_chooses(visit: Open) -> None:
    def paper(page: Any) -> Any:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page = visit(color_scheme="dark")
    dark = paper(page)
    page.get_by_role("button", name="Light colours").click()
    assert paper(page) != dark
    page.reload()
    assert paper(page) != dark
    page.get_by_role("button", name="Dark colours").click()
    assert paper(page) == dark


def test_a_model_without_a_template_goes_on_with_a_text(script: Script, visit: Open) -> None:
    script.props["chat_template"] = None
    script.turns = [[" upon", " a time"], [" more"], [" in ", GATE, "between"]]
    page = visit()
    text = page.get_by_label("Text", exact=True)
    seen(text).to_be_focused()
    page.keyboard.type("Once")
    page.keyboard.press("Control+Enter")
    seen(text).to_have_value("Once upon a time")
    assert script.asked[0]["prompt"] == "Once"
    seen(page.locator("#textfigures")).to_contain_text("25 tokens/s · 38 % of rows read · 2 tokens")
    page.get_by_role("button", name="Try another").click()
    seen(text).to_have_value("Once more")
    page.get_by_role("button", name="Take back").click()
    seen(text).to_have_value("Once")
    page.get_by_role("button", name="Continue").click()
    seen(text).to_have_value("Once in ")
    page.keyboard.press("Escape")
    seen(page.get_by_role("button", name="Continue")).to_be_visible()
    page.reload()
    seen(text).to_have_value("Once in ")
    seen(page.get_by_role("button", name="Once", exact=True)).to_have_attribute("aria-current", "true")


def test_the_same_answer_again_is_explained(script: Script, visit: Open) -> None:
    page = visit()
    ask(page, "Hello")
    done(page)
    page.get_by_role("button", name="Answer again").click()
    seen(page.locator("#notice")).to_contain_text("The same again")
    page.locator("#notice").get_by_role("button", name="Settings").click()
    seen(page.get_by_label("Temperature")).to_be_visible()


def test_a_text_shows_errors_too(script: Script, visit: Open) -> None:
    script.props["chat_template"] = None
    script.turns = [[" upon"], refusal(429, "Full."), refusal(429, "Busy."), [" more"]]
    page = visit()
    text = page.get_by_label("Text", exact=True)
    text.fill("Once")
    page.keyboard.press("Control+Enter")
    seen(text).to_have_value("Once upon")
    page.get_by_role("button", name="Try another").click()
    seen(page.get_by_role("alert")).to_contain_text("Full.")
    seen(text).to_have_value("Once upon")
    page.get_by_role("button", name="Take back").click()
    seen(text).to_have_value("Once")
    page.keyboard.press("Control+Enter")
    seen(page.get_by_role("alert")).to_contain_text("Busy.")
    page.get_by_role("button", name="Try again").click()
    seen(page.get_by_label("Text", exact=True)).to_have_value("Once more")
    seen(page.get_by_role("alert")).to_have_count(0)


def test_conversations_are_listed_deleted_and_brought_back(script: Script, visit: Open) -> None:
    page = visit()
    for title in ("First", "Second"):
        page.get_by_role("button", name="New conversation").click()
        ask(page, title)
        done(page)
    listed = page.locator("#list .open")
    seen(listed).to_have_text(["Second", "First"])
    page.get_by_role("button", name="Delete: Second").click()
    seen(listed).to_have_text(["First"])
    seen(listed).to_be_focused()
    page.get_by_role("button", name="Undo").click()
    seen(listed).to_have_text(["Second", "First"])
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Delete all").click()
    seen(page.locator("#list")).to_have_text("None yet.")
    page.reload()
    seen(page.locator("#list")).to_have_text("None yet.")


def test_an_answer_goes_on_while_another_conversation_is_open(script: Script, visit: Open) -> None:
    script.turns = [["slow ", GATE, "answer"], ["quick answer"]]
    page = visit()
    ask(page, "First")
    seen(answers(page)).to_have_text("slow")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "Second")
    seen(answers(page)).to_have_text("quick answer")
    seen(page.get_by_role("img", name="Answering")).to_have_count(1)
    script.gate.set()
    seen(page.get_by_role("img", name="Answering")).to_have_count(0)
    page.get_by_role("button", name="First", exact=True).click()
    seen(answers(page)).to_have_text("slow answer")


def test_export_and_import(script: Script, visit: Open, tmp_path: Path) -> None:
    page = visit()
    ask(page, "Keep me")
    done(page)
    page.get_by_role("button", name="Settings").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    download.value.save_as(tmp_path / "out.json")
    other = visit()
    other.get_by_role("button", name="Settings").click()
    other.locator("#file").set_input_files(tmp_path / "out.json")
    other.get_by_role("button", name="Keep me", exact=True).click()
    seen(answers(other)).to_have_text("Good morning.")


NODE = {"id": "n", "parent": None, "role": "user", "text": "x"}


def test_a_file_of_nonsense_is_refused(visit: Open, tmp_path: Path) -> None:
    talk = {"id": "a", "kind": "talk"}
    node_lists: list[Any] = ["x", [{**NODE, "parent": "n"}], [NODE, NODE], [{**NODE, "role": "x"}], [None]]
    chats = [{}, None, "x", {**talk, "id": "a\n", "nodes": []}, *({**talk, "nodes": nodes} for nodes in node_lists)]
    (tmp_path / "in.json").write_text(json.dumps({"conversations": chats}))
    page = visit()
    page.get_by_role("button", name="Settings").click()
    page.locator("#file").set_input_files(tmp_path / "in.json")
    seen(page.locator("#notice")).to_contain_text("no conversations of this page")


def test_the_oldest_make_room(script: Script, visit: Open) -> None:
    page = visit()
    talk = {"kind": "talk", "nodes": [NODE], "leaf": "n"}
    old = [{**talk, "id": f"id{n}", "title": f"talk {n}", "at": n} for n in range(202)]
    page.evaluate(
        "(old) => old.forEach((chat) => localStorage.setItem('pi.chat.' + chat.id, JSON.stringify(chat)))", old
    )
    page.reload()
    ask(page, "Newest")
    seen(page.locator("#list .open").last).to_have_text("talk 3")
    done(page)
    page.reload()
    seen(page.locator("#list .open")).to_have_count(200)
    seen(page.locator("#list .open").first).to_have_text("Newest")


def test_a_browser_that_keeps_nothing(script: Script, chromium: Any, address: str) -> None:
    context = chromium.new_context()
    without = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('no storage'); } });"
    context.add_init_script(without)
    page = context.new_page()
    page.goto(address)
    ask(page, "Hello")
    seen(answers(page)).to_have_text("Good morning.")
    seen(page.locator("#notice")).to_contain_text("allows no storage")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "Hello again")
    done(page)
    seen(page.locator("#list .open")).to_have_text(["Hello again", "Hello"])
    context.close()


def test_a_proxy_may_serve_it_under_a_path(script: Script, chromium: Any) -> None:
    with served(Starlette(routes=[Mount("/chat", scripted_app(script))])) as address:
        page = chromium.new_page()
        page.goto(f"{address}chat/")
        ask(page, "Hello")
        seen(answers(page)).to_have_text("Good morning.")
        page.close()


def test_another_model_is_noticed(script: Script, visit: Open) -> None:
    script.turns = [refusal(404, "There is no such model."), ["Here I am."]]
    page = visit()
    seen(page.get_by_role("heading", level=1)).to_have_text("demo")
    script.props["model"] = "other"
    ask(page, "Hello")
    seen(page.get_by_role("heading", level=1)).to_have_text("other")
    page.get_by_role("button", name="Try again").click()
    seen(answers(page)).to_have_text("Here I am.")
    assert script.asked[1]["model"] == "other"


def test_two_tabs_share_conversations(script: Script, visit: Open, address: str) -> None:
    script.turns = [["slow ", GATE, "answer"], ["other"]]
    page = visit()
    ask(page, "Shared")
    seen(answers(page)).to_have_text("slow")
    other = page.context.new_page()
    other.goto(address)
    other.get_by_role("button", name="Shared", exact=True).click()
    seen(answers(other)).to_have_text("slow")
    script.gate.set()
    seen(answers(other)).to_have_text("slow answer")
    ask(other, "From the other tab")
    seen(answers(page).last).to_have_text("other")


def test_the_page_s_own_properties_are_what_the_server_says(script: Script, visit: Open) -> None:
    page = visit()
    seen(page.locator("#facts")).to_have_text("predicted · cpu · 4,096 tokens of context")
    page.get_by_role("button", name="Settings").click()
    seen(page.locator("#server")).to_contain_text(PROPS["model"])
