"""Who holds what in which phase, what does not fit, and the change that makes it fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli import app
from tandem.config.load import load_config
from tandem.config.tree import DpoConfig, RewardModelConfig, SftConfig, TrainConfig
from tandem.errors import UserError
from tandem.jobs.notes import memory_notes
from tandem.planning.fsdp_memory import FsdpSizes, Memory, resident
from tandem.planning.hardware import CARDS
from tandem.planning.mends import find_mend, fullest
from tandem.planning.model_shape import read_shape
from tandem.planning.phases import hosts, not_counted, phase_peaks
from tandem.planning.planned import Planned

ROOT = Path(__file__).parents[2]
GIB = 2**30
H100 = int(79.1 * GIB)
QWEN = {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "num_hidden_layers": 36}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "0.6b": {**QWEN, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
             "intermediate_size": 3072, "tie_word_embeddings": True},
    "4b": {**QWEN, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "8b": {**QWEN, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "32b": {"model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064,
            "tie_word_embeddings": False},
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """The directory of a published size, with its config.json alone."""

    def directory(size: str) -> str:
        (tmp_path / size).mkdir(exist_ok=True)
        (tmp_path / size / "config.json").write_text(json.dumps(SIZES[size]))
        return f"model.path={tmp_path / size}"

    return directory


def script(name: str) -> tuple[Path, list[str]]:
    """The recipe of an example script, and the overrides that the script gives but for paths."""
    words = (ROOT / "examples" / name).read_text().split("exec tandem", 1)[1].replace("\\\n", " ").split('"$@"')[0]
    recipe = words.split("../../", 1)[1].split('"')[0]
    given = [word.replace('"', "") for word in words.replace(", ", ",").split() if "=" in word and "$" not in word]
    return ROOT / recipe, given


SHIPPED = [
    ("grpo_trainer/run_qwen3-0.6b.sh", "0.6b"),
    ("ppo_trainer/run_qwen3-0.6b.sh", "0.6b"),
    ("grpo_trainer/run_qwen3-4b_8gpus.sh", "4b"),
    ("ppo_trainer/run_qwen3-4b_8gpus.sh", "4b"),
    ("grpo_trainer/run_qwen3-8b_2nodes.sh", "8b"),
]


@pytest.mark.parametrize(("name", "size"), SHIPPED)
def test_what_is_shipped_fits_on_h100s(name: str, size: str, model: Any) -> None:
    path, overrides = script(name)
    config = load_config(TrainConfig, path, [*overrides, model(size)])
    assert fullest(phase_peaks(config, H100)).memory.total <= H100


def test_a_reward_models_own_tokens_are_not_counted(model: Any) -> None:
    path, overrides = script("grpo_trainer/run_qwen3-0.6b.sh")
    plain = load_config(TrainConfig, path, [*overrides, model("0.6b")])
    scored = load_config(
        TrainConfig, path, [*overrides, model("0.6b"), model("4b").replace(".path", ".reward_model_path")]
    )
    (line,) = not_counted(scored)
    assert "a reward model with a tokenizer or chat template of its own" in line and not [*not_counted(plain)]


def test_dapos_recipe_fits_on_two_nodes(model: Any) -> None:
    config = load_config(TrainConfig, ROOT / "recipes/dapo.yaml", [model("32b")])
    assert sum(config.nodes_of("actor")) == 16
    assert fullest(phase_peaks(config, H100)).memory.total <= H100


def supervised(kind: type[Planned], recipe: str, *overrides: str) -> dict[tuple[str, str], Memory]:
    found = phase_peaks(load_config(kind, ROOT / "recipes" / recipe, overrides), H100)
    return {(peak.role, peak.phase): peak.memory for peak in found}


def test_what_learns_from_rows_is_planned_too(model: Any) -> None:
    """The policy alone; with DPO its reference beside it, unless that is the policy without adapters, or unused; a
    reward model with a value head beside a tied output layer."""
    path = model("0.6b")
    sft = supervised(SftConfig, "hh_sft.yaml", path)
    assert list(sft) == [("actor", "forward"), ("actor", "backward"), ("actor", "step")]
    dpo = supervised(DpoConfig, "hh_dpo.yaml", path, "training.activation_checkpointing=true")
    assert list(dpo) == [*sft, ("reference", "forward")]
    shape = FsdpSizes(read_shape(Path(path.partition("=")[2])), learns=False)
    assert dpo["actor", "step"].weights - sft["actor", "step"].weights == resident(shape).weights
    for alone in ("preference.loss=simpo", "model.lora.rank=8"):
        assert list(supervised(DpoConfig, "hh_dpo.yaml", path, alone)) == list(sft)
    reward = supervised(RewardModelConfig, "hh_reward_model.yaml", path)
    assert list(reward) == [("reward_model", phase) for phase in ("forward", "backward", "step")]
    assert reward["reward_model", "step"].weights - sft["actor", "step"].weights == 2 * (1024 + 1)
    long = supervised(SftConfig, "hh_sft.yaml", path, "data.max_tokens=65536")
    assert long["actor", "backward"].activations > 3 * sft["actor", "backward"].activations


def test_adapters_of_reward_models_and_critics_are_all_that_is_optimized_but_their_heads(model: Any) -> None:
    """A number has eight bytes of moments, and four of a master, which is a copy."""
    path = model("0.6b")
    shape = read_shape(Path(path.partition("=")[2]))
    learning = FsdpSizes(shape, lora_rank=8).learning + shape.hidden + 1
    reward = supervised(RewardModelConfig, "hh_reward_model.yaml", path, "model.lora.rank=8")
    assert reward["reward_model", "step"].optimizer == 12 * learning
    assert reward["reward_model", "step"].gradients == 4 * learning
    ppo = (path, "cluster.ranks=1", "algorithm.type=ppo", "generation.sleep=never")
    whole, adapted = held(*ppo), held(*ppo, "model.critic_lora.rank=8")
    both = FsdpSizes(shape, value_head=True)
    assert (
        whole["critic", "step"].gradients == 4 * both.learning and adapted["critic", "step"].gradients == 4 * learning
    )
    saved = whole["actor", "step"].optimizer - adapted["actor", "step"].optimizer
    assert saved == 12 * (both.learning - learning)
    assert whole["actor", "step"].gradients == adapted["actor", "step"].gradients


@pytest.mark.parametrize("job", ["sft", "dpo", "reward-model"])
def test_the_command_plans_each_job(job: str, model: Any) -> None:
    recipe = str(ROOT / f"recipes/hh_{job.replace('-', '_')}.yaml")
    given = ["--job", job] if job == "reward-model" else []
    shown = CliRunner().invoke(app, ["plan", recipe, model("8b"), "--gpus", "1xH100", *given])
    assert shown.exit_code == 2, shown.output
    assert "does NOT fit" in shown.output
    assert "the smallest change that fits" in shown.output or "no change that plan knows" in shown.output
    hosts_lines = [line for line in shown.output.splitlines() if "GiB of host memory a process" in line]
    assert [line.startswith("then ") for line in hosts_lines] == [False, True][: len(hosts_lines)]
    assert len(hosts_lines) == 1 + ("the smallest change" in shown.output)
    assert ("planned as tandem sft" in shown.output) is (job == "sft")
    searched = CliRunner().invoke(app, ["plan", recipe, model("8b"), "--search", *given])
    assert "has one pool" in str(searched.exception)


def held(model: str, *overrides: str) -> dict[tuple[str, str], Memory]:
    """By role and phase."""
    given = [model, "cluster.ranks=8", *overrides]
    found = phase_peaks(load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", given), H100)
    return {(peak.role, peak.phase): peak.memory for peak in found}


def test_a_reference_stands_beside_the_actor_until_the_update(model: Any) -> None:
    alone = held(model("4b"), "algorithm.kl.place=none")
    beside = held(model("4b"), "algorithm.kl.place=loss")
    more = {
        phase: beside["actor", phase].weights - alone["actor", phase].weights
        for phase in ("forward", "backward", "step", "publish")
    }
    assert more == {"forward": 2 * 4_022_468_096 // 8, "backward": 0, "step": 0, "publish": 0}
    assert {role for role, _ in beside} - {role for role, _ in alone} == {"reference"}


def test_a_policy_with_adapters_is_its_own_reference(model: Any) -> None:
    lora = ("model.lora={rank: 8}", "algorithm.kl.place=loss")
    assert {role for role, _ in held(model("4b"), *lora)} == {"rollout", "actor"}


def test_the_native_engine_and_the_models_take_turns(model: Any) -> None:
    asleep = held(model("4b"))
    assert asleep["rollout", "generation"].cache > 0
    assert asleep["actor", "backward"].cache == asleep["actor", "publish"].cache == 0
    assert asleep["rollout", "generation"].optimizer == 0, "the actor is in host memory"
    assert held(model("4b"), "cluster.ranks=1")["rollout", "generation"].optimizer > 0, "it computes with the actor's"
    busy, never = held(model("4b"), "trainer.max_staleness=1"), held(model("4b"), "generation.sleep=never")
    for kept in (busy, never):
        assert kept["actor", "backward"].cache == asleep["rollout", "generation"].cache
    again = held(model("4b"), "trainer.max_staleness=1", "generation.sleep=always")
    assert again["actor", "backward"].cache == 0


def test_a_native_engine_has_room_for_all_that_it_may_have_at_once(model: Any) -> None:
    def rows(*overrides: str) -> float:
        given = ("data.prompts_per_step=9", "algorithm.group_size=4", "trainer.eval_every=0", *overrides)
        return held(model("0.6b"), *given)["rollout", "generation"].cache / row

    row = 28 * 2 * 8 * 128 * 2 * (512 + 1024)
    assert rows() == 2 * 4, "of nine prompts on eight ranks some have two"
    assert rows("algorithm={type: remax}", "algorithm.group_size=4") == 2 * 5, "and a greedy answer"
    assert rows("trainer.max_staleness=2", "generation.partial_rollouts=false") == 3 * 2 * 4
    assert rows("trainer.max_staleness=1") == 2 * 9 * 4, "whoever is free takes more"
    assert rows("trainer.eval_every=1", "generation.max_running=50") == 50, "of a validation's rows nobody knows"
    assert rows("conversation={environment: {type: own, environment: 'm:Own'}}") == 2 * 2 * 4, (
        "ended turns wait for the next ones"
    )
    assert (
        rows("conversation={environment: {type: own, environment: 'm:Own'}}", "generation.prefix_cache_tokens=0")
        == 2 * 4
    )


def test_an_engine_of_its_own_processes_takes_its_share(model: Any) -> None:
    def taken(*overrides: str) -> float:
        memory = held(model("4b"), "generation.type=vllm", *overrides)["rollout", "generation"]
        return round((memory.cache + memory.weights) / H100, 3)

    assert taken() == 0.8
    assert taken("generation.memory_share=0.5") == 0.5
    assert taken("generation.memory_share=0.4", "generation.replicas=2") == 0.8, "each takes its share"
    assert taken("generation.engine_args.gpu_memory_utilization=0.6") == 0.6


def test_the_smallest_change_that_fits_is_offered_and_fits(model: Any) -> None:
    path, overrides = script("grpo_trainer/run_qwen3-4b_8gpus.sh")
    given = [*overrides, model("4b"), "generation.max_running=64", "training.reduce_once=true"]
    room = fullest(phase_peaks(load_config(TrainConfig, path, given), H100)).memory.total
    mend = find_mend(TrainConfig, path, given, room - GIB)
    assert mend is not None
    assert mend.overrides == ("training.reduce_once=false",)
    found = phase_peaks(load_config(TrainConfig, path, [*given, *mend.overrides]), room - GIB)
    assert fullest(found).memory.total == mend.most.memory.total <= room - GIB
    several = find_mend(TrainConfig, path, given, room // 2)
    assert several is not None
    assert len(several.overrides) > 1
    assert find_mend(TrainConfig, path, given, GIB) is None


def test_a_judge_that_is_too_large_answers_fewer_requests_at_once(model: Any) -> None:
    recipe = ROOT / "recipes/sort4_judged.yaml"
    given = [model("0.6b"), model("4b").replace(".path", ".judge_path"), "training.tokens_per_micro_batch=64"]
    given += ["generation.max_running=1", "training.reduce_once=false", "reward.judge.generation.max_running=8"]
    peak = fullest(phase_peaks(load_config(TrainConfig, recipe, given), H100))
    mend = find_mend(TrainConfig, recipe, given, peak.memory.total - int(peak.memory.cache * 0.4))
    assert mend is not None and mend.overrides == ("reward.judge.generation.max_running=4",), mend


def test_what_a_run_would_refuse_is_no_plan_and_no_change_that_mends(model: Any) -> None:
    """A rank shares its tokens with nobody, and adapters never fill weights that an engine has dropped."""
    recipe = ROOT / "recipes/gsm8k_grpo.yaml"
    given = [model("8b"), "cluster.ranks=6"]
    long = [model("0.6b"), "generation.max_response_tokens=131072", "generation.max_running=1"]
    assert find_mend(TrainConfig, recipe, long, 20 * GIB) is None
    mend = find_mend(TrainConfig, recipe, long, 20 * GIB, 8)
    assert mend is not None and mend.overrides == ("cluster.ranks=8", "training.context_parallel=2")
    adapters = [*given, "model.lora={rank: 16}", "generation={type: vllm, memory_share: 0.9}"]
    mend = find_mend(TrainConfig, recipe, [*adapters, "generation.sleep=never"], H100, 8)
    assert mend is not None and "generation.sleep=weights" not in mend.overrides
    for wrong in (
        "training.context_parallel=4",
        "training.shard_size=4",
        "generation={type: vllm, tensor_parallel: 4}",
    ):
        with pytest.raises(UserError, match=r"use a divisor"):
            phase_peaks(load_config(TrainConfig, recipe, [*given, wrong]), H100)


def test_host_memory_is_what_waits_there_and_what_checkpoints_copy(model: Any) -> None:
    def kept(*overrides: str) -> tuple[float, float]:
        given = [model("8b"), "cluster.ranks=8", *overrides]
        (host,) = hosts(load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", given))
        return host.models / parameters * 8, host.copies / parameters * 8

    parameters = 8_190_735_360
    models, copies = kept()
    assert models == pytest.approx(12 + 2), "policy and reference, while answers are generated"
    assert 14 < copies < 14.5, "a share of the weights, and the optimizer's part: layers are written whole"
    assert kept("generation.sleep=never")[0] == pytest.approx(2), "the reference during the update"
    assert kept("training.optimizer_offload=true")[0] == pytest.approx(4 + 8 + 2)
    assert kept("training.cpu_offload=true", "generation.sleep=never")[0] == pytest.approx(12 + 2)


def test_the_command_says_what_fits_and_leaves_by_it(model: Any) -> None:
    recipe = str(ROOT / "recipes/gsm8k_grpo.yaml")
    fits = CliRunner().invoke(app, ["plan", recipe, model("0.6b"), "--gpus", "1xH100"])
    assert fits.exit_code == 0, fits.output
    assert "main: fits: " in fits.output
    assert "GiB of host memory a process" in fits.output
    few = CliRunner().invoke(app, ["plan", recipe, model("0.6b"), "cluster.ranks=8", "--gpus", "4xH100"])
    assert few.exit_code and "8 processes, and each takes a GPU of its own" in str(few.exception)
    fails = CliRunner().invoke(app, ["plan", recipe, model("8b"), "--gpus", "1xH100"])
    assert fails.exit_code == 2
    assert "does NOT fit" in fails.output
    assert "the smallest change that fits" in fails.output or "no change" in fails.output


def test_the_command_tells_all_mistakes_at_once(model: Any, tmp_path: Path) -> None:
    """Keys, engines, ranks, and models that planning does not know, also where the configuration is not sound."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    engine = "generation={type: vllm, tensor_parallel: 4}"
    given = [f"model.path={tmp_path}", "model.judge_path=j", "cluster.ranks=6", "training.shard_size=4", engine]
    told = [
        "generation.tensor_parallel: 4 does not divide the 6 ranks",
        "training.shard_size: 6 ranks cannot be cut into groups of 4",
        "model: plan does not know how large models of type 'bert' are",
        f"model: {Path.cwd() / 'j'} has no config.json, which is what planning needs of a model",
    ]
    for more, first in ((["trainer.epoch=1"], ["trainer.epoch: unknown key"]), ([], [])):
        shown = CliRunner().invoke(app, ["plan", str(ROOT / "recipes/gsm8k_grpo.yaml"), *given, *more])
        title, *lines = str(shown.exception).splitlines()
        assert f"recipes/gsm8k_grpo.yaml: {len(first) + 4} errors in the configuration" in title
        assert [begins in line for begins, line in zip([*first, *told], lines, strict=True)] == [True] * len(lines)
    shown = CliRunner().invoke(app, ["plan", str(ROOT / "recipes/gsm8k_grpo.yaml"), model("0.6b"), "cluster.ranks=six"])
    assert str(shown.exception).count("\n") == 1, "checks that would read what was refused find nothing"


