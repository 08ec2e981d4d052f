"""A teacher that is served: log-probs of the student's answers over HTTP, by token id.

    rows of the step --a request each, several at once--> /v1/completions, prompt_logprobs --> columns of the batch

vLLM's server and `tandem serve` answer so. Every request is tried again while that may help; then the run stops.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from concurrent.futures import Future as Reply
from itertools import chain
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np

from tandem.config.teacher import TeacherConfig
from tandem.controller.placed import PlacedRows
from tandem.controller.worker_groups import Future
from tandem.errors import TandemError, UserError
from tandem.http import RequestThreads, post_json
from tandem.types import Batch, FloatArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBED = 256
"""Tokens whose text the server is asked for, to tell the tokenizers apart."""
_PATIENCE_S = 0.05
_UNFINISHED = "\ufffd"
"""What the text of a part of a letter has, which servers may show as more of the letter."""


class Told(NamedTuple):
    """What the server says of one token."""

    logprob: float
    text: str | None

    @classmethod
    def of(cls, entry: Any) -> Told:
        text = entry.get("decoded_token")
        return cls(float(entry["logprob"]), None if text is None else str(text))


class Scored(NamedTuple):
    """What the teacher says of some tokens."""

    logprobs: FloatArray
    """`[tokens]`"""
    top_ids: IntArray
    """`[tokens, k]`"""
    top_logprobs: FloatArray
    """`[tokens, k]`, falling; minus infinity of a token that the tokenizer does not have, whose id is 0 then."""


class ServedTeacher:
    """What answers as a role's group of workers does; nothing waits for it before `get`."""

    def __init__(
        self,
        config: TeacherConfig,
        tokenizer: PreTrainedTokenizerBase,
        watch: Callable[[float], None],
        top_k: int = 0,
        longest: int = _PROBED,
    ) -> None:
        """Raises UserError where the server's tokens are not the tokenizer's, or it does not tell as many as `top_k`.

        `watch` lets others have what they wait for, meanwhile. `longest`: tokens of a prompt that the teacher can read.
        """
        self._config = config
        self._watch = watch
        self._top_k = top_k
        self._vocabulary = len(tokenizer)
        self._url = f"{config.url.rstrip('/')}/completions"
        key = os.environ.get(config.api_key_env)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._threads = RequestThreads(config.concurrency, "teacher")
        self._check_tokens(tokenizer, max(longest, 2))

    def logprobs(self, batch: PlacedRows) -> Future[FloatArray]:
        """The log-prob of each response token, `[T]`, 0 outside `loss_mask`."""
        return self._columns(batch, 0).map(lambda columns: columns.logprobs)

    def top_logprobs(self, batch: PlacedRows) -> Future[tuple[IntArray, FloatArray]]:
        """As `Policy.top_logprobs`."""
        return self._columns(batch, self._top_k).map(lambda columns: (columns.top_ids, columns.top_logprobs))

    def _columns(self, rows: PlacedRows, top_k: int) -> Future[Scored]:
        """Of all response tokens; the batch's columns that the rows name are filled, too."""
        batch = rows.whole()
        asked = [row for row, tokens in enumerate(batch.tokens_by_row(batch.loss_mask)) if tokens]
        answers = [self._threads.submit(self._scored, *_asked_about(batch, row), top_k) for row in asked]

        def finished() -> Scored:
            columns = _empty(len(batch.response_ids), top_k)
            self._wait_for(answers)
            for row, answer in zip(asked, answers, strict=True):
                start, stop = batch.response_offsets[row : row + 2]
                trained = start + np.flatnonzero(batch.loss_mask[start:stop])
                for column, values in zip(columns, answer.result(), strict=True):
                    column[trained] = values
            given = columns[1:] if top_k else columns[:1]
            for name, column in zip(rows.selection.fills, given, strict=True):
                assert name is not None
                setattr(rows.placed.batch.tokens, name, column)
            return columns

        return Future(finished, _unwatched)

    def _wait_for(self, answers: Sequence[Reply[Scored]]) -> None:
        """Raises UserError where a request has failed, for the run can go on; those that have not begun are then left
        out."""
        pending = set(answers)
        try:
            while pending:
                done, pending = wait(pending, timeout=_PATIENCE_S, return_when=FIRST_EXCEPTION)
                for answer in done:
                    _result(answer)
                self._watch(0.0)
        finally:
            for answer in pending:
                answer.cancel()

    def _scored(self, ids: list[int], places: list[int], top_k: int) -> Scored:
        """What the teacher says of the tokens at these places, each the next one after those before it."""
        told = self._told(ids, top_k)
        scored = _empty(len(places), top_k)
        for number, place in enumerate(places):
            found = {token: one.logprob for token, one in told[place - 1].items()}
            if not all(map(isfinite, found.values())):
                raise TandemError(f"algorithm.teacher: {self._url} told of {ids[place]} after {place} tokens: {found}")
            scored.logprobs[number] = found[ids[place]]
            for rank, token in enumerate(sorted(found, key=lambda token: -found[token])[:top_k]):
                known = 0 <= token < self._vocabulary
                scored.top_ids[number, rank] = token if known else 0
                scored.top_logprobs[number, rank] = found[token] if known else -inf
        return scored

    def _told(self, ids: list[int], top_k: int) -> list[dict[int, Told]]:
        """What the server says of each token but the first one, by token id."""
        body = {"model": self._config.model, "prompt": ids, "max_tokens": 1, "temperature": 1, "prompt_logprobs": top_k}
        config = self._config
        try:
            answer = post_json(
                self._url, body, timeout_s=config.timeout_s, attempts=config.attempts, headers=self._headers
            )
        except TandemError as error:
            raise TandemError(f"algorithm.teacher: {error}") from None
        try:
            told = [
                {int(token): Told.of(one) for token, one in entry.items()}
                for entry in answer["choices"][0]["prompt_logprobs"][1:]
            ]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):  # it may be anything
            told = []
        whole = len(told) == len(ids) - 1
        if not whole or not all(len(one) >= top_k and token in one for token, one in zip(ids[1:], told, strict=True)):
            raise TandemError(
                f"algorithm.teacher: {self._url} does not tell prompt_logprobs: {top_k} of every token, as vLLM's "
                "server and `tandem serve` do"
            )
        return told

    def _check_tokens(self, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        """Asks for the text of tokens from all of the vocabulary."""

        def told_of(part: list[int]) -> list[dict[int, Told]]:
            return self._told([ids[0], *part], self._top_k)

        spread = np.linspace(0, self._vocabulary - 1, min(_PROBED, self._vocabulary)).astype(int)
        ids: list[int] = sorted({*spread.tolist(), *tokenizer.all_special_ids})
        untyped = cast(Any, tokenizer)  # what decode takes and gives is not known in full
        parts = [ids[start : start + longest - 1] for start in range(0, len(ids), longest - 1)]
        try:
            told = self._threads.map(told_of, parts)
        except TandemError as error:
            raise UserError(f"{error}. It was asked about tokens of the policy's tokenizer") from None
        for token, one in zip(ids, chain.from_iterable(told), strict=True):
            theirs, ours = one[token].text, str(untyped.decode([token]))
            if theirs is None or (_UNFINISHED not in theirs + ours and theirs.strip() != ours.strip()):
                mend = "give a teacher with the same tokenizer"
                raise UserError(
                    f"algorithm.teacher: the tokenizer of {self._config.model} at {self._config.url} is not the "
                    f"policy's: token {token} is {theirs!r} there and {ours!r} here; {mend}"
                )


def _result(answer: Reply[Scored]) -> Scored:
    """Raises UserError where the request has failed: the server is the user's to start again, and the run can go on."""
    try:
        return answer.result()
    except TandemError as error:
        mend = "see to its server, and --resume RUN goes on from the last checkpoint"
        raise UserError(f"{error}. The teacher answered when the run began, and does not now: {mend}") from None


def _asked_about(batch: Batch, row: int) -> tuple[list[int], list[int]]:
    """The row's tokens, and the places of the trained ones among them."""
    prompt = batch.prompt_ids[batch.prompt_offsets[row] : batch.prompt_offsets[row + 1]]
    response = slice(*batch.response_offsets[row : row + 2])
    places = len(prompt) + np.flatnonzero(batch.loss_mask[response])
    return [*prompt.tolist(), *batch.response_ids[response].tolist()], places.tolist()


def _empty(tokens: int, top_k: int) -> Scored:
    return Scored(
        np.zeros(tokens, np.float32), np.zeros((tokens, top_k), np.int32), np.zeros((tokens, top_k), np.float32)
    )


def _unwatched(callback: Callable[[], None]) -> NoReturn:
    raise AssertionError("an answer over HTTP is waited for with get")
