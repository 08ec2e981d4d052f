"""What the dataflow may ask of each role: worker groups with typed methods.

Each method runs on the workers of the role and returns a Future of the answer for the whole batch. Suffix:
`[T]` response tokens of all rows, head to tail.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from tandem.controller.groups import Future, RemoteWorkers
from tandem.types import Batch, FloatArray, StepMetrics, TokenLoss, Trajectory
from tandem.workers.rollout import Advance, Ask, RolloutRequest, RolloutWorker
from tandem.workers.training import TrainWorker


class Model(RemoteWorkers[TrainWorker]):
    """A model that is trained or that scores, on the devices or, between `offload` and `onload`, in host memory."""

    def offload(self) -> Future[None]:
        """Leave the device until `onload`; meanwhile only saving and publishing are legal."""
        return self.call(TrainWorker.offload)

    def onload(self) -> Future[None]:
        """Come back to the device."""
        return self.call(TrainWorker.onload)


class Trained(Model):
    """A model with an optimizer: what a checkpoint holds."""

    def learn(self, batch: Batch, loss: TokenLoss[Tensor]) -> Future[tuple[StepMetrics, FloatArray]]:
        """One optimizer step: the loss's metrics and the optimizer's, and a policy's log-probs before it, `[T]`, NaN
        outside `loss_mask`. `batch.tokens` holds every column that the loss reads."""
        return self.call(TrainWorker.learn, batch, loss)

    def save(self, directory: Path) -> Future[None]:
        """Write `model/` and `state/` into an existing directory that every rank sees."""
        return self.call(TrainWorker.save, directory)

    def load(self, directory: Path, new_schedule: bool = False) -> Future[None]:
        """Continue exactly where `save` was, but for `new_schedule`: then the learning rate's schedule begins anew.

        UserError when what was saved is of another model.
        """
        return self.call(TrainWorker.load, directory, new_schedule)


class Policy(Model):
    """A language model that scores tokens: the reference policy."""

    def logprobs(self, batch: Batch) -> Future[FloatArray]:
        """The log-prob of each response token, `[T]`, 0 outside `loss_mask`."""
        return self.call(TrainWorker.logprobs, batch)

    def squared_probs(self, batch: Batch) -> Future[FloatArray]:
        """The sum of squared probabilities over the vocabulary at each response token, `[T]`, 0 outside `loss_mask`."""
        return self.call(TrainWorker.squared_probs, batch)


class ValueModel(Model):
    """A model of one number a token: a frozen reward model."""

    def values(self, batch: Batch) -> Future[FloatArray]:
        """The number at each response token, `[T]`, 0 outside `loss_mask`."""
        return self.call(TrainWorker.values, batch)


class Actor(Policy, Trained):
    """The policy in training."""

    def open_bridge(self, receivers: int, delta: bool) -> Future[str]:
        """Make a way for weights to the ranks of another pool; the address that they join it at."""
        return self.call(TrainWorker.open_bridge, receivers, delta)

    def send_weights(self) -> Future[None]:
        """Send the weights over the bridge; returns when the receivers have them."""
        return self.call(TrainWorker.send_weights)


class Critic(ValueModel, Trained):
    """The model of expected returns, in training; also a reward model in training."""


class Rollout(RemoteWorkers[RolloutWorker]):
    """The generation engines."""

    def generate(self, requests: Sequence[RolloutRequest], greedy: bool = False) -> Future[list[list[Trajectory]]]:
        """A trajectory for each seed of each request, to train on."""
        return self.call(RolloutWorker.generate, requests, greedy)

    def generate_for_eval(self, requests: Sequence[RolloutRequest]) -> Future[list[list[Trajectory]]]:
        """Validation answers, drawn as `generation.eval` says."""
        return self.call(RolloutWorker.generate_for_eval, requests)

    def advance(self, asks: Mapping[int, Mapping[int, Ask]], patience_s: float) -> Future[dict[int, Advance]]:
        """Each engine that has an entry starts on these asks, by number, and generates until one of all that it has
        under way is complete, or until `patience_s` have passed; what is complete, by engine."""
        return self.call_each(RolloutWorker.advance, asks, patience_s)

    def room(self) -> Future[list[int]]:
        """Samples that each engine could start at once; negative where some wait already."""
        return self._submit(RolloutWorker.room.__name__)

    def publish(self, version: int) -> Future[None]:
        """Serve the actor's present weights as `version`; without an actor, those that were loaded."""
        return self.call(RolloutWorker.publish, version)

    def join_bridge(self, address: str) -> Future[list[None]]:
        """Take weights from the actor's pool over this bridge from now on."""
        return self.call_all(RolloutWorker.join_bridge, address)

    def sleep(self) -> Future[None]:
        """Give memory back until `wake`, as `generation.sleep` says."""
        return self.call(RolloutWorker.sleep)

    def wake(self) -> Future[None]:
        """Take the memory again; the next requests may come."""
        return self.call(RolloutWorker.wake)
