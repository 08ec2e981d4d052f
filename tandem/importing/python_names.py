"""What stands in the names of a Python script, and in the options of its argument parser, without running it."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


def names_of(module: ast.Module, flags: Mapping[str, Any]) -> dict[str, ast.expr]:
    """What stands in names that are assigned once, and in the options of an argument parser, as `args.<option>`.

    Args:
        flags: Options of the parser that are given on the command line.
    """
    nodes = list(ast.walk(module))
    bound = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    bound += [node.arg for node in nodes if isinstance(node, ast.arg)]
    found = dict[str, ast.expr]()
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and isinstance(target, ast.Name):
            found |= {target.id: node.value} if bound.count(target.id) == 1 else {}
    options = dict[str, ast.expr]()
    of_flags = dict(flags)
    for option in _options(nodes):
        if option.default is not None:
            options[option.name] = option.default
        for given in option.spelled & of_flags.keys():
            value = of_flags.pop(given)
            options[option.name] = ast.Constant(option.stores if value is True else value)
    options |= {name: ast.Constant(value) for name, value in of_flags.items()}
    for namespace in _namespaces(nodes):
        found |= {f"{namespace}.{name}": value for name, value in options.items()}
    return found


def _namespaces(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that hold what an argument parser made of its command line."""
    found = {"args"}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made_by = ast.unparse(node.value.func).rpartition(".")[2]
            target = node.targets[0]
            first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
            if made_by in ("parse_args", "parse_known_args") and isinstance(first, ast.Name):
                found.add(first.id)
    return found


class _Option(NamedTuple):
    name: str
    """In what the parser makes of the command line."""
    spelled: set[str]
    """How the command line names it, without the dashes."""
    default: ast.expr | None
    stores: bool
    """What it stands for without a value."""


def _options(nodes: Iterable[ast.AST]) -> Iterator[_Option]:
    """Those of `parser.add_argument(…)`."""
    for call in nodes:
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(".add_argument") or not call.args:
            continue
        given = {part.arg: part.value for part in call.keywords}
        spelled = [ast.unparse(name).strip("'\"") for name in call.args]
        long = next((name for name in spelled if name.startswith("--")), spelled[0])
        name = ast.unparse(given["dest"]).strip("'\"") if "dest" in given else _plain(long)
        stores = "action" not in given or "false" not in ast.unparse(given["action"])
        default = given.get("default", ast.Constant(not stores) if "action" in given else None)
        yield _Option(name, {_plain(one) for one in spelled}, default, stores)


def options_read(module: ast.Module) -> set[str]:
    """Names of the options that the calls read in which a trainer, its configuration or its rows are made."""
    calls = (node for node in ast.walk(module) if isinstance(node, ast.Call))
    read = [call for call in calls if ast.unparse(call.func).endswith(("Config", "Trainer", "load_dataset"))]
    names = {node.attr for call in read for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    spelled = {one for option in _options(ast.walk(module)) if option.name in names for one in option.spelled}
    return names | spelled


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")
