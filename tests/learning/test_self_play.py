"""Two policies in one game: each learns from its own side of it, and from nothing that the other one said."""

from __future__ import annotations

import re
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
        f"model.path={tmp_path}/sft", f"data.train_files=[{tmp_path}/nim/train.jsonl]", "trainer.steps=12",
        f"trainer.run_dir={tmp_path}/run", "algorithm.group_size=16",
    ]  # fmt: skip
    config = load_config(TrainConfig, ROOT / "examples/self_play/play.yaml", overrides)
    play.main(config)
    shares = re.findall(r"won against chance (\S+) and (\S+)", capsys.readouterr().out)
    assert all(float(after) > float(before) + 0.1 for before, after in zip(*shares, strict=True)), shares
    saved = ("sft/checkpoints/step_000060", "run/checkpoints/step_000012", "run-second/checkpoints/step_000012")
    start, first, second = ((tmp_path / step / "model/model.safetensors").read_bytes() for step in saved)
    assert first != second and start not in (first, second), "both have learned, each from its own side"


@pytest.fixture(scope="module")
def players(tmp_path_factory: pytest.TempPathFactory) -> list[play.Player]:
    """Two that no model stands behind."""
    folder = tmp_path_factory.mktemp("nim")
    nim.make(folder, seed=0)
    overrides = [f"model.path={folder}/model"]
    tokenizer = tandem.load_tokenizer(load_config(TrainConfig, ROOT / "examples/self_play/play.yaml", overrides).model)
    return [play.Player(None, tokenizer), play.Player(None, tokenizer)]


def played(players: list[play.Player], moves: str) -> play.Game:
    """A game from five stones in which they moved so."""
    prompt = tandem.Prompt(0, np.zeros(0, np.int32), "", "nim", None, {"stones": 5, "prompt": []})
    game = play.Game((play.Seat(players[0], prompt, 1), play.Seat(players[1], prompt, 2)), 5)
    for move in moves:
        game.to_move.hears(str(game.stones))
        ids = np.array(game.to_move.player.tokenizer.encode(f"{move}<|end|>"), np.int32)
        made = tandem.Trajectory(
            prompt, 0, ids, ids > 0, np.full(len(ids), -1.0, np.float32), ids * 0, move, tandem.Status.COMPLETED
        )
        game.play(game.to_move.said(made))
    return game


def outcomes(game: play.Game) -> list[float]:
    sides = [seat.trajectory(0) for seat in game.seats]
    return [nim.outcome("", [*side.prompt.row["prompt"], *side.messages]) for side in sides]


def test_each_player_trains_on_its_own_moves_alone(players: list[play.Player]) -> None:
    games = [played(players, "320"), played(players, "20"), played(players[::-1], "410")]
    sides = [play.own_sides(player, games) for player in players]
    trained = [
        [
            [
                side.prompt.row["prompt"][0]["content"]
                + "|"
                + players[0].tokenizer.decode(side.response_ids[side.loss_mask])
                for side in group
            ]
            for group in own
        ]
        for own in sides
    ]
    assert trained == [
        [["5|3<|end|>0<|end|>", "5|2<|end|>"], ["4|1<|end|>"]],
        [["3|2<|end|>", "2|0<|end|>"], ["5|4<|end|>0<|end|>"]],
    ], "siblings are games in which the player had the same seat"
    assert sides[0][0][0].text == "320" and sides[1][0][0].messages[-1]["content"] == "0"
    assert [outcomes(game) for game in games] == [[1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]]


def test_an_illegal_move_loses_and_who_has_not_moved_learns_nothing_from_it(players: list[play.Player]) -> None:
    games = [played(players, "1"), played(players, "42x")]
    assert [game.winner for game in games] == [1, 1]
    assert outcomes(games[1]) == [-1.0, 1.0]
    own, other = (play.own_sides(player, games) for player in players)
    assert [len(group) for group in own] == [2] and [len(group) for group in other] == [1]


def test_the_best_player_s_share() -> None:
    """Of four stones it leaves three, of which chance takes all in a third of the games; of five it leaves four."""
    assert [nim.best_share(stones) for stones in (1, 3, 4, 5)] == [1.0, 1.0, pytest.approx(2 / 3), 1.0]
