"""Hugging Face models: loading, and attention over packed rows."""
