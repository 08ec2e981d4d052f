"""A run whose tools remember, killed in the middle of conversations: they are begun anew, and nothing is lost by it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples.letters import write_model
from examples.one_tool import CALL_TAGS, CHAT_TEMPLATE

COUNTING = '''
import os
import signal
import time

from tandem import Answer, ToolCall

CALLS = 0


class Counter:
    """Remembers how often it was called in a conversation."""

    def __init__(self):
        self.called = 0

    def count(self, sign: str) -> str:
        """Say how often this was called.

        Args:
            sign: Anything.
        """
        global CALLS
        CALLS += 1
        if str(CALLS) == os.environ.get("KILL_AT_CALL"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.called += 1
        time.sleep(CALLS % 5 / 1000)
        return str(self.called)


class CounterInTheLoop(Counter):
    """Without a thread, in which nothing depends on time."""

    async def count(self, sign: str) -> str:
        """Say how often this was called.

        Args:
            sign: Anything.
        """
        return super().count(sign)


def read_calls(text, tools):
    """Two turns in three of a policy that has learned nothing are calls."""
    return Answer(text, tool_calls=(ToolCall("call_0", "count", {"sign": "?"}),) if len(text) % 3 else ())


def digits(completion):
    return sum(map(str.isdigit, completion)) / 16
'''
PROMPTS, STEPS = 18, 6
"""Steps of 4 prompts straddle epochs."""
STOPS = list("0123456789abcdefghijklm")
"""So that the turns of an untrained model end."""


def write_config(directory: Path, name: str, staleness: int, tool: str, partial_rollouts: bool) -> str:
    path = directory / f"{name}.yaml"
    tree = {
        "model": {"path": str(directory / "model")},
        "data": {"train_files": [str(directory / "rows.jsonl")], "prompts_per_step": 4, "max_prompt_tokens": 16},
        "algorithm": {"type": "grpo", "group_size": 4, "minibatches": 2},
        "conversation": {
            "environment": {"tools": [f"{directory}/counting.py:{tool}"]},
            "calls": f"{directory}/counting.py:read_calls",
            "max_turns": 4,
            "max_turn_tokens": 12,
        },
        "generation": {"max_response_tokens": 80, "stop_strings": STOPS, "partial_rollouts": partial_rollouts},
        "training": {"optimizer": {"lr": 1e-3}},
        "reward": {"functions": [f"{directory}/counting.py:digits"], "workers": 1},
        "trainer": {"run_dir": str(directory / "run"), "steps": STEPS, "save_every": 2, "max_staleness": staleness},
    }
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.mark.nightly
def test_kills_in_calls_lose_no_prompt_and_no_state(tmp_path: Path) -> None:
    """k = 0: the same tokens and weights. Ahead of training: the bound, and the same run where publishes wait and tools
    take no time."""
    write_model(tmp_path / "model", 0, CHAT_TEMPLATE, CALL_TAGS)
    (tmp_path / "counting.py").write_text(COUNTING)
    rows = [{"data_source": "count", "prompt": f"{number}?", "ground_truth": None} for number in range(PROMPTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    configs = [
        write_config(tmp_path, "k0", 0, "Counter", partial_rollouts=True),
        write_config(tmp_path, "k1", 1, "Counter", partial_rollouts=True),
        write_config(tmp_path, "k4", 4, "Counter", partial_rollouts=True),
        write_config(tmp_path, "k1_whole", 1, "CounterInTheLoop", partial_rollouts=False),
    ]
    program = str(Path(__file__).with_name("kill_in_conversations.py"))
    done = subprocess.run(
        [sys.executable, program, str(tmp_path), str(STEPS), *configs],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    told = re.findall(r"(\w+): (\d+) calls, (\d+) turns across, (\d+) within a turn", done.stdout)
    assert [name for name, *_ in told] == ["k0", "k1", "k4", "k1_whole"]
    calls, across, within = ([int(counts[place]) for _, *counts in told] for place in range(3))
    assert min(calls) > 50, "the kill is in the middle of them"
    assert across[1] and across[2], "publishes met conversations between turns; how many met one within depends on time"
    assert not across[0] and not across[3] and not within[0] and not within[3]
