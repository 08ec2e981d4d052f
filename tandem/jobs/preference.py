"""Training on pairs of answers as a job: DPO and its kin, and reward models."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

import torch

from tandem.algorithms.preference import BradleyTerryLoss, DPOLoss, LinearScoreLoss, PairBatch, PairLoss
from tandem.batching.packing import pairs_to_batch, scored_at_the_end
from tandem.checkpoint.branch import Branch
from tandem.cluster import make_cluster
from tandem.config.tree import DpoConfig, SftConfig
from tandem.controller.assembly import make_reference, pictures_of
from tandem.controller.placement import Placement, pools_of
from tandem.controller.pools import Role
from tandem.controller.roles import Actor, Critic, Reference, Trained
from tandem.data.sft import DemonstrationDataset
from tandem.jobs.callbacks import Callback
from tandem.jobs.inputs import Inputs
from tandem.jobs.run import run_job
from tandem.jobs.sft import SupervisedJob
from tandem.signals import StopReason
from tandem.types import Batch, FloatArray, Preference, StepMetrics
from tandem.workers.training import TrainSpec, TrainWorker

Model = TypeVar("Model", bound=Trained)
PairInputs = Inputs[DemonstrationDataset[Preference]]


class PreferenceJob(SupervisedJob[Preference, Model]):
    """Every step scores the pairs' tokens, takes the loss's gradient by each score, and descends along these."""

    loss: PairLoss
    reference: Reference | None = None

    @abstractmethod
    def scores(self, batch: Batch) -> FloatArray:
        """What the loss compares of each token in the mask, `[T]`."""

    def batch_of(self, pairs: Sequence[Preference]) -> Batch:
        """The rows that the model sees."""
        return pairs_to_batch(pairs)

    def learn(self, rows: Sequence[Preference]) -> tuple[Batch, StepMetrics]:
        batch, gradients_T, metrics = self._compare(rows)
        batch.tokens.weights = gradients_T
        return batch, {**metrics, **self._model.learn(batch, LinearScoreLoss()).get()[0]}

    def validation_metrics(self, rows: Sequence[Preference]) -> StepMetrics:
        return self._compare(rows)[2]

    def _compare(self, pairs: Sequence[Preference]) -> tuple[Batch, FloatArray, StepMetrics]:
        batch = self.batch_of(pairs)
        reference = self.reference.logprobs(batch) if self.reference else None
        scores_T = torch.from_numpy(self.scores(batch))
        compared = PairBatch(
            rows_T=torch.from_numpy(batch.row_of_token),
            mask_T=torch.from_numpy(batch.loss_mask),
            margins_P=torch.tensor([pair.margin for pair in pairs]),
            ref_logprobs_T=torch.from_numpy(reference.get()) if reference else None,
        )
        gradients_T, metrics = self.loss(scores_T, compared)
        return batch, gradients_T.numpy(), metrics


class DpoJob(PreferenceJob[Actor]):
    """The policy is its own reward model (Rafailov et al. 2023)."""

    name = "dpo"

    def __init__(
        self, config: DpoConfig, inputs: PairInputs, placement: Placement, branch: Branch | None = None
    ) -> None:
        super().__init__(config, inputs, placement, branch)
        self.loss = DPOLoss(config.preference)
        if config.preference.loss != "simpo":
            frozen = TrainSpec(config.model, config.training, pictures=pictures_of(config))
            elsewhere = branch is not None and bool(branch.weights)
            self.reference = make_reference(frozen, self._model, placement, starts_elsewhere=elsewhere)

    def make_model(self, spec: TrainSpec) -> Actor:
        """The policy."""
        return self.placement.group(Role.Actor, Actor, TrainWorker, spec)

    def scores(self, batch: Batch) -> FloatArray:
        """Log-probs."""
        return self._model.logprobs(batch).get()


class RewardModelJob(PreferenceJob[Critic]):
    """One score for a prompt and its answer: a value head after the last token."""

    name = "reward_model"
    loss = BradleyTerryLoss()

    def make_model(self, spec: TrainSpec) -> Critic:
        """A model with a value head."""
        return self.placement.group(Role.RewardModel, Critic, TrainWorker, replace(spec, value_head=True))

    def batch_of(self, pairs: Sequence[Preference]) -> Batch:
        ends = [replace(p, chosen=scored_at_the_end(p.chosen), rejected=scored_at_the_end(p.rejected)) for p in pairs]
        return pairs_to_batch(ends)

    def scores(self, batch: Batch) -> FloatArray:
        """The value after each answer's last token."""
        return self._model.values(batch).get()


def train_dpo(config: DpoConfig, inputs: PairInputs, callbacks: Sequence[Callback] = ()) -> StopReason | None:
    """`tandem dpo`: what stopped the run before its last step, if anything did."""
    with closing(make_cluster(config)) as cluster:

        def make_job(branch: Branch | None) -> DpoJob:
            return DpoJob(config, inputs, Placement(cluster, pools_of(config)), branch)

        return run_job(config, make_job, callbacks)


def train_reward_model(config: SftConfig, inputs: PairInputs, callbacks: Sequence[Callback] = ()) -> StopReason | None:
    """`tandem reward-model`: what stopped the run before its last step, if anything did."""
    with closing(make_cluster(config)) as cluster:

        def make_job(branch: Branch | None) -> RewardModelJob:
            return RewardModelJob(config, inputs, Placement(cluster, pools_of(config)), branch)

        return run_job(config, make_job, callbacks)
