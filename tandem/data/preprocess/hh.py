"""HH-RLHF (Bai et al. 2022, arXiv:2204.05862), as Anthropic publishes it and as Full_hh_rlhf does."""

import re
from collections.abc import Iterator

from tandem.data.preprocess.convert import Place, verl_row
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
    prompt, good, bad = chosen[:-1], chosen[-1:], rejected[-1:]
    if rejected[:-1] != prompt or good == bad or not (good[0]["content"] and bad[0]["content"]):
        return
    yield f"preference/{place.split}", {"prompt": prompt, "chosen": good, "rejected": bad}
    yield f"sft/{place.split}", {"prompt": prompt, "completion": good}
    row = verl_row(place, "hh", "alignment", "", good[0]["content"], {})
    model = {**row["reward_model"], "style": "model"}
    yield f"rl/{place.split}", {**row, "prompt": prompt, "reward_model": model}


def _messages(transcript: str) -> list[dict[str, str]]:
    start, *parts = _SPEAKER.split(transcript)
    messages = [
        {"role": _ROLES[speaker], "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    if start.strip() or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadRow(f"a transcript does not go from `Human:` to a reply of `Assistant:`: {transcript[:60]!r}")
    return messages
