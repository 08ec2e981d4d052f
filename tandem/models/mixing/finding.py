"""The state mixers of a model, and how the plan of a forward pass reaches them.

A model that is wrapped answers `model(..., attention_plan=plan)` as one without mixers does. A layer hands its plan to
its mixers when it is called, so also when it is computed again in the backward pass, whatever passes are under way.
"""

import inspect
import math
from collections.abc import Mapping
from functools import cache
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.model_files import STATE_LAYERS
from tandem.models.mixing.mixer import StateMixer

_CONVOLUTION = "ShortConv"
"""How the classes of mixers end whose cache is called as that of attention is."""


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """The state mixers, told by what their `forward` takes; where several in one another do, the innermost."""
    takes = {module for module in model.modules() if _is_mixer(type(module))}
    return [module for module in model.modules() if module in takes and len(takes.intersection(module.modules())) == 1]


@cache
def _is_mixer(kind: type[nn.Module]) -> bool:
    named = "past_key_values" if kind.__name__.endswith(_CONVOLUTION) else "cache_params"
    return named in inspect.signature(kind.forward).parameters


def wrap_mixers(model: PreTrainedModel) -> None:
    """From now on mixers ask the plan, as attention does. NotImplementedError where configuration names more of them
    than are found: their states would go on from one row into the next."""
    mend_time_steps(model)
    found: list[Any] = mixers_of(model)
    kinds = [
        kind for kind in getattr(model.config.get_text_config(), "layer_types", None) or () if kind in STATE_LAYERS
    ]
    if len(found) < len(kinds):
        raise NotImplementedError(
            f"{len(kinds)} layers carry a state ({', '.join(sorted(set(kinds)))}), and {len(found)} mixers were found"
        )
    if not found:
        return
    for number, module in enumerate(found):
        module.as_function, module.plan = StateMixer(module, number), None
        module.forward = MethodType(_mix, module)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        inside = set(layer.modules())
        layer.own_mixers = tuple(module for module in found if module in inside)
        if layer.own_mixers:
            layer.register_forward_pre_hook(_hand_on, with_kwargs=True)
    body: Any = model.base_model
    if body is not model:
        body.plan = None
        model.register_forward_pre_hook(_note, with_kwargs=True)
        body.register_forward_pre_hook(_add, with_kwargs=True)


def has_mixers(model: nn.Module) -> bool:
    """Whether any was wrapped."""
    return any(hasattr(module, "as_function") for module in model.modules())


def mend_time_steps(model: Any) -> None:
    """Bound the time steps of Mamba-2 as the configuration says, which is mostly not at all.

    transformers' NemotronH and Zamba2 bound them from below in the chunked form, by what their weights are drawn with
    (`time_step_min`), and not in that of one token; published models are trained without a bound.
    """
    limits = getattr(model.config.get_text_config(), "time_step_limit", None) or (0.0, math.inf)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limits)


def _note(model: Any, _: Any, options: Mapping[str, Any]) -> None:
    """Mamba-2's language model hands no options to its body."""
    model.base_model.plan = options.get("attention_plan")


def _add(body: Any, arguments: Any, options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    plan, body.plan = body.plan, None
    return arguments, {**({} if plan is None else {"attention_plan": plan}), **options}


def _hand_on(layer: Any, _: Any, options: Mapping[str, Any]) -> None:
    for module in layer.own_mixers:
        module.plan = options.get("attention_plan")


def _mix(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """What stands in the place of a mixer's `forward`; `hidden_states` `[1, N, hidden]`."""
    plan, self.plan = self.plan, None
    if plan is None:
        raise NotImplementedError(f"{type(self).__name__} without an attention_plan would mix the rows of a pass")
    return plan.mix(self.as_function, hidden_states)
