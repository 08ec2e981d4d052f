"""The report: every metric once, text made harmless, sane axes; and docs/metrics.md as a list that can be matched."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tandem.errors import UserError
from tandem.tracking.charts import Series, figure, number
from tandem.tracking.report import write_report
from tandem.tracking.trajectories import trajectories_path, write_trajectories
from tandem.types import Batch, Group, Prompt, Score, Status, TokenColumns, Trajectory

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented_metrics() -> list[re.Pattern[str]]:
    """The names in the first column of the tables of docs/metrics.md; `<x>` stands for one or more characters."""
    names = re.findall(r"^\| `([^`]+)` \|", METRICS_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) == len(set(names)), "a metric is listed twice"
    return [re.compile(re.sub(r"<\w+>", "(.+)", re.escape(name))) for name in names]


def undocumented(metrics) -> list[str]:
    patterns = documented_metrics()
    return [name for name in metrics if not any(pattern.fullmatch(name) for pattern in patterns)]


def test_documented_names_match_with_placeholders():
    assert (
        undocumented(
            ["reward/mean", "reward/acc", "val/openai/gsm8k/acc/maj@16", "time/step_s", "perf/tokens_per_s", "actor/kl"]
        )
        == []
    )
    unknown = ["actor/kl/mean", "val/x/acc/worst@2", "time/step"]
    assert undocumented(unknown) == unknown


class Elements(HTMLParser):
    """Tags, attributes and text as a browser sees them; unclosed or crossed tags fail."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def make_run(run: Path, records: list[dict], texts: list[str]) -> Path:
    run.mkdir()
    (run / "config.yaml").write_text("model: {path: models/<tiny>}\nalgorithm: {type: grpo}\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in (1, 2, 3, 4, 5) if texts else ():
        rows = len(texts)
        trajectories = [
            Trajectory(
                Prompt(i, np.zeros(1, np.int32), f"ask <{i}>", "toy", None),
                0,
                *(np.zeros(2, kind) for kind in (np.int32, bool, np.float32, np.int32)),
                text=text,
                status=Status.COMPLETED,
            )
            for i, text in enumerate(texts)
        ]
        batch = Batch(
            prompt_ids=np.zeros(rows, np.int32),
            prompt_offsets=np.arange(rows + 1),
            response_ids=np.zeros(2 * rows, np.int32),
            response_offsets=np.arange(rows + 1) * 2,
            loss_mask=np.ones(2 * rows, bool),
            versions=np.zeros(2 * rows, np.int32),
            groups=np.zeros(rows, np.int32),
            rewards=np.zeros(rows, np.float32),
            scored=np.ones(rows, bool),
            tokens=TokenColumns(advantages=np.linspace(-2, 2, 2 * rows, dtype=np.float32)),
        )
        group = Group(trajectories, [Score(float(i)) for i in range(rows)])
        write_trajectories(trajectories_path(run, step), step, [group], batch)
    return run


def test_a_report_shows_every_metric_and_loads_nothing(tmp_path):
    records = [
        {
            "step": step,
            "reward/mean": 0.1 * step,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "actor/lr": 1e-6,
            "actor/ratio/mean": 1 + 1e-8 * step,
            "critic/vf_explained_var": None if step == 1 else 0.5 + 0.01 * step,
            "something/new": step**2,
        }
        for step in (1, 2, 3)
    ]
    run = make_run(tmp_path / "run", records, ["answer"])
    (run / "summary.json").write_text('{"before": {"pass@1": 0.36, "note": "x"}, "after": {"pass@1": 0.94}}')
    assert write_report(run) == run / "report.html"
    page = (run / "report.html").read_text(encoding="utf-8")
    elements = Elements(page)
    for name in ("reward", "critic/vf_explained_var", "something/new", "actor/lr", "pass@1", "config.yaml"):
        assert name in elements.text
    assert "GRPO · run" in elements.text
    assert "models/<tiny>" in elements.text
    assert "constant: actor/lr 1e-6actor/ratio/mean 1" in elements.text
    assert "step 2\nmean 0.2\nmin 0\nmax 1" in elements.text
    assert not {tag for tag, _ in elements.seen} & {"script", "link", "img", "iframe"}
    assert not [tag for tag, attributes in elements.seen if {"src", "href", "xlink:href"} & set(attributes)]
    assert "url(" not in page and "@import" not in page and "http" not in page
    assert "prefers-color-scheme: dark" in page


def test_texts_are_escaped_and_control_characters_shown(tmp_path):
    hostile = "</pre><script>alert(1)</script> \x00 \x1b[31m \u202e &amp; line\nbreak"
    run = make_run(tmp_path / "run", [{"step": 1, "<b>": 1.0}], [hostile])
    elements = Elements(write_report(run).read_text(encoding="utf-8"))
    assert "</pre><script>alert(1)</script> ⟨U+0000⟩ ⟨U+001B⟩[31m ⟨U+202E⟩ &amp; line\nbreak" in elements.text
    assert "ask <0>" in elements.text
    assert not [tag for tag, _ in elements.seen if tag == "script"]


def test_samples_of_first_middle_and_last_step_are_coloured_by_advantage(tmp_path):
    run = make_run(tmp_path / "run", [], [f"answer {i}" for i in range(9)])
    elements = Elements(write_report(run).read_text(encoding="utf-8"))
    assert re.findall(r"Step \d", elements.text) == ["Step 1", "Step 3", "Step 5"]
    assert "No step is recorded yet." in elements.text
    assert re.findall(r"answer \d", elements.text)[:4] == ["answer 8", "answer 5", "answer 3", "answer 0"]
    colors = [attributes.get("style") for tag, attributes in elements.seen if tag == "pre"][1:8:2]
    assert [color.split("(")[1].split(",")[0] for color in colors] == ["56", "56", "222", "222"]
    assert colors[0].endswith(",0.50)") and colors[3].endswith(",0.50)")


def test_not_a_run_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="not a run directory"):
        write_report(tmp_path)


