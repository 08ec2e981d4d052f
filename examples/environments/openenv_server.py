"""An OpenEnv server: the same number to guess. It needs an environment of its own: scripts/openenv-env makes one.

.venv-openenv/bin/python examples/environments/openenv_server.py --port 8000
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    text: str


class Told(Observation):
    text: str


class Guess(Environment[Say, Told, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Told:
        highest = int(options.get("highest", 9))
        self._number = random.Random(seed).randint(1, highest)
        return Told(text=f"I think of a number from 1 to {highest}. Which is it?")

    def step(self, action: Say, timeout_s: float | None = None, **given: Any) -> Told:
        said = action.text.strip()
        if said == "break":
            raise RuntimeError("the world is broken")
        if not (said.isascii() and said.isdigit()):
            return Told(text="Say a number.", reward=0.0)
        if int(said) == self._number:
            return Told(text="Yes.", reward=1.0, done=True)
        return Told(text="It is more." if int(said) < self._number else "It is less.", reward=0.1)

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a number to guess.")
    parser.add_argument("--port", type=int, default=8000)
    app = create_fastapi_app(Guess, Say, Told, max_concurrent_envs=64)
    uvicorn.run(app, port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
