"""Which roles share which GPUs: HybridFlow's search (arXiv:2409.19256, section 6: Algorithms 1 and 2) with our roles.

    placement    roles into sets; the roles of a set share its GPUs         partitions()
    allocation   GPUs to sets, each at least what its memory needs          _allocations()
    choices      how each role of a set lies on the set's GPUs              _Search.ways()

A step's stages follow one another: generation, preparation (log-probs, reference, values, scores), update. In a stage
the sets work at the same time, the roles of a set one after another: it takes what the slowest set takes. Where steps
may be stale and generation has GPUs of its own, which the paper does not have, it runs beside the other stages.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol

from tandem.errors import UserError
from tandem.planning.time import ParallelDims

ROLLOUT = "rollout"
ACTOR = "actor"
EQUAL = 0.005
"""Steps that differ by less than this share take as long."""
PIECES = 16
"""GPUs are dealt out in at most so many equal parts: at 1,024 GPUs 64 at a time."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way in which a role may lie on its GPUs."""

    how: ParallelDims
    held_bytes: int = 0
    """On each GPU, whoever works."""
    working_bytes: int = 0
    """More while it works."""
    preparation_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Generating:
    """One way to generate."""

    how: ParallelDims
    """GPUs of which as many as `tensor` are an engine."""
    held_bytes: int
    """On each GPU while others work."""
    seconds: float


class Costs(Protocol):
    """What everything takes. Answers do not change: they are asked for once."""

    @property
    def memory_bytes(self) -> int:
        """Of a GPU, all that may be used."""
        ...

    def choices(self, role: str, gpus: int) -> Sequence[Candidate]:
        """Of a role that trains or scores; those that do not fit alone may be among them."""
        ...

    def generation(self, gpus: int, held_bytes: int, models: Sequence[str]) -> Sequence[Generating]:
        """Ways to generate on GPUs where these roles already hold so much; none where the rest is too little."""
        ...

    def publish_s(self, gpus: int, *, shared: bool) -> float:
        """New weights, and the change between stages, where generation on so many GPUs shares them with the actor, or
        does not."""
        ...


@dataclass(frozen=True, slots=True)
class Way:
    """A set of roles on its GPUs."""

    roles: tuple[str, ...]
    gpus: int
    how: tuple[ParallelDims, ...]
    """Of each role."""
    generation_s: float
    preparation_s: float
    update_s: float
    used_bytes: int
    """On each GPU when most is held, without the room for keys and values."""

    @property
    def times(self) -> tuple[float, float, float]:
        return self.generation_s, self.preparation_s, self.update_s


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement with its best allocation and choices."""

    sets: tuple[Way, ...]
    publish_s: float
    beside: bool
    """Generation runs beside the other stages."""

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds of generation, preparation and update."""
        generation, preparation, update = (max(stage) for stage in zip(*(way.times for way in self.sets), strict=True))
        return generation, preparation, update

    @property
    def step_s(self) -> float:
        return _step_s(self.times, self.publish_s, self.beside)

    @property
    def shares_actor(self) -> bool:
        """Answers are generated on the actor's GPUs."""
        return any(ACTOR in way.roles and ROLLOUT in way.roles for way in self.sets)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Placements, the fastest first, each at its best."""

    mappings: Sequence[Plan]
    evaluated: int
    """Placements with their allocations that were compared."""


def search(
    costs: Costs, roles: Sequence[str], gpus: int, *, stale: bool = False, apart: bool = True, allocations: int = 1
) -> Ranking:
    """Every placement of `roles`, which has an actor and a rollout, on `gpus` GPUs.

    `apart`: generation may have GPUs of its own. `allocations`: of each placement with so many of its best. UserError
    where nothing fits.
    """
    found = _Search(costs, gpus, stale, allocations)
    best: list[Plan] = []
    for sets in partitions(tuple(roles)):
        together = any(ACTOR in each and ROLLOUT in each for each in sets)
        if apart or together:
            best += found.best_of(sets)
    if not best:
        raise nothing_fits(roles, gpus)
    return Ranking(sorted(best, key=lambda mapping: mapping.step_s), found.evaluated)


def nothing_fits(roles: Sequence[str], gpus: int) -> UserError:
    return UserError(
        f"no placement of {', '.join(roles)} fits {gpus} GPU{'s' * (gpus > 1)}; take more, or larger ones, or add the "
        "smallest change that fits, where plan names one"
    )


def evaluate(costs: Costs, sets: Mapping[tuple[str, ...], int], *, stale: bool = False) -> Plan | None:
    """The best way to use sets of roles with these many GPUs. None: it does not fit."""
    found = _Search(costs, sum(sets.values()), stale)
    return next(iter(found.best_with(tuple(sets), [tuple(sets.values())])), None)


def partitions(roles: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All ways to put roles into sets."""
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for sets in partitions(rest):
        yield ((first,), *sets)
        for at, each in enumerate(sets):
            yield ((first, *each), *sets[:at], *sets[at + 1 :])


