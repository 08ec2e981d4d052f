"""The commands that have commands of their own, and what commands share."""
