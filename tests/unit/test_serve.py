"""The endpoint under the real `openai` client, over real loopback sockets, on the native engine."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import openai
import pytest
import torch
from openai import OpenAI
from openai.types import Completion, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from test_serving_text import bytes_tokenizer

from tandem.config.model import ModelConfig
from tandem.config.tree import ServeConfig
from tandem.errors import EngineError, UserError
from tandem.generation.fake import FakeEngine
from tandem.jobs import serve as jobs_serve
from tandem.jobs.serve import EngineAnswerer, make_answerer
from tandem.serving import parameters
from tandem.serving.app import make_app
from tandem.serving.server import Server, reserve
from tandem.types import SamplingParams
from tests.endpoint import TOKEN, served, wait_until

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def answerer(sort4: Path) -> Iterator[EngineAnswerer]:
    made = make_answerer(ServeConfig(model=ModelConfig(path=sort4 / "model")), "model")
    made.tokenizer.chat_template = TEMPLATE
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def urls(answerer: EngineAnswerer) -> Iterator[list[str]]:
    """The endpoint, and one whose answers no token ends."""
    endless = replace(answerer, name="endless", defaults=replace(answerer.defaults, stop_token_ids=()))
    with served(answerer, endless) as urls:
        yield urls


@pytest.fixture(scope="module")
def client(urls: list[str]) -> Iterator[OpenAI]:
    with OpenAI(base_url=urls[0], api_key=TOKEN, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def endless(urls: list[str]) -> Iterator[OpenAI]:
    with OpenAI(base_url=urls[1], api_key=TOKEN, max_retries=0) as client:
        yield client


def complete(client: OpenAI, prompt: Any = "4821=", **how: Any) -> Completion:
    model = "endless" if client.models.list().data[0].id == "endless" else "model"
    return client.completions.create(**{"model": model, "prompt": prompt, "max_tokens": 24, **how})


def chat(client: OpenAI, content: Any = "4821=", **how: Any) -> Any:
    model = client.models.list().data[0].id
    messages: Any = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return client.chat.completions.create(**{"model": model, "messages": messages, **how})


def refusal(ask: Callable[[], Any]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as error:
        ask()
    assert set(error.value.body) == {"message", "type", "param", "code"}  # type: ignore[call-overload]
    return error.value


# What is asked is answered.


def test_text_is_completed_as_the_published_interface_says(client: OpenAI, answerer: EngineAnswerer) -> None:
    answer = complete(client, n=3, seed=5, logprobs=0)
    assert answer.object == "text_completion" and answer.model == "model" and answer.id.startswith("cmpl-")
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    made = [choice.model_extra["token_ids"] for choice in answer.choices]  # type: ignore[index]
    assert answer.usage is not None and answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == sum(map(len, made)) == answer.usage.total_tokens - 5
    for choice, ids in zip(answer.choices, made, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == len(ids)
        assert max(logprobs.token_logprobs) < 0
        for token, offset, number in zip(logprobs.tokens, logprobs.text_offset, ids, strict=True):
            assert choice.text[offset:].startswith(token) or number in answerer.tokenizer.all_special_ids


def test_a_chat_is_answered_with_a_message(client: OpenAI) -> None:
    answer = chat(client, "4821=", seed=5, max_completion_tokens=24, logprobs=True)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    message = answer.choices[0].message
    assert message.role == "assistant" and message.content == complete(client, seed=5).choices[0].text
    for token in answer.choices[0].logprobs.content:
        assert bytes(token.bytes).decode() == token.token and token.logprob < 0 and token.top_logprobs == []
    parts = [{"role": "user", "content": [{"type": "text", "text": "48"}, {"type": "text", "text": "21="}]}]
    assert chat(client, parts, seed=5, max_tokens=24).choices[0].message.content == message.content
    again = [{"role": "user", "content": "1="}, message.model_dump(), {"role": "user", "content": "2="}]
    assert chat(client, again, max_tokens=1).usage.prompt_tokens == 2 + len(message.content) + 2


def test_greedy_has_one_answer_and_seeds_have_their_own(client: OpenAI) -> None:
    for how in ({"temperature": 0}, {"top_p": 0}, {"extra_body": {"top_k": 1}}):
        greedy = complete(client, n=2, **how)
        assert greedy.choices[0].text == greedy.choices[1].text == complete(client, temperature=0).choices[0].text
    seeded = [complete(client, seed=seed).choices[0].text for seed in (1, 1, -1, 2**63 - 1, -(2**63))]
    assert seeded[0] == seeded[1] and len(set(seeded)) == 4
    assert len({choice.text for choice in complete(client, n=4).choices}) == 4
    assert [c.text for c in complete(client, seed=1, n=3).choices][:2] == [
        c.text for c in complete(client, seed=1, n=2).choices
    ]


@pytest.mark.parametrize("prompts", [["4821=", "7=", "365="], [[5, 6, 7], [9], [8, 8]]], ids=["texts", "ids"])
def test_a_list_of_prompts_is_answered_as_each_would_be_alone(client: OpenAI, prompts: list[Any]) -> None:
    answer = complete(client, prompts, n=2, seed=3, echo=True)
    assert [choice.index for choice in answer.choices] == list(range(6))
    alone = [complete(client, prompt, n=2, seed=3, echo=True) for prompt in prompts]
    assert [c.text for c in answer.choices] == [c.text for one in alone for c in one.choices]
    assert answer.usage and answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)


def test_max_tokens_0_with_echo_gives_the_prompt_back(client: OpenAI) -> None:
    answer = complete(client, ["4821=", "7="], max_tokens=0, echo=True, n=2)
    assert [choice.text for choice in answer.choices] == ["4821=", "4821=", "7=", "7="]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 0)
    assert complete(client, max_tokens=0).choices[0].text == ""
    ids = complete_ids(client, "7x1=")
    assert complete(client, ids, max_tokens=0, echo=True).choices[0].text == "7x1="
    pieces = complete(client, "7=", max_tokens=0, echo=True, stream=True)
    assert [(p.choices[0].text, p.choices[0].finish_reason) for p in pieces] == [("7=", "length")]


def test_without_max_tokens_text_gets_16_and_a_chat_what_the_configuration_says_or_has_room(
    client: OpenAI, endless: OpenAI, answerer: EngineAnswerer
) -> None:
    short = endless.completions.create(model="endless", prompt="4821=")
    assert short.usage and short.usage.completion_tokens == 16
    assert answerer.defaults.max_tokens == 1024 and answerer.limits.positions == 512
    assert chat(endless, "4821=").usage.total_tokens == 512


def test_stop_strings_are_cut_from_the_text(endless: OpenAI) -> None:
    free = complete(endless, seed=3, max_tokens=40).choices[0].text
    for stop in (free[5:8], [free[20:22], free[5:8]], [free[5:8], "no such text"]):
        (choice,) = complete(endless, seed=3, max_tokens=40, stop=stop).choices
        assert choice.text == free[:5] and choice.finish_reason == "stop"
        streamed = list(complete(endless, seed=3, max_tokens=40, stop=stop, stream=True))
        assert "".join(piece.choices[0].text for piece in streamed) == free[:5]
        assert streamed[-1].choices[0].finish_reason == "stop"
    unmet = complete(endless, seed=3, max_tokens=40, stop=[free[-2:] + "x"])
    assert unmet.choices[0].text == free and unmet.choices[0].finish_reason == "length"


HOW = [
    {"prompt": "4821=", "n": 3, "seed": 7, "max_tokens": 40},
    {"prompt": ["4821=", "7="], "n": 2, "seed": 7, "max_tokens": 40, "logprobs": 0, "echo": False},
    {"prompt": [[5, 6], [7]], "seed": 7, "max_tokens": 300, "temperature": 0.7, "top_p": 0.9, "echo": True},
    {"prompt": ["4821=", "7="], "n": 2, "seed": 7, "max_tokens": 20, "logprobs": 2, "echo": True},
    {"prompt": [[5, 6], [7]], "max_tokens": 0, "logprobs": 1, "echo": True},
    {"prompt": "4821=", "seed": 8, "max_tokens": 200, "stop": ["1", "23", "ab"]},
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_seeded_stream_of_text_is_the_seeded_answer(client: OpenAI, how: dict[str, Any]) -> None:
    whole = complete(client, **how)
    chunks = list(complete(client, **how, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"text_completion"}
    *chunks, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        ids = [token for part in parts for token in part.model_extra["token_ids"]]
        assert ids == choice.model_extra["token_ids"]  # type: ignore[index]
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        if how.get("logprobs") is not None:
            for name in ("tokens", "text_offset"):
                assert [x for part in parts for x in getattr(part.logprobs, name)] == getattr(choice.logprobs, name)
            for name in ("token_logprobs", "top_logprobs"):
                together = [x for part in parts for x in getattr(part.logprobs, name)]
                for one, other in zip(together, getattr(choice.logprobs, name), strict=True):
                    assert one == (None if other is None else pytest.approx(other, abs=2e-5))


def test_the_most_probable_tokens_are_told(client: OpenAI) -> None:
    (text,) = complete(client, seed=4, logprobs=3).choices
    answer = chat(client, seed=4, max_tokens=24, logprobs=True, top_logprobs=3)
    assert text.logprobs and text.logprobs.top_logprobs and text.logprobs.tokens and text.logprobs.token_logprobs
    content = answer.choices[0].logprobs.content
    assert len(content) == len(text.logprobs.tokens) == 24
    for place, token in enumerate(content):
        named = text.logprobs.top_logprobs[place]
        assert [top.token for top in token.top_logprobs] == list(named)[:3] and len(named) in (3, 4)
        assert named[text.logprobs.tokens[place]] == pytest.approx(text.logprobs.token_logprobs[place], abs=1e-5)
        assert sorted(named.values(), reverse=True)[:3] == [top.logprob for top in token.top_logprobs]
        assert all(bytes(top.bytes).decode() == top.token for top in token.top_logprobs)


@pytest.mark.parametrize("new", [0, 1, 5])
def test_an_echo_with_log_probs_scores_the_prompt(client: OpenAI, endless: OpenAI, new: int) -> None:
    """As evaluations ask that compare answers by their likelihood; a greedy answer has the same scores itself."""
    answer = complete(endless, temperature=0, max_tokens=12, logprobs=0).choices[0]
    ids = [*complete_ids(client, "4821="), *answer.model_extra["token_ids"]]  # type: ignore[index]
    asked = complete(endless, [ids, ids[:3]], max_tokens=new, echo=True, logprobs=1, temperature=0)
    scored = asked.choices[0].logprobs
    assert scored and scored.token_logprobs and scored.top_logprobs and scored.tokens and scored.text_offset
    assert len(scored.tokens) == 17 + new and (scored.token_logprobs[0], scored.top_logprobs[0]) == (None, None)
    assert answer.logprobs and answer.logprobs.token_logprobs
    assert scored.token_logprobs[5:17] == pytest.approx(answer.logprobs.token_logprobs, abs=2e-5)
    for token, top in zip(scored.tokens[5:17], scored.top_logprobs[5:17], strict=True):
        assert token == max(top, key=lambda name: top[name])
    assert [asked.choices[0].text[offset] for offset in scored.text_offset[:5]] == list("4821=")
    assert len(asked.choices[1].logprobs.tokens) == 3 + new  # type: ignore[union-attr, arg-type]
    assert asked.usage and asked.usage.completion_tokens == 2 * new
    as_text = complete(client, "4821=", max_tokens=new, echo=True, logprobs=0).choices[0].logprobs
    assert (
        as_text
        and as_text.token_logprobs
        and as_text.token_logprobs[1:5] == pytest.approx(scored.token_logprobs[1:5], abs=2e-5)
    )


def test_the_prompts_log_probs_come_by_token_id_where_they_are_asked_for_so(client: OpenAI) -> None:
    asked = complete(client, "4821=", max_tokens=1, extra_body={"prompt_logprobs": 2}).choices[0]
    scored = complete(client, "4821=", max_tokens=0, echo=True, logprobs=2).choices[0].logprobs
    assert asked.text != "4821=" and asked.model_extra and scored and scored.token_logprobs and scored.top_logprobs
    first, *told = asked.model_extra["prompt_logprobs"]
    assert first is None and len(told) == 4
    for one, token, logprob, top in zip(
        told, complete_ids(client, "821="), scored.token_logprobs[1:], scored.top_logprobs[1:], strict=True
    ):
        assert one[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-6)
        assert {name["decoded_token"] for name in one.values()} == set(top) and len(one) >= 2
    for how in ({"logprobs": 1}, {"stream": True}):
        error = refusal(lambda how=how: complete(client, extra_body={"prompt_logprobs": 2, **how}))
        assert (error.status_code, error.param, error.code) == (400, "prompt_logprobs", "invalid_value")


def complete_ids(client: OpenAI, text: str) -> list[int]:
    """The tokens of a text, which are its letters."""
    listed = [complete(client, [[token] for token in range(99)], max_tokens=0, echo=True).choices]
    letters = {choice.text: choice.index for choices in listed for choice in choices}
    return [letters[letter] for letter in text]


def test_a_seeded_stream_of_a_chat_is_the_seeded_answer(client: OpenAI) -> None:
    how: dict[str, Any] = {"n": 2, "seed": 9, "max_completion_tokens": 40, "stop": ["7"]}
    how |= {"logprobs": True, "top_logprobs": 2}
    whole = chat(client, **how)
    chunks = list(chat(client, **how, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    for choice in whole.choices:
        opening, *parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert (opening.delta.role, opening.delta.content) == ("assistant", "")
        assert "".join(part.delta.content for part in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason
        logprobs = [token.logprob for part in parts for token in part.logprobs.content]
        assert logprobs == pytest.approx([token.logprob for token in choice.logprobs.content], abs=2e-5)


def test_a_stream_comes_as_it_is_made_and_costs_what_the_answer_costs(
    endless: OpenAI, answerer: EngineAnswerer
) -> None:
    """A row of the model for each token, however long the stream is."""
    rows: list[int] = []
    engine: Any = answerer.engine
    engine.load_weights(0, None)  # nothing is kept of the prompt
    hook = engine._model.register_forward_pre_hook(lambda _module, inputs: rows.append(inputs[0].shape[1]))
    stream = complete(endless, max_tokens=400, stream=True)
    first = next(iter(stream))
    computed_at_first = len(rows)
    rest = list(stream)
    hook.remove()
    assert len(first.choices[0].model_extra["token_ids"]) == 1 and computed_at_first < 200
    assert len(rest) == 399 and sum(rows) == 5 + 399


# What cannot be answered is refused by name.


@pytest.fixture
def scripted() -> Iterator[OpenAI]:
    """An endpoint whose model says `a`, a special token and `b` in turn, everything else being impossible."""
    tokenizer = bytes_tokenizer()
    a, b = tokenizer.encode("ab")
    logits = torch.full((len(tokenizer), len(tokenizer)), float("-inf"))
    logits[:, a] = logits[a, tokenizer.eos_token_id] = logits[tokenizer.eos_token_id, b] = 0
    logits[a, a] = logits[tokenizer.eos_token_id, a] = float("-inf")
    engine = FakeEngine(logits, tokenizer=tokenizer)
    engine.load_weights(0, None)
    made = EngineAnswerer(engine, tokenizer, "model", SamplingParams())
    with served(made) as (url,), OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
        yield client


def test_tokens_behind_a_stop_text_that_special_tokens_hide_from_the_engine_are_not_counted(scripted: OpenAI) -> None:
    whole = complete(scripted, "c", max_tokens=12, stop=["ab"])
    assert whole.choices[0].text == "" and len(whole.choices[0].model_extra["token_ids"]) == 3  # type: ignore[index]
    assert whole.usage is not None and whole.usage.completion_tokens == 3
    options: Any = {"include_usage": True}
    *_, last = complete(scripted, "c", max_tokens=12, stop=["ab"], stream=True, stream_options=options)
    assert last.usage == whole.usage


def test_tokens_that_cannot_be_have_the_published_least_log_prob(scripted: OpenAI) -> None:
    logprobs = complete(scripted, "cb", max_tokens=2, logprobs=2, echo=True).choices[0].logprobs
    assert logprobs and logprobs.token_logprobs == [None, -9999.0, 0.0, 0.0]
    assert logprobs.top_logprobs and -9999.0 in logprobs.top_logprobs[2].values()
    pieces = list(complete(scripted, "c", max_tokens=2, logprobs=2, stream=True))
    assert pieces[0].choices[0].logprobs and -9999.0 in pieces[0].choices[0].logprobs.top_logprobs[0].values()


def test_a_token_id_outside_the_vocabulary_fails_nobody_else(endless: OpenAI) -> None:
    def ask(prompt: list[int]) -> Any:
        return complete(endless, prompt, max_tokens=300)

    with ThreadPoolExecutor(12) as pool:
        sound = [pool.submit(ask, [5, 6, 7]) for _ in range(8)]
        unsound = [pool.submit(ask, ids) for ids in ([5, 99], [10_000], [-1], [2**40])]
        for future in unsound:
            error = future.exception()
            assert isinstance(error, openai.BadRequestError)
            assert error.param == "prompt" and error.code == "invalid_value" and "token id" in error.message
        for future in sound:
            assert len(future.result().choices[0].model_extra["token_ids"]) == 300


SAMPLES: dict[str, Any] = {
    "audio": {"format": "mp3", "voice": "alloy"},
    "best_of": 4,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"5": 100},
    "metadata": {"a": "b"},
    "modalities": ["audio"],
    "moderation": {"model": "m"},
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": -1.0,
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "service_tier": "priority",
    "store": True,
    "suffix": "x",
    "verbosity": "low",
    "web_search_options": {},
}
"""Of each parameter that is refused, something that asks for it."""


def published(params: Any) -> set[str]:
    streaming = next(kind for name, kind in vars(params).items() if name.endswith("ParamsStreaming"))
    return set(get_type_hints(streaming))


ENDPOINTS = {
    "completions": (completion_create_params, parameters.CompletionParameters, parameters.NEUTRAL_IN_COMPLETIONS),
    "chat": (chat_create_params, parameters.ChatParameters, parameters.NEUTRAL_IN_CHATS),
}


@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
def test_each_published_parameter_holds_or_is_refused_by_name(endpoint: str, client: OpenAI) -> None:
    params, kind, neutral = ENDPOINTS[endpoint]
    ask = complete if endpoint == "completions" else chat
    assert published(params) <= set(kind.model_fields) | set(neutral)
    for name in sorted(set(neutral) | ({"best_of"} if endpoint == "completions" else set())):
        error = refusal(lambda name=name: ask(client, extra_body={name: SAMPLES[name]}))
        assert (error.status_code, error.param, error.code) == (400, name, "unsupported_parameter"), name
        assert name in error.message
        for value in neutral.get(name, (1,)):
            ask(client, max_tokens=1, extra_body={name: value})
        ask(client, max_tokens=1, extra_body={name: None})


@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
def test_the_page_says_of_each_parameter_what_the_endpoint_does(endpoint: str) -> None:
    params, kind, neutral = ENDPOINTS[endpoint]
    heading = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[endpoint]
    section = PAGE.read_text(encoding="utf-8").partition(f"### `{heading}`")[2].partition("\n### ")[0]
    told = {name: verdict.strip() for name, verdict in re.findall(r"^\| `(\w+)` \|([^|]+)\|", section, re.MULTILINE)}
    assert set(told) == published(params)
    refused = {name for name, verdict in told.items() if verdict == "refused"}
    assert refused == set(neutral) | ({"best_of"} if endpoint == "completions" else set())
    assert set(told) - refused <= set(kind.model_fields)


USUAL: dict[str, Any] = {
    "min_p": 0, "repetition_penalty": 1.0, "top_k": -1, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "logit_bias": {}, "n": 1, "best_of": 1, "user": "ada", "seed": 3, "stream_options": {"include_usage": False},
    "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "stop_token_ids": [], "length_penalty": 1.0, "use_beam_search": False, "include_stop_str_in_output": False,
    "return_token_ids": False, "bad_words": [], "priority": 0,
}  # fmt: skip
"""What clients of vLLM's server send without asking for anything."""


