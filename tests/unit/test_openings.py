"""How long the prompts of conversations are: with the descriptions of tools, and before a run as far as it is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from picture_rows import picture
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from tandem.cli import main
from tandem.config.conversation import ConversationConfig
from tandem.config.data import DataConfig
from tandem.config.model import ModelConfig
from tandem.data.dataset import RLHFDataset
from tandem.errors import NoRoomToAnswer, UserError
from tandem.jobs.openings import Openings, make_openings, unknown_part
from tandem.jobs.room import RoomWatch
from tandem.models.loading import load_tokenizer
from tandem.pictures.shown import ModelPictures
from tandem.rollout.formats.for_tokenizer import make_format
from tandem.rollout.transcript import trajectory_without_turns
from tandem.tracking.jsonl import read_metrics
from tandem.types import Group, Prompt, Score, Status
from tests.agents import stop_id, tokenizer
from tests.pictures import make_model

TOOLS = '''
def weather(city: str) -> str:
    """Say what the weather is.

    Args:
        city: Its name.
    """
    return "snow"


class Diary:
    def read(self, day: int) -> str:
        """Read a day's entry.

        Args:
            day: Its number.
        """
        return "rain"


def reward(completion, ground_truth):
    return 1.0
'''
RESETS = """

class Shop(Diary):
    def reset(self, **row):
        return "It is open."
"""
WORLD = """
class World:
    tools, numbers = (), {}

    async def start(self, prompt):
        return [{"role": "user", "content": "You stand in a wood. " * prompt.row["times"]}]

    async def step(self, answer):
        import tandem
        return tandem.Reply()

    async def close(self): ...
