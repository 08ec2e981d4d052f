"""Two policies learn Nim from playing each other: one loop, two dataflows, REINFORCE against the mean of like games.

    python -m examples.self_play.nim runs/nim                            the task
    tandem sft examples/self_play/sft.yaml                               a model that moves at random
    python -m examples.self_play.play examples/self_play/play.yaml       two copies of it learn

The configuration is the first player's. The second one starts from the same model, draws by another seed, and leaves
its own in the run directory whose name ends in `-second`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import tandem
from examples.self_play.nim import FOUL, after, best_share, moves


@dataclass
class Player:
    """A policy."""

    flow: tandem.Dataflow
    tokenizer: Any

    @cached_property
    def tokens(self) -> Any:
        return tandem.make_format(self.tokenizer, [self.tokenizer.eos_token_id])

    def move(self, seats: Sequence[Seat]) -> list[str]:
        """What it says in each of its seats, all of them asked at once."""
        answers = self.flow.rollout.generate([seat.request() for seat in seats]).get()
        return [seat.said(answer) for seat, (answer,) in zip(seats, answers, strict=True)]

    def decode(self, rows: list[Any]) -> list[str]:
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)


@dataclass
class Seat:
    """One side of a game, as its player sees it."""

    player: Player
    prompt: tandem.Prompt
    seed: int
    transcript: tandem.Transcript | None = None

    def hears(self, text: str) -> None:
        message = {"role": "user", "content": text}
        if self.transcript is None:
            self.transcript = tandem.Transcript(self.player.tokens, [message])
        else:
            self.transcript.tell([message])

    def request(self) -> tandem.RolloutRequest:
        prompt = replace(self.prompt, token_ids=self.transcript.ids)
        return tandem.RolloutRequest(prompt, (self.transcript.turn_seed(self.seed),))

    def said(self, answer: tandem.Trajectory) -> str:
        """Take in the turn that an engine made as an answer of its own."""
        turn = (answer.response_ids, answer.rollout_logprobs, answer.versions, answer.status)
        return self.transcript.take(tandem.Completion(0, *turn)).content

    def trajectory(self, sample: int) -> tandem.Trajectory:
        opening = self.transcript.messages[: self.transcript.opening]
        prompt = replace(self.prompt, row={**self.prompt.row, "prompt": opening})
        return self.transcript.trajectory(prompt, sample, self.player.decode)


@dataclass
class Game:
    seats: tuple[Seat, Seat]
    """The first one begins."""
    stones: int
    turn: int = 0
    winner: int | None = None
    """The place of a seat."""

    @property
    def to_move(self) -> Seat:
        return self.seats[self.turn % 2]

    def play(self, move: str) -> None:
        """Who takes the last stone wins, and who makes an illegal move loses: the other one hears of it."""
        left, mover = after(self.stones, move), self.turn % 2
        self.turn += 1
        if left is None or left == 0:
            self.winner = 1 - mover if left is None else mover
            self.to_move.hears(FOUL if left is None else "0")
        else:
            self.stones = left


def play(games: Sequence[Game], players: Sequence[Player]) -> None:
    """Play them to their ends; a player is asked once a round for all games in which it is to move."""
    while going := [game for game in games if game.winner is None]:
        for player in players:
            own = [game for game in going if game.to_move.player is player and game.winner is None]
            for game in own:
                game.to_move.hears(str(game.stones))
            for game, move in zip(own, player.move([game.to_move for game in own]), strict=True):
                game.play(move)


def own_sides(player: Player, games: Sequence[Game]) -> list[list[tandem.Trajectory]]:
    """What the player said and heard, with games from the same heap in which it had the same seat as siblings."""
    siblings: dict[tuple[int, int], list[tandem.Trajectory]] = {}
    for game in games:
        for place, seat in enumerate(game.seats):
            if seat.player is player and seat.transcript.turns:  # none: the other one's first move was illegal
                group = siblings.setdefault((seat.prompt.index, place), [])
                group.append(seat.trajectory(len(group)))
    return list(siblings.values())


def learn(player: Player, games: Sequence[Game], step: int) -> None:
    """REINFORCE; the baseline is the mean of siblings."""
    groups = player.flow.reward.score(own_sides(player, games), step)
    player.flow.reward.check_share(groups)
    batch = tandem.to_batch(groups)
    means = np.bincount(batch.groups, batch.rewards) / np.bincount(batch.groups)
    advantages_B = (batch.rewards - means[batch.groups]).astype(np.float32)
    batch.tokens.shares = tandem.token_shares(batch.loss_mask)
    batch.tokens.loss_weights = batch.tokens.shares * advantages_B[batch.row_of_token]
    player.flow.actor.learn(batch, tandem.NextTokenLoss()).get()
    player.flow.publish(step)


def won_against_chance(player: Player, prompts: Sequence[tandem.Prompt], seed: int) -> float:
    """The share of the games that a player wins in which it begins, and the other one draws its moves."""
    draw = random.Random(seed)
    games = []
    for prompt in prompts:
        seats = (Seat(player, prompt, draw.getrandbits(60)), Seat(player, prompt, 0))
        games.append(Game(seats, prompt.row["stones"]))
    while going := [game for game in games if game.winner is None]:
        for game in going:
            game.to_move.hears(str(game.stones))
        for game, move in zip(going, player.move([game.to_move for game in going]), strict=True):
            game.play(move)
            if game.winner is None:
                game.play(str(draw.choice(moves(game.stones))))
    return sum(game.winner == 0 for game in games) / len(games)


def new_games(prompts: Sequence[tandem.Prompt], players: Sequence[Player], count: int, seed: str) -> list[Game]:
    """`count` games from each heap that each player begins."""
    draw = random.Random(seed)
    games = []
    for prompt in prompts:
        for number in range(2 * count):
            first, second = (Seat(player, prompt, draw.getrandbits(60)) for player in players)
            games.append(Game((second, first) if number % 2 else (first, second), prompt.row["stones"]))
    return games


def of_the_second(config: tandem.TrainConfig) -> tandem.TrainConfig:
    trainer = config.trainer
    own = {"run_dir": Path(f"{trainer.run_dir}-second"), "seed": trainer.seed + 1}
    return config.model_copy(update={"trainer": trainer.model_copy(update=own)})


def main(config: tandem.TrainConfig) -> None:
    tokenizer = tandem.load_tokenizer(config.model)
    with tandem.Dataflow(config) as flow, tandem.Dataflow(of_the_second(config)) as other:
        players = [Player(flow, tokenizer), Player(other, tokenizer)]
        heaps = [prompt for _ in range(64) for prompt in next(flow.prompts)]
        best = np.mean([best_share(prompt.row["stones"]) for prompt in heaps])
        print(f"against chance the best player wins {best:.3f}", flush=True)
        for step in range(flow.total_steps + 1):
            if step:
                seed = f"{config.trainer.seed} {step}"
                games = new_games(next(flow.prompts), players, config.algorithm.group_size, seed)
                play(games, players)
                for player in players:
                    learn(player, games, step)
            if step % 20 == 0 or step == flow.total_steps:
                won = [won_against_chance(player, heaps, seed=step) for player in players]
                print(f"step {step}: won against chance {won[0]:.3f} and {won[1]:.3f}", flush=True)
        flow.save(flow.total_steps)
        other.save(flow.total_steps)


if __name__ == "__main__":
    tandem.run_program(tandem.TrainConfig, main)