@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
def test_what_changes_nothing_passes(endpoint: str, client: OpenAI) -> None:
    ask = complete if endpoint == "completions" else chat
    of_chat = {"chat_template_kwargs": {}, "add_generation_prompt": True}
    more: dict[str, Any] = {} if endpoint == "completions" else of_chat
    plain = ask(client, max_tokens=4, seed=3)
    usual = ask(client, max_tokens=4, extra_body={**USUAL, **more})
    assert usual.choices[0].token_ids == plain.choices[0].token_ids
    assert getattr(usual.choices[0], "prompt_token_ids", None) is None


@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
@pytest.mark.parametrize(
    ("name", "value"),
    [("min_p", 0.1), ("repetition_penalty", 1.1), ("ignore_eos", True), ("min_tokens", 1), ("stop_token_ids", [1])],
)
def test_what_vllm_alone_does_is_refused_by_name(endpoint: str, client: OpenAI, name: str, value: Any) -> None:
    ask = complete if endpoint == "completions" else chat
    error = refusal(lambda: ask(client, extra_body={name: value}))
    assert (error.status_code, error.param, error.code) == (400, name, "unsupported_parameter")


def test_the_tokens_of_the_prompt_come_where_they_are_wanted(client: OpenAI) -> None:
    wanted = {"return_token_ids": True}
    text: Any = complete(client, [[5, 6], [7]], max_tokens=2, n=2, extra_body=wanted)
    assert [choice.prompt_token_ids for choice in text.choices] == [[5, 6], [5, 6], [7], [7]]
    whole = chat(client, max_tokens=2, extra_body=wanted)
    first, *others = chat(client, max_tokens=2, stream=True, extra_body=wanted)
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens and first.prompt_token_ids == whole.prompt_token_ids
    assert all(getattr(chunk, "prompt_token_ids", None) is None for chunk in others)
    chunks = complete(client, max_tokens=2, stream=True, extra_body=wanted)
    told = [getattr(chunk.choices[0], "prompt_token_ids", None) for chunk in chunks]
    assert told[0] and not any(told[1:])


