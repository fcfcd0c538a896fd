"""schemathesis: requests made from the OpenAPI document, right and wrong ones; none may be a server error, and what
comes back must be what the document says."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.scripted import tool_user
from support.serving import serving

from pi_runtime.server.settings import Limits

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
EXAMPLES, SECONDS = 30, 240
"""For each operation, and for all of them."""


@pytest.mark.timeout(2 * SECONDS)
def test_the_document_is_true_and_no_request_is_a_server_error(tmp_path: Path) -> None:
    # Short answers: what is generated says nothing of lengths.
    with serving(tool_user(tmp_path / "model.pi"), context=256, queue=64, limits=Limits(answers=4)) as served:
        command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
        bounds = ["--max-examples", EXAMPLES, "--max-time", SECONDS, "--seed", 1, "--generation-deterministic"]
        what = ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all"]
        rest = ["--continue-on-failure", "--no-color", "--request-timeout", 60, "--warnings", "off"]
        done = subprocess.run(
            [*command, "run", f"{served.url}/openapi.json", *map(str, [*bounds, *what, *rest])],
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr
        print(done.stdout[-3000:])
        assert served.get("/health").status_code == 200
