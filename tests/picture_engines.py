"""Models that see pictures on the project's own engines, as tests compare them with transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tandem.batching.packing import micro_batches
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.generation.native import NativeEngine
from tandem.pictures.store import PictureStore
from tandem.training.fsdp import FsdpEngine, make_engine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Batch, Completion, Request, TokenColumns


class Shown(Protocol):
    """A model's directory, and where its pictures are."""

    path: Path
    store: PictureStore


class WeightedLogprobs:
    token_local = True

    def __call__(self, outputs: Any, columns: TokenColumns[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert columns.loss_weights is not None
        return (columns.loss_weights * outputs.logprobs_S).sum(), {}


def engine_of(case: Shown, path: Path | None = None, **options: Any) -> FsdpEngine:
    """The policy; with a `path`, the critic there."""
    tower = options.pop("vision_tower", "train")
    model = ModelConfig(path=path or case.path, vision_tower=tower)
    settings = FsdpTrainingConfig(**options)
    where = {"pictures": case.store.directory, "processor": case.path}
    engine = make_engine(model, settings, AdamWConfig(), value_head=path is not None, **where)
    assert isinstance(engine, FsdpEngine)
    return engine


def logprobs(engine: FsdpEngine, batch: Batch, tokens: int = 10_000) -> torch.Tensor:
    packed = micro_batches(batch, range(len(batch)), tokens)
    found = torch.zeros(len(batch.response_ids))
    for micro_batch, outputs in zip(packed, engine.forward(packed), strict=True):
        assert outputs.logprobs_S is not None
        found[torch.from_numpy(micro_batch.source)] = outputs.logprobs_S
    return found


def generate(engine: NativeEngine, requests: Sequence[Request]) -> list[list[Completion]]:
    async def ask() -> list[list[Completion]]:
        async def one(request: Request) -> list[Completion]:
            return sorted([c async for c in engine.generate(request)], key=lambda c: c.sample)

        return await asyncio.gather(*(one(request) for request in requests))

    return asyncio.run(ask())


def encoded_by(engine: FsdpEngine) -> list[int]:
    """How many pictures its tower takes in each call from now on."""
    assert engine._tower is not None
    body, counts = engine._tower._body, list[int]()
    encode = body.encode_pictures

    def counted(pixels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        counts.append(len(pixels))
        return encode(pixels)

    body.encode_pictures = counted
    return counts
