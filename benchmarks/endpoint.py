"""What the endpoint that records costs a call.

    python benchmarks/endpoint.py [--sessions 64] [--turns 8] [--words 100]

Agents talk to it over HTTP, all at once, with messages of so many words; the policy answers at once. Client, server and
the making of tokens share one process, and all of its CPU time is counted. Prints `cpu_ms_per_call`, and `last_tokens`,
which the last conversation had.
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

from tandem.rollout.session import Policy, Rules, Session
from tandem.serving.capture import Capture, capture_app
from tandem.serving.server import Server, reserve
from tandem.serving.sessions import Sessions
from tandem.types import Completion, Request, SamplingParams, Status

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.agents import ADD, ScriptedEngine, a_policy, check_record, stop_id, tokenizer


class Instant(ScriptedEngine):
    """Says the same at once."""

    def __init__(self, words: str) -> None:
        super().__init__(lambda prompt: words)
        self._said = np.array([*tokenizer().encode(words, add_special_tokens=False), stop_id()], np.int32)

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        count = len(self._said)
        logprobs = np.full(count, -0.1, np.float32)
        self.seen.append((request.token_ids.tolist(), self._said.tolist(), logprobs.tolist()))
        yield Completion(0, self._said, logprobs, np.zeros(count, np.int32), Status.COMPLETED)


async def talk(http: Any, url: str, key: str, turns: int, said: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": said}]
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(turns):
        asked = {"model": "policy", "messages": messages, "tools": [ADD]}
        answer = await http.post(f"{url}/v1/chat/completions", json=asked, headers=headers, timeout=600)
        answer.raise_for_status()
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": said}]


async def measure(sessions: int, turns: int, words: int) -> dict[str, float]:
    engine = Instant("I think that the answer is three. " * 5)
    policy: Policy = a_policy(engine)
    rules = Rules(SamplingParams(max_tokens=1000, stop_token_ids=(stop_id(),)))
    kept, own = Sessions(600), reserve("127.0.0.1", 0)
    server = Server(capture_app(Capture(kept, "admin", lambda: Session(policy, rules, 0), "policy")), own)
    serving = asyncio.create_task(server.run_until_stopped())
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{own.getsockname()[1]}"
    opened = [Session(policy, rules, number) for number in range(sessions)]
    keys = [kept.begin(session) for session in opened]
    async with httpx2.AsyncClient(limits=httpx2.Limits(max_connections=sessions)) as http:
        await talk(http, url, kept.begin(Session(policy, rules, 0)), 1, "the first call")
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        await asyncio.gather(*(talk(http, url, key, turns, "word " * words) for key in keys))
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    server.stop()
    await serving
    lengths = {len(session.answers[-1].node.ids) for session in opened}
    check_record(opened[0], engine, branches=1)
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
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(given.sessions, given.turns, given.words))))


if __name__ == "__main__":
    main()
