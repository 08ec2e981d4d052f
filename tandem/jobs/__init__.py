"""Kinds of runs: reinforcement learning, supervised fine-tuning; what every run has around its steps."""