def test_the_chat_template_reads_what_a_request_gives_it(client: OpenAI, answerer: EngineAnswerer) -> None:
    """And no word of it tells the tokenizer what to do."""
    answerer.tokenizer.chat_template = TEMPLATE + "{% if digits %}{{ digits }}{% endif %}"
    try:
        plain = chat(client, max_tokens=1).usage.prompt_tokens
        longer = chat(client, max_tokens=1, extra_body={"chat_template_kwargs": {"digits": "123"}})
    finally:
        answerer.tokenizer.chat_template = TEMPLATE
    assert longer.usage.prompt_tokens == plain + 3
    error = refusal(lambda: chat(client, extra_body={"chat_template_kwargs": {"tokenize": True}}))
    assert (error.status_code, error.param) == (400, "chat_template_kwargs") and "'tokenize'" in error.message
    calls = {"tools": [{"type": "function", "function": {"name": "f"}}], "chat_template_kwargs": {"a": 1}}
    error = refusal(lambda: chat(client, extra_body=calls))
    assert (error.status_code, error.param, error.code) == (400, "chat_template_kwargs", "unsupported_parameter")


def test_unknown_and_unsound_parameters_are_refused_by_name(client: OpenAI) -> None:
    for name, value, code in (
        ("nonsense", 1, "unknown_parameter"),
        ("temperature", 2.5, "invalid_value"),
        ("temperature", "1", "invalid_value"),
        ("temperature", True, "invalid_value"),
        ("temperature", 1e-45, "invalid_value"),
        ("temperature", -0.5, "invalid_value"),
        ("top_k", 2**63, "invalid_value"),
        ("top_p", -0.1, "invalid_value"),
        ("n", 0, "invalid_value"),
        ("max_tokens", -1, "invalid_value"),
        ("max_tokens", 1.5, "invalid_value"),
        ("stop", ["a"] * 33, "invalid_value"),
        ("stop", [""], "invalid_value"),
        ("seed", 2**63, "invalid_value"),
        ("logprobs", 6, "invalid_value"),
        ("stream_options", {"include_usage": True}, "invalid_value"),
        ("prompt", [], "invalid_value"),
        ("prompt", ["a", [1]], "invalid_value"),
        ("prompt", {"a": 1}, "invalid_value"),
        ("prompt", None, "missing_required_parameter"),
        ("prompt", "", "invalid_value"),
        ("model", None, "missing_required_parameter"),
    ):
        error = refusal(lambda name=name, value=value: complete(client, extra_body={name: value}))
        assert (error.status_code, error.type, error.code) == (400, "invalid_request_error", code), error
        assert error.param in (name, f"{name}[0]") and name in error.message, error
    for how in ({"top_logprobs": 2}, {"top_logprobs": 21, "logprobs": True}):
        assert refusal(lambda how=how: chat(client, **how)).param == "top_logprobs"
    error = refusal(lambda: complete(client, temperature=-1, n=0))
    assert "temperature: " in error.message and "; n: " in error.message