def svg_of(*series: Series) -> ElementTree.Element:
    return ElementTree.fromstring(figure("Title & more", series)).find("svg")


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.5, 0.97], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.91, 0.97], ["0.90", "0.92", "0.94", "0.96", "0.98"]),
        ([0.9991, 0.9999], ["0.9990", "0.9992", "0.9994", "0.9996", "0.9998", "1.0000"]),
        ([-3.0, 12.0], ["-5", "0", "5", "10", "15"]),
        ([2e-6, 1e-5], ["0", "2e-6", "4e-6", "6e-6", "8e-6", "1e-5"]),
        ([20_000.0, 41_000.0], ["0", "10k", "20k", "30k", "40k", "50k"]),
        ([0.0, 0.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([7.0, 7.0], ["0", "2", "4", "6", "8"]),
        ([-2.0, -2.0], ["-2.0", "-1.5", "-1.0", "-0.5", "0"]),
    ],
)
def test_value_axis_has_round_ticks(values, labels):
    svg = svg_of(Series("a", list(enumerate(values))))
    assert [text.text for text in svg.findall("text[@class='y']")] == labels


def test_points_lie_where_the_axes_say():
    svg = svg_of(Series("a", [(0, 0.0), (5, 0.5), (10, 1.0)]))
    assert svg.find("polyline").get("points") == "46.0,186.0 228.0,98.0 410.0,10.0"
    assert [text.text for text in svg.findall("text[@class='x']")] == ["0", "2", "4", "6", "8", "10"]
    assert [title.text for title in svg.iter("title")] == ["step 0\na 0", "step 5\na 0.5", "step 10\na 1"]


def test_one_step_is_a_dot_and_long_runs_keep_their_spikes():
    assert len(svg_of(Series("a", [(3, 0.5)])).findall("circle")) == 1
    points = [(step, math.sin(step / 100)) for step in range(5_000)]
    points[1234] = (1234, 9.0)
    drawn = svg_of(Series("a", points)).find("polyline").get("points").split()
    assert len(drawn) <= 400
    assert min(float(point.split(",")[1]) for point in drawn) == pytest.approx(10 + 176 / 12, abs=0.1)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.0, "1"), (0.03125, "0.03125"), (12_345, "12.3k"), (3e9, "3G"), (1.5e-6, "1.5e-6"), (-2e-4, "-2e-4")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
