"""Bodies of requests -> typed parameters, or the reason why a request is refused.

Every parameter of the published interface is either a field here, or in one of the tables of what is refused unless it
asks for what happens anyway. docs/serving.md lists them all; a test compares both with the client's own list.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from tandem.serving.errors import RequestError
from tandem.serving.messages import Message, Nested, Strict, Tool
from tandem.types import check_temperature

_MOST_SAMPLES = 128
_MOST_STOPS = 32
_MOST_MESSAGES, _MOST_TOOLS = 4096, 1024
_PROBLEMS_TOLD = 10
_INT32 = 2**31

NEUTRAL: dict[str, tuple[Any, ...]] = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},)}
"""Parameters of both endpoints that are refused unless they have one of these values, which change nothing."""
NEUTRAL_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {**NEUTRAL, "suffix": ("",)}
NEUTRAL_IN_CHATS: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


NEUTRAL_OF_VLLM: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
}
"""What clients of vLLM's and SGLang's servers send besides, likewise; a parameter that an endpoint has holds there."""


class StreamOptions(Nested):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _all_tokens(value: Any) -> Any:
    """vLLM's -1 keeps all tokens, as 0 does."""
    return 0 if value == -1 and not isinstance(value, bool) else value


def _prompts(value: Any) -> Any:
    """A list of prompts, each text or token ids."""
    listed: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
    if listed and all(_is_id(item) for item in listed):
        listed = [listed]
    if listed and all(isinstance(item, str) for item in listed):
        return listed
    if not listed or not all(isinstance(item, list) and item and all(map(_is_id, item)) for item in listed):
        raise ValueError(
            "give a text, a list of texts, a list of token ids, or a list of such lists, none of them empty"
        )
    for ids in listed:
        if outside := [token for token in ids if not 0 <= token < _INT32]:
            raise ValueError(f"no model's vocabulary has a token id {outside[0]}")
    return listed


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


class Parameters(Strict):
    """What both endpoints take."""

    model: str
    temperature: Annotated[float, AfterValidator(check_temperature)] | None = Field(default=None, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: Annotated[int, BeforeValidator(_all_tokens), Field(ge=0, lt=_INT32)] | None = None
    """No parameter of OpenAI's: only the most probable tokens are drawn from, 0 and -1: all."""
    n: int = Field(default=1, ge=1, le=_MOST_SAMPLES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_stops)] | None = Field(
        default=None, max_length=_MOST_STOPS
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    """vLLM's: those of the prompt come with the answer; those of the answer are there in any case."""
    user: str | None = None
    """A name for the client's own books: no answer depends on it."""

    def check_combinations(self) -> None:
        """Raises RequestError on parameters that do not go together."""
        if self.stream_options.include_usage and not self.stream:
            raise RequestError("stream_options: only with stream: true", param="stream_options", code="invalid_value")


class CompletionParameters(Parameters):
    """POST /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    max_tokens: int = Field(default=16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=5)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    """No parameter of OpenAI's but of vLLM's: the prompt's own log-probs by token id, and so many of the most probable
    tokens' in each place."""
    best_of: int | None = None

    @property
    def scores_prompts(self) -> bool:
        """The prompt's own log-probs are wanted."""
        return (self.echo and self.logprobs is not None) or self.prompt_logprobs is not None

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.best_of not in (None, self.n):
            raise _unsupported("best_of", f"it may only be n, here {self.n}")
        if self.prompt_logprobs is not None and (self.logprobs is not None or self.stream):
            raise RequestError(
                "prompt_logprobs: not together with logprobs or stream", param="prompt_logprobs", code="invalid_value"
            )


class ChatParameters(Parameters):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=_MOST_MESSAGES)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """vLLM's: what the chat template reads besides the messages."""
    tools: list[Tool] = Field(default_factory=list, max_length=_MOST_TOOLS)
    tool_choice: str | dict[str, Any] = "auto"
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    safety_identifier: str | None = None
    """As `user`."""
    prompt_cache_key: str | None = None
    """A hint for caches: no answer depends on it."""

    @property
    def scores_prompts(self) -> bool:
        return False

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.tool_choice not in ("auto", "none"):
            raise _unsupported("tool_choice", 'calls cannot be forced; leave it out, or give "auto" or "none"')
        if self.tools and self.chat_template_kwargs:
            mend = "not with tools; start the server with model.chat_template.arguments"
            raise _unsupported("chat_template_kwargs", mend)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs: only with logprobs: true", param="top_logprobs", code="invalid_value")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError(
                "max_tokens: the old name of max_completion_tokens; give one of them",
                param="max_tokens",
                code="invalid_value",
            )


