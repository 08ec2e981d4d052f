"""Play tasks of a verifiers taskset with the policy, and score them. It needs an environment of its own, which
scripts/verifiers-env makes.

.venv-verifiers/bin/python examples/environments/verifiers_server.py TASKSET --port 8001

`POST /play {"task": number, "base_url": …, "api_key": …}` answers with the reward and the metrics of one rollout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import uvicorn
import verifiers.v1 as vf
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


class Server:
    """The tools that a taskset's tasks share run for as long as the server does; all else is a rollout's own."""

    def __init__(self, taskset: str, agent: dict[str, Any]) -> None:
        """`agent`: verifiers' AgentConfig: which harness plays, where, and with which limits."""
        self._env = load_environment(resolve_env_config({"taskset": {"id": taskset}, "agent": agent}))
        if not isinstance(self._env, vf.SingleAgentEnv):
            sys.exit(f"{taskset}: an environment of several agents, and a rollout here has one reward")
        self._tasks: dict[int, vf.Task] = {}
        self._tools: dict[str, Any] = {}

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self._env.shared_tools() as self._tools:
            yield

    async def play(self, request: Request) -> JSONResponse:
        asked = await request.json()
        task = self._task(int(asked["task"]))
        if task is None:
            return JSONResponse(f"the taskset has no task {asked['task']}", status_code=404)
        trace = await self._agent(asked["base_url"], asked["api_key"]).run(task, tools=self._tools)
        if not trace.ok:
            return JSONResponse([f"{error.type}: {error.message}" for error in trace.errors], status_code=500)
        return JSONResponse({**trace.metrics, "reward": trace.reward})

    def _task(self, number: int) -> vf.Task | None:
        if number not in self._tasks:
            self._tasks |= enumerate(islice(self._env.taskset, number + 1))
        return self._tasks.get(number)

    def _agent(self, base_url: str, key: str) -> vf.Agent:
        """The session's key is in the URL, for verifiers takes keys from its own process's environment alone."""
        in_session = base_url.removesuffix("/v1") + f"/s/{key}/v1"
        client = vf.EvalClientConfig(base_url=in_session, api_key_var="NO_KEY_BESIDE_THE_URL")
        return vf.make_agent(self._env.config.agent.model_copy(update={"model": "policy", "client": client}))


def main() -> None:
    parser = argparse.ArgumentParser(description="Play tasks of a verifiers taskset with a policy, and score them.")
    parser.add_argument("taskset", help="a module that exports a Taskset, as `vf-eval` takes it")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--agent", default='{"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}')
    given = parser.parse_args()
    # Harnesses start with uv, which is beside the interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    server = Server(given.taskset, json.loads(given.agent))
    app = Starlette(routes=[Route("/play", server.play, methods=["POST"])], lifespan=server.lifespan)
    uvicorn.run(app, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
