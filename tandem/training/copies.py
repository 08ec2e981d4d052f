"""Copies of a model in host memory: what a checkpoint is written from while training goes on."""

from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.models.directory import as_on_disk, by_layer, model_file, write_index, writers
from tandem.models.loading import saved_buffers
from tandem.models.lora import adapter_weights, is_adapter, merged_weights, write_adapter_settings
from tandem.models.storage import TensorFile
from tandem.training.layout import Whole


class HostCopies:
    """Copies by name. Their memory is kept from one checkpoint to the next: new pages cost several times what copying
    does. Pinned where there is a GPU, so that copies run at the speed of the bus."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._pinned = torch.cuda.is_available()

    @torch.no_grad()
    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy that stays as it is until the next one of this name. Call `wait` before it is read."""
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pinned)
            self._kept[name] = kept
        return kept.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Until all copies are made."""
        if self._pinned:
            torch.cuda.synchronize()


def copy_model(model: PreTrainedModel, layout: Whole, copies: HostCopies, directory: Path) -> list[TensorFile]:
    """Begin a Hugging Face directory: the file of the weights that this rank writes, if any. Every rank calls it.

    Weights are gathered one at a time, and each is kept by the one rank that writes it.
    """
    sizes = {
        name.replace(".base_layer.", "."): p.numel() for name, p in model.named_parameters() if not is_adapter(name)
    }
    buffers = saved_buffers(model)
    writer_of = writers(sizes | {name: buffer.numel() for name, buffer in buffers.items()}, layout.ranks)
    own: dict[str, Tensor] = {}
    for layer in by_layer(chain(merged_weights(model, layout.full), buffers.items())):
        if writer_of[next(iter(layer))] == layout.rank:
            for name, weight in as_on_disk(model, layer).items():
                own[name] = copies.copy(f"model.{name}", weight)
    if layout.rank == 0:
        layout.describe(directory)  # before any rank writes: it removes files of weights that it did not write
    everyone = layout.of_all_ranks(([*own], sum(weight.nbytes for weight in own.values())))
    names = [theirs for theirs, _ in everyone if theirs]
    assert all(theirs for theirs, _ in everyone[: len(names)]), "files are numbered by rank, without a gap"
    if layout.rank == 0:
        write_index(directory, names, sum(size for _, size in everyone))
    return [TensorFile(model_file(directory, layout.rank, len(names)), own)] if own else []


def copy_adapters(model: PreTrainedModel, layout: Whole, copies: HostCopies, directory: Path) -> list[TensorFile]:
    """Begin a directory of PEFT, where the model has adapters: rank 0's file. Every rank calls it."""
    own = {name: copies.copy(f"adapter.{name}", weight) for name, weight in adapter_weights(model, layout.full)}
    if not own or layout.rank:
        return []
    directory.mkdir(exist_ok=True)
    write_adapter_settings(model, directory)
    return [TensorFile(directory / "adapter_model.safetensors", own)]
