"""The controller: the dataflow, and what a run has around it."""
