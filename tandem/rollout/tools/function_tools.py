"""Tools out of the user's Python: typed functions, and classes whose public methods are tools.

function      called with the arguments of each call
class         one instance a trajectory; `reset(**row)`, `close()` and `get_reward()` are called where it has them
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, SupportsFloat

from pydantic import ConfigDict, PydanticUserError, ValidationError, validate_call

from tandem.errors import UserError
from tandem.files import load_named
from tandem.pictures.sources import IMAGE_PARTS, SOURCES, VIDEO_PART, is_image, not_shown
from tandem.rollout.conversation_images import Content
from tandem.rollout.environment import EnvironmentFailed, ToolSchema
from tandem.rollout.tools.base import CallLimits, ToolError, ToolResult, ToolSession, ToolSet
from tandem.rollout.tools.builtin.function import FunctionToolConfig
from tandem.rollout.users_code import call, exceptions_only
from tandem.types import Prompt

_NO_TOOLS = ("reset", "close", "get_reward")
"""Public methods of a class that the policy does not see."""
_PARTS = {
    "text": ("text",),
    **dict.fromkeys(IMAGE_PARTS, SOURCES),
    VIDEO_PART: ("video", "frames", *SOURCES),
    "audio": ("audio", "data"),
}
"""Type of a content part -> where it has what it shows. Lists of records that have a `type`, too, are JSON."""
_ANY_TYPES = ConfigDict(arbitrary_types_allowed=True)


def function_tools(config: FunctionToolConfig, limits: CallLimits) -> ToolSet:
    """Raises UserError where there is nothing of this name, or no schema can be made of it."""
    found = load_named(config.function, "conversation.environment.tools:")
    if found is None or not callable(found):
        raise UserError(f"conversation.environment.tools: {config.function!r}: there is no such function or class")
    if inspect.isclass(found):
        return ClassTools(found, config, limits)
    if config.arguments:
        raise UserError(
            f"conversation.environment.tools: {config.function!r} is a function, which takes no `arguments`"
        )
    return FunctionTools(found, config, limits)


class FunctionTools:
    """One function."""

    def __init__(self, function: Callable[..., Any], config: FunctionToolConfig, limits: CallLimits) -> None:
        self._schema = _schema(function, config.function)
        self._function = _Called(function, limits, asyncio.Semaphore(config.calls_at_once))

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return [self._schema]

    async def open(self) -> None: ...

    def session(self, prompt: Prompt) -> ToolSession:
        return _FunctionSession(self._function)

    async def close(self) -> None: ...


class _FunctionSession:
    """Functions remember nothing."""

    def __init__(self, function: "_Called") -> None:
        self._function = function

    async def start(self) -> str | None:
        return None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._function(name, arguments)

    async def close(self) -> float | None:
        return None


class ClassTools:
    """The public methods of a class."""

    def __init__(self, kind: type[Any], config: FunctionToolConfig, limits: CallLimits) -> None:
        self._kind = kind
        self._arguments = config.arguments
        self.limits = limits
        self._slots = asyncio.Semaphore(config.calls_at_once)
        methods = [
            (name, method)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name not in _NO_TOOLS
        ]
        if not methods:
            raise UserError(f"conversation.environment.tools: {config.function!r} has no public methods")
        bound = [(name, MethodType(method, object())) for name, method in methods]  # so that there is no `self`
        self._schemas = [_schema(method, f"{config.function}.{name}") for name, method in bound]

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return self._schemas

    async def open(self) -> None: ...

    def session(self, prompt: Prompt) -> ToolSession:
        return _ClassSession(self, prompt)

    async def close(self) -> None: ...

    @property
    def resets(self) -> bool:
        """Whether an instance may say something before the first turn."""
        return hasattr(self._kind, "reset")

    def make(self) -> Any:
        """A fresh instance. Raises EnvironmentFailed."""
        try:
            with exceptions_only():
                return self._kind(**self._arguments)
        except Exception as error:  # the user's code may raise anything
            raise EnvironmentFailed(f"{self._kind.__name__}: {type(error).__name__}: {error}") from error

    def called(self, method: Callable[..., Any]) -> "_Called":
        return _Called(method, self.limits, self._slots)


class _ClassSession:
    """An instance, from `start` on."""

    def __init__(self, tools: ClassTools, prompt: Prompt) -> None:
        self._tools = tools
        self._prompt = prompt
        self._instance: Any = None
        self._methods: dict[str, _Called] = {}

    async def start(self) -> Content | None:
        self._instance = self._tools.make()
        said = await self._if_it_has("reset", **dict(self._prompt.row))
        return None if said is None else as_content(said)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if name not in self._methods:
            self._methods[name] = self._tools.called(getattr(self._instance, name))
        return await self._methods[name](name, arguments)

    async def close(self) -> float | None:
        """Also an instance is closed that has no reward to give, for want of a whole trajectory, say."""
        if self._instance is None:
            return None
        try:
            reward = await self._if_it_has("get_reward")
        finally:
            await self._if_it_has("close")
        return None if reward is None else float(reward)

    async def _if_it_has(self, name: str, /, **arguments: Any) -> Any:
        """What an optional method returns. What it raises is the environment's failure, and so is no end in time."""
        method = getattr(self._instance, name, None)
        if method is None:
            return None
        try:
            async with self._tools.limits.in_time():
                return await call(method, **arguments)
        except Exception as error:  # the user's code may raise anything
            raise EnvironmentFailed(f"{name}: {type(error).__name__}: {error}") from error


