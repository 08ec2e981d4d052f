"""Link into an environment what a wheel declares to need, and what that needs, from the environment that runs this.

    .venv/bin/python scripts/link_declared.py WHEEL SITE_PACKAGES

The environment then holds no package that the wheel does not declare, so one that it imports all the same is missing
there, as it would be after `pip install WHEEL` in an empty environment, which takes minutes where this takes a second.
"""

import sys
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(wheel: Path) -> dict[str, Distribution]:
    """By their names, the distributions that `pip install WHEEL` brings, without extras of the wheel's own."""
    (information,) = (entry for entry in ZipPath(wheel).iterdir() if entry.name.endswith(".dist-info"))
    waiting = [(PathDistribution(information), "")]
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        one, extra = waiting.pop()
        for line in one.requires or []:
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            found[name] = distribution(name)
            for wanted in {"", *requirement.extras} - {chosen for other, chosen in seen if other == name}:
                seen.add((name, wanted))
                waiting.append((found[name], wanted))
    return found


def link(distributions: dict[str, Distribution], site: Path) -> None:
    """Each entry of a site directory that is one of theirs becomes a link in `site`."""
    for one in distributions.values():
        root = Path(str(one.locate_file("")))
        entries = {file.parts[0] for file in one.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for entry in entries:
            if not (site / entry).exists():
                (site / entry).symlink_to(root / entry)


if __name__ == "__main__":
    brought = needed(Path(sys.argv[1]))
    link(brought, Path(sys.argv[2]))
    print(f"{len(brought)} packages: {', '.join(sorted(brought))}")