def test_unsound_messages_are_refused_by_place(client: OpenAI) -> None:
    image, elsewhere = ({"type": "image_url", "image_url": {"url": url}} for url in ("data:,", "https://a/b.png"))
    for messages, param in (
        ([], "messages"),
        ([{"role": "user", "content": [image]}], "messages"),  # the model sees none
        ([{"role": "user", "content": [elsewhere]}], "messages[0].content"),
        ([{"role": "system", "content": [image]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "tool", "tool_call_id": "1"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}], "messages[0].tool_calls[0].id"),
        (
            [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ):
        error = refusal(lambda messages=messages: chat(client, messages))
        assert error.status_code == 400 and error.param == param, error
    error = refusal(lambda: chat(client, max_tokens=5, max_completion_tokens=5))
    assert error.param == "max_tokens"


def test_what_is_too_long_is_refused_before_anything_is_generated(client: OpenAI, answerer: EngineAnswerer) -> None:
    engine: Any = answerer.engine
    started = engine._rows._histories
    for stream in (False, True):
        error = refusal(lambda stream=stream: complete(client, ["1=", "4821="], max_tokens=509, stream=stream))
        assert (error.status_code, error.param, error.code) == (400, "prompt", "context_length_exceeded")
        assert "512 positions" in error.message and "5 tokens in the prompt and 509" in error.message
    assert refusal(lambda: chat(client, "1" * 512)).code == "context_length_exceeded"
    assert engine._rows._histories == started, "the first of the two prompts would have fitted"


def test_a_prompt_that_takes_all_positions_is_scored(client: OpenAI) -> None:
    """As long as nothing is to come after it: the log-probs are those of the same tokens in a shorter prompt."""
    prompt = ("4821=1248" * 57)[:512]
    scored = {"max_tokens": 0, "echo": True, "logprobs": 1}
    full, shorter = (complete(client, text, **scored).choices[0] for text in (prompt, prompt[:511]))
    assert full.text == prompt and full.logprobs is not None and shorter.logprobs is not None
    ours, theirs = full.logprobs.token_logprobs, shorter.logprobs.token_logprobs
    assert ours is not None and theirs is not None and len(ours) == 512
    assert ours[1:511] == pytest.approx(theirs[1:], abs=1e-4) and ours[511] is not None and ours[511] < 0
    for more in ({"prompt": prompt + "4"}, {"prompt": prompt, "max_tokens": 1}):
        given = {"prompt": prompt, **scored, **more}
        error = refusal(lambda given=given: complete(client, **given))
        assert error.code == "context_length_exceeded", error


def test_another_model_does_not_exist(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "tandem"
    for ask in (
        lambda: complete(client, extra_body={"model": "gpt-4o"}),
        lambda: chat(client, extra_body={"model": "gpt-4o"}),
        lambda: client.models.retrieve("gpt-4o"),
    ):
        error = refusal(ask)
        assert isinstance(error, openai.NotFoundError) and error.code == "model_not_found" and error.param == "model"


def test_a_model_without_a_chat_template_says_so(answerer: EngineAnswerer, client: OpenAI) -> None:
    answerer.tokenizer.chat_template = None
    try:
        assert "no chat template" in refusal(lambda: chat(client)).message
        answerer.tokenizer.chat_template = "{{ raise_exception('users first') }}"
        assert "users first" in refusal(lambda: chat(client)).message
        answerer.tokenizer.chat_template = "{{ 1 / 0 }}"
        error = refusal(lambda: chat(client))
        assert error.status_code == 400 and "chat template failed" in error.message and "division" in error.message
    finally:
        answerer.tokenizer.chat_template = TEMPLATE


def test_nobody_is_answered_without_the_token(urls: list[str]) -> None:
    for key in ("another", TOKEN + "x", TOKEN[:-1]):
        with OpenAI(base_url=urls[0], api_key=key, max_retries=0) as stranger:
            for ask in (stranger.models.list, lambda: complete(stranger), lambda: chat(stranger)):
                error = refusal(ask)
                assert isinstance(error, openai.AuthenticationError) and error.code == "invalid_api_key"


def raw(
    url: str, method: str, path: str, body: bytes | None = None, authorization: str = f"Bearer {TOKEN}"
) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection(urlsplit(url).netloc)
    connection.request(method, path, body, {"Authorization": authorization})
    with connection.getresponse() as answer:
        told = json.loads(answer.read())
    connection.close()
    return answer.status, told


def test_bodies_and_paths_that_are_none_are_refused_in_the_same_shape(urls: list[str]) -> None:
    for method, path, body, status, code in (
        ("POST", "/v1/completions", b"{", 400, "invalid_json"),
        ("POST", "/v1/completions", b"[]", 400, "invalid_json"),
        ("POST", "/v1/completions", b"\xff\xfe", 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', 400, "invalid_json"),
        ("POST", "/v1/completions", b"[" * 100_000 + b"]" * 100_000, 400, "invalid_json"),
        ("POST", "/v1/completions", b" " * (16 * 2**20 + 1), 413, "body_too_long"),
        ("GET", "/v1/completions", None, 405, "unknown_url"),
        ("GET", "/v1/embeddings", None, 404, "unknown_url"),
        ("GET", "/else", None, 404, "unknown_url"),
    ):
        found, told = raw(urls[0], method, path, body)
        assert (found, told["error"]["code"]) == (status, code), (path, told)
        assert set(told["error"]) == {"message", "type", "param", "code"}


def test_bearer_is_read_in_small_letters(urls: list[str]) -> None:
    assert raw(urls[0], "GET", "/v1/models", authorization=f"bearer {TOKEN}")[0] == 200


def test_options_that_are_null_are_as_if_left_out() -> None:
    assert parameters.StreamOptions.model_validate({"include_usage": None}) == parameters.StreamOptions()


# What one request may ask for.


def test_a_request_may_ask_for_so_many_samples_and_no_more(client: OpenAI, urls: list[str]) -> None:
    for how, param in (({"prompt": ["4821="] * 2049}, "prompt"), ({"prompt": ["4"] * 17, "n": 128}, "prompt")):
        error = refusal(lambda how=how: complete(client, **how))
        assert (error.status_code, error.param, error.code) == (400, param, "too_many_samples")
        assert "2,048 samples" in error.message and "send several requests" in error.message
    ids = [[5]] * 100_000
    status, told = raw(urls[0], "POST", "/v1/completions", json.dumps({"model": "model", "prompt": ids}).encode())
    assert status == 400 and "100,000 prompts" in told["error"]["message"]
    assert len(complete(client, ["4821="] * 40, n=2, max_tokens=1).choices) == 80


def test_a_body_full_of_mistakes_is_refused_in_few_words(urls: list[str]) -> None:
    body = {"model": "model", "messages": [{"role": "nobody"}] * 4000}
    status, told = raw(urls[0], "POST", "/v1/chat/completions", json.dumps(body).encode())
    assert status == 400 and "more" in told["error"]["message"] and len(told["error"]["message"]) < 5000
    body = {"model": "x" * 10**6, "prompt": "4821="}
    status, told = raw(urls[0], "POST", "/v1/completions", json.dumps(body).encode())
    assert status == 404 and len(told["error"]["message"]) < 5000
    body = {"model": "model", "messages": [{"role": "user", "content": "1="}] * 5000}
    assert raw(urls[0], "POST", "/v1/chat/completions", json.dumps(body).encode())[0] == 400


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_tokenised(
    client: OpenAI, answerer: EngineAnswerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = type(answerer.tokenizer).encode

    def watched(tokenizer: Any, text: str, **how: Any) -> Any:
        lengths.append(len(text))
        return encode(tokenizer, text, **how)

    monkeypatch.setattr(type(answerer.tokenizer), "encode", watched)
    for ask in (lambda: complete(client, "4821=" * 2_000_000), lambda: chat(client, "4821=" * 2_000_000)):
        error = refusal(ask)
        assert error.status_code == 400 and error.code == "context_length_exceeded", error
        assert "512 positions" in error.message and "more than" in error.message
    assert 0 < sum(lengths) < 100_000


# The life of the server.


def test_a_long_text_keeps_nobody_waiting(
    answerer: EngineAnswerer, urls: list[str], client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, arrived, released = jobs_serve.encode, threading.Event(), threading.Event()

    def encode_slowly(tokenizer: Any, text: str, **how: Any) -> list[int]:
        if text == "8214=":
            arrived.set()
            assert released.wait(60)
        return encode(tokenizer, text, **how)

    monkeypatch.setattr(jobs_serve, "encode", encode_slowly)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(complete, client, "8214=")
        assert arrived.wait(60)
        assert complete(client).choices[0].finish_reason  # the first token may end it, so there may be no text
        released.set()
        assert slow.result().choices[0].finish_reason


def test_a_client_that_leaves_in_its_body_is_no_failure(answerer: EngineAnswerer) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    asyncio.run(make_app(answerer, TOKEN)(scope, receive, send))
    assert sent[0]["status"] == 499


def test_health_needs_no_token_and_says_whether_answers_fail_but_not_why(
    answerer: EngineAnswerer, urls: list[str]
) -> None:
    assert raw(urls[0], "GET", "/health") == (200, {"status": "ok"})

    class Broken(EngineAnswerer):
        def generate(self, request: Any) -> Any:
            return self._fail()

        stream = generate

        async def _fail(self) -> Any:
            raise EngineError("the engine is broken")
            yield

    broken = Broken(answerer.engine, answerer.tokenizer, "model", answerer.defaults)
    with served(broken) as (url,), OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
        error = refusal(lambda: complete(client))
        assert isinstance(error, openai.InternalServerError) and error.code == "engine_error"
        with pytest.raises(openai.APIError, match="the engine is broken"):
            list(complete(client, stream=True))
        assert raw(url, "GET", "/health") == (503, {"status": "failing"})
        complete(client, max_tokens=0)
        assert raw(url, "GET", "/health")[0] == 200


@pytest.mark.parametrize("stream", [False, True], ids=["answer", "stream"])
def test_what_a_client_that_left_has_asked_is_ended_in_the_engine(
    endless: OpenAI, urls: list[str], answerer: EngineAnswerer, stream: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    engine: Any = answerer.engine
    body = json.dumps({"model": "endless", "prompt": ["4821=", "7="], "n": 8, "max_tokens": 480, "stream": stream})
    address = urlsplit(urls[1])
    for _ in range(3):
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: len(engine._rows) == 16)
        wait_until(lambda: not engine._rows and not engine._waiting)
        assert int(engine._rows.state["made"].max()) < 470, "they were dropped, not finished"
    after = complete(endless, max_tokens=20).usage
    assert after is not None and after.completion_tokens == 20
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("stream", [False, True], ids=["answer", "stream"])
def test_a_server_that_stops_ends_what_it_has_begun(answerer: EngineAnswerer, stream: bool) -> None:
    endless = replace(answerer, defaults=replace(answerer.defaults, stop_token_ids=()))
    engine: Any = answerer.engine
    outcome: list[openai.APIError] = []

    def ask(client: OpenAI) -> None:
        with pytest.raises(openai.APIError) as error:
            list(complete(client, n=16, max_tokens=500, stream=stream))
        outcome.append(error.value)

    with served(endless) as (url,):
        client = OpenAI(base_url=url, api_key=TOKEN, max_retries=0)
        asking = threading.Thread(target=ask, args=(client,))
        asking.start()
        wait_until(lambda: len(engine._rows) == 16)
    asking.join()
    client.close()
    assert "the server is stopping" in outcome[0].message
    assert stream or (isinstance(outcome[0], openai.InternalServerError) and outcome[0].status_code == 503)


def test_a_port_in_use_and_a_host_that_is_none_are_the_users_mistakes() -> None:
    taken = reserve("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(UserError, match=r"--port \d+: .*in use.*--port another"):
        reserve("127.0.0.1", taken.getsockname()[1])
    taken.close()
    with pytest.raises(UserError, match=r"--host no\.such\.host\.invalid"):
        reserve("no.such.host.invalid", 0)


def test_a_reserved_port_hears_nobody_until_there_is_a_model() -> None:
    with reserve("127.0.0.1", 0) as reserved, pytest.raises(ConnectionRefusedError):
        socket.create_connection(reserved.getsockname())


def test_an_ipv6_address_is_told_as_urls_have_it() -> None:
    told: list[str] = []
    with reserve("::1", 0) as reserved:

        async def start() -> None:
            server = Server(lambda *_: None, reserved, on_start=told.append)  # type: ignore[arg-type, return-value]
            server.stop()
            await server.run_until_stopped()

        asyncio.run(start())
    assert told and told[0].startswith("http://[::1]:")
