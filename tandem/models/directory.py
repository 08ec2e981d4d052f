"""Writing a Hugging Face directory by several ranks: whole weights, a layer's on one rank, no rank with all of them.

model/config.json, …                                            by the first rank, at once
model/model-00001-of-00004.safetensors, …                       by as many ranks, each the weights of some layers
model/model.safetensors.index.json                              which weights are in which file
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def writers(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which rank writes each weight, by name: the first ranks, without a gap, each about as much. `sizes` in any unit.

    The weights of a layer stay together: what is one tensor on disk may be several in the model.
    """
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        layers[_layer_of(name)] = layers.get(_layer_of(name), 0) + size
    total, before, chosen = max(1, sum(layers.values())), 0, dict[str, int]()
    for layer, size in layers.items():
        chosen[layer] = min(ranks - 1, before * ranks // total)
        before += size
    place = {rank: number for number, rank in enumerate(sorted(set(chosen.values())))}
    return {name: place[chosen[_layer_of(name)]] for name in sizes}


def by_layer(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The weights of one layer after another, in the order in which they come."""
    for _, layer in groupby(weights, lambda weight: _layer_of(weight[0])):
        yield dict(layer)


def as_on_disk(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a layer under the names, and in the shapes, in which the model's family is published."""
    ignored = model._keys_to_ignore_on_save or ()
    return revert_weight_conversion(model, {name: weight for name, weight in weights.items() if name not in ignored})


def model_file(directory: Path, number: int, count: int) -> Path:
    """The file of weights with this number, from 0, of so many."""
    name = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    return directory / name


def write_index(directory: Path, names: Sequence[Sequence[str]], total_bytes: int) -> None:
    """What says which weights are in which file, by the number of the file; one file alone has no index."""
    if len(names) > 1:
        files = {name: model_file(directory, file, len(names)).name for file, own in enumerate(names) for name in own}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; a name without a number is a layer of its own."""
    parts = name.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else name
