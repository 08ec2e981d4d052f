"""Every recipe runs: two steps on rows of its kind, with a tiny model in the place of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoModelForTokenClassification, AutoTokenizer

from tandem.cli import main
from tandem.errors import UserError
from tandem.sandbox.build import make_sandbox
from tandem.search.index import Passage, build_index
from tandem.tracking.jsonl import read_metrics
from tests.conftest import ROOT, load_file
from tests.pictures import make_model

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if not path.stem.startswith("eval_"))
ASK, GOOD, BAD = (
    [{"role": role, "content": text}] for role, text in (("user", "2+3?"), ("assistant", "5"), ("assistant", "6"))
)
SHOWN = {"prompt": [{"role": "user", "content": "<image>2+3?"}], "images": ["picture.png"]}
"""The picture is beside the rows."""
CODE = {"preamble": "", "tests": ["assert f() == 1"]}


def asked(source: str, truth: Any, **extra: Any) -> dict[str, Any]:
    """A verl row."""
    return {"data_source": source, "prompt": ASK, "reward_model": {"ground_truth": truth}, "extra_info": extra}


ROWS: dict[str, list[dict[str, Any]]] = {
    "calculator_sft": [{"messages": ASK + GOOD}],
    "calculator": [{"data_source": "calculator", "prompt": ASK, "ground_truth": "5"}],
    "dapo": [asked("math_dapo", "5")],
    "facts_sft": [{"messages": ASK + GOOD}],
    "facts": [{"data_source": "facts", "prompt": ASK, "ground_truth": "5"}],
    "gsm8k": [asked("openai/gsm8k", "5")],
    "hh_sft": [{"prompt": ASK, "completion": GOOD}],
    "hh_ppo": [asked("hh", "5")],
    "hh": [{"prompt": ASK, "chosen": GOOD, "rejected": BAD}],
    "look_sft": [{"messages": ASK + GOOD}],
    "look": [{"data_source": "look", "prompt": ASK, "pairs": ["1.png", "2.png"], "ground_truth": "rg"}],
    "mbpp_cure": [
        asked("mbpp_cure", CODE, problem=1, role=role, answer="def f(): return 1") for role in ("coder", "tester")
    ],
    "puzzlevqa": [{**asked("puzzlevqa", "A"), **SHOWN}],
    "search": [asked("hotpotqa", ["5"])],
    "smollm2": [{"data_source": "sums", "prompt": ASK, "ground_truth": "5"}],
    "smollm2_calculator_sft": [{"messages": ASK + GOOD}],
    "smollm2_dpo": [{"prompt": ASK, "chosen": GOOD, "rejected": BAD}],
    "smollm2_form": [{"data_source": "form", "prompt": ASK, "ground_truth": "commas"}],
    "smollm2_gsm8k": [asked("openai/gsm8k", "5")],
    "smollm2_kto": [{"prompt": ASK, "chosen": GOOD, "rejected": BAD}],
    "smollm2_sft": [{"prompt": ASK, "completion": GOOD}],
    "sort4_kto": [{"prompt": "21=", "chosen": "12", "rejected": "21"}],
    "sort4_orpo": [{"prompt": "21=", "chosen": "12", "rejected": "21"}],
    "sort4_judge_sft": [{"prompt": "12:12?", "completion": "yes"}],
    "sort4_sft": [{"prompt": "21=", "completion": "12"}],
    "sort4": [{"prompt": "21=", "data_source": "sort4", "ground_truth": "12"}],
    "tiles_sft": [{"completion": GOOD, **SHOWN}],
    "tiles": [{**asked("tiles", "rgby"), **SHOWN}],
}
"""By the recipe's name, or else its first word."""
MODELS = {
    "calculator": "letters",
    "facts": "letters",
    "look": "looks",
    "puzzlevqa": "sees",
    "search": "search",
    "smollm2_calculator": "search",
    "tiles": "sees",
}
"""By the recipe's name, or else its first word; others train `policy`."""
SMALL = {
    "train": ["data.prompts_per_step=4", "data.max_prompt_tokens=64", "generation.max_response_tokens=8"],
    "sft": ["data.rows_per_step=4"],
}
SMALL |= dict.fromkeys(("dpo", "reward-model"), SMALL["sft"])
FEWER = {
    "mbpp_cure": ["algorithm.group_size=2"],
    "dapo": [
        "algorithm.minibatches=2",
        "algorithm.group_size=2",
        "algorithm.resample_rounds=2",
        "generation={type: native, max_response_tokens: 8}",
        "cluster.type=local",
        "placement.pools={main: [1]}",
    ],
    "search_grpo": ["data.max_prompt_tokens=800", "generation.max_response_tokens=32"],
    "smollm2_calculator": [
        "data.max_prompt_tokens=900",
        "generation.max_response_tokens=32",
        "model.chat_template=null",
    ],
    "gsm8k_grpo_one_step_off": [
        "generation={type: native, max_response_tokens: 8}",
        "placement.pools={train: [1], generate: [1]}",
    ],
}
SHOWS_TOOLS = (
    '{% if tools %}<|user|>{{ tools | tojson }} Write <tool_call>{"name": NAME, "arguments": {}}'
    "</tool_call>.<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`policy/` and, with a head that scores, `judge/`; `letters/`, `search/` and `looks/`, whose templates show tools;
    `looks/` and `sees/` see pictures."""
    directory = tmp_path_factory.mktemp("models")
    calculator = load_file(ROOT / "examples/calculator/task.py")
    calculator.write_model(directory / "letters", 0, calculator.CHAT_TEMPLATE, calculator.CALL_TAGS)
    tiny = load_file(ROOT / "examples/hh/tiny.py")
    tiny.write_model(directory / "policy", ["2+3? 5"], tokens=300, width=64)
    tiny.POSITIONS = 1024
    tiny.write_model(directory / "search", ["2+3? 5"], tokens=300, width=64)
    with_tools = AutoTokenizer.from_pretrained(directory / "search")
    with_tools.chat_template = SHOWS_TOOLS
    with_tools.save_pretrained(directory / "search")
    make_model("qwen2_5_vl", directory / "sees")
    look = load_file(ROOT / "examples/tiles/look.py")
    look.write_model(directory / "looks", "qwen2_5_vl", lambda model: None, look.TEMPLATE, look.CALL_TAGS)
    judge = AutoModelForTokenClassification.from_pretrained(directory / "policy", num_labels=1)
    judge.save_pretrained(directory / "judge")
    AutoTokenizer.from_pretrained(directory / "policy").save_pretrained(directory / "judge")
    return directory


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_runs(recipe: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if recipe == "mbpp_cure":
        try:
            make_sandbox()
        except UserError as error:
            pytest.skip(f"no sandbox on this machine: {error}")
    monkeypatch.chdir(ROOT)
    kinds = {"sft": "sft", "model": "reward-model", **dict.fromkeys(("dpo", "kto", "orpo"), "dpo")}
    command = kinds.get(recipe.rpartition("_")[2], "train")
    model = MODELS.get(recipe) or MODELS.get(recipe.partition("_")[0], "policy")
    rows = ROWS.get(recipe) or ROWS[recipe.partition("_")[0]]
    Image.new("RGB", (56, 28)).save(tmp_path / "picture.png")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows * 8)))
    arguments = [
        f"model.path={models}/{model}", "model.dtype=float32", f"trainer.run_dir={tmp_path}/run", "trainer.epochs=null",
        "trainer.steps=2", f"data.train_files=[{tmp_path}/rows.jsonl]", f"data.val_files=[{tmp_path}/rows.jsonl]",
        *SMALL[command], *FEWER.get(recipe, []),
    ]  # fmt: skip
    if recipe in ("facts_grpo", "search_grpo"):
        build_index([Passage("1", "Sums", "2+3 is 5.")], tmp_path / "index")
        arguments += [f"conversation.environment.tools=[{{type: search, index: {tmp_path}/index}}]"]
    arguments += [f"model.judge_path={models}/policy"] if recipe == "sort4_judged" else []
    arguments += ["reward.judge.unparsed=0"] if recipe == "sort4_judged" else []
    arguments += [f"model.teacher_path={models}/policy"] if recipe.startswith("sort4_distillation") else []
    arguments += ["algorithm.teacher=null"] if recipe == "sort4_distillation_served" else []
    arguments += [f"model.reward_model_path={models}/judge"] if recipe == "hh_ppo" else []
    assert main([command, f"recipes/{recipe}.yaml", *arguments]) == 0
    last = read_metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert last["step"] == 2 and (tmp_path / "run/checkpoints/step_000002/model/model.safetensors").is_file()
    if command == "train":
        assert last["reward/errors"] == last["reward/timeouts"] == 0
    if recipe == "dapo":
        assert last["rollout/resample/replaced"] == 2 * 4 and last["rollout/resample/uninformative"] == 4
