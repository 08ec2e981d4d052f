"""Users that answer the policy: words of the data, verl's interactions, a model behind OpenAI's interface."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.conversation import ConversationConfig, ToolsEnvironmentConfig
from tandem.errors import UserError
from tandem.rollout.conversation import Conversations
from tandem.rollout.environment import Answer, EnvironmentFailed, Reply, ToolCall
from tandem.rollout.formats.for_tokenizer import make_format
from tandem.rollout.make import make_environments
from tandem.types import Prompt, SamplingParams, Trajectory
from tests.agents import ScriptedEngine, stop_id, tokenizer

INTERACTIONS = """
class Guessing:
    def __init__(self, config):
        self.config, self.state = config, {}
    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.state[instance_id] = ground_truth
        return instance_id
    async def generate_response(self, instance_id, messages, **kwargs):
        said = next(m["content"] for m in reversed(messages) if m["role"] == "assistant")
        right = said == self.state[instance_id]
        return right, "That's it." if right else self.config["wrong"], float(right), {}
    async def calculate_score(self, instance_id, **kwargs):
        return 0.0
    async def finalize_interaction(self, instance_id, **kwargs):
        del self.state[instance_id]
"""
FILE = """
interaction:
  - {name: other, class_name: published_interactions.Guessing, config: {wrong: no}}
  - {name: guess, class_name: published_interactions.Guessing, config: {wrong: Not yet.}}
