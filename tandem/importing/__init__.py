"""Configurations of other frameworks -> ours: `tandem import`."""
