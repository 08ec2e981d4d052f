"""The packages that the checks need beside torch for CUDA, and which of them this Python lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PACKAGE = {
    "transformers": "transformers", "huggingface_hub": "huggingface_hub", "safetensors": "safetensors",
    "numpy": "numpy", "pyarrow": "pyarrow", "pydantic": "pydantic", "pydantic_core": "pydantic_core",
    "annotated-types": "annotated_types", "typing-inspection": "typing_inspection", "PyYAML": "yaml",
    "typer": "typer", "rich": "rich", "fsspec": "fsspec", "pillow": "PIL", "mpmath": "mpmath",
    "cloudpickle": "cloudpickle", "psutil": "psutil",
}  # fmt: skip
_TESTS = {"pytest": "pytest"}
_TRL = {"trl": "trl", "accelerate": "accelerate", "datasets": "datasets", "dill": "dill",
        "multiprocess": "multiprocess", "xxhash": "xxhash", "pandas": "pandas"}  # fmt: skip
NEEDS = {"the package": _PACKAGE, "gpu_tests": _TESTS, "trl_step": _TRL}
"""By what needs them: names of packages, each with that of a module in it."""


def versions() -> dict[str, str]:
    """Those of constraints.txt."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.M)}


def missing() -> dict[str, list[str]]:
    """By what needs them, the packages that cannot be imported here, as pip takes them."""
    known = versions()
    return {
        needing: [f"{name}=={known[name.lower()]}" for name, module in modules.items() if find_spec(module) is None]
        for needing, modules in NEEDS.items()
    }


def wheel_report() -> Iterator[str]:
    """What is missing, and how to fetch it for a machine without a network."""
    found = missing()
    for needing, names in found.items():
        yield f"{needing}: {', '.join(names) or 'nothing is missing here'}"
    if names := [name for own in found.values() for name in own]:
        yield "fetch them where there is a network, for this Python on Linux:"
        platforms = "--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64"
        yield f"    python3 -m pip download --no-deps --only-binary=:all: {platforms} --dest FOLDER {' '.join(names)}"
        yield "and run scripts/gpu --with-wheels FOLDER here"
