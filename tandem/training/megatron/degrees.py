"""Whether a model can lie on the ranks as configured: asked before any process starts, without Megatron-Core."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.config.ranks import MEGATRON_FAMILIES, find_megatron_mistakes
from tandem.config.training import MegatronTrainingConfig
from tandem.errors import UserError
from tandem.model_files import MEND, read_model_config
from tandem.models.families import rope_kinds

_BRIDGED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "is_causal": (True,),
}
"""Keys of a config.json that the bridge does not read, and the values with which it computes all the same."""


def check_packages() -> None:
    """Raises UserError where packages of the engine are not installed."""
    if missing := [name for name in ("megatron", "mbridge") if find_spec(name) is None]:
        raise UserError(
            f"training.type: megatron needs packages that are not installed ({', '.join(missing)}): "
            "pip install -e '.[megatron]' in a clone of Tandem, or on a machine without GPUs scripts/megatron-env"
        )


def check_degrees(path: Path, training: MegatronTrainingConfig, ranks: int) -> None:
    """Raises UserError with everything that is wrong with the model directory `path` on `ranks` ranks."""
    try:
        _check_shape(path, read_model_config(path), training, ranks)
    except (KeyError, TypeError) as error:  # a value that is missing, or of another type
        raise UserError(f"{path / 'config.json'}: is not complete ({error!r}); {MEND}") from None


def _check_shape(path: Path, shape: dict[str, Any], training: MegatronTrainingConfig, ranks: int) -> None:
    if shape["model_type"] not in MEGATRON_FAMILIES:
        raise UserError(
            f"training.type: megatron has no bridge for model type {shape['model_type']} of {path}, only for "
            f"{', '.join(MEGATRON_FAMILIES)}; use training.type: fsdp"
        )
    if left_out := list(_left_out(shape)):
        raise UserError(
            f"model.path: Megatron's bridge leaves out what config.json of {path} says: {', '.join(left_out)}; "
            "use training.type: fsdp"
        )
    if problems := list(find_megatron_mistakes(training, shape, ranks)):
        raise UserError(f"training: {path} cannot lie on {ranks} ranks so: {'; '.join(problems)}")


def _left_out(shape: dict[str, Any]) -> Iterator[str]:
    for key, values in _BRIDGED.items():
        if shape.get(key) is not None and shape[key] not in values:
            yield f"{key}: {shape[key]}"
    for kind in sorted(rope_kinds(shape) - {"default"}):
        yield f"RoPE of type {kind}"
