"""The valid part of an invalid configuration: with it, its other mistakes are found and reported together."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cache, partial
from typing import Any, TypeVar, cast, get_origin

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from tandem.config.base import Section, rules_of
from tandem.config.keys import holds_sections_by_name, section_of
from tandem.config.sections import sections_at

Kind = TypeVar("Kind", bound=Section)
_Context = Mapping[str, Any] | None


def valid_part(kind: type[Kind], tree: Mapping[str, Any], context: _Context = None) -> Kind:
    """A section, or a whole configuration, of the values that are valid by themselves; unknown keys are passed over.

    Reading a value that was refused raises AttributeError. What a section asks of its values together is not asked
    here, but by `broken_rules`.
    """
    tree = kind.filled(tree)
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        try:
            values[name] = _validated(kind, name, tree, context)
        except ValidationError:
            part = _part(kind, name, field, tree.get(name), context)
            if part is not None:
                values[name] = part
    section = kind.model_construct(**values)
    for name in kind.model_fields.keys() - values.keys():
        vars(section).pop(name, None)  # a default, where model_construct found one
    return section


def broken_rules(section: Section, prefix: str = "") -> Iterator[str]:
    """What the rules of a section, and of all sections in it, find in their valid part, each behind its key."""
    for one in rules_of(type(section)):
        key = ".".join(part for part in (prefix, one.key) if part)
        for told in found_by(partial(one.find, section), whole=False):
            yield f"{key}: {told}" if key else told
    for name in type(section).model_fields:
        for key, inner in _sections_in(vars(section).get(name), f"{prefix}.{name}" if prefix else name):
            yield from broken_rules(inner, key)


def found_by(check: Callable[[], Iterator[str]], whole: bool) -> Iterator[str]:
    """What a check finds; of a configuration that is not `whole`, until it reads what was refused."""
    try:
        yield from check()
    except AttributeError as error:
        if whole or not isinstance(error.obj, Section):
            raise
    except LookupError:  # values that contradict each other, which their section's own validation reports
        if whole:
            raise
    except OSError as error:  # a file that may not be read, a name that is too long
        yield str(error)


def _sections_in(value: Any, key: str) -> Iterator[tuple[str, Section]]:
    if isinstance(value, Section):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in cast(dict[str, Any], value).items():
            yield from _sections_in(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for place, inner in enumerate(cast(list[Any], value)):
            yield from _sections_in(inner, f"{key}.{place}")


def _validated(kind: type[Section], name: str, tree: Mapping[str, Any], context: _Context) -> Any:
    """One value, or its default. Raises ValidationError."""
    given = {name: tree[name]} if name in tree else {}
    return getattr(_alone(kind, name).model_validate(given, context=cast(Any, context)), name)


@cache
def _alone(kind: type[Section], name: str) -> type[Section]:
    """A section of one key of another, which is compiled once for all configurations with mistakes."""
    field = kind.model_fields[name]
    return create_model(name, __base__=Section, **cast(Any, {name: (field.annotation, copy(field))}))


def _part(kind: type[Section], name: str, field: FieldInfo, given: Any, context: _Context) -> Any:
    """The valid part of a refused section, of sections by name, or of a list with sections; None of any other value."""
    if isinstance(given, list) and get_origin(field.annotation) is list and sections_at(field):
        return [_item(kind, name, field, one, context) for one in cast(list[Any], given)]
    inner = section_of(field, given)
    if inner is None or get_origin(field.annotation) is list:
        return None
    if holds_sections_by_name(field):
        named = cast(Mapping[str, Any], given).items()
        return {
            key: valid_part(inner, cast(dict[str, Any], one), context) for key, one in named if isinstance(one, dict)
        }
    return valid_part(inner, cast(Mapping[str, Any], given), context)


def _item(kind: type[Section], name: str, field: FieldInfo, given: Any, context: _Context) -> Any:
    """One of a list: valid, the valid part of a section, or in the place of anything else a section without values."""
    try:
        return _validated(kind, name, {name: [given]}, context)[0]
    except ValidationError:
        inner = section_of(field, given)
        return Section.model_construct() if inner is None else valid_part(inner, given, context)
