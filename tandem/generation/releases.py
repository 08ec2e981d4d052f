"""The releases of vLLM and SGLang that are spoken to, and the message for others; imports none of them."""

import re
from importlib.metadata import PackageNotFoundError, version

from tandem.errors import UserError

_Range = tuple[tuple[int, ...], tuple[int, ...]]
VLLM_RANGE = (0, 32), (0, 33)
SGLANG_RANGE = (0, 5, 23), (0, 5, 24)
"""The first release that `generation/vllm.py` or `sglang.py` speaks to, and the first one after it that they do not."""


def check_vllm(found: str | None) -> None:
    """Raises UserError unless this is a release of vLLM that Tandem speaks to."""
    reason = "releases before 0.8.2 run out of memory beside a trainer, and return wrong results"
    old = reason if found and _numbers(found) < (0, 8, 2) else None
    _check("vllm", "vLLM", found, VLLM_RANGE, " (scripts/vllm-env makes an environment with it on a CPU)", old)


def check_sglang(found: str | None) -> None:
    """Raises UserError unless this is a release of SGLang that Tandem speaks to."""
    _check("sglang", "SGLang", found, SGLANG_RANGE, "")


def installed(*names: str) -> str | None:
    """The version of the first of these distributions that is here."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _check(type: str, name: str, found: str | None, supported: _Range, hint: str, reason: str | None = None) -> None:
    low, high = (".".join(map(str, bound)) for bound in supported)
    mend = f"install {type}>={low},<{high}{hint}"
    if found is None:
        raise UserError(f"generation.type: {type}, but {name} is not installed here: {mend}")
    if not supported[0] <= _numbers(found) < supported[1]:
        reason = reason or "its interface for new weights is another one"
        raise UserError(f"generation.type: {type}, but {name} {found} is not supported: {reason}; {mend}")


def _numbers(found: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])
