"""Pictures of any size against transformers' own processors: the same pixels, and the same text in their place."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tandem.errors import UserError
from tandem.models.sight import sight_of
from tandem.pictures.layouts.base import Layout
from tandem.pictures.vlm_config import in_tower, picture_format
from tests.picture_families import FAMILIES, config_of, make_tokenizer


class Prepared:
    """A model's directory without weights, read by ours and by transformers."""

    def __init__(self, family: str, directory: Path, **processor: Any) -> None:
        directory.mkdir(exist_ok=True)
        self.family, self.tokenizer = FAMILIES[family], make_tokenizer(family)
        self.config = config_of(family, self.tokenizer)
        (directory / "config.json").write_text(self.config.to_json_string(use_diff=False))
        (directory / "preprocessor_config.json").write_text(json.dumps(self.family.processor | processor))
        self.tokenizer.save_pretrained(directory)
        made = picture_format(directory)
        assert made is not None
        self.format = made
        self.processor: Any = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")

    @property
    def layout(self) -> Layout:
        return self.format.layout

    def theirs(self, image: Image.Image) -> Any:
        options = {"return_row_col_info": True} if self.config.model_type in ("smolvlm", "idefics3") else {}
        return self.processor(images=[image], return_tensors="pt", **self.family.options, **options)

    def ours(self, image: Image.Image) -> tuple[dict[str, torch.Tensor], list[int]]:
        """What the model takes, and the tokens."""
        pixels, sight = self.layout.fit(image), sight_of(self.config)
        tokens = self.layout.tokens(*self.layout.shape(*pixels.shape[:2]))
        return sight.arguments([sight.pixels(self.processor, pixels)]), tokens.tolist()

    def text(self, image: Image.Image, made: Any) -> str:
        """What transformers' processor of the family writes for the picture that its image processor made."""
        kind, token = self.config.model_type, self.family.placeholder
        if kind == "llava":
            own = SimpleNamespace(
                patch_size=14,
                num_additional_image_tokens=1,
                vision_feature_select_strategy="default",
                image_token=token,
            )
            return LlavaProcessor.replace_image_token(own, made, 0)
        if kind == "mistral3":
            # By hand: Pixtral's processor cannot be imported without torchvision.
            rows, columns = (int(side) // 14 for side in made["image_sizes"][0])
            return "[IMG_BREAK]".join([token * columns] * rows) + "[IMG_END]"
        if kind == "internvl":
            names = {"image_token": token, "start_image_token": "<img>", "end_image_token": "</img>"}
            own = SimpleNamespace(image_seq_length=4, **names)
            return InternVLProcessor.replace_image_token(own, made, 0)
        if kind == "idefics3":
            names = {"image_token": token, "fake_image_token": "<fake_token_around_image>"}
            own = SimpleNamespace(image_seq_len=4, global_image_tag="<global-img>", **names)
            return Idefics3Processor.replace_image_token(own, made, 0)
        if kind == "smolvlm":
            beside = ("<fake_token_around_image>", token, "<global-img>")
            return get_image_prompt_string(made["rows"][0][0], made["cols"][0][0], 4, *beside)
        rows, columns = made["image_grid_thw"][0, 1:].tolist()
        return token * (rows * columns // 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_towers_are_those_of_every_family(family: str) -> None:
    modules = sight_of(config_of(family, make_tokenizer(family))).modules
    assert modules and all(in_tower(f"model.{module}.layers.0.weight") for module in modules)
    assert not in_tower("model.language_model.layers.0.mlp.up_proj.weight")


@pytest.fixture(scope="module", params=FAMILIES)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(request.param, tmp_path_factory.mktemp(request.param))


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height + width).integers(0, 256, (height, width, 3), np.uint8))


