"""YAML 1.2 core schema in and out, through PyYAML, which by itself speaks YAML 1.1.

    1e-3  0.5  .inf        numbers (1.1 takes the first for text)
    17  017  0o17  0x1f    17, 17, 15, 31 (1.1 takes the second for octal, the third for text)
    true  false  null  ~   booleans and nulls, also capitalised
    yes  no  on  off       text, as are 1_000, 12:30 and 2026-01-31

https://yaml.org/spec/1.2.2/#103-core-schema. Merge keys (`<<`) of YAML 1.1 still work; two equal keys are an error.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.scanner import ScannerError

YAMLError = yaml.YAMLError
_DEEPEST, _MOST = 100, 1_000_000
"""Levels of lists and mappings, and values, that a file may have."""
_OF_VALUES = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""What PyYAML raises of `!!bool maybe` and `!!timestamp x`, and Python of a whole number of 5,000 digits."""
_TAG = "tag:yaml.org,2002:"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_SCHEMA = (
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
    ("merge", r"<<", ["<"]),
)
"""(tag, pattern of the whole scalar, its possible first characters), tried in this order."""


def read(text: str) -> Any:
    """The value of one YAML document. Raises YAMLError, which says where, also for what is too much (`check_size`)."""
    try:
        tree = yaml.load(text, _Loader)
    except RecursionError:
        raise YAMLError("it is nested too deeply") from None
    except ScannerError as error:
        if "'\\t'" in str(error.problem):
            error.problem = "a tab begins here, and YAML wants spaces"
        raise
    except _OF_VALUES as error:
        raise YAMLError(f"a value is not of its type ({error})") from None
    try:
        check_size(tree)
    except ValueError as error:
        raise YAMLError(str(error)) from None
    return tree


def check_size(tree: Any) -> None:
    """Raises ValueError where lists and mappings are nested deeper, or hold more values, than in any file that people
    or programs write here. An alias counts as what it stands for: a few lines of them may stand for billions of values,
    and a list for itself."""
    left: list[tuple[Any, int]] = [(tree, 0)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > _DEEPEST:
            raise ValueError(f"it is nested too deeply: lists and mappings more than {_DEEPEST} levels down")
        if count > _MOST:
            raise ValueError(f"it holds more than {_MOST:,} values, with what its aliases stand for")
        if isinstance(value, dict):
            left += [(one, depth + 1) for one in cast(dict[Any, Any], value).values()]
        elif isinstance(value, list):
            left += [(one, depth + 1) for one in cast(list[Any], value)]


def write(tree: Any) -> str:
    """Plain data as YAML that readers of 1.1 and of 1.2 understand alike: text that either would misread is quoted."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


@contextmanager
def _told_as_yaml(node: ScalarNode) -> Generator[None]:
    """Where a tag says a kind that the text is not of (`!!int many`), or a number has thousands of digits."""
    try:
        yield
    except ValueError as error:
        raise ConstructorError(None, None, str(error), node.start_mark) from None


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}

    def refuse(self, node: Node) -> NoReturn:
        raise ConstructorError(None, None, f"{node.tag} is no kind of YAML 1.2's core schema", node.start_mark)

    def construct_bool(self, node: ScalarNode) -> bool:
        text = self.construct_scalar(node).lower()
        if text not in ("true", "false"):
            raise ConstructorError(None, None, f"{node.value!r} is neither true nor false", node.start_mark)
        return text == "true"

    def construct_int(self, node: ScalarNode) -> int:
        text = self.construct_scalar(node)
        bases = {"0o": 8, "0x": 16}
        with _told_as_yaml(node):
            number = int(text.removeprefix("0o"), bases[text[:2]]) if text[:2] in bases else int(text)
            str(number)  # ValueError: of so many digits that no message could show it
            return number

    def construct_float(self, node: ScalarNode) -> float:
        text = self.construct_scalar(node).lower()
        with _told_as_yaml(node):
            return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def construct_text(self, node: ScalarNode) -> str:
        text = self.construct_scalar(node)
        with _told_as_yaml(node):  # half a surrogate pair could be written nowhere
            return text.encode("utf-8").decode("utf-8")

    def construct_whole_mapping(self, node: MappingNode) -> dict[Any, Any]:
        """At once, with all that is in it: what holds itself is refused."""
        return self.construct_mapping(node, deep=True)

    def construct_whole_list(self, node: SequenceNode) -> list[Any]:
        return self.construct_sequence(node, deep=True)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, ScalarNode)]
        named = [(key.tag, key.value) for key in keys]
        for place, key in enumerate(keys):
            if named[place] in named[:place]:
                raise ConstructorError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1, whose resolvers it has, or 1.2 takes for something else."""


for _kind, _pattern, _first in _SCHEMA:
    for _class in cast(list[Any], [_Loader, _Dumper]):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern})$"), _first)
_Loader.add_constructor(f"{_TAG}bool", _Loader.construct_bool)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_int)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_float)
_Loader.add_constructor(f"{_TAG}str", _Loader.construct_text)
_Loader.add_constructor(f"{_TAG}map", _Loader.construct_whole_mapping)
_Loader.add_constructor(f"{_TAG}seq", _Loader.construct_whole_list)
for _kind in ("timestamp", "binary", "set", "omap", "pairs"):  # of YAML 1.1
    _Loader.add_constructor(_TAG + _kind, _Loader.refuse)
