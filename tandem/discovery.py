"""What the files of a folder define: a new algorithm, loss or tracker is a file in its folder, and in no list."""

import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


@cache
def modules_in(package: str) -> list[ModuleType]:
    """Every module of a package, imported, in the order of their names."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return [importlib.import_module(f"{package}.{module.name}") for module in found]


def classes_of(module: ModuleType, kind: type[T]) -> list[type[T]]:
    """The classes of `kind` that a module defines itself; what it imports does not count."""
    classes = (value for value in vars(module).values() if isinstance(value, type))
    return [found for found in classes if issubclass(found, kind) and found.__module__ == module.__name__]


def class_named(package: str, name: str, kind: type[T]) -> type[T]:
    """The one class of `kind` in the file that has the name."""
    module = importlib.import_module(f"{package}.{name}")
    found = classes_of(module, kind)
    assert len(found) == 1, f"{module.__file__} must define one {kind.__name__}, not {len(found)}"
    return found[0]
