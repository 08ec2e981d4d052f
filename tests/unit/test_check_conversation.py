"""`tandem check` says what is wrong with conversations; an environment that does not start is no crash of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from picture_rows import picture

from tandem.config.conversation import ConversationConfig
from tandem.config.data import ImagesConfig
from tandem.config.model import ModelConfig
from tandem.jobs.check_conversation import conversation_problems
from tandem.models.loading import load_tokenizer, stop_token_ids
from tandem.pictures.shown import ModelPictures
from tandem.rollout.conversation_images import Lines, stored
from tandem.rollout.formats.for_tokenizer import make_format
from tandem.types import Prompt
from tests.agents import tokenizer
from tests.pictures import make_model

WORLD = """
class World:
    tools, numbers = (), {}

    async def start(self, prompt):
        return {}["the map"]

    async def step(self, answer): ...

    async def close(self): ...
"""


@pytest.mark.parametrize(
    "environment, said",
    [
        ({"user": {"type": "scripted"}}, "data row 0: column `user_turns` (conversation.environment.user.column)"),
        ({"type": "own", "environment": "{0}/world.py:World"}, "world.py"),
    ],
)
def test_an_environment_that_does_not_start_is_a_problem(
    tmp_path: Path, environment: dict[str, object], said: str
) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    filled = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in environment.items()}
    config = ConversationConfig.model_validate({"environment": filled})
    prompt = Prompt(0, np.zeros(1, np.int32), "Go.", "default", None, {"prompt": [{"role": "user", "content": "Go."}]})
    (problem,) = conversation_problems(config, ModelConfig(path=tmp_path), tokenizer(), [prompt], 1024)
    assert problem.startswith("an environment does not start: ") and said in problem
    assert "/tandem/" not in problem, "none of the frames that led to the user's code"


SPEAKS_FIRST = """
class World:
    tools, numbers = (), {}

    async def start(self, prompt):
        return [{"role": "user", "content": "You stand in a wood. " * 8}]

    async def step(self, answer): ...

    async def close(self): ...
"""


def test_an_opening_longer_than_prompts_may_be_is_a_problem(tmp_path: Path) -> None:
    """Memory is planned by `data.max_prompt_tokens`, and what a world says nobody knows before it is asked."""
    (tmp_path / "world.py").write_text(SPEAKS_FIRST)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    world = {"type": "own", "environment": f"{tmp_path}/world.py:World"}
    config = ConversationConfig.model_validate({"environment": world})
    prompts = [Prompt(n, np.zeros(1, np.int32), "Go.", "default", None, {"prompt": "Go."}) for n in (4, 5)]
    (problem,) = conversation_problems(config, ModelConfig(path=tmp_path), tokenizer(), prompts, 100)
    assert problem.startswith("data row 4: its conversation opens with 1")
    assert "data.max_prompt_tokens is 100, and memory is planned by it" in problem
    assert not list(conversation_problems(config, ModelConfig(path=tmp_path), tokenizer(), prompts, 200))


SHOWS_PICTURE = """
class World:
    tools, numbers = (), {}

    async def start(self, prompt):
        return [{"role": "user", "content": [{"type": "image", "image": "PICTURE"}, {"type": "text", "text": "?"}]}]

    async def step(self, answer): ...

    async def close(self): ...
"""


def test_a_picture_that_an_environment_shows_is_as_long_as_its_tokens(tmp_path: Path) -> None:
    """And not one token, as the template has it."""
    model = ModelConfig(path=make_model("qwen2_5_vl", tmp_path / "model"))
    picture(seed=3).save(tmp_path / "picture.png")
    (tmp_path / "world.py").write_text(SHOWS_PICTURE.replace("PICTURE", str(tmp_path / "picture.png")))
    config = ConversationConfig.model_validate(
        {"environment": {"type": "own", "environment": f"{tmp_path}/world.py:World"}}
    )
    pictures = ModelPictures(model.path, ImagesConfig(), tmp_path / "pictures")
    prompt = Prompt(0, np.zeros(1, np.int32), "Go.", "default", None, {"prompt": "Go."})
    read = load_tokenizer(model)
    messages = stored(
        [
            {
                "role": "user",
                "content": [{"type": "image", "image": str(tmp_path / "picture.png")}, {"type": "text", "text": "?"}],
            }
        ],
        pictures,
    )
    tokens = len(Lines(make_format(read, stop_token_ids(model, read)), pictures).open(messages, ()).ids)
    (problem,) = conversation_problems(config, model, read, [prompt], tokens - 1, pictures)
    assert f"its conversation opens with {tokens:,} tokens" in problem
    assert not list(conversation_problems(config, model, read, [prompt], tokens, pictures))


def test_the_row_of_an_agent_is_not_what_it_asks(tmp_path: Path) -> None:
    """Who says nothing of how long the policy's prompts are: a plain text may become anything."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "agent.py").write_text("async def agent(row): ...")
    config = ConversationConfig.model_validate(
        {"environment": {"type": "endpoint", "function": f"{tmp_path}/agent.py:agent"}}
    )
    prompt = Prompt(0, np.zeros(1, np.int32), "Go.", "default", None, {"prompt": "Go."})
    assert not list(conversation_problems(config, ModelConfig(path=tmp_path), tokenizer(), [prompt], 3))
