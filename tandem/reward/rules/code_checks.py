"""Whether a test in Python checks anything: one that does not would pass every solution."""

import ast
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

_RAISES = re.compile(r"_*(assert|fail|raises)", re.IGNORECASE)
"""How the names of functions begin that libraries have for assertions: `assertEqual`, `assert_allclose`, `raises`."""
_MOST_KEPT = 4096
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(_MOST_KEPT)
def require_checks(number: int, test: str, preamble: str) -> None:
    """Raises ValueError where test `number` is no Python, where nothing in it can fail for what the solution does, and
    where it has functions that only pytest could call."""
    try:
        tree, before = ast.parse(test), ast.parse(preamble)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"test {number} or its preamble cannot be read as Python: {error}: {test!r:.100}") from error
    libraries = _imported(tree) | _imported(before)
    if not any(_is_check(node, libraries) for node in _reached(tree, before)):
        raise ValueError(f"test {number} tests nothing: it asserts nothing of what the solution does: {test!r:.100}")
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    for name, fixtures in _test_functions(tree.body):
        if fixtures and name not in called:
            raise ValueError(
                f"test {number}: nothing gives {name} its {', '.join(fixtures)}: pytest's fixtures are not supported"
            )


def require_modules(tests: Sequence[str], preamble: str, modules: Sequence[str]) -> None:
    """Raises ValueError where a test, or the preamble, begins with an import of what is neither Python's nor in
    `modules`: then no solution would pass."""
    there = {*sys.stdlib_module_names, *modules, "solution"}
    for number, test in enumerate(tests, 1):
        for name in sorted(_needed(test) | _needed(preamble)):
            if name not in there:
                raise ValueError(f"test {number} imports {name}, which the sandbox has not; name it in `packages`")


@lru_cache(_MOST_KEPT)
def _needed(source: str) -> frozenset[str]:
    """The modules that Python source imports whatever happens, without the part behind a dot."""
    names = set[str]()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return frozenset(name.partition(".")[0] for name in names)


def _imported(tree: ast.Module) -> set[str]:
    """The names under which the test has what it imports from elsewhere than the solution."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    aliases = [alias for node in imports if getattr(node, "module", None) != "solution" for alias in node.names]
    return {alias.asname or alias.name for alias in aliases}


def _reached(tree: ast.Module, before: ast.Module) -> Iterator[ast.AST]:
    """What is in the test, and in functions of the preamble that it names."""
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    yield from ast.walk(tree)
    for node in before.body:
        if isinstance(node, _Function | ast.ClassDef) and node.name in named:
            yield from ast.walk(node)


def _is_check(node: ast.AST, libraries: Collection[str]) -> bool:
    """An assertion about more than constants, something raised (`assert False`, too), or a call of a library's
    assertion."""
    if isinstance(node, ast.Assert):
        if isinstance(node.test, ast.Constant):
            return not node.test.value
        return any(isinstance(inside, ast.Name) for inside in ast.walk(node.test))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return bool(_RAISES.match(node.func.attr))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in libraries and bool(_RAISES.match(node.func.id))
    return isinstance(node, ast.Raise)


def _test_functions(body: Sequence[ast.stmt], bound: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Name of each that pytest would call, and its parameters that neither a default nor `parametrize` gives a value,
    without the first `bound` ones of methods."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _test_functions(node.body, 1)
        elif isinstance(node, _Function) and node.name.startswith("test"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            names = _needed_arguments(node.args)[0 if "staticmethod" in decorators else bound :]
            values = " ".join(decorators)
            yield node.name, [name for name in names if not re.search(rf"parametrize.*\b{name}\b", values)]


def _needed_arguments(given: ast.arguments) -> list[str]:
    names = [argument.arg for argument in [*given.posonlyargs, *given.args]]
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return names[: len(names) - len(given.defaults)] + [a.arg for a, default in named if default is None]
