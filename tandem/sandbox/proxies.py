"""The solution as its test sees it from another process: data crosses, other objects do what they are asked there.

    consumes       what the test does with names of the solution and with objects that it got from there
    produces       data, and a `RemoteObject` for every object that is no data
    waits for      the other process's answer; meanwhile it answers what that asks back, as by calling a test's lambda
    unblocked by   an answer, or the end of the other process, which raises EOFError

What the solution's process sends is data and never code, and its objects do not see what they are compared with: a
`RemoteObject` compares and reckons with a value of the test as the data that it holds, or not at all.

This file is sent into the sandbox as text, behind `json_values.py`.
"""

import builtins
import contextlib
import importlib
import io
import itertools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tandem.sandbox.json_values import is_changeable, pack, receive, send, unpack

MOST_AT_ONCE = 256
"""Items of an iterator that cross together."""
CONVERSIONS = (
    "len", "bool", "str", "repr", "format", "hash", "int", "float", "complex", "abs", "round", "iter", "reversed"
)  # fmt: skip
UNARY = {name: getattr(builtins, name) for name in CONVERSIONS} | {
    name: getattr(operator, name) for name in ("neg", "pos", "invert", "index")
}
ARITHMETIC = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"
)  # fmt: skip
BINARY = {name: getattr(operator, f"__{name}__") for name in ("lt", "le", "gt", "ge", *ARITHMETIC)}
ATTRIBUTES = ("__name__", "__qualname__", "__doc__", "__dict__", "__annotations__", "__enter__", "__exit__")
"""Those with underscores that are asked for; the others belong to protocols that a RemoteObject does not follow."""
BASES: tuple[Any, ...] = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
"""Types of data that others are derived from."""


ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)
"""Raised by a call within `map` or `zip`, they would end the loop over it, and with it the test, without an error."""


class SolutionError(Exception):
    """What the solution raised, where that is no Exception, would end a loop of the test, or cannot be made again."""


