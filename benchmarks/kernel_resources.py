"""What each Triton kernel takes of a multiprocessor, compiled for the H100 and H200 (sm_90), without a GPU.

The kernels are compiled with the arguments of real models' shapes: registers of a thread, bytes that a thread spills to
local memory, and shared memory of a program. A spill is paid at every launch, and 255 registers are all that there are.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from command_line import parse_arguments
from torch import Tensor

ROWS, PAGE, VOCABULARY = 256, 16, 151_936


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    width: int
    """Of the gate."""


SHAPES = {
    "qwen3-0.6b": Shape(16, 8, 128, 1024, 3072),
    "qwen3-8b": Shape(32, 8, 128, 4096, 12_288),
    "qwen3-32b": Shape(64, 8, 128, 5120, 25_600),
    "llama-3-8b": Shape(32, 8, 128, 4096, 14_336),
    "gemma-3-4b": Shape(8, 4, 256, 2560, 10_240),
}


class Taken(NamedTuple):
    registers: int
    spilled: int
    """Bytes, stores and loads."""
    shared: int
    """Bytes."""


Launch = tuple[Any, dict[str, Any], dict[str, Any]]
"""A kernel, its arguments by name, and options such as `num_warps`."""


@contextmanager
def launches(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Notes the launches of the modules' kernels, which do not run."""
    from triton.runtime.jit import JITFunction

    noted: list[Launch] = []

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self._note

        def _note(self, *given: Any, **named: Any) -> None:
            names = self._kernel.arg_names
            options = {name: named.pop(name) for name in [*named] if name not in names}
            noted.append((self._kernel, {**dict(zip(names, given, strict=False)), **named}, options))

    def launched_by_host(module: ModuleType) -> dict[str, Any]:
        return {name: kernel for name, kernel in vars(module).items() if isinstance(kernel, JITFunction)}

    kernels = [(module, name, kernel) for module in modules for name, kernel in launched_by_host(module).items()]
    for module, name, kernel in kernels:
        setattr(module, name, Noted(kernel))
    try:
        yield noted
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8",
}  # fmt: skip


def compiled(launch: Launch) -> Taken:
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    kernel, arguments, options = launch
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in fixed:
            signature[name] = "constexpr"
        elif isinstance(value, Tensor):
            signature[name], attributes[place,] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {name: arguments[name] for name in fixed}, attributes)
    made = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as directory:
        ptx = Path(directory) / "kernel.ptx"
        ptx.write_text(made.asm["ptx"], encoding="utf-8")
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(*re.findall(r"Used (\d+) registers", said))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return Taken(registers, spilled, made.metadata.shared)


def decoding_of(shape: Shape, rows: int, *, bends: bool) -> None:
    """All launches of a decoded token. `bends`: a window, capped scores and sinks."""
    from tandem.models.kernels import decoding_triton

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    heads, kv_heads, head_dim, hidden, width = shape
    x, norm = empty(rows, hidden), empty(head_dim)
    packed, angles = empty(rows, heads + 2 * kv_heads, head_dim), empty(rows, head_dim // 2)
    position, table = empty(rows, dtype=torch.int64), empty(rows, 256, dtype=torch.int32)
    keys, values = (empty(4096, PAGE, kv_heads, head_dim) for _ in range(2))
    decoding_triton.places(table, position, PAGE)
    decoding_triton.add_and_norm_(x, x, empty(hidden), 1e-6)
    decoding_triton.rotate_and_store_(packed, angles, angles, position, keys, values, norm, norm, 1e-6)
    options = (1024, 50.0, empty(heads)) if bends else (None, None, None)
    decoding_triton.attend_pages(packed[:, :heads], keys, values, table, position, head_dim**-0.5, *options)
    decoding_triton.gated(empty(rows, 2 * width))


def vocabulary_of(tokens: int, words: int) -> None:
    """Choosing tokens, and what training reduces a tile of the output layer to."""
    from tandem.models.kernels import drawing_triton, vocabulary_triton

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    logits = empty(tokens, words, dtype=torch.bfloat16)
    state, never = empty(8, tokens, dtype=torch.int64), empty(3, dtype=torch.int64)
    drawing_triton.choose_(logits, state, empty(tokens, 2, dtype=torch.float64), never)
    tile, place, each = logits[:, :8192], empty(tokens, dtype=torch.int64), empty(tokens)
    vocabulary_triton.add_tile(empty(5, tokens), tile, place, 1.0, 1.0, 30.0)
    vocabulary_triton.gradient_(tile, place, each, each, each, each, each, 1.0, 1.0, 30.0)


def cases(shapes: list[str], rows: list[int]) -> Iterator[tuple[str, Callable[[], None]]]:
    for name in shapes:
        for count in rows:
            yield f"{name}, rows {count}", lambda name=name, count=count: decoding_of(SHAPES[name], count, bends=False)
        yield f"{name}, bends", lambda name=name: decoding_of(SHAPES[name], rows[-1], bends=True)
    yield "vocabulary", lambda: vocabulary_of(ROWS, VOCABULARY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, ROWS])
    arguments = parse_arguments(parser, shapes=["qwen3-0.6b"], rows=[ROWS])
    try:
        import triton  # noqa: F401
    except ImportError:
        print("Triton is not installed: torch's builds for CUDA bring it")
        sys.exit(0)
    from tandem.models.kernels import decoding_triton, drawing_triton, vocabulary_triton

    found: dict[str, dict[str, Taken]] = {}
    for case, launch in cases(arguments.shapes, arguments.rows):
        with launches(decoding_triton, drawing_triton, vocabulary_triton) as noted:
            launch()
        for kernel, given, options in noted:
            taken = compiled((kernel, given, options))
            found.setdefault(kernel.fn.__name__, {})[case] = taken
            print(
                f"{kernel.fn.__name__:18}{case:24}{taken.registers:>5}{taken.spilled:>8}{taken.shared:>9}", flush=True
            )
    print("\n| kernel | registers | bytes spilled | shared memory, bytes |\n| --- | --- | --- | --- |")
    for name, of_cases in found.items():
        columns = [sorted(set(column)) for column in zip(*of_cases.values(), strict=True)]
        ranges = [f"{c[0]:,}" if len(c) == 1 else f"{c[0]:,} to {c[-1]:,}" for c in columns]
        print(f"| `{name}` | {' | '.join(ranges)} |")
    spilling = sorted({name for name, of in found.items() if any(taken.spilled for taken in of.values())})
    print(json.dumps({"benchmark": "kernel_resources", "spilling": spilling, "kernels": len(found)}))


if __name__ == "__main__":
    main()
