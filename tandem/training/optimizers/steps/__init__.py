"""The arithmetic of optimizers that torch does not have."""
