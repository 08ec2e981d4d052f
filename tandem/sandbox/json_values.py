"""Values between the process of a solution and that of its test: as JSON, which can say nothing but data.

Data of Python's own types, of numpy and of pandas arrives as an equal value of the same type. Every other object stays
where it is and arrives as a number, to which `proxies.py` gives a meaning.

This file is sent into the sandbox as text; what it imports must be there.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import json
import os
import sys
from collections.abc import Callable
from typing import Any

DIGITS = 16
"""The digits of the length before a message."""
LARGEST_INT = 1 << 62
"""Larger ones are sent in hexadecimal, which takes no time that grows with their square."""


def _items(value: Any) -> list[list[Any]]:
    return [list(item) for item in value.items()]


def _bounds(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


DATA: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: ("tuple", list, tuple),
    set: ("set", list, set),
    frozenset: ("frozenset", list, frozenset),
    dict: ("dict", _items, dict),
    collections.OrderedDict: ("OrderedDict", _items, collections.OrderedDict),
    collections.defaultdict: ("defaultdict", _items, lambda items: collections.defaultdict(None, items)),
    collections.Counter: ("Counter", _items, lambda items: collections.Counter(dict(items))),
    collections.deque: ("deque", lambda value: [list(value), value.maxlen], lambda parts: collections.deque(*parts)),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    bytearray: ("bytearray", bytearray.hex, bytearray.fromhex),
    complex: ("complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    range: ("range", _bounds, lambda parts: range(*parts)),
    slice: ("slice", _bounds, lambda parts: slice(*parts)),
    decimal.Decimal: ("Decimal", str, decimal.Decimal),
    fractions.Fraction: ("Fraction", str, fractions.Fraction),
    datetime.datetime: ("datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("time", datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}
"""A type -> its tag, what it is taken apart into, and how it is put together again."""
TOGETHER = {tag: together for tag, _, together in DATA.values()}


def pack(value: Any, keep: Callable[[Any], Any]) -> Any:
    """What stands for a value in JSON. For an object that is no data that is what `keep` says of it, `{tag: parts}`."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if abs(value) < LARGEST_INT else {"int": hex(value)}
    if kind is list:
        return [pack(item, keep) for item in value]
    if kind in DATA:
        tag, apart, _ = DATA[kind]
        return {tag: pack(apart(value), keep)}
    if isinstance(value, type) and vars(builtins).get(value.__name__) is value:
        return {"type": value.__name__}
    if isinstance(value, tuple) and "_fields" in vars(kind):
        return {"namedtuple": [kind.__name__, list(vars(kind)["_fields"]), pack(list(value), keep)]}
    found = _array_parts(value, kind) or _table_parts(value, kind)
    return {found[0]: pack(found[1], keep)} if found else keep(value)


def unpack(packed: Any, find: Callable[[str, Any], Any]) -> Any:
    """The value that `pack` packed; `find` gives the object that a tag and parts from `keep` stand for."""
    if isinstance(packed, list):
        return [unpack(item, find) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((tag, parts),) = packed.items()
    if tag in TOGETHER:
        return TOGETHER[tag](unpack(parts, find))
    if tag == "int":
        return int(parts, 16)
    if tag == "type":
        return _builtin_type(parts)
    if tag == "namedtuple":
        name, fields, values = parts
        return collections.namedtuple(name, fields)(*unpack(values, find))
    if tag in ("array", "scalar", "objects"):
        return _array(tag, unpack(parts, find))
    if tag in ("Index", "Series", "DataFrame"):
        return _table(tag, unpack(parts, find))
    return find(tag, parts)


def is_changeable(value: Any) -> bool:
    """A function may give it another content, which `pack` shows."""
    return type(value) in (list, dict, set, bytearray) or type(value).__module__ == "numpy"


def framed(message: Any) -> str:
    """A message as it crosses: its length in digits, and ASCII."""
    text = json.dumps(message)
    return f"{len(text):0{DIGITS}}{text}"


def send(descriptor: int, message: Any) -> None:
    send_frame(descriptor, framed(message).encode())


def send_frame(descriptor: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def receive(descriptor: int) -> Any:
    """The next message. Raises EOFError where the other side has ended."""
    return json.loads(receive_frame(descriptor)[DIGITS:])


def receive_frame(descriptor: int) -> bytearray:
    """The next message as it crosses. There is no other copy of it in this process, so that it can be overwritten."""
    header = bytearray(DIGITS)
    _fill(descriptor, memoryview(header))
    data = header + bytearray(int(header))
    _fill(descriptor, memoryview(data)[DIGITS:])
    return data


def _fill(descriptor: int, data: memoryview) -> None:
    read = 0
    while read < len(data):
        more = os.readv(descriptor, [data[read:]])
        if not more:
            raise EOFError("the process at the other end has ended")
        read += more


def _builtin_type(name: str) -> type:
    kind = vars(builtins)[name]
    if name.startswith("_") or not isinstance(kind, type):
        raise TypeError(f"{name} is no type of Python's")
    return kind


def _array_parts(value: Any, kind: type) -> tuple[str, Any] | None:
    """numpy's arrays and scalars, where a program has imported numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (kind is numpy.ndarray or issubclass(kind, numpy.generic)):
        return None
    if value.dtype.kind not in "biufcmMSU":
        return ("objects", [list(value.shape), value.ravel().tolist()]) if value.dtype.kind == "O" else None
    return "array" if kind is numpy.ndarray else "scalar", [value.dtype.str, list(value.shape), value.tobytes().hex()]


def _array(tag: str, parts: list[Any]) -> Any:
    import numpy

    if tag == "objects":
        shape, items = parts
        array = numpy.empty(len(items), object)
        array[:] = items
        return array.reshape(shape)
    name, shape, data = parts
    array = numpy.frombuffer(bytearray.fromhex(data), numpy.dtype(name)).reshape(shape)
    return array if tag == "array" else array[()]


def _table_parts(value: Any, kind: type) -> tuple[str, Any] | None:
    """pandas's columns and tables, where a program has imported pandas; their labels as indices of one level."""
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return None
    if isinstance(value, pandas.Index):
        return "Index", [str(value.dtype), _column(value), value.name]
    if kind is pandas.Series:
        return "Series", [str(value.dtype), _column(value), value.index, value.name]
    if kind is pandas.DataFrame:
        return "DataFrame", [[value.iloc[:, i] for i in range(value.shape[1])], value.columns, value.index]
    return None


def _column(values: Any) -> Any:
    """The values as an array, else as a list in which none is of a type of pandas."""
    import numpy
    import pandas  # pyright: ignore[reportMissingImports] - it is in the sandbox, where a run asks for it

    if isinstance(values.dtype, numpy.dtype) and values.dtype.kind != "O":
        return values.to_numpy()
    listed = ((value.isoformat() if isinstance(value, pandas.Timestamp) else value) for value in values.tolist())
    return [None if value is pandas.NA or value is pandas.NaT else value for value in listed]


def _table(tag: str, parts: list[Any]) -> Any:
    import pandas  # pyright: ignore[reportMissingImports] - it is in the sandbox, where a run asks for it

    if tag == "Index":
        dtype, values, name = parts
        return pandas.Index(values, dtype=dtype, name=name)
    if tag == "Series":
        dtype, values, index, name = parts
        return pandas.Series(values, index=index, dtype=dtype, name=name)
    columns, names, index = parts
    table = pandas.DataFrame(dict(enumerate(columns)), index=index)
    table.columns = names
    return table
