"""lm-evaluation-harness, the package itself: through `tandem serve` it finds what it finds with transformers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from examples.sort4.task import VOCABULARY, build_tokenizer, write_rows
from tandem.config.model import ModelConfig
from tandem.config.tree import ServeConfig
from tandem.jobs.serve import make_answerer
from tests.conftest import ROOT
from tests.endpoint import TOKEN, served

HARNESS = ROOT / ".venv-lm-eval/bin/python"
PAGE = ROOT / "docs/evaluation.md"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
NEW_TOKENS = 24
RUN_ALL = """
import functools, json, sys
import lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
"""
"""The command lines one after another, without a look at the harness's own thousands of tasks: imports and that look
take longer than these models."""

pytestmark = pytest.mark.skipif(
    not HARNESS.exists(), reason="no lm-evaluation-harness; scripts/lm-eval-env installs it"
)

Sample = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose answers look like noise, and end at different places."""
    directory = tmp_path_factory.mktemp("lm_eval") / "model"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        dtype=torch.float32,
        **special,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def greedy(model: Path, prompts: list[str]) -> list[str]:
    tokenizer = build_tokenizer()
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    made: list[str] = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt)])
        answer = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        made.append(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))
    return made


@pytest.fixture(scope="module")
def tasks(model: Path) -> Path:
    """A directory of two tasks over the same rows: choices, of which one is what the model would write; answers that
    one of five texts ends."""
    directory = model.parent / "tasks"
    directory.mkdir()
    questions = [f"Q{number}: what is {number * 7} + {number * number}?\nA:" for number in range(12)]
    answers = greedy(model, questions)
    rows = [
        {"text": question, "choices": [" 12", " twelve or more", answer[:5] or "x"], "answer": number % 3}
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True))
    ]
    write_rows(directory / "rows.jsonl", rows)
    stops = ["\n\n", "Q:", answers[0][6:8], answers[3][9:11], answers[5][4:7]]
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[2]}}",
    }
    kinds: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "answers": {
            "output_type": "generate_until",
            "generation_kwargs": {"until": stops, "max_gen_toks": NEW_TOKENS, "do_sample": False, "temperature": 0.0},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, own in kinds.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **own}))
    return directory


def commands(model: Path, url: str) -> dict[str, str]:
    """Those of the page, with a model, a URL and tasks of the test's."""
    lines = re.findall(r"^    lm_eval ((?:.*\\\n)*.+)", PAGE.read_text(), re.MULTILINE)
    served, chats = (line.replace("\\\n", " ") for line in lines)
    here = {"4096": "256", "NAME": "tiny", "MODEL": str(model), "http://127.0.0.1:8000/v1": url}
    # What comes from this machine last: a port may be 40961.
    for name, value in here.items():
        served, chats = served.replace(name, value), chats.replace(name, value)
    direct = f"--model hf --model_args pretrained={model},dtype=float32 --batch_size 1 --device cpu"
    return {
        "hf": f"{direct} --tasks choices,answers",
        "completions": served.replace("TASKS", "choices,answers"),
        "hf_chat": f"{direct} --tasks answers --apply_chat_template",
        "chat": chats.replace("TASKS", "answers"),
    }


@pytest.fixture(scope="module")
def found(model: Path, tasks: Path) -> Iterator[dict[str, Path]]:
    """Where the harness wrote the samples of each command."""
    answerer = make_answerer(ServeConfig(model=ModelConfig(path=model)), "tiny")
    out = model.parent / "found"
    with served(answerer) as (url,):
        lines = {
            name: [*shlex.split(line), "--include_path", str(tasks), "--output_path", str(out / name), "--log_samples"]
            for name, line in commands(model, url).items()
        }
        environment = {
            **os.environ,
            "OPENAI_API_KEY": TOKEN,
            "HF_HOME": str(model.parent / "home"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        ended = subprocess.run(
            [str(HARNESS), "-c", RUN_ALL, json.dumps(list(lines.values()))],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    answerer.engine.close()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    yield {name: out / name for name in lines}


def samples(directory: Path, task: str) -> list[Sample]:
    (path,) = directory.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


def test_loglikelihoods_are_those_of_transformers(found: dict[str, Path]) -> None:
    ours, theirs = samples(found["completions"], "choices"), samples(found["hf"], "choices")
    assert len(ours) == len(theirs) == 12
    flags = set()
    for one, other in zip(ours, theirs, strict=True):
        for ((ours_of, greedy),), ((theirs_of, theirs_greedy),) in zip(one["resps"], other["resps"], strict=True):
            assert float(ours_of) == pytest.approx(float(theirs_of), abs=1e-4)
            assert greedy == theirs_greedy
            flags.add(greedy)
        assert (one["acc"], one["acc_norm"]) == (other["acc"], other["acc_norm"])
    assert flags == {"True", "False"}


@pytest.mark.parametrize(("through", "direct"), [("completions", "hf"), ("chat", "hf_chat")])
def test_answers_are_those_of_transformers(found: dict[str, Path], through: str, direct: str) -> None:
    ours, theirs = samples(found[through], "answers"), samples(found[direct], "answers")
    assert [row["resps"] for row in ours] == [row["resps"] for row in theirs]
    lengths = {len(row["resps"][0][0]) for row in ours}
    assert NEW_TOKENS in lengths and min(lengths) < NEW_TOKENS - 5, "some must be cut, and some not"
