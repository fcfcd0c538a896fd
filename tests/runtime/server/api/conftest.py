"""Models and engines that jobs are run on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.synthetic import END_ID, random_artifact, small_decoder
from support.templates import HARMONY

from pi_runtime import Engine, load
from pi_runtime.artifact.schema import Text
from pi_runtime.server.api.served import Served
from pi_runtime.server.settings import ServerSettings

TEMPLATE = (
    b"{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)

HERMES = """{% if tools %}{{ tools | tojson }} <tool_call>{"name":, "arguments":}</tool_call>;{% endif %}\
{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %};{% endfor %}\
a:{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""


def served_by(path: Path) -> Iterator[tuple[Served, Engine]]:
    with load(path, device="cpu") as model, Engine(model, slots=4, speculate="off") as engine:
        yield Served(model, ServerSettings(model_name="m", sampling={"temperature": 0})), engine


@pytest.fixture(scope="session")
def random_chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Engine]]:
    """A model of bytes that says anything, and never ends by itself."""
    path = tmp_path_factory.mktemp("api") / "random.pi"
    text = Text(prefix_ids=(), end_ids=())
    decoder = small_decoder(context_length=192)
    yield from served_by(random_artifact(path, decoder, scale=3.0, text=text, files={"chat_template.jinja": TEMPLATE}))


@pytest.fixture(scope="session")
def prefixed_chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Engine]]:
    """The same, with a token that begins every prompt, and a template that knows the date."""
    path = tmp_path_factory.mktemp("api") / "prefixed.pi"
    text, decoder = Text(prefix_ids=(END_ID,), end_ids=()), small_decoder(context_length=192)
    files = {"chat_template.jinja": b"{{ date_string }}|{{ datetime }}|{{ messages[-1].content }}"}
    yield from served_by(random_artifact(path, decoder, scale=3.0, text=text, files=files))


@pytest.fixture(scope="session")
def alphabet_chat(alphabet: Path) -> Iterator[tuple[Served, Engine]]:
    """A model that goes on with the alphabet, then ends."""
    yield from served_by(alphabet)


@pytest.fixture
def endless_served(endless: Path) -> Iterator[Served]:
    """A model without a chat template."""
    for served, _ in served_by(endless):
        yield served


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Engine]]:
    """A model with Hermes' form of calls, and thoughts."""
    path = tmp_path_factory.mktemp("api") / "hermes.pi"
    files = {"chat_template.jinja": HERMES.encode()}
    text = Text(prefix_ids=(), end_ids=())
    yield from served_by(random_artifact(path, small_decoder(context_length=512), scale=3.0, text=text, files=files))


@pytest.fixture(scope="session")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Engine]]:
    """A model whose answers are messages in channels."""
    path = tmp_path_factory.mktemp("api") / "harmony.pi"
    files = {"chat_template.jinja": HARMONY.encode()}
    text = Text(prefix_ids=(), end_ids=())
    yield from served_by(random_artifact(path, small_decoder(context_length=512), scale=3.0, text=text, files=files))


@pytest.fixture(scope="session")
def toolless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Engine]]:
    """A model whose template knows no tools, so that messages tell of them."""
    path = tmp_path_factory.mktemp("api") / "toolless.pi"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{# system #}"
    text, decoder = Text(prefix_ids=(), end_ids=(END_ID,)), small_decoder(context_length=2048)
    files = {"chat_template.jinja": template.encode()}
    yield from served_by(random_artifact(path, decoder, scale=3.0, text=text, files=files))
