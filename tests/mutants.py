"""Modules of the package with one line changed, which a test must notice."""

import sys
from pathlib import Path
from types import ModuleType


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with `new` for `old`, which stands in it once."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, f"{source.count(old)} times in {module.__name__}: {old!r}"
    mutant = ModuleType(f"{module.__name__}_mutant")
    sys.modules[mutant.__name__] = mutant  # dataclasses look for it
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), mutant.__dict__)
    return mutant
