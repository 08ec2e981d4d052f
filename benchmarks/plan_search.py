"""Placements that HybridFlow's authors found best, those that Tandem's search finds, and their findings one by one.

    python benchmarks/plan_search.py [--layouts any]      (no GPU; ten seconds)

Theirs: arXiv:2409.19256: PPO of Llama models on nodes of eight A100 of 80 GB with 200 Gbit/s a node, 1,024 prompt and
1,024 response tokens, 1,024 rows a step, eight updates (section 8.1). Generation is on the actor's GPUs (5.1). Its
engine gives the old log-probs, so that the actor takes no part in preparation (2.1, table 4). Tensor parallelism is 8,
and pipelines are as short as memory lets them be (figure 14). Which placement is best: figures 12 and 13, section 8.3.

`--layouts any`: of each model any tensor parallelism up to 8 and up to eight stages.

Colocated: all models on all GPUs; split: actor and reference on some, critic and reward model on the others;
standalone: each model on GPUs of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from command_line import parse_arguments

from tandem.errors import UserError
from tandem.planning.costs import ClusterCosts, Generators, PlannedRole, parallel_layouts, parallel_memory
from tandem.planning.decode_cost import DecodeCost, generation_s
from tandem.planning.hardware import Machines, parse_machines
from tandem.planning.model_shape import ModelShape, shape_of
from tandem.planning.placement_search import Plan, Ranking, Way, evaluate, partitions, search
from tandem.planning.time import CONSTANTS, ParallelDims, StepTime, Workload

SIZES = {
    7: (32, 4096, 32, 32, 11008),
    13: (40, 5120, 40, 40, 13824),
    34: (48, 8192, 64, 8, 22016),
    70: (80, 8192, 64, 8, 28672),
}
"""Layers, hidden size, heads, heads of keys and values, width."""
STAGES = {7: 1, 13: 1, 34: 4, 70: 8}
"""Of their pipelines (figure 14)."""
WORK = Workload(1024, 1024, 1024, 1024, optimizer_steps=8, micro_batch_tokens=2048, spread=1e-3)
ROLES = ("actor", "rollout", "critic", "reference", "reward_model")
PLACEMENTS = {
    frozenset({frozenset(ROLES)}): "colocated",
    frozenset({frozenset({"actor", "rollout", "reference"}), frozenset({"critic", "reward_model"})}): "split",
    frozenset({frozenset({"actor", "rollout"}), *(frozenset({role}) for role in ROLES[2:])}): "standalone",
    frozenset({frozenset({"actor", "rollout", "reference", "reward_model"}), frozenset({"critic"})}): "critic apart",
}
THEIRS = {
    "13B": {16: "colocated", 32: "colocated", 64: "colocated", 96: "split", 128: "standalone"},
    "34B": {32: "colocated", 64: "colocated", 96: "split", 128: "split"},
    "13B, critic 70B": {32: "colocated", 64: "colocated", 96: "split", 128: "critic apart"},
}
CASES = {"13B": (13, 13), "34B": (34, 34), "13B, critic 70B": (13, 70)}
"""Billions of parameters of the actor and the reference, and of the critic; the reward model is as the critic."""


@cache
def shape(billions: int) -> ModelShape:
    layers, hidden, heads, kv_heads, width = SIZES[billions]
    return shape_of(
        {
            "model_type": "llama", "vocab_size": 32000, "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width,
        }
    )  # fmt: skip


def machines(gpus: int) -> Machines:
    found = parse_machines(f"{gpus}xA100")
    return replace(found, card=replace(found.card, network_gb_s=25 / 8))


class TheirCosts(ClusterCosts):
    """The engine's log-probs are the old ones."""

    def of_role(self, role: str, layout: ParallelDims) -> StepTime:
        return replace(super().of_role(role, layout), log_probs=0.0)


