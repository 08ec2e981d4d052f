"""What the endpoint that records costs a call.

    python benchmarks/endpoint.py [--sessions 64] [--turns 8] [--words 100] [--tokenizer tests|qwen3|llama3]

Agents talk to it over HTTP, all at once, with messages of so many words of the documentation; the policy answers at
once. Client, server and the making of tokens share one process, and all of its CPU time is counted. The tokenizer is
the small one of the tests, or a published vocabulary (scripts/real_tokenizers.py) with its published template (TRL).
Prints `cpu_ms_per_call`, and `last_tokens`, which the last conversation had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from command_line import parse_arguments
from transformers import PreTrainedTokenizerFast

from tandem.rollout.formats.for_tokenizer import make_format
from tandem.rollout.session import PolicyEndpoint, Rules, Session
from tandem.serving.capture import Capture, capture_app
from tandem.serving.server import Server, reserve
from tandem.serving.sessions import Sessions
from tandem.types import Completion, Request, SamplingParams, Status

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import agents
from tests.agents import ADD, ScriptedEngine
from tests.unit.published_templates import real

TEMPLATES = {"qwen3": "qwen3", "llama3": "llama3_1"}
TEXT = (Path(__file__).parents[1] / "docs/agents.md").read_text().split()


class Instant(ScriptedEngine):
    """Says the same at once."""

    def __init__(self, words: str, tokenizer: PreTrainedTokenizerFast, stop: int) -> None:
        super().__init__(lambda prompt: words)
        self._said = np.array([*tokenizer.encode(words, add_special_tokens=False), stop], np.int32)

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        count = len(self._said)
        logprobs = np.full(count, -0.1, np.float32)
        self.seen.append((request.token_ids.tolist(), self._said.tolist(), logprobs.tolist()))
        yield Completion(0, self._said, logprobs, np.zeros(count, np.int32), Status.COMPLETED)


def a_message(words: int, number: int) -> dict[str, Any]:
    """Each another part of the text."""
    start = number * 37 % len(TEXT)
    return {"role": "user", "content": " ".join((TEXT[start:] + TEXT * (words // len(TEXT) + 1))[:words])}


async def talk(http: Any, url: str, key: str, turns: int, words: int, number: int = 0) -> None:
    messages = [a_message(words, number)]
    headers = {"Authorization": f"Bearer {key}"}
    for turn in range(1, turns + 1):
        asked = {"model": "policy", "messages": messages, "tools": [ADD]}
        answer = await http.post(f"{url}/v1/chat/completions", json=asked, headers=headers, timeout=600)
        answer.raise_for_status()
        messages += [answer.json()["choices"][0]["message"], a_message(words, number + turn)]


async def measure(sessions: int, turns: int, words: int, name: str) -> dict[str, float]:
    tokenizer = agents.tokenizer() if name == "tests" else real(name, TEMPLATES[name])
    stop = int(tokenizer.convert_tokens_to_ids("<|eot_id|>" if name == "llama3" else "<|im_end|>"))
    tokens = make_format(tokenizer, [stop], "hermes" if name == "tests" else "auto")
    engine = Instant("I think that the answer is three. " * 5, tokenizer, stop)
    policy = PolicyEndpoint(tokens, engine.generate, lambda: 1_000_000, lambda ids: str(tokenizer.decode(list(ids))))
    rules = Rules(SamplingParams(max_tokens=1000, stop_token_ids=(stop,)))
    kept, own = Sessions(600), reserve("127.0.0.1", 0)
    server = Server(capture_app(Capture(kept, "admin", lambda: Session(policy, rules, 0), "policy")), own)
    serving = asyncio.create_task(server.run_until_stopped())
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{own.getsockname()[1]}"
    opened = [Session(policy, rules, number) for number in range(sessions)]
    keys = [kept.begin(session) for session in opened]
    async with httpx2.AsyncClient(limits=httpx2.Limits(max_connections=sessions)) as http:
        await talk(http, url, kept.begin(Session(policy, rules, 0)), 1, words)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        await asyncio.gather(*(talk(http, url, key, turns, words, number) for number, key in enumerate(keys)))
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    server.stop()
    await serving
    lengths = {len(session.answers[-1].node.ids) for session in opened}
    (branch,) = opened[0].branches()
    assert [*branch.prompt_ids, *branch.response_ids] in [prompt + made for prompt, made, _ in engine.seen]
    return {
        "calls": sessions * turns,
        "cpu_ms_per_call": round(cpu_s / (sessions * turns) * 1e3, 2),
        "calls_per_s": round(sessions * turns / wall_s, 1),
        "last_tokens": max(lengths),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--tokenizer", default="tests", choices=["tests", *TEMPLATES])
    given = parse_arguments(parser, sessions=2, turns=2, words=10)
    print(json.dumps(asyncio.run(measure(given.sessions, given.turns, given.words, given.tokenizer))))


if __name__ == "__main__":
    main()
