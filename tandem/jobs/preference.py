"""Training on pairs of answers, or on rated ones, as a job: DPO and its kin, KTO, and reward models."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tandem.algorithms.preference import BradleyTerryLoss, LinearScoreLoss, PairBatch, PairLoss, preference_loss
from tandem.batching.packing import pairs_to_batch, rated_to_batch, scored_at_the_end
from tandem.checkpoint.fork import Fork
from tandem.cluster import make_cluster
from tandem.config.tree import DpoConfig, SftConfig
from tandem.controller.assembly import make_reference, pictures_of
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import Role
from tandem.controller.roles import Actor, Critic, ReferencePolicy, Trained
from tandem.data.sft import DemonstrationDataset
from tandem.jobs.callbacks import Callback
from tandem.jobs.inputs import Inputs
from tandem.jobs.run import run_job
from tandem.jobs.sft import SupervisedJob
from tandem.signals import StopReason
from tandem.types import Batch, FloatArray, Preference, RatedAnswer, StepMetrics
from tandem.workers.training import TrainSpec, TrainWorker

Item = TypeVar("Item")
Model = TypeVar("Model", bound=Trained)
PairInputs = Inputs[DemonstrationDataset[Preference]]


class ComparingJob(SupervisedJob[Item, Model]):
    """Every step scores the pairs' tokens, takes the loss's gradient by each score, and descends along these."""

    loss: PairLoss
    reference: ReferencePolicy | None = None

    @abstractmethod
    def scores(self, batch: Batch) -> FloatArray:
        """What the loss compares of each token in the mask, `[T]`."""

    @abstractmethod
    def batch_of(self, rows: Sequence[Item]) -> Batch:
        """The rows that the model sees."""

    @abstractmethod
    def facts_of(self, rows: Sequence[Item]) -> dict[str, torch.Tensor]:
        """What the data says of each pair: the fields of PairBatch that end in `_D`."""

    def learn(self, rows: Sequence[Item]) -> tuple[Batch, StepMetrics]:
        batch, gradients_T, metrics = self._compare(rows)
        batch.tokens.loss_weights = gradients_T
        return batch, {**metrics, **self._model.learn(batch, LinearScoreLoss()).get()[0]}

    def validation_metrics(self, rows: Sequence[Item]) -> StepMetrics:
        return self._compare(rows)[2]

    def _compare(self, rows: Sequence[Item]) -> tuple[Batch, FloatArray, StepMetrics]:
        batch = self.batch_of(rows)
        reference = self.reference.logprobs(batch) if self.reference else None
        scores_T = torch.from_numpy(self.scores(batch))
        compared = PairBatch(
            trajectories_T=torch.from_numpy(batch.row_of_token),
            mask_T=torch.from_numpy(batch.loss_mask),
            ref_logprobs_T=torch.from_numpy(reference.get()) if reference else None,
            **self.facts_of(rows),
        )
        gradients_T, metrics = self.loss(scores_T, compared)
        return batch, gradients_T.numpy(), metrics


class PolicyJob(ComparingJob[Item, Actor]):
    """The policy is its own reward model (Rafailov et al. 2023)."""

    name = "dpo"

    def __init__(
        self,
        config: DpoConfig,
        inputs: Inputs[DemonstrationDataset[Item]],
        placement: Placement,
        fork: Fork | None = None,
    ) -> None:
        super().__init__(config, inputs, placement, fork)
        self.loss = preference_loss(config.preference)
        if config.preference.has_reference:
            frozen = TrainSpec(config.model, config.training, pictures=pictures_of(config))
            elsewhere = fork is not None and bool(fork.weights)
            self.reference = make_reference(frozen, self._model, placement, starts_elsewhere=elsewhere)

    def make_model(self, spec: TrainSpec) -> Actor:
        """The policy."""
        return self.placement.group(Role.Actor, Actor, TrainWorker, spec)

    def scores(self, batch: Batch) -> FloatArray:
        """Log-probs."""
        return self._model.logprobs(batch).get()


class DpoJob(PolicyJob[Preference]):
    """Pairs of answers."""

    def batch_of(self, rows: Sequence[Preference]) -> Batch:
        return pairs_to_batch(rows)

    def facts_of(self, rows: Sequence[Preference]) -> dict[str, torch.Tensor]:
        return {"margins_D": _margins(rows)}


class KtoJob(PolicyJob[RatedAnswer]):
    """Answers, of which each is good or bad (Ethayarajh et al. 2024)."""

    def batch_of(self, rows: Sequence[RatedAnswer]) -> Batch:
        return rated_to_batch(rows, self._config.data.max_tokens)

    def facts_of(self, rows: Sequence[RatedAnswer]) -> dict[str, torch.Tensor]:
        desirable_D = torch.tensor([row.desirable for row in rows])
        return {"margins_D": torch.zeros(len(rows)), "desirable_D": desirable_D}


class RewardModelJob(ComparingJob[Preference, Critic]):
    """One score for a prompt and its answer: a value head after the last token."""

    name = "reward_model"
    loss = BradleyTerryLoss()

    def make_model(self, spec: TrainSpec) -> Critic:
        """A model with a value head."""
        spec = replace(spec, value_head=True, scores_rows=True)
        return self.placement.group(Role.RewardModel, Critic, TrainWorker, spec)

    def batch_of(self, rows: Sequence[Preference]) -> Batch:
        ends = [replace(p, chosen=scored_at_the_end(p.chosen), rejected=scored_at_the_end(p.rejected)) for p in rows]
        return pairs_to_batch(ends)

    def facts_of(self, rows: Sequence[Preference]) -> dict[str, torch.Tensor]:
        return {"margins_D": _margins(rows)}

    def scores(self, batch: Batch) -> FloatArray:
        """The value after each answer's last token."""
        return self._model.values(batch).get()


def _margins(pairs: Sequence[Preference]) -> torch.Tensor:
    return torch.tensor([pair.margin for pair in pairs])


def train_dpo(config: DpoConfig, inputs: Inputs[Any], callbacks: Sequence[Callback] = ()) -> StopReason | None:
    """`tandem dpo`: what stopped the run before its last step, if anything did. `inputs`: of `dataset_of`."""
    kind = KtoJob if config.preference.loss == "kto" else DpoJob
    with closing(make_cluster(config)) as cluster:

        def make_job(fork: Fork | None) -> KtoJob | DpoJob:
            return kind(config, inputs, Placement(cluster, pools_of(config)), fork)

        return run_job(config, make_job, callbacks)


def train_reward_model(config: SftConfig, inputs: PairInputs, callbacks: Sequence[Callback] = ()) -> StopReason | None:
    """`tandem reward-model`: what stopped the run before its last step, if anything did."""
    with closing(make_cluster(config)) as cluster:

        def make_job(fork: Fork | None) -> RewardModelJob:
            return RewardModelJob(config, inputs, Placement(cluster, pools_of(config)), fork)

        return run_job(config, make_job, callbacks)
