"""verl's programs whose generation runs ahead of training, on devices of its own: what they are told besides."""

from math import ceil
from typing import Any

from tandem.config.counterparts import int_or_zero
from tandem.importing.outcome import Imported, Keys

_AHEAD = "async_training."


def prompts_of_a_fully_asynchronous_step(keys: Keys) -> int:
    """From one publish of the weights to the next: optimizer steps of `ppo_mini_batch_size` prompts,
    `require_batches` a call of the trainer, `trigger_parameter_sync_step` calls."""
    minibatch = int_or_zero(keys.take("actor_rollout_ref.actor.ppo_mini_batch_size", 256))
    calls = int_or_zero(keys.take(f"{_AHEAD}trigger_parameter_sync_step", 4))
    batches = int_or_zero(keys.take(f"{_AHEAD}require_batches", 1))
    return max(minibatch * calls * batches, 1)


def apart(keys: Keys) -> dict[str, Any]:
    """Pools of processes: one trains, the other generates."""
    pools = {
        pool: [int_or_zero(keys.take(f"{section}.n_gpus_per_node", 8, f"placement.pools.{pool}"))]
        * int_or_zero(keys.take(f"{section}.nnodes", 1, f"placement.pools.{pool}"))
        for pool, section in (("training", "trainer"), ("generating", "rollout"))
    }
    roles = dict.fromkeys(("actor", "critic", "reference"), "training") | {"rollout": "generating"}
    nodes = sum(map(len, pools.values()))
    return {"cluster": {"type": "ray" if nodes > 2 else "local"}, "placement": {"pools": pools, "roles": roles}}


def runs_ahead(method: str, keys: Keys, tree: dict[str, Any], made: Imported) -> None:
    """How far, and for how many steps."""
    trainer = tree["trainer"]
    for key in ("algorithm.rollout_correction.bypass_mode", f"{_AHEAD}use_rollout_log_probs"):
        if keys.take(key) is False:  # which is our default here
            tree["algorithm"].setdefault("rollout_correction", {"skip_old_logprobs": False})
    if method == "one_step_off":
        trainer["max_staleness"] = 1
        return
    share = keys.take(f"{_AHEAD}staleness_threshold", 0.1)
    trainer["max_staleness"] = ceil(share) if isinstance(share, int | float) else 1
    if keys.take(f"{_AHEAD}partial_rollout", True) is False:
        tree["generation"]["partial_rollouts"] = False
    if share and trainer["max_staleness"] != share:
        made.notes.append(
            f"{_AHEAD}staleness_threshold={share} is a share of a step's answers; answers of a step have at most "
            f"trainer.max_staleness: {trainer['max_staleness']} publishes behind them here, whatever their share"
        )
    asked = int_or_zero(keys.take("rollout.total_rollout_steps", 0))
    if asked:
        trainer.pop("epochs", None)
        trainer["steps"] = max(asked // tree["data"]["prompts_per_step"], 1)
        made.notes.append(f"{asked} prompts are {trainer['steps']} steps of {tree['data']['prompts_per_step']}")
    if (every := int_or_zero(keys.take("rollout.test_freq", 0))) > 0:
        trainer["eval_every"] = every
