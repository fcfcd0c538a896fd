"""What a client is told of a fault, and what only the log has."""

import pytest

from pi_runtime.errors import ArtifactError, PiError
from pi_runtime.server.errors import ApiError, failed, refused


@pytest.mark.parametrize(
    "error",
    [
        ArtifactError("/srv/models/a.pi: damaged", remedy="copy it again"),
        PiError("cannot read rows", found="[Errno 5] Input/output error: '/srv/models/a.pi'"),
        PiError("cannot read rows", found=r"C:\models\a.pi"),
    ],
)
def test_files_of_the_server_are_named_in_the_log_alone(error: PiError, capsys: pytest.CaptureFixture[str]) -> None:
    for told in (failed(error), refused(error)):
        assert (told.status, told.message) == (500, f"internal error: {type(error).__name__}")
    assert capsys.readouterr().err.count("a.pi") == 2


def test_other_faults_are_told() -> None:
    assert failed(PiError("the grammar cannot be followed", found="a/b and 1 / 2")).message.startswith("the grammar")


def test_what_is_no_unicode_can_be_told() -> None:
    error = ApiError(400, "logit_bias.\ud800: é", param="logit_bias.\ud800")
    assert (error.message, error.param) == (r"logit_bias.\ud800: é", r"logit_bias.\ud800")
