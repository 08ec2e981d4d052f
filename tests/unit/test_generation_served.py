"""Which releases of vLLM are served, and what the others are told."""

import pytest

from tandem.errors import UserError
from tandem.generation.served import check_vllm


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1", "0.32.3+cpu"])
def test_supported_releases(found: str) -> None:
    check_vllm(found)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "not installed"),
        ("0.7.3", "wrong results"),
        ("0.8.1", "wrong results"),
        ("0.8.2", "interface for new weights"),
        ("0.31.9", "interface for new weights"),
        ("0.33.0", "interface for new weights"),
    ],
)
def test_refused_ones_say_why_and_what_to_install(found: str | None, reason: str) -> None:
    with pytest.raises(UserError, match=rf"{reason}.*install vllm>=0.32,<0.33 \(scripts/vllm-env"):
        check_vllm(found)
