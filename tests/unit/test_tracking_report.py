"""The report: every metric once, text made harmless, sane axes; and docs/metrics.md as a list that can be matched.

What the page draws is read from a headless Chromium, where there is one.
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from report_page import Elements, drawn_page, embedded

from tandem.errors import UserError
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
            trajectories=np.arange(rows, dtype=np.int32),
            prompts=np.zeros(rows, np.int32),
            rewards=np.zeros(rows, np.float32),
            scored=np.ones(rows, bool),
            tokens=TokenColumns(advantages=np.linspace(-2, 2, 2 * rows, dtype=np.float32)),
        )
        group = Group(trajectories, [Score(float(i)) for i in range(rows)])
        write_trajectories(trajectories_path(run, step), step, [group], batch)
    return run


def test_every_metric_is_in_one_chart(tmp_path):
    records = [
        {"step": 0, "val/a/b/acc/mean@4": 0.25, "val/a/b/acc/maj@4": 0.5},
        {"step": 1, "reward/mean": 0.1, "reward/std": 0.2, "critic/vf_loss": None, "time/step_s": 61.0, "new/x": 1},
        {"step": 2, "reward/mean": 0.3, "critic/vf_loss": 2.0, "time/step_s": 2.0, "val/a/b/acc/mean@4": 0.125},
    ]
    run = make_run(tmp_path / "run", records, [])
    assert write_report(run) == run / "report.html"
    shown = embedded(run / "report.html")
    assert shown["title"] == "GRPO · run"
    assert shown["sections"] == {
        "reward": {"reward": {"mean": [[1, 0.1], [2, 0.3]]}, "reward/std": {"": [[1, 0.2]]}},
        "val": {"val/a/b/acc": {"mean@4": [[0, 0.25], [2, 0.125]], "maj@4": [[0, 0.5]]}},
        "critic": {"critic/vf_loss": {"": [[2, 2.0]]}},
        "speed": {"time": {"step_s": [[1, 61.0], [2, 2.0]]}},
        "new": {"new/x": {"": [[1, 1]]}},
    }
    best = {"best val/a/b/acc/mean@4": 0.25}
    assert shown["facts"] == {"last step": 2, "reward/mean": 0.3, **best}


def test_long_runs_are_thinned_and_keep_their_last_value(tmp_path):
    values = [math.sin(step / 100) for step in range(5_000)]
    run = make_run(tmp_path / "run", [{"step": i, "actor/kl": value} for i, value in enumerate(values)], [])
    curve = embedded(write_report(run))["sections"]["actor"]["actor/kl"][""]
    assert curve == [[step, values[step]] for step in (*range(0, 4999, 4), 4999)]


def test_samples_are_of_first_middle_and_last_step(tmp_path):
    run = make_run(tmp_path / "run", [], [f"answer {i}" for i in range(8)] + ["x" * 7000])
    samples = embedded(write_report(run))["samples"]
    assert [sample["step"] for sample in samples] == [1] * 4 + [3] * 4 + [5] * 4
    assert [sample["reward"] for sample in samples[:4]] == [8, 5, 3, 0]
    assert samples[0]["response"] == "x" * 6000 + " … (1,000 more characters)"
    assert samples[3]["advantages"] == pytest.approx([-2, -2 + 4 / 17])


def test_samples_are_none_of_steps_that_the_run_lost(tmp_path):
    run = make_run(tmp_path / "run", [{"step": step, "loss": 1.0} for step in (1, 2, 3, 4, 5, 2, 3)], ["an answer"])
    assert {sample["step"] for sample in embedded(write_report(run))["samples"]} == {1, 2, 3}


def test_the_page_loads_nothing_and_text_cannot_become_markup(tmp_path):
    hostile = "</script><script>alert(1)</script><!--"
    run = make_run(tmp_path / "run", [{"step": 1, hostile: 1.0}], [hostile])
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script") == 1
    assert "<!--" not in page
    assert embedded(run / "report.html")["samples"][0]["response"] == hostile
    assert "default-src 'none'" in page
    assert not re.search(r"\b(src|href)=|url\(|@import|<link", page)
    assert "prefers-color-scheme: dark" in page


def test_not_a_run_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="not a run directory"):
        write_report(tmp_path)


def test_a_crash_of_the_machine_costs_the_report_what_it_emptied(tmp_path, capsys):
    """Trajectories are not flushed to the disk."""
    run = make_run(tmp_path / "run", [{"step": 5, "reward/mean": 1.0}], ["answer"])
    emptied = trajectories_path(run, 1)
    emptied.write_bytes(b"")
    (run / "trajectories/step_1 (copy).parquet").write_bytes(b"")
    shown = embedded(write_report(run))
    assert [sample["step"] for sample in shown["samples"]] == [3, 5] and shown["facts"]["reward/mean"] == 1
    assert capsys.readouterr().out.startswith(f"{emptied}: left out of the report, for it cannot be read (")
    for damaged in ("", "model: {path: "):
        (run / "config.yaml").write_text(damaged)
        with pytest.raises(UserError, match=r"config.yaml: (is empty|not valid YAML)"):
            write_report(run)


def test_the_title_says_what_was_trained(tmp_path):
    for metric, configured, title in (
        ("sft/loss", "", "SFT"),
        ("dpo/loss", "preference: {loss: ipo}\n", "IPO"),
        ("reward_model/loss", "", "REWARD MODEL"),
    ):
        run = make_run(tmp_path / title, [{"step": 1, metric: 0.5}], [])
        (run / "config.yaml").write_text("model: {path: m}\n" + configured)
        shown = embedded(write_report(run))
        assert shown["title"] == f"{title} · {title}" and shown["facts"] == {"last step": 1, metric: 0.5}


AXES = [
    ([0.0, 1.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ([0.5, 0.97], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ([0.91, 0.97], ["0.90", "0.92", "0.94", "0.96", "0.98"]),
    ([0.9991, 0.9999], ["0.9990", "0.9992", "0.9994", "0.9996", "0.9998", "1.0000"]),
    ([-3.0, 12.0], ["-5", "0", "5", "10", "15"]),
    ([2e-6, 1e-5], ["0", "2e-6", "4e-6", "6e-6", "8e-6", "1e-5"]),
    ([20_000.0, 41_000.0], ["0", "10k", "20k", "30k", "40k", "50k"]),
    ([0.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ([7.0], ["0", "2", "4", "6", "8"]),
    ([-2.0], ["-2.0", "-1.5", "-1.0", "-0.5", "0"]),
]
NUMBERS = {0: "0", 1: "1", 0.03125: "0.03125", 12_345: "12.3k", 3e9: "3G", 1.5e-6: "1.5e-6", -2e-4: "-2e-4"}
TEXTS = [
    "</pre><script>alert(1)</script> \x00 \x1b[31m \u202e &amp; line\nbreak",
    *(f"answer {i}" for i in range(1, 9)),
]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Elements:
    """The page of a run with one chart an axis, one constant a number, before and after, and trajectories."""
    records = [
        {"step": 5 * step, **{f"axis/{i}": values[step] for i, (values, _) in enumerate(AXES) if step < len(values)}}
        | {f"still/{i}": value for i, value in enumerate(NUMBERS)}
        | {"reward/mean": 0.5 * step, "reward/min": -step, "reward/max": step}
        for step in range(2)
    ]
    directory = tmp_path_factory.mktemp("drawn")
    run = make_run(directory / "run", records, TEXTS)
    (run / "summary.json").write_text('{"before": {"pass@1": 0.36, "note": "x"}, "after": {"pass@1": 0.94}}')
    return drawn_page(write_report(run), directory / "profile")


def test_value_axes_have_round_ticks(drawn):
    found: dict[str, list[str]] = {}
    title = ""
    for tag, text in drawn.texts:
        title = text if tag == "b." else title
        if tag == "text.y":
            found.setdefault(title, []).append(text)
    assert [found[f"axis/{i}"] for i in range(len(AXES))] == [ticks for _, ticks in AXES]


def test_points_lie_where_the_axes_say(drawn):
    lines = [attributes["points"] for tag, attributes in drawn.seen if tag == "polyline"]
    assert lines[0] == "46,98 410,54"
    assert "46,186 410,10" in lines
    bands = [attributes["points"] for tag, attributes in drawn.seen if tag == "polygon"]
    assert bands == ["46,98 410,186 410,10 46,98"]
    assert "step 5\nmean 0.5\nmin -1\nmax 1" in drawn.text


def test_what_never_changes_is_a_number(drawn):
    constants = [text for tag, text in drawn.texts if tag == "em."]
    assert constants[-len(NUMBERS) :] == list(NUMBERS.values())


def test_texts_are_text_and_control_characters_are_shown(drawn):
    assert "</pre><script>alert(1)</script> ⟨U+0000⟩ ⟨U+001B⟩[31m ⟨U+202E⟩ &amp; line\nbreak" in drawn.text
    assert "ask <0>" in drawn.text
    assert "models/<tiny>" in drawn.text
    assert not [tag for tag, _ in drawn.seen if tag == "script"]


def test_samples_are_coloured_by_advantage(drawn):
    colors = [attributes["style"] for tag, attributes in drawn.seen if tag == "pre" and "style" in attributes][:4]
    assert [color[color.index("(") + 1 :].split(",")[0] for color in colors] == ["56", "56", "222", "222"]
    assert "token 1: +2" in drawn.text


def test_before_and_after_are_on_top(drawn):
    assert "pass@10.36 → 0.94" in drawn.text
    bars = [attributes["style"] for tag, attributes in drawn.seen if tag == "u"]
    assert bars == ["width: 36%", "left: 36%; width: 58%"]
