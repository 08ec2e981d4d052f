"""Two policies in one game: each learns from its own side of it, and from nothing that the other one said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tandem
from examples.self_play import nim, play
from tandem.cli import main
from tandem.config.load import load_config
from tandem.config.tree import TrainConfig
from tests.conftest import ROOT


def test_two_policies_learn_from_one_game(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    nim.make(tmp_path / "nim", seed=0)
    files = [f"model.path={tmp_path}/nim/model", f"data.train_files=[{tmp_path}/nim/sft.jsonl]"]
    assert (
        main(["sft", "examples/self_play/sft.yaml", *files, f"trainer.run_dir={tmp_path}/sft", "trainer.steps=60"]) == 0
    )
    overrides = [
        f"model.path={tmp_path}/sft", f"data.train_files=[{tmp_path}/nim/train.jsonl]", "trainer.steps=1",
        f"trainer.run_dir={tmp_path}/run", "algorithm.group_size=2",
    ]  # fmt: skip
    config = load_config(TrainConfig, ROOT / "examples/self_play/play.yaml", overrides)
    play.main(config)
    assert "step 1: won against chance" in capsys.readouterr().out
    saved = ("sft/checkpoints/step_000060", "run/checkpoints/step_000001", "run-second/checkpoints/step_000001")
    start, first, second = ((tmp_path / step / "model/model.safetensors").read_bytes() for step in saved)
    assert first != second and start not in (first, second), "both have learned, each from its own side"


def test_a_seat_s_trajectory_trains_on_its_own_moves_alone(tmp_path: Path) -> None:
    nim.make(tmp_path / "nim", seed=0)
    tokenizer = tandem.load_tokenizer(
        tandem.load_config(
            TrainConfig, ROOT / "examples/self_play/play.yaml", [f"model.path={tmp_path}/nim/model"]
        ).model
    )
    player = play.Player(None, tokenizer)
    prompt = tandem.Prompt(0, np.zeros(0, np.int32), "", "nim", None, {"stones": 5, "prompt": []})
    game = play.Game((play.Seat(player, prompt, 1), play.Seat(player, prompt, 2)), 5)
    for move in ("2", "1", "2"):
        game.to_move.hears(nim.asked(game.stones))
        ids = np.array(tokenizer.encode(f"{move}<|end|>"), np.int32)
        made = tandem.Trajectory(
            prompt, 0, ids, ids > 0, np.full(len(ids), -1.0, np.float32), ids * 0, move, tandem.Status.COMPLETED
        )
        game.play(game.to_move.said(made))
    assert game.winner == 0
    first, second = (seat.trajectory(0) for seat in game.seats)
    assert first.text == "22 left2" and tokenizer.decode(first.response_ids[first.loss_mask]) == "2<|end|>2<|end|>"
    assert second.text == "1" and second.messages[-1]["content"] == "0 left"
    outcomes = [nim.outcome("", [*t.prompt.row["prompt"], *t.messages]) for t in (first, second)]
    assert outcomes == [1.0, -1.0]
