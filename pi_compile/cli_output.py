"""What the commands that make something print: rows and what ran, as JSON or to read."""

from typing import Any

from pi_runtime import console


def show(rows: dict[str, Any], ran: list[str], as_json: bool) -> None:
    if as_json:
        console.print_json({**rows, "ran": ran})
        return
    from pi_compile.report import print_report

    print_report(rows)
    console.say(_done(ran))


def show_artifact(packed: dict[str, Any], ran: list[str], as_json: bool) -> None:
    if as_json:
        console.print_json({**packed, "ran": ran})
    else:
        if "quantisation" in packed:
            from pi_compile.report import print_report

            print_report({"quantisation": packed["quantisation"]})
        console.say(_done(ran))
        console.say(f"{packed['artifact']}: {console.size(packed['bytes'])}, sha256 {packed['sha256'][:16]}…")


def show_placements(rows: dict[str, Any], ran: list[str], as_json: bool) -> None:
    if as_json:
        console.print_json({**rows, "ran": ran})
        return
    from pi_compile.report import print_report

    if not rows["plans"]:
        console.say("no plans: the machine has no GPU, or nothing is worth a hand-over to it")
    print_report({"plans": [{k: v for k, v in row.items() if k not in _LONG} for row in rows["plans"]]})


_LONG = ("attention", "cuts", "context", "gpu_bytes", "ram_bytes_by_part", "digest")
"""Keys of a placement that a table has no room for."""


def _done(ran: list[str]) -> str:
    return f"made: {', '.join(ran)}" if ran else "nothing to do: everything is up to date"
