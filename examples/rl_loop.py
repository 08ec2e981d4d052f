"""GRPO and PPO for language models in one file: plain torch and transformers, one trajectory at a time, no tricks.

    python examples/rl_loop.py --model DIR --algorithm grpo|ppo --steps N

Read from the top: a trajectory, what the networks say of it, the losses, the advantages, one training step of either
algorithm, and at the end the loop: sample, score, train. Nothing is padded, packed or vectorised over trajectories.
Sizes: n response tokens of one trajectory, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass, field
from statistics import mean, stdev

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer


@dataclass
class Settings:
    temperature: float = 1.0
    clip_low: float = 0.2  # the probability ratio may fall to 1 - clip_low …
    clip_high: float = 0.2  # … and rise to 1 + clip_high before its gradient ends
    dual_clip: float | None = None  # where the advantage A is negative, the objective is at least dual_clip * A
    aggregation: str = "token_mean"
    max_response_tokens: int = 8
    entropy_coefficient: float = 0.0
    kl_place: str = "none"  # or "reward", "loss"
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.001
    normalize_by_std: bool = True  # GRPO
    gamma: float = 1.0  # PPO, from here on
    gae_lambda: float = 1.0
    whiten: bool = True
    value_clip: float | None = 0.2
    max_grad_norm: float = 1.0


@dataclass
class Rollout:
    """One trajectory. The fields after `mask` are filled by the training step."""

    prompt_ids: list[int]
    response_ids: list[int]
    group: int  # trajectories of the same prompt have the same number
    reward: float | None  # None: could not be scored, so nothing is learned from it
    mask: list[bool]  # True on tokens that the policy made (a tool's are False)
    old_logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    ref_logprobs: torch.Tensor | None = None
    rewards: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)

    @property
    def trained(self) -> list[int]:
        """Positions in the response that are trained on."""
        return [] if self.reward is None else [t for t, made in enumerate(self.mask) if made]


# ---- what the networks say of one trajectory ------------------------------------------------------------------------


def logprobs_and_entropy(policy, rollout: Rollout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each response token: log-prob, and entropy of the distribution it was drawn from; two `[n]`."""
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    logits = policy(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1]  # position t - 1 predicts token t
    logprobs = torch.log_softmax(logits / temperature, dim=-1)  # [n, V]
    chosen = logprobs.gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def token_values(critic, rollout: Rollout) -> torch.Tensor:
    """The return the critic expects before each response token is emitted; `[n]`."""
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    return critic(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1, 0]


def kl(estimator: str, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) from the sampled tokens (Schulman 2020); `[n]`."""
    log_ratio = ref_logprobs - logprobs
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": torch.exp(log_ratio) - 1 - log_ratio}[estimator]


# ---- losses ---------------------------------------------------------------------------------------------------------


def policy_loss(logprobs, entropy, rollout: Rollout, settings: Settings) -> torch.Tensor:
    """Loss of each token: minus the clipped objective (Schulman et al. 2017, equation 7), and the two regularisers."""
    advantages = torch.tensor(rollout.advantages, dtype=logprobs.dtype)
    ratio = torch.exp(logprobs - rollout.old_logprobs)
    clipped_ratio = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if settings.dual_clip is not None:
        bounded = torch.maximum(objective, settings.dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    loss = -objective - settings.entropy_coefficient * entropy
    if settings.kl_place == "loss":
        loss = loss + settings.kl_coefficient * kl(settings.kl_estimator, logprobs, rollout.ref_logprobs)
    return loss


def value_loss(values, rollout: Rollout, settings: Settings) -> torch.Tensor:
    """Half the squared error of each token's value; moving further than `value_clip` from the old one does not pay."""
    returns = torch.tensor(rollout.returns, dtype=values.dtype)
    loss = (values - returns) ** 2
    if settings.value_clip is not None:
        old = torch.tensor(rollout.values, dtype=values.dtype)
        clipped = old + torch.clamp(values - old, -settings.value_clip, settings.value_clip)
        loss = torch.maximum(loss, (clipped - returns) ** 2)
    return loss / 2


