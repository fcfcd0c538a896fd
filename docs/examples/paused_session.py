"""A session: the prompt is read while it is typed, the model pauses for a tool, and goes on with the result.

    python docs/examples/paused_session.py http://127.0.0.1:8080 [KEY]

Works with every model, a chat template or not. The tool is a calculator: the model calls it with "=".
"""

import operator
import re
import sys

import httpx

PROMPT = """Tom has 3 apples and gets 4 more. How many? 3 + 4 = 7.
A box holds 12 pens. How many do 5 boxes hold? 5 * 12 = 60.
A train has 6 cars of 7 seats. How many seats?"""
CALL = re.compile(r"(\d{1,9}) ?([-+*]) ?(\d{1,9}) ?$")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MOST_CALLS = 5


def main(url: str, key: str = "none") -> None:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:

        def post(path: str, **body: object) -> dict[str, object]:
            found: dict[str, object] = client.post(path, json=body).raise_for_status().json()
            return found

        # Settings of the session hold for each of its turns.
        session = f"/v1/sessions/{post('/v1/sessions', temperature=0, max_tokens=40, stop=['='])['id']}"
        for line in PROMPT.splitlines(keepends=True):  # typed line by line, and read meanwhile
            post(f"{session}/type", text=line)
        print(PROMPT, end="")

        appended = ""
        for _ in range(MOST_CALLS):
            answer = post(f"{session}/answer", append=appended)
            print(answer["text"], end="")
            call = CALL.search(str(answer["text"]))
            if call is None:
                break
            # The session is paused here, for as long as the tool takes. What it holds is not read again.
            appended = f" {OPERATORS[call[2]](int(call[1]), int(call[3]))}"
            print(f"={appended}", end="")
        print(f"\n{client.get(session).json()['tokens']} tokens, in {session}")
        client.delete(session).raise_for_status()


if __name__ == "__main__":
    main(*sys.argv[1:])
