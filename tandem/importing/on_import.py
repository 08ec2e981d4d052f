"""What a Python file does besides defining names when it is imported, by its syntax tree alone."""

import ast
from collections.abc import Iterator, Mapping, Sequence

_ACTS = (
    "train", "evaluate", "predict", "save_model", "push_to_hub", "load_dataset", "load_from_disk", "snapshot_download",
    "parse_args", "parse_known_args", "parse_args_and_config", "parse_args_into_dataclasses", "exit", "system",
)  # fmt: skip
"""Last parts of the names of calls that have no place in a file that is imported."""
_LIGHT = ("Tokenizer", "Processor", "Config")
"""Classes whose `from_pretrained` a reward function may need, and which read small files."""

Functions = Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]


def first_act(module: ast.Module) -> ast.Call | None:
    """The first call that trains, makes a trainer, its configuration, a model or a data set, or reads a command line.

    Bodies of functions count where the file itself calls them; what is below `if __name__ == "__main__":` does not.
    """
    functions: Functions = {
        node.name: node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return _act_in(module.body, functions, frozenset())


def _act_in(nodes: Sequence[ast.AST], functions: Functions, entered: frozenset[str]) -> ast.Call | None:
    for call in (call for node in nodes for call in _calls(node)):
        if _acts(ast.unparse(call.func)):
            return call
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        called = functions.get(name)
        if called and name not in entered and _act_in(called.body, functions, entered | {name}):
            return call
    return None


def _acts(called: str) -> bool:
    owner, _, name = called.rpartition(".")
    maker = owner.rpartition(".")[2]
    if name == "from_pretrained":
        return not maker.endswith(_LIGHT)
    made = name.endswith("Trainer") or (name.endswith("Config") and name[:1].isupper() and name != "LoraConfig")
    return made or name in _ACTS or (maker == "Dataset" and name.startswith("from_"))


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Those that run with the statement or expression itself, in the order of the text."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            inner: Sequence[ast.AST] = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        case ast.Lambda():
            inner = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        case ast.If() if _asks_for_main(node.test):
            inner = node.orelse
        case _:
            inner = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        yield node
    for child in inner:
        yield from _calls(child)


def _asks_for_main(test: ast.expr) -> bool:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return {ast.unparse(left), ast.unparse(right)} == {"__name__", "'__main__'"}
        case _:
            return False
