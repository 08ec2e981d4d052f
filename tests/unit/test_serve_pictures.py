"""Pictures behind the endpoint: in chats, in sessions, and in rows of agents that train by a base URL."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai import OpenAI
from picture_rows import encoded, picture

from examples.one_tool import CALL_TAGS
from examples.tiles.look import TEMPLATE
from examples.tiles.task import draw_weights, write_model
from tandem.batching.packing import demonstrations_to_batch, micro_batches
from tandem.config.data import ImagesConfig
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.config.tree import ServeConfig
from tandem.jobs.serve import EngineAnswerer, make_answerer, make_server
from tandem.pictures.shown import ModelPictures
from tandem.rollout.agents import Access, AgentsWord
from tandem.serving.agent_training import AgentConversations, AgentLimits
from tandem.serving.request_images import RecentPictures
from tandem.serving.server import reserve
from tandem.serving.sessions import Sessions
from tandem.training.fsdp import make_engine
from tandem.types import Demonstration, Picture, Prompt, SamplingParams, Status
from tests.endpoint import TOKEN, running

CALLS = "hermes"
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "required": ["pair"], "properties": {}}},
}


def shown(seed: int, height: int = 28, width: int = 56, **more: Any) -> dict[str, Any]:
    data = base64.b64encode(encoded(picture(height, width, seed))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **more}}


def user(*parts: Any) -> Any:
    said = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": said}


@pytest.fixture(scope="module")
def answerer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineAnswerer]:
    folder = tmp_path_factory.mktemp("serve")
    write_model(folder / "model", "qwen2_5_vl", lambda model: draw_weights(model, 0), TEMPLATE, CALL_TAGS)
    config = ServeConfig.model_validate(
        {"model": {"path": folder / "model"}, "generation": {"max_response_tokens": 12, "temperature": 1.0}}
    )
    made = make_answerer(config, "model", folder / "store")
    made.tokenizer.name_or_path = str(folder / "model")
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def url(answerer: EngineAnswerer) -> Iterator[str]:
    own = reserve("127.0.0.1", 0)
    server = make_server(replace(answerer, calls=CALLS), own, TOKEN, Sessions(60))
    with running([server]):
        yield f"http://127.0.0.1:{own.getsockname()[1]}"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


def test_an_answer_depends_on_the_picture(client: OpenAI) -> None:
    def logprobs(*parts: Any, **how: Any) -> list[float]:
        answer = client.chat.completions.create(
            model="model", messages=[user(*parts)], logprobs=True, temperature=0, max_tokens=4, **how
        )
        content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
        return [token.logprob for token in content or ()]

    first = logprobs(shown(1), "?")
    assert logprobs(shown(1, detail="high"), "?") == pytest.approx(first, abs=1e-5)
    assert logprobs(shown(1), "?", tools=[TOOL], tool_choice="none") != pytest.approx(first, abs=1e-3)
    assert logprobs(shown(2), "?") != pytest.approx(first, abs=1e-3)
    assert logprobs("?", shown(1)) != pytest.approx(first, abs=1e-3)
    answer = client.chat.completions.create(model="model", messages=[user(shown(1, 56, 84), "?")], max_tokens=1)
    assert answer.usage and answer.usage.prompt_tokens == 3 + (1 + 2 * 3 + 1) + 1 + 2 + 3
    chunks = list(client.chat.completions.create(model="model", messages=[user(shown(1))], seed=1, stream=True))
    assert len(chunks) > 2


@pytest.mark.parametrize(
    ("parts", "param", "told"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://a/b.png"}}], "messages[0].content", "nothing is fetched"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/hosts"}}], "messages[0].content", "nothing is"),
        ([{"type": "image_url", "image_url": "data:,"}], "messages[0].content", "give image_url as"),
        ([shown(1, detail="low")], "messages[0].content", "one size"),
        ([{"type": "image", "key": "0" * 64}], "messages[0].content", "alone are understood"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "messages", "are no picture"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}}], "messages", "not base64"),
        ([shown(1, 28, 28 * 250)], "messages", "200 times"),
        ([shown(1), "<|image_pad|>"], "messages", "1 pictures and 2 placeholders"),
    ],
)
def test_pictures_that_cannot_be_shown_are_refused(client: OpenAI, parts: list[Any], param: str, told: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="model", messages=[user(*parts)])
    assert error.value.param == param and told in error.value.message


def decode(rows: Any) -> list[str]:
    return ["" for _ in rows]


def trainers_logprobs(answerer: EngineAnswerer, store: Path, sample: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Of the trained tokens of a session's line."""
    pictures = tuple(Picture(p["key"], (p["rows"], p["columns"]), p["place"]) for p in sample["pictures"])
    prompt_ids, response_ids = (np.array(sample[name], np.int32) for name in ("prompt_ids", "response_ids"))
    row = Demonstration(0, prompt_ids, response_ids, np.array(sample["loss_mask"], np.bool_), pictures)
    model = ModelConfig(path=Path(answerer.tokenizer.name_or_path))
    engine = make_engine(model, FsdpTrainingConfig(), None, pictures=store)
    (outputs,) = engine.forward(micro_batches(demonstrations_to_batch([row]), [0], 1000))
    assert outputs.logprobs_S is not None
    return outputs.logprobs_S.numpy()


