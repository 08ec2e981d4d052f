"""Columns that mean something to other frameworks: refused by name where they are not read, with the way to what is.

docs/data.md has the table. A column that is in none of these lists is data for rewards, or nobody's.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tandem.data.preprocess.recognised import command_for
from tandem.data.rows import BadRow, Row, lacking

Kind = Literal["prompts", "demonstrations", "pairs", "rated"]
"""Rows to ask, to imitate, to compare, and answers that are good or bad."""
_SYSTEM = "make it the first message, of role system"
_MASK = "which tokens are learned follows from the messages; leave it out, or say `train`: false in a message"
_TOKENS = "rows are tokenised here; leave it out, and give the text or the messages"
_WEIGHT = "rows count alike; leave it out, or give rows more weight as a set of data.mixture"
_ARGUMENTS = "arguments of the chat template are those of all rows, in model.chat_template.arguments; leave it out"
_SOUND = "no model is shown sound; leave it out"
_OF_ALL: Mapping[str, str] = {
    "system": _SYSTEM,
    "system_prompt": _SYSTEM,
    "history": "make earlier turns messages, before the last one",
    "chat_template_kwargs": _ARGUMENTS,
    "enable_thinking": _ARGUMENTS,
    "audios": _SOUND,
    "audio": _SOUND,
}
_OF_LEARNED: Mapping[str, str] = {
    **dict.fromkeys(("input_ids", "prompt_ids", "completion_ids", "token_ids"), _TOKENS),
    **dict.fromkeys(("labels", "loss_mask", "completion_mask", "assistant_masks", "response_mask"), _MASK),
    **dict.fromkeys(("weight", "weights", "sample_weight", "loss_weight"), _WEIGHT),
    "functions": "descriptions of tools are read from `tools`",
    "kto_tag": "whether an answer is good is read from `label`",
}
"""Of rows whose answers are learned; to rewards these may be anything."""
_NEEDED: Mapping[Kind, tuple[str, ...]] = {
    "prompts": ("prompt",),
    "demonstrations": ("prompt", "completion"),
    "pairs": ("chosen", "rejected"),
    "rated": ("prompt", "completion", "label"),
}
_QUESTIONS = ("question", "problem", "query", "instruction")
_ANSWERS = ("answer", "solution", "response", "output", "target")
_GOOD_AND_BAD = (("chosen_response", "rejected_response"), ("response", "rejected_response"), ("better", "worse"))


def check_columns(row: Row, kind: Kind, file: Path | str = "FILE") -> None:
    """Raises BadRow for a column that is refused, and for rows of another form, with the command that changes it.
    `file`: where the row is from."""
    refused = _OF_ALL if kind == "prompts" else {**_OF_ALL, **_OF_LEARNED}
    for column, mend in refused.items():
        if not _is_empty(row.get(column)):
            raise BadRow(f"column `{column}` is not read: {mend}")
    if kind == "prompts" and not _is_empty(row.get("tools")):
        mend = "an environment has them (conversation.environment.tools); leave it out, or empty"
        raise BadRow(f"column `tools` is not supported yet in rows to ask: {mend}")
    if kind == "demonstrations" and isinstance(row.get("label"), bool):
        raise BadRow(
            "column `label` is not read: it says which answers are good, and here all are learned; take the good ones, "
            "or tandem dpo with preference.loss: kto"
        )
    if not has_form(row, kind):
        _hint(row, kind, file)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value) or value == "[]"


def has_form(row: Row, kind: Kind) -> bool:
    """The row has the columns of its kind; what is in them is looked at where they are read."""
    has = {column for column, value in row.items() if value is not None}
    forms: Mapping[Kind, list[set[str]]] = {
        "prompts": [{"prompt"}],
        "demonstrations": [{"messages"}, {"prompt", "completion"}],
        "pairs": [{"chosen", "rejected"}],
        "rated": [{"label", "messages"}, {"label", "prompt", "completion"}, {"chosen", "rejected"}],
    }
    return any(form <= has for form in forms[kind])


def _hint(row: Row, kind: Kind, file: Path | str) -> None:
    """Raises BadRow where it is known how to change the row; what it lacks is told where it is read."""
    has = {column for column, value in row.items() if value is not None}
    turns = _listed(row.get("conversations"))
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" not in turns[0]:
        raise BadRow(
            "column `conversations` has turns of `from` and `value`; write them as `messages` of `role` (user, "
            "assistant, system, tool) and `content`"
        )
    if kind != "prompts" and has & {"text"} and not has & set(_NEEDED[kind]):
        raise BadRow("column `text` is not read: rows need a prompt and an answer, or messages; split the text")
    made_by = _command(row, has, kind, file)
    if made_by is not None:
        needed = next(column for column in _NEEDED[kind] if column not in has)
        raise BadRow(f"{lacking(row, needed)}. It is made by: {made_by}")


def _command(row: Row, has: set[str], kind: Kind, file: Path | str) -> str | None:
    """The command that makes rows of the kind: that of the data set that the row is of, or one that renames columns."""
    published = command_for(row, file) if kind == "prompts" or {"chosen", "rejected"} <= has else None
    if published is not None:
        return published
    maps = " ".join(f"--map {shlex.quote(pair)}" for pair in _mapping(row, has, kind))
    return f"tandem data columns --in {shlex.quote(str(file))} --out DIR {maps}" if maps else None


def _listed(value: Any) -> Any:
    """The value, or what it is the JSON text of."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _mapping(row: Row, has: set[str], kind: Kind) -> list[str]:
    """NEW=OLD of each column to make; none where nobody can tell."""
    turns = next((column for column in ("messages", "conversations") if isinstance(row.get(column), list)), None)
    asked = "prompt" if "prompt" in has else next((column for column in _QUESTIONS if column in has), None)
    answered = next((column for column in _ANSWERS if column in has), None)
    prompt = f"prompt={asked}"
    if asked == "instruction" and isinstance(row.get("input"), str) and "input" in has:
        prompt = "prompt={instruction}\n{input}"
    if kind == "prompts":
        if asked is None:
            return [f"prompt={turns}"] if turns else []
        truth = [] if answered is None else [f"ground_truth={answered}"]
        return [prompt, *truth, "data_source=NAME"]
    if kind == "pairs":
        pair = next((pair for pair in _GOOD_AND_BAD if set(pair) <= has), None)
        if pair is None:
            return []
        return [*([prompt] if asked else []), f"chosen={pair[0]}", f"rejected={pair[1]}"]
    if turns and "messages" not in has:
        return [f"messages={turns}"]
    answered = "completion" if "completion" in has else answered or ("chosen" if "chosen" in has else None)
    if asked is None or answered is None or "messages" in has:
        return []
    if kind == "rated" and "label" not in has:
        return []
    if answered == "chosen" and _begins_with_a_prompt(_listed(row["chosen"])):
        return ["messages=chosen"]
    return [prompt, f"completion={answered}", *(["label=label"] if kind == "rated" else [])]


def _begins_with_a_prompt(answer: Any) -> bool:
    first = answer[0] if isinstance(answer, list) and answer else None
    return isinstance(first, dict) and first.get("role") != "assistant"
