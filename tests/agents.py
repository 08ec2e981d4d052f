"""For tests of agents: a tokenizer with a chat template, and an engine that says what a script says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.rollout.formats.for_tokenizer import make_format
from tandem.rollout.record import Node
from tandem.rollout.session import PolicyEndpoint, Rules, Session
from tandem.types import Branch, Completion, Request, SamplingParams, Status

CHAT = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{% endif %}
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response>' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.index0 > last.user %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{%- endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"arguments": {"a":1, "b": 2}, "name": "add"}\n</tool_call>'
ANSWER = "<think>\nso\n</think>\n\nThree, I think."
_WORDS = (
    "What is the sum of one and two? I think that it is three, so the answer is three. Agents ask again and again. "
)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that has merged words, so that a text can be split in many ways."""
    merges = {
        word[:end]: (word[: end - 1], word[end - 1]) for word in _WORDS.split() for end in range(2, len(word) + 1)
    }
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *merges])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges.values())))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    made.add_special_tokens({"extra_special_tokens": SPECIAL})
    made.add_tokens(TAGS)
    made.chat_template = CHAT
    return made


def stop_id() -> int:
    return int(tokenizer().convert_tokens_to_ids("<|im_end|>"))


class ScriptedEngine:
    """Says what `script` says to the prompt's text, in splits that no tokenizer would make: only an exact record of its
    tokens equals them."""

    def __init__(self, script: Callable[[str], str | Awaitable[str]]) -> None:
        self._script = script
        self.seen: list[tuple[list[int], list[int], list[float]]] = []
        """Prompt, sampled tokens and their log-probs, of each sample."""

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        for sample in reversed(range(len(request.seeds))):
            yield await self._sample(request, sample)

    async def _sample(self, request: Request, sample: int) -> Completion:
        draw = random.Random(request.seeds[sample])
        prompt = request.token_ids.tolist()
        said = self._script(str(tokenizer().decode(prompt)))
        text = said if isinstance(said, str) else await said
        text = _up_to_stop(text, request.sampling.stop_strings)
        stopped = text.endswith(request.sampling.stop_strings) if request.sampling.stop_strings else False
        ids = [*oddly_split(text, draw), *([] if stopped else [stop_id()])]
        made = ids[: request.sampling.max_tokens]
        logprobs = [-draw.random() for _ in made]
        self.seen.append((prompt, made, logprobs))
        return Completion(
            sample,
            np.array(made, np.int32),
            np.array(logprobs, np.float32),
            np.full(len(made), 7, np.int32),
            Status.COMPLETED if len(made) == len(ids) else Status.TRUNCATED,
        )


def _up_to_stop(text: str, stops: tuple[str, ...]) -> str:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends, default=len(text))]


def oddly_split(text: str, draw: random.Random) -> Iterator[int]:
    """Tokens of the text, half of the longer ones cut in two."""
    coder = tokenizer()
    first_special = min(coder.added_tokens_decoder)
    for token in coder.encode(text, add_special_tokens=False):
        piece = str(coder.decode([token]))
        if token < first_special and len(piece) > 1 and piece.isascii() and draw.random() < 0.5:
            cut = draw.randrange(1, len(piece))
            yield from coder.encode(piece[:cut], add_special_tokens=False)
            yield from coder.encode(piece[cut:], add_special_tokens=False)
        else:
            yield token


def a_policy(engine: ScriptedEngine, thinking: Any = "all", positions: float = 100_000) -> PolicyEndpoint:
    tokens = make_format(tokenizer(), [stop_id()], "hermes", thinking)
    return PolicyEndpoint(tokens, engine.generate, lambda: positions, lambda ids: str(tokenizer().decode(list(ids))))


def a_session(engine: ScriptedEngine, thinking: Any = "all", positions: float = 100_000, **rules: Any) -> Session:
    sampling = SamplingParams(max_tokens=1000, stop_token_ids=(stop_id(),))
    return Session(a_policy(engine, thinking, positions), Rules(sampling, **rules), seed=5)


def check_record(session: Session, engine: ScriptedEngine, branches: int) -> list[Branch]:
    """Whatever the client did: what is trained on is what the engine saw and made, each token once."""
    found = session.branches()
    assert len(found) == branches
    seen = [(prompt + made, made) for prompt, made, _ in engine.seen]
    for branch in found:
        assert [*branch.prompt_ids, *branch.response_ids] in [whole for whole, _ in seen]
        unmade = branch.versions == -1
        assert not branch.loss_mask[unmade].any() and not branch.rollout_logprobs[~branch.loss_mask].any()
        assert sum(turn.tokens for turn in branch.turns) == len(branch.response_ids)
        spelled = branch.opening + "".join(str(turn.text) for turn in branch.turns)
        assert spelled == tokenizer().decode([*branch.prompt_ids, *branch.response_ids])
    trained = [token for branch in found for token in branch.response_ids[branch.loss_mask].tolist()]
    taken = [said.node for said in session.answers]
    assert sorted(trained) == sorted(token for node in taken for token in node.completion.token_ids.tolist())
    for node in taken:
        _check_node(node, engine)
    return found


def _check_node(node: Node, engine: ScriptedEngine) -> None:
    made = node.completion
    as_seen = (node.prompt_ids.tolist(), made.token_ids.tolist(), made.logprobs.tolist())
    exact = [(prompt, ids, np.array(logprobs, np.float32).tolist()) for prompt, ids, logprobs in engine.seen]
    assert as_seen in exact
    if node.parent is not None:
        assert node.prompt_ids[: len(node.parent.ids)].tolist() == node.parent.ids.tolist()


async def settle() -> None:
    """Let the tasks that are ready run."""
    for _ in range(10):
        await asyncio.sleep(0)
