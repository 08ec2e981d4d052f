"""Are log-probs on packed rows and with a key-value cache those of transformers' own eager attention?

Asked of a small model with the options of the real one, on the CPU, before any weight of that is read.
"""

from collections.abc import Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.errors import UserError
from tandem.models.attention import ATTENTION, PackedRows
from tandem.models.classes import attention_of, class_of, is_picture_model
from tandem.models.families import SPATIAL, refusal
from tandem.models.kv_cache import Decode, Extend, KVCache, Prefill, Prefix
from tandem.models.lean import make_lean
from tandem.models.logits import Bend
from tandem.models.mixing import has_mixers, mend_time_steps, wrap_mixers
from tandem.models.sight import random_pixels, sight_of
from tandem.models.tiny import VOCABULARY, tiny
from tandem.pictures.positions import places_of
from tandem.types import IntArray, Picture

TAKES_FEATURES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18)
"""Models of this transformers take the features of pictures, `mm_encoder_outputs`, in the place of pixels."""
TOLERANCE = 1e-4
"""By how much two log-probs of a token may differ, in float32."""
_OTHER_TOKEN = 14
"""In the place of the token that stands for pictures, which may be any."""
_MAX_PARAMETERS = 2**26
_SIDE = 2
"""Rows of tokens that the picture takes in the first row of a model that sees pictures, and its columns."""


class _Rows(NamedTuple):
    """What is compared."""

    rows: Sequence[Tensor]
    """Token ids of each row; of different lengths."""
    prompts: Sequence[int]
    """How many tokens of each row are there before generation starts."""
    kept: Sequence[int]
    """How many tokens of each prompt are there from an earlier request, where one goes on from what that has left."""


_ROWS = _Rows((torch.arange(3, 14), torch.arange(20, 27)), (5, 3), (4, 1))
"""Longer than a small model's window."""
_LONG_ROWS = _Rows((torch.arange(3, 144) % VOCABULARY, torch.arange(20, 97) % VOCABULARY), (131, 73), (70, 1))
"""For state mixers: longer than two of their chunks, of which none but Mamba-2's can be made small."""
_AGREED = set[tuple[type, str]]()
"""Configurations, as JSON, that this process has checked: the roles of a run mostly load the same one."""


class Agreement(NamedTuple):
    """The largest difference of any token's log-prob from that of eager attention."""

    packed: float
    """As training computes it: rows head to tail, one cut into prefix and segment; body, then output layer."""
    cached: float
    """As the native engine computes it: prompts at once or after what is kept of them, the rest token by token."""


def check_family(config: PreTrainedConfig, *, value_head: bool = False, trust_remote_code: bool = False) -> None:
    """UserError, with the name of the family, where its log-probs would be wrong."""
    if reason := refusal(config.to_dict(), value_head):
        raise UserError(reason)
    family, asked = f"model type {config.model_type}", None
    try:
        if not trust_remote_code:  # whose code may have changed
            asked = type(config), config.to_json_string()
        if asked in _AGREED:
            return
        found = compare(config, trust_remote_code)
    except Exception as error:  # a family that nobody has tried raises what it likes
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UserError(f"{family} does not run here: a small model of it fails with {reason}") from error
    if not all(difference <= TOLERANCE for difference in found):  # NaN is not
        raise UserError(
            f"{family} does not run here: on a small model of it log-probs differ from those of transformers' eager "
            f"attention, by up to {found.packed:.1g} on packed rows and {found.cached:.1g} with a key-value cache; "
            "docs/models.md lists the families that run"
        )
    if asked is not None:
        _AGREED.add(asked)


