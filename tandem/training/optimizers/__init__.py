"""The optimizers that `training.optimizer.type` may name, a file each; what they do to tensors is in `steps`."""
