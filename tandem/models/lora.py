"""LoRA through PEFT: the model stays as it is, small matrices beside its linear layers learn (Hu et al. 2021).

W x + alpha / rank * B A x,  A [rank, in] random, B [out, rank] zero at first         arXiv:2106.09685, section 4.1
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.config.tree import LoraConfig
from tandem.errors import UserError


def add_adapters(model: PreTrainedModel, config: LoraConfig, path: Path) -> None:
    """Freeze the model from `path` and put adapters into it, in place: until they learn, it computes what it did."""
    try:
        import peft
    except ImportError:
        raise UserError("model.lora needs the package peft; pip install -e '.[lora]' in a clone of Tandem") from None
    layers = adapted_layers(model, config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=[f"model.{name}" for name in layers],
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(path),
    )
    # Seen as a model of transformers PEFT would also wrap the parameters that hold the experts of a mixture.
    holder = nn.Module()
    holder.model = model
    with torch.device(model.device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # PEFT sets it where it has to
        peft.inject_adapter_in_model(settings, holder)
    settings.target_modules = layers
    setattr(model, "peft_config", {"default": settings})  # noqa: B010 - where PEFT has it
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    reset_adapters(model)


def adapted_layers(model: PreTrainedModel, targets: Sequence[str] | Literal["all-linear"]) -> list[str]:
    """The names of the linear layers that get an adapter. UserError for a target that none is named by.

    The output layer gets none, nor do routers that are linear layers of a kind of their own, nor experts that are one
    parameter together.
    """
    output: Any = model.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    linear = [name for name, layer in model.named_modules() if type(layer) in kinds and layer is not output]
    if targets == "all-linear":
        return linear
    named = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    if lacking := [target for target, names in named.items() if not names]:
        raise UserError(f"model.lora.target_modules: no linear layer of the model is named {', '.join(lacking)}")
    wanted = {name for names in named.values() for name in names}
    return [name for name in linear if name in wanted]


def is_adapter(name: str) -> bool:
    return ".lora_" in name


@torch.no_grad()
def reset_adapters(model: PreTrainedModel) -> None:
    """A is uniform in +- 1 / sqrt(in), drawn by its name alone, so the same on any number of ranks; B is zero."""
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


def merged_weights(
    model: PreTrainedModel, full: Callable[[Tensor], Tensor], changed: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, weight with its adapter added), one at a time; `full` makes a parameter whole.

    `changed`: only of attentions and feed-forward layers in which there are adapters, each of which engines may fuse.
    """
    adapted = {_block(name) for name, _ in model.named_parameters() if changed and ".base_layer." in name}
    for name, parameter in model.named_parameters():
        if is_adapter(name) or (adapted and _block(name) not in adapted):
            continue
        weight, (path, base, kind) = full(parameter), name.rpartition(".base_layer.")
        if base and kind == "weight":
            layer: Any = model.get_submodule(path)
            down, up = (full(matrices["default"].weight).float() for matrices in (layer.lora_A, layer.lora_B))
            change = up @ down * layer.scaling["default"]
            weight = (weight.float() + (change.T if layer.fan_in_fan_out else change)).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def _block(name: str) -> str:
    """`layers.0.mlp` of `layers.0.mlp.up_proj.weight`."""
    return name.replace(".base_layer.", ".").rsplit(".", 2)[0]


def write_adapters(model: PreTrainedModel, full: Callable[[Tensor], Tensor], directory: Path, first: bool) -> None:
    """A directory as PEFT writes it, by the `first` rank; every rank calls it."""
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": full(parameter).cpu().contiguous()
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }
    if first:
        directory.mkdir(exist_ok=True)
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        settings: Any = model.peft_config
        settings["default"].save_pretrained(str(directory))
