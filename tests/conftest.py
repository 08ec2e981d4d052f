"""What several test files share: the sort4 task, made once a session."""

from __future__ import annotations

import gc
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.seconds import Seconds, scheduler_by_file, slowest_first

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[1]


def load_file(path: Path) -> ModuleType:
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-seconds", action="store_true", help="write tests/seconds.txt anew, after a whole run")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; what tests start would ignore it, too
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds(config.getoption("--keep-seconds")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        slowest_first(items)


def pytest_collection_finish() -> None:
    """A run looks for cycles when it begins: what a million objects of libraries and tests are is known to stay."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduler_by_file(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[Cluster]:
    """Two nodes on this machine, which this process has joined: RayCluster() uses them."""
    import ray
    from ray.cluster_utils import Cluster

    settings = {"health_check_period_ms": 1000}  # a dead node is noticed in 5 s, not in 15
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": settings}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(num_cpus=1)
    nodes.connect()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="session")
def sort4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model/` (untrained), `sft.jsonl`, `train.jsonl` and `val.jsonl`: the first rows of the task's,
    for every run reads all that there are."""
    directory = tmp_path_factory.mktemp("sort4")
    load_file(ROOT / "examples/sort4/task.py").make(directory, seed=0)
    for name, rows in (("sft", 2048), ("train", 1024)):
        path = directory / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    return directory


@pytest.fixture
def grpo_config(sort4: Path, tmp_path: Path) -> Path:
    """recipes/sort4_grpo.yaml on the untrained model: three steps into `tmp_path / "run"`."""
    tree = yaml.safe_load((ROOT / "recipes/sort4_grpo.yaml").read_text())
    tree["model"]["path"] = str(sort4 / "model")
    tree["data"] |= {"train_files": [str(sort4 / "train.jsonl")], "val_files": [str(sort4 / "val.jsonl")]}
    tree["data"] |= {"prompts_per_step": 4}
    tree["reward"] = {"functions": [f"{ROOT}/examples/sort4/reward.py:compute_score"]}
    tree["trainer"] = {"run_dir": str(tmp_path / "run"), "steps": 3}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
