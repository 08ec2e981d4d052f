"""What the dataflow may ask of each role: worker groups with typed methods.

Each method runs on the workers of the role and returns a Future of the answer for the whole batch, or, of rows that
stay on the ranks (`tandem.controller.placed`), for these. Suffix: `[T]` response tokens of all rows, head to tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tandem.checkpoint.draft import Draft
from tandem.controller.placed import PlacedRows
from tandem.controller.worker_groups import Future, Ranks, RemoteWorkers
from tandem.types import Batch, FloatArray, IntArray, Prompt, StepMetrics, TokenLoss, Trajectory
from tandem.workers.rollout import Advance, Ask, RolloutRequest, RolloutSpec, RolloutWorker
from tandem.workers.training import TrainWorker

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.weights.bridge import Address

_REFERENCE = "reference"


class Model(RemoteWorkers[TrainWorker]):
    """A model that is trained or that scores, on the devices or, between `offload` and `onload`, in host memory."""

    def offload(self) -> Future[None]:
        """Leave the device until `onload`; meanwhile only saving, publishing and taking up the actor's weights are
        legal."""
        return self.call(TrainWorker.offload)

    def onload(self) -> Future[None]:
        """Come back to the device."""
        return self.call(TrainWorker.onload)


class Trained(Model):
    """A model with an optimizer; a checkpoint holds both."""

    def learn(self, batch: Batch | PlacedRows, loss: TokenLoss[Tensor]) -> Future[tuple[StepMetrics, FloatArray]]:
        """One optimizer step: the loss's metrics and the optimizer's, and a policy's log-probs before it, `[T]`, NaN
        outside `loss_mask`. `batch.tokens` holds every column that the loss reads."""
        return self.call_rows(TrainWorker.learn, batch, loss)

    def learn_steps(
        self, steps: Sequence[PlacedRows], loss: TokenLoss[Tensor]
    ) -> Future[list[tuple[StepMetrics, FloatArray]]]:
        """Several optimizer steps, one after the other, in one call; of each, what `learn` returns."""
        return self.call_steps(TrainWorker.learn, steps, loss)

    def save(self, draft: Draft, name: str = ".") -> None:
        """Copy the state, and begin to write `model/` and `state/` into the directory `name` of a checkpoint, which
        every rank sees; returns when the copy is made."""
        target = draft.directory / name
        for part in ("model", "state"):
            (target / part).mkdir(parents=True)
        draft.seals += self.call_all(TrainWorker.save, target).get()
        draft.checks.append(self._check_saved)

    def _check_saved(self) -> None:
        self.call_all(TrainWorker.check_saved).get()

    def load(self, directory: Path, new_schedule: bool = False) -> Future[None]:
        """Continue exactly where `save` was, but for `new_schedule`: then the learning rate's schedule begins anew.

        UserError when what was saved is of another model.
        """
        return self.call(TrainWorker.load, directory, new_schedule)


class Policy(Model):
    """A language model that scores tokens: the reference policy, a teacher."""

    def logprobs(self, batch: Batch | PlacedRows) -> Future[FloatArray]:
        """The log-prob of each response token, `[T]`, 0 outside `loss_mask`."""
        return self.call_rows(TrainWorker.logprobs, batch)

    def token_statistics(self, batch: Batch | PlacedRows) -> Future[tuple[FloatArray, FloatArray]]:
        """What `logprobs` returns, and of the same pass the sum of squared probabilities over the vocabulary at each
        response token, `[T]` each, 0 outside `loss_mask`."""
        return self.call_rows(TrainWorker.token_statistics, batch)

    def top_logprobs(self, batch: Batch | PlacedRows) -> Future[tuple[IntArray, FloatArray]]:
        """The most probable tokens in the place of each response token, and their log-probs, `[T, k]` each, 0 outside
        `loss_mask`; k is `TrainSpec.top.count`."""
        return self.call_rows(TrainWorker.top_logprobs, batch)


class ReferencePolicy(Protocol):
    """What the policy is compared with."""

    def logprobs(self, batch: Batch | PlacedRows) -> Future[FloatArray]:
        """The log-prob of each response token, `[T]`, 0 outside `loss_mask`."""
        ...


class Teacher(Protocol):
    """What is distilled: a model of the run, or a served one."""

    def logprobs(self, batch: PlacedRows) -> Future[FloatArray]:
        """The log-prob of each response token, `[T]`, 0 outside `loss_mask`."""
        ...

    def top_logprobs(self, batch: PlacedRows) -> Future[tuple[IntArray, FloatArray]]:
        """As `Policy.top_logprobs`."""
        ...


class MovingReference(Policy):
    """A reference that takes up the policy's weights from time to time: a checkpoint holds it, too."""

    def approach_actor(self, share: float) -> Future[None]:
        """Move by this share of the way to the actor's present weights; the actor is in the same processes."""
        return self.call(TrainWorker.approach_actor, share)

    def save(self, draft: Draft) -> None:
        """Copy the weights, and begin to write them into `reference/` of a checkpoint."""
        target = draft.directory / _REFERENCE
        (target / "state").mkdir(parents=True)
        draft.seals += self.call_all(TrainWorker.save, target).get()
        draft.checks.append(self._check_saved)

    def _check_saved(self) -> None:
        self.call_all(TrainWorker.check_saved).get()

    def load(self, checkpoint: Path) -> None:
        """The weights of a checkpoint, which has them where `kl.refresh_steps` is set; another run's may have none."""
        if (checkpoint / _REFERENCE).is_dir():
            self.call(TrainWorker.load, checkpoint / _REFERENCE, False).get()


