"""Records of a run: metrics, trajectories, environment, report."""
