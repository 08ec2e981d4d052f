"""Rows to imitate: `messages`, or `prompt` + `completion` -> Demonstration."""

from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tandem.config.tree import SftDataConfig
from tandem.data.chat import Messages, encode, messages_of, render
from tandem.data.dataset import Dataset
from tandem.data.pictures import refuse_pictures
from tandem.data.rows import BadRow, Row, cell
from tandem.types import BoolArray, Demonstration, Picture

Item = TypeVar("Item")


class DemonstrationDataset(Dataset[Item, SftDataConfig]):
    """What is made of demonstrations.

    Messages: the loss is on the assistant turns, each with its end-of-turn tokens; the prompt is everything before the
    first of them (of the completion, for a `prompt` of messages), generation prompt included. Strings: prompt and
    completion are tokenised apart, and the completion ends with the EOS token.
    """

    def _demonstration(self, row: Row, folder: Path) -> tuple[str, Demonstration]:
        row_format = "`messages`" if row.get("messages") is not None else "`prompt` + `completion`"
        pictures: list[Picture] = []
        if row_format == "`messages`":
            messages, pictures = self._take_pictures(row, messages_of(row, "messages"), folder)
            ids, learned = self._encode_messages(messages, first=1)
        elif isinstance(row.get("prompt"), str):
            refuse_pictures(row)
            ids, learned = self._encode_strings(cell(row, "prompt", str), cell(row, "completion", str))
        else:
            prompt = messages_of(row, "prompt")
            messages, pictures = self._take_pictures(row, prompt + messages_of(row, "completion"), folder)
            ids, learned = self._encode_messages(messages, first=len(prompt))
        tokens, origins, placed = self._expand(ids, pictures)
        learned = learned[origins]
        if len(tokens) > (limit := self._config.max_tokens):
            raise BadRow(f"the row is {len(tokens):,} tokens long; data.max_tokens is {limit:,}")
        cut = int(np.argmax(learned))
        if cut == 0:
            raise BadRow("the tokenizer makes no token of the prompt, or none of the answer")
        if any(learned[picture.place] for picture in placed):
            raise BadRow("an answer has a picture in it, which no policy can say")
        return row_format, Demonstration(len(self._items), tokens[:cut], tokens[cut:], learned[cut:], placed)

    def _encode_strings(self, prompt: str, completion: str) -> tuple[list[int], BoolArray]:
        prompt_ids = encode(self._tokenizer, prompt, special_tokens=True)
        answer_ids = encode(self._tokenizer, completion, special_tokens=False)
        eos = self._tokenizer.eos_token_id
        if isinstance(eos, int) and answer_ids[-1:] != [eos]:
            answer_ids.append(eos)
        return prompt_ids + answer_ids, np.repeat([False, True], [len(prompt_ids), len(answer_ids)])

    def _encode_messages(self, messages: Messages, first: int) -> tuple[list[int], BoolArray]:
        """Token ids, and which of them begin in an assistant turn from message `first` on."""
        turns = [turn for turn in range(first, len(messages)) if messages[turn]["role"] == "assistant"]
        if not turns:
            raise BadRow("the messages have no assistant turn after the prompt")
        text = render(self._tokenizer, messages)
        encoded: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        learned = np.zeros(len(starts), dtype=np.bool_)
        for turn in turns:
            before = render(self._tokenizer, messages[:turn], generation_prompt=True)
            through = render(self._tokenizer, messages[: turn + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise BadRow(f"the messages cannot be split into turns by this chat template, at message {turn + 1}")
            learned |= (len(before) <= starts) & (starts < len(through))
        return encoded["input_ids"], learned


class SftDataset(DemonstrationDataset[Demonstration]):
    """Rows to imitate."""

    def _read(self, row: Row, folder: Path) -> tuple[str, Demonstration]:
        return self._demonstration(row, folder)
