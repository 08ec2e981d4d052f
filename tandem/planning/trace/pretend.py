"""Fake CUDA tensors without a GPU, on a torch for CUDA or for CPUs alone. For a process that does nothing else: it
cannot be undone."""

import ctypes
import os
import subprocess
from contextlib import nullcontext
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

_FUSED = ("silu_backward", "_fused_rms_norm")
"""Operations that are one kernel on a GPU. A torch that lacks it would compute them in parts, and these take memory."""
_LIBRARIES: list[Any] = []
"""They forget their kernels when they go."""


def compiler() -> str | None:
    """The C++ compiler that `pretend` needs, if there is one."""
    return which("g++") or which("c++")


def pretend() -> None:
    """Call it before torch is imported."""
    library = ctypes.CDLL(str(_library()), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    import torch

    library.pretend()  # a torch for CUDA has registered a guard of its own, which asks for a driver
    from torch._subclasses import fake_tensor

    stubs: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda _: nullcontext(),
        "current_device": lambda: 0,
        "device_count": lambda: 8,
        "set_device": lambda _: None,
        "synchronize": lambda *_: None,
        "is_available": lambda: True,
        "get_device_capability": lambda *_: (9, 0),
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    lacking = (name for name in _FUSED if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"))
    for name in lacking:
        _LIBRARIES.append(operators := torch.library.Library("aten", "IMPL"))
        operators.impl(name, _never_run, "CUDA")
    setattr(fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda _: True))  # noqa: B010 - or it asks for a
    setattr(fake_tensor, "init_gpu_context", lambda _: None)  # noqa: B010 - driver
    setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010 - fake tensors cannot be pinned


def _never_run(*_: Any) -> None:
    raise AssertionError("fake tensors know the result's shape and compute nothing")


def _library() -> Path:
    """Compiled in some seconds at the first use with this torch, whose directory it remembers."""
    torch = Path((find_spec("torch") or nullcontext()).submodule_search_locations[0])  # pyright: ignore
    source = Path(__file__).with_name("pretend.cpp")
    made_of = sha256(f"{torch}\n{version('torch')}\n{source.read_text()}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
    built = cache / f"pretend-{made_of}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        command = [compiler() or "g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include"]
        command += [str(source), f"-L{torch}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, f"-Wl,-rpath,{torch}/lib", "-o", str(unfinished)], check=True)
        unfinished.replace(built)
    return built


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, _: Any = None) -> "_Event":
        return self

    def wait(self, _: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True