@dataclass
class _Search:
    costs: Costs
    gpus: int
    stale: bool
    allocations: int = 1
    evaluated: int = 0
    known: dict[tuple[tuple[str, ...], int], list[Way]] = field(default_factory=dict)
    joint: dict[tuple[tuple[str, ...], int], list["_Choices"]] = field(default_factory=dict)

    def best_of(self, sets: tuple[tuple[str, ...], ...]) -> list[Plan]:
        """The best allocations of a placement, with their best choices."""
        return self.best_with(sets, self._allocations(sets))

    def best_with(self, sets: tuple[tuple[str, ...], ...], allocations: Iterable[tuple[int, ...]]) -> list[Plan]:
        """The best of these allocations, the fastest first."""
        generating = next(at for at, each in enumerate(sets) if ROLLOUT in each)
        shared, beside = ACTOR in sets[generating], self.stale and len(sets[generating]) == 1
        kept: list[Plan] = []
        for counts in allocations:
            self.evaluated += 1
            ways = [self.ways(each, count) for each, count in zip(sets, counts, strict=True)]
            if not all(ways):
                continue
            publish_s = self.costs.publish_s(counts[generating], shared=shared)
            least = kept[-1].step_s if len(kept) == self.allocations else float("inf")
            fastest = [tuple(min(way.times[stage] for way in each) for stage in range(3)) for each in ways]
            if _slowest(fastest, publish_s, beside) >= least:
                continue
            best = min(product(*ways), key=lambda chosen: _slowest([way.times for way in chosen], publish_s, beside))
            plan = Plan(best, publish_s, beside)
            if plan.step_s < least:
                kept = sorted([*kept, plan], key=lambda plan: plan.step_s)[: self.allocations]
        return kept

    def _allocations(self, sets: tuple[tuple[str, ...], ...]) -> Iterator[tuple[int, ...]]:
        """GPUs of each set: any for which it has a way, all of them together."""
        piece = _piece(self.gpus)
        parts = self.gpus // piece
        left_over = self.gpus - parts * piece  # goes to the first set, which the first role is in
        possible = [
            [
                count
                for count in range(1, parts - len(sets) + 2)
                if self.ways(each, count * piece + (left_over if at == 0 else 0))
            ]
            for at, each in enumerate(sets)
        ]
        if all(possible):
            for counts in _summing_to(parts, possible):
                yield (counts[0] * piece + left_over, *(count * piece for count in counts[1:]))

    def ways(self, roles: tuple[str, ...], gpus: int) -> list[Way]:
        """How a set may use so many GPUs: those of which no other is as fast in all stages. None: it does not fit."""
        if (roles, gpus) not in self.known:
            self.known[roles, gpus] = _fastest(list(self._all_ways(roles, gpus)))
        return self.known[roles, gpus]

    def _all_ways(self, roles: tuple[str, ...], gpus: int) -> Iterator[Way]:
        models = tuple(role for role in roles if role != ROLLOUT)
        for choices in self.together(models, gpus):
            engines: Sequence[Generating | None] = [None]
            if ROLLOUT in roles:
                engines = self.costs.generation(gpus, choices.held_bytes, models)
            for engine in engines:
                used = choices.held_bytes + choices.working_bytes + (engine.held_bytes if engine else 0)
                if used <= self.costs.memory_bytes:
                    how = dict(zip(models, choices.how, strict=True)) | ({ROLLOUT: engine.how} if engine else {})
                    seconds = engine.seconds if engine else 0.0
                    hows = tuple(how[role] for role in roles)
                    yield Way(roles, gpus, hows, seconds, choices.preparation_s, choices.update_s, used)

    def together(self, models: tuple[str, ...], gpus: int) -> list["_Choices"]:
        """Choices of all these roles on the same GPUs, without those than which others are as good in memory and time
        alike: what is worse for some of the roles stays worse when others are added."""
        if not models:
            return [_Choices()]
        if (models, gpus) not in self.joint:
            *others, role = models
            added = [
                before.and_also(choice)
                for before in self.together(tuple(others), gpus)
                for choice in self.costs.choices(role, gpus)
            ]
            fitting = [each for each in added if each.held_bytes + each.working_bytes <= self.costs.memory_bytes]
            kept = {each.key: each for each in fitting}
            self.joint[models, gpus] = [kept[key] for key in _undominated(list(kept))]
        return self.joint[models, gpus]


