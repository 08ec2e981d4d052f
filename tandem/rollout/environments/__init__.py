"""Environments that come with Tandem, each behind `tandem.rollout.environment`."""
