"""Answers -> numbers with intervals, and whether two models differ (docs/evaluation.md). numpy alone."""