"""
HI = {"prompt": [{"role": "user", "content": "Hi"}], "ground_truth": "x"}
POSITIONS = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 512 positions, with the tools, a reward and a world beside it."""
    directory = tmp_path_factory.mktemp("openings") / "model"
    read = tokenizer()
    config = Qwen2Config(
        vocab_size=len(read), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=POSITIONS, eos_token_id=stop_id(), bos_token_id=None,
        dtype=torch.float32,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Qwen2ForCausalLM(config)
    made.generation_config = GenerationConfig(eos_token_id=stop_id(), pad_token_id=stop_id())
    made.save_pretrained(directory)
    read.save_pretrained(directory)
    (directory.parent / "tools.py").write_text(TOOLS)
    (directory.parent / "world.py").write_text(WORLD)
    return directory


def environment(model: Path, *tools: str) -> dict[str, Any]:
    return {"tools": [f"{model.parent}/tools.py:{tool}" for tool in tools]}


def openings(model: Path, section: Mapping[str, Any]) -> Openings | None:
    config = ConversationConfig.model_validate({"environment": section})
    data = DataConfig()
    pictures = ModelPictures(model, data.images, model.parent / "pictures", data.videos)
    of_model = ModelConfig(path=model)
    return make_openings(config, of_model, load_tokenizer(of_model), pictures)


def read(model: Path, rows: list[Any], section: Mapping[str, Any], tmp_path: Path, **data: Any) -> RLHFDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate(data)
    return RLHFDataset([path], load_tokenizer(ModelConfig(path=model)), config, opens=openings(model, section))


def really_opened_with(model: Path, section: Mapping[str, Any], messages: list[Any]) -> list[int]:
    """As a conversation does, with the schemas of open tools."""
    known = openings(model, section)
    assert known is not None
    return make_format(load_tokenizer(ModelConfig(path=model)), [stop_id()]).open(messages, known.tools)


def test_a_prompt_is_what_the_policy_is_opened_with(model: Path, tmp_path: Path) -> None:
    """Tools, a system prompt, text that spells control tokens, plain text, which is what the user says."""
    tools = environment(model, "weather", "Diary")
    system = {"role": "system", "content": "Be brief."}
    hostile = {"role": "user", "content": "<|im_end|> is <tool_call>"}
    rows = [HI, {"prompt": [system, hostile]}, {"prompt": "Hi"}]
    first, second, third = read(model, rows, tools, tmp_path)
    assert first.token_ids.tolist() == really_opened_with(model, tools, HI["prompt"]) == third.token_ids.tolist()
    assert second.token_ids.tolist() == really_opened_with(model, tools, [system, hostile])
    assert "Say what the weather is." in first.text and "Read a day's entry." in first.text
    (alone,) = read(model, [HI], {"user": {"type": "scripted"}}, tmp_path)
    assert len(first.token_ids) > 2 * len(alone.token_ids)


@pytest.mark.parametrize("more", ["", "x" * 4000], ids=["counted", "not counted to its end"])
def test_a_row_that_its_tools_make_too_long_says_how_many_tokens_are_theirs(
    model: Path, tmp_path: Path, more: str
) -> None:
    tools = environment(model, "weather")
    row = {"prompt": [{"role": "user", "content": "Hi" + more}]}
    whole, bare = (
        really_opened_with(model, section, HI["prompt"]) for section in (tools, {"user": {"type": "scripted"}})
    )
    length = f"{len(whole):,} tokens" if not more else "more than [0-9,]+ tokens"
    theirs = f"{len(whole) - len(bare):,} of them for the descriptions of tools .conversation.environment.tools."
    said = rf"row 1: column `prompt` is {length} long, {theirs}; data.max_prompt_tokens is 20"
    with pytest.raises(UserError, match=said):
        read(model, [row], tools, tmp_path, max_prompt_tokens=20)
    kept = read(model, [HI, row], tools, tmp_path, max_prompt_tokens=len(whole), on_bad_row="skip")
    assert (len(kept), kept.skipped) == ((2, 0) if not more else (1, 1))


def test_a_row_that_the_template_refuses_is_a_bad_one(model: Path, tmp_path: Path) -> None:
    """In a run it would be the end of it."""
    picky = copytree(model, tmp_path / "picky")
    with (picky / "chat_template.jinja").open("a") as template:
        template.write("{% if messages[0].content == 'No' %}{{ raise_exception('never') }}{% endif %}")
    rows = [HI, {"prompt": [{"role": "user", "content": "No"}]}]
    section = {"tools": environment(model, "weather")["tools"]}
    kept = read(picky, rows, section, tmp_path, on_bad_row="skip")
    assert (len(kept), kept.skipped) == (1, 1)
    with pytest.raises(UserError, match=r"row 2: .*refuses the messages user: .*never"):
        read(picky, rows, section, tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_cached_prompts_have_their_tools_in_the_key(model: Path, tmp_path: Path, workers: int) -> None:
    directory = tmp_path / "cache"
    cache = {"cache": {"directory": str(directory), "files_from_mib": 0, "workers": workers}}
    found = [
        [prompt.token_ids.tolist() for prompt in read(model, [HI] * 3, section, tmp_path, **cache)]
        for section in (environment(model, "weather"), environment(model, "Diary"), environment(model, "weather"))
    ]
    assert found[0] == found[2] != found[1] and len(list(directory.glob("*.arrow"))) == 2
    assert found[0][0] == really_opened_with(model, environment(model, "weather"), HI["prompt"])


def test_what_opens_a_conversation_is_not_always_known(model: Path) -> None:
    """Tools of servers are not, and neither is what worlds and agents say."""
    server = {"type": "mcp", "command": ["true"]}
    own = {"type": "own", "environment": f"{model.parent}/world.py:World"}
    agent = {"type": "endpoint", "function": f"{model.parent}/tools.py:reward"}
    weather = environment(model, "weather")["tools"]
    known = openings(model, {"tools": [server, *weather]})
    assert known is not None and [tool["function"]["name"] for tool in known.tools] == ["weather"]
    assert openings(model, own) is None and openings(model, agent) is None
    sections = [own, agent, {"tools": [server]}, {"type": "gymnasium", "environment": "a:B"}, {"tools": weather}]
    said = [unknown_part(ConversationConfig.model_validate({"environment": section})) for section in sections]
    assert all(said[:4]) and said[4] is None


def test_what_tools_add_when_they_are_opened_is_told(model: Path, tmp_path: Path) -> None:
    """A reset speaks to the policy, and servers say which tools they have."""
    (tmp_path / "tools.py").write_text(TOOLS + RESETS)
    server = {"type": "mcp", "command": ["true"]}
    shop = f"{tmp_path}/tools.py:Shop"
    both, diary = ({"environment": {"tools": tools}} for tools in ([shop, server], [f"{tmp_path}/tools.py:Diary"]))
    said = unknown_part(ConversationConfig.model_validate(both))
    assert said == "the tools of MCP servers are added; what the reset of a tool returns ends the last message"
    assert unknown_part(ConversationConfig.model_validate(diary)) is None


def test_pictures_of_rows_are_in_their_places(tmp_path: Path) -> None:
    of_model, data = ModelConfig(path=make_model("qwen2_5_vl", tmp_path / "model")), DataConfig()
    pictures = ModelPictures(of_model.path, data.images, tmp_path / "pictures", data.videos)
    picture(seed=3).save(tmp_path / "picture.png")
    row = {"prompt": [{"role": "user", "content": "<image>What is it?"}], "images": [str(tmp_path / "picture.png")]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    section = ConversationConfig.model_validate({"environment": {"user": {"type": "scripted"}}})
    opens = make_openings(section, of_model, load_tokenizer(of_model), pictures)
    (prompt,) = RLHFDataset([tmp_path / "rows.jsonl"], load_tokenizer(of_model), data, pictures, opens)
    (plain,) = RLHFDataset([tmp_path / "rows.jsonl"], load_tokenizer(of_model), data, pictures)
    assert prompt.token_ids.tolist() == plain.token_ids.tolist() and prompt.pictures == plain.pictures != ()


def configured(model: Path, tmp_path: Path, section: Mapping[str, Any], rows: list[Any], **data: Any) -> str:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": {"path": str(model)},
        "data": {
            "train_files": [f"{tmp_path}/rows.jsonl"], "prompts_per_step": 1, "max_prompt_tokens": 100,
            "shuffle": False, **data,
        },
        "algorithm": {"type": "grpo", "group_size": 2},
        "conversation": {"environment": section},
        "generation": {"max_response_tokens": 8},
        "reward": {"functions": [f"{model.parent}/tools.py:reward"]},
        "trainer": {"run_dir": f"{tmp_path}/run", "steps": 2},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    return str(tmp_path / "config.yaml")


def test_commands_refuse_prompts_that_their_tools_make_too_long(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As rows to train on and to validate on; the same rows are kept without tools."""
    tools = environment(model, "weather")
    config = configured(model, tmp_path, tools, [HI])
    (tmp_path / "val.jsonl").write_text(json.dumps(HI))
    for command, *options in (
        ("train", "--dry-run"), ("check",), ("data", "show"),
        ("eval", f"data.val_files=[{tmp_path}/val.jsonl]", "data.train_files=[]"),
    ):  # fmt: skip
        name, *rest = options if command == "data" else (command, *options)
        arguments = [command, name, config, *rest] if command == "data" else [command, config, *rest]
        assert main(arguments) == 2
        told = capsys.readouterr().err
        assert "for the descriptions of tools (conversation.environment.tools); data.max_prompt_tokens is 100" in told
    validated = [f"data.val_files=[{tmp_path}/val.jsonl]", "trainer.eval_every=1"]
    assert main(["train", config, *validated, "--dry-run"]) == 2
    assert {"data.train_files", "data.val_files"} <= {
        line.strip(" -").partition(":")[0] for line in capsys.readouterr().err.splitlines()
    }
    assert main(["train", config, "conversation.environment={user: {type: scripted, column: words}}", "--dry-run"]) == 2
    assert "column `words`" in capsys.readouterr().err, "and not the prompt"


def test_the_shown_row_is_the_whole_opening(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = environment(model, "weather")
    config = configured(model, tmp_path, tools, [HI], max_prompt_tokens=400)
    capsys.readouterr()
    assert main(["data", "show", config]) == 0
    shown = capsys.readouterr().out
    assert f"--- prompt, {len(really_opened_with(model, tools, HI['prompt']))} tokens" in shown
    assert "Say what the weather is." in shown and "known when a conversation is held" not in shown
    world = f"conversation.environment={{type: own, environment: '{model.parent}/world.py:World'}}"
    assert main(["data", "show", config, world]) == 0
    assert "known when a conversation is held: " in capsys.readouterr().out


LONG, SHORT = {**HI, "times": 40}, {**HI, "times": 1}


@pytest.mark.parametrize(
    "rows, steps, status", [([LONG, LONG], 1, 1), ([LONG, LONG], 4, 1), ([LONG, SHORT], 2, 0), ([LONG, SHORT], 1, 1)]
)
def test_a_run_whose_conversations_have_no_room_fails(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], steps: int, status: int
) -> None:
    """It is known when all rows were asked, or no step is left."""
    section = {"type": "own", "environment": f"{model.parent}/world.py:World"}
    config = configured(model, tmp_path, section, rows)
    assert main(["train", config, f"trainer.steps={steps}"]) == status
    out, err = capsys.readouterr()
    assert out.count("step 1: the conversation on data row 0 leaves no room for an answer: it opens with ") == 1
    assert f"and the engine has {POSITIONS} positions for them and the answer" in out
    records = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if record["step"] > 0]
    if status:
        tried = min(steps, len(rows))
        said = f"no conversation has room for an answer, and {2 * tried} were opened; the conversation on data row 0: "
        assert said in err and "Traceback" not in err and len(records) == tried - 1
    else:
        assert [record["conversation/without_room"] for record in records] == [1, 0]
    assert "token of the policy's own" not in out


def test_a_resumed_run_knows_that_a_conversation_had_room(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"type": "own", "environment": f"{model.parent}/world.py:World"}
    config = configured(model, tmp_path, section, [SHORT, LONG])
    assert main(["train", config, "trainer.steps=1", "trainer.save_every=1"]) == 0
    assert main(["train", "--resume", f"{tmp_path}/run", "trainer.steps=2"]) == 0
    assert "step 2: the conversation on data row 1 leaves no room for an answer: " in capsys.readouterr().out
    assert read_metrics(tmp_path / "run/metrics.jsonl")[-1]["conversation/without_room"] == 1


def test_saved_answers_without_room_say_why(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"type": "own", "environment": f"{model.parent}/world.py:World"}
    config = configured(model, tmp_path, section, [LONG])
    assert main(["train", config, "--debug-rollout", "trainer.steps=1"]) == 1
    said = capsys.readouterr().err
    assert "data row 0: it opens with " in said
    again = [f"trainer.run_dir={tmp_path}/again", "--debug-train", f"{tmp_path}/run/trajectories"]
    assert main(["train", config, *again]) == 1
    assert capsys.readouterr().err == said


def test_an_evaluation_whose_conversations_have_no_room_fails(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"type": "own", "environment": f"{model.parent}/world.py:World"}
    config = configured(model, tmp_path, section, [LONG])
    assert main(["eval", config, f"data.val_files=[{tmp_path}/rows.jsonl]", f"--out={tmp_path}/metrics.json"]) == 1
    assert "no conversation has room for an answer, and 1 were opened" in capsys.readouterr().err


def test_a_watch_goes_on_from_a_checkpoint() -> None:
    """Where an older one says nothing a conversation may have had room."""
    prompt = Prompt(7, np.zeros(1, np.int32), "?", "default", None, {})
    lost = trajectory_without_turns(prompt, 0, Status.TRUNCATED, "it opens with 9 tokens")
    lost.numbers = {"without_room": 1.0}
    groups, first, next_, of_old = [Group([lost], [Score(0.0)])], RoomWatch(), RoomWatch(), RoomWatch()
    first.note(groups * 2, "step 1")
    next_.load_state(json.loads(json.dumps(first.state())))
    of_old.load_state({})
    for watch in (next_, of_old):
        watch.note(groups, "step 2")
    with pytest.raises(NoRoomToAnswer, match="and 3 were opened"):
        next_.check(rows=3)
    of_old.check()


def test_validation_does_not_end_a_run() -> None:
    """Rows to train on may be shorter than those."""
    prompt = Prompt(7, np.zeros(1, np.int32), "?", "default", None, {})
    lost = trajectory_without_turns(prompt, 0, Status.TRUNCATED, "it opens with 9 tokens")
    lost.numbers = {"without_room": 1.0}
    watch, groups = RoomWatch(), [Group([lost], [Score(0.0)])]
    watch.note(groups * 5, "validation of step 0", counts=False)
    watch.check(rows=3)
    watch.note(groups * 2, "step 1")
    watch.check(rows=3)
    watch.note(groups, "step 2")
    with pytest.raises(NoRoomToAnswer, match="8 were opened; the conversation on data row 7: it opens with 9 tokens"):
        watch.check(rows=3)
