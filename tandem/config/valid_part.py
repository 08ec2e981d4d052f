"""The valid part of an invalid configuration: with it, its other mistakes are found and reported together."""

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from difflib import get_close_matches
from typing import Any, TypeVar, cast, get_args, get_origin

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from tandem.config import verl_keys
from tandem.config.base import Section
from tandem.config.sections import sections_at
from tandem.config.tree import Tree

Kind = TypeVar("Kind", bound=Section)


def valid_part(kind: type[Kind], tree: Mapping[str, Any]) -> Kind:
    """A section, or a whole configuration, of the values that are valid by themselves.

    Reading any other raises AttributeError: what was refused, and what an unknown key beside it may mean. In a section
    that may be any key with a default; in a whole configuration it is a section with a name like it. What a section
    asks of its values together is not asked here.
    """
    unknown_keys = tree.keys() - kind.model_fields.keys() - set(verl_keys.SECTIONS)
    may_be_meant: Collection[str] = kind.model_fields
    if issubclass(kind, Tree):
        may_be_meant = {name for key in unknown_keys for name in get_close_matches(key, kind.model_fields)}
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if name not in tree and unknown_keys and name in may_be_meant:
            continue
        try:
            values[name] = _validated(name, field, tree)
        except ValidationError:
            inner = _section_of(field, tree.get(name))
            if inner is not None and get_origin(field.annotation) is dict:  # sections by name
                named = cast(Mapping[str, Mapping[str, Any]], tree[name]).items()
                values[name] = {key: valid_part(inner, one) for key, one in named if _is_mapping(one)}
            elif inner is not None:
                values[name] = valid_part(inner, tree[name])
    section = kind.model_construct(**values)
    for name in kind.model_fields.keys() - values.keys():
        vars(section).pop(name, None)  # a default, where model_construct found one
    return section


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


def _validated(name: str, field: FieldInfo, tree: Mapping[str, Any]) -> Any:
    """One value, or its default. Raises ValidationError."""
    alone: Any = create_model(name, __base__=Section, **cast(Any, {name: (field.annotation, copy(field))}))
    return getattr(alone.model_validate({name: tree[name]} if name in tree else {}), name)


def _section_of(field: FieldInfo, given: Any) -> type[Section] | None:
    """The section that a value was meant to be: of several, the one with its type."""
    if not isinstance(given, Mapping):
        return None
    wanted = cast(Mapping[str, Any], given).get("type", _default_type(field))
    for section in sections_at(field):
        types = section.model_fields.get("type")
        if types is None or wanted in get_args(types.annotation):
            return section
    return None


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _default_type(field: FieldInfo) -> Any:
    """The type of the section that stands at a key by default."""
    default: Any = field.default
    return cast(dict[str, Any], default).get("type") if isinstance(default, dict) else getattr(default, "type", None)
