"""Placements that HybridFlow's authors found best, and those that Tandem's search finds.

    python benchmarks/plan_search.py [--stages 2]      (no GPU; half a minute)

`--stages`: pipelines have at most so many, by default eight.

Theirs: arXiv:2409.19256, section 8.3 and figures 12, 13, 15: PPO of Llama models on nodes of eight A100 of 80 GB with
200 Gbit/s a node, 1,024 prompt and 1,024 response tokens, 1,024 rows a step, eight updates. Generation is on the
actor's GPUs there. Colocated: all models on all GPUs; split: actor and reference on some, critic and reward model on
the others; standalone: each model on GPUs of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from tandem.errors import UserError
from tandem.planning.costs import ClusterCosts, Model, parallel_layouts, parallel_memory
from tandem.planning.decoding import Decoder, generation_s
from tandem.planning.hardware import Machines, parse_machines
from tandem.planning.model_shape import ModelShape, shape_of
from tandem.planning.search import Plan, Ranking, search
from tandem.planning.time import CONSTANTS, Layout, Workload

SIZES = {
    7: (32, 4096, 32, 32, 11008),
    13: (40, 5120, 40, 40, 13824),
    34: (48, 8192, 64, 8, 22016),
    70: (80, 8192, 64, 8, 28672),
}
"""Layers, hidden size, heads, heads of keys and values, width."""
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


def costs(case: str, gpus: int, stages: int = 8) -> ClusterCosts:
    actor, critic = map(shape, CASES[case])
    models = {
        "actor": Model(actor, learns=True),
        "reference": Model(actor),
        "critic": Model(critic, learns=True, value_head=True),
        "reward_model": Model(critic, value_head=True),
    }
    work = replace(CONSTANTS, switch_s=0.0)  # theirs has no such time, and it would be the same everywhere

    def layouts(shape: ModelShape, gpus: int) -> list[Layout]:
        return [layout for layout in parallel_layouts(shape, gpus) if layout.pipeline <= stages]

    return ClusterCosts(
        machines(gpus), models, WORK, layouts, parallel_memory(WORK), models_leave=False, constants=work
    )


def placement(plan: Plan) -> str:
    sets = frozenset(frozenset(way.roles) for way in plan.sets)
    return PLACEMENTS.get(sets, " | ".join("+".join(way.roles) for way in plan.sets))


def found(case: str, gpus: int, stages: int = 8) -> Ranking:
    return search(costs(case, gpus, stages), ROLES, gpus, apart=False)


def by_name(ranking: Ranking) -> Mapping[str, Plan]:
    return {placement(plan): plan for plan in ranking.mappings}


def allocation(plan: Plan) -> str:
    return "/".join(str(way.gpus) for way in plan.sets)


def compare(stages: int) -> Iterator[tuple[str, int, str, Ranking]]:
    """Of those cases of which anything fits."""
    for case in THEIRS:
        for gpus, theirs in THEIRS[case].items():
            try:
                yield case, gpus, theirs, found(case, gpus, stages)
            except UserError as error:
                print(f"| {case} | {gpus} | {theirs} | {error} |")


def as_good(ranking: Ranking, theirs: str) -> bool:
    """Their placement is the best, or takes as long: reference and reward model of one size may change places."""
    plan = by_name(ranking).get(theirs)
    return plan is not None and plan.step_s <= 1.01 * ranking.mappings[0].step_s


def print_placements(stages: int) -> None:
    print("| models | GPUs | theirs | ours | GPUs of its sets | generation, preparation, update s | theirs to ours |")
    print("|" + " --- |" * 7)
    same = 0
    for case, gpus, theirs, ranking in compare(stages):
        best = ranking.mappings[0]
        stages = ", ".join(f"{stage:.0f}" for stage in best.times)
        their_plan = by_name(ranking).get(theirs)
        ratio = f"{their_plan.step_s / best.step_s:.2f}" if their_plan else "does not fit"
        same += as_good(ranking, theirs)
        print(f"| {case} | {gpus} | {theirs} | {placement(best)} | {allocation(best)} | {stages} | {ratio} |")
    print(f"\ntheirs is the best here, too, or within 1% of it, in {same} of {sum(map(len, THEIRS.values()))}")


def generation_by_degree(billions: int) -> dict[int, float]:
    """Seconds on 16 GPUs beside a model that trains with tensor parallelism of 8 (their figure 15)."""
    model = Model(shape(billions), learns=True)
    layout = next(each for each in parallel_layouts(model.shape, 16) if each.tensor == 8 and each.pipeline == 1)
    held, _ = parallel_memory(WORK)("actor", model, layout)
    card = machines(16).card
    room = {degree: 0.9 * card.memory_bytes - held - 2 * model.shape.parameters / degree for degree in (1, 2, 4, 8)}
    decoders = {degree: Decoder(model.shape, card, degree) for degree in room}
    return {
        degree: generation_s(decoders[degree], WORK, 16, room[degree])
        for degree in room
        if decoders[degree].fits(room[degree], WORK)
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=8)
    print_placements(parser.parse_args().stages)
    for billions, best in ((7, 2), (13, 4)):
        times = generation_by_degree(billions)
        print(f"\ngeneration of {billions}B on 16 GPUs by its degree, seconds: ", end="")
        print(", ".join(f"TP{degree} {seconds:.0f}" for degree, seconds in times.items()), f"(theirs: best at {best})")
    for gpus in (128, 1024):
        started = time.process_time()
        ranking = search(costs("13B", gpus), ROLES, gpus)
        seconds = time.process_time() - started
        print(f"\n{gpus} GPUs, five roles: {ranking.evaluated} mappings compared in {seconds:.2f} s of CPU")


if __name__ == "__main__":
    main()
