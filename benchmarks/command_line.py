"""The command line of a benchmark; `scripts/nightly benchmarks` runs each of them with `--small`."""

import argparse
import sys
from typing import Any


def parse_arguments(parser: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """The arguments given. `--small` makes these the defaults, with which the program ends in seconds."""
    sizes = ", ".join(f"{name}={value}" for name, value in small.items()) or "the same"
    parser.add_argument("--small", action="store_true", help=f"for seconds, to see that it runs; sizes: {sizes}")
    if "--small" in sys.argv[1:]:
        parser.set_defaults(**small)
    return parser.parse_args()
