"""On-policy distillation: one step against plain torch, a resumed run against the whole one, a student that learns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_weights
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tandem.algorithms import make_algorithm
from tandem.batching.packing import to_batch
from tandem.cli import main
from tandem.cluster.inline import InlineCluster
from tandem.config.load import load_config
from tandem.config.model import ModelConfig
from tandem.config.tree import ServeConfig, TrainConfig
from tandem.controller.assembly import Roles
from tandem.controller.dataflow import compute_advantages, prepare
from tandem.controller.learning import placed_step, update
from tandem.controller.pools import ResourcePool
from tandem.controller.roles import Actor, Policy
from tandem.jobs.serve import make_answerer
from tandem.tracking.jsonl import read_metrics
from tandem.training.base import TopTokens
from tandem.types import Group
from tandem.workers.training import TrainSpec, TrainWorker
from tests.conftest import ROOT
from tests.endpoint import TOKEN, served
from tests.learning.test_oracle import (
    EPS,
    LR,
    MAX_RESPONSE,
    NO_EXPERIENCE,
    TEMPERATURE,
    largest_difference,
    trajectories,
)

DISTILL = "algorithm={type: on_policy_distillation, group_size: 2}"


def write_model(path: Path, seed: int, width: int) -> Path:
    torch.manual_seed(seed)
    shape = Qwen2Config(
        vocab_size=40, hidden_size=width, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(shape).save_pretrained(path)
    return path


def logprobs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    return distributions(model, prompt, response)[range(len(response)), response]


def distributions(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1)


def plain_step(student: Path, teacher: Path, groups: list[Group], whole: bool) -> Any:
    """One AdamW step down the mean over trained tokens of (log pi - log teacher) without gradient, times log pi; or,
    with `whole`, of the distributions' KL(pi || teacher)."""
    policy, frozen = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (student, teacher))
    terms = []
    for trajectory, score in (
        (t, s) for group in groups for t, s in zip(group.trajectories, group.scores, strict=True)
    ):
        ids = trajectory.prompt.token_ids.tolist(), trajectory.response_ids.tolist()
        made = torch.as_tensor(trajectory.loss_mask) & (score.value is not None)
        if whole:
            log_p = distributions(policy, *ids)
            terms.append((log_p.exp() * (log_p - distributions(frozen, *ids).detach())).sum(-1)[made])
            continue
        ours = logprobs(policy, *ids)
        with torch.no_grad():
            apart = ours - logprobs(frozen, *ids)
        terms.append((apart * ours)[made])
    torch.cat(terms).mean().backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    torch.optim.AdamW(policy.parameters(), lr=LR, eps=EPS, weight_decay=0.0).step()
    return policy


@pytest.mark.parametrize("top_k", [0, 40])
def test_one_step_is_that_of_plain_torch_with_a_teacher_of_another_size(tmp_path: Path, top_k: int) -> None:
    """The vocabulary has 40 tokens."""
    student, teacher = write_model(tmp_path / "student", 0, 32), write_model(tmp_path / "teacher", 1, 64)
    config = TrainConfig.model_validate(
        {
            "model": {"path": student, "teacher_path": teacher},
            "data": {"train_files": ["unused"]},
            "algorithm": {"type": "on_policy_distillation", "top_k": top_k},
            "generation": {"temperature": TEMPERATURE, "max_response_tokens": MAX_RESPONSE},
            "training": {"optimizer": {"lr": LR, "eps": EPS, "max_grad_norm": 0.5}, "tokens_per_micro_batch": 40},
            "trainer": {"run_dir": "unused", "steps": 1},
        }
    )
    groups = trajectories()
    batch = to_batch(groups)
    algorithm = make_algorithm(config.algorithm, MAX_RESPONSE)
    ranks = InlineCluster().spawn(ResourcePool("main", (1,)))
    spec = TrainSpec(config.model, config.training, config.training.optimizer, total_steps=2, temperature=TEMPERATURE)
    actor = Actor(ranks, "actor", TrainWorker, spec)
    top = TopTokens(top_k, 40) if top_k else None
    frozen_spec = replace(spec, model=ModelConfig(path=teacher), optimizer=None, top=top)
    frozen = Policy(ranks, "teacher", TrainWorker, frozen_spec)
    with placed_step(batch, algorithm, config, step=1) as placed:
        prepare(Roles(NO_EXPERIENCE, actor, teacher=frozen), algorithm, placed)
        metrics = compute_advantages(algorithm, (), batch, (0, 1))
        metrics |= update(actor, None, algorithm, placed, config)
    ours = ranks.host.workers["actor"].engine.model
    assert metrics["teacher/kl"] != 0
    assert largest_difference(ours, AutoModelForCausalLM.from_pretrained(student)) > 1e-4
    assert largest_difference(ours, plain_step(student, teacher, groups, whole=top_k > 0)) < 1e-6


