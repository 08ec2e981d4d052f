"""`tandem serve --capture`: the native engine behind sessions, and chats with tools outside of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
import torch
from openai import OpenAI
from test_formats_template import chatml

from tandem.errors import UserError
from tandem.generation.fake import FakeEngine
from tandem.jobs.serve import EngineAnswerer, make_server
from tandem.serving.server import reserve
from tandem.serving.sessions import Sessions
from tandem.types import SamplingParams
from tests.agents import ADD, stop_id, tokenizer
from tests.endpoint import TOKEN, running

ASKED: list[Any] = [{"role": "user", "content": "1 + 2?"}]


def an_answerer(coder: Any, stop: int) -> EngineAnswerer:
    """Every token is as probable as any other."""
    engine = FakeEngine(torch.zeros(len(coder), len(coder)), tokenizer=coder)
    engine.load_weights(0, None)
    return EngineAnswerer(engine, coder, "model", SamplingParams(max_tokens=20, stop_token_ids=(stop,)))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    own = reserve("127.0.0.1", 0)
    server = make_server(an_answerer(tokenizer(), stop_id()), own, TOKEN, Sessions(60))
    with running([server]):
        yield f"http://127.0.0.1:{own.getsockname()[1]}"


def test_what_the_engine_sampled_is_what_the_trainer_is_told(url: str) -> None:
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as admin:
        key = admin.post("/sessions").json()["key"]
        messages, made = list(ASKED), list[list[int]]()
        with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            for _ in range(3):
                answer = client.chat.completions.create(model="any", messages=messages, seed=len(made))
                made.append(answer.choices[0].model_extra["token_ids"])  # type: ignore[index]
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
        told = admin.get(f"/sessions/{key}/samples").json()
        (sample,) = told["samples"]
        kept = [token for token, mask in zip(sample["response_ids"], sample["loss_mask"], strict=True) if mask]
        assert kept == [token for ids in made for token in ids] and {
            version for version in sample["versions"] if version >= 0
        } == {0}
        logprobs = [one for one, mask in zip(sample["logprobs"], sample["loss_mask"], strict=True) if mask]
        assert logprobs == pytest.approx([-math.log(len(tokenizer()))] * len(kept), abs=1e-5)


def test_without_a_session_the_endpoint_is_as_it_is_without_sessions(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client:
        assert client.models.retrieve("model").id == "model"
        assert client.completions.create(model="model", prompt="1", max_tokens=3).usage
        chunks = list(client.chat.completions.create(model="model", messages=ASKED, stream=True, seed=1))
        assert len(chunks) > 3
        how: dict[str, Any] = {"messages": ASKED, "tools": [ADD], "seed": 1}
        once, again = (client.chat.completions.create(model="model", **how) for _ in range(2))
        assert once.choices == again.choices and once.usage and once.usage.prompt_tokens > 100
        *chunks, _ = client.chat.completions.create(model="model", stream=True, **how)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == (once.choices[0].message.content or "")
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", **how)


def test_a_model_that_can_hold_no_conversation_is_refused_at_once() -> None:
    coder = chatml("{{ messages[0].content }}")
    reserved = reserve("127.0.0.1", 0)
    with reserved, pytest.raises(UserError, match="chat template"):
        make_server(an_answerer(coder, int(coder.eos_token_id)), reserved, TOKEN, Sessions(60))
