"""llm-comply: shapes and meanings of answers against OpenAI's own schemas, for chats and responses, without images."""

from collections.abc import Iterator
from importlib.resources import files

import pytest
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner as Runner  # pytest takes its name for a test
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests
from support.scripted import tool_user
from support.serving import Served, serving

SPECIFICATIONS = {"openai-chat": "openai_chat.json", "open-responses": "openresponses.json"}
# A model of text takes no images, and thinks only if its template says so. A conversation is not compacted here.
LEFT_OUT = (
    *("image-input", "chat-image-input", "reasoning-summary", "chat-reasoning-summary"),
    *("compact-response", "compact-missing-model"),
)
CASES = [(form, test.id) for form in SPECIFICATIONS for test in get_tests(form) if test.id not in LEFT_OUT]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tool_user(tmp_path_factory.mktemp("comply") / "tools.pi"), api_keys=("key",)) as served:
        yield served


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the checker's own, of what it calls
@pytest.mark.parametrize(("form", "test"), CASES)
def test_the_checker_finds_nothing(served: Served, form: str, test: str) -> None:
    (case,) = (case for case in get_tests(form) if case.id == test)
    settings = ComplianceConfig(base_url=f"{served.url}/v1", api_key="key", model=served.name, verbose=True)
    specification = SpecLoader(str(files("llm_comply") / "specs" / SPECIFICATIONS[form]))
    found = Runner(settings, [case], specification).run_one(case)
    told = "\n".join([*found.errors, *found.warnings])
    assert not told, f"{told}\n{found.response}"
    assert found.status.value == "passed"
