"""A message that the chat template leaves out is told by its role, in rows and in what is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_tokenizer import char_tokenizer, write_lines
from published_templates import format_of, needs_trl, with_template

from tandem.config.data import DataConfig, SftDataConfig
from tandem.config.model import ModelConfig
from tandem.config.tree import ServeConfig
from tandem.data.dataset import RLHFDataset
from tandem.data.sft import SftDataset
from tandem.errors import UserError
from tandem.jobs.serve import make_answerer
from tandem.models import shown_messages
from tandem.serving.errors import RequestError
from tandem.serving.parameters import ChatParameters

KNOWS_TWO = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|start|>{{ m.role }}\n{{ m.content | trim }}"
    "<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ANY_ROLE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ANSWER = {"role": "assistant", "content": "yes"}


def said(role: str, content: str = "a") -> dict[str, Any]:
    """What is said occurs in what every template writes around it."""
    return {"role": role, "content": content}


def prompts(tmp_path: Path, *messages: Any, template: str = KNOWS_TWO, more: int = 0) -> RLHFDataset:
    rows = [{"prompt": list(messages)}] * (1 + more)
    return RLHFDataset([write_lines(tmp_path / "rows.jsonl", rows)], char_tokenizer(template), DataConfig())


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([said("system"), said("user")], "leaves out message 1, of role 'system'; it shows user, assistant"),
        ([said("developer"), said("user")], "leaves out message 1, of role 'developer'"),
        ([said("user"), ANSWER, said("tool")], "leaves out message 3, of role 'tool'"),
        ([said("critic")], "leaves out message 1, of role 'critic'"),
        ([said("human")], "message 1 has the role 'human', which the chat template does not know; write user"),
        ([said("User")], "the role 'User', which the chat template does not know; write user"),
        ([said("usr")], "the role 'usr', which the chat template does not know; write user"),
        ([said("user"), said("gpt"), said("user")], "message 2 has the role 'gpt', .* write assistant"),
    ],
)
def test_a_message_that_vanishes_is_told(tmp_path: Path, messages: Any, told: str) -> None:
    with pytest.raises(UserError, match=rf"rows\.jsonl, row 1: .*{told}"):
        prompts(tmp_path, *messages)


def test_misspelled_roles_are_told_where_every_role_is_shown(tmp_path: Path) -> None:
    """The turns of `asistant` would be shown and not learned."""
    with pytest.raises(UserError, match=r"message 2 has the role 'asistant', .*; write assistant"):
        path = write_lines(
            tmp_path / "rows.jsonl", [{"messages": [said("user"), said("asistant"), said("user"), ANSWER]}]
        )
        SftDataset([path], char_tokenizer(ANY_ROLE), SftDataConfig())
    assert len(prompts(tmp_path, said("narrator"), said("user"), template=ANY_ROLE)) == 1
    assert (
        len(prompts(tmp_path, said("ipython"), template=ANY_ROLE.replace("{% if add", "{# 'ipython' #}{% if add"))) == 1
    )


def test_a_served_model_refuses_a_role_that_it_is_not_shown(sort4: Path) -> None:
    answerer = make_answerer(ServeConfig(model=ModelConfig(path=sort4 / "model")), "model")
    answerer.tokenizer.chat_template = KNOWS_TWO
    for role, sound in (("user", True), ("developer", False), ("system", False), ("tool", False)):
        asked = ChatParameters.model_validate({"model": "model", "messages": [said(role), said("user")]})
        if sound:
            assert len(answerer.prompts(asked)) == 1
            continue
        with pytest.raises(RequestError, match=f"leaves out message 1, of role '{role}'; it shows user, assistant"):
            answerer.prompts(asked)
    answerer.engine.close()


def test_a_template_is_asked_once_a_shape_and_not_once_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    differ = shown_messages._differ
    monkeypatch.setattr(shown_messages, "_differ", lambda *given: asked.append(1) or differ(*given))
    template = "{# of this test #}" + ANY_ROLE
    assert len(prompts(tmp_path, said("system"), said("user"), template=template, more=50)) == 51
    assert len(asked) == 2


@needs_trl
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "phi3", "deepseekv3", "llama3_1", "glm4moe", "cohere2"])
@pytest.mark.parametrize("role", ["developer", "human"])
def test_published_templates_with_roles_that_they_do_not_show(name: str, role: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": [said(role), said("user")]}])
    tokenizer = with_template(name)
    if role == "developer" and name == "llama3_1":
        assert len(RLHFDataset([path], tokenizer, DataConfig())) == 1
        return
    with pytest.raises(UserError, match=f"row 1: .*message 1.*role '{role}'"):
        RLHFDataset([path], tokenizer, DataConfig())


@needs_trl
@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
def test_conversations_tell_it_too(name: str) -> None:
    tokens = format_of(with_template(name))
    with pytest.raises(UserError, match=f"{name}: the chat template leaves out message 1, of role 'developer'"):
        tokens.open([said("developer"), said("user")], [])
    prompt = tokens.open([said("system"), said("user")], [])
    with pytest.raises(UserError, match="leaves out message 3, of role 'developer'"):
        tokens.extend(prompt, [said("developer"), said("user")], [])


@needs_trl
def test_results_that_answer_no_call_reach_gemma_4() -> None:
    """Its template leaves out a result whose call could not be read."""
    tokens = format_of(with_template("gemma4"))
    text = tokens.text(
        tokens.open([said("user"), said("assistant", "f("), said("tool", "Broken call"), said("user")], [])
    )
    assert "Broken call" in text
