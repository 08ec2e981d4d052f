"""What test_sharded_training.py runs at one rank and, by `python sharded_training.py DIRECTORY`, at 4, 2 and 3.

Rank 0 leaves a world's findings in DIRECTORY/<ranks>.pt.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from transformers import (
    ApertusConfig,
    GenerationConfig,
    GPT2Config,
    Lfm2Config,
    MistralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from tandem.batching.packing import micro_batches
from tandem.config.model import LoraConfig, ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import EngineError, UserError
from tandem.regions import slices_in, whole
from tandem.training import optimizer
from tandem.training.base import TrainEngine
from tandem.training.fsdp import make_engine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, MicroBatch, Outputs, TokenColumns
from tests.every_loss import every_loss, fill_columns
from tests.optimizers import OPTIMIZERS
from tests.saving import save

VOCABULARY, ROWS = 23, 9
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MODELS: dict[str, PreTrainedConfig] = {
    "tied": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "untied": Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=False),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "few key heads": Qwen2Config(**{**COMMON, "num_key_value_heads": 1}),
    "sliding window": MistralConfig(**COMMON, sliding_window=4),
    "buffers": ApertusConfig(**COMMON),
    "gated delta": Qwen3_5TextConfig(
        **COMMON,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "mamba": NemotronHConfig(
        **{name: value for name, value in COMMON.items() if name != "num_hidden_layers"},
        head_dim=8,
        layers_block_type=["linear_attention", "mlp", "full_attention"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=4,
    ),
    "convolution": Lfm2Config(**COMMON, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "wide": Qwen2Config(**{**COMMON, "hidden_size": 40, "intermediate_size": 120, "num_hidden_layers": 1}),
}
OPTIMIZER = AdamWConfig(lr=1e-2, eps=1e-4, schedule="linear", warmup_steps=2, weight_decay=0.01, max_grad_norm=0.5)
"""A large epsilon: AdamW's first steps would blow the rounding noise of a zero gradient up to the learning rate."""
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"reduce_once": False},
    "gpt2": {"activation_checkpointing": True},
    "critic": {},
    "cpu offload": {"cpu_offload": True},
    "optimizer offload": {"optimizer_offload": True},
    "lora": {},
    "lora critic": {},
    "lora reward model": {},
    "buffers": {},
    "gated delta": {"activation_checkpointing": "selective"},
    "mamba": {"activation_checkpointing": True, "reduce_once": False},
    "convolution": {},
}
"""By model; `cpu offload`, `optimizer offload`, `lora` and those of HYBRID train the tied one, the other two with
adapters the critic."""
HYBRID: dict[str, dict[str, Any]] = {"hybrid": {"shard_size": 2, "reduce_once": False}}
MIXERS = ("gated delta", "mamba", "convolution")
"""With state mixers."""
SAVED = ("tied", "critic", "lora", "lora reward model", "buffers")
STOPS = [1, 5]
"""The tokens that end an answer of the tied model, says its generation config."""
CONTEXT: dict[tuple[str, bool], dict[str, Any]] = {
    ("tied", True): {"context_parallel": 4},
    ("tied", False): {"activation_checkpointing": True},
    ("critic", True): {},
    ("critic", False): {},
    ("few key heads", True): {},
    ("sliding window", False): {},
}
"""(model, token-local loss) -> training options of the runs with context parallelism, 2 where not said."""
IN_FOUR = [("tied", True), ("few key heads", True)]
"""The cases that run at 4 ranks, as one group and as two; the others run at 2."""


class Curved:
    """A loss that is not linear in what the model says, with an entropy bonus."""

    def __init__(self, token_local: bool = True) -> None:
        self.token_local = token_local

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
        if not self.token_local:
            term_S = term_S * term_S.mean()
        return (weights_S * term_S).sum(), {"mean": (shares_S * term_S.detach()).sum()}