class ValueModel(Model):
    """A model of one number a token: a frozen reward model."""

    def values(self, batch: Batch | PlacedRows) -> Future[FloatArray]:
        """The number at each response token, `[T]`, 0 outside `loss_mask`."""
        return self.call_rows(TrainWorker.values, batch)


class Actor(Policy, Trained):
    """The policy in training."""

    def base_logprobs(self, batch: Batch | PlacedRows) -> Future[FloatArray]:
        """As `logprobs`, of the policy without its adapters."""
        return self.call_rows(TrainWorker.base_logprobs, batch)

    def open_bridge(self, receivers: int, delta: bool) -> Future[Address]:
        """Make a way for weights to the ranks of another pool; where both sides join it, at the same time."""
        return self.call(TrainWorker.open_bridge, receivers, delta)

    def join_bridge(self, address: Address) -> Future[None]:
        """Send weights to the rollout's pool over this bridge from now on."""
        return self.call(TrainWorker.join_bridge, address)

    def send_weights(self) -> Future[None]:
        """Send the weights over the bridge; returns when the receivers have them."""
        return self.call(TrainWorker.send_weights)


class WithoutAdapters:
    """The reference of a policy whose adapters alone learn: the policy without them. It takes no memory of its own."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def logprobs(self, batch: Batch | PlacedRows) -> Future[FloatArray]:
        """The log-prob of each response token, `[T]`, 0 outside `loss_mask`."""
        return self._actor.base_logprobs(batch)


class Critic(ValueModel, Trained):
    """The model of expected returns, in training; also a reward model in training."""


_ANSWERING = ("answer", "advance", "generate", "generate_for_eval")


class Rollout(RemoteWorkers[RolloutWorker]):
    """The generation engines.

    Data rows stay here: where an answer is one turn, prompts go without them to the engines and get them back.
    """

    def __init__(self, ranks: Ranks, name: str, kind: type[RolloutWorker], spec: RolloutSpec) -> None:
        super().__init__(ranks, name, kind, spec)
        ours = all(getattr(kind, verb, None) is getattr(RolloutWorker, verb) for verb in _ANSWERING)
        self._rows_stay = ours and spec.conversation is None
        """A conversation may read them, and so may what another kind of worker does."""
        self._asked: dict[int, Prompt] = {}
        """What the engines have, by number, where rows stay."""

    def generate(self, requests: Sequence[RolloutRequest], greedy: bool = False) -> Future[list[list[Trajectory]]]:
        """A trajectory for each seed of each request, to train on."""
        return self._whole(requests, self.call(RolloutWorker.generate, self._sent(requests), greedy))

    def generate_for_eval(self, requests: Sequence[RolloutRequest]) -> Future[list[list[Trajectory]]]:
        """Validation answers, drawn as each request says, else as `generation.eval`."""
        return self._whole(requests, self.call(RolloutWorker.generate_for_eval, self._sent(requests)))

    def advance(self, asks: Mapping[int, Mapping[int, Ask]], patience_s: float) -> Future[dict[int, Advance]]:
        """Each engine that has an entry starts on these asks, by number, and generates until one of all that it has
        under way is complete, or until `patience_s` have passed; what is complete, by engine."""
        if not self._rows_stay:
            return self.call_each(RolloutWorker.advance, asks, patience_s)
        new = {number: ask for of_engine in asks.values() for number, ask in of_engine.items()}
        self._asked |= {number: ask.request.prompt for number, ask in new.items()}
        sent = {
            engine: {number: ask._replace(request=_without_row(ask.request)) for number, ask in of_engine.items()}
            for engine, of_engine in asks.items()
        }
        return self.call_each(RolloutWorker.advance, sent, patience_s).map(self._answered)

    def _answered(self, advances: dict[int, Advance]) -> dict[int, Advance]:
        for number, siblings, greedy in (done for advance in advances.values() for done in advance.done):
            prompt = self._asked.pop(number)
            for trajectory in (*siblings, *([greedy] if greedy else [])):
                trajectory.prompt = prompt
        return advances

    def _sent(self, requests: Sequence[RolloutRequest]) -> Sequence[RolloutRequest]:
        return [_without_row(request) for request in requests] if self._rows_stay else requests

    def _whole(
        self, requests: Sequence[RolloutRequest], answered: Future[list[list[Trajectory]]]
    ) -> Future[list[list[Trajectory]]]:
        if not self._rows_stay:
            return answered

        def restore(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
            for request, siblings in zip(requests, groups, strict=True):
                for trajectory in siblings:
                    trajectory.prompt = request.prompt
            return groups

        return answered.map(restore)

    def room(self) -> Future[list[int]]:
        """Samples that each engine could start at once; negative where some wait already."""
        return self._submit(RolloutWorker.room.__name__)

    def publish(self, version: int) -> Future[None]:
        """Serve the actor's present weights as `version`; without an actor, those that were loaded."""
        return self.call(RolloutWorker.publish, version)

    def join_bridge(self, address: Address) -> Future[list[None]]:
        """Take weights from the actor's pool over this bridge from now on."""
        return self.call_all(RolloutWorker.join_bridge, address)

    def sleep(self) -> Future[None]:
        """Give memory back until `wake`, as `generation.sleep` says."""
        return self.call(RolloutWorker.sleep)

    def wake(self) -> Future[None]:
        """Take the memory again; the next requests may come."""
        return self.call(RolloutWorker.wake)


def _without_row(request: RolloutRequest) -> RolloutRequest:
    return request._replace(prompt=replace(request.prompt, text="", ground_truth=None, row={}))
