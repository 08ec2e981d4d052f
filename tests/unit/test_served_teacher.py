"""A served teacher: log-probs over HTTP are the model's own, several requests at once, failures that are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tandem.batching.packing import demonstrations_to_batch
from tandem.config.model import ModelConfig
from tandem.config.teacher import TeacherConfig
from tandem.config.tree import ServeConfig
from tandem.controller.placed import Placed
from tandem.controller.teacher import ServedTeacher
from tandem.errors import UserError, WorkerLost
from tandem.jobs.serve import make_answerer
from tandem.types import Batch, Demonstration
from tests.conftest import ROOT
from tests.endpoint import TOKEN, served

ROWS = [("4821=", "1248"), ("97=", "79"), ("30=", "0"), ("5=", "15234")]
Answering = Callable[[dict[str, Any], int], tuple[int, Any]]
"""(body, number of the request) -> (status, answer)."""


@pytest.fixture(scope="module")
def tokenizer(sort4: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(sort4 / "model")


@pytest.fixture(scope="module")
def url(sort4: Path) -> Iterator[str]:
    """`tandem serve` with the task's model."""
    answerer = make_answerer(ServeConfig(model=ModelConfig(path=sort4 / "model")), "teacher")
    with served(answerer) as (url,):
        yield url
    answerer.engine.close()


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", TOKEN)


def batch_of(tokenizer: PreTrainedTokenizerBase) -> Batch:
    """In the second row a token is no token of the policy's."""
    rows: list[Demonstration] = []
    for number, (prompt, response) in enumerate(ROWS):
        ids = [np.array(tokenizer.encode(text), np.int32) for text in (prompt, response)]
        mask = np.ones(len(ids[1]), dtype=np.bool_)
        mask[0] = number != 1
        rows.append(Demonstration(number, *ids, mask))
    return demonstrations_to_batch(rows)


def made(
    url: str,
    tokenizer: PreTrainedTokenizerBase,
    top_k: int = 0,
    watch: Callable[[float], None] = lambda _: None,
    **given: Any,
) -> ServedTeacher:
    config = TeacherConfig(url=url, model="teacher", api_key_env="TEACHER_KEY", **given)
    return ServedTeacher(config, tokenizer, watch, top_k, longest=24)


@contextmanager
def endpoint(answer: Answering) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server of another kind, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"token": self.headers["Authorization"]})
            status, answered = answer(body, len(asked))
            sent = json.dumps(answered).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def vllm(tokenizer: PreTrainedTokenizerBase) -> Answering:
    """What vLLM's server answers: ranks besides, and the sampled token after the likeliest ones."""

    def answer(body: dict[str, Any], number: int) -> tuple[int, Any]:
        entries: list[Any] = [None]
        for token in body["prompt"][1:]:
            ids = [*(one for one in (7, 3, 5) if one != token)][: body["prompt_logprobs"]]
            told = {one: {"logprob": -1.0 - place, "rank": place + 1} for place, one in enumerate(ids)}
            told[token] = {"logprob": -6.5, "rank": 12}
            entries.append({str(one): {**how, "decoded_token": tokenizer.decode([one])} for one, how in told.items()})
        return 200, {"choices": [{"index": 0, "text": "x", "prompt_logprobs": entries}]}

    return answer