AnyParameters = CompletionParameters | ChatParameters
ParametersType = TypeVar("ParametersType", CompletionParameters, ChatParameters)


def parse(kind: type[ParametersType], body: bytes, most_samples: int) -> ParametersType:
    """The parameters in a request's body. Raises RequestError, also where they ask for more than `most_samples`."""
    given = {name: value for name, value in _read_object(body).items() if value is not None}
    _check_prompts(given.get("prompt"), most_samples)
    neutral = NEUTRAL_OF_VLLM | (NEUTRAL_IN_CHATS if kind is ChatParameters else NEUTRAL_IN_COMPLETIONS)
    for name in given.keys() & neutral.keys() - kind.model_fields.keys():
        if not _is_one_of(given.pop(name), neutral[name]):
            raise _unsupported(name, _allowed(neutral[name]))
    try:
        params = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)) from None
    params.check_combinations()
    _check_samples(len(params.prompt) if isinstance(params, CompletionParameters) else 1, params.n, most_samples)
    return params


def _check_prompts(prompt: Any, most_samples: int) -> None:
    """Before any of them is looked at."""
    if isinstance(prompt, list) and prompt and not _is_id(prompt[0]):
        _check_samples(len(prompt), 1, most_samples)


def _check_samples(prompts: int, n: int, most: int) -> None:
    if prompts * n > most:
        asked = f"{prompts:,} prompts" if n == 1 else f"{prompts:,} prompts of {n} samples each"
        param = "prompt" if prompts > 1 else "n"
        raise RequestError(
            f"{param}: {asked} in one request; it may ask for {most:,} samples in all, so send several requests",
            param=param,
            code="too_many_samples",
        )


def _read_object(body: bytes) -> Mapping[str, Any]:
    try:
        given = json.loads(body)
        if b"\\u" in body:
            json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has half a surrogate pair, which is no letter", code="invalid_json") from None
    except ValueError as error:  # also of bytes that are no UTF-8
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body has lists or objects nested too deeply", code="invalid_json") from None
    if not isinstance(given, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    return cast(dict[str, Any], given)


def _is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    """Equal to one of them, and no boolean where that is a number."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


def _allowed(values: Sequence[Any]) -> str:
    return f"leave it out, or give {' or '.join(json.dumps(value) for value in values)}" if values else "leave it out"


def _unsupported(name: str, mend: str) -> RequestError:
    return RequestError(f"{name}: not supported by this endpoint; {mend}", param=name, code="unsupported_parameter")


def _refusal(problems: Sequence[Any]) -> RequestError:
    """The first ones in the message; `param` and `code` are the first one's."""
    first, more = problems[0], len(problems) - _PROBLEMS_TOLD
    code = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
    return RequestError(
        "; ".join(f"{_place(problem)}: {_reason(problem)}" for problem in problems[:_PROBLEMS_TOLD])
        + (f"; and {more:,} more" if more > 0 else ""),
        param=_place(first),
        code=code.get(first["type"], "invalid_value"),
    )


def _place(problem: Any) -> str:
    """`messages[0].content`, without what pydantic adds for the members of a union."""
    place = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif "[" not in part and part not in ("str", "nullable"):
            place += f".{part}" if place else part
    return place


def _reason(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "unknown parameter"
    message = problem["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]
