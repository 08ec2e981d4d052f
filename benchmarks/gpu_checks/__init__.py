"""Checks of one GPU, each a process of its own; `scripts/gpu` runs them.

    running.py -> a process for each check -> figures -> figures.jsonl -> tables.py

`checks.py` lists them; what they measure is in the other files.
"""
