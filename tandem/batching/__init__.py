"""Trajectories -> Batch -> micro-batches: ragged columns, packed by token budget."""

from tandem.batching.packing import demonstrations_to_batch, micro_batches, split_groups, to_batch

__all__ = ["demonstrations_to_batch", "micro_batches", "split_groups", "to_batch"]