def test_log_probs_are_the_teachers_own_forward(sort4: Path, url: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Several requests at once, by token id, of trained tokens alone; the likeliest tokens, too."""
    batch, k = batch_of(tokenizer), 6
    teacher = made(url, tokenizer, top_k=k)
    with Placed(batch) as placed:
        logprobs = teacher.logprobs(placed.rows(fills=("teacher_logprobs",)))
        top = teacher.top_logprobs(placed.rows(fills=("teacher_top_ids", "teacher_top_logprobs")))
        logprobs_T, (ids_TK, top_TK) = logprobs.get(), top.get()
    assert batch.tokens.teacher_logprobs is logprobs_T and batch.tokens.teacher_top_ids is ids_TK
    model = AutoModelForCausalLM.from_pretrained(sort4 / "model").eval()
    place = 0
    for prompt, response in ROWS:
        ids = tokenizer.encode(prompt) + tokenizer.encode(response)
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for number in range(len(prompt), len(ids)):
            if batch.loss_mask[place]:
                assert logprobs_T[place] == pytest.approx(rows[number - 1, ids[number]].item(), abs=1e-4)
                expected = rows[number - 1].topk(k)
                assert ids_TK[place].tolist() == expected.indices.tolist()
                np.testing.assert_allclose(top_TK[place], expected.values, atol=1e-4)
            else:
                assert logprobs_T[place] == 0 and not top_TK[place].any()
            place += 1
    assert place == len(logprobs_T) == 12 and batch.loss_mask.sum() == 11


def test_vllms_server_is_asked_by_token_id_with_the_token(tokenizer: PreTrainedTokenizerBase) -> None:
    batch, watched = batch_of(tokenizer), []
    with endpoint(vllm(tokenizer)) as (url, asked), Placed(batch) as placed:
        teacher = made(url, tokenizer, top_k=2, watch=watched.append)
        assert {tuple(body["prompt"][:1]) for body in asked} == {(0,)} and all(
            len(body["prompt"]) <= 24 for body in asked
        )
        probed = {token for body in asked for token in body["prompt"]}
        assert probed == set(range(99)), "a small vocabulary is looked at as a whole"
        asked.clear()
        logprobs_T = teacher.logprobs(placed.rows(fills=("teacher_logprobs",))).get()
        ids_TK, top_TK = teacher.top_logprobs(placed.rows(fills=("teacher_top_ids", "teacher_top_logprobs"))).get()
    assert (logprobs_T[batch.loss_mask] == -6.5).all() and watched
    assert (top_TK[batch.loss_mask] == [-1.0, -2.0]).all() and set(ids_TK[batch.loss_mask].ravel()) <= {3, 5, 7}
    assert sorted(len(body["prompt"]) for body in asked) == sorted([9, 5, 4, 7] * 2)
    assert {body["token"] for body in asked} == {f"Bearer {TOKEN}"}


def test_as_many_requests_as_are_allowed_are_under_way(tokenizer: PreTrainedTokenizerBase) -> None:
    """Each waits for another one: fewer than two at once would never be answered."""
    together, answer = threading.Barrier(2, timeout=60), vllm(tokenizer)
    most = [0, 0]

    def waiting(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if body["prompt"][0] != 0:
            most[0] += 1
            most[1] = max(most)
            together.wait()
            most[0] -= 1
        return answer(body, number)

    batch = batch_of(tokenizer)
    with endpoint(waiting) as (url, _), Placed(batch) as placed:
        made(url, tokenizer, concurrency=2).logprobs(placed.rows(fills=("teacher_logprobs",))).get()
    assert most[1] == 2


def test_a_server_that_is_down_ends_the_run_after_the_attempts(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    batch, answer = batch_of(tokenizer), vllm(tokenizer)
    failing = {"probes": 0}

    def overloaded(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if body["prompt"][0] == 0:
            failing["probes"] += 1
            return answer(body, number) if failing["probes"] % 2 else (503, {"error": "busy"})
        return 503, {"error": "overloaded"}

    with endpoint(overloaded) as (url, asked), Placed(batch) as placed:
        teacher = made(url, tokenizer, attempts=3, concurrency=1)
        assert failing["probes"] > 5, "a request that fails once is tried again"
        asked.clear()
        future = teacher.logprobs(placed.rows(fills=("teacher_logprobs",)))
        with pytest.raises(
            UserError, match=r"algorithm.teacher: http.* no answer in 3 of 3 attempts; .* status 503.*--resume RUN"
        ):
            future.get()
        assert batch.tokens.teacher_logprobs is None


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({}, "does not tell prompt_logprobs: 2 of every token"),
        ({"prompt_logprobs": None}, "does not tell prompt_logprobs: 2 of every token"),
        ({"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}, "does not tell prompt_logprobs: 2 of every token"),
        ({"prompt_logprobs": [None, *[{"3": -1.0, "4": -2.0}] * 23]}, "does not tell prompt_logprobs: 2 of every"),
        ({"prompt_logprobs": [None, *[{"x": {"logprob": None}}] * 23]}, "does not tell prompt_logprobs: 2 of every"),
    ],
)
def test_a_server_that_cannot_tell_is_refused_at_the_start(
    tokenizer: PreTrainedTokenizerBase, entry: dict[str, Any], reason: str
) -> None:
    with endpoint(lambda body, number: (200, {"choices": [entry]})) as (url, _), pytest.raises(UserError, match=reason):
        made(url, tokenizer, top_k=2)


def test_other_tokens_other_models_and_more_tokens_than_it_tells_are_refused_at_the_start(
    sort4: Path, url: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    longer = AutoTokenizer.from_pretrained(sort4 / "model")
    longer.add_tokens(["<extra>"])
    with pytest.raises(UserError, match=r"status 400: .*99.*It was asked about tokens of the policy's tokenizer"):
        made(url, longer)
    with pytest.raises(UserError, match=r"status 400: .*prompt_logprobs"):
        made(url, tokenizer, top_k=50)
    with pytest.raises(UserError, match="status 401"):
        ServedTeacher(TeacherConfig(url=url, model="teacher", api_key_env="NO_SUCH_KEY"), tokenizer, lambda _: None)
    with pytest.raises(UserError, match=r"status 404: .*this endpoint serves 'teacher'"):
        ServedTeacher(TeacherConfig(url=url, model="other", api_key_env="TEACHER_KEY"), tokenizer, lambda _: None)
    swapped = AutoTokenizer.from_pretrained(sort4 / "model")
    swapped.decode = lambda ids, **_: "c" if ids == [70] else tokenizer.decode(ids)
    with pytest.raises(UserError, match=r"is not the policy's: token 70 is .* there and 'c' here"):
        made(url, swapped)


def test_a_likely_token_that_the_tokenizer_does_not_have_is_none_of_the_likeliest(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The rows of a padded vocabulary are no tokens, and a model may find them likely all the same."""
    answer = vllm(tokenizer)

    def padded(body: dict[str, Any], number: int) -> tuple[int, Any]:
        status, told = answer(body, number)
        for one in told["choices"][0]["prompt_logprobs"][1:]:
            one[str(len(tokenizer) + 2)] = {"logprob": -0.5, "decoded_token": ""}
        return status, told

    batch = batch_of(tokenizer)
    with endpoint(padded) as (url, _), Placed(batch) as placed:
        teacher = made(url, tokenizer, top_k=2)
        ids_TK, top_TK = teacher.top_logprobs(placed.rows(fills=("teacher_top_ids", "teacher_top_logprobs"))).get()
    assert (top_TK[batch.loss_mask] == [-np.inf, -1.0]).all()
    assert not ids_TK[batch.loss_mask, 0].any() and set(ids_TK[batch.loss_mask, 1]) <= {3, 7}


def test_a_worker_that_is_lost_meanwhile_is_not_the_teachers_fault(tokenizer: PreTrainedTokenizerBase) -> None:
    def lost(seconds: float) -> None:
        raise WorkerLost("rank 1 is gone")

    batch = batch_of(tokenizer)
    with endpoint(vllm(tokenizer)) as (url, _), Placed(batch) as placed:
        teacher = made(url, tokenizer, watch=lost)
        with pytest.raises(WorkerLost, match=r"^rank 1 is gone$"):
            teacher.logprobs(placed.rows(fills=("teacher_logprobs",))).get()


def test_a_program_that_is_interrupted_does_not_wait_for_the_server(sort4: Path) -> None:
    """Neither for the requests that are under way, nor for those that wait for their turn."""
    program = f"""
import os, signal
from transformers import AutoTokenizer
from tandem.controller.placed import Placed
from tests.unit.test_served_teacher import batch_of, made

def interrupt(_):
    raise KeyboardInterrupt

tokenizer = AutoTokenizer.from_pretrained({str(sort4 / "model")!r})
batch = batch_of(tokenizer)
with Placed(batch) as placed:
    made(os.environ["URL"], tokenizer, watch=interrupt, concurrency=2).logprobs(
        placed.rows(fills=("teacher_logprobs",))
    ).get()
"""
    tokenizer = AutoTokenizer.from_pretrained(sort4 / "model")
    answer, over = vllm(tokenizer), threading.Event()

    def never(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if body["prompt"][0] != 0:
            over.wait()
        return answer(body, number)

    with endpoint(never) as (url, asked):
        try:
            environment = {**os.environ, "URL": url, "PYTHONPATH": str(ROOT)}
            ended = subprocess.run(
                [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100
            )
        finally:
            over.set()
        begun = sum(body["prompt"][0] != 0 for body in asked)
    assert "KeyboardInterrupt" in ended.stderr and begun <= 2