def test_pictures_that_nobody_shows_any_more_are_removed(answerer: EngineAnswerer, tmp_path: Path) -> None:
    """What was shown last stays; what has gone is stored again when it comes again."""
    path = Path(answerer.tokenizer.name_or_path)
    measured = ModelPictures(path, ImagesConfig(), tmp_path / "all")
    urls = [shown(seed)["image_url"]["url"] for seed in range(4)]
    keys = [picture.key for picture in measured.prepare(urls, tmp_path)]
    sizes = [measured.store.path(key).stat().st_size for key in keys]
    kept = RecentPictures(tmp_path / "kept", 2 * max(sizes))
    pictures = ModelPictures(path, ImagesConfig(), tmp_path / "kept", store=kept)

    def left(*numbers: int) -> set[int]:
        for number in numbers:
            pictures.prepare([urls[number]], tmp_path)
        return {number for number, key in enumerate(keys) if kept.path(key).exists()}

    assert left(0, 1) == {0, 1}
    assert left(0, 2) == {0, 2}, "0 was shown again"
    assert left(1) == {1, 2} and left(3, 3) == {1, 3}
    assert left(0) == {0, 3} and (kept.read(keys[0]) == measured.store.read(keys[0])).all()
    assert isinstance(answerer.pictures.store if answerer.pictures else None, RecentPictures)


def test_a_session_goes_on_from_what_it_was_shown(url: str, answerer: EngineAnswerer) -> None:
    """In the same tokens, whether the client sends a picture again or another history; the trainer's log-probs of them
    are the engine's, which has kept what it computed."""
    assert answerer.pictures is not None
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as admin:
        key = admin.post("/sessions").json()["key"]
        messages = [user(shown(1), "?")]
        with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            for number in range(3):
                answer = client.chat.completions.create(model="any", messages=messages, max_tokens=6)
                more = user("and", shown(2 + number, 28, 28 + 28 * number))
                messages += [answer.choices[0].message.model_dump(), more]
            rewritten = [user(shown(9), "?"), *messages[1:-2]]  # its text, and how it goes on, are recorded
            client.chat.completions.create(model="any", messages=rewritten, max_tokens=6)
        lines = admin.get(f"/sessions/{key}/samples").json()["samples"]
    assert [len(line["pictures"]) for line in lines] == [3, 3]
    for line in lines:
        ids, coder = np.array(line["prompt_ids"] + line["response_ids"]), answerer.tokenizer
        places = [p["place"] + n for p in line["pictures"] for n in range(p["rows"] * p["columns"])]
        assert np.flatnonzero(ids == coder.convert_tokens_to_ids("<|image_pad|>")).tolist() == places
        mask = np.array(line["loss_mask"])
        found = trainers_logprobs(answerer, answerer.pictures.store.directory, line)
        np.testing.assert_allclose(found, np.array(line["logprobs"])[mask], atol=2e-5)
    first, other = ([one["key"] for one in line["pictures"]] for line in lines)
    assert first[1:] == other[1:] and first[0] != other[0]


class Shows:
    """An agent that sends what its row has."""

    async def run(self, row: Any, text: str, access: Access) -> AgentsWord:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=access.base_url, api_key=access.key, max_retries=0) as client:
            made = await client.chat.completions.create(model="any", messages=row["prompt"], max_tokens=4)
            said = [*row["prompt"], made.choices[0].message.model_dump(), user(shown(4))]
            await client.chat.completions.create(model="any", messages=said, max_tokens=4)
        return AgentsWord(reward=float(row["images"][0].startswith("data:image/png;base64,")))


def test_an_agent_gets_the_pictures_of_its_row(answerer: EngineAnswerer, tmp_path: Path) -> None:
    assert answerer.pictures is not None
    (one,) = answerer.pictures.prepare([encoded(picture(28, 84))], tmp_path)
    asked = [{"type": "image", "key": one.key}, {"type": "text", "text": "?"}]
    row = {"prompt": [{"role": "user", "content": asked}], "images": [one.key]}
    prompt = Prompt(0, np.array([1], np.int32), "?", "default", None, row)
    policy = replace(answerer, calls=CALLS).policy()
    limits = AgentLimits(timeout_s=60, calls=9, at_once=2, retries=0)
    sampling = SamplingParams(max_tokens=60, stop_token_ids=answerer.defaults.stop_token_ids)

    async def answers() -> Any:
        agents = AgentConversations(Shows(), limits, policy, decode)
        await agents.open()
        try:
            return await agents.answer(prompt, [3], sampling)
        finally:
            await agents.close()

    (trajectory,) = asyncio.run(answers())
    assert trajectory.reward == 1 and trajectory.status is Status.COMPLETED
    assert [shown.key for shown in trajectory.prompt.pictures] == [one.key]
    assert answerer.pictures.prepare([answerer.pictures.encoded(one.key)], tmp_path) == [one]
    assert len(trajectory.pictures) == 1
