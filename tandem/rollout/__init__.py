"""Prompts -> trajectories: who speaks when, tokens in, tokens out."""