class AskingEnd:
    """The test's end of the connection."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.was_asked = False
        """Whether the test has asked for more of the solution than where its functions and classes are."""
        self._known: dict[int, Any] = {}
        """The solution's objects that crossed, by number."""
        self._numbers: dict[int, int] = {}
        """The number of what stands for them here, by its `id`."""
        self._lent: list[Any] = []
        """The test's functions and iterators that crossed."""

    def wait_until_loaded(self) -> None:
        """Raises what the solution raised when it was run."""
        self._result()

    def ask(self, question: str, *values: Any) -> Any:
        self.was_asked |= question not in ("origin", "name")
        send(self._descriptor, {"ask": question, "values": pack(list(values), self._keep)})
        result = self._result()
        self.was_asked |= question == "name" and not isinstance(result, RemoteObject)
        return result

    def call(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What a function of the solution returns. What it did to the arguments is done to them here, too."""
        result, changes, printed = self.ask("call", function, list(arguments), named)
        given = [*arguments, *named.values()]
        for position, value in changes:
            _become(given[position], value)
        sys.stdout.write(printed)
        return result

    def _result(self) -> Any:
        while True:
            message = receive(self._descriptor)
            if "result" in message:
                return unpack(message["result"], self._find)
            if "raised" in message:
                raise self._error(*unpack(message["raised"], self._find))
            self._answer(message["ask"], message["values"])

    def _answer(self, question: str, values: Any) -> None:
        """The solution calls a function that the test gave it, or takes the next item, if any, of an iterator."""
        try:
            reference, arguments, named = values
            lent, arguments, named = self._lent[reference["lent"]], *unpack([arguments, named], self._find)
            result = lent(*arguments, **named) if question == "call" else list(itertools.islice(lent, 1))
            send(self._descriptor, {"result": pack(result, self._keep)})
        except Exception as error:  # noqa: BLE001 - a test's function may raise anything; the solution may catch it
            send(self._descriptor, {"raised": [{"type": "RuntimeError"}, [repr(error)]]})

    def ask_for_name(self, question: str, *values: Any) -> Any:
        """What the solution has under a name. Raises SolutionError where the test's own assertions could be caught as
        that."""
        value = self.ask(question, *values)
        kinds = value if isinstance(value, tuple) else (value,)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseException) and issubclass(AssertionError, kind):
                raise SolutionError(f"{values[-1]} is {kind.__name__}, which would catch what the test asserts")
        return value

    def _error(self, kind: Any, arguments: list[Any], attributes: Mapping[str, Any] | None = None) -> Exception:
        try:
            if issubclass(kind, Exception) and not issubclass(kind, ENDS_OF_LOOPS):
                error = kind(*arguments)
                vars(error).update((name, value) for name, value in (attributes or {}).items() if name[:2] != "__")
                return error
        except TypeError:  # no class, or one that is made of other arguments
            pass
        return SolutionError(f"{getattr(kind, '__name__', kind)}: {', '.join(map(str, arguments))}")

    def _keep(self, value: Any) -> Any:
        """How a value that is no data goes to the solution. Raises TypeError where it cannot."""
        if id(value) in self._numbers:
            return {"yours": self._numbers[id(value)]}
        if not callable(value) and not isinstance(value, Iterator):
            raise TypeError(
                f"a test gave the solution a {type(value).__name__}; only data, functions and iterators cross"
            )
        self._lent.append(value)
        return {"lent": len(self._lent) - 1}

    def _find(self, tag: str, parts: Any) -> Any:
        """What a value of the solution that is no data becomes here."""
        if tag == "lent":
            return self._lent[parts]
        number, name = parts["number"], str(parts["type"])
        if number not in self._known:
            self._known[number] = self._made(tag, number, name, parts)
            self._numbers[id(self._known[number])] = number
        return self._known[number]

    def _made(self, tag: str, number: int, name: str, parts: Any) -> Any:
        if tag == "exception":
            base = unpack(parts["base"], self._find)
            return type(name, (base if issubclass(base, Exception) else SolutionError,), {})
        remote = RemoteObject(self, number, name)
        self._numbers[id(remote)] = number
        self._known[~number] = remote  # which keeps its `id` from another object
        return _awaited(self, remote) if tag == "coroutine" else remote


class RemoteObject:
    """An object in the solution's process."""

    __slots__ = ("__end", "__kind", "__number")

    def __init__(self, end: AskingEnd, number: int, kind: str) -> None:
        for name, value in (("__end", end), ("__number", number), ("__kind", kind)):
            object.__setattr__(self, f"_RemoteObject{name}", value)

    def __ask(self, question: str, *values: Any) -> Any:
        return self.__end.ask(question, self, *values)

    def __operate(self, operation: str, other: Any, *, reflected: bool = False) -> Any:
        """With another object of the solution there; with a value of the test here, if this one holds data."""
        if isinstance(other, RemoteObject):
            return self.__end.ask("binary", operation, *((other, self) if reflected else (self, other)))
        for data in self.__ask("data"):
            return BINARY[operation](*((other, data) if reflected else (data, other)))
        return NotImplemented

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__end.call(self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ATTRIBUTES:
            raise AttributeError(f"{self.__kind!r} object of the solution: {name} is not asked for")
        return self.__end.ask_for_name("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self.__ask("delattr", name)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__ask("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self.__ask("delitem", key)

    def __iter__(self) -> Iterator[Any]:
        iterator, count = self.__ask("unary", "iter"), 1
        while True:
            items, is_over = self.__end.ask("items", iterator, count)
            yield from items
            if is_over:
                return
            count = min(2 * count, MOST_AT_ONCE)

    def __next__(self) -> Any:
        for item in self.__ask("items", 1)[0]:
            return item
        raise StopIteration

    def __contains__(self, item: Any) -> bool:
        return any(own is item or own == item for own in self)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, RemoteObject):
            return self is other or self.__end.ask("equal", self, other) is True
        return next((data == other for data in self.__ask("data")), NotImplemented)

    def __enter__(self) -> Any:
        return self.__ask("enter")

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """The solution is told, but never asked whether the error ends here: it may be the test's assertion."""
        told = kind if kind is None or kind.__module__ == "builtins" else Exception
        self.__ask("exit", told, [] if error is None else [str(error)])

    def __instancecheck__(self, instance: Any) -> bool:
        return self.__end.ask("isinstance", instance, self) is True


def _unary(operation: str) -> Callable[..., Any]:
    return lambda self, *more: self._RemoteObject__ask("unary", operation, *more)


def _binary(operation: str, reflected: bool) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._RemoteObject__operate(operation, other, reflected=reflected)


for _name in UNARY.keys() - {"iter"}:
    setattr(RemoteObject, f"__{_name}__", _unary(_name))
for _name in BINARY:
    setattr(RemoteObject, f"__{_name}__", _binary(_name, reflected=False))
for _name in ARITHMETIC:
    setattr(RemoteObject, f"__r{_name}__", _binary(_name, reflected=True))


class Names(dict[str, Any]):
    """The global names of a test: its own, then Python's, then those of the solution.

    Where the test asks for other names, too, `abs` and `math` are Python's, whatever the solution calls so. What the
    solution has imported from the standard library or from `packages` is imported here.
    """

    def __init__(self, end: AskingEnd, packages: Collection[str]) -> None:
        super().__init__(__name__="test")
        self.pythons_come_first = True
        self.called: Collection[str] = ()
        """What the test calls as a function, so that it is no module of Python's."""
        self._end = end
        self._importable = {*sys.stdlib_module_names, *packages}

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (hasattr(builtins, name) and self.pythons_come_first):
            raise KeyError(name)
        module, attribute = self._end.ask("origin", name)
        if module.partition(".")[0] in self._importable and attribute in ("", name):
            value = importlib.import_module(module)
            value = getattr(value, attribute) if attribute else value
        elif name in self._importable and name not in self.called and self.pythons_come_first:
            raise KeyError(name)
        else:
            value = self._end.ask_for_name("name", name)
        self[name] = value
        return value


class SolutionModule(types.ModuleType):
    """`import solution`, in a test."""

    def __init__(self, end: AskingEnd) -> None:
        super().__init__("solution")
        self._end = end

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._end.ask_for_name("name", name)
        except KeyError:
            raise AttributeError(name) from None


def _become(value: Any, other: Any) -> None:
    """Give a changeable value the content of another one."""
    if isinstance(value, (dict, set)):
        value.clear()
        value.update(other)
    elif isinstance(value, (list, bytearray)):
        value[:] = other
    else:
        value[...] = other


async def _awaited(end: AskingEnd, coroutine: RemoteObject) -> Any:
    return end.ask("await", coroutine)


class AnsweringEnd:
    """The solution's end of the connection: it does what the test asks, until the test's process has ended."""

    def __init__(self, descriptor: int, names: dict[str, Any]) -> None:
        self._descriptor = descriptor
        self._names = names
        self._objects: list[Any] = []
        """Those that crossed; a number is a place in here."""
        self._numbers: dict[int, int] = {}
        """Their numbers, by `id`."""
        self._delayed: dict[int, BaseException] = {}
        """What iterators raised behind items that crossed, by `id`."""

    def serve(self) -> None:
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                self._answer(receive(self._descriptor))

    def report(self, error: BaseException | None) -> None:
        """Tell the test that the solution was run, or what it raised."""
        send(self._descriptor, {"result": None} if error is None else self._raised(error))

    def ask(self, question: str, *values: Any) -> Any:
        """Ask the test: to call what it lent, or for its next item."""
        send(self._descriptor, {"ask": question, "values": pack(list(values), self._keep)})
        while "ask" in (message := receive(self._descriptor)):
            self._answer(message)
        if "raised" in message:
            raise RuntimeError(*unpack(message["raised"][1], self._find))
        return unpack(message["result"], self._find)

    def _answer(self, message: Any) -> None:
        try:
            values = unpack(message["values"], self._find)
            answer = {"result": pack(getattr(self, f"on_{message['ask']}")(*values), self._keep)}
        except BaseException as error:  # noqa: BLE001 - a solution may raise anything
            answer = self._raised(error)
        send(self._descriptor, answer)

    def _raised(self, error: BaseException) -> Any:
        try:
            return {"raised": pack([type(error), list(error.args), dict(vars(error))], self._keep)}
        except Exception:  # noqa: BLE001 - its arguments may be anything
            return {"raised": [{"type": "RuntimeError"}, [str(error)]]}

    def _keep(self, value: Any) -> Any:
        if isinstance(value, Lent):
            return {"lent": value.number}
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        parts = {"number": number, "type": type(value).__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": {**parts, "type": value.__name__, "base": pack(value.__base__, self._keep)}}
        return {"coroutine" if isinstance(value, types.CoroutineType) else "object": parts}

    def _find(self, tag: str, parts: Any) -> Any:
        return self._objects[parts] if tag == "yours" else Lent(self, parts)

    def on_origin(self, name: str) -> tuple[str, str]:
        """The module that a name was imported from, and what it is there ("": the module); ("", "") of its own."""
        value = self._names[name]
        if isinstance(value, types.ModuleType):
            return value.__name__, ""
        module, attribute = str(getattr(value, "__module__", "")), str(getattr(value, "__name__", ""))
        imported = module != "solution" and getattr(sys.modules.get(module), attribute, None) is value
        return (module, attribute) if imported else ("", "")

    def on_name(self, name: str) -> Any:
        return self._names[name]

    def on_call(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        given = [*arguments, *named.values()]
        changeable = [i for i, value in enumerate(given) if is_changeable(value)]
        before = {i: pack(given[i], self._keep) for i in changeable}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            result = function(*arguments, **named)
        changes = [(i, given[i]) for i in changeable if pack(given[i], self._keep) != before[i]]
        return result, changes, printed.getvalue()

    def on_items(self, iterator: Iterator[Any], count: int) -> tuple[list[Any], bool]:
        """Up to so many next items, and whether there are no more; what it raises behind some comes with the next."""
        if id(iterator) in self._delayed:
            raise self._delayed.pop(id(iterator))
        items: list[Any] = []
        try:
            for _ in range(count):
                items.append(next(iterator))
        except StopIteration:
            return items, True
        except Exception as error:
            if not items:
                raise
            self._delayed[id(iterator)] = error
        return items, False

    def on_data(self, value: Any) -> list[Any]:
        """A value of a class that is derived from one of data, as that."""
        return next(([kind(value)] for kind in BASES if isinstance(value, kind)), [])

    def on_unary(self, value: Any, operation: str, *more: Any) -> Any:
        return UNARY[operation](value, *more)

    def on_binary(self, operation: str, left: Any, right: Any) -> Any:
        return BINARY[operation](left, right)

    def on_enter(self, value: Any) -> Any:
        return type(value).__enter__(value)

    def on_exit(self, value: Any, kind: Any, arguments: list[Any]) -> None:
        type(value).__exit__(value, kind, kind and kind(*arguments), None)

    def on_await(self, coroutine: Any) -> Any:
        import asyncio  # which takes its time

        return asyncio.run(coroutine)

    on_getattr = staticmethod(getattr)
    on_setattr = staticmethod(setattr)
    on_delattr = staticmethod(delattr)
    on_getitem = staticmethod(operator.getitem)
    on_setitem = staticmethod(operator.setitem)
    on_delitem = staticmethod(operator.delitem)
    on_equal = staticmethod(operator.eq)
    on_isinstance = staticmethod(isinstance)


class Lent:
    """A function or an iterator of the test, in the solution's process."""

    def __init__(self, end: AnsweringEnd, number: int) -> None:
        self.end = end
        self.number = number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.end.ask("call", self, list(arguments), named)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for item in self.end.ask("next", self, [], {}):
            return item
        raise StopIteration
