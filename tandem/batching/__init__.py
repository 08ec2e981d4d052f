"""Trajectories -> Batch -> micro-batches: ragged columns, packed by token budget."""