def batch() -> Batch:
    random = np.random.default_rng(0)
    prompts, responses = random.integers(1, 6, ROWS), random.integers(1, 9, ROWS)
    tokens = int(responses.sum())
    mask = random.random(tokens) < 0.8
    share = (mask / mask.sum()).astype(np.float32)
    return Batch(
        prompt_ids=random.integers(0, VOCABULARY, prompts.sum()).astype(np.int32),
        prompt_offsets=np.concatenate(([0], prompts.cumsum())),
        response_ids=random.integers(0, VOCABULARY, tokens).astype(np.int32),
        response_offsets=np.concatenate(([0], responses.cumsum())),
        loss_mask=mask,
        versions=np.zeros(tokens, dtype=np.int32),
        groups=np.arange(ROWS, dtype=np.int32),
        trajectories=np.arange(ROWS, dtype=np.int32),
        prompts=np.arange(ROWS, dtype=np.int32),
        rewards=np.zeros(ROWS, dtype=np.float32),
        scored=np.ones(ROWS, dtype=np.bool_),
        tokens=TokenColumns(loss_weights=share, shares=share),
    )


def part(rank: int, ranks: int, step: int = 0) -> list[MicroBatch]:
    """Uneven: the first rank has most rows, in step 1 the last rank has none, and micro-batches differ in number."""
    rows = list(range(ROWS))
    if ranks > 1:
        last = ranks - 1 if step == 1 else ranks
        cuts = [0, *range(ROWS - last + 1, ROWS + 1)]
        rows = rows[cuts[rank] : cuts[rank + 1]] if rank < last else []
    return micro_batches(batch(), rows, 40)


def write_models(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name in model.state_dict():
                buffer += 0.25  # as the directory says, not as it is made
        model.save_pretrained(directory / name)
    GenerationConfig(eos_token_id=STOPS, do_sample=True, top_p=0.8).save_pretrained(directory / "tied")
    torch.manual_seed(1)
    critic = AutoModelForTokenClassification.from_config(Qwen2Config(**COMMON, num_labels=1))
    torch.nn.init.normal_(critic.score.weight, std=0.1)
    torch.nn.init.constant_(critic.score.bias, 0.3)
    critic.save_pretrained(directory / "critic")


def engine(directory: Path, case: str, dtype: Any = "float32", **training: Any) -> TrainEngine:
    valued = case in ("critic", "lora critic", "lora reward model")
    model = case if case in MODELS else "critic" if valued else "tied"
    lora = LoraConfig(rank=3, alpha=12) if case.startswith("lora") else None
    config = ModelConfig(path=directory / model, dtype=dtype, lora=lora)
    how = FsdpTrainingConfig(**{**CASES.get(case, {}), **HYBRID.get(case, {}), **training})
    head = {"value_head": valued, "scores_rows": case == "lora reward model"}
    return make_engine(config, how, OPTIMIZER, total_steps=6, temperature=0.8, **head)


def train(model: TrainEngine, steps: range, rank: int, ranks: int) -> list[dict[str, float]]:
    """Loss, metrics, gradient norm and learning rate of each step."""
    found: list[dict[str, float]] = []
    for step in steps:
        result = model.forward_backward(part(rank, ranks, step), Curved())
        found.append({"loss": result.loss, **result.metrics, **model.optimizer_step()})
    return found


def weights(model: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_weights()}


def from_shards(model: TrainEngine, ranks: int) -> dict[str, torch.Tensor]:
    """The same weights, put together from what each rank says that it holds."""
    with model.shards() as shards:
        own = [
            (one.name, one.shape, slices_in(whole(one.shape), one.region), one.read().to(getattr(torch, one.dtype)))
            for one in shards
        ]
    everyone: list[Any] = [own]
    if ranks > 1:
        everyone = [None] * ranks
        dist.all_gather_object(everyone, own)
    found: dict[str, torch.Tensor] = {}
    for name, shape, place, part in (held for held_by_rank in everyone for held in held_by_rank):
        found.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))[place] = part
    return found


def columns(outputs: list[Outputs[torch.Tensor]], micro: list[MicroBatch]) -> dict[int, list[float]]:
    """What was said of each response token, by its place in the batch."""
    found: dict[int, list[float]] = {}
    for said, micro_batch in zip(outputs, micro, strict=True):
        kinds = [x for x in (said.logprobs_S, said.entropy_S, said.values_S) if x is not None]
        found |= {int(place): [float(x[i]) for x in kinds] for i, place in enumerate(micro_batch.source)}
    return found


