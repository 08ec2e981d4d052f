"""Rows to imitate: `messages`, or `prompt` + `completion` -> Demonstration."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tandem.config.data import SftDataConfig
from tandem.data.cache import NotPackable
from tandem.data.chat import (
    TooLong,
    Tools,
    encode,
    refuse_long,
    render,
    require_known_roles,
    require_one_bos,
    require_shown,
)
from tandem.data.dataset import Dataset, length_of
from tandem.data.messages import Messages, messages_of, refuse_prefill, tools_of, trained_turns
from tandem.data.packed import Array, Packed
from tandem.data.row_images import refuse_pictures
from tandem.data.rows import BadRow, Row, cell
from tandem.models.end_of_sequence import ends_of_answers
from tandem.pictures.sources import VIDEO_PART
from tandem.pictures.videos import Video
from tandem.types import BoolArray, Demonstration, Picture

Item = TypeVar("Item")


class DemonstrationDataset(Dataset[Item, SftDataConfig]):
    """What is made of demonstrations.

    Messages: the loss is on the assistant turns, each with its end-of-turn tokens; the prompt is everything before the
    first of them (of the completion, for a `prompt` of messages), generation prompt included. Where the chat template
    shows an earlier turn otherwise than the last one, as those do that drop what was thought, each assistant turn is a
    demonstration of its own, after the conversation as the policy will be shown it then. Where no token in a turn ends
    answers, but what follows it in a conversation begins with one that does (GLM-4.5's `<|user|>`), that one is learned
    with it. Strings: prompt and completion are tokenised apart, and the completion, which may be whitespace alone, ends
    with the EOS token.
    """

    @cached_property
    def _ends_of_answers(self) -> frozenset[int]:
        return ends_of_answers(self._tokenizer)

    def _made_of(self) -> str | None:
        made_of = super()._made_of()
        return None if made_of is None else json.dumps([made_of, sorted(self._ends_of_answers)])

    def _pack_demonstration(self, item: Demonstration, text: str = "") -> Packed:
        if item.pictures:
            raise NotPackable("a row has pictures")
        return Packed((item.prompt_ids, item.response_ids, item.loss_mask), text)

    def _demonstrations(self, row: Row, folder: Path, answer: str = "completion") -> tuple[str, list[Demonstration]]:
        """`answer`: the column of what follows `prompt`."""
        whole = answer == "completion" and row.get("messages") is not None
        row_format = "`messages`" if whole else "`prompt` + `completion`"
        if not whole and isinstance(row.get("prompt"), str):
            refuse_pictures(row, takes_pictures=self._sees)
            if tools_of(row):
                raise BadRow(
                    "column `tools` needs messages, which go through the chat template; this row is plain text"
                )
            ids, learned = self._encode_strings(cell(row, "prompt", str), cell(row, answer, str, blank=True))
            return row_format, [self._demonstration(ids, learned, [], number=0, templated=False)]
        if whole:
            given, first, trained = messages_of(row, "messages"), 1, trained_turns(row, "messages")
        else:
            prompt, answers = messages_of(row, "prompt"), messages_of(row, answer)
            refuse_prefill(prompt, "prompt")
            given, first = prompt + answers, len(prompt)
            trained = [False] * first + trained_turns(row, answer)
        messages, pictures = self._take_pictures(row, given, folder)
        if all(message["role"] != "assistant" for message in messages[first:]):
            require_known_roles(self._tokenizer, messages)
        turns = _learned_turns(messages, first, trained)
        made: list[Demonstration] = []
        for ids, learned, shown in self._encode_messages(messages, turns, tools_of(row)):
            made.append(self._demonstration(ids, learned, pictures[:shown], number=len(made)))
        return row_format, made

    def _demonstration(
        self,
        ids: list[int],
        learned: BoolArray,
        pictures: Sequence[Picture | Video],
        number: int,
        templated: bool = True,
    ) -> Demonstration:
        """`number`: of the demonstration, in its row."""
        require_one_bos(self._tokenizer, ids, templated=templated)
        tokens, origins, placed = self._expand(ids, pictures)
        learned = learned[origins]
        if len(tokens) > (limit := self._config.max_tokens):
            raise BadRow(f"the row is {length_of(tokens, placed)}; data.max_tokens is {limit:,}")
        cut = int(np.argmax(learned))
        if cut == 0:
            raise BadRow("the tokenizer makes no token of the prompt, or none of the answer")
        if any(learned[picture.place] for picture in placed):
            raise BadRow("an answer has a picture in it, which no policy can say")
        return Demonstration(len(self) + number, tokens[:cut], tokens[cut:], learned[cut:], placed)

    def _encode_strings(self, prompt: str, completion: str) -> tuple[list[int], BoolArray]:
        limit = self._config.max_tokens
        try:
            prompt_ids = encode(self._tokenizer, prompt, special_tokens=True, most_tokens=limit)
            answer_ids = encode(self._tokenizer, completion, special_tokens=False, most_tokens=limit)
        except TooLong as error:
            raise self._refused(error) from None
        eos = self._tokenizer.eos_token_id
        if isinstance(eos, int) and answer_ids[-1:] != [eos]:
            answer_ids.append(eos)
        return prompt_ids + answer_ids, np.repeat([False, True], [len(prompt_ids), len(answer_ids)])

    def _encode_messages(
        self, messages: Messages, turns: Sequence[int], tools: Tools
    ) -> Iterator[tuple[list[int], BoolArray, int]]:
        """Token ids; which of them begin in one of the `turns`, which are learned; how many pictures they show."""
        text, spans = render(self._tokenizer, messages, tools=tools), list[tuple[int, int]]()
        end_of_last = ""
        for turn in turns:
            is_last = turn + 1 == len(messages)
            through = text if is_last else render(self._tokenizer, messages[: turn + 1], tools=tools)
            begin, end, closing = self._span(messages, turn, through, tools)
            if not text.startswith(through + closing * (not is_last)):
                break
            spans.append((begin, end))
            end_of_last = closing if is_last else ""
        else:
            require_shown(self._tokenizer, messages, tools=tools, learned=turns)
            yield *self._encode_text(text + end_of_last, spans), _pictures_in(messages)
            return
        for turn in turns:
            shown = messages[: turn + 1]
            through = render(self._tokenizer, shown, tools=tools)
            require_shown(self._tokenizer, shown, tools=tools, learned=[turn])
            begin, end, closing = self._span(messages, turn, through, tools)
            yield *self._encode_text(through + closing, [(begin, end)]), _pictures_in(shown)

    def _span(self, messages: Messages, turn: int, through: str, tools: Tools) -> tuple[int, int, str]:
        """Where the turn begins and ends in the text of the messages through it, and what of that is not in there."""
        before = render(self._tokenizer, messages[:turn], generation_prompt=True, tools=tools)
        if not through.startswith(before):
            asked, shown = _where_they_part(before, through)
            raise BadRow(
                f"the messages cannot be split into turns by this chat template, at message {turn + 1}: what the "
                f"policy is asked there ends in {asked!r}, and a conversation with the turn has {shown!r} in its "
                "place; give a template that shows turns as it asks for them, as model.chat_template.file, or where it "
                "asks for thinking, rows that have some"
            )
        closing = self._closing(messages, turn, through, len(before), tools)
        return len(before), len(through + closing), closing

    def _closing(self, messages: Messages, turn: int, through: str, begin: int, tools: Tools) -> str:
        """The token that ends the turn where it is not in it: what a next message would begin with. Mostly empty."""
        tokenizer: Any = self._tokenizer  # its methods are partly untyped
        tokens: list[str | None] = tokenizer.convert_ids_to_tokens(sorted(self._ends_of_answers))
        ends = [token for token in tokens if token]
        if not ends or any(end in through[begin:] for end in ends):
            return ""
        called = bool(messages[turn].get("tool_calls"))
        following = {"role": "tool", "name": "tool", "content": "-"} if called else {"role": "user", "content": "-"}
        try:
            shown = render(self._tokenizer, [*messages[: turn + 1], following], tools=tools)
        except BadRow:  # a template that takes no such message here
            return ""
        return next((end for end in ends if shown.startswith(through + end)), "")

    def _encode_text(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], BoolArray]:
        try:
            refuse_long(text, self._config.max_tokens, self._length)
        except TooLong as error:
            raise self._refused(error) from None
        encoded: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        learned = np.zeros(len(starts), dtype=np.bool_)
        for begin, end in spans:
            learned |= (begin <= starts) & (starts < end)
        return encoded["input_ids"], learned

    def _length(self, text: str) -> int:
        return len(encode(self._tokenizer, text, special_tokens=False))

    def _refused(self, error: TooLong) -> BadRow:
        return BadRow(f"the row is {error} long; data.max_tokens is {self._config.max_tokens:,}")


def _where_they_part(asked: str, shown: str) -> tuple[str, str]:
    """What each text has from there on, some characters of it."""
    pairs = zip(asked, shown, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(asked), len(shown)))
    return asked[place:][:40], shown[place:][:40]


def _learned_turns(messages: Messages, first: int, trained: Sequence[bool]) -> list[int]:
    """The assistant's turns from message `first` on, but for those that are not to be learned."""
    turns = [turn for turn in range(first, len(messages)) if messages[turn]["role"] == "assistant"]
    if not turns:
        raise BadRow("the messages have no assistant turn after the prompt")
    learned = [turn for turn in turns if trained[turn]]
    if not learned:
        raise BadRow("no turn of the assistant is to be learned: its messages say so by `weight`, `loss` or `train`")
    return learned


def _pictures_in(messages: Messages) -> int:
    parts = (message["content"] for message in messages if isinstance(message["content"], list))
    return sum(part["type"] in ("image", VIDEO_PART) for content in parts for part in content)


def largest_id(item: Demonstration) -> int:
    """Of prompt and answer, neither of which is empty."""
    return int(max(item.prompt_ids.max(), item.response_ids.max()))


def unpack_demonstration(arrays: Sequence[Array], index: int) -> Demonstration:
    prompt_ids, response_ids, loss_mask = arrays
    return Demonstration(index, prompt_ids, response_ids, loss_mask)


class SftDataset(DemonstrationDataset[Demonstration]):
    """Rows to imitate."""

    rows_are = "demonstrations"

    def pack(self, item: Demonstration, /) -> Packed:
        return self._pack_demonstration(item)

    def unpack(self, packed: Packed, index: int, /) -> Demonstration:
        return unpack_demonstration(packed.arrays, index)

    def largest_id_of(self, item: Demonstration, /) -> int:
        return largest_id(item)

    def _read(self, row: Row, folder: Path) -> tuple[str, Sequence[Demonstration]]:
        return self._demonstrations(row, folder)
