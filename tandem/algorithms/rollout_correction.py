"""Importance weights for tokens that another policy drew than the trainer believes: the generation engine's.

    d_t = log pi_old(t) - log pi_rollout(t)

    ratio of token t    token: exp(d_t); over its trajectory: sequence: exp(sum of d)    geometric: exp(mean of d)
    truncate            w = min(ratio, upper)
    mask                w = ratio where lower <= ratio <= upper, else 0

`w` multiplies each token's surrogate in the policy loss, and neither its KL nor its entropy. Truncated importance
sampling (TIS) at token level is Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training"; masked (MIS), sequence and geometric ones Liu et al. 2025, "When Speed Kills Stability"; IcePop masks tokens
on both sides (Ring-1T, arXiv:2510.18855).
"""

import torch
from torch import Tensor

from tandem.config.algorithms import RolloutCorrectionConfig

_LARGEST_LOG = 20.0


def rollout_weights(
    config: RolloutCorrectionConfig, old_T: Tensor, rollout_T: Tensor, mask_T: Tensor, trajectories_T: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """float32 `[T]`, 1 outside `mask_T`; `trajectories_T`: the trajectory of each token. Metrics over the mask."""
    log_T = torch.where(mask_T, old_T - rollout_T, 0.0).double()
    if config.level != "token":
        sums_B = torch.bincount(trajectories_T, log_T)
        if config.level == "geometric":
            sums_B = sums_B / torch.bincount(trajectories_T, mask_T.double()).clamp(min=1)
        log_T = sums_B[trajectories_T]
    ratio_T = log_T.clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
    beyond_T = (ratio_T > config.upper) | (ratio_T < config.lower)
    weights_T = torch.where(beyond_T, 0.0, ratio_T) if config.type == "mask" else ratio_T.clamp(max=config.upper)
    metrics = {}
    if mask_T.any():
        metrics = {
            "rollout/correction_mean": weights_T[mask_T].mean().item(),
            "rollout/correction_share": beyond_T[mask_T].double().mean().item(),
        }
    return torch.where(mask_T, weights_T, 1.0).float(), metrics