def trained(directory: Path, case: str, rank: int, ranks: int) -> dict[str, Any]:
    """Three steps, the second with a rank without rows; the model is moved away and back between."""
    model = engine(directory, case)
    found = train(model, range(2), rank, ranks)
    model.offload()
    model.onload()
    found += train(model, range(2, 3), rank, ranks)
    own = part(rank, ranks)
    said = columns(model.forward(own), own)
    if ranks > 1:
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, said)
        said = {place: values for one in everyone for place, values in one.items()}
    return {"steps": found, "weights": weights(model), "said": said, "from shards": from_shards(model, ranks)}


def contextual(directory: Path, case: str, token_local: bool, rank: int, ranks: int) -> dict[str, Any]:
    """Three steps with context parallelism (one rank: without); a group of ranks gets the same rows."""
    how = {"context_parallel": 2, **CONTEXT[case, token_local]} if ranks > 1 else {}
    size = how.get("context_parallel", 1)
    groups, group = ranks // size, rank // size
    model = engine(directory, case, **how)
    steps: list[dict[str, float]] = []
    said: list[dict[int, list[float]]] = []
    for step in range(3):
        own = part(group, groups, step)
        said.append(columns(model.forward(own), own))
        result = model.forward_backward(own, Curved(token_local))
        assert columns(result.outputs, own).keys() == said[-1].keys()
        steps.append({"loss": result.loss, **result.metrics, **model.optimizer_step()})
    return {"steps": steps, "weights": weights(model), "said": said}


def losses(directory: Path, rank: int, ranks: int, **training: Any) -> dict[str, dict[str, float]]:
    """One step of each policy loss, by data groups that have two micro-batches, one, or none."""
    size = training.get("context_parallel", 1)
    group, groups = rank // size, ranks // size
    whole = fill_columns(batch())
    rows = [list(range(ROWS))] if groups == 1 else [[0, 1, 2, 3], [4, *range(5, ROWS)], [], []][:groups]
    own = micro_batches(whole, rows[group], 1000 if group else 20)
    found: dict[str, dict[str, float]] = {}
    for name, loss in every_loss().items():
        model = engine(directory, "tied", **training)
        result = model.forward_backward(own, loss)
        found[name] = {"loss": result.loss, **result.metrics, **model.optimizer_step()}
    return found


def saved(directory: Path, rank: int, ranks: int) -> None:
    """Two steps, then a checkpoint; critics too."""
    for case in SAVED:
        model, checkpoint = engine(directory, case), directory / f"saved at {ranks}" / case
        train(model, range(2), rank, ranks)
        checkpoint.mkdir(parents=True, exist_ok=True)
        save(model, checkpoint)


def resumed(directory: Path, at: int, rank: int, ranks: int) -> dict[str, Any]:
    """The step after a checkpoint that was saved at `at` ranks."""
    found: dict[str, Any] = {}
    for case in SAVED:
        model = engine(directory, case)
        model.load(directory / f"saved at {at}" / case)
        found[case] = {"steps": train(model, range(2, 3), rank, ranks), "weights": weights(model)}
    return found


def moved(
    directory: Path, kind: Any, ranks: int, start: Path | None = None, **training: Any
) -> dict[str, torch.Tensor]:
    """Weights after two steps by gradients that are drawn, not computed; `start`: after two more of a checkpoint."""
    optimizer = OPTIMIZERS[kind](lr=1e-2, weight_decay=0.1, max_grad_norm=1e9, schedule="linear")
    config = ModelConfig(path=directory / "wide", dtype="float32")
    model: Any = make_engine(config, FsdpTrainingConfig(**training), optimizer, total_steps=6)
    if start is not None:
        model.load(start)
    for step in range(2) if start is None else range(2, 4):
        random = torch.Generator().manual_seed(step)
        for parameter in model.model.parameters():
            gradient = torch.randn(parameter.shape, generator=random)
            if ranks > 1:
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        model.optimizer_step()
    if start is None:
        (checkpoint := directory / f"{kind} at {ranks}").mkdir(exist_ok=True)
        save(model, checkpoint)
    return weights(model)