JUDGED = ["cluster.ranks=8", "data.max_prompt_tokens=1024", "generation.max_response_tokens=2048"]


def judged(model: Any, *overrides: str) -> dict[tuple[str, str, str], Memory]:
    """GRPO of a model of 0.6B that one of 4B judges: the memory of each pool, role and phase."""
    judge = model("4b").replace("model.path", "model.judge_path")
    config = load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", [model("0.6b"), judge, *JUDGED, *overrides])
    return {(one.pool, one.role, one.phase): one.memory for one in phase_peaks(config, H100)}


def test_a_judge_beside_the_models_keeps_its_weights_and_its_cache(model: Any) -> None:
    """Native engines: what 4B parameters take in bfloat16, and for each answer question, answer and reply."""
    native = "reward.judge={generation: {type: native, max_response_tokens: 512}}"
    alone = [*JUDGED, "trainer.eval_every=0"]
    config = load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", [model("0.6b"), *alone])
    without = {(one.pool, one.role, one.phase): one.memory for one in phase_peaks(config, H100)}
    found = judged(model, native, "trainer.eval_every=0")
    parameters, answers = 4_022_468_096, config.data.prompts_per_step * config.algorithm.group_size // 8
    row = (1024 + 2048 + 512 + 512) * 36 * 2 * 8 * 128 * 2
    assert set(found) - set(without) == {("main", "judge", "generation")}
    for where, memory in without.items():
        assert found[where].weights - memory.weights == 2 * parameters
        assert found[where].cache - memory.cache == min(answers, 256) * row
        assert found[where].logits == memory.logits
    rollout, judge = found["main", "rollout", "generation"], found["main", "judge", "generation"]
    assert judge.logits - rollout.logits == min(answers, 256) * 151936 * 4 * 3
    validating = judged(model, native)["main", "judge", "generation"]
    assert validating.cache >= 256 * row, "all answers of a validation are judged at once"


