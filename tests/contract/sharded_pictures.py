"""What test_sharded_pictures.py runs at one rank and, by `python sharded_pictures.py DIRECTORY`, at 2.

Each rank leaves its findings in DIRECTORY/<rank>.pt.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tandem.batching.packing import demonstrations_to_batch, micro_batches
from tandem.config.model import LoraConfig, ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.generation.native import NativeEngine
from tandem.models.loading import load_model, load_policy
from tandem.models.tower import PictureTower
from tandem.pictures.store import PictureStore
from tandem.training.base import TrainEngine
from tandem.training.fsdp import make_engine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, Completion, Demonstration, MicroBatch, Outputs, Request, SamplingParams, TokenColumns
from tests.picture_families import Rows, make_model
from tests.saving import save

OPTIMIZER = AdamWConfig(lr=1e-3, eps=1e-3, weight_decay=0.01, max_grad_norm=0.5)
"""A large epsilon: AdamW's first steps would blow the rounding noise of a zero gradient up to the learning rate."""
CASES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {},
    "qwen3_vl": {"reduce_once": False, "activation_checkpointing": True},
    "llava": {},
    "frozen": {},
    "lora": {},
    "critic": {},
}
"""By family; the others train qwen2_5_vl."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava")
OTHERS = ("internvl", "smolvlm", "idefics3")
"""Further families, of one pass each."""
SAVED = ("llava", "critic")
SERVED = ("qwen2_5_vl", "lora")
STEPS = 3


class Squared:
    """A loss that is not linear in what the model says."""

    token_local = True

    def __call__(
        self, outputs: Outputs[torch.Tensor], columns: TokenColumns[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        said_S = outputs.logprobs_S if outputs.values_S is None else outputs.values_S - 1
        assert said_S is not None and columns.shares is not None
        return (columns.shares * said_S.square()).sum(), {"mean": (columns.shares * said_S.detach()).sum()}


def family_of(case: str) -> str:
    return case if case in (*FAMILIES, *OTHERS) else "qwen2_5_vl"


def model_of(directory: Path, case: str) -> ModelConfig:
    return ModelConfig(
        path=directory / family_of(case) / ("critic" if "critic" in case else "model"),
        vision_tower="frozen" if "frozen" in case else "train",
        lora=LoraConfig(rank=3, alpha=12) if case == "lora" else None,
    )


def engine(directory: Path, case: str, learns: bool = True) -> TrainEngine:
    return make_engine(
        model_of(directory, case),
        FsdpTrainingConfig(**CASES.get(case, {})),
        OPTIMIZER if learns else None,
        total_steps=STEPS + 1,
        value_head="critic" in case,
        pictures=directory / "pictures",
        processor=directory / family_of(case) / "model",
    )


def rows_of(directory: Path, case: str) -> Rows:
    return Rows(family_of(case), directory / family_of(case) / "model", directory / "pictures")


def batch(directory: Path, case: str) -> Batch:
    """Rows 0 to 2 show one picture, 3 and 4 two, 5 none, 6 to 8 one."""
    made = demonstrations_to_batch(*rows_of(directory, case).demonstrations())
    made.tokens.shares = np.full(len(made.response_ids), 1 / len(made.response_ids), np.float32)
    return made


def part(whole: Batch, rank: int, ranks: int, step: int) -> list[MicroBatch]:
    """Unequal: in step 0 a rank has no picture, in step 1 no rows, in step 2 fewer micro-batches."""
    everyone = list(range(len(whole)))
    cuts = [([0, 1, 2, 3, 4, 6, 7, 8], [5]), (everyone, []), ([0, 1, 5], [2, 3, 4, 6, 7, 8])][step % 3]
    return micro_batches(whole, cuts[rank] if ranks > 1 else everyone, 1000 if step == 0 else 60)


def weights(model: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_weights()}


def gradients(model: TrainEngine) -> dict[str, torch.Tensor]:
    """Whole ones, by name."""
    parameters: Any = getattr(model, "model").named_parameters()  # noqa: B009 - the engine's own affair elsewhere
    found = {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for name, grad in found.items()}


def said(model: TrainEngine, own: list[MicroBatch]) -> dict[int, float]:
    """Log-prob or value of each response token, by its place in the batch."""
    found: dict[int, float] = {}
    for outputs, micro_batch in zip(model.forward(own), own, strict=True):
        column = outputs.logprobs_S if outputs.values_S is None else outputs.values_S
        assert column is not None
        found |= dict(zip(micro_batch.source.tolist(), column.tolist(), strict=True))
    return found


def gathered(own: dict[int, float], ranks: int) -> dict[int, float]:
    everyone: list[Any] = [own]
    if ranks > 1:
        everyone = [None] * ranks
        dist.all_gather_object(everyone, own)
    return {place: value for one in everyone for place, value in one.items()}


def train(model: TrainEngine, whole: Batch, steps: range, rank: int, ranks: int) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    for step in steps:
        result = model.forward_backward(part(whole, rank, ranks, step), Squared())
        found.append({"loss": result.loss, **result.metrics, **model.optimizer_step()})
    return found


def trained(directory: Path, case: str, rank: int, ranks: int) -> dict[str, Any]:
    """The gradients of the first of STEPS steps' rows, then the steps; the model is moved away and back between, saved
    after two, and published to a native engine before the first and after the last."""
    model, whole = engine(directory, case), batch(directory, case)
    first = [gathered(said(model, part(whole, rank, ranks, step)), ranks) for step in range(STEPS)]
    native = native_engine(directory, case) if case in SERVED and ranks > 1 else None
    served = [difference(native, version=0, model=model, case=case, directory=directory)] if native else []
    model.forward_backward(part(whole, rank, ranks, 0), Squared())
    found = gradients(model)
    steps = [model.optimizer_step()]
    model.offload()
    model.onload()
    steps += train(model, whole, range(1, 2), rank, ranks)
    if case in SAVED:
        checkpoint = directory / f"saved at {ranks}" / case
        checkpoint.mkdir(parents=True, exist_ok=True)
        save(model, checkpoint)
    steps += train(model, whole, range(2, STEPS), rank, ranks)
    served += [difference(native, version=1, model=model, case=case, directory=directory)] if native else []
    last = gathered(said(model, part(whole, rank, ranks, 0)), ranks)
    learned = {"steps": steps, "weights": weights(model), "last": last, "served": served}
    return {"first": first, "gradients": found, **learned}


def one_pass(directory: Path, family: str, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The gradients of a pass in which a rank shows no picture."""
    model, whole = engine(directory, family), batch(directory, family)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*VisionAttention.* returned a view tensor")  # nothing changes it in place
        model.forward_backward(part(whole, rank, ranks, 0), Squared())
    return gradients(model)