def their_layouts(shape_: ModelShape, gpus: int) -> list[ParallelDims]:
    """No more stages than in figure 14, fewer where its number does not divide the GPUs."""
    stages = next(STAGES[billions] for billions in SIZES if shape(billions) == shape_)
    return [layout for layout in parallel_layouts(shape_, gpus) if layout.tensor == 8 and layout.pipeline <= stages]


def costs(actor_billions: int, critic_billions: int, gpus: int, any_layout: bool = False) -> ClusterCosts:
    actor, critic = shape(actor_billions), shape(critic_billions)
    models = {
        "actor": PlannedRole(actor, learns=True),
        "reference": PlannedRole(actor),
        "critic": PlannedRole(critic, learns=True, value_head=True),
        "reward_model": PlannedRole(critic, value_head=True),
    }
    work = replace(CONSTANTS, switch_s=0.0)  # theirs has no such time, and it would be the same everywhere
    layouts = parallel_layouts if any_layout else their_layouts
    return TheirCosts(
        machines(gpus),
        models,
        WORK,
        layouts,
        parallel_memory(WORK),
        generators=Generators(models_leave=False),
        constants=work,
    )


def placement(plan: Plan) -> str:
    sets = frozenset(frozenset(way.roles) for way in plan.sets)
    return PLACEMENTS.get(sets, " | ".join("+".join(way.roles) for way in plan.sets))


@cache
def found(case: str, gpus: int, any_layout: bool = False) -> Ranking:
    return search(costs(*CASES[case], gpus, any_layout), ROLES, gpus, apart=False)


def by_name(ranking: Ranking) -> Mapping[str, Plan]:
    return {placement(plan): plan for plan in ranking.mappings}


def allocation(plan: Plan) -> str:
    return "/".join(str(way.gpus) for way in plan.sets)


def behind(ranking: Ranking, name: str) -> float:
    """How much longer a placement takes than the best; 0.1 is a tenth."""
    plan = by_name(ranking).get(name)
    return plan.step_s / ranking.mappings[0].step_s - 1 if plan else float("inf")


def as_good(ranking: Ranking, theirs: str) -> bool:
    """Their placement is the best, or takes as long: reference and reward model of one size may change places."""
    return behind(ranking, theirs) <= 0.01


def best_apart(ranking: Ranking) -> Plan | None:
    """With the critic on other GPUs than the actor."""
    apart = (plan for plan in ranking.mappings if not any({"actor", "critic"} <= set(way.roles) for way in plan.sets))
    return next(apart, None)


def apart_to_colocated(ranking: Ranking) -> float:
    """Their steps' ratio; infinite where only one pool fits."""
    plan = best_apart(ranking)
    return plan.step_s / by_name(ranking)["colocated"].step_s if plan else float("inf")


def print_placements(any_layout: bool) -> None:
    print("| models | GPUs | theirs | ours | GPUs of its sets | generation, preparation, update s | theirs behind |")
    print("|" + " --- |" * 7)
    same = 0
    for case, best_of_theirs in THEIRS.items():
        for gpus, theirs in best_of_theirs.items():
            ranking = found(case, gpus, any_layout)
            best = ranking.mappings[0]
            stages = ", ".join(f"{stage:.0f}" for stage in best.times)
            same += as_good(ranking, theirs)
            print(f"| {case} | {gpus} | {theirs} | {placement(best)} | {allocation(best)} | {stages} ", end="")
            print(f"| {behind(ranking, theirs):.0%} |")
    print(f"\ntheirs is the best here, too, or within 1% of it, in {same} of {sum(map(len, THEIRS.values()))}")


def generation_by_degree(billions: int) -> dict[int, float]:
    """Seconds on 16 GPUs beside a model that trains with tensor parallelism of 8 (their figure 15)."""
    model = PlannedRole(shape(billions), learns=True)
    layout = next(each for each in parallel_layouts(model.shape, 16) if each.tensor == 8 and each.pipeline == 1)
    held, _ = parallel_memory(WORK)("actor", model, layout)
    card = machines(16).card
    room = {degree: 0.9 * card.memory_bytes - held - 2 * model.shape.parameters / degree for degree in (1, 2, 4, 8)}
    decoders = {degree: DecodeCost(model.shape, card, degree) for degree in room}
    return {
        degree: generation_s(decoders[degree], WORK, 16, room[degree])
        for degree in room
        if decoders[degree].fits(room[degree], WORK)
    }


