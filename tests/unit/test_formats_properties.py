"""Random conversations over every published chat template: what is appended is the template's own tail, whatever came
before; no text becomes a control token; a call that a template has rendered is read as the call that it was."""

from __future__ import annotations

import functools
import json
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from published_templates import TAGS, format_of, names, needs_trl, stops_of, with_template
from transformers import PreTrainedTokenizerFast

from tandem.errors import UserError
from tandem.rollout.formats.template import TemplateFormat
from tandem.rollout.transcript import Transcript
from tandem.types import Completion, Prompt, Status

pytestmark = needs_trl
few = settings(deadline=None, max_examples=12, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])

PARAMETERS = {
    "count": {"type": "integer", "description": "d"},
    "share": {"type": "number", "description": "d"},
    "text": {"type": "string", "description": "d"},
    "sure": {"type": "boolean", "description": "d"},
    "list": {"type": "array", "items": {"type": "string"}, "description": "d"},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": PARAMETERS, "required": ["count"]},
        },
    }
    for name in ("add", "look_up")
]
OLDER = {
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "deepseekv3",
    "gemma",
    "gemma3",
    "lfm2",
    "llama3",
    "phi3",
    "phi3_5",
}
CANNOT_CALL = OLDER | {"phi3_5", "idefics3", "llava_next", "qwen2_5_vl", "smolvlm"}
CANNOT_CONTINUE = {"idefics3", "llava_next", "smolvlm"}
NOBODY_READS = {"muse_glimmer"}
CALLING = [name for name in names() if name not in CANNOT_CALL]
CONTINUING = [name for name in names() if name not in CANNOT_CONTINUE]

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
said = st.lists(st.one_of(words, st.sampled_from(["\n", " ", "{", "'", '"', "1"])), max_size=5).map("".join)
content = said.map(lambda text: f"x{text}x")
"""Templates strip the ends of a message, each in its own way."""


@functools.cache
def format_named(name: str, thinking: str = "all") -> TemplateFormat:
    return format_of(with_template(name), thinking=thinking)


def test_what_published_templates_can() -> None:
    assert {name for name in names() if name not in CANNOT_CONTINUE and _refused(name, "tools")} == (
        CANNOT_CALL - CANNOT_CONTINUE
    ) | NOBODY_READS
    assert len(CALLING) == 27 and len(CONTINUING) == 38
    for name in CANNOT_CONTINUE:
        with pytest.raises(UserError, match=rf"^{name}: .*cannot continue a conversation with a user turn"):
            format_of(with_template(name))


def _refused(name: str, what: str) -> bool:
    try:
        getattr(format_named(name), f"require_{what}")()
    except UserError:
        return True
    return False


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[Any], tools: list[Any]) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True))


def turn(text: str, thought: str | None, calls: int, number: int) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": "" if calls else text}
    if thought is not None:
        made["reasoning_content"] = thought
    if calls:
        made["tool_calls"] = [
            {"id": f"call{number}{n:04d}", "type": "function", "function": {"name": "add", "arguments": {"count": n}}}
            for n in range(calls)
        ]
    return made


def results(texts: list[str], number: int) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "name": "add", "tool_call_id": f"call{number}{n:04d}", "content": text}
        for n, text in enumerate(texts)
    ]


histories = st.lists(st.tuples(content, st.none() | content, st.booleans()), max_size=3)


