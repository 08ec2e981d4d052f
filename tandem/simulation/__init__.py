"""Runs in virtual time: the real controller over workers that do no work but take time."""
