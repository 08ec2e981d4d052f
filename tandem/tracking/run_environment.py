"""environment.json: what a run ran on and with."""

import json
import os
import platform
import subprocess
from email import message_from_string
from importlib.metadata import Distribution, distributions
from pathlib import Path

from tandem.files import write_text


def write_environment(run_dir: Path, seed: int) -> None:
    """Git revision, seed, hardware and packages; what cannot be found out is null."""
    git = ("git", "-C", str(Path(__file__).parent))
    tracked = _output(*git, "ls-files", "--error-unmatch", Path(__file__).name)  # else: installed in another checkout
    described = {
        "git_revision": tracked and _output(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "packages": dict(sorted(_name_and_version(found) for found in distributions())),
    }
    write_text(run_dir / "environment.json", json.dumps(described, indent=1) + "\n")


def _name_and_version(found: Distribution) -> tuple[str, str]:
    """Without the long description, which takes most of the time to parse."""
    described = next(filter(None, map(found.read_text, ("METADATA", "PKG-INFO", ""))), "")  # "": a file of old times
    fields = message_from_string(described.partition("\n\n")[0])
    return str(fields["Name"]), str(fields["Version"])


def _output(*command: str) -> str | None:
    """What `command` prints; None if it is not installed, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
