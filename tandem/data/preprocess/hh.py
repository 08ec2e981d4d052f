"""HH-RLHF (Bai et al. 2022, arXiv:2204.05862), as Anthropic publishes it and as Full_hh_rlhf does."""

import re
from collections.abc import Iterator

from tandem.data.preprocess.convert import Place
from tandem.data.rows import BadRow, Row, cell

_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def hh(row: Row, place: Place) -> Iterator[tuple[str, Row]]:
    """Each pair in three forms: preference/ (prompt, chosen, rejected), sft/ (prompt, completion) and rl/ (a verl row).

    `chosen` and `rejected` are transcripts, or in Full_hh_rlhf what comes after `prompt`. Skipped: pairs of equal
    replies, empty replies, and replies to different prompts.
    """
    before = row.get("prompt") or ""
    chosen, rejected = (_messages(before + cell(row, column, str)) for column in ("chosen", "rejected"))
    prompt = chosen[:-1]
    replies = chosen[-1], rejected[-1]
    if rejected[:-1] != prompt or replies[0] == replies[1] or not all(reply["content"] for reply in replies):
        return
    yield f"preference/{place.split}", {"prompt": prompt, "chosen": chosen[-1:], "rejected": rejected[-1:]}
    yield f"sft/{place.split}", {"prompt": prompt, "completion": chosen[-1:]}
    model = {"style": "model", "ground_truth": replies[0]["content"]}
    extra = {"split": place.split, "index": place.index}
    row = {"data_source": "hh", "prompt": prompt, "ability": "alignment", "reward_model": model, "extra_info": extra}
    yield f"rl/{place.split}", row


def _messages(transcript: str) -> list[dict[str, str]]:
    start, *parts = _SPEAKER.split(transcript)
    messages = [
        {"role": _ROLES[speaker], "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    if start.strip() or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadRow(f"a transcript does not go from `Human:` to a reply of `Assistant:`: {transcript[:60]!r}")
    return messages
