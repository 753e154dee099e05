"""Options of the chat template: rendered with, checked against the template, and the run's are those of each prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import tiny_tokenizer

from rlflow.errors import EnvironmentContractError, ModelError
from rlflow.rollout import Tokenizer
from rlflow.rollout.chat_engine import PiecedText
from rlflow.types import Step
from tests.unit.rollout.chat_templates import QWEN3, Talk, dressed, played, user

EMPTY = "<think>\n\n</think>\n\n"
OPTION = QWEN3.removesuffix("{%- endif %}") + (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}{%- endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return dressed(directory, OPTION)


def test_the_template_is_rendered_with_its_options(tokenizer: Tokenizer) -> None:
    quiet = tokenizer.with_options({"enable_thinking": False})
    assert quiet.render([user("a")]) == tokenizer.render([user("a")]) + EMPTY
    assert quiet.with_options({}).render([user("a")]).endswith(EMPTY)
    assert not quiet.with_options({"enable_thinking": True}).render([user("a")]).endswith(EMPTY)
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert quiet.with_tools([tool]).render([user("a")]).endswith(EMPTY)


def test_an_option_that_the_template_never_reads_is_an_error(
    directory: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(
        ModelError, match=r"never reads 'enable_thinkin'. Did you mean 'enable_thinking'"
    ):
        tokenizer.with_options({"enable_thinkin": False})
    with pytest.raises(ModelError, match="'tools' is set by the rollout itself"):
        tokenizer.with_options({"tools": []})
    with pytest.raises(ModelError, match="'messages' is set by the rollout itself"):
        tokenizer.with_options({"messages": []})
    bare = Tokenizer.from_pretrained(directory)
    bare.inner.chat_template = None
    with pytest.raises(ModelError, match="the tokenizer has none"):
        bare.with_options({"enable_thinking": False})


def test_a_conversation_may_have_options_of_its_own(tokenizer: Tokenizer) -> None:
    said = [[*tokenizer.encode("b"), tokenizer.eos_ids[0]]] * 3
    off = {"enable_thinking": False}
    steps = [Step([user("c")], after=-1, template_options=off), Step([user("d")])]
    one, fed = played(tokenizer, [user("a")], said, Talk(steps))
    assert one.usable, one.error
    ends = [tokenizer.decode(context, False).endswith(EMPTY) for context in fed]
    assert ends == [False, True, True]
    with pytest.raises(EnvironmentContractError, match="expected after=-1 beside them"):
        played(tokenizer, [user("a")], said, Talk([Step([user("c")], template_options=off)]))


def test_a_thought_that_the_prompt_opens_holds_no_call(directory: Path) -> None:
    opened = dressed(directory, OPTION.replace("<think>\n\n</think>\n\n", "<think>\n"))
    assert opened.call_reader.in_thought is False
    assert opened.with_options({"enable_thinking": False}).call_reader.in_thought is True


def test_a_chat_server_is_sent_the_options() -> None:
    text = PiecedText({"enable_thinking": False})
    assert text.with_options({"enable_thinking": False}).options == {"enable_thinking": False}
    with pytest.raises(
        ModelError, match=r"a chat server is sent rollout.chat_template_options alone"
    ):
        text.with_options({"enable_thinking": True})