def scaling(billions: int) -> tuple[int, float]:
    """The fewest GPUs that four models of one size fit on, and the efficiency from there to 128."""
    steps: dict[int, float] = {}
    for gpus in (8, 16, 32, 64, 128):
        try:
            steps[gpus] = search(costs(billions, billions, gpus), ROLES, gpus, apart=False).mappings[0].step_s
        except UserError:
            continue
    fewest = min(steps)
    return fewest, steps[fewest] / steps[128] / (128 / fewest)


def critic_behind_s(case: str, gpus: int) -> tuple[float, str]:
    """The shortest step, and its GPUs, where the critic's set updates while the actor's generates the next answers."""
    best = (float("inf"), "")
    for sets in partitions(ROLES):
        actors = [one for one in sets if {"actor", "rollout"} <= set(one) and "critic" not in one]
        for count in range(8, gpus, 8) if len(sets) == 2 and actors else ():
            counts = {one: count if one in actors else gpus - count for one in sets}
            if plan := evaluate(costs(*CASES[case], gpus), counts):
                best = min(best, (_critic_behind(plan), f"{count}/{gpus - count}"))
    return best


def _critic_behind(plan: Plan) -> float:
    def busy(way: Way) -> float:
        return way.update_s + way.generation_s

    return max(way.preparation_s for way in plan.sets) + max(map(busy, plan.sets)) + plan.publish_s


@dataclass(frozen=True)
class Finding:
    """What the paper found, and what is found here."""

    theirs: str
    ours: str
    agrees: bool


FEW = [(case, gpus) for case, of in THEIRS.items() for gpus in of if of[gpus] == "colocated"]
MANY = [(case, gpus) for case, of in THEIRS.items() for gpus in of if of[gpus] != "colocated"]
"""Cases in which the critic is apart in theirs."""


def findings() -> list[Finding]:
    return [*findings_on_clusters(), *findings_on_sets(), *findings_on_speed()]


def findings_on_clusters() -> list[Finding]:
    few = [behind(found(*case), "colocated") for case in FEW]
    gains = {case: {gpus: apart_to_colocated(found(case, gpus)) for gpus in of} for case, of in THEIRS.items()}
    first = {case: min((gpus for gpus in of if of[gpus] < 0.99), default=1000) for case, of in gains.items()}
    many = [gains[case][gpus] for case, gpus in MANY]
    return [
        Finding(
            "on few GPUs all models share them: 16 to 64, with a critic of 70B 32 and 64",
            f"best or within 1% in {sum(one <= 0.01 for one in few)} of {len(few)}",
            max(few) <= 0.01,
        ),
        Finding(
            "the more GPUs, the better it is to have the critic apart from the actor",
            "; ".join(f"{case} {', '.join(f'{gain:.2f}' for gain in of.values())}" for case, of in gains.items())
            + " of one pool's step",
            all(of[128] < min(gain for gpus, gain in of.items() if gpus <= 64) for of in gains.values()),
        ),
        Finding(
            "on 96 and 128 GPUs a critic apart is faster than one pool",
            ", ".join(f"{case} on {gpus} {gains[case][gpus] - 1:+.0%}" for case, gpus in MANY),
            max(many) < 1,
        ),
        Finding(
            "small models part further: 13B is standalone where 34B is split",
            ", ".join(f"{case} {f'from {gpus}' if gpus <= 128 else 'not up to 128'}" for case, gpus in first.items()),
            first["13B"] < first["34B"] < first["13B, critic 70B"],
        ),
    ]


