"""Do the kernels of state mixers do what packed rows rely on? Asked when an engine starts on a GPU, at the real sizes.

Plain implementations are held to transformers' rows by the tests. Kernels of packages take states, rows and padding
each in its own way, and one that ignores a state, or goes on into the next row, gives numbers that look right.
"""

from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import EngineError
from tandem.models.mixing.finding import mixers_of
from tandem.models.mixing.mixed_rows import MixedRows
from tandem.models.mixing.mixer import StateMixer

LARGEST = 10.0
"""By what factor of rounding packed rows may be off: rounding depends on where a row lies in a kernel's chunks."""
_FLOOR = 1e-5
"""Rounding of float32, over the size of what is rounded."""
_OFFSETS = np.array([0, 90, 91, 170, 205, 206, 240, 270, 298])
_PREFIXES = np.array([-1, -1, 0, 0, 2, 1, -1, -1])
"""A long prompt and one of a token, answers to both, a token that goes on from an answer, and two rows alone."""
_AROUND = {"norm": 1.0, "A_log": -3.0}
"""What vectors are drawn around, by parts of their names; others around 0."""
_PACKAGES = ("flash-linear-attention", "causal-conv1d", "mamba-ssm", "kernels")
"""What transformers takes kernels of mixers from."""


def check_mixers(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """EngineError where a mixer of the model, on this GPU, gives packed rows other numbers than rows alone."""
    if device.type != "cuda":
        return
    for kind, module in {type(module): module for module in mixers_of(model)}.items():
        off = error_of(module, model.config.get_text_config(), device, dtype)
        if not off <= LARGEST:
            raise EngineError(
                f"{kind.__name__} on {device} with torch {torch.__version__}{_installed()}: packed rows are off by "
                f"{off:.3g} times the rounding of {str(dtype).removeprefix('torch.')}, so states go from one row into "
                "another or are ignored; use other versions of these packages, or none of them"
            )


@torch.inference_mode(False)
@torch.enable_grad()
def error_of(module: Any, config: Any, device: torch.device, dtype: torch.dtype) -> float:
    """The worst error of outputs and of inputs' gradients over rounding: the distance in `dtype` from float32, each row
    alone. `module`: whose kind is asked about; its weights are not read, for they may be in shards."""
    drawn = _drawn(module, config, device)
    generator = torch.Generator().manual_seed(0)
    hidden_N = torch.randn(int(_OFFSETS[-1]), config.hidden_size, generator=generator).to(device)
    exact = _alone(drawn, hidden_N)
    mixer = drawn.to(dtype)
    rounded, found = _alone(mixer, hidden_N.to(dtype)), _packed(mixer, hidden_N.to(dtype))
    worst = 0.0
    for e, r, f in zip(exact, rounded, found, strict=True):
        off, rounding = (float((x.float() - e).norm()) for x in (f, r))
        worst = max(worst, off / max(rounding, _FLOOR * float(e.norm())) if off == off else float("inf"))
    return worst


def _drawn(module: Any, config: Any, device: torch.device) -> nn.Module:
    """Another mixer of the kind, whose states last for tens of tokens."""
    generator = torch.Generator().manual_seed(1)
    made: nn.Module = type(module)(config, layer_idx=module.layer_idx)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
            noise = torch.randn(parameter.shape, generator=generator) * spread
            at = next((value for part, value in _AROUND.items() if part in name), 0.0)
            parameter.copy_(noise + (at if parameter.ndim == 1 else 0))
    if hasattr(module, "time_step_limit"):
        setattr(made, "time_step_limit", module.time_step_limit)  # noqa: B010 - no attribute of Module
    return made.eval().to(device)


def _packed(module: nn.Module, hidden_N: Tensor) -> list[Tensor]:
    leaf = hidden_N.detach().requires_grad_()
    rows = MixedRows(_OFFSETS, _PREFIXES, hidden_N.device)
    output_N, _ = rows.run(StateMixer(module, 0), leaf)
    return _with_gradient(output_N, leaf)


def _alone(module: nn.Module, hidden_N: Tensor) -> list[Tensor]:
    """Of each segment, computed after all tokens before it in one call."""
    leaf, mixer, outputs = hidden_N.detach().requires_grad_(), StateMixer(module, 0), list[Tensor]()
    for segment, (start, stop) in enumerate(pairwise(_OFFSETS)):
        parts, before = [leaf[start:stop]], int(_PREFIXES[segment])
        while before >= 0:
            parts.append(leaf[_OFFSETS[before] : _OFFSETS[before + 1]])
            before = int(_PREFIXES[before])
        row_T = torch.cat(parts[::-1])
        outputs.append(mixer(row_T[None], None, None)[0][0, len(row_T) - int(stop - start) :])
    return _with_gradient(torch.cat(outputs), leaf)


def _with_gradient(output_N: Tensor, leaf: Tensor) -> list[Tensor]:
    weight_N = torch.linspace(-1, 1, output_N.numel(), device=leaf.device).view_as(output_N).to(output_N.dtype)
    return [output_N.detach(), *torch.autograd.grad(output_N, leaf, weight_N)]


def _installed() -> str:
    found: list[str] = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return "".join(f", {one}" for one in found)
