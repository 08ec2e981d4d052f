"""look: tiles that lie face down, and a tool that shows a pair of them. A user asks `2?` for the colours of pair 2.

Supervised fine-tuning on conversations of which the last ones often answer without looking, look at another pair or
name wrong colours gives a model that is sometimes right; reinforcement learning then finds that looking and seeing pay.

    python -m examples.tiles.look runs/look/task [--family qwen3_vl] [--seed 1]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from examples.one_tool import CALL_TAGS, call_and_result, opening
from examples.tiles.task import SIDE, Row, draw_weights, puzzles, write_model, write_rows

TRAIN, VALIDATION = 1000, 128
SFT_STEPS, NOISY_STEPS, SFT_ROWS = 120, 30, 64
WITHOUT_LOOK, WRONG_PAIR, WRONG_COLOURS = 0.30, 0.20, 0.20
"""Shares of the demonstrations of the last steps; the rest is right."""
TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>system\n{{ tool.function.name }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ call.function.arguments.values() | list | first }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def question(paths: list[str], colours: str, draw: random.Random) -> Row:
    """One of two pairs is asked for. The pictures are no column `images`: they are not shown before it is asked."""
    pair = draw.randint(1, 2)
    return {
        "data_source": "look",
        "prompt": [{"role": "user", "content": f"{pair}?"}],
        "pairs": paths,
        "ground_truth": colours[2 * pair - 2 : 2 * pair],
    }


def demonstrations(rows: list[Row], steps: int, noisy_steps: int, seed: int) -> Iterator[Row]:
    """`messages` rows, in the order in which they are learned: conversations of two turns, with the tool's picture
    before the second; and some of one."""
    draw = random.Random(f"demonstrations {seed}")
    for number in range(steps * SFT_ROWS):
        is_noisy = number >= (steps - noisy_steps) * SFT_ROWS
        row, kind = draw.choice(rows), draw.random() if is_noisy else 1.0
        asked, said = row["prompt"][0]["content"], row["ground_truth"]
        pair = int(asked[0])
        if kind < WITHOUT_LOOK + WRONG_PAIR + WRONG_COLOURS and not WITHOUT_LOOK <= kind < WITHOUT_LOOK + WRONG_PAIR:
            said = "".join(draw.choice("rgbypw") for _ in range(2))
        last = {"role": "assistant", "content": said}
        if kind < WITHOUT_LOOK:
            yield {"messages": [*opening("look", asked), last]}
            continue
        if kind < WITHOUT_LOOK + WRONG_PAIR:
            pair = 3 - pair
        looked = call_and_result("look", "pair", str(pair), "<image>")
        pictures = [{"path": row["pairs"][pair - 1]}]
        yield {"messages": [*opening("look", asked), *looked, last], "images": pictures}


def make(directory: Path, family: str = "qwen2_5_vl", seed: int = 0) -> None:
    """Write `model/`, `pictures/`, `sft.jsonl`, `train.jsonl` and `val.jsonl`."""
    side, draw = SIDE[family], random.Random(seed)
    train = [question(*puzzle, draw) for puzzle in puzzles(directory, "train", TRAIN, 1000 + seed, side)]
    validation = [question(*puzzle, draw) for puzzle in puzzles(directory, "val", VALIDATION, 5, side)]
    write_rows(directory / "sft.jsonl", demonstrations(train, SFT_STEPS, NOISY_STEPS, seed))
    write_rows(directory / "train.jsonl", train)
    write_rows(directory / "val.jsonl", validation)
    write_model(directory / "model", family, lambda model: draw_weights(model, seed), TEMPLATE, CALL_TAGS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", choices=SIDE, default="qwen2_5_vl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.directory, arguments.family, arguments.seed)
    counts = f"{TRAIN:,} questions to train on, {VALIDATION:,} others"
    print(f"{arguments.directory}: a model of {arguments.family}, {counts}")
