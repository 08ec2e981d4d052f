"""Model-written code runs here: `tests.py` sends a solution and its tests in, and reads who passed what."""