def test_a_judge_in_a_pool_of_its_own(model: Any) -> None:
    """vLLM takes its share there, and nothing of the other pool."""
    pools = ["placement={pools: {main: [8], judges: [2]}, roles: {judge: judges}}", "cluster.ranks=null"]
    found = judged(model, "reward.judge={generation: {type: vllm}}", *pools)
    alone = [where for where in found if where[0] == "judges"]
    assert alone == [("judges", "judge", "generation")]
    memory = found[alone[0]]
    assert memory.weights == 2 * 4_022_468_096
    assert memory.weights + memory.cache == int(0.9 * H100)
    assert found["main", "rollout", "generation"].weights < 2 * 4_022_468_096
    with pytest.raises(UserError, match=r"reward\.judge\.generation\.memory_share: 4\.0 GiB of a GPU is less than the"):
        judged(model, "reward.judge={generation: {type: vllm, memory_share: 0.05}}", *pools)


def test_how_long_a_judge_takes_is_not_known(model: Any) -> None:
    judge = model("4b").replace("model.path", "model.judge_path")
    given = ["plan", str(ROOT / "recipes/gsm8k_grpo.yaml"), model("0.6b"), judge]
    assert "how long a judge (model.judge_path) takes is not known" in str(
        CliRunner().invoke(app, [*given, "--search"]).exception
    )


