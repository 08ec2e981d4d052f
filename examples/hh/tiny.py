"""The HH recipes, one after the other, on a model small enough for a CPU: fine-tuning, DPO, KTO, ORPO, a reward model
and PPO on it.

    python examples/hh/tiny.py --pairs pairs_4000.jsonl.gz [--runs runs/hh]      # rows of `chosen` and `rejected`

Runs that are there are kept. Prints what each did to the pairs or prompts that it has not trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tandem.cli import main as tandem
from tandem.data.rows import BadRow, read_rows
from tandem.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[2]
END, PAD = "<|end|>", "<|pad|>"
SPECIAL = [END, PAD, "<|user|>", "<|assistant|>"]
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
POSITIONS = 512
SHORT = ["data.max_tokens=256", "model.dtype=float32"]
STAGES = {
    "sft": ["sft", *SHORT, "data.rows_per_step=32", "trainer.steps=316", "training.optimizer.lr=3e-3"],
    "dpo": ["dpo", *SHORT, "data.rows_per_step=32", "trainer.eval_every=25", "training.optimizer.lr=1e-4"],
    "kto": ["dpo", *SHORT, "data.rows_per_step=64", "trainer.eval_every=25", "training.optimizer.lr=1e-4"],
    "orpo": ["dpo", *SHORT, "data.rows_per_step=32", "trainer.eval_every=25", "training.optimizer.lr=3e-3"],
    "reward_model": ["reward-model", *SHORT, "data.rows_per_step=32", "trainer.steps=102", "trainer.eval_every=25",
                     "training.optimizer={lr: 3e-4, warmup_steps: 10}"],
    "ppo": ["train", "model.dtype=float32", "data.prompts_per_step=64", "data.max_prompt_tokens=128",
            "generation.max_response_tokens=48", "trainer.epochs=null", "trainer.steps=100", "trainer.eval_every=25",
            "training.optimizer={lr: 2e-4, warmup_steps: 20}", "algorithm.critic_optimizer.lr=1e-3"],
}  # fmt: skip
"""Command, and what a tiny model on a CPU does otherwise than recipes/hh_<name>.yaml."""
TOLD = {
    "sft": ("val/loss",),
    "dpo": ("val/loss", "val/margin", "val/accuracy"),
    **dict.fromkeys(("kto", "orpo", "reward_model"), ("val/loss", "val/margin", "val/accuracy")),
    "ppo": ("val/hh/reward/mean@1", "reward/model", "actor/kl", "response_length/mean"),
}


def prepare(pairs: Path, out: Path, held_out: int = 10, tokens: int = 2048, width: int = 128) -> None:
    """`data/`, as `tandem data hh` makes it, one prompt in `held_out` in its test files; and an untrained `model/`."""
    raw = out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    rows = [row for _, row in read_rows(pairs) if not isinstance(row, BadRow)]
    unseen = set(sorted({_prompt(row) for row in rows})[::held_out])
    for split in ("train", "test"):
        lines = [json.dumps(row) for row in rows if (_prompt(row) in unseen) == (split == "test")]
        (raw / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    _tandem("data", "hh", "--in", str(raw), "--out", str(out / "data"))
    demonstrations = pq.read_table(out / "data/sft/train.parquet").to_pylist()
    texts = (turn["content"] for row in demonstrations for turn in row["prompt"] + row["completion"])
    write_model(out / "model", texts, tokens, width)


def _prompt(row: dict[str, Any]) -> str:
    return str(row["chosen"]).rpartition("\n\nAssistant:")[0]


def write_model(directory: Path, texts: Iterable[str], tokens: int, width: int) -> None:
    """A Hugging Face directory: a byte-level BPE tokenizer made of `texts`, and a Qwen2 with random parameters."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(texts, vocab_size=tokens, special_tokens=SPECIAL, show_progress=False)
    model = json.loads(learned.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Qwen2Tokenizer(model["vocab"], merges, eos_token=END, pad_token=PAD, unk_token=PAD)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64}
    shape = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2, **heads,
        max_position_embeddings=POSITIONS, tie_word_embeddings=True, dtype=torch.float32, **special,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Qwen2ForCausalLM(shape)
    policy.generation_config = GenerationConfig(**special)
    policy.save_pretrained(directory)


def run(runs: Path, stage: str, model: Path, *more: str) -> Path:
    """The model that recipes/hh_<stage>.yaml makes of `model`; a run that is there is not repeated."""
    command, *settings = STAGES[stage]
    rows = runs / "data" / {"ppo": "rl", "sft": "sft"}.get(stage, "preference")
    files = [f"data.train_files=[{rows}/train.parquet]", f"data.val_files=[{rows}/test.parquet]"]
    where = [f"model.path={model}", f"trainer.run_dir={runs}/{stage}", *files]
    checkpoints = runs / stage / "checkpoints"
    if not (runs / stage / "report.html").exists():
        _tandem(command, f"recipes/hh_{stage}.yaml", *where, *settings, *more)
    return checkpoints / (checkpoints / "latest").read_text().strip() / "model"


def _tandem(*arguments: str) -> None:
    if status := tandem(list(arguments)):
        sys.exit(status)


def table(runs: Path, stage: str) -> str:
    """The validations of a run, with what its training said at that step."""
    names = TOLD[stage]
    records = [record for record in read_metrics(runs / stage / "metrics.jsonl") if names[0] in record]
    lines = [f"| {stage}: step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for record in records:
        said = (f"{record[name]:.3f}" if name in record else "" for name in names)
        lines.append(f"| {record['step']:.0f} | {' | '.join(said)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the HH recipes on a tiny model, and print what they did.")
    parser.add_argument("--pairs", type=Path, required=True, help="rows of `chosen` and `rejected`")
    parser.add_argument("--runs", type=Path, default=Path("runs/hh"))
    arguments = parser.parse_args()
    runs, pairs = arguments.runs.resolve(), arguments.pairs.resolve()
    os.chdir(ROOT)  # recipes name their files from here
    if not (runs / "model").is_dir():
        prepare(pairs, runs)
    policy = run(runs, "sft", runs / "model")
    run(runs, "dpo", policy)
    run(runs, "kto", policy)
    run(runs, "orpo", runs / "model")
    judge = run(runs, "reward_model", policy)
    run(runs, "ppo", policy, f"model.reward_model_path={judge}")
    print("\n\n".join(table(runs, stage) for stage in STAGES))


if __name__ == "__main__":
    main()