@torch.no_grad()
def compare(config: PreTrainedConfig, trust_remote_code: bool = False) -> Agreement:
    """Measured on a small model of the same family and options; raises whatever that raises."""
    small = tiny(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        eager, ours = _models(small, trust_remote_code)
    if is_picture_model(small):
        return _compare_with_a_picture(eager, ours)
    asked = _LONG_ROWS if has_mixers(ours) else _ROWS
    wanted = [eager(row[None], use_cache=False).logits[0] for row in asked.rows]
    answers = [row[prompt - 1 :] for row, prompt in zip(wanted, asked.prompts, strict=True)]
    cached = [*_cached(ours, asked, kept=False), *_cached(ours, asked, kept=True)]
    return Agreement(_difference(_packed(ours, asked), wanted), _difference(cached, [*answers, *answers]))


def _compare_with_a_picture(eager: Any, ours: Any) -> Agreement:
    """The first row shows one: a row of its own, cut where its prompt ends; then token by token after its prompt."""
    if not TAKES_FEATURES:
        raise NotImplementedError(
            f"transformers {transformers.__version__}: models that see pictures need 5.18 or newer"
        )
    sight, spatial = sight_of(eager.config), eager.config.model_type in SPATIAL
    pixels = [random_pixels(eager.config)]
    features = sight.features(ours.base_model, pixels, torch.device("cpu"))
    count = len(features[0])
    picture = Picture("", (_SIDE, count // _SIDE) if spatial else (1, count), place=1)
    token = eager.config.image_token_id
    rows = [row.masked_fill(row == token, _OTHER_TOKEN) for row in _ROWS.rows]
    first, second, prompt = rows[0], rows[1], picture.place + count
    shown = slice(picture.place, prompt)
    first[shown] = token
    theirs = sight.arguments(pixels)
    if spatial:
        theirs["mm_token_type_ids"] = (first == token).int()[None]
    wanted = [eager(first[None], use_cache=False, **theirs).logits[0], eager(second[None], use_cache=False).logits[0]]
    marked = torch.cat(rows).numpy()
    marked[shown] = -1
    offsets = np.array([0, prompt, len(first), len(first) + len(second)])
    prefixes = np.array([-1, 0, -1])
    places = places_of(marked, offsets, prefixes, [picture], spatial=spatial)
    position_N = torch.from_numpy(places.positions[:, None] if spatial else places.positions[:1])
    plan, ids = PackedRows(offsets, prefixes=prefixes), torch.cat(rows)[None]
    seen = SimpleNamespace(
        pooler_output=sight.embeddings(features[0]), deepstack_features=[[layer] for layer in features[1:]]
    )
    outputs = {"mm_encoder_outputs": {"image": seen}, "use_cache": False}
    hidden = ours.base_model(ids, position_ids=position_N, attention_plan=plan, return_dict=False, **outputs)[0][0]
    packed = ours.get_output_embeddings()(hidden).split([len(first), len(second)])
    cache, stop = KVCache(), len(first)
    cache.reserve(1, stop)
    prefill = Prefill(cache, np.array([0, prompt]), 0, np.array([0]), torch.device("cpu"))
    made = [
        ours(ids[:, :prompt], position_ids=position_N[..., :prompt], attention_plan=prefill, **outputs).logits[0, -1:]
    ]
    lag = int(places.ends[0]) - prompt
    for place in range(prompt, stop):
        step = Decode(cache, torch.tensor([place]), place + 1, place + 1)
        stands = torch.tensor([[place + lag]])
        made.append(
            ours(ids[:, place : place + 1], position_ids=stands, attention_plan=step, use_cache=False).logits[0]
        )
    return Agreement(_difference(packed, wanted), _difference([torch.cat(made)], [wanted[0][prompt - 1 :]]))


def _models(config: PreTrainedConfig, trust_remote_code: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same random model with transformers' attention and with ours."""

    def make(attention: str) -> PreTrainedModel:
        made: Any = class_of(config, value_head=False).from_config(
            deepcopy(config),
            attn_implementation=attention_of(config, attention),
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
        )
        return made.eval()

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make("eager").parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"it still has {size:,} parameters (tandem/models/tiny.py does not know their sizes)")
    eager, ours = make("eager"), make(ATTENTION)
    _draw(eager)
    ours.load_state_dict(eager.state_dict())
    make_lean(ours)
    mend_time_steps(eager)
    wrap_mixers(ours)
    return eager, ours


def _draw(model: PreTrainedModel) -> None:
    """Weights by which attention is far from uniform and logits are far from 0, so that what acts on them shows."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.3, generator=generator))


def _packed(model: PreTrainedModel, asked: _Rows) -> list[Tensor]:
    """Logits of each row, `[T, V]`. The first is cut where its prompt ends, as the siblings of a group are."""
    lengths = [len(row) for row in asked.rows]
    plan = PackedRows(np.array([0, asked.prompts[0], lengths[0], sum(lengths)]), prefixes=np.array([-1, 0, -1]))
    body: Any = model.base_model
    layer: Any = model.get_output_embeddings()
    hidden = body(
        torch.cat([*asked.rows])[None],
        position_ids=plan.positions[None],
        attention_plan=plan,
        use_cache=False,
        return_dict=False,
    )[0][0]
    return list(Bend.of(model.config).logits_(layer(hidden))[0].split(lengths))


def _cached(model: PreTrainedModel, asked: _Rows, kept: bool) -> list[Tensor]:
    """Logits of each row from the last token of its prompt to where the first row ends, `[T, V]`.

    `kept`: the prompts are computed from what an earlier pass has left of their beginnings.
    """
    lengths, prompts = np.array([len(row) for row in asked.rows]), np.array(asked.prompts)
    cache = KVCache()
    cache.reserve(len(asked.rows), int(lengths.max()))
    parts = [_extended(model, cache, asked) if kept else _prefilled(model, cache, asked, prompts)]
    for made in range(int((lengths - prompts).min())):
        position_B = prompts + made
        plan = Decode(cache, torch.from_numpy(position_B), int(position_B.min()) + 1, int(position_B.max()) + 1)
        token_B = torch.stack([row[position] for row, position in zip(asked.rows, position_B, strict=True)])
        parts.append(_forward(model, token_B, plan))
    return list(torch.stack(parts, dim=1))


def _prefilled(model: PreTrainedModel, cache: KVCache, asked: _Rows, lengths: IntArray) -> Tensor:
    """Logits after so many tokens of each row, `[B, V]`, which are computed whole."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    plan = Prefill(cache, offsets, 0, np.arange(len(lengths)), torch.device("cpu"))
    token_N = torch.cat([row[:length] for row, length in zip(asked.rows, lengths, strict=True)])
    return _forward(model, token_N, plan, torch.from_numpy(offsets[1:] - 1))


def _extended(model: PreTrainedModel, cache: KVCache, asked: _Rows) -> Tensor:
    """Logits after each prompt, `[B, V]`, whose beginning is read from the cache."""
    kept, prompts = np.array(asked.kept), np.array(asked.prompts)
    _prefilled(model, cache, asked, kept)
    prefixes = [
        Prefix(count, [(cache.read(slot, 0, count), count)], cache.states.read(slot))
        for slot, count in enumerate(asked.kept)
    ]
    lengths = prompts - kept
    plan = Extend(cache, prefixes, lengths, 0, np.arange(len(prompts)), torch.device("cpu"))
    rest_N = torch.cat([row[start:stop] for row, start, stop in zip(asked.rows, kept, prompts, strict=True)])
    return _forward(model, rest_N, plan, torch.from_numpy(np.cumsum(lengths) - 1))


def _forward(model: Any, token_N: Tensor, plan: Prefill | Extend | Decode, wanted: int | Tensor = 0) -> Tensor:
    """Logits `[wanted, V]`, of every token where `wanted` is 0."""
    return model(
        token_N[None], position_ids=plan.position_N[None], attention_plan=plan, use_cache=False, logits_to_keep=wanted
    ).logits[0]


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest of any token's log-prob; a row in `found` may end before it does in `wanted`."""
    pairs = zip(found, wanted, strict=True)
    largest = [(ours.log_softmax(-1) - theirs[: len(ours)].log_softmax(-1)).abs().max() for ours, theirs in pairs]
    return float(torch.stack(largest).max())
