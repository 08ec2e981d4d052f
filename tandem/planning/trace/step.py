"""The real engine's phases on fake tensors: `python -m tandem.planning.trace.step` reads runs and prints their peaks.

The engine's own code runs, line by line. In the place of what a rank would wait for stands nothing: every collective of
torch's fake process group returns at once with what was in its buffers, no weights are read, and whoever asks a tensor
for a number gets 1. So branches that depend on values (a gradient that is not finite) are not taken.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.config.model import LoraConfig, ModelConfig
from tandem.config.training import FsdpTrainingConfig


@dataclass(frozen=True, slots=True)
class FakeRun:
    """A rank of a model in the PyTorch engine. Every field is plain JSON."""

    directory: str
    """Of the model: its config.json is read."""
    prompt_tokens: int
    answer_tokens: tuple[int, ...]
    """Of a micro-batch: one prompt, and the answers that continue it."""
    ranks: int = 1
    rank: int = 0
    device: str = "cuda"
    dtype: str = "bfloat16"
    layers: int | None = None
    """The first so many alone."""
    learns: bool = True
    value_head: bool = False
    training: dict[str, Any] | None = None
    """The section `training`."""
    lora: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    """The section `training.optimizer`."""
    micro_batches: int = 2
    picture_tokens: int = 0
    """Of the prompt, its first ones, of one picture: for a model with a vision tower."""
    vision_tower: Literal["train", "frozen"] = "train"


def trace(run: FakeRun) -> dict[str, Any]:
    """By phase, a `ledger.Peak`. On the device `cuda` `pretend` must have been called."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tandem.planning.trace.ledger import Ledger

    ledger = Ledger(run.device)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _write_config(run, directory)
        loaded = on_meta_device(run, directory)
        whole = [parameter.to("meta") for parameter in loaded.parameters()]
        stack.enter_context(_fake_network(run))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(ledger)
        loaded.to_empty(device=run.device if run.ranks == 1 else "meta")
        loaded.tie_weights()  # which were parted as they became fake
        tower = stack.enter_context(fake_tower(run, loaded, directory)) if run.picture_tokens else None
        engine = make_engine(run, loaded, tower)
        ledger.enter([*engine.model.parameters(), *engine.model.buffers()], "weights")
        ledger.expect_gradients_of(whole)
        batch = [micro_batch(run) for _ in range(run.micro_batches)]
        phases: dict[str, Callable[[], object]] = {"forward": lambda: engine.forward(batch)}
        if run.learns:
            phases |= {"backward": lambda: engine.forward_backward(batch, Loss()), "step": engine.optimizer_step}
        phases["publish"] = lambda: [None for _ in engine.named_weights()]
        found: dict[str, Any] = {name: ledger.phase(phase) for name, phase in phases.items()}
        if run.ranks > 1:  # else it swaps fake parameters, which torch refuses
            engine.offload()
            found["offloaded"] = ledger.phase(lambda: None)
    found["operations"] = dict(ledger.operations)
    return found


def on_meta_device(run: FakeRun, directory: Path) -> Any:
    """The model on the meta device."""
    from tandem.models.loading import load_empty
    from tandem.models.lora import add_adapters

    lora = LoraConfig(**run.lora) if run.lora else None
    model = ModelConfig.model_validate({"path": directory, "dtype": run.dtype, "lora": lora})
    loaded = load_empty(model, run.value_head)
    loaded.requires_grad_(run.learns)
    if run.vision_tower == "frozen":
        loaded.base_model.visual.requires_grad_(False)
    if lora and run.learns:
        add_adapters(loaded, lora, directory)
    return loaded


@contextmanager
def fake_tower(run: FakeRun, loaded: Any, directory: Path) -> Iterator[Any]:
    from tandem.planning.trace.fake_tower import FakeTower, towers_read_values

    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    with towers_read_values(loaded.config.model_type, run.device):
        yield FakeTower(loaded, directory)


def make_engine(run: FakeRun, loaded: Any, tower: Any = None) -> Any:
    """What `training.fsdp.make_engine` makes, without reading any weights."""
    from tandem.training.fsdp import FsdpEngine
    from tandem.training.layout import Sharded

    training = FsdpTrainingConfig(**{**(run.training or {}), "optimizer": run.optimizer or {}})
    layout = Sharded(loaded, training) if run.ranks > 1 else None
    optimizer = training.optimizer if run.learns else None
    return FsdpEngine(loaded, training, optimizer, total_steps=10, layout=layout, tower=tower)


