"""Tables of other frameworks' keys: which of ours each becomes, and how its value is converted."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from tandem.config import yaml12


def same(value: Any) -> Any:
    return value


class Key(NamedTuple):
    """The key of ours that one of theirs becomes. A row of a table; later rows overwrite earlier ones."""

    ours: str
    default: Any = None
    """The value of theirs where none is given; None: then nothing is written."""
    convert: Callable[[Any], Any] | Mapping[Any, Any] = same
    """The value of theirs -> ours, or None, which is not written. Of names a mapping: for one that is not in it stands
    the first of all, with a note."""
    unless: Any = None
    """The value of ours that is not written, as the default here does the same."""
    when: tuple[str, ...] = ()
    """A key of ours that has to be written by then, and its values with which the row is read, else it is not; without
    values any will do."""
    older: tuple[str, ...] = ()
    """Further names of theirs, which are read where its own is not given, the last first."""
    say: str = ""
    """What to write in its place, where that is more than the key of ours."""


Table = Mapping[str, Key | str]
"""A key of theirs -> its row; or, of a key that a function reads together with others, or that nothing reads, what to
write in its place: a key of ours, and after `, ` or `: ` a word on what differs."""


def together(ours: str, *theirs: str) -> dict[str, Key | str]:
    """Keys that become one of ours, which a function reads."""
    return dict.fromkeys(theirs, ours)


def under(theirs: str, ours: str, rows: Table, when: tuple[str, ...] = ()) -> dict[str, Key | str]:
    """Rows whose keys, of both sides, are below these. `when` is of rows that have none of their own."""
    return {f"{theirs}{name}": _below(theirs, ours, row, when) for name, row in rows.items()}


def _below(theirs: str, ours: str, row: Key | str, when: tuple[str, ...]) -> Key | str:
    if isinstance(row, str):
        return f"{ours}{row}"
    own = (f"{ours}{row.when[0]}", *row.when[1:]) if row.when else when
    return row._replace(
        ours=f"{ours}{row.ours}",
        when=own,
        older=tuple(f"{theirs}{name}" for name in row.older),
        say=row.say and f"{ours}{row.say}",
    )


def texts(table: Table) -> dict[str, str]:
    """Each key of theirs, older names too -> what to write in its place."""
    found = dict[str, str]()
    for theirs, row in table.items():
        names = (theirs,) if isinstance(row, str) else (theirs, *row.older)
        found |= dict.fromkeys(names, row if isinstance(row, str) else _text(row))
    return found


def _text(row: Key) -> str:
    if row.say or not row.when:
        return row.say or row.ours
    condition, *values = row.when
    return f"{row.ours}, with {condition}{': ' if values else ''}{' or '.join(values)}"


def key_in(text: str) -> str:
    """The key of ours, without what is said of it."""
    return text.partition(", ")[0].partition(": ")[0]


def int_or_zero(value: Any) -> int:
    return value if isinstance(value, int) else 0


def positive(value: Any) -> int | None:
    """A number of steps, where 0 and -1 mean never."""
    return value if int_or_zero(value) > 0 else None


def nonzero(value: Any) -> Any:
    return value or None


def not_minus_one(value: Any) -> Any:
    """Where -1 means that nothing is set."""
    return None if value in (-1, "-1") else value


def listed(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else [value]


def parsed(text: str) -> Any:
    """A value of a command line: a number, a truth value, a list or mapping in brackets, or text, in quotes or not."""
    try:
        value = yaml12.read(text)
    except yaml12.YAMLError:
        return text
    if text.lstrip().startswith(("{", "[", "'", '"')):
        return value
    return text if "#" in text or isinstance(value, str | list | dict) else value  # YAML alone has `a: b` and `- a`


def list_of(given: Any) -> Any:
    """A list, which scripts also give as a text between quotes."""
    return parsed(given) if isinstance(given, str) else given


def precision(given: Any) -> str:
    """`model.dtype`."""
    return "float32" if given in ("fp32", "float32") else "bfloat16"


def if_true(ours: Any) -> Callable[[Any], Any]:
    return lambda given: ours if given else None


def if_false(ours: Any) -> Callable[[Any], Any]:
    return lambda given: ours if given is False else None
