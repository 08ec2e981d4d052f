"""LoRA through PEFT: the model stays as it is, small matrices beside its linear layers learn (Hu et al. 2021).

W x + alpha / rank * B A x,  A [rank, in] random, B [out, rank] zero at first         arXiv:2106.09685, section 4.1

A critic and a reward model are new above their body: their value head learns as a whole beside the adapters. PEFT reads
a critic as a model of TOKEN_CLS, with a number a token, and a reward model as one of SEQ_CLS, with a number a row.
Heads of the latter are called `score` in every family and have no bias, which no comparison of scores would notice.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.config.model import LoraConfig
from tandem.errors import UserError
from tandem.models.classes import value_layer
from tandem.pictures.vlm_config import in_tower
from tandem.regions import Region, whole

_OF_ROWS, _OF_TOKENS = "SEQ_CLS", "TOKEN_CLS"
"""PEFT's names of tasks."""


def add_adapters(model: PreTrainedModel, config: LoraConfig, path: Path, scores_rows: bool = False) -> None:
    """Freeze the model from `path` and put adapters into it, in place: until they learn, it computes what it did.

    A value head stays trainable. `scores_rows`: it is a reward model's, whose bias is set to 0 and frozen.
    """
    head = value_layer(model)
    key = "model.lora" if head is None or scores_rows else "model.critic_lora"
    try:
        import peft
    except ImportError:
        raise UserError(f"{key} needs the package peft; pip install -e '.[lora]' in a clone of Tandem") from None
    layers = adapted_layers(model, config.target_modules, key)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=[f"model.{name}" for name in layers],
        task_type="CAUSAL_LM" if head is None else _OF_ROWS if scores_rows else _OF_TOKENS,
        base_model_name_or_path=str(path),
    )
    # Seen as a model of transformers PEFT would also wrap the parameters that hold the experts of a mixture.
    holder = nn.Module()
    holder.model = model
    with torch.device(model.device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # PEFT sets it where it has to
        peft.inject_adapter_in_model(settings, holder)
    settings.target_modules = layers
    if head is not None:
        settings.modules_to_save = ["score" if scores_rows else head.name]
    setattr(model, "peft_config", {"default": settings})  # noqa: B010 - where PEFT has it
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    if head is not None:
        for name, parameter in head.linear.named_parameters():
            parameter.requires_grad_(name != "bias" or not scores_rows)
    reset_adapters(model)


def adapted_layers(
    model: PreTrainedModel, targets: Sequence[str] | Literal["all-linear"], key: str = "model.lora"
) -> list[str]:
    """The names of the linear layers that get an adapter. UserError for a target of `key` that none is named by.

    The output layer gets none, nor does a value head, nor do routers that are linear layers of a kind of their own, nor
    experts that are one parameter together, nor the tower of a model that sees pictures.
    """
    head = value_layer(model)
    output: Any = model.get_output_embeddings() if head is None else head.linear
    kinds = (nn.Linear, Conv1D)
    linear = [
        name
        for name, layer in model.named_modules()
        if type(layer) in kinds and layer is not output and not in_tower(name)
    ]
    if targets == "all-linear":
        return linear
    named = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    if lacking := [target for target, names in named.items() if not names]:
        raise UserError(f"{key}.target_modules: no linear layer of the model is named {', '.join(lacking)}")
    wanted = {name for names in named.values() for name in names}
    return [name for name in linear if name in wanted]


def is_adapter(name: str) -> bool:
    return ".lora_" in name


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """The model computes what it did before it had adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def reset_adapters(model: PreTrainedModel) -> None:
    """A is uniform in +- 1 / sqrt(in), drawn by its name alone, so the same on any number of ranks; B is zero, and so
    is the bias of a value head whose weight alone learns."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            bound = parameter.shape[1] ** -0.5
            drawn = torch.empty(parameter.shape, device="cpu")
            drawn.uniform_(-bound, bound, generator=torch.Generator().manual_seed(crc32(name.encode())))
            if isinstance(parameter, DTensor):
                drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(drawn)
        elif ".lora_B." in name:
            parameter.zero_()
    head = value_layer(model)
    if head is not None and head.linear.weight.requires_grad:
        for name, parameter in head.linear.named_parameters():
            if name == "bias" and not parameter.requires_grad:
                parameter.zero_()


def merged_weights(
    model: PreTrainedModel, full: Callable[[Tensor], Tensor], changed: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, weight with its adapter added), one at a time; `full` makes a parameter whole.

    `changed`: without those that stay as they were when the model was loaded, such as a frozen tower's. Where there are
    adapters, of attentions and feed-forward layers that have some, each of which engines may fuse, and of a value head.
    """
    for name, parameter in published(model, changed):
        weight, adapter = full(parameter), Adapter.of(model, name, full)
        if adapter is not None:
            weight = adapter.merged(weight, whole(tuple(weight.shape)))
        yield name.replace(".base_layer.", "."), weight


def published(model: PreTrainedModel, changed: bool) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters but for adapters, by their own names; `changed` as above."""
    learns = any(parameter.requires_grad for parameter in model.parameters())
    adapted = {_block(name) for name, _ in model.named_parameters() if ".base_layer." in name}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        stays = learns and not parameter.requires_grad and _block(name) not in adapted
        if not (changed and stays):
            yield name, parameter


class Adapter(NamedTuple):
    """What is added to a weight."""

    down: Tensor
    """float32 `[rank, in]`."""
    up: Tensor
    """float32 `[out, rank]`."""
    scaling: float
    transposed: bool
    """The weight is `[in, out]`."""

    @classmethod
    def of(cls, model: PreTrainedModel, name: str, full: Callable[[Tensor], Tensor]) -> Self | None:
        """That of the parameter `name`; None where it has none."""
        path, base, kind = name.rpartition(".base_layer.")
        if not base or kind != "weight":
            return None
        layer: Any = model.get_submodule(path)
        down, up = (full(matrices["default"].weight).float() for matrices in (layer.lora_A, layer.lora_B))
        return cls(down, up, layer.scaling["default"], layer.fan_in_fan_out)

    def merged(self, weight: Tensor, region: Region) -> Tensor:
        """`weight`, which is this region of the whole, with what belongs to it."""
        rows, columns = (slice(*bounds) for bounds in (reversed(region) if self.transposed else region))
        change = self.up[rows] @ self.down[:, columns] * self.scaling
        change = change.T if self.transposed else change
        return (weight.float() + change.to(weight.device)).to(weight.dtype)


def _block(name: str) -> str:
    """`layers.0.mlp` of `layers.0.mlp.up_proj.weight`."""
    return name.replace(".base_layer.", ".").rsplit(".", 2)[0]


def adapter_weights(model: PreTrainedModel, full: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(Name as PEFT writes it, whole weight), one at a time, those of a value head last; none for a model without
    adapters."""
    adapted = False
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            adapted = True
            yield f"base_model.model.{name.replace('.default.', '.')}", full(parameter)
    head = value_layer(model)
    if adapted and head is not None:
        settings: Any = model.peft_config
        (called,) = settings["default"].modules_to_save
        for name, parameter in head.linear.named_parameters():
            if parameter.requires_grad:
                yield f"base_model.model.{called}.{name}", full(parameter)


def write_adapter_settings(model: PreTrainedModel, directory: Path) -> None:
    """What a directory of PEFT has besides the weights."""
    settings: Any = model.peft_config
    settings["default"].save_pretrained(str(directory))