def extrapolated(totals: Mapping[int, int], layers: int) -> int:
    """The peak of a model of so many layers, from those of two numbers of layers, the smaller of 3 at least: the first
    and the last layer are unlike those between them."""
    (few, low), (more, high) = sorted(totals.items())
    return low + (high - low) * (layers - few) // (more - few)


def micro_batch(run: FakeRun) -> Any:
    """Of the fake run's lengths; a row's last token is left out, as `batching.packing` does."""
    import numpy as np

    from tandem.types import MicroBatch, TokenColumns

    lengths = [run.prompt_tokens, *(tokens - 1 for tokens in run.answer_tokens)]
    offsets = np.cumsum([0, *lengths])
    predicted = np.concatenate([np.full(len(lengths) - 1, run.prompt_tokens - 1), np.arange(lengths[0], offsets[-1])])

    def column() -> Any:
        return np.full(len(predicted), 1 / len(predicted), dtype=np.float32)

    token_ids, pictures = np.zeros(offsets[-1], dtype=np.int32), ()
    if run.picture_tokens:
        from tandem.planning.trace.fake_tower import mark, picture_of

        mark(token_ids, run.picture_tokens)
        pictures = (picture_of(run.picture_tokens),)
    return MicroBatch(
        token_ids=token_ids,
        offsets=offsets,
        prefixes=np.array([-1, *[0] * (len(lengths) - 1)]),
        predicted_at=predicted,
        targets=np.zeros(len(predicted), dtype=np.int32),
        columns=TokenColumns(
            loss_weights=column(), shares=column(), advantages=column(), old_logprobs=column(), returns=column()
        ),
        source=predicted,
        pictures=pictures,
    )


class Loss:
    """The clipped surrogate with its entropy (Schulman et al. 2017, equation 7); of values, their squared error."""

    token_local = True

    def __call__(self, outputs: Any, columns: Any) -> Any:
        import torch

        if outputs.values_S is not None:
            return (columns.loss_weights * (outputs.values_S - columns.returns).square()).sum(), {}
        ratio = torch.exp(outputs.logprobs_S - columns.old_logprobs)
        surrogate = torch.minimum(ratio * columns.advantages, ratio.clamp(0.8, 1.2) * columns.advantages)
        return -(columns.loss_weights * surrogate).sum(), {
            "entropy": (columns.shares * outputs.entropy_S.detach()).sum()
        }


def _write_config(run: FakeRun, directory: Path) -> None:
    config = json.loads((Path(run.directory) / "config.json").read_text(encoding="utf-8"))
    if run.layers is not None:
        text = config.get("text_config") or config
        text["num_hidden_layers"] = run.layers
        if text.get("layer_types"):
            text["layer_types"] = text["layer_types"][: run.layers]
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


@contextmanager
def _fake_network(run: FakeRun) -> Iterator[None]:
    """A process group of any size in which nothing travels, and what of torch.distributed reads values."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import _disable_current_modes

    from tandem.training import layout

    if run.ranks == 1:
        yield
        return
    make_mesh, gather = layout.init_device_mesh, dist.all_gather_object

    def mesh_of_real_numbers(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return make_mesh(*args, **kwargs)

    def own_object(parts: list[Any], part: Any, *_: Any, **__: Any) -> None:
        parts[:] = [part] * len(parts)

    dist.init_process_group("fake", rank=run.rank, world_size=run.ranks, store=FakeStore())
    layout.init_device_mesh, dist.all_gather_object = mesh_of_real_numbers, own_object
    try:
        yield
    finally:
        layout.init_device_mesh, dist.all_gather_object = make_mesh, gather
        dist.destroy_process_group()


def main() -> None:
    """Standard input: a JSON list of fake runs, all of one device. Standard output: a JSON object for each, by line."""
    runs = [FakeRun(**run) for run in json.load(sys.stdin)]
    if any(run.device == "cuda" for run in runs):
        from tandem.planning.trace.pretend import pretend

        pretend()
    for run in runs:
        found = trace(run)
        operations = found.pop("operations")
        peaks = {
            name: {"total": peak.total, "by_cause": peak.by_cause(), "sites": _rows(peak)}
            for name, peak in found.items()
        }
        print(json.dumps({"run": asdict(run), "peaks": peaks, "operations": operations}), flush=True)


def _rows(peak: Any) -> list[list[Any]]:
    """Cause, line, bytes at the peak, storages at once; the largest first."""
    sites = sorted(peak.by_site | peak.most_alive, key=lambda site: -peak.by_site[site])
    return [[*site, peak.by_site[site], peak.most_alive[site]] for site in sites]


if __name__ == "__main__":
    main()
