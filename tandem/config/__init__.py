"""Configuration: the typed tree, YAML with overrides, all errors at once."""
