"""The numbers of a model that decide what it costs, from the config.json of its directory alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.model_files import read_model_config
from tandem.pictures.vlm_config import MODEL_TYPES
from tandem.planning.mixer_shape import MixerShape, gated_delta_net, mixing_layers
from tandem.planning.tower_shape import TOWERS, TowerShape, tower_shape
from tandem.stored import DamagedFile

Config = Mapping[str, Any]
_MOST_LAYERS = 10_000
"""Of a model: a damaged file may ask for billions, which are laid out one by one here."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention; the sizes are of one token."""

    parameters: int
    query: int
    """Numbers of all its query heads, as its output has them, too."""
    key: int
    value: int
    normed: int = 0
    """Numbers of queries and keys that are normed before they are rotated."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder. Parameters are counted as transformers makes them, all of them learn."""

    family: str
    """`model_type`."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """The output layer's weight is the embedding's."""
    attention: Attention
    norms: int
    """Parameters of a layer's norms."""
    width: int
    """Of the feed-forward layer of a dense layer; 0 where all layers are mixtures."""
    windows: tuple[int | None, ...]
    """By layer: how many of the latest tokens a query sees; None: all."""
    mixtures: tuple[bool, ...]
    """By layer: whether its feed-forward layer is a mixture of experts."""
    experts: int = 0
    active_experts: int = 0
    """That a token is sent to."""
    expert_width: int = 0
    shared_width: int = 0
    """Of the experts that every token is sent to, together."""
    mixture_parameters: int = 0
    """Of one mixture: router, experts, shared experts."""
    dense_parameters: int = 0
    """Of one feed-forward layer of width `width`."""
    cached: int = 0
    """Numbers that a serving engine keeps of a token and layer where it keeps fewer than keys and values; else 0."""
    tower: TowerShape | None = None
    """Of a model that sees pictures."""
    mixer: MixerShape | None = None
    """What some layers have in the place of attention."""
    mixes: tuple[bool, ...] = ()
    """By layer: whether it has; empty where none has."""

    @property
    def attending(self) -> int:
        """Layers with attention."""
        return self.layers - sum(self.mixes)

    def state_bytes(self, item_bytes: int = 2) -> int:
        """Of the mixers' states of one row, whatever its length."""
        return 0 if self.mixer is None else sum(self.mixes) * self.mixer.state_bytes(item_bytes)

    @property
    def mixer_flops(self) -> int:
        """Of a token's forward pass through all mixers, beside those of their matrices."""
        return 0 if self.mixer is None else sum(self.mixes) * self.mixer.flops

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    def layer(self, index: int) -> int:
        """Parameters of a layer."""
        feed_forward = self.mixture_parameters if self.mixtures[index] else self.dense_parameters
        mixer = self.mixer if self.mixes and self.mixes[index] else None
        return (mixer or self.attention).parameters + self.norms + feed_forward

    @cached_property
    def all_layers(self) -> int:
        mixtures = sum(self.mixtures)
        feed_forward = mixtures * self.mixture_parameters + (self.layers - mixtures) * self.dense_parameters
        mixers = 0 if self.mixer is None else sum(self.mixes) * self.mixer.parameters
        return self.attending * self.attention.parameters + mixers + self.layers * self.norms + feed_forward

    @property
    def largest_layer(self) -> int:
        return max(self.layer(index) for index in range(self.layers))

    @property
    def parameters(self) -> int:
        """All of them, a tied weight once."""
        return self.embedding * (1 if self.tied else 2) + self.all_layers + self.hidden + self.tower_parameters

    @property
    def tower_parameters(self) -> int:
        return self.tower.parameters if self.tower else 0

    @property
    def active_parameters(self) -> int:
        """Those of the matrices that a token is multiplied with, the output layer's among them."""
        idle = sum(self.mixtures) * (self.experts - self.active_experts) * 3 * self.hidden * self.expert_width
        return self.embedding + self.all_layers - idle

    @property
    def expert_parameters(self) -> int:
        """Of all routed experts."""
        return sum(self.mixtures) * self.experts * 3 * self.hidden * self.expert_width

    def kv_bytes_per_token(self, item_bytes: int = 2) -> int:
        """Of a serving engine, for a token that all layers with attention keep."""
        return self.attending * (self.cached or self.attention.key + self.attention.value) * item_bytes

    def kv_bytes(self, tokens: int, item_bytes: int = 2) -> int:
        """Of one row of so many tokens, of which layers with a window keep the latest alone; and its states."""
        numbers = self.cached or self.attention.key + self.attention.value
        kept = sum(min(tokens, tokens if window is None else window) for window in self.windows)
        return (kept - sum(self.mixes) * tokens) * numbers * item_bytes + self.state_bytes(item_bytes)