def resumed_case(directory: Path, case: str, at: int, rank: int, ranks: int) -> dict[str, Any]:
    """The step after a checkpoint that was saved at `at` ranks."""
    model, whole = engine(directory, case), batch(directory, case)
    model.load(directory / f"saved at {at}" / case)
    steps = train(model, whole, range(2, STEPS), rank, ranks)
    return {"steps": steps, "weights": weights(model)}


def native_engine(directory: Path, case: str) -> NativeEngine:
    policy, config = load_policy(model_of(directory, case)), model_of(directory, case)
    read = PictureStore(directory / "pictures").read
    return NativeEngine(policy, max_running=6, tower=PictureTower(policy, config.path, read))


def difference(native: NativeEngine, version: int, model: TrainEngine, case: str, directory: Path) -> float:
    """By how much the log-probs of a native engine, to which weights are published, are off the trainer's."""
    native.load_weights(version, model.named_weights())
    rows, _ = rows_of(directory, case).demonstrations()
    answers = generate(native, [rows[0], rows[3], rows[5]])
    whole = demonstrations_to_batch([row for row, _ in answers])
    ours = said(model, micro_batches(whole, range(len(whole)), 1000))
    theirs = np.concatenate([logprobs for _, logprobs in answers])
    return max(abs(ours[place] - logprob) for place, logprob in enumerate(theirs.tolist()))


def generate(engine: NativeEngine, rows: list[Demonstration]) -> list[tuple[Demonstration, Any]]:
    """An answer to the prompt of each row, and its log-probs."""

    async def one(row: Demonstration) -> Completion:
        request = Request(row.prompt_ids, SamplingParams(max_tokens=8), (dist.get_rank(),), pictures=row.pictures)
        (completion,) = [completion async for completion in engine.generate(request)]
        return completion

    async def ask() -> list[Completion]:
        return await asyncio.gather(*(one(row) for row in rows))

    return [
        (Demonstration(0, row.prompt_ids, c.token_ids, np.ones(len(c.token_ids), np.bool_), row.pictures), c.logprobs)
        for row, c in zip(rows, asyncio.run(ask()), strict=True)
    ]


def scored(directory: Path, rank: int, ranks: int) -> dict[int, float]:
    """A reference: it has no optimizer, and one rank no rows."""
    own = part(batch(directory, "qwen3_vl"), rank, ranks, 1)
    return gathered(said(engine(directory, "qwen3_vl", learns=False), own), ranks)


def refreshed(directory: Path, rank: int, ranks: int) -> list[float]:
    """By how much a reference that has taken up the policy's weights, tower included, is off what the policy says:
    before the policy learns, when it has learned, and when what was saved of the reference is loaded into another."""
    policy, reference, another = (engine(directory, "qwen2_5_vl", learns) for learns in (True, False, False))
    whole, place = batch(directory, "qwen2_5_vl"), directory / f"reference at {ranks}"
    own, off = part(whole, rank, ranks, 0), list[float]()
    for step in range(3):
        if step == 1:
            train(policy, whole, range(2), rank, ranks)
            for share in (0.5, 1.0):
                getattr(reference, "approach")(policy, share)  # noqa: B009 - the engine's own affair elsewhere
            (place / "state").mkdir(parents=True, exist_ok=True)
            save(reference, place)
        elif step == 2:
            another.load(place)
        ours = gathered(said(policy, own), ranks)
        theirs = gathered(said(another if step == 2 else reference, own), ranks)
        off.append(max(abs(ours[token] - said_there) for token, said_there in theirs.items()))
        said(another, own)
    return off


def write_models(directory: Path) -> None:
    for family in (*FAMILIES, *OTHERS):
        make_model(family, directory / family / "model")
    critic = load_model(ModelConfig(path=directory / "qwen2_5_vl" / "model"), value_head=True)
    torch.nn.init.normal_(critic.get_parameter("score.weight"), std=0.1, generator=torch.Generator().manual_seed(0))
    critic.save_pretrained(directory / "qwen2_5_vl" / "critic")


def world(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", f"file://{directory}/rendezvous", timedelta(seconds=600), world_size=2, rank=rank)
    findings: dict[str, Any] = {"trained": {case: trained(directory, case, rank, 2) for case in CASES}}
    findings["resumed"] = {at: {case: resumed_case(directory, case, at, rank, 2) for case in SAVED} for at in (1, 2)}
    findings["scored"] = scored(directory, rank, 2)
    findings["passes"] = {family: one_pass(directory, family, rank, 2) for family in OTHERS}
    findings["refreshed"] = refreshed(directory, rank, 2)
    torch.save(findings, directory / f"{rank}.pt")
    dist.destroy_process_group()


def main(directory: Path) -> None:
    """Forked processes: torch is imported once."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=world, args=(rank, directory)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a rank failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
