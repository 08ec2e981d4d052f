"""What a rank of Megatron-Core holds of each Hugging Face weight: parts of its own parameters, none of them gathered.

linear_qkv   [key-value head: its query heads, key, value] of this rank  ->  rows of q_proj, k_proj, v_proj
linear_fc1   gate over up, of this rank                                  ->  rows of gate_proj, up_proj
"""

# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from tandem.regions import Region, Shard, chunk, shape_of, whole

_EXPERTS = ".mlp.experts.linear_fc"


def shards_of(bridge: Any, stage: Any) -> Iterator[Shard[Tensor]]:
    """`stage` as mbridge expects it: with the parameter names of TransformerEngine's modules."""
    everywhere: dict[str, str] = bridge._weight_name_mapping_mcore_local_to_global(stage)
    for local_name, parameter in stage.named_parameters():
        name = everywhere[local_name]
        hf_names: list[str] = bridge._weight_name_mapping_mcore_to_hf(name)
        dim, ranks, rank = _cut(name, parameter)
        for hf_name, (shape, read) in zip(hf_names, _parts(bridge, name, parameter, dim, ranks), strict=True):
            region = whole(shape) if dim is None else chunk(whole(shape), dim, ranks, rank)
            if "embedding.word_embeddings" in name or "output_layer" in name:
                shape, region, read = _without_padding(bridge.vocab_size, shape, region, read)
            yield Shard(hf_name, shape, str(parameter.dtype).removeprefix("torch."), region, read)


Part = tuple[tuple[int, ...], Callable[[], Tensor]]
"""Shape of the whole weight, and what gives this rank's part."""


def _cut(name: str, parameter: Tensor) -> tuple[int | None, int, int]:
    """The dimension in which ranks share a parameter, how many they are, and which this one is."""
    if _EXPERTS in name:  # of grouped experts TransformerEngine does not say it
        group: Any = parallel_state.get_expert_tensor_parallel_group()
        return 0 if "linear_fc1" in name else 1, group.size(), group.rank()
    described: Any = parameter
    group = parallel_state.get_tensor_model_parallel_group()
    shared = getattr(parameter, "tensor_model_parallel", False)
    return described.partition_dim if shared else None, group.size(), group.rank()


def _parts(bridge: Any, name: str, parameter: Tensor, dim: int | None, ranks: int) -> Iterator[Part]:
    """One for each of the Hugging Face weights that the parameter holds parts of."""
    rest = tuple(parameter.shape[1:])
    if ".linear_qkv." in name and "layer_norm" not in name:
        config = bridge.config
        groups, size = config.num_query_groups, config.kv_channels
        queries = config.num_attention_heads // groups * size
        heads = groups // ranks
        for start, stop in ((0, queries), (queries, queries + size), (queries + size, queries + 2 * size)):
            yield (groups * (stop - start), *rest), partial(_heads, parameter, heads, start, stop)
    elif ".linear_fc1.weight" in name:
        shape = (parameter.shape[0] // 2 * ranks, *rest)
        yield shape, lambda: parameter.detach().chunk(2)[0]
        yield shape, lambda: parameter.detach().chunk(2)[1]
    else:
        shape = tuple(size * ranks if place == dim else size for place, size in enumerate(parameter.shape))
        yield shape, parameter.detach


def _heads(parameter: Tensor, heads: int, start: int, stop: int) -> Tensor:
    """These rows of each key-value head's part."""
    by_head = parameter.detach().unflatten(0, (heads, -1))
    return by_head[:, start:stop].flatten(0, 1)


def _without_padding(
    vocabulary: int, shape: tuple[int, ...], region: Region, read: Callable[[], Tensor]
) -> tuple[tuple[int, ...], Region, Callable[[], Tensor]]:
    start, stop = region[0]
    kept = ((min(start, vocabulary), min(stop, vocabulary)), *region[1:])
    return (vocabulary, *shape[1:]), kept, lambda: read()[: shape_of(kept)[0]]