def aggregate(losses: list[torch.Tensor], rollouts: list[Rollout], settings: Settings) -> torch.Tensor:
    """The token losses of the trajectories of one optimizer step -> its loss."""
    kept = [loss[rollout.trained] for loss, rollout in zip(losses, rollouts, strict=True) if rollout.trained]
    if settings.aggregation == "token_mean":
        return torch.cat(kept).mean()
    if settings.aggregation == "sequence_mean_token_mean":
        return torch.stack([loss.mean() for loss in kept]).mean()
    sums = torch.stack([loss.sum() for loss in kept])
    return (
        sums.mean() if settings.aggregation == "sequence_mean_token_sum" else sums.mean() / settings.max_response_tokens
    )


# ---- advantages -----------------------------------------------------------------------------------------------------


def fill_token_rewards(rollouts: list[Rollout], settings: Settings) -> None:
    """The reward comes with the last token; each token pays for its distance to the reference, if that is asked for."""
    for rollout in rollouts:
        rollout.rewards = [0.0] * len(rollout.response_ids)
        if rollout.trained:
            rollout.rewards[rollout.trained[-1]] = rollout.reward
        if settings.kl_place == "reward":
            distances = kl(settings.kl_estimator, rollout.old_logprobs, rollout.ref_logprobs).tolist()
            for t in rollout.trained:
                rollout.rewards[t] -= settings.kl_coefficient * distances[t]


def fill_group_advantages(rollouts: list[Rollout], settings: Settings) -> None:
    """GRPO (Shao et al. 2024): how much better than its siblings a trajectory did, the same for all its tokens."""
    for rollout in rollouts:
        rollout.advantages = [0.0] * len(rollout.response_ids)
        siblings = [sum(other.rewards) for other in rollouts if other.group == rollout.group and other.trained]
        if len(siblings) < 2:
            continue
        advantage = sum(rollout.rewards) - mean(siblings)
        if settings.normalize_by_std:
            advantage /= stdev(siblings) + 1e-6
        for t in rollout.trained:
            rollout.advantages[t] = advantage


def fill_gae(rollouts: list[Rollout], settings: Settings) -> None:
    """Generalised advantage estimation (Schulman et al. 2016), from the last token back; then whitening."""
    for rollout in rollouts:
        rollout.advantages = [0.0] * len(rollout.response_ids)
        rollout.returns = [0.0] * len(rollout.response_ids)
        next_value = next_advantage = 0.0
        for t in reversed(rollout.trained):
            surprise = rollout.rewards[t] + settings.gamma * next_value - rollout.values[t]
            rollout.advantages[t] = surprise + settings.gamma * settings.gae_lambda * next_advantage
            rollout.returns[t] = rollout.advantages[t] + rollout.values[t]
            next_value, next_advantage = rollout.values[t], rollout.advantages[t]
    if settings.whiten:
        every = [rollout.advantages[t] for rollout in rollouts for t in rollout.trained]
        centre, spread = mean(every), math.sqrt(stdev(every) ** 2 + 1e-8)
        for rollout in rollouts:
            for t in rollout.trained:
                rollout.advantages[t] = (rollout.advantages[t] - centre) / spread


# ---- one training step ----------------------------------------------------------------------------------------------


@torch.no_grad()
def fill_logprobs(policy, reference, rollouts: list[Rollout], settings: Settings) -> None:
    """What the policy thinks of the trajectories before it changes, and what the frozen reference thinks."""
    for rollout in rollouts:
        rollout.old_logprobs, _ = logprobs_and_entropy(policy, rollout, settings.temperature)
        if settings.kl_place != "none":
            rollout.ref_logprobs, _ = logprobs_and_entropy(reference, rollout, settings.temperature)


def optimizer_step(model, optimizer, loss: torch.Tensor, settings: Settings) -> None:
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()


def update_policy(policy, optimizer, rollouts: list[Rollout], settings: Settings) -> float:
    """One optimizer step on these trajectories; returns the loss before it."""
    losses = []
    for rollout in rollouts:
        logprobs, entropy = logprobs_and_entropy(policy, rollout, settings.temperature)
        losses.append(policy_loss(logprobs, entropy, rollout, settings))
    loss = aggregate(losses, rollouts, settings)
    optimizer_step(policy, optimizer, loss, settings)
    return loss.item()


