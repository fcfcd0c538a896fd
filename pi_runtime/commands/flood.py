"""`pi-run flood`: whether a server says the same whatever company a request is in.

The same prompts go to any server with OpenAI's `/v1/completions`, greedy and with seeds, in rounds with more or fewer
requests at once, shuffled anew in each. A server whose answers depend on their company has several texts of a prompt.
"""

import json
import os
import random
import sys
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from pi_runtime import console
from pi_runtime.errors import PiError, Setting, UsageError

PROMPTS = [f"{start} {middle}" for start in ("Once upon a time", "The sum of 2 and 3", "def add(a, b):", "In the year")
           for middle in ("", "there", "is", "a b c d e f g h " * 4, "long " * 40)]  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1, "seed": 1}}
MOST_REQUESTS, MOST_PARALLEL, MOST_TOKENS = 100_000, 512, 4096
TIMEOUT_S, ANSWER_BYTES = 600.0, 4 << 20

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


_EPILOG = """
Examples:
  pi-run flood http://127.0.0.1:8080
  pi-run flood http://127.0.0.1:8080 --requests 300 --parallel 1,8

More: docs/questions.md
"""


@app.command("flood", cls=console.GroupedCommand, context_settings=console.HELP, epilog=_EPILOG)
def flood(
    url: Annotated[str, typer.Argument(help="The server, like http://127.0.0.1:8080.")],
    requests: Annotated[int, typer.Option(help="Requests of each round.", min=1, max=MOST_REQUESTS)] = 1000,
    parallel: Annotated[str, typer.Option(help="Requests at once, of each round.")] = "1,8,44",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1, max=MOST_TOKENS)] = 32,
    model: Annotated[str | None, typer.Option(help="The model, where the server has several.")] = None,
    anywhere: Annotated[bool, typer.Option("--anywhere", help="Send to other machines than this one.")] = False,
    as_json: Annotated[bool, console.JSON] = False,
    debug: Annotated[bool, console.DEBUG] = False,
) -> None:
    """Send the same prompts in changing company, and count the texts that come of each.

    A key is read from OPENAI_API_KEY."""
    rounds = _rounds(parallel)
    _check(url, anywhere=anywhere)
    texts: dict[tuple[str, str], set[str]] = defaultdict(set)
    rows = []
    common = {"max_tokens": max_tokens} | ({} if model is None else {"model": model})
    for number, at_once in enumerate(rounds):
        asked = [([*WAYS][n % 2], PROMPTS[n // 2 % len(PROMPTS)]) for n in range(requests)]
        random.Random(number).shuffle(asked)  # noqa: S311  no secret
        with console.progress(f"{at_once} at once", "answers") as bar, ThreadPoolExecutor(at_once) as pool:
            found = pool.map(lambda one: _text(url, {"prompt": one[1], **WAYS[one[0]], **common}), asked)
            try:
                for done, (one, text) in enumerate(zip(asked, found, strict=True), 1):
                    texts[one].add(text)
                    bar(done, requests)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        rows += [{"at_once": at_once, "way": way, **_counted(texts, way)} for way in WAYS]
    if as_json:
        console.print_json({"rounds": rows})
    else:
        sys.stdout.write(_table(rows) + "\n")


def _rounds(parallel: str) -> list[int]:
    try:
        found = [int(part) for part in parallel.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= one <= MOST_PARALLEL for one in found):
        raise UsageError(setting=Setting("parallel", parallel), expected=f"numbers from 1 to {MOST_PARALLEL}, like 1,8")
    return found


def _check(url: str, *, anywhere: bool) -> None:
    """Raise UsageError for what is no address of HTTP, and for another machine's unless it is meant."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url} is no address of a server", expected="http://HOST:PORT")
    try:
        is_here = parts.hostname == "localhost" or ip_address(parts.hostname).is_loopback
    except ValueError:
        is_here = False
    if not (is_here or anywhere):
        raise UsageError(f"{parts.hostname} may be another machine", remedy="--anywhere, if its owner wants a flood")


def _text(url: str, body: dict[str, Any]) -> str:
    """The text of an answer. Raises PiError for a server that does not give one."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    path = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
    request = urllib.request.Request(path, json.dumps(body).encode(), headers)  # noqa: S310  the scheme was looked at
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
            return str(json.loads(answer.read(ANSWER_BYTES))["choices"][0]["text"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PiError(f"{path} gives no text", found=str(error)[:200]) from None


def _counted(texts: dict[tuple[str, str], set[str]], way: str) -> dict[str, int]:
    """Counts of one way up to now: prompts, those that had several texts, and the most texts of one."""
    found = [len(some) for (other, _), some in texts.items() if other == way]
    return {"prompts": len(found), "changed": sum(n > 1 for n in found), "most_texts": max(found, default=0)}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| at once | drawn | prompts | with several texts up to here | most texts of one |", "| --- " * 5 + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row.values()))} |" for row in rows)])
