"""What every section of the typed tree is made of."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "BROKEN_RULES",
    "MAY_CHANGE",
    "MayChange",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Refused",
    "Rule",
    "Section",
    "Share",
    "by_type",
    "rule",
    "rules_of",
]

T = TypeVar("T")
MAY_CHANGE = "may change on resume"
MayChange = Annotated[T, MAY_CHANGE]
"""The kind of a key, or of a whole section, that a resumed run may give another value: `timeout_s: MayChange[float]`.

Every other key is fixed for the length of a run, because it decides what the run learns. See `tandem/config/resume.py`.
"""
_VARIABLE = re.compile(r"\$(\{[^}]*\}|[A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Refused:
    """In a tree in the place of a value that is not to be read: no key takes it."""

    problem: str = ""
    """What is to be said of it; empty where another message says it."""


def _refuse_switch(value: T) -> T:
    """`save_every: true` would be 1."""
    if isinstance(value, bool):
        raise ValueError("input should be a number")
    return value


_NO_SWITCH = BeforeValidator(_refuse_switch)
PositiveInt = Annotated[int, Field(gt=0), _NO_SWITCH]
PositiveFloat = Annotated[float, Field(gt=0), _NO_SWITCH]
NonNegativeInt = Annotated[int, Field(ge=0), _NO_SWITCH]
NonNegativeFloat = Annotated[float, Field(ge=0), _NO_SWITCH]
Share = Annotated[float, Field(ge=0, le=1), _NO_SWITCH]


@dataclass(frozen=True, slots=True)
class Rule:
    """What the values of a section must keep together; what several sections must is in `rules/`."""

    key: str
    """Of the section, where one of its keys is at fault; else empty."""
    find: Callable[[Any], Iterator[str]]
    """Section -> what is wrong, a sentence with its mend for each mistake. It reads values in the order in which it
    needs them: of a section that is sound in part it runs until it reads what is not there."""


def rule(key: str = "") -> Callable[[Callable[[Any], Iterator[str]]], Rule]:
    """Makes a rule of a method of a section: `@rule()`, or `@rule("kl")` where the key is to be named."""
    return partial(Rule, key)


BROKEN_RULES = "broken_rules"
"""The type of the error that a section's rules give."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after loading, and go together as the
    section's rules say.

    A section is compiled when it is first validated: a command needs few of those that are declared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True, ignored_types=(Rule,))

    FREE_TEXT: ClassVar[tuple[str, ...]] = ()
    """Keys whose text is for a model or a shell to read, in which `None` and `$x` are as good as other words."""

    @classmethod
    def filled(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a file gives of the section, with what it leaves to other defaults than those of the fields."""
        return given

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        filled = cls.filled(cast(Mapping[str, Any], given))
        return {name: value if name in cls.FREE_TEXT else _as_meant(value) for name, value in filled.items()}

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        broken = [f"{one.key}: {told}" if one.key else told for one in rules_of(type(self)) for told in one.find(self)]
        if broken:
            raise PydanticCustomError(BROKEN_RULES, "{told}", {"told": "; ".join(broken)})
        return self


def _as_meant(value: Any) -> Any:
    """Text of a key, or of a list, refused where something else than these letters was meant."""
    if isinstance(value, list):
        return [_as_meant(one) for one in cast(list[Any], value)]
    if value == "None":
        return Refused("'None' is text; YAML has null for it, or leave the key out")
    if isinstance(value, str) and _VARIABLE.search(value):
        return Refused(
            f"{value!r} has a variable, which nothing here fills in; write the value, or give key=value on the command "
            "line, where the shell does"
        )
    return value


@cache
def rules_of(kind: type[Section]) -> tuple[Rule, ...]:
    """A section's rules and those of its bases, whose come first; one of the same name takes the place of theirs."""
    named = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return tuple(value for value in named.values() if isinstance(value, Rule))


def by_type(default: str) -> Discriminator:
    """Tells the sections of a union apart by their `type`, which a file may leave out where it is `default`."""

    def tag(section: object) -> str:
        if isinstance(section, dict):
            return str(cast(dict[str, Any], section).get("type", default))
        return str(getattr(section, "type", None))

    return Discriminator(tag)
