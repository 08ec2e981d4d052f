"""What test_layouts.py runs by scripts.py in .venv-megatron: many layouts in one launch.

Worlds of 1, 2 and 4 forked processes, one after another; each trains the same models in several layouts. The world of
one trains them with FSDP's engine, too. Rank 0 leaves a world's findings in DIRECTORY/<ranks>.pt.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tandem.batching.packing import micro_batches
from tandem.config.model import ModelConfig
from tandem.config.rules.ranks import find_bridge_mistakes
from tandem.config.training import FsdpTrainingConfig, MegatronTrainingConfig
from tandem.errors import UserError
from tandem.training.base import TrainEngine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, MicroBatch, Outputs, TokenColumns
from tandem.weights import bridge
from tandem.weights.bridge import Address, Receiver, Sender, open_bridge
from tandem.workers.registration import Mesh
from tests import saving
from tests.every_loss import every_loss, fill_columns

VOCABULARY, GROUPS, GROUP_SIZE = 23, 4, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,  # which two ranks do not share evenly
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.2,
}


def _rope(kind: str) -> dict[str, Any]:
    """Scaled so that rows of a few tokens differ by it."""
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    trained = {} if kind == "linear" else {"original_max_position_embeddings": 16}
    return {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **bands, **trained}


MODELS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    **{f"llama_{kind}": LlamaConfig(**SHAPE, rope_parameters=_rope(kind)) for kind in ("linear", "llama3", "yarn")},
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True
    ),
}
CRITIC = "critic"
OPTIMIZER = AdamWConfig(lr=1e-2, eps=1e-4, schedule="linear", warmup_steps=2, weight_decay=0.01, max_grad_norm=0.5)
"""A large epsilon: AdamW's first steps would blow the rounding noise of a zero gradient up to the learning rate."""
TP2 = {"tensor_parallel": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_parallel": 2}
VPP2 = {**PP2, "virtual_pipeline": 2}
CP2 = {"context_parallel": 2}
EP2 = {"expert_parallel": 2}
ROUTER_LOSSES: dict[str, Any] = {"load_balancing_loss": 50.0, "router_z_loss": 10.0}
DENSE, MOE = ("qwen2", CRITIC), ("qwen3_moe",)
Runs = Mapping[int, Sequence[tuple[dict[str, int], Sequence[str]]]]
SAVED: dict[str, dict[str, int]] = {"qwen2": TP2, CRITIC: TP2, "qwen3_moe": {**SP2, **EP2}}
"""The layout in which each model is saved after two steps."""
RESUMED: Runs = {
    1: [({}, DENSE)],
    2: [(PP2, DENSE), (VPP2, ("qwen2",)), ({}, ("qwen2",)), (EP2, MOE)],
    4: [({**PP2, **EP2}, MOE)],
}
"""By the number of ranks: layouts that continue from there."""
RUNS: Runs = {
    2: [
        ({}, (*DENSE, *MOE)),
        (TP2, (*DENSE, "llama_llama3")),
        (SP2, (*DENSE, "qwen3", *MOE)),
        (PP2, (*DENSE, "llama", "llama_llama3", *MOE)),
        (VPP2, DENSE),
        (CP2, (*DENSE, "llama_yarn", *MOE)),
        (EP2, MOE),
        ({**SP2, **EP2}, MOE),
        ({**SP2, "activation_checkpointing": True}, MOE),
    ],
    1: [({}, (*MODELS, CRITIC)), ({"activation_checkpointing": True}, ("qwen2",))],
    4: [({**TP2, **PP2}, DENSE), ({**SP2, **PP2, **EP2}, MOE), ({**SP2, **EP2, "expert_tensor_parallel": 2}, MOE)],
}
"""By the number of ranks: layouts, and the models that train in each."""

WIDE: dict[str, PreTrainedConfig] = {
    "wide": Qwen3Config(**{**SHAPE, "hidden_size": 128, "intermediate_size": 256}, tie_word_embeddings=False),
    "wide_moe": Qwen3MoeConfig(
        **{**SHAPE, "hidden_size": 128}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96
    ),
}
"""Models in which norms and the padding of buffers are a small part."""
Measured = Mapping[int, Sequence[tuple[dict[str, int], str]]]
MEASURED: Measured = {
    1: [],
    2: [({}, "wide"), (TP2, "wide"), (PP2, "wide"), (EP2, "wide_moe"), ({**SP2, **EP2}, "wide_moe")],
    4: [({**TP2, **PP2}, "wide"), ({**SP2, **PP2, **EP2}, "wide_moe")],
}
"""By the number of ranks: the layouts whose memory is compared with docs/megatron.md, and a model."""


@dataclass(frozen=True)
class Plan:
    """What a launch does."""

    runs: Runs
    resumed: Runs
    measured: Measured
    saved: Sequence[str]
    losses: Mapping[int, dict[str, int]]
    """By the number of ranks: a layout of two data-parallel groups in which every loss is tried."""

    @property
    def models(self) -> Sequence[str]:
        """Those that train or are resumed."""
        used = {
            name
            for table in (self.runs, self.resumed)
            for runs in table.values()
            for _, names in runs
            for name in names
        }
        return [name for name in (*MODELS, CRITIC) if name in used]


WHOLE = Plan(RUNS, RESUMED, MEASURED, tuple(SAVED), losses={2: {}, 4: CP2})
QUICK = Plan(
    runs={
        2: [
            (TP2, ("qwen2",)),
            (PP2, (CRITIC, "llama_llama3")),
            (VPP2, ("qwen2",)),
            (CP2, ("llama_yarn",)),
            ({**SP2, **EP2}, MOE),
        ],
        1: [({}, MOE), ({"activation_checkpointing": True}, ("qwen2",))],
    },
    resumed={1: [], 2: [(PP2, ("qwen2",)), (EP2, MOE)]},
    measured={1: [], 2: [(PP2, "wide"), ({**SP2, **EP2}, "wide_moe")]},
    saved=("qwen2", *MOE),
    losses={2: {}},
)
"""A part of the whole: each kind of parallelism once, with experts and a critic, and what is saved of either kind."""


def name_of(layout: dict[str, int]) -> str:
    short = "".join(f"{''.join(word[0] for word in key.split('_'))}{value}" for key, value in layout.items())
    return short.replace("True", "") or "plain"


class Curved:
    """A loss that is not linear in what the model says, with an entropy bonus."""

    token_local = False

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights_S, shares_S = columns.loss_weights, columns.shares
        assert weights_S is not None and shares_S is not None
        if outputs.values_S is not None:
            term_S = (outputs.values_S - 1).square()
        else:
            assert outputs.logprobs_S is not None and outputs.entropy_S is not None
            term_S = outputs.logprobs_S.square() - 0.1 * outputs.entropy_S
        return (weights_S * term_S).sum(), {"mean": (shares_S * term_S.detach()).sum()}


def batch() -> Batch:
    """Siblings, of uneven lengths."""
    random = np.random.default_rng(0)
    rows = GROUPS * GROUP_SIZE
    prompts = [random.integers(0, VOCABULARY, size) for size in (5, 2, 7, 1) for _ in range(GROUP_SIZE)]
    prompts = [prompts[row - row % GROUP_SIZE] for row in range(rows)]
    responses = random.integers(1, 12, rows)
    tokens = int(responses.sum())
    mask = random.random(tokens) < 0.8
    share = (mask / mask.sum()).astype(np.float32)
    return Batch(
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_offsets=np.cumsum([0, *map(len, prompts)]),
        response_ids=random.integers(0, VOCABULARY, tokens).astype(np.int32),
        response_offsets=np.concatenate(([0], responses.cumsum())),
        loss_mask=mask,
        versions=np.zeros(tokens, dtype=np.int32),
        groups=np.repeat(np.arange(GROUPS, dtype=np.int32), GROUP_SIZE),
        trajectories=np.arange(rows, dtype=np.int32),
        prompts=np.repeat(np.arange(GROUPS, dtype=np.int32), GROUP_SIZE),
        rewards=np.zeros(rows, dtype=np.float32),
        scored=np.ones(rows, dtype=np.bool_),
        tokens=TokenColumns(loss_weights=share, shares=share),
    )


def part(place: int, places: int, step: int) -> list[MicroBatch]:
    """The rows of one of the data-parallel places: uneven, and none for the last one in step 1, which packs nothing."""
    rows = list(range(GROUPS * GROUP_SIZE))
    if places > 1:
        last = places - 1 if step == 1 else places
        cut = len(rows) - last + 1
        mine = [rows[:cut], *[[row] for row in rows[cut:]], []]
        rows = mine[place] if place < last else []
    return micro_batches(batch(), rows, 1 if step == 1 else 24)


def write_models(directory: Path) -> None:
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, float("norm" in parameter_name), 0.1)
        model.save_pretrained(directory / name)
    for name, config in WIDE.items():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
    torch.manual_seed(1)
    critic = transformers.AutoModelForTokenClassification.from_config(Qwen2Config(**SHAPE, num_labels=1))
    torch.nn.init.normal_(critic.score.weight, std=0.1)
    critic.save_pretrained(directory / CRITIC)