def bfloat16(directory: Path, rank: int, ranks: int) -> dict[str, Any]:
    """The model directory it leaves is in bfloat16, too."""
    model, checkpoint = engine(directory, "tied", "bfloat16"), directory / f"bfloat16 at {ranks}"
    found = {"steps": train(model, range(3), rank, ranks), "weights": weights(model)}
    checkpoint.mkdir(exist_ok=True)
    save(model, checkpoint)
    return found


def frozen(directory: Path, rank: int, ranks: int) -> dict[int, list[float]]:
    """A reference: no optimizer; the last rank has no rows."""
    config = ModelConfig(path=directory / "untied")
    model, own = make_engine(config, FsdpTrainingConfig(), None), part(rank, ranks, 1)
    return columns(model.forward(own), own)


def not_finite(directory: Path, rank: int, ranks: int) -> str:
    """The message on a gradient that is not finite on one rank's rows only; afterwards nothing has changed."""
    model = engine(directory, "tied")
    before = weights(model)
    own = part(rank, ranks)
    if rank == ranks - 1:
        assert own[0].columns.loss_weights is not None
        own[0].columns.loss_weights[0] = np.inf
    model.forward_backward(own, Curved())
    try:
        model.optimizer_step()
    except EngineError as error:
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())
        return str(error)
    return "no error"


def refused(directory: Path) -> list[str]:
    """What is said of layouts that three ranks cannot have."""
    messages: list[str] = []
    for layout in ({"shard_size": 2}, {"context_parallel": 2}, {"context_parallel": 3}):
        try:
            engine(directory, "tied", **layout)
        except UserError as error:
            messages.append(str(error))
    return messages


def world(rank: int, ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # GPT-2's; nothing writes into it
    rendezvous = f"file://{directory}/rendezvous{ranks}"
    dist.init_process_group("gloo", rendezvous, timedelta(seconds=600), world_size=ranks, rank=rank)
    findings: dict[str, Any] = {}
    cases = {4: ["tied", "critic", *HYBRID], 2: list(CASES), 3: ["untied"]}[ranks]
    findings["trained"] = {case: trained(directory, case, rank, ranks) for case in cases}
    if ranks in (2, 4):
        saved(directory, rank, ranks)
    findings["resumed"] = {at: resumed(directory, at, rank, ranks) for at in {2: (1, 4), 3: (2,), 4: ()}[ranks]}
    if ranks in (2, 4):
        contexts = IN_FOUR if ranks == 4 else [case for case in CONTEXT if case not in IN_FOUR]
        findings["context"] = {case: contextual(directory, *case, rank, ranks) for case in contexts}
    how: dict[str, Any] = {"shard_size": 2, "cpu_offload": True} if ranks == 4 else {}
    if ranks == 3:  # ranks hold 14, 14 and 12 of 40 rows, and the state of some parameters visits at a time
        how, optimizer._NUMBERS_AT_ONCE = {"optimizer_offload": True}, 1300
    findings["moved"] = {kind: moved(directory, kind, ranks, **how) for kind in OPTIMIZERS}
    findings["moved on"] = {
        kind: moved(directory, kind, ranks, directory / f"{kind} at 1", **how) for kind in OPTIMIZERS
    }
    if ranks == 4:
        findings["losses"] = {
            "two context-parallel groups": losses(directory, rank, ranks, context_parallel=2),
            "four ranks": losses(directory, rank, ranks),
        }
    if ranks == 3:
        findings["refused"] = refused(directory)
    if ranks == 2:
        findings["bfloat16"] = bfloat16(directory, rank, ranks)
        findings["frozen"] = frozen(directory, rank, ranks)
        findings["not finite"] = not_finite(directory, rank, ranks)
    if rank == 0:
        torch.save(findings, directory / f"{ranks}.pt")
    dist.destroy_process_group()


def main(directory: Path) -> None:
    """Worlds of forked processes, one after another: torch is imported once."""
    fork = multiprocessing.get_context("fork")
    for ranks in (4, 2, 3):
        processes = [fork.Process(target=world, args=(rank, ranks, directory)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"a world of {ranks} ranks failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
