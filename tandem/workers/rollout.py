"""The rollout role: asks the generation engine, keeps the policy's side of every conversation."""

import asyncio
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandem.config.tree import GenerationConfig
from tandem.generation.base import GenerationEngine
from tandem.rollout.single_turn import single_turn
from tandem.types import IntArray, Prompt, SamplingParams, Trajectory

_TRAIN, _EVAL = 0, 1


class RolloutWorker:
    """Samples are reproducible: their seeds come from (run seed, purpose, step, place in the step, sample) alone."""

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerationConfig,
        stop_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._stop_token_ids = tuple(stop_token_ids)
        self._seed = seed
        self._events = asyncio.new_event_loop()  # a Runner would touch the signal handlers at every call

    def generate(self, prompts: Sequence[Prompt], samples: int, step: int) -> list[list[Trajectory]]:
        """`samples` trajectories for each prompt, to train on."""
        config = self._config
        return self._run(prompts, samples, _TRAIN, step, self._sampling(config.temperature, config.top_p, config.top_k))

    def generate_for_eval(self, prompts: Sequence[Prompt], step: int) -> list[list[Trajectory]]:
        """The validation answers, drawn as `generation.eval` says."""
        how = self._config.eval
        return self._run(prompts, how.samples, _EVAL, step, self._sampling(how.temperature, how.top_p, top_k=0))

    def close(self) -> None:
        self._engine.close()
        self._events.close()

    def _run(
        self, prompts: Sequence[Prompt], samples: int, purpose: int, step: int, sampling: SamplingParams
    ) -> list[list[Trajectory]]:
        seeds = [
            [int(s) for s in np.random.SeedSequence([self._seed, purpose, step, place]).generate_state(samples, "u8")]
            for place in range(len(prompts))
        ]
        return self._events.run_until_complete(
            single_turn(prompts, seeds, sampling, self._engine.generate, self._decode)
        )

    def _sampling(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=self._config.max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            stop_strings=tuple(self._config.stop_strings),
        )

    def _decode(self, rows: list[IntArray]) -> list[str]:
        return self._tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True)
