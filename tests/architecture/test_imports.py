"""The order of imports, one owner of each heavy package, and what must stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tandem
from tandem.config.sections import FoundIn
from tandem.discovery import classes_of, modules_in
from tandem.tracking.base import Tracker

PACKAGE = Path(__file__).parents[2] / "tandem"
FOUNDATION, MODELS, STAGE, SERVING, WORKERS, CONTROLLER, CLUSTER, JOBS, COMMANDS = range(9)
LAYERS = {
    **dict.fromkeys(("types", "errors", "files", "http", "signals", "discovery", "config", "sandbox"), FOUNDATION),
    **dict.fromkeys(("activity", "regions", "pictures", "hub", "stored", "model_files", "output", "exits"), FOUNDATION),
    **dict.fromkeys(("models", "search"), MODELS),
    **dict.fromkeys(
        ("data", "rollout", "reward", "algorithms", "batching", "training", "weights", "generation"), STAGE
    ),
    **dict.fromkeys(("checkpoint", "tracking", "evaluation"), STAGE),
    **dict.fromkeys(("serving", "planning", "importing"), SERVING),
    "workers": WORKERS,
    "controller": CONTROLLER,
    **dict.fromkeys(("cluster", "simulation"), CLUSTER),
    "jobs": JOBS,
    **dict.fromkeys(("cli", "__main__", "commands"), COMMANDS),
}
MAY_TOUCH: set[tuple[str, str]] = {("generation", "weights")}
"""Stages that meet: engines in processes of their own take weights as `weights/` sends them."""
OWNERS: dict[str, str | tuple[str, ...]] = {
    "peft": "models/lora.py",
    "vllm": "generation/vllm.py",
    "sglang": "generation/sglang.py",
    "starlette": "serving/",
    "uvicorn": ("serving/server.py", "serving/connections.py"),
    "megatron": "training/megatron/",
    "mbridge": "training/megatron/bridge_model.py",
    "ray": "cluster/ray",
    "mcp": ("rollout/tools/mcp_connection.py", "serving/search_server.py"),  # the client; the server
    "mcp_types": "rollout/tools/mcp",
    "httpx2": "rollout/tools/mcp_connection.py",
    "bm25s": "search/words.py",
    "gymnasium": "rollout/environments/adapters/gymnasium.py",
    "textarena": "rollout/environments/adapters/textarena.py",
    "reasoning_gym": "rollout/environments/adapters/reasoning_gym.py",
    "websockets": "rollout/environments/openenv.py",
    "fsspec": "checkpoint/remote.py",
    "mpmath": "reward/rules/math_",
    "lm_eval": "reward/rules/ifeval.py",
    "PIL": "pictures/",
}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""}
            if node.module == "tandem":
                found |= {f"tandem.{alias.name}" for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way_and_stages_meet_only_in_types(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in LAYERS, f"{part} has no place in the import order; give it one"
    for name in imports_of(path):
        pieces = name.split(".")
        if pieces[0] != "tandem" or len(pieces) < 2 or pieces[1] == "__version__" or pieces[1] == part:
            continue
        other = pieces[1]
        assert LAYERS[other] <= LAYERS[part], f"{part} imports {other}, which comes after it"
        if LAYERS[part] == LAYERS[other] == STAGE:
            assert (part, other) in MAY_TOUCH, f"the stages {part} and {other} must meet in tandem.types"


def test_planning_runs_nothing_but_in_its_trace() -> None:
    for path in (PACKAGE / "planning").glob("*.py"):
        parts = {name.split(".")[1] for name in imports_of(path) if name.startswith("tandem.")}
        own = {"planning", "tracking", "algorithms"}  # what runs have measured; which signals a step needs
        assert all(part in own or LAYERS[part] == FOUNDATION for part in parts), path


def test_each_heavy_package_has_one_owner() -> None:
    kinds = (kind for module in modules_in("tandem.tracking.trackers") for kind in classes_of(module, Tracker))
    of_trackers = {str(kind.package): f"{kind.__module__.partition('.')[2].replace('.', '/')}.py" for kind in kinds}
    owners: dict[str, str | tuple[str, ...]] = {**OWNERS, **of_trackers}
    assert owners["tensorboard"] == "tracking/trackers/tensorboard.py"
    for path in FILES:
        for name in imports_of(path):
            package = name.split(".")[0]
            if package in owners:
                owner = owners[package]
                assert str(path.relative_to(PACKAGE)).startswith(owner), f"{path} imports {package}"


FOUND = [
    *("tandem.algorithms.builtin", "tandem.tracking.trackers"),
    *("tandem.data.samplers", "tandem.rollout.tools.builtin", "tandem.training.optimizers"),
]
"""Their files are read with every configuration."""
LIGHT = [
    "tandem",
    "tandem.algorithms",
    "tandem.planning.command",
    "tandem.types",
    "tandem.config",
    "tandem.cli",
    "tandem.reward.workers",
    "tandem.config.tree",
    *FOUND,
]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_no_torch(module: str) -> None:
    code = f"import {module}, sys; print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


SIMULATED = [
    *("simulate", "recipes/sort4_grpo.yaml", "--staleness", "0,1", "--steps", "8", "--train-s", "1"),
    *("--iteration-ms", "8", "--response-tokens", "4", "placement.pools={a: [1], g: [1]}"),
    "placement.roles={rollout: g}",
]


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ("torch", "transformers", "pyarrow", "numpy", "pydantic", "tandem.config.tree")),
        (SIMULATED, ("torch", "transformers")),
    ],
    ids=["help", "simulate"],
)
def test_commands_that_compute_nothing_import_no_torch(arguments: list[str], absent: tuple[str, ...]) -> None:
    """Which takes four CPU-seconds; and the first needs none of what reads a configuration."""
    code = "import sys; from tandem.cli import main; status = main(sys.argv[1:]); print(sorted(sys.modules), status)"
    command = [sys.executable, "-c", code, *arguments]
    *_, printed = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    ).stdout.splitlines()
    assert printed.endswith("] 0")
    assert [name for name in absent if f"'{name}'" in printed] == []


def test_no_configuration_is_compiled_before_it_is_read() -> None:
    """All of them take as long as everything else that the command line imports."""
    code = "import tandem.cli; from tandem.config.tree import ModelsConfig as one; print(one.__pydantic_complete__)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"


@pytest.mark.parametrize("folder", FOUND)
def test_what_is_found_needs_no_torch_and_no_tree(folder: str) -> None:
    """A file imported first finds everything it needs, and the tree finds it afterwards."""
    for path in sorted((PACKAGE.parent / folder.replace(".", "/")).glob("*.py")):
        assert not {name for name in imports_of(path) if name.startswith(("tandem.config.tree", "tandem.config.load"))}


@pytest.mark.parametrize(
    ("folder", "base", "method"),
    [
        ("tandem.rollout.tools.builtin", "tandem.config.tools:ToolsConfig", "tool_sets"),
        ("tandem.data.samplers", "tandem.config.sampler:SamplerKind", "make"),
    ],
)
def test_every_file_of_a_folder_has_a_section_that_makes_what_it_describes(folder: str, base: str, method: str) -> None:
    module, _, name = base.partition(":")
    sections = FoundIn(folder).sections(getattr(import_module(module), name))
    names = {path.stem for path in (PACKAGE.parent / folder.replace(".", "/")).glob("*.py")} - {"__init__"}
    assert sections.keys() == names and all(callable(getattr(one, method, None)) for one in sections.values())


def test_exported_names_exist_and_are_sorted() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
                names = ast.literal_eval(node.value)
                module = ".".join(["tandem", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
                    ".__init__"
                )
                loaded = __import__(module, fromlist=names)
                assert [name for name in names if not hasattr(loaded, name)] == []
                assert sorted(names, key=str.swapcase) == names or sorted(names) == names


def test_the_public_names_are_listed_once_in_each_place() -> None:
    """`tandem/__init__.py` names them for type checkers, for `import *`, and for the import when one is asked for."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        (alias.name, str(node.module).removeprefix("tandem."))
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    exports = {(name, module) for module, names in tandem._EXPORTS.items() for name in names}
    assert typed == exports
    assert tandem.__all__ == sorted(name for name, _ in exports)
    assert all(getattr(tandem, name) is not None for name in tandem.__all__)


def test_examples_that_teach_the_package_need_nothing_but_its_public_names() -> None:
    for example in ("best_of_n.py", "ray_ppo_trainer.py"):
        imported = {name for name in imports_of(PACKAGE.parent / "examples" / example) if name.startswith("tandem.")}
        assert imported <= {f"tandem.{name}" for name in tandem.__all__}, example
