"""The child process of `pi_runtime.text.grammar_check`: reads one grammar, says what is wrong with it, and ends.

Started as a file, isolated and without site packages:

    python -I -S -B _grammar_worker.py SECONDS MEMORY_BYTES PATH

PATH is the folder of llguidance. The request is {"kind": …, "source": …}, the reply a message, which is empty
for a good grammar.
"""

import json
import math
import sys

if sys.platform != "win32":
    import resource


def main() -> None:
    sys.path.append(sys.argv[3])  # isolated mode knows only the standard library
    from llguidance import LLMatcher  # noqa: PLC0415

    request = json.loads(sys.stdin.buffer.read())
    if sys.platform != "win32":
        seconds, memory_bytes = math.ceil(float(sys.argv[1])), int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    read = {
        "json-schema": LLMatcher.grammar_from_json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
    }[request["kind"]]
    sys.stdout.buffer.write(LLMatcher.validate_grammar(read(request["source"])).encode())


if __name__ == "__main__":
    main()