def described(directory: Path, name: str) -> dict[str, Any]:
    """Arguments of either engine."""
    critic = name == CRITIC
    model = ModelConfig(path=directory / name)
    return {"model": model, "optimizer": OPTIMIZER, "total_steps": 6, "temperature": 0.8, "value_head": critic}


def megatron(directory: Path, name: str, layout: dict[str, int]) -> TrainEngine:
    from tandem.training.megatron.engine import MegatronEngine

    return MegatronEngine(training=MegatronTrainingConfig(type="megatron", **layout), **described(directory, name))


def fsdp(directory: Path, name: str) -> TrainEngine:
    from tandem.training.fsdp import make_engine

    return make_engine(training=FsdpTrainingConfig(), **described(directory, name))


def leave() -> None:
    """Megatron-Core's groups, so that the next engine may have another layout."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def train(engine: TrainEngine, steps: range, place: int, places: int) -> list[dict[str, float]]:
    """Loss, metrics, gradient norm and learning rate of each step."""
    found: list[dict[str, float]] = []
    for step in steps:
        result = engine.forward_backward(part(place, places, step), Curved())
        found.append({"loss": result.loss, **result.metrics, **engine.optimizer_step()})
    return found


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def said(engine: TrainEngine, place: int, places: int) -> dict[int, list[float]]:
    """What the model says of each response token, by its place in the batch; on every rank."""
    own = part(place, places, 0)
    found: dict[int, list[float]] = {}
    for outputs, micro_batch in zip(engine.forward(own), own, strict=True):
        kinds = [x for x in (outputs.logprobs_S, outputs.entropy_S, outputs.values_S, outputs.squared_probs_S)]
        for i, where in enumerate(micro_batch.source):
            found[int(where)] = [float(x[i]) for x in kinds if x is not None]
    everyone: list[Any] = [found]
    if places > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
    return {where: values for one in everyone for where, values in one.items()}


def place_of(layout: dict[str, int]) -> tuple[int, int]:
    """This rank's data-parallel group, and how many there are, as dispatch counts them."""
    mesh = Mesh(MegatronTrainingConfig(type="megatron", **layout).mesh(dist.get_world_size()))
    groups = mesh.data_groups()
    return next(place for place, ranks in enumerate(groups) if dist.get_rank() in ranks), len(groups)


