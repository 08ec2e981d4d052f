"""What trackers are told of a run: its configuration and environment, without what looks like a secret."""

import re
from pathlib import Path
from typing import Any

from tandem.stored import read_json, read_yaml

_SECRET = re.compile(r"(^|_|-)(api_?key|auth_token|authorization|password|secret|secret_?key|access_?key|token)$", re.I)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
MASK = "***"


def described(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.yaml and environment.json of a run. Raises DamagedFile."""
    config = read_yaml(run_dir / "config.yaml", dict[str, Any])
    environment = read_json(run_dir / "environment.json", dict[str, Any])
    return masked(config), masked(environment)


def masked(value: Any) -> Any:
    """The same tree, with a mask for texts at keys that are named as secrets are, and for passwords in URLs."""
    if isinstance(value, dict):
        return {
            key: MASK if isinstance(inner, str) and _SECRET.search(str(key)) else masked(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    return _IN_URL.sub(MASK, value) if isinstance(value, str) else value


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"trainer.steps": 3}` of `{"trainer": {"steps": 3}}`; lists and empty sections stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
