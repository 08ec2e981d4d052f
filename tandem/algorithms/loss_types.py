"""The policy loss that `algorithm.loss.type` names."""

from typing import Any

from tandem.algorithms import covariance_losses, policy_losses, sequence_losses
from tandem.algorithms.policy_losses import PolicyLoss
from tandem.config.algorithms import PolicyGradientConfig

LOSSES: dict[str, type[PolicyLoss[Any]]] = {
    "clip": policy_losses.ClipLoss,
    "reinforce": policy_losses.ReinforceLoss,
    "cispo": policy_losses.CISPOLoss,
    "sapo": policy_losses.SAPOLoss,
    "dppo": policy_losses.DPPOLoss,
    "gspo": sequence_losses.GSPOLoss,
    "gmpo": sequence_losses.GMPOLoss,
    "kl_cov": covariance_losses.KLCovLoss,
    "clip_cov": covariance_losses.ClipCovLoss,
}


def make_loss(algorithm: PolicyGradientConfig) -> PolicyLoss[Any]:
    return LOSSES[algorithm.loss.type](algorithm.loss, algorithm)
