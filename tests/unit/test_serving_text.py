"""Text of tokens as they come: the same whatever the pieces, and nothing of a stop string."""

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.serving.detokenizer import Detokenizer, StopCutter

TEXTS = (
    "plain words, and more of them.",
    "naïve Größe — 東京の天気は晴れです 🎉🏳️‍🌈 done",
    "  leading spaces\n\tand tabs\r\n\r\nlines  ",
    "a broken end 東"[:-1] + "東京",
)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with two merges: letters beyond ASCII are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<end>", *alphabet, "wo", "rd"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("w", "o"), ("r", "d")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def spaces_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: a word's space is at its beginning, and the first one of a text is not shown."""
    vocabulary = {"<unk>": 0, "▁plain": 1, "▁words": 2, "s": 3, "▁": 4, "▁and": 5, ",": 6, "<0xE6>": 7, "<0x9D>": 8}
    vocabulary |= {"<0xB1>": 9, "東": 10}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Decoder:
    """Counts the tokens that it is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.given = 0

    def __call__(self, token_ids: Sequence[int]) -> str:
        self.given += len(token_ids)
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def pieces(decode: Decoder, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    letters = Detokenizer(decode, prompt)
    return [*(letters.push(token) for token in ids), letters.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text_and_never_hold_half_a_letter(text: str) -> None:
    tokenizer = bytes_tokenizer()
    ids = tokenizer.encode(text)
    found = pieces(Decoder(tokenizer), ids)
    assert "".join(found) == text == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in found)
    half = len(ids) // 2
    continued = pieces(Decoder(tokenizer), ids[half:], prompt=ids[:half])
    assert text.endswith("".join(continued)) and len("".join(continued)) >= len(tokenizer.decode(ids[half:])) - 3


def test_any_tokens_at_all_give_the_text_of_all_of_them() -> None:
    tokenizer, draw = bytes_tokenizer(), random.Random(0)
    beyond_ascii = [number for number in range(1, len(tokenizer)) if "\ufffd" in tokenizer.decode([number])]
    for tokens in (range(len(tokenizer)), beyond_ascii, tokenizer.encode("東é🎉")):
        for _ in range(200):
            ids = draw.choices(tokens, k=60)
            assert "".join(pieces(Decoder(tokenizer), ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_letter_that_never_ends_is_told_at_last() -> None:
    tokenizer = bytes_tokenizer()
    ids = tokenizer.encode("x東")
    assert pieces(Decoder(tokenizer), ids[:-1]) == ["x", "", "", "\ufffd"]
    continuation = tokenizer.encode("東")[1]
    endless = pieces(Decoder(tokenizer), [continuation] * 40)
    assert "".join(endless) == "\ufffd" * 40 and sum(map(bool, endless)) >= 5


def test_the_cost_of_a_token_does_not_grow() -> None:
    tokenizer = bytes_tokenizer()
    for ids in (tokenizer.encode("words and " * 500), [tokenizer.encode("東")[1]] * 2000):
        decode = Decoder(tokenizer)
        pieces(decode, ids)
        assert decode.given <= 60 * len(ids)


def test_the_space_before_the_first_word_is_told_where_there_is_a_prompt() -> None:
    tokenizer = spaces_tokenizer()
    assert "".join(pieces(Decoder(tokenizer), [1, 2, 6, 5])) == "plain words, and"
    assert pieces(Decoder(tokenizer), [2, 6, 5], prompt=[1]) == [" words", ",", " and", ""]
    assert pieces(Decoder(tokenizer), [7, 8, 9, 2], prompt=[1]) == ["", "", "東", " words", ""]


@pytest.mark.parametrize(
    "stops", [["stop"], ["stop", "top"], ["ss", "sst"], ["p"], ["never"], [], ["stop st"], ["aab"]]
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(stops: list[str]) -> None:
    draw = random.Random(1)
    for text in ("do not stop there", "st sto stostop", "ssst", "no end", "aaaab", "stop", "top stop"):
        ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
        expected = text[: min(ends)[1]] if ends else text
        for _ in range(30):
            cutter, told = StopCutter(stops), ""
            for letter in text:
                told += cutter.push(letter) if draw.random() < 0.7 else cutter.push("") + cutter.push(letter)
                assert expected.startswith(told)
            assert told + cutter.end() == expected and cutter.stopped == bool(ends)


def test_text_that_cannot_be_a_stop_string_any_more_is_told_at_once() -> None:
    cutter = StopCutter(["stop"])
    assert [cutter.push(piece) for piece in ("a", "st", "x", "sto", "ry", "st")] == ["a", "", "stx", "", "story", ""]
    assert cutter.end() == "st"
    assert [cutter.push(piece) for piece in ("the s", "top. And", "more")] == ["the ", "", ""] and cutter.stopped