def trained(engine: TrainEngine, place: int, places: int) -> dict[str, Any]:
    before = said(engine, place, places)
    return {"said": before, "steps": train(engine, range(3), place, places), "weights": weights(engine)}


def bridged(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """What a receiver in another pool has after a publish of this one's ranks: a thread of rank 0 stands for it."""
    bridge.BUCKET_BYTES = 2048
    opened: Any = open_bridge(dist.get_world_size(), 1) if dist.get_rank() == 0 else (None,)
    address = [opened[0]]
    dist.broadcast_object_list(address)
    with ThreadPoolExecutor(1) as pool, engine.shards() as shards:
        received = pool.submit(receive, address[0]) if dist.get_rank() == 0 else None
        Sender(address[0], dist.get_rank(), shards).send(shards)
        return received.result() if received else {}


def receive(address: Address) -> dict[str, torch.Tensor]:
    receiver = Receiver(address, 0)
    found = {name: tensor.clone() for name, tensor in receiver.receive()}
    assert receiver.publish_bytes == sum(tensor.nbytes for tensor in found.values())
    assert receiver.bucket_bytes <= 2048 + 8 * address.senders
    return found


def save(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """Two steps, and what the model is then."""
    engine = megatron(directory, name, SAVED[name])
    train(engine, range(2), *place_of(SAVED[name]))
    (directory / "saved" / name).mkdir(parents=True, exist_ok=True)
    saving.save(engine, directory / "saved" / name)
    return weights(engine)


def resume(directory: Path, name: str, layout: dict[str, int]) -> dict[str, Any]:
    """The third step."""
    engine = megatron(directory, name, layout)
    engine.load(directory / "saved" / name)
    return {"steps": train(engine, range(2, 3), *place_of(layout)), "weights": weights(engine)}


def refused(directory: Path) -> str:
    """What is said of a checkpoint whose experts were spread, where they are not."""
    engine = megatron(directory, "qwen3_moe", PP2)
    before = weights(engine)
    try:
        engine.load(directory / "saved" / "qwen3_moe")
    except UserError as error:
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())
        return str(error)
    return ""


def without_padding(directory: Path) -> list[bool]:
    """Whether tied embeddings in a pipeline go on as if undisturbed, with and without the mend for it."""
    from tandem.training.megatron import fixes

    equal: list[bool] = []
    for mended in (True, False):
        fixes.OLD = mended
        engine, resumed = megatron(directory, "qwen2", PP2), megatron(directory, "qwen2", PP2)
        target = directory / f"padding {mended}"
        target.mkdir(exist_ok=True)
        train(engine, range(2), 0, 1)
        saving.save(engine, target)
        resumed.load(target)
        for one in (engine, resumed):
            train(one, range(2, 3), 0, 1)
        theirs = weights(resumed)
        equal.append(all(torch.equal(tensor, theirs[name]) for name, tensor in weights(engine).items()))
    fixes.OLD = True
    return equal


def carried(directory: Path, layout: dict[str, int]) -> dict[Any, Any]:
    """What each model that can lie so is exported as."""
    findings: dict[Any, Any] = {}
    for name in MODELS:
        training = MegatronTrainingConfig(type="megatron", **layout)
        if not any(find_bridge_mistakes(directory / name, training, dist.get_world_size())):
            findings["carried", name_of(layout), name] = weights(megatron(directory, name, layout))
    return findings


def losses(engine: Callable[[], TrainEngine], place: int, places: int) -> dict[str, dict[str, float]]:
    """One step of each policy loss; with two data-parallel groups, two micro-batches against one."""
    rows = list(range(GROUPS * GROUP_SIZE))
    whole = fill_columns(batch())
    if places == 1:
        own = micro_batches(whole, rows, 60)
    else:
        own = micro_batches(whole, rows[:9], 60) if place == 0 else micro_batches(whole, rows[9:], 1000)
        assert len(own) > 1 if place == 0 else len(own) == 1
    found: dict[str, dict[str, float]] = {}
    for name, loss in every_loss().items():
        model = engine()
        result = model.forward_backward(own, loss)
        found[name] = {"loss": result.loss, **result.metrics, **model.optimizer_step()}
    return found


def balanced(directory: Path, layout: dict[str, int]) -> dict[str, float]:
    """The first step of the experts with both losses of their routers."""
    engine = megatron(directory, "qwen3_moe", {**layout, **ROUTER_LOSSES})
    return train(engine, range(1), *place_of(layout))[0]


def memory(directory: Path, name: str, layout: dict[str, int]) -> tuple[float, float]:
    """Bytes of weights and gradients, and of masters and moments, in bfloat16: means over the ranks."""
    from tandem.training.megatron.engine import MegatronEngine

    training = MegatronTrainingConfig(type="megatron", **layout)
    engine: Any = MegatronEngine(ModelConfig(path=directory / name, dtype="bfloat16"), training, OPTIMIZER)
    buffers = [buffer for model in engine._models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    held = sum(buffer.param_data.nbytes + buffer.grad_data.nbytes for buffer in buffers)
    parts = engine._trained._parts
    masters = [master for part in parts for master in part.get_parameters()]
    moments = [state[x] for part in parts for state in part.optimizer.state.values() for x in ("exp_avg", "exp_avg_sq")]
    found = torch.tensor([held, sum(tensor.nbytes for tensor in (*masters, *moments))], dtype=torch.float64)
    dist.all_reduce(found)
    mean = found / dist.get_world_size()
    return float(mean[0]), float(mean[1])


def compared(directory: Path, ranks: int, plan: Plan) -> dict[Any, Any]:
    """Every layout of so many ranks; at one rank FSDP's engine, too."""
    findings: dict[Any, Any] = {}
    if ranks == 1:
        for name in plan.models:
            findings["fsdp", name] = trained(fsdp(directory, name), 0, 1)
        findings["losses"] = losses(lambda: fsdp(directory, "qwen2"), 0, 1)
    if ranks in plan.losses:
        split = plan.losses[ranks]
        findings["losses"] = losses(lambda: megatron(directory, "qwen2", split), *place_of(split))
        leave()
    for layout, models in plan.runs[ranks]:
        for name in models:
            engine = megatron(directory, name, layout)
            findings[name_of(layout), name] = trained(engine, *place_of(layout))
            if name != CRITIC:
                findings["bridged", name_of(layout), name] = bridged(engine)
        findings |= carried(directory, layout)
        if "qwen3_moe" in models and place_of(layout)[1] == 1:  # the losses are of micro-batches, which data ranks cut
            findings["balanced", name_of(layout)] = balanced(directory, layout)
        leave()
    for layout, name in plan.measured[ranks]:
        findings["memory", name_of(layout)] = memory(directory, name, layout)
        leave()
    return findings


def checkpoints(directory: Path, ranks: int, plan: Plan) -> dict[Any, Any]:
    findings: dict[Any, Any] = {}
    if ranks == 2:
        for name in plan.saved:
            findings["saved", name] = save(directory, name)
            leave()
        findings["padding"] = without_padding(directory)
        leave()
        findings["refused"] = refused(directory)
        leave()
    for layout, models in plan.resumed[ranks]:
        for name in models:
            findings["resumed", name_of(layout), name] = resume(directory, name, layout)
        leave()
    return findings


def world(rank: int, ranks: int, directory: Path, plan: Plan) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{directory}/rendezvous{ranks}"
    dist.init_process_group("gloo", rendezvous, timedelta(minutes=20), world_size=ranks, rank=rank)
    findings = compared(directory, ranks, plan) | checkpoints(directory, ranks, plan)
    if rank == 0:
        torch.save(findings, directory / f"{ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(to: str, whole: bool) -> None:
    """`whole`: all layouts, not the quick part of them alone."""
    directory, plan = Path(to), WHOLE if whole else QUICK
    write_models(directory)
    fork = multiprocessing.get_context("fork")
    for ranks in plan.runs:
        processes = [fork.Process(target=world, args=(rank, ranks, directory, plan)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"a world of {ranks} ranks failed")
