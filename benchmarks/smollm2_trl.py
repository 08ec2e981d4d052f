"""TRL's side of smollm2.py: so many steps of a recipe's task, and what TRL logged of them in OUT.json."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tandem.config import yaml12

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples/smollm2"), str(ROOT / "benchmarks")]
import sums  # noqa: E402

LEARNED = {"grpo": "reward", "sft": "loss", "dpo": "loss"}


class Told(TrainerCallback):
    """What TRL logs of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "train_runtime" not in logs:
            self.steps.append(logs)


def main(task: str, steps: int, seed: int, out: Path, packed: bool) -> None:
    recipe = yaml12.read((ROOT / f"recipes/smollm2_{'sums' if task == 'grpo' else task}.yaml").read_text())
    rows = [json.loads(line) for line in Path(recipe["data"]["train_files"][0]).read_text().splitlines()]
    told = Told()
    options: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(recipe["model"]["path"], dtype="float32"),
        "processing_class": AutoTokenizer.from_pretrained(recipe["model"]["path"]),
        "train_dataset": Dataset.from_list(rows),
        "callbacks": [told],
    }
    settings: dict[str, Any] = {
        "output_dir": f"{out}.run", "max_steps": steps, "seed": seed, "use_cpu": True, "bf16": False,
        "learning_rate": recipe["training"]["optimizer"]["lr"], "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "max_grad_norm": 1.0, "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    trainer: Any
    if task == "grpo":
        generation = {
            "max_completion_length": recipe["generation"]["max_response_tokens"],
            "temperature": 0.8,
            "top_k": 0,
        }
        group = {"num_generations": 8, "per_device_train_batch_size": 64, "beta": 0.0, "shuffle_dataset": False}
        args = GRPOConfig(**settings, **generation, **group)
        trainer = GRPOTrainer(reward_funcs=reward, args=args, **options)
    elif task == "sft":
        packing = {"packing": packed, "max_length": 512, "per_device_train_batch_size": 4}
        args = SFTConfig(**settings, **packing, gradient_accumulation_steps=2 if packed else 4)
        trainer = SFTTrainer(args=args, **options)
    else:
        pairs = {"max_length": 512, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": 0.1}
        trainer = DPOTrainer(args=DPOConfig(**settings, **pairs), **options)
    trainer.train()
    learned = [step[LEARNED[task]] for step in told.steps if LEARNED[task] in step]
    out.write_text(json.dumps({"tokens": int(told.steps[-1]["num_tokens"]), "learned": learned}))


def reward(completions: list[Any], ground_truth: list[str], **columns: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [sums.compute_score("sums", text, truth)["score"] for text, truth in zip(texts, ground_truth, strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=LEARNED)
    parser.add_argument("steps", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--packed", action="store_true", help="sft: rows are packed as TRL packs them")
    main(**vars(parser.parse_args()))