def findings_on_sets() -> list[Finding]:
    alone = behind(found("13B", 128), "standalone")
    halves = [allocation(by_name(found(case, gpus))["split"]) for case, gpus in MANY if case in ("13B", "34B")]
    large = by_name(found("13B, critic 70B", 128))
    critic_apart = allocation(large["critic apart"])
    ratio = large["critic apart"].step_s / large["split"].step_s
    return [
        Finding("13B on 128 GPUs is best standalone", f"{alone:.0%} behind the best", alone <= 0.01),
        Finding("of a split models of one size get half of the GPUs each", ", ".join(halves), _even(*halves)),
        Finding(
            "a critic of 70B gets half of 128 GPUs, and the reward model is with the actor",
            f"{critic_apart}, {ratio:.2f} of the step with the reward model beside the critic",
            _even(critic_apart) and ratio <= 1.01,
        ),
    ]


def findings_on_speed() -> list[Finding]:
    at_64 = by_name(found("13B, critic 70B", 64))
    others = [at_64[name].step_s / at_64["colocated"].step_s - 1 for name in ("split", "standalone")]
    fewest, efficiencies = zip(*map(scaling, SIZES), strict=True)
    times = {billions: generation_by_degree(billions) for billions in (7, 13)}
    best = {billions: min(of, key=of.__getitem__) for billions, of in times.items()}
    saved = {billions: 1 - of[best[billions]] / of[8] for billions, of in times.items()}
    return [
        Finding(
            "with a critic of 70B one pool is ahead of others by 44.8% on average, up to 64 GPUs",
            f"on 64 by {others[0]:.0%} of split, by {others[1]:.0%} of standalone",
            min(others) > 0.3,
        ),
        Finding(
            "throughput of 7B to 70B grows with an efficiency of 66.8% on average, up to 128 GPUs",
            f"{fmean(efficiencies):.0%}, from {', '.join(map(str, fewest))} GPUs",
            0.6 < fmean(efficiencies) < 0.75,
        ),
        Finding(
            "generation is faster with degrees below training's 8: 7B by 60.3% with 2, 13B by 36.4% with 4",
            ", ".join(f"{billions}B by {saved[billions]:.0%} with {best[billions]}" for billions in times),
            min(saved.values()) > 0.15 and best[7] < best[13] < 8,
        ),
    ]


def _even(*allocations: str) -> bool:
    return all(len(set(each.split("/"))) == 1 for each in allocations)


def print_findings() -> None:
    print("\n| theirs | ours | |\n|" + " --- |" * 3)
    for finding in findings():
        print(f"| {finding.theirs} | {finding.ours} | {'agrees' if finding.agrees else 'differs'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", choices=("theirs", "any"), default="theirs")
    parser.add_argument("--gpus", type=int, nargs="+", default=[128, 1024], help="of which a search is timed")
    arguments = parse_arguments(parser, gpus=[128])
    any_layout = arguments.layouts == "any"
    print_placements(any_layout)
    if not any_layout:
        print_findings()
        for case in THEIRS:
            for gpus in list(THEIRS[case])[-3:]:
                seconds, counts = critic_behind_s(case, gpus)
                one_pool = by_name(found(case, gpus))["colocated"].step_s
                print(f"{case} on {gpus}, the critic's update beside the next generation: ", end="")
                print(f"{counts}, {seconds / one_pool:.2f} of one pool's step")
    for billions, best in ((7, 2), (13, 4)):
        times = generation_by_degree(billions)
        print(f"\ngeneration of {billions}B on 16 GPUs by its degree, seconds: ", end="")
        print(", ".join(f"TP{degree} {seconds:.0f}" for degree, seconds in times.items()), f"(theirs: best at {best})")
    for gpus in arguments.gpus:
        started = time.process_time()
        ranking = search(costs(13, 13, gpus, any_layout=True), ROLES, gpus)
        seconds = time.process_time() - started
        print(f"\n{gpus} GPUs, five roles: {ranking.evaluated} mappings compared in {seconds:.2f} s of CPU")


if __name__ == "__main__":
    main()