@dataclass(frozen=True, slots=True)
class _Choices:
    """One of each of several roles, on the same GPUs."""

    how: tuple[ParallelDims, ...] = ()
    held_bytes: int = 0
    working_bytes: int = 0
    preparation_s: float = 0.0
    update_s: float = 0.0

    @property
    def key(self) -> tuple[float, ...]:
        return self.held_bytes, self.working_bytes, self.preparation_s, self.update_s

    def and_also(self, choice: Candidate) -> "_Choices":
        return _Choices(
            (*self.how, choice.how),
            self.held_bytes + choice.held_bytes,
            max(self.working_bytes, choice.working_bytes),
            self.preparation_s + choice.preparation_s,
            self.update_s + choice.update_s,
        )


def _fastest(ways: Sequence[Way]) -> list[Way]:
    kept: dict[tuple[float, ...], Way] = {}
    for way in ways:
        kept.setdefault(way.times, way)
    return [kept[key] for key in _undominated(list(kept))]


def _undominated(keys: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Those of three or four numbers than which no other is at most as large in every place."""
    kept: list[tuple[float, ...]] = []
    for key in sorted(keys):  # whatever dominates a key comes before it, and is no larger in the first place
        _, second, third, *_ = key
        last = key[-1]
        if not any(other[1] <= second and other[2] <= third and other[-1] <= last for other in kept):
            kept.append(key)
    return kept


def _piece(gpus: int) -> int:
    """GPUs that are dealt out at once: if that can be, a power of two, for degrees divide no other sets."""
    least = -(-gpus // PIECES)
    power = 1 << (least - 1).bit_length()
    return power if gpus % power == 0 else least


def _summing_to(total: int, possible: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """One count of each set, all together `total`."""
    if len(possible) == 1:
        if total in possible[0]:
            yield (total,)
        return
    for count in possible[0]:
        for rest in _summing_to(total - count, possible[1:]):
            yield (count, *rest)


def _slowest(times: Sequence[tuple[float, ...]], publish_s: float, beside: bool) -> float:
    generation, preparation, update = (max(stage) for stage in zip(*times, strict=True))
    return _step_s((generation, preparation, update), publish_s, beside)


def _step_s(times: tuple[float, float, float], publish_s: float, beside: bool) -> float:
    generation, preparation, update = times
    if beside:
        return max(generation, preparation + update) + publish_s
    return generation + preparation + update + publish_s


def why(ranking: Ranking) -> str:
    """By how much the first placement is faster than the second, and in which stage the most."""
    first, *others = ranking.mappings
    if not others:
        return "no other placement fits"
    second = others[0]
    ahead = second.step_s - first.step_s
    if ahead < EQUAL * first.step_s:
        return "the first and the next take as long"
    if first.beside and not second.beside:
        return f"the first is {ahead:.1f} s ahead of the next: its generation runs beside the other stages"
    names = ("generation", "preparation", "update", "publish")
    gains = [
        (theirs - ours, name)
        for name, ours, theirs in zip(
            names, (*first.times, first.publish_s), (*second.times, second.publish_s), strict=True
        )
    ]
    gain, name = max(gains)
    return f"the first is {ahead:.1f} s ahead of the next, the most by {name}, which takes {gain:.1f} s less"