@pytest.fixture
def teacher(sort4: Path, tmp_path: Path) -> Path:
    """Another model with the task's tokenizer, twice as wide."""
    path = tmp_path / "teacher"
    shutil.copytree(sort4 / "model", path)
    described = json.loads((path / "config.json").read_text())
    shape = Qwen2Config(**{**described, "intermediate_size": 2 * described["intermediate_size"]})
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(shape).save_pretrained(path)
    return path


def test_a_resumed_run_is_the_undisturbed_one(grpo_config: Path, teacher: Path, tmp_path: Path) -> None:
    """The pool is of the teacher's own in the second part: resources may change."""

    def train(run: str, steps: int, *overrides: str) -> None:
        arguments = [f"trainer.run_dir={tmp_path / run}", f"trainer.steps={steps}", f"model.teacher_path={teacher}"]
        fixed = ["training.optimizer.lr=0.01", "trainer.save_every=2", "trainer.eval_every=0", DISTILL]
        assert main(["train", str(grpo_config), *arguments, *fixed, *overrides]) == 0

    train("whole", 4)
    train("parts", 2)
    train("parts", 4, "trainer.resume=true", "placement={pools: {main: [1], frozen: [1]}, roles: {teacher: frozen}}")
    whole, parts = (
        load_weights(tmp_path / run / "checkpoints/step_000004/model/model.safetensors") for run in ("whole", "parts")
    )
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    found, again = (
        [step["teacher/kl"] for step in read_metrics(tmp_path / run / "metrics.jsonl") if "teacher/kl" in step]
        for run in ("whole", "parts")
    )
    assert len(found) == 4 and found == again and len({*found}) == 4


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_served_teacher_teaches_what_one_in_the_run_does(
    grpo_config: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    monkeypatch.setenv("TEACHER_KEY", TOKEN)
    fixed = ["trainer.steps=2", "training.optimizer.lr=0.01", "trainer.eval_every=0", "generation.temperature=1"]

    def train(run: str, *overrides: str) -> list[float]:
        arguments = [f"trainer.run_dir={tmp_path / run}", DISTILL, f"algorithm.top_k={top_k}", *fixed, *overrides]
        assert main(["train", str(grpo_config), *arguments]) == 0
        return [step["teacher/kl"] for step in read_metrics(tmp_path / run / "metrics.jsonl") if "teacher/kl" in step]

    inside = train("inside", f"model.teacher_path={teacher}")
    answerer = make_answerer(ServeConfig(model=ModelConfig(path=teacher)), "teacher")
    with served(answerer) as (url,):
        outside = train("outside", f"algorithm.teacher={{url: '{url}', model: teacher, api_key_env: TEACHER_KEY}}")
    answerer.engine.close()
    assert len(inside) == 2 and outside == pytest.approx(inside, abs=1e-5) and min(inside) > 1e-3


def test_a_teacher_with_other_tokens_is_refused_in_one_message(
    grpo_config: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(teacher)
    capsys.readouterr()
    assert main(["train", str(grpo_config), DISTILL, f"model.teacher_path={teacher}"]) == 2
    said = capsys.readouterr().err
    assert f"model.teacher_path: the tokenizer of {teacher} (100 tokens) is not that of" in said
    assert "Traceback" not in said


@pytest.mark.nightly
def test_the_student_rises_above_where_it_started(quickstart: Path, tmp_path: Path) -> None:
    """From the warmed model, by the quickstart's GRPO run; no reward is learned from."""
    warmup = quickstart.with_name("run-warmup")
    files = [f"data.{kind}_files=[{warmup}/task/{kind}.jsonl]" for kind in ("train", "val")]
    models = [f"model.path={warmup}/sft", f"model.teacher_path={quickstart}"]
    run = [f"trainer.run_dir={tmp_path / 'run'}", "trainer.steps=20", "trainer.eval_every=20"]
    assert main(["train", str(ROOT / "recipes/sort4_distillation.yaml"), *models, *files, *run]) == 0
    steps = read_metrics(tmp_path / "run/metrics.jsonl")
    before, after = (step["val/sort4/acc/mean@4"] for step in steps if "val/sort4/acc/mean@4" in step)
    assert before < 0.5 and after > 0.7, (before, after)
    apart = [step["teacher/kl"] for step in steps if "teacher/kl" in step]
    assert apart[-1] < 0.5 * apart[0]
    assert load_config(TrainConfig, tmp_path / "run/config.yaml", []).algorithm.type == "on_policy_distillation"
