"""TRL's side of `steps.trl_step`: GRPOTrainer, generation by transformers, no logging, saving or recomputation."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from gpu_checks.figures import Bench
from gpu_checks.measuring import device_of, dtype_of, synchronize


class Clock(TrainerCallback):
    """The time at the end of each step, and the lengths of answers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ends: list[float] = []
        self.lengths: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        synchronize(self._device)
        self.ends.append(time.perf_counter())

    def parity(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """The reward."""
        self.lengths += map(len, completion_ids)
        return [float(len(completion) % 2) for completion in completions]


def seconds_of_steps(bench: Bench, config: Mapping[str, Any]) -> tuple[float, float]:
    """Of a step of a configuration of ours, the first one not counted; and the mean answer's tokens."""
    clock = Clock(device_of(bench))
    rows = config["data"]["prompts_per_step"] * config["algorithm"]["group_size"]
    lines = Path(config["data"]["train_files"][0]).read_text(encoding="utf-8").splitlines()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config["model"]["path"], dtype=dtype_of(bench)),
        processing_class=AutoTokenizer.from_pretrained(config["model"]["path"], padding_side="left"),
        reward_funcs=clock.parity,
        args=GRPOConfig(
            output_dir=str(bench.work / "trl"),
            max_steps=config["trainer"]["steps"],
            per_device_train_batch_size=rows,
            num_generations=config["algorithm"]["group_size"],
            max_completion_length=config["generation"]["max_response_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=config["training"]["optimizer"]["lr"],
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=bench.small,
            bf16=not bench.small,
        ),
        train_dataset=Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines]),
        callbacks=[clock],
    )
    trainer.train()
    return fmean(end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)), fmean(clock.lengths)
