"""Which FlashAttention is taken, where it is there and where it is not."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl, restore_flash_attention_impl
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.config.training import FsdpTrainingConfig
from tandem.errors import UserError
from tandem.models.attention import ATTENTION
from tandem.models.attention.versions import Version, activate_version, choose_version
from tandem.training.fsdp import FsdpEngine


class Handle:
    def remove(self) -> None:
        pass


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FA3", "FA4"):
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, Handle)
    yield
    if current_flash_attention_impl():
        restore_flash_attention_impl()


@pytest.mark.parametrize(
    ("wanted", "capability", "found"),
    [
        *(("fa2", capability, None) for capability in (None, 8, 9, 10)),
        ("auto", None, None), ("auto", 8, None), ("auto", 9, "FA3"), ("auto", 10, "FA4"), ("auto", 12, None),
        ("fa3", 9, "FA3"), ("fa4", 9, "FA4"), ("fa4", 10, "FA4"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("installed")
def test_what_is_installed_is_taken_on_its_gpus(wanted: Version, capability: int | None, found: str | None) -> None:
    activate_version("fa4", 10)
    activate_version(wanted, capability)
    assert current_flash_attention_impl() == found


@pytest.mark.parametrize(
    ("wanted", "capability", "reason"),
    [
        ("fa3", None, "FA3 runs on GPUs of compute capability 9, and there is none"),
        ("fa3", 10, "capability 9, and this one's is 10"),
        ("fa4", 8, "capability 9 or 10, and this one's is 8"),
        ("fa3", 9, r"flash-attn-3 .* is not installed"),
        ("fa4", 10, r"flash-attn-4 .* is not installed"),
    ],
)
def test_what_is_not_there_is_refused_by_name_and_passed_over_by_auto(
    wanted: Version, capability: int | None, reason: str
) -> None:
    with pytest.raises(UserError, match=rf"training\.attention: {wanted}, but .*{reason}.*take auto, or fa2"):
        activate_version(wanted, capability)
    activate_version("auto", capability)
    assert current_flash_attention_impl() is None


def test_an_engine_on_a_cpu_refuses_what_needs_a_gpu() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=9, hidden_size=8, num_hidden_layers=0, num_attention_heads=1))
    model.config._attn_implementation = ATTENTION
    choose_version("auto", torch.device("cpu"))
    FsdpEngine(model, FsdpTrainingConfig(), None)
    with pytest.raises(UserError, match="and there is none"):
        FsdpEngine(model, FsdpTrainingConfig(attention="fa3"), None)
