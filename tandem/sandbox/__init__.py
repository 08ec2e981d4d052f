"""Model-written code runs here. For rewards, `tests.py` sends a solution and its tests in, and reads who passed."""
