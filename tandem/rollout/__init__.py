"""Prompts -> trajectories: who speaks when, tokens in, tokens out."""

from tandem.rollout.single_turn import single_turn

__all__ = ["single_turn"]
