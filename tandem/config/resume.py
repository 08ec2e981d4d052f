"""What may differ between a run and the same run resumed.

Resources, time-outs, what is recorded and how long the run goes may change: their keys are declared with `MayChange` in
the tree. What is learned, and from what (data, algorithm, model, seed), stays.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from tandem.config.base import MAY_CHANGE, Section
from tandem.config.ratio import anchored_at_engine
from tandem.config.tree import TrainConfig

_SKIP_OLD_LOGPROBS = "algorithm.rollout_correction.skip_old_logprobs"


class Change(NamedTuple):
    """One key whose value is not what it was."""

    key: str
    before: Any
    after: Any
    allowed: bool
    """A resumed run may change it."""

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


def changes(before: Section, after: Section) -> list[Change]:
    """Every key in which two configurations of one kind differ, in the order of the tree.

    Two names of one file, by a symbolic link or by `..`, are no difference.
    Nor is a default that was written out: runs of versions whose default of `skip_old_logprobs` was false have it so.
    Of two alternatives, such as `cluster.type: local` and `cluster.type: ray`, only the type is reported: what else
    they have has no counterpart.
    """
    found = list(_changes(before, after, "", allowed=False))
    if isinstance(before, TrainConfig) and isinstance(after, TrainConfig):
        anchors = {anchored_at_engine(one.algorithm, one.trainer.max_staleness) for one in (before, after)}
        found = [change for change in found if not (len(anchors) == 1 and change.key == _SKIP_OLD_LOGPROBS)]
    return found


def _changes(before: Section, after: Section, prefix: str, allowed: bool) -> Iterator[Change]:
    for name, field in type(after).model_fields.items():
        old, new = getattr(before, name), getattr(after, name)
        may_change = allowed or MAY_CHANGE in field.metadata
        if isinstance(old, Section) and type(old) is type(new):
            yield from _changes(old, new, f"{prefix}{name}.", may_change)
        elif not _same(old, new):
            types = getattr(old, "type", None), getattr(new, "type", None)
            if None not in types:
                yield Change(f"{prefix}{name}.type", *types, may_change)
            else:
                yield Change(f"{prefix}{name}", old, new, may_change)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Section) and type(old) is type(new):
        return all(_same(getattr(old, name), getattr(new, name)) for name in type(old).model_fields)
    if isinstance(old, list) and isinstance(new, list):
        olds, news = cast(list[Any], old), cast(list[Any], new)
        return len(olds) == len(news) and all(map(_same, olds, news))
    if isinstance(old, Path) and isinstance(new, Path):
        return old.resolve() == new.resolve()
    if isinstance(old, str) and isinstance(new, str) and ".py:" in old:  # a reference to a file of the user's
        (old_file, _, old_name), (new_file, _, new_name) = old.rpartition(":"), new.rpartition(":")
        return old_name == new_name and Path(old_file).resolve() == Path(new_file).resolve()
    return old == new


def _shown(value: Any) -> str:
    if isinstance(value, Section):
        return str(value.model_dump(mode="json"))
    if isinstance(value, list):
        return "[" + ", ".join(_shown(item) for item in cast(list[Any], value)) + "]"
    return "null" if value is None else str(value)