"""


def converse(user: dict[str, Any], row: dict[str, Any], *answers: str, tools: tuple[Any, ...] = ()) -> Any:
    """The replies to `answers`, and what closing gave."""
    prompt = Prompt(5, np.zeros(1, np.int32), "?", "default", None, row)
    config = ToolsEnvironmentConfig.model_validate({"tools": tools, "user": user})

    async def run() -> tuple[list[Reply], float | None]:
        environments = make_environments(config)
        await environments.open()
        environment = environments.make(prompt)
        await environment.start(prompt)
        replies = [
            await environment.step(Answer("", (ToolCall("c", "f", {}),)) if text == "<call>" else Answer(text))
            for text in answers
        ]
        closing = await environment.close()
        await environments.close()
        return replies, closing

    return asyncio.run(run())


def said(replies: list[Reply]) -> list[list[Any]]:
    return [[(message["role"], message["content"]) for message in reply.messages] for reply in replies]


def test_a_scripted_user_says_what_the_row_lists() -> None:
    replies, closing = converse({"type": "scripted"}, {"prompt": "Hi", "user_turns": ["And?", "Why?"]}, "a", "b", "c")
    assert said(replies) == [[("user", "And?")], [("user", "Why?")], []] and closing is None


def test_a_row_without_the_words_is_told() -> None:
    with pytest.raises(EnvironmentFailed, match=r"data row 5: column `words` .* is no list of strings"):
        converse({"type": "scripted", "column": "words"}, {"prompt": "Hi"}, "a")


def test_tools_answer_calls_and_the_user_everything_else(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text('def f() -> int:\n    """Seven."""\n    return 7\n')
    row = {"prompt": "Hi", "user_turns": ["And?"]}
    tools = (f"{tmp_path}/tool.py:f",)
    replies, _ = converse({"type": "scripted"}, row, "<call>", "a", "<call>", "b", tools=tools)
    assert said(replies) == [[("tool", "7")], [("user", "And?")], [("tool", "7")], []]


@pytest.fixture(scope="module")
def interactions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("interactions")
    (folder / "published_interactions.py").write_text(INTERACTIONS)
    (folder / "interactions.yaml").write_text(FILE)
    sys.path.insert(0, str(folder))
    yield folder / "interactions.yaml"
    sys.path.remove(str(folder))


def test_verl_s_interactions_run_as_they_are(interactions: Path) -> None:
    row = {"prompt": "Guess.", "extra_info": {"interaction_kwargs": {"name": "guess", "ground_truth": "7"}}}
    replies, closing = converse({"type": "verl", "path": interactions}, row, "6", "7")
    assert said(replies) == [[("user", "Not yet.")], []] and closing is None
    assert [reply.reward for reply in replies] == [0.0, 1.0]


def test_a_row_that_names_another_interaction_is_told(interactions: Path) -> None:
    row = {"prompt": "Guess.", "extra_info": {"interaction_kwargs": {"name": "guss"}}}
    with pytest.raises(EnvironmentFailed, match="there is no interaction 'guss', only other, guess"):
        converse({"type": "verl", "path": interactions}, row, "6")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: []", "has no list `interaction`"),
        (FILE.replace("Guessing", "Gone"), "there is no class"),
        ("[", "while"),
    ],
)
def test_files_that_cannot_be_used_are_told(interactions: Path, text: str, message: str) -> None:
    bad = interactions.with_name("bad.yaml")
    bad.write_text(text)
    with pytest.raises(UserError, match=message):
        converse({"type": "verl", "path": bad}, {"prompt": ""})


class Customer(BaseHTTPRequestHandler):
    """A model that plays the user: it notes what it was asked, and says the next of `words`."""

    asked: list[Any] = []  # noqa: RUF012 - of the test
    words: list[str | int] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers["authorization"], body))
        word = self.words.pop(0)
        if isinstance(word, int):
            self.send_error(word)
            return
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": word}}
        answer = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setenv("CUSTOMER_KEY", "secret")
    Customer.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Customer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {
        "type": "model",
        "base_url": f"http://127.0.0.1:{server.server_port}/v1",
        "model": "customer",
        "api_key_env": "CUSTOMER_KEY",
        "instructions": "You want {thing}. Say [DONE] when you have it.",
    }
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_plays_the_user_and_sees_both_sides_with_their_roles_exchanged(model: dict[str, Any]) -> None:
    Customer.words[:] = ["A red one.", "Thanks! [DONE]"]
    replies, _ = converse(model, {"prompt": "Shop.", "thing": "a car"}, "Which?", "Here.")
    assert said(replies) == [[("user", "A red one.")], []]
    path, key, body = Customer.asked[1]
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "customer")
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("system", "You want a car. Say [DONE] when you have it."),
        ("assistant", "Shop."),
        ("user", "Which?"),
        ("assistant", "A red one."),
        ("user", "Here."),
    ]


def test_a_model_that_fails_once_is_asked_again_and_twice_is_the_world_s_failure(model: dict[str, Any]) -> None:
    Customer.words[:] = [500, "A red one."]
    assert said(converse(model, {"prompt": "Shop.", "thing": "a car"}, "Which?")[0]) == [[("user", "A red one.")]]
    Customer.words[:] = [500, 500]
    with pytest.raises(Exception, match="500"):
        converse(model, {"prompt": "Shop.", "thing": "a car"}, "Which?")


def trajectory_with(user: dict[str, Any], row: dict[str, Any]) -> Trajectory:
    """Of a policy that says `6`, then `7`."""
    section = ConversationConfig.model_validate({"environment": {"user": user}, "calls": "hermes"})
    engine = ScriptedEngine(lambda text: "7" if "6<|im_end|>" in text else "6")
    prompt = Prompt(5, np.zeros(1, np.int32), "?", "default", None, row)

    async def run() -> list[Trajectory]:
        environments = make_environments(section.environment)
        tokens = make_format(tokenizer(), [stop_id()], "hermes")
        decode = tokenizer().batch_decode
        conversations = Conversations(section, environments, tokens, engine.generate, decode, lambda: 1000)
        await environments.open()
        answers = await conversations.answer(prompt, [1], SamplingParams(max_tokens=500, stop_token_ids=(stop_id(),)))
        await environments.close()
        return answers

    (trajectory,) = asyncio.run(run())
    return trajectory


@pytest.mark.parametrize("kind", ["scripted", "verl", "model"])
def test_a_user_s_words_are_never_trained_on(kind: str, interactions: Path, model: dict[str, Any]) -> None:
    Customer.words[:] = ["Not yet.", "Thanks! [DONE]"]
    users = {"scripted": {"type": "scripted"}, "verl": {"type": "verl", "path": interactions}, "model": model}
    guess = {"interaction_kwargs": {"name": "guess", "ground_truth": "7"}}
    row = {"prompt": "Guess.", "user_turns": ["Not yet."], "thing": "a car", "extra_info": guess}
    trajectory = trajectory_with(users[kind], row)
    assert "Not yet." in trajectory.text
    trained = tokenizer().decode(trajectory.response_ids[trajectory.loss_mask])
    assert trained == "6<|im_end|>7<|im_end|>"
    assert not trajectory.rollout_logprobs[~trajectory.loss_mask].any()


def test_what_a_model_needs_is_told_at_the_start(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFailed, match="cannot be filled in: KeyError\\('thing'\\)"):
        converse(model, {"prompt": "Shop."}, "Which?")
    monkeypatch.delenv("CUSTOMER_KEY")
    with pytest.raises(UserError, match="the environment has no variable CUSTOMER_KEY"):
        converse(model, {"prompt": "Shop."}, "Which?")


def test_an_environment_in_which_nobody_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="give tools or a user"):
        ToolsEnvironmentConfig.model_validate({})