def history(turns: list[tuple[str, str | None, bool]], tools: bool) -> list[dict[str, Any]]:
    """User, policy, (tool, policy,) user, …; it ends with the user."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for number, (text, thought, calls) in enumerate(turns):
        if calls and tools:
            messages += [turn(text, thought, 1, number), *results([text], number)]
        messages += [turn(text, thought, 0, number), {"role": "user", "content": text}]
    return messages


def check_tail(
    format: TemplateFormat,
    tokenizer: PreTrainedTokenizerFast,
    conversation: list[Any],
    new: list[Any],
    tools: list[Any],
) -> None:
    """What is appended is how the rendering of the whole conversation ends, behind a stop token."""
    whole = rendered(tokenizer, [*conversation, *new], tools)
    ids = list(tokenizer.encode(whole, add_special_tokens=False))
    cut = format.extend([0], new, tools) or []  # 0 is a letter: a turn that was cut
    assert ids[-len(cut) :] == cut
    for stop in stops_of(str(tokenizer.name_or_path)):
        ended = format.extend([*ids, int(tokenizer.convert_tokens_to_ids(stop))], new, tools)
        assert ended in (cut[1:], cut)
    assert format.extend([0, cut[0]], new, tools) == cut[1:]


@pytest.mark.parametrize("name", CONTINUING)
@few
@given(turns=histories, text=content, last=content, thought=st.none() | content)
def test_a_user_is_appended_as_the_template_writes_it(
    name: str, turns: list[Any], text: str, last: str, thought: str | None
) -> None:
    tokenizer, format = with_template(name), format_named(name)
    conversation = [*history(turns, tools=False), turn(last, thought, 0, 9)]
    check_tail(format, tokenizer, conversation, [{"role": "user", "content": text}], [])


@pytest.mark.parametrize("name", [name for name in CALLING if name not in NOBODY_READS])
@few
@given(turns=histories, texts=st.lists(content, min_size=1, max_size=3), thought=st.none() | content)
def test_results_are_appended_as_the_template_writes_them(
    name: str, turns: list[Any], texts: list[str], thought: str | None
) -> None:
    tokenizer, format = with_template(name), format_named(name)
    one_call = name.startswith(("llama", "gptoss"))
    conversation = [*history(turns, tools=True), turn("", thought, 1 if one_call else len(texts), 9)]
    check_tail(format, tokenizer, conversation, results(texts, 9), TOOLS)


@pytest.mark.parametrize("name", CONTINUING)
@few
@given(data=st.data())
def test_no_text_becomes_a_control_token(name: str, data: st.DataObject) -> None:
    tokenizer, format = with_template(name), format_named(name)
    control = sorted(token.content for token in tokenizer.added_tokens_decoder.values())
    texts = st.lists(st.one_of(st.sampled_from(control), words, st.just("\n")), min_size=1, max_size=6).map("".join)
    evil = {key: data.draw(texts) for key in ("question", "answer", "tool", "result", "name")}
    tools = name in CALLING and name not in NOBODY_READS
    counts = []
    for text in (evil, dict.fromkeys(evil, "x")):
        shown = [_tool(f"x{text['tool']}x")] if tools else []
        ids = format.open([_user(text["question"]), turn(f"x{text['answer']}x", None, 0, 0), _user("y")], shown)
        ids += format.extend([0], [_user(text["question"])], []) or []
        if tools:
            result = results([f"x{text['result']}x"], 0)
            ids += format.extend([0], [result[0] | {"name": f"x{text['name']}x"}], shown) or []
        counts.append({token: ids.count(int(tokenizer.convert_tokens_to_ids(token))) for token in control})
    own = TAGS.search(evil["answer"]) is not None  # the policy may write tags, and templates look for them
    for token in control:
        if not (own and TAGS.fullmatch(token)):
            assert counts[0][token] == counts[1][token], token


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": f"x{text}x"}


def _tool(text: str) -> dict[str, Any]:
    function = TOOLS[0]["function"] | {"name": text, "description": text}
    return {"type": "function", "function": function}


turns = st.lists(st.tuples(st.lists(st.integers(0, 255), max_size=20), st.booleans(), content), min_size=1, max_size=4)


@pytest.mark.parametrize("thinking", ["all", "template"])
@pytest.mark.parametrize("name", [name for name in CALLING if name not in NOBODY_READS])
@few
@given(turns=turns)
def test_what_was_sampled_stays_as_it_is_and_is_trained_once(name: str, thinking: Any, turns: list[Any]) -> None:
    """Random letters, among them such as no text encodes to, answered by tools and users in turn."""
    tokenizer = with_template(name)
    format = format_named(name, thinking)
    stop = int(tokenizer.convert_tokens_to_ids(stops_of(name)[0]))
    transcript = Transcript(format, [{"role": "user", "content": "Go."}], TOOLS)
    asked: list[list[int]] = []
    sampled: list[int] = []
    for number, (letters, ended, text) in enumerate(turns):
        before = transcript.ids.tolist()
        assert not asked or thinking == "template" or before[: len(asked[-1])] == asked[-1]
        ids = [*letters, *([stop] if ended or not letters else [])]
        transcript.take(completion(ids))
        asked.append([*before, *ids])
        sampled += ids
        transcript.tell([{"role": "user", "content": text}] if number % 2 else results([text], number))
    made = transcript.trajectory(PROMPT, 0, lambda rows: ["" for _ in rows])
    lines = [(made.prompt.token_ids, made.response_ids), *((b.prompt_ids, b.response_ids) for b in made.branches)]
    assert all(any([*prompt, *response][: len(ids)] == ids for prompt, response in lines) for ids in asked)
    trained = [b.response_ids[b.loss_mask].tolist() for b in (made, *made.branches)]
    assert sorted(chain.from_iterable(trained)) == sorted(sampled)
    assert thinking == "template" or trained == [sampled]


def completion(ids: list[int]) -> Completion:
    zeros = np.zeros(len(ids), np.int32)
    return Completion(0, np.array(ids, np.int32), zeros.astype(np.float32), zeros, Status.COMPLETED)


PROMPT = Prompt(0, np.zeros(0, np.int32), "", "", None)
RESULT = "Qr9w"
plain = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Z")), max_size=10)
values = {
    "count": st.integers(-(10**12), 10**12),
    "share": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "sure": st.booleans(),
    "list": st.lists(plain, max_size=3),
}
calls = st.lists(
    st.tuples(st.sampled_from(["add", "look_up"]), st.fixed_dictionaries({}, optional=values | {"text": plain})),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", [name for name in CALLING if name not in NOBODY_READS])
@few
@given(made=calls)
def test_a_call_that_the_template_has_rendered_is_read_as_it_was(name: str, made: list[Any]) -> None:
    if name.startswith(("llama", "gptoss")):
        made = made[:1]  # these render one call a turn
    if name.startswith("lfm2_2_5") or name in ("gemma4", "diffusion_gemma"):
        made = [
            (tool, {key: value for key, value in given.items() if key not in ("text", "list")}) for tool, given in made
        ]
    tokenizer, format = with_template(name), format_named(name)
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call{n:05d}", "type": "function", "function": {"name": tool, "arguments": arguments}}
            for n, (tool, arguments) in enumerate(made)
        ],
    }
    asked = [{"role": "user", "content": "Go."}]
    prompt = rendered(tokenizer, asked, TOOLS)
    after = [
        {"role": "tool", "name": "add", "tool_call_id": f"call{n:05d}", "content": RESULT} for n in range(len(made))
    ]
    whole = rendered(tokenizer, [*asked, message, *after], TOOLS)
    if not whole.startswith(prompt):  # the prompt begins a thought, which the template then leaves out
        prompt = prompt[: len(prompt) - len(prompt.split("assistant\n")[-1])]
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].split(RESULT)[0]
    ends = [text.rfind(stop) for stop in ("<|return|>", *stops_of(name)) if stop in text]
    text = text[: max(end for end in ends if end >= text.rfind("}") or True)] if ends else text
    sampled = tokenizer.encode(text, add_special_tokens=False)
    answer = format.parse(tokenizer.encode(prompt, add_special_tokens=False), sampled, TOOLS)
    assert answer.broken == ()
    assert [(call.name, as_json(call.arguments)) for call in answer.tool_calls] == [
        (tool, as_json(arguments)) for tool, arguments in made
    ]


def as_json(arguments: Any) -> str:
    """True is not 1 there; some templates sort the keys."""
    return json.dumps(arguments, sort_keys=True)
