"""Conversations that weights are published to: which version each token names, and whose log-prob it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from examples.letters import write_model
from examples.one_tool import CALL_TAGS, CHAT_TEMPLATE
from tandem.config.conversation import ConversationConfig
from tandem.config.generation import NativeGenerationConfig
from tandem.config.model import ModelConfig
from tandem.generation.fake import FakeEngine
from tandem.types import Branch, Prompt, Status, Trajectory
from tandem.workers.host import WorkerContext
from tandem.workers.rollout import Ask, RolloutRequest, RolloutSpec, RolloutWorker

ENVIRONMENT = '''
"""A world that says how often it was spoken to, a moment later."""

import asyncio

import tandem


class Echo:
    tools, numbers = (), {}

    async def start(self, prompt):
        self.turns = 0
        return [{"role": "user", "content": "0"}]

    async def step(self, answer):
        self.turns += 1
        for _ in range(self.turns * 3):
            await asyncio.sleep(0)
        return tandem.Reply([{"role": "user", "content": str(self.turns)}])

    async def close(self):
        return None
'''
ASKS, SAMPLES, TURNS = 8, 3, 5
MORE_STOPS = 3.0
"""Nats that the end of a turn has more than other tokens: a turn has about six tokens."""


def logits_of(version: int, size: int, stop: int) -> Tensor:
    """What the weights of a version say: `[token, the token after it]`."""
    logits_VV = torch.randn(size, size, generator=torch.Generator().manual_seed(version))
    logits_VV[:, stop] += MORE_STOPS
    return logits_VV


class VersionedRollout(RolloutWorker):
    """The next token depends on the one before it and on the version, so that every log-prob is known."""

    def _native(self, model: ModelConfig, config: Any, tokenizer: Any, actor: Any) -> FakeEngine:
        self.size, self.stop = len(tokenizer), tokenizer.eos_token_id
        self._chain_VV = torch.zeros(self.size, self.size)
        return FakeEngine(self._chain_VV, tokenizer=tokenizer)

    def publish(self, version: int) -> None:
        self._chain_VV.copy_(logits_of(version, self.size, self.stop))  # the engine's own memory
        super().publish(version)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[VersionedRollout]:
    write_model(tmp_path / "model", 0, CHAT_TEMPLATE, CALL_TAGS)
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    environment = {"type": "own", "environment": f"{tmp_path}/echo.py:Echo"}
    conversation = ConversationConfig.model_validate({"environment": environment, "max_turns": TURNS})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = ModelConfig(path=tmp_path / "model")
    spec = RolloutSpec(model, NativeGenerationConfig(max_response_tokens=120), tokenizer, conversation)
    with closing(VersionedRollout(WorkerContext("rollout"), spec)) as made:
        made.publish(0)
        yield made


def take_all(worker: VersionedRollout, sleeps: bool, slices: int) -> dict[int, tuple[int, list[Trajectory]]]:
    """Ask a prompt in each slice without patience, and publish after every few of them. By number: the version at which
    it was asked, and its trajectories."""
    asked: dict[int, int] = {}
    taken: dict[int, tuple[int, list[Trajectory]]] = {}
    version = count = 0
    while len(taken) < ASKS:
        new = {}
        if len(asked) < ASKS:
            request = RolloutRequest(Prompt(len(asked), np.zeros(0, np.int32), "", "", None), tuple(range(SAMPLES)))
            new[len(asked)] = Ask(request, with_greedy=False)
            asked[len(asked)] = version
        taken |= {number: (asked[number], siblings) for number, siblings, _ in worker.advance(new, 0.0).done}
        count += 1
        if count % slices == 0:
            version += 1
            if sleeps:
                worker.sleep()
            worker.publish(version)
            if sleeps:
                worker.wake()
    return taken


def turns_of(one: Trajectory | Branch) -> list[list[int]]:
    """The versions of the tokens of each turn of the policy."""
    ends = np.cumsum([turn.tokens for turn in one.turns])[:-1]
    parts = np.split(one.versions, ends)
    return [part.tolist() for part, turn in zip(parts, one.turns, strict=True) if turn.author == "policy"]


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("sleeps", [False, True], ids=["stands still", "sleeps"])
def test_each_token_has_the_version_and_the_log_prob_of_the_weights_that_drew_it(
    worker: VersionedRollout, sleeps: bool, slices: int
) -> None:
    versions_at_once, mixed_turns, mixed_conversations = set[int](), 0, 0
    for asked_at, siblings in take_all(worker, sleeps, slices).values():
        for one in siblings:
            assert (one.versions == -1).tolist() == (~one.loss_mask).tolist()
            made = one.versions[one.loss_mask]
            assert made[0] >= asked_at and (np.diff(made) >= 0).all()
            row = np.concatenate((one.prompt.token_ids, one.response_ids))
            for place in np.flatnonzero(one.loss_mask).tolist():
                before, token = row[len(one.prompt.token_ids) + place - 1], one.response_ids[place]
                logits_VV = logits_of(int(one.versions[place]), worker.size, worker.stop)
                assert one.rollout_logprobs[place] == pytest.approx(
                    logits_VV[before].log_softmax(0)[token].item(), abs=1e-5
                )
            turns = turns_of(one)
            assert len(turns) > 1 or one.status is not Status.COMPLETED
            mixed_turns += sum(len(set(versions)) > 1 for versions in turns)
            mixed_conversations += len({versions[0] for versions in turns}) > 1
            versions_at_once |= {*made.tolist()}
    assert len(versions_at_once) > 2 and mixed_turns > 3 and mixed_conversations > 3
