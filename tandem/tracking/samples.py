"""Sample trajectories for the report: what the policy said at the start, half-way and at the end."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from tandem.tracking.charts import number
from tandem.tracking.trajectories import read_trajectories

_SHOWN_A_STEP = 4
_MAX_CHARACTERS = 6_000
_MAX_CELLS = 600
_COLUMNS = ("prompt_index", "sample", "prompt", "response", "reward", "advantage", "advantages", "status", "step")

_CONTROL = [*range(0x20), *range(0x7F, 0xA0)]
_UNSEEN = [0xAD, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF]
_VISIBLE = {code: f"⟨U+{code:04X}⟩" for code in (*_CONTROL, *_UNSEEN) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """Control, direction and zero-width characters replaced by their code points; tabs and line breaks stay."""
    return text.translate(_VISIBLE)


def samples_section(directory: Path) -> str:
    """Some trajectories of the first, the middle and the last file, backgrounds coloured by advantage."""
    files = sorted(directory.glob("step_*.parquet"))
    if not files:
        return ""
    chosen = sorted({files[0], files[len(files) // 2], files[-1]})
    steps = [_pick(path) for path in chosen]
    scale = max((abs(row["advantage"] or 0.0) for rows in steps for row in rows), default=0.0) or 1.0
    shown = [f"<h3>Step {rows[0]['step']}</h3>{''.join(_sample(row, scale) for row in rows)}" for rows in steps if rows]
    legend = f'<p class="legend">advantage <span>−{number(scale)}</span><i></i><span>+{number(scale)}</span></p>'
    return f'<section class="samples"><h2>Sample trajectories</h2>{legend}{"".join(shown)}</section>'


def _pick(path: Path) -> list[dict[str, Any]]:
    """The best, the worst and some between; rows that lost their reward only where there are no others."""
    table = read_trajectories(path, _COLUMNS)
    rewards, advantages = table["reward"].to_pylist(), table["advantage"].to_pylist()
    scored = [row for row, reward in enumerate(rewards) if reward is not None]
    rows = sorted(scored, key=lambda row: (-rewards[row], -(advantages[row] or 0.0))) or list(range(len(rewards)))
    places = {round((len(rows) - 1) * i / (_SHOWN_A_STEP - 1)) for i in range(_SHOWN_A_STEP)} if rows else set()
    return table.take([rows[place] for place in sorted(places)]).to_pylist()


def _sample(row: dict[str, Any], scale: float) -> str:
    reward = "no reward" if row["reward"] is None else f"reward {number(row['reward'])}"
    advantage = "" if row["advantage"] is None else f"advantage {row['advantage']:+.3g}"
    told = [f"prompt {row['prompt_index']}, sample {row['sample']}", advantage, row["status"]]
    spans = "".join(f"<span>{escape(part)}</span>" for part in told if part)
    color = "" if row["advantage"] is None else f' style="background:{_color(row["advantage"], scale)}"'
    return (
        f'<article><p class="told"><b>{reward}</b>{spans}</p>'
        f'<pre class="prompt">{_cut(row["prompt"])}</pre><pre{color}>{_cut(row["response"])}</pre>'
        f"{_tokens(row['advantages'])}</article>"
    )


def _tokens(advantages: list[float] | None) -> str:
    """A strip with one cell a token, where the tokens of a response differ and are not too many to see."""
    if not advantages or len(set(advantages)) == 1 or len(advantages) > _MAX_CELLS:
        return ""
    scale = max(map(abs, advantages))
    cells = "".join(
        f'<rect x="{i}" width="1" height="1" fill="{_color(value, scale)}"><title>token {i}: {value:+.3g}</title>'
        "</rect>"
        for i, value in enumerate(advantages)
    )
    return f'<svg class="strip" viewBox="0 0 {len(advantages)} 1" preserveAspectRatio="none">{cells}</svg>'


def _color(advantage: float, scale: float) -> str:
    """Blue above zero, red below; opacity grows with the size, so that it works on light and dark pages."""
    red_green_blue = "56,120,220" if advantage >= 0 else "222,72,58"
    return f"rgba({red_green_blue},{0.5 * min(abs(advantage) / scale, 1):.2f})"


def _cut(text: str) -> str:
    shown = escape(visible(text[:_MAX_CHARACTERS]))
    return shown + (f"<em> … {len(text) - _MAX_CHARACTERS} more characters</em>" if len(text) > _MAX_CHARACTERS else "")
