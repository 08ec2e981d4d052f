"""TRL's side of grpo_step.py: GRPOTrainer with the settings that were fastest on a CPU with one thread."""

from __future__ import annotations

import json
import tempfile
from typing import Any

from datasets import Dataset
from grpo_step import ROWS, Figures, Job, cpu_seconds
from reward import compute_score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Window(TrainerCallback):
    """CPU time at the end of the warm-up and at the end of the run; lengths and rewards between them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cpu_s: list[float] = []
        self.lengths: list[int] = []
        self.rewards: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self.job.warmup, self.job.warmup + self.job.steps):
            self.cpu_s.append(cpu_seconds())

    def reward(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        """What TRL calls with all completions of a step."""
        truths = columns["ground_truth"]
        scores = [compute_score("sort4", text, truth)["score"] for text, truth in zip(completions, truths, strict=True)]
        if len(self.cpu_s) == 1:
            self.lengths += [len(ids) for ids in completion_ids]
            self.rewards += scores
        return scores


def trl_steps(job: Job) -> Figures:
    window = Window(job)
    rows = (job.workdir / job.task / "train.jsonl").read_text().splitlines()
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job.model),
            processing_class=AutoTokenizer.from_pretrained(job.model),
            reward_funcs=window.reward,
            args=_settings(job, output),
            train_dataset=Dataset.from_list([json.loads(row) for row in rows]),
            callbacks=[window],
        )
        trainer.train()
    start, end = window.cpu_s
    return Figures(
        cpu_s=(end - start) / job.steps,
        response_tokens=sum(window.lengths) / len(window.lengths),
        reward=sum(window.rewards) / len(window.rewards),
    )


def _settings(job: Job, output: str) -> GRPOConfig:
    """Nothing that costs time and does not train: no logging, saving, checkpointed activations or bf16 emulation.

    The side `trl_defaults` logs and recomputes activations, as TRL does when nobody says otherwise. On long responses
    a backward pass over 32 rows at a time was about 5% faster than over 128, on short ones slower.
    """
    micro_batches = 4 if job.task == "skewed" else 1
    lean: dict[str, Any] = {"gradient_checkpointing": False, "logging_strategy": "no"} if job.side == "trl" else {}
    return GRPOConfig(
        output_dir=output,
        seed=job.seed,
        max_steps=job.warmup + job.steps,
        per_device_train_batch_size=ROWS // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_generations=8,
        num_iterations=1,
        max_completion_length=job.max_response_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **lean,
    )
