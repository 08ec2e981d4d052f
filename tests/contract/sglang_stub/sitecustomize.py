"""What SGLang wants of packages that are compiled for CUDA: names to import, no kernels. For its processes in tests.

Python imports this at its start, where the folder is on PYTHONPATH. `sgl_kernel` becomes a module of classes that
raise when they are called; of torchvision, whose build for CUDA does not load, two operators are declared.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Absent(type):
    def __getattr__(cls, name: str) -> Any:
        return _absent(name)

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise RuntimeError(f"the kernel {cls.__name__} is not here")


def _absent(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _absent(name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self._declared: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision" and self._declared is None:
            self._declare()
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "sgl_kernel" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...

    def _declare(self) -> None:
        import torch

        self._declared = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            self._declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Finder())
