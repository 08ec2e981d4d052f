"""Log-probs of answers: the engine that made them, the trainer, and transformers' eager attention, on real rows.

    python benchmarks/logprobs.py CONFIG.yaml [key=value …]
    python benchmarks/logprobs.py --small       on two rows of sort4, to see that it runs

`data.prompts_per_step` rows of the configuration are answered once each. The engine's log-probs of its own tokens are
compared with the trainer's, in the configuration's `model.dtype`, and both with those that transformers computes row by
row from the same weights by eager attention, in that dtype and in float32, which is what all of them are to be. A line
for each pair: mean, 99th percentile and largest |difference| over all answers' tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import combinations
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from warmed import ROOT, Warmed, warmed

import tandem


def main(config: tandem.TrainConfig) -> None:
    with tandem.Dataflow(config) as flow:
        prompts = next(flow.prompts)
        requests = tandem.seeded_requests(prompts, 1, config.trainer.seed, 1)
        answers = flow.rollout.generate(requests).get()
        batch = tandem.to_batch([tandem.Group(own, [tandem.Score(0.0) for _ in own]) for own in answers])
        assert batch.tokens.rollout_logprobs is not None
        found = {
            config.generation.type: batch.tokens.rollout_logprobs,
            f"trainer, {config.model.dtype}": flow.actor.logprobs(batch).get(),
        }
    temperature = config.generation.temperature
    for dtype in dict.fromkeys((config.model.dtype, "float32")):
        found[f"eager, {dtype}"] = eager_logprobs(config, batch, dtype, temperature)
    tokens, rows = int(batch.loss_mask.sum()), len(batch)
    lengths = np.diff(batch.prompt_offsets) + np.diff(batch.response_offsets)
    print(f"{rows} rows of {config.model.path.name}, {tokens:,} tokens answered, {lengths.max()} in the longest row")
    table({name: values[batch.loss_mask] for name, values in found.items()})


def eager_logprobs(config: tandem.TrainConfig, batch: tandem.Batch, dtype: str, temperature: float) -> Any:
    """`[T]`: of the model in the directory, a row at a time."""
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(config.model.path, local_files_only=True, **options).eval()
    found = np.zeros(len(batch.response_ids), np.float32)
    for row in range(len(batch)):
        asked = slice(*batch.prompt_offsets[row : row + 2].tolist())
        answer = slice(*batch.response_offsets[row : row + 2].tolist())
        ids = torch.from_numpy(np.concatenate((batch.prompt_ids[asked], batch.response_ids[answer])).astype(np.int64))
        made = answer.stop - answer.start
        with torch.no_grad():
            logits = model(ids[None], use_cache=False, logits_to_keep=made + 1).logits[0, :-1].float()
        logprobs = (logits / temperature).log_softmax(-1)
        found[answer] = logprobs.gather(1, ids[len(ids) - made :, None])[:, 0].numpy()
    return found


def table(found: Mapping[str, Any]) -> None:
    print("| | mean | 99 of 100 | largest |\n| --- | --- | --- | --- |")
    for one, another in combinations(found, 2):
        apart = np.abs(found[one].astype(np.float64) - found[another])
        print(f"| {one} - {another} | {apart.mean():.1e} | {np.quantile(apart, 0.99):.1e} | {apart.max():.1e} |")


def small(start: Warmed) -> list[str]:
    """The command line of `--small`."""
    overrides = [f"model.path={start.model}", f"trainer.run_dir={start.rows}/run", "data.prompts_per_step=2"]
    overrides += [f"data.{part}_files=[{start.rows}/{part}.jsonl]" for part in ("train", "val")]
    return [str(ROOT / "recipes/sort4_grpo.yaml"), *overrides]


if __name__ == "__main__":
    with warmed(small=True) if sys.argv[1:] == ["--small"] else nullcontext() as made:
        sys.argv[1:] = sys.argv[1:] if made is None else small(made)
        tandem.run_program(tandem.TrainConfig, main)
