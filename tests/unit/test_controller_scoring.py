"""How often a step that waits looks at the scores that have come."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.controller import scoring
from tandem.types import Group


@pytest.mark.parametrize(("used_s", "stood_s", "gap_s"), [(0.001, 0.0, 0.5), (0.1, 30.0, 5.0), (3.0, 0.0, 10.0)])
def test_looks_take_a_small_share_of_the_time_and_none_is_put_off_for_long(
    used_s: float, stood_s: float, gap_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`used_s` of the thread's time a look takes, and `stood_s` more pass by while it does."""
    now, used, looks = 0.0, 0.0, list[float]()
    monkeypatch.setattr(scoring, "time", SimpleNamespace(monotonic=lambda: now, thread_time=lambda: used))

    def groups_so_far() -> list[Group]:
        nonlocal now, used
        now, used = now + used_s + stood_s, used + used_s
        looks.append(now)
        return []

    groups = cast("Any", SimpleNamespace(check_share_early=lambda _: None))
    looked = scoring.ScoresLookedAt(groups, 4, lambda: False, groups_so_far)
    while len(looks) < 3:
        now += 0.01
        looked.look()
    assert looks[2] - looks[1] - used_s - stood_s == pytest.approx(gap_s, abs=0.02)