def update_critic(critic, optimizer, rollouts: list[Rollout], settings: Settings) -> float:
    """One optimizer step on these trajectories; returns the loss before it."""
    losses = [value_loss(token_values(critic, rollout), rollout, settings) for rollout in rollouts]
    loss = aggregate(losses, rollouts, settings)
    optimizer_step(critic, optimizer, loss, settings)
    return loss.item()


def grpo_step(policy, optimizer, rollouts, settings: Settings, minibatches=None, reference=None) -> list[float]:
    """Train on these trajectories. `minibatches`: the rows of each optimizer step (default: one, with all).

    Returns the policy's loss before each optimizer step.
    """
    fill_logprobs(policy, reference, rollouts, settings)
    fill_token_rewards(rollouts, settings)
    fill_group_advantages(rollouts, settings)
    steps = [[rollouts[row] for row in rows] for rows in minibatches or [range(len(rollouts))]]
    return [update_policy(policy, optimizer, step, settings) for step in steps]


def ppo_step(
    policy, critic, optimizer, critic_optimizer, rollouts, settings: Settings, minibatches=None, reference=None
) -> list[tuple[float, float]]:
    """As `grpo_step`, with a critic; returns (the policy's, the critic's) loss before each optimizer step."""
    fill_logprobs(policy, reference, rollouts, settings)
    fill_token_rewards(rollouts, settings)
    with torch.no_grad():
        for rollout in rollouts:
            rollout.values = token_values(critic, rollout).tolist()
    fill_gae(rollouts, settings)
    losses = []
    for rows in minibatches or [range(len(rollouts))]:
        step = [rollouts[row] for row in rows]
        policy_before = update_policy(policy, optimizer, step, settings)
        losses.append((policy_before, update_critic(critic, critic_optimizer, step, settings)))
    return losses


# ---- the loop, on a toy task: put four digits in order --------------------------------------------------------------


def toy_reward(digits: str, response: str) -> float:
    """Each of four characters counts half when it is a digit, and fully when it is the right one."""
    pairs = zip(sorted(digits), response[:4].ljust(4), strict=True)
    return mean((char.isdigit() + (char == right)) / 2 for right, char in pairs)


@torch.no_grad()
def sample(policy, tokenizer, digits: str, group: int, size: int, settings: Settings) -> list[Rollout]:
    """`size` answers to one prompt, scored."""
    prompt = tokenizer(f"{digits}=", return_tensors="pt")
    limits = {"max_new_tokens": settings.max_response_tokens, "num_return_sequences": size}
    answers = policy.generate(**prompt, **limits, do_sample=True, temperature=settings.temperature, top_k=0)
    rollouts = []
    for ids in answers[:, prompt.input_ids.shape[1] :].tolist():
        if tokenizer.eos_token_id in ids:  # what follows is padding; the end itself is the policy's choice
            ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
        reward = toy_reward(digits, tokenizer.decode(ids, skip_special_tokens=True))
        rollouts.append(Rollout(prompt.input_ids[0].tolist(), ids, group, reward, [True] * len(ids)))
    return rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a causal language model to put four digits in order.")
    parser.add_argument("--model", required=True, help="Hugging Face directory; examples/sort4/make.py writes one")
    parser.add_argument("--algorithm", choices=["grpo", "ppo"], default="grpo")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=4e-3)
    arguments = parser.parse_args()
    random.seed(0), torch.manual_seed(0)
    settings = Settings()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    policy = AutoModelForCausalLM.from_pretrained(arguments.model).float().eval()  # eval: no dropout
    optimizer = torch.optim.AdamW(policy.parameters(), lr=arguments.lr, weight_decay=0.0)
    if arguments.algorithm == "ppo":
        critic = AutoModelForTokenClassification.from_pretrained(arguments.model, num_labels=1).float().eval()
        critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=arguments.lr, weight_decay=0.0)
    for step in range(1, arguments.steps + 1):
        rollouts = []
        for group in range(8):
            rollouts += sample(policy, tokenizer, f"{random.randrange(10_000):04d}", group, 8, settings)
        if arguments.algorithm == "ppo":
            ppo_step(policy, critic, optimizer, critic_optimizer, rollouts, settings)
        else:
            grpo_step(policy, optimizer, rollouts, settings)
        print(f"step {step}: mean reward {mean(rollout.reward for rollout in rollouts):.3f}")


if __name__ == "__main__":
    main()