def read_shape(directory: Path) -> ModelShape:
    """UserError where there is no config.json, or one of a family that is not known here."""
    path = directory / "config.json"
    if not path.exists():
        raise UserError(
            f"model: {directory} has no config.json, which is what planning needs of a model; give the directory of "
            "one (`hf download NAME config.json --local-dir DIR` makes it, without weights)"
        )
    config = read_model_config(directory)
    mend = "take the one that was published"
    if (layers := {**config, **(config.get("text_config") or {})}.get("num_hidden_layers") or 0) > _MOST_LAYERS:
        raise DamagedFile(path, f"num_hidden_layers: {layers} are more than any model has", mend)
    try:
        shape = shape_of(config)
    except UserError as error:
        raise UserError(f"{error} ({path})") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"model: {path} is not complete ({error!r}); {mend}") from None
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.type in (int, "int") and (type(value) is not int or not 0 <= value < 2**60):
            raise UserError(f"model: {path} makes no sense: {field.name} would be {value!r}; {mend}")
    return shape


def shape_of(config: Config) -> ModelShape:
    """Of the contents of a config.json. UserError for a family that is not in FAMILIES, or whose tower is unknown."""
    whole, text, seeing = config, config.get("text_config") or {}, config.get("model_type")
    sees = seeing in MODEL_TYPES
    if sees and seeing not in TOWERS:
        raise UserError(f"model: plan does not know how large the tower of models of type {seeing!r} is, nor its work")
    config = {name: value for name, value in {**config, **text}.items() if value is not None}
    if sees:  # whose text has no family of its own, and whose output layer is tied or not by the whole model's word
        config |= {name: whole[name] for name in ("model_type", "tie_word_embeddings") if name in whole}
    family = config.get("model_type", "")
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"model: plan does not know how large models of type {family!r} are; it knows {known}")
    traits = FAMILIES[family]
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))  # where all layers are mixtures
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    attention = traits.attention(config, traits)
    mixtures = _mixtures(config, layers)
    experts = _experts(config) if any(mixtures) else 0
    expert_width = config.get("moe_intermediate_size", config["intermediate_size"]) if experts else 0
    shared = _shared_width(config, expert_width) if experts else 0
    return ModelShape(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
        head_dim=_head_dim(config),
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", traits.tied),
        attention=attention,
        norms=traits.norms * hidden,
        width=0 if all(mixtures) else config["intermediate_size"],
        windows=_windows(config, traits, layers),
        mixtures=mixtures,
        experts=experts,
        active_experts=config["num_experts_per_tok"] if experts else 0,
        expert_width=expert_width,
        shared_width=shared,
        mixture_parameters=_mixture_parameters(config, traits, experts, expert_width, shared) if experts else 0,
        dense_parameters=_gated(hidden, config["intermediate_size"], config.get("mlp_bias", False)),
        cached=config["kv_lora_rank"] + config["qk_rope_head_dim"] if "kv_lora_rank" in config else 0,
        tower=tower_shape(family, whole.get("vision_config") or {}, hidden) if sees else None,
        mixer=traits.mixer(config) if traits.mixer else None,
        mixes=mixing_layers(config, layers) if traits.mixer else (),
    )


@dataclass(frozen=True, slots=True)
class Traits:
    """Where families differ beyond the numbers of their config.json."""

    attention: Callable[[Config, "Traits"], Attention]
    norms: int = 2
    """A layer's, over `hidden` numbers each."""
    tied: bool = False
    """Where config.json is silent, which it is where the value is the family's default."""
    biases: str = ""
    """The attention's projections that have a bias whatever config.json says."""
    head_norms: bool = False
    """Queries and keys are normed head by head."""
    windows_of: str = ""
    """Config.json is silent: the layers with a window: all, odd (every other one), five_of_six."""
    gated: bool = False
    """The attention's output is multiplied with gates, as many as its queries have numbers."""
    mixer: Callable[[Config], MixerShape] | None = None
    """What some layers have in the place of attention."""
    router_bias: bool = False
    expert_biases: bool = False


def _head_dim(config: Config) -> int:
    return config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


