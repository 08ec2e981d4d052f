"""Checkpoints and the run directory: what survives a crash."""
