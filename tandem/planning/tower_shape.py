"""The numbers of a vision tower that decide what it costs, from the `vision_config` of a config.json alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TowerShape:
    """A transformer over the patches of pictures, of which several together become one token of the text."""

    family: str
    """`model_type` of the whole model."""
    width: int
    """Numbers of a patch between layers."""
    layers: int
    heads: int
    feed_forward: int
    """Width inside a layer's feed-forward part."""
    gated: bool
    """That part has a gate; and norms are without biases."""
    patches: int
    """That become one token."""
    patch_numbers: int
    """Of a patch as it comes from the image processor."""
    out: int
    """Numbers of a token's features: the text's hidden size."""
    deeper: int = 0
    """Layers whose features are added inside the text, beside those of the last one (Qwen3-VL's DeepStack)."""
    positions: int = 0
    """Learned positions."""
    patch_bias: bool = False

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        matrices = 3 if self.gated else 2
        attention = 4 * self.width * self.width + 4 * self.width
        biases = (matrices - 1) * self.feed_forward + self.width
        norms = (1 if self.gated else 2) * 2 * self.width
        return attention + matrices * self.width * self.feed_forward + biases + norms

    @property
    def merger(self) -> int:
        """Parameters of what makes a token of patches."""
        return self._merger(self.width)

    def _merger(self, normed: int) -> int:
        merged = self.patches * self.width
        norm = (1 if self.gated else 2) * normed
        return norm + merged * merged + merged + merged * self.out + self.out

    @property
    def rest(self) -> int:
        """Parameters that are in no layer: of patches, positions, mergers."""
        embedding = self.width * self.patch_numbers + (self.width if self.patch_bias else 0)
        deeper = self.deeper * self._merger(self.patches * self.width)
        return embedding + self.positions * self.width + self.merger + deeper

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.rest

    def flops(self, tokens: float) -> float:
        """Of a forward pass over pictures of so many tokens, the attention scores of their patches left out."""
        return 2 * tokens * (self.patches * (self.layers * self.layer) + self.rest)


_QWEN3: Config = {
    "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "patch_size": 16, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}  # fmt: skip
TOWERS: Mapping[str, Config] = {
    "qwen2_vl": {"embed_dim": 1280, "mlp_ratio": 4, "depth": 32, "patch_size": 14},
    "qwen2_5_vl": {"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "patch_size": 14},
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}
"""By `model_type`, what a published `vision_config` may leave out, because it is transformers' default."""


def tower_shape(family: str, vision: Config, hidden: int) -> TowerShape:
    """`hidden`: the text's."""
    known = {"num_heads": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, **TOWERS[family], **vision}
    channels = known.get("in_channels", known.get("in_chans", 3))
    older = family == "qwen2_vl"
    width = known["embed_dim"] if older else known["hidden_size"]
    return TowerShape(
        family=family,
        width=width,
        layers=known["depth"],
        heads=known["num_heads"],
        feed_forward=int(width * known["mlp_ratio"]) if older else known["intermediate_size"],
        gated=family == "qwen2_5_vl",
        patches=known["spatial_merge_size"] ** 2,
        patch_numbers=channels * known["temporal_patch_size"] * known["patch_size"] ** 2,
        out=known["hidden_size"] if older else known.get("out_hidden_size", hidden),
        deeper=len(known.get("deepstack_visual_indexes", ())),
        positions=known.get("num_position_embeddings", 0),
        patch_bias=family.startswith("qwen3"),
    )
