"""The endpoint over real HTTP, on the native engine."""

import json
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tandem.config.tree import ModelConfig
from tandem.jobs.serve import Endpoint, listen, make_endpoint

TOKEN = "a token"


@pytest.fixture(scope="module")
def endpoint(sort4: Path) -> Iterator[Endpoint]:
    endpoint, engine = make_endpoint(ModelConfig(path=sort4 / "model"), "native")
    endpoint._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    loop = Thread(target=endpoint.loop.run_forever)
    loop.start()
    yield endpoint
    endpoint.loop.call_soon_threadsafe(endpoint.loop.stop)
    loop.join()
    endpoint.loop.close()
    engine.close()


@pytest.fixture(scope="module")
def address(endpoint: Endpoint) -> Iterator[str]:
    with closing(listen(endpoint, "127.0.0.1", 0, TOKEN)) as server:
        server.close = server.server_close  # type: ignore[method-assign]
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def endless(endpoint: Endpoint) -> Iterator[None]:
    """No token ends an answer."""
    endpoint._stop_ids, kept = (), endpoint._stop_ids
    yield
    endpoint._stop_ids = kept


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
    assert "positions" in refusal(path, {"prompt": "1=", "max_tokens": 100_000, "stream": True})[1]
    assert refusal(path, {"messages": []})[0] == 400
    assert "temperature" in refusal(path, {"prompt": "1=", "temperature": -1})[1]
    assert "positions" in refusal(path, {"prompt": "1=", "max_tokens": 100_000})[1]
    assert refusal(f"{address}/v1/else", {})[0] == 404


def events(url: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
    with urlopen(Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {TOKEN}"})) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        for line in answer:
            if line == b"data: [DONE]\n":
                return
            if line != b"\n":
                yield json.loads(line.removeprefix(b"data: "))
    raise AssertionError("no [DONE]")


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("completions", {"prompt": "4821="}), ("chat/completions", {"messages": [{"role": "user", "content": "4821="}]})],
)
def test_a_stream_is_the_answer_in_pieces(path: str, prompt: dict[str, Any], address: str, endless: None) -> None:
    url, how = f"{address}/v1/{path}", {**prompt, "temperature": 0, "max_tokens": 40, "n": 2, "logprobs": True}
    whole, chunks = ask(url, how), list(events(url, {**how, "stream": True}))
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        text = "".join(part["text"] if "text" in part else part["delta"]["content"] for part in parts)
        assert text == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert [len(part["token_ids"]) for part in parts] == [16, 16, 8]
        assert [part["finish_reason"] for part in parts] == [None, None, "length"]


def test_a_stream_ends_where_the_answer_does_and_keeps_its_seed(address: str) -> None:
    url, how = f"{address}/v1/completions", {"prompt": "4821=", "max_tokens": 400, "seed": 3, "stream": True}
    first, second = ([c["choices"][0] for c in events(url, how)] for _ in range(2))
    assert [piece["token_ids"] for piece in first] == [piece["token_ids"] for piece in second]
    assert first[-1]["finish_reason"] == "stop"
    (whole,) = events(url, {**how, "max_tokens": 40, "stop": ["no such text"]})  # in one piece
    assert len(whole["choices"][0]["token_ids"]) > 16


def test_nothing_is_generated_for_a_client_that_left(address: str, endpoint: Endpoint, endless: None) -> None:
    made: Any = endpoint._engine
    stream = events(
        f"{address}/v1/completions", {"prompt": "4821=", "n": 16, "max_tokens": 480, "temperature": 0, "stream": True}
    )
    next(stream)
    stream.close()
    started = made._prompts
    while made._rows or made._waiting:
        time.sleep(0.005)
    pieces_left_out = 16 * 480 // 16 - (made._prompts - started)
    assert pieces_left_out > 100
    ask(f"{address}/v1/completions", {"prompt": "4821=", "max_tokens": 4})