def test_gpus_that_stay_idle_and_runs_of_something_else_are_told(model: Any, tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes/gsm8k_grpo.yaml")
    idle = CliRunner().invoke(app, ["plan", recipe, model("0.6b"), "--gpus", "8xH100"])
    assert idle.output.startswith("1 of 8 GPUs: cluster.ranks or placement.pools would have to ask for the others")
    other = model("8b").partition("=")[2]
    (tmp_path / "config.yaml").write_text(
        f"model: {{path: {other}}}\ndata: {{train_files: [a.jsonl]}}\ntrainer: {{steps: 1, run_dir: r}}"
    )
    told = CliRunner().invoke(app, ["plan", recipe, model("0.6b"), "--search", "--calibrate", str(tmp_path)])
    assert "which is of another size than" in str(told.exception) and told.output == ""


def test_what_is_taken_for_granted_is_told_and_answers_have_a_longest(model: Any) -> None:
    given = ["plan", str(ROOT / "recipes/gsm8k_grpo.yaml"), model("0.6b")]
    assert CliRunner().invoke(app, given).output.startswith("taken for 8xH100, as there is no --gpus\n")
    long = CliRunner().invoke(app, [*given, "generation.max_response_tokens=64", "--search", "--response-tokens", "65"])
    assert "--response-tokens 65: an answer has generation.max_response_tokens = 64 at most" in str(long.exception)
    assert long.output == ""


def test_an_engine_that_reads_the_trainers_parameters_needs_no_publish(model: Any) -> None:
    recipe = str(ROOT / "recipes/gsm8k_grpo.yaml")
    shown = CliRunner().invoke(app, ["plan", recipe, model("0.6b"), "generation.type=native", "--search"])
    as_it_is = next(line for line in shown.output.splitlines() if "as it is" in line)
    assert "publish 0.0" in as_it_is


def test_a_run_says_before_it_starts_whether_it_fits(model: Any) -> None:
    config = load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", [model("8b")])
    (line,) = memory_notes(config, H100, "NVIDIA H100")
    assert line.startswith("memory of main: does NOT fit, ")
    unknown = load_config(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", ["model.path=nowhere"])
    (line,) = memory_notes(unknown, H100, "NVIDIA H100")
    assert "which is what planning needs of a model" in line


def test_megatron_is_planned_by_its_degrees(model: Any) -> None:
    """The optimizer over all ranks; degrees that do not divide are refused, and the mend's do divide."""
    recipe = ROOT / "recipes/gsm8k_grpo.yaml"

    def held_by_actor(*degrees: str) -> tuple[float, float]:
        fixed = ["model.dtype=bfloat16", "algorithm.kl.place=none"]
        given = [model("8b"), "cluster.ranks=8", "training={type: megatron}", *fixed, *degrees]
        found = phase_peaks(load_config(TrainConfig, recipe, given), H100)
        memory = next(peak.memory for peak in found if (peak.role, peak.phase) == ("actor", "step"))
        return memory.gradients / 8_190_735_360, memory.optimizer / 8_190_735_360

    assert held_by_actor() == pytest.approx((4, 12 / 8))
    assert held_by_actor("training.tensor_parallel=4") == pytest.approx((4 / 4, 12 / 8), rel=1e-3)
    with pytest.raises(UserError, match="tensor_parallel = 3 does not divide 32 attention heads"):
        held_by_actor("training.tensor_parallel=3")
    given = [model("8b"), "cluster.ranks=8", "training={type: megatron}", "model.dtype=bfloat16"]
    assert fullest(phase_peaks(load_config(TrainConfig, recipe, given), H100)).memory.total > H100
    mend = find_mend(TrainConfig, recipe, given, H100)
    assert mend is not None and mend.most.memory.total <= H100
    assert all(change.startswith(("training.", "generation.")) for change in mend.overrides)
    (host,) = hosts(load_config(TrainConfig, recipe, given))
    assert host.copies == 0 and host.models > 2 * 8_190_735_360, "weights and moments wait there, gradients nowhere"


def test_the_command_plans_and_searches_with_megatron(model: Any) -> None:
    recipe = str(ROOT / "recipes/gsm8k_grpo.yaml")
    given = [model("0.6b"), "cluster.ranks=8", "training={type: megatron, tensor_parallel: 2}"]
    shown = CliRunner().invoke(app, ["plan", recipe, *given, "--search"])
    assert shown.exit_code == 0, shown.output
    assert "main: fits: " in shown.output and "as it is: " in shown.output
    traced = CliRunner().invoke(app, ["plan", recipe, *given, "--trace"])
    assert "the fake step is of training.type: fsdp" in str(traced.exception) and traced.output == ""


def test_gpus_that_are_there_are_taken_before_a_step_gets_slower(model: Any) -> None:
    recipe, given = ROOT / "recipes/gsm8k_grpo.yaml", [model("8b")]
    alone = find_mend(TrainConfig, recipe, given, H100, 8)
    assert alone is not None and "training.optimizer_offload=true" in alone.overrides
    taken = find_mend(TrainConfig, recipe, given, H100, 8, 8, given=True)
    assert taken is not None and taken.overrides[0].startswith("cluster.ranks=")
    large = [model("32b"), "cluster.ranks=8", "generation={type: vllm, tensor_parallel: 4, sleep: weights}"]
    large += ["training.activation_checkpointing=true", "model.dtype=bfloat16", "algorithm.type=ppo"]
    nodes = find_mend(TrainConfig, recipe, large, H100, 32, 8, given=True)
    assert nodes is not None and "cluster.type=ray" in nodes.overrides and "cluster.ranks=null" in nodes.overrides
    (pools,) = (override for override in nodes.overrides if "pools" in override)
    assert re.fullmatch(r"placement\.pools\.main=\[8(, 8)+\]", pools)


def test_few_rows_at_once_are_a_change_that_makes_it_fit(model: Any) -> None:
    recipe, given = ROOT / "recipes/gsm8k_grpo.yaml", [model("8b"), "generation.max_response_tokens=30000"]
    mend = find_mend(TrainConfig, recipe, given, H100)
    assert mend is not None and any("max_running=" in override for override in mend.overrides)


def test_what_one_machine_has_not_and_what_a_run_refuses_is_told(model: Any, tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes/gsm8k_grpo.yaml")

    def told(*given: str) -> str:
        shown = CliRunner().invoke(app, ["plan", recipe, *given])
        return f"{shown.output}{shown.exception}"

    ranks = ("cluster={type: ray, ranks: 16}", "--gpus", "2x8xH100")
    assert "16 are of one machine, and one has 8 GPUs here; more are pools" in told(model("0.6b"), *ranks)
    engine = ("generation={type: vllm, tensor_parallel: 4}", "--gpus", "1xH100")
    assert "generation.tensor_parallel is 4, and an engine takes as many GPUs" in told(model("0.6b"), *engine)
    adapters = ("model.lora={rank: 8}", "training={type: megatron}")
    assert "adapters are of training.type: fsdp" in told(model("0.6b"), *adapters)
    (tmp_path / "config.yaml").write_text((ROOT / "recipes/gsm8k_grpo.yaml").read_text())
    of_run = CliRunner().invoke(app, ["plan", str(tmp_path), model("0.6b")])
    assert "main: fits: " in of_run.output


@pytest.mark.parametrize(
    ("size", "given", "card", "gpus", "per_node"),
    [
        ("32b", ["cluster.ranks=2", "training.tokens_per_micro_batch=16384"], "A100", 16, 8),
        ("4b", ["cluster.ranks=4", "training.tokens_per_micro_batch=2048", "algorithm.type=ppo"], "RTX4090", 8, 4),
        ("32b", ["cluster.ranks=8"], "H100", 8, 8),
    ],
)
def test_changes_that_fit_together_are_found(
    model: Any, size: str, given: list[str], card: str, gpus: int, per_node: int
) -> None:
    """Each of them alone may leave the highest peak as it is, or be possible after another one only."""
    recipe, room = ROOT / "recipes/gsm8k_grpo.yaml", CARDS[card].memory_bytes
    overrides = [model(size), "generation.max_response_tokens=1024", *given]
    mend = find_mend(TrainConfig, recipe, overrides, room, gpus, per_node, given=True)
    assert mend is not None
    found = phase_peaks(load_config(TrainConfig, recipe, [*overrides, *mend.overrides]), room)
    assert fullest(found).memory.total <= room


def test_all_gpus_of_a_node_are_tried_however_many_there_are(model: Any) -> None:
    given = [model("8b"), "generation.type=vllm", "generation.sleep=weights"]
    mend = find_mend(TrainConfig, ROOT / "recipes/gsm8k_grpo.yaml", given, H100, 3, 3, given=True)
    assert mend is not None and "cluster.ranks=3" in mend.overrides


def test_an_engine_whose_weights_exceed_its_share_is_told(model: Any) -> None:
    recipe, given = ROOT / "recipes/gsm8k_grpo.yaml", [model("8b"), "cluster.ranks=8"]
    small = [*given, "generation={type: vllm, sleep: weights, memory_share: 0.15}"]
    with pytest.raises(
        UserError, match=r"generation\.memory_share: 0\.15 of a GPU is 11\.9 GiB, and an engine's weights"
    ):
        phase_peaks(load_config(TrainConfig, recipe, small), H100)
    assert phase_peaks(load_config(TrainConfig, recipe, [*small, "generation.tensor_parallel=2"]), H100)
