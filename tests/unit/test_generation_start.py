"""Which releases of vLLM and SGLang are served, and what the others are told."""

from pathlib import Path

import pytest

from tandem.config.generation import VllmGenerationConfig
from tandem.config.model import LoraConfig, ModelConfig
from tandem.errors import UserError
from tandem.generation.releases import check_sglang, check_vllm
from tandem.generation.start import start_engine


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


def test_of_sglang_one_release_is_served() -> None:
    check_sglang("0.5.23")
    for found, reason in (
        (None, "not installed"),
        ("0.5.22", "interface"),
        ("0.5.24", "interface"),
        ("0.6", "interface"),
    ):
        with pytest.raises(UserError, match=rf"generation.type: sglang.*{reason}.*install sglang>=0.5.23,<0.5.24"):
            check_sglang(found)


def test_weights_that_no_publish_fills_do_not_leave_the_device(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    for model, key in (
        (ModelConfig(path=Path("model"), lora=LoraConfig()), r"model\.lora"),
        (ModelConfig(path=tmp_path, vision_tower="frozen"), r"model\.vision_tower: frozen"),
    ):
        with pytest.raises(UserError, match=rf"generation\.sleep: weights, but with {key} .*use cache"):
            start_engine(model, VllmGenerationConfig(type="vllm", sleep="weights"), None)
