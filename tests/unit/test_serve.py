"""The endpoint over real HTTP, on the native engine."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tandem.config.tree import ModelConfig
from tandem.jobs.serve import listen, make_endpoint

TOKEN = "a token"


@pytest.fixture(scope="module")
def address(sort4: Path) -> Iterator[str]:
    endpoint, engine = make_endpoint(ModelConfig(path=sort4 / "model"), "native")
    endpoint._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    loop = Thread(target=endpoint.loop.run_forever)
    loop.start()
    with closing(listen(endpoint, "127.0.0.1", 0, TOKEN)) as server:
        server.close = server.server_close  # type: ignore[method-assign]
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
    endpoint.loop.call_soon_threadsafe(endpoint.loop.stop)
    loop.join()
    endpoint.loop.close()
    engine.close()


def ask(url: str, body: dict[str, Any] | None = None, token: str = TOKEN) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Authorization": f"Bearer {token}"})) as answer:
        return json.loads(answer.read())


def refusal(url: str, body: dict[str, Any] | None = None, token: str = TOKEN) -> tuple[int, str]:
    with pytest.raises(HTTPError) as error:
        ask(url, body, token)
    with error.value as answer:
        return answer.code, json.loads(answer.read())["error"]["message"]


def test_completions_of_text_ids_and_messages_agree(address: str) -> None:
    how = {"max_tokens": 6, "n": 3, "seed": 5, "logprobs": True}
    text = ask(f"{address}/v1/completions", {"prompt": "4821=", **how})
    chat = ask(f"{address}/v1/chat/completions", {"messages": [{"role": "user", "content": "4821="}], **how})
    assert [choice["index"] for choice in text["choices"]] == [0, 1, 2]
    for one, other in zip(text["choices"], chat["choices"], strict=True):
        assert one["text"] == other["message"]["content"] and one["token_ids"] == other["token_ids"]
        assert one["logprobs"]["token_logprobs"] == [pair["logprob"] for pair in other["logprobs"]["content"]]
        assert len(one["token_ids"]) <= 6 and one["finish_reason"] in ("stop", "length")
    assert text["usage"]["prompt_tokens"] == 5
    assert text["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in text["choices"])
    ids = [20 + int(digit) for digit in "4821"]
    other = ask(f"{address}/v1/completions", {"prompt": ids, **how})
    assert other["usage"]["prompt_tokens"] == 4
    assert other["object"] == "text_completion" and chat["object"] == "chat.completion"


def test_nobody_is_answered_without_the_token(address: str) -> None:
    assert refusal(f"{address}/v1/models", token="another")[0] == 401
    assert refusal(f"{address}/v1/completions", {"prompt": "1="}, token="")[0] == 401
    assert ask(f"{address}/v1/models")["data"][0]["id"] == "model"


def test_what_cannot_be_answered_is_refused_with_the_reason(address: str) -> None:
    path = f"{address}/v1/completions"
    assert refusal(path, {"prompt": "1=", "stream": True}) == (400, "stream: answers come whole; leave it out")
    assert refusal(path, {"messages": []})[0] == 400
    assert "temperature" in refusal(path, {"prompt": "1=", "temperature": -1})[1]
    assert "positions" in refusal(path, {"prompt": "1=", "max_tokens": 100_000})[1]
    assert refusal(f"{address}/v1/else", {})[0] == 404