def _plain_attention(config: Config, traits: Traits) -> Attention:
    """Grouped-query attention (Ainslie et al. 2023)."""
    hidden, head_dim, heads = config["hidden_size"], _head_dim(config), config["num_attention_heads"]
    query, key = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    biases = {"q": query, "k": key, "v": key, "o": hidden}
    gates = hidden * query if traits.gated else 0
    weights = 2 * hidden * (query + key) + gates + sum(biases[name] for name in _biased(config, traits))
    norms, normed = 0, 0
    if traits.head_norms or config.get("use_qk_norm"):
        norms, normed = 2 * head_dim, query + key
    if config["model_type"] == "olmo2":
        norms = normed = query + key
    sinks = heads if config["model_type"] == "gpt_oss" else 0
    return Attention(weights + norms + sinks, query, key, key, normed)


def _biased(config: Config, traits: Traits) -> str:
    """The attention's projections that have a bias."""
    if traits.biases == "qkv":
        return "qkv" if config.get("qkv_bias", True) else ""
    if traits.biases or not config.get("attention_bias"):
        return traits.biases
    plain_output = config["model_type"] in ("glm4_moe", "seed_oss") and not config.get("attention_out_bias")
    return "qkv" if plain_output else "qkvo"


def _latent_attention(config: Config, traits: Traits) -> Attention:
    """DeepSeek's: keys and values from one small vector a token (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rotated, plain, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    query, low = heads * (plain + rotated), config.get("q_lora_rank")
    of_query = hidden * query if low is None else low * (hidden + query + 1)
    of_keys = hidden * (latent + rotated) + latent + latent * heads * (plain + value)
    return Attention(of_query + of_keys + heads * value * hidden, query, query, heads * value)


def _gated(hidden: int, width: int, biased: bool = False) -> int:
    return 3 * hidden * width + (2 * width + hidden if biased else 0)


def _mixtures(config: Config, layers: int) -> tuple[bool, ...]:
    if not _experts(config):
        return (False,) * layers
    first, step, dense = (
        config.get("first_k_dense_replace", 0),
        config.get("decoder_sparse_step", 1),
        config.get("mlp_only_layers", ()),
    )
    return tuple(index >= first and (index + 1) % step == 0 and index not in dense for index in range(layers))


def _experts(config: Config) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[name] for name in names if name in config), 0)


def _shared_width(config: Config, expert_width: int) -> int:
    if "shared_expert_intermediate_size" in config:
        return config["shared_expert_intermediate_size"]
    return config.get("n_shared_experts", 0) * expert_width


def _mixture_parameters(config: Config, traits: Traits, experts: int, width: int, shared: int) -> int:
    hidden = config["hidden_size"]
    router = experts * hidden + (experts if traits.router_bias else 0)
    own_gate = hidden if "shared_expert_intermediate_size" in config else 0
    biases = experts * (2 * width + hidden) if traits.expert_biases else 0
    return router + experts * _gated(hidden, width) + biases + _gated(hidden, shared) + own_gate


def _windows(config: Config, traits: Traits, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * layers
    if kinds := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])
    if traits.windows_of == "odd":
        return tuple(None if index % 2 else window for index in range(layers))
    if traits.windows_of == "five_of_six":
        pattern = config.get("sliding_window_pattern", 6)
        return tuple(window if (index + 1) % pattern else None for index in range(layers))
    full = config.get("max_window_layers", 0) if config.get("use_sliding_window") else 0
    return tuple(window if index >= full else None for index in range(layers))


_PLAIN = Traits(_plain_attention)
_GATED_DELTA = Traits(_plain_attention, head_norms=True, gated=True, mixer=gated_delta_net)
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "phi3", "mixtral", "seed_oss", "olmo2"), _PLAIN),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"), Traits(_plain_attention, biases="qkv")),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"), Traits(_plain_attention, head_norms=True)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _GATED_DELTA),
    "gemma2": Traits(_plain_attention, norms=4, tied=True, windows_of="odd"),
    "gemma3_text": Traits(_plain_attention, norms=4, tied=True, head_norms=True, windows_of="five_of_six"),
    "gpt_oss": Traits(_plain_attention, biases="qkvo", windows_of="odd", router_bias=True, expert_biases=True),
    "glm4_moe": _PLAIN,
    "deepseek_v3": Traits(_latent_attention),
}
"""By `model_type`: what plan knows. tests/unit/test_planning_model_shape.py counts each as transformers makes it."""
