"""Training on pairs of answers as a job: DPO and its kin, and reward models."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from tandem.algorithms.preference import BradleyTerryLoss, DPOLoss, PairBatch, PairLoss, SlopeLoss
from tandem.batching.packing import pairs_to_batch, scored_at_the_end
from tandem.cluster import make_cluster
from tandem.config.tree import DpoConfig, SftConfig
from tandem.controller.groups import WorkerGroup
from tandem.controller.pools import Role
from tandem.controller.roles import Placement, pools_of
from tandem.data.sft import DemonstrationDataset
from tandem.jobs.inputs import Inputs
from tandem.jobs.run import run_job
from tandem.jobs.sft import SupervisedJob
from tandem.types import Batch, FloatArray, Preference, StepMetrics
from tandem.workers.training import TrainWorker

PairInputs = Inputs[DemonstrationDataset[Preference]]


class PreferenceJob(SupervisedJob[Preference]):
    """Every step scores the pairs' tokens, takes the loss's slope at each score, and descends these slopes."""

    loss: PairLoss
    reference: WorkerGroup | None = None

    def batch_of(self, pairs: Sequence[Preference]) -> Batch:
        return pairs_to_batch(pairs)

    def scores(self, batch: Batch) -> FloatArray:
        """Of each token in the mask, `[T]`."""
        return self._trained.logprobs(batch).get()

    def learn(self, rows: Sequence[Preference]) -> tuple[Batch, StepMetrics]:
        batch, slopes, metrics = self._compare(rows)
        batch.tokens.weights = slopes
        return batch, {**metrics, **self._trained.learn(batch, SlopeLoss()).get()[0]}

    def judge(self, rows: Sequence[Preference]) -> StepMetrics:
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
        slopes_T, metrics = self.loss(scores_T, compared)
        return batch, slopes_T.numpy(), metrics


class DpoJob(PreferenceJob):
    """The policy is its own reward model (Rafailov et al. 2023)."""

    name = "dpo"

    def __init__(self, config: DpoConfig, inputs: PairInputs, placement: Placement) -> None:
        super().__init__(config, inputs, placement, Role.Actor)
        self.loss = DPOLoss(config.preference)
        if config.preference.loss != "simpo":
            self.reference = placement.group(Role.RefPolicy, TrainWorker, config.model, config.training, None)


class RewardModelJob(PreferenceJob):
    """One score for a prompt and its answer: a value head after the last token."""

    name = "reward_model"
    loss = BradleyTerryLoss()

    def __init__(self, config: SftConfig, inputs: PairInputs, placement: Placement) -> None:
        super().__init__(config, inputs, placement, Role.RewardModel)

    def batch_of(self, pairs: Sequence[Preference]) -> Batch:
        ends = [replace(p, chosen=scored_at_the_end(p.chosen), rejected=scored_at_the_end(p.rejected)) for p in pairs]
        return pairs_to_batch(ends)

    def scores(self, batch: Batch) -> FloatArray:
        return self._trained.values(batch).get()


def train_dpo(config: DpoConfig, inputs: PairInputs) -> bool:
    """`tandem dpo`: True when the run reached its last step."""
    with closing(make_cluster(config)) as cluster:
        return run_job(config, lambda: DpoJob(config, inputs, Placement(cluster, pools_of(config))))


def train_reward_model(config: SftConfig, inputs: PairInputs) -> bool:
    """`tandem reward-model`: True when the run reached its last step."""
    with closing(make_cluster(config)) as cluster:
        return run_job(config, lambda: RewardModelJob(config, inputs, Placement(cluster, pools_of(config))))