class _Called:
    """A function of the user's, with its arguments checked against its type hints."""

    def __init__(self, function: Callable[..., Any], limits: CallLimits, slots: asyncio.Semaphore) -> None:
        try:
            self._checked: Callable[..., Any] = validate_call(config=_ANY_TYPES)(function)
        except (PydanticUserError, NameError) as error:  # a function that is not written in Python; a name in a hint
            raise UserError(f"conversation.environment.tools: {function!r} cannot be called: {error}") from None
        self._function = function
        self._limits = limits
        self._slots = slots

    async def __call__(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        async with self._slots, self._limits.sent():
            try:
                result = await call(self._checked, **arguments)
            except EnvironmentFailed:
                raise
            except ValidationError as error:
                raise ToolError(f"{name}: {_first_of(error)}") from None
            except TimeoutError:
                raise
            except Exception as error:  # the user's code may raise anything; the policy is told
                raise ToolError(f"{type(error).__name__}: {error}") from error
        return as_result(result)


def as_result(result: Any) -> ToolResult:
    """What a function returns: what it says, or (that, reward), or (that, reward, numbers)."""
    if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[1], SupportsFloat | None):
        reward = None if result[1] is None else float(result[1])  # also numpy's numbers, and tensors of one
        return ToolResult(as_content(result[0]), reward, dict(result[2]) if len(result) == 3 else {})
    return ToolResult(as_content(result))


def as_content(result: Any) -> Content:
    """Strings as they are; pictures, and lists of content parts and of pictures, as parts; anything else as JSON."""
    if isinstance(result, str):
        return result
    listed = result if isinstance(result, list) else [result]
    if any(map(_is_part, listed)) and (isinstance(result, list) or _as_part(result)["type"] in IMAGE_PARTS):
        parts = list(map(_as_part, listed))
        is_text = all(part["type"] == "text" for part in parts)
        return "".join(part["text"] for part in parts) if is_text else parts
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict):
        return is_image(value)
    kind = value.get("type")
    given = [value.get(key) for key in (_PARTS.get(kind, ()) if isinstance(kind, str) else ())]
    return isinstance(given[0], str) if kind == "text" else any(one is not None for one in given)


def _as_part(value: Any) -> dict[str, Any]:
    """Of an item of a list in which some are parts."""
    if is_image(value):
        return {"type": "image", "image": value}
    if not _is_part(value):
        return {"type": "text", "text": value if isinstance(value, str) else json.dumps(value, default=str)}
    if value["type"] == "text":
        return {"type": "text", "text": value["text"]}
    return value if value["type"] in IMAGE_PARTS else {"type": "text", "text": not_shown(value)}


def _schema(function: Callable[..., Any], reference: str) -> ToolSchema:
    """Raises UserError where type hints or the docstring do not say what the policy must know."""
    from transformers.utils import chat_template_utils as templates  # mistakes are told before it is imported

    try:
        return templates.get_json_schema(function)
    except (templates.DocstringParsingException, templates.TypeHintParsingException, ValueError) as error:
        raise UserError(
            f"conversation.environment.tools: {reference!r}: {error}; give each argument a type hint, and describe it "
            "in the docstring under `Args:`"
        ) from None


def _first_of(error: ValidationError) -> str:
    """What is wrong with the arguments, as the policy is told."""
    parts: list[str] = []
    for one in error.errors(include_url=False):
        place = ".".join(map(str, one["loc"]))
        parts.append(f"{place}: {one['msg'].lower()}" if place else one["msg"])
    return "; ".join(parts)