def check(prepared: Prepared, image: Image.Image) -> None:
    try:
        made = prepared.theirs(image)
    except ValueError:  # too thin: no pixel is left of one side
        with pytest.raises(ValueError, match="no pixel of one side"):
            prepared.layout.fit(image)
        return
    arguments, tokens = prepared.ours(image)
    if "image_grid_thw" in made and made["image_grid_thw"].tolist() != arguments["image_grid_thw"].tolist():
        return  # theirs is a size that it would change again: see test_pictures_sizes.py
    for name, value in arguments.items():
        wanted = torch.as_tensor(made[name])
        assert value.shape == wanted.shape and (value - wanted).abs().max() <= 1e-6, name
    assert tokens == prepared.tokenizer.encode(prepared.text(image, made), add_special_tokens=False)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 150), st.integers(1, 150))
@example(1, 150)
@example(150, 1)
def test_a_picture_is_what_transformers_makes_of_it(prepared: Prepared, height: int, width: int) -> None:
    check(prepared, noise(height, width))


@pytest.mark.parametrize(
    ("family", "processor"),
    [
        ("llava", {"do_center_crop": False, "size": {"height": 42, "width": 42}, "resample": 2}),
        ("llava", {"size": {"shortest_edge": 50}}),
        ("llava", {"image_processor_type": "LlavaImageProcessor", "do_pad": True, "image_mean": [0.2, 0.5, 0.9]}),
        ("internvl", {"max_patches": 1}),
        ("internvl", {"min_patches": 3, "max_patches": 9, "resample": 2}),
        ("smolvlm", {"do_image_splitting": False}),
        ("smolvlm", {"size": {"longest_edge": 28}}),
        ("idefics3", {"do_image_splitting": True}),
        ("mistral3", {"size": {"longest_edge": 45}, "resample": 2}),
    ],
)
def test_what_the_processors_file_says_is_done(family: str, processor: dict[str, Any], tmp_path: Path) -> None:
    prepared = Prepared(family, tmp_path, **processor)
    for size in ((30, 80), (85, 28), (60, 60)):
        check(prepared, noise(*size))


@pytest.mark.parametrize(
    ("family", "processor", "told"),
    [
        ("llava", {"crop_size": {"height": 40, "width": 40}}, r"makes pictures of \(40, 40\) pixels, and the tower"),
        ("llava", {"size": {"shortest_edge": 20}}, "the tower takes 42 x 42"),
        ("internvl", {"size": {"height": 56, "width": 56}}, "the tower takes 28 x 28"),
        ("smolvlm", {"max_image_size": {"longest_edge": 14}}, "makes tiles of 14 pixels"),
        ("mistral3", {"size": {"longest_edge": 1540}}, "which the tower of config.json does not take"),
    ],
)
def test_a_processor_of_another_model_is_told(family: str, processor: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        Prepared(family, tmp_path, **processor)


def test_limits_are_of_those_families_that_have_any(prepared: Prepared) -> None:
    if prepared.family.spatial:
        smaller = prepared.layout.limited(None, 4 * 32 * 32)
        assert smaller.name != prepared.layout.name and max(smaller.fit(noise(150, 150)).shape) <= 64
    else:
        with pytest.raises(UserError, match=rf"a model of type {prepared.config.model_type} has no such limits"):
            prepared.layout.limited(None, 784)
    assert prepared.layout.limited(None, None) == prepared.layout


def test_names_tell_rules_apart(tmp_path: Path) -> None:
    """They are those of the files that say what a picture has become."""
    plain = Prepared("llava", tmp_path)
    cut = Prepared("llava", tmp_path, do_center_crop=False, size={"height": 42, "width": 42})
    assert plain.layout.name != cut.layout.name
    tiles = [Prepared("internvl", tmp_path, max_patches=count).layout.name for count in (2, 3)]
    assert len({*tiles}) == 2


def test_a_model_whose_tokenizer_lacks_the_tokens_beside_pictures_is_told(tmp_path: Path) -> None:
    Prepared("mistral3", tmp_path)
    text = (tmp_path / "tokenizer.json").read_text().replace("[IMG_BREAK]", "[NO_BREAK]")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer.json has no token '\[IMG_BREAK\]'"):
        picture_format(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json, which says what the tokens around a picture are"):
        picture_format(tmp_path)
