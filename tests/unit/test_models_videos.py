"""Packed rows with videos against one forward pass of transformers a row: log-probs, gradients, the native engine."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tandem.batching.packing import demonstrations_to_batch, micro_batches
from tandem.config.data import ImagesConfig, VideosConfig
from tandem.generation.native import NativeEngine
from tandem.models.tower import PictureTower
from tandem.pictures.shown import ModelPictures
from tandem.pictures.store import PictureStore
from tandem.pictures.videos import Video, VideoSource
from tandem.types import Batch, Demonstration, IntArray, Picture, Request, SamplingParams, VideoStep
from tests.picture_engines import WeightedLogprobs, encoded_by, engine_of, generate, logprobs
from tests.picture_families import NEEDS_FEATURES, make_model, make_tokenizer

pytestmark = NEEDS_FEATURES

FAMILIES = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_vl_moe": 32}
"""And the pixels along one side of a token."""
FPS = 4.0
Frames = list[np.ndarray[Any, np.dtype[np.uint8]]]
Part = str | Picture | Video


@dataclass
class Case:
    family: str
    path: Path
    store: PictureStore
    tokenizer: Any
    pictures: ModelPictures
    rows: list[Demonstration]
    groups: IntArray
    shown: list[list[Picture | Video]]
    """Of each row."""
    frames: dict[str, Frames]
    """Of each picture and step of a video, by its key and how it is meant."""
    theirs: Any
    """The model as transformers computes it."""

    @property
    def batch(self) -> Batch:
        return demonstrations_to_batch(self.rows, self.groups)

    def inputs(self, row: int, token_ids: IntArray) -> dict[str, Any]:
        """What a forward pass of one row of its own is called with, of the frames as they were given."""
        ids = torch.from_numpy(token_ids)[None].long()
        made: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        for kind, videos in (("image", False), ("video", True)):
            shown = [one for one in self.shown[row] if isinstance(one, Video) == videos]
            if not shown:
                continue
            patches = [self.patches(one) for one in shown]
            suffix = "_videos" if videos else ""
            made[f"pixel_values{suffix}"] = torch.cat([numbers for numbers, _ in patches])
            made[f"{kind}_grid_thw"] = torch.tensor([grid for _, grid in patches])
            if videos and hasattr(self.theirs.config.vision_config, "tokens_per_second"):
                made["second_per_grid_ts"] = [2 / one.fps for one in shown if isinstance(one, Video)]
        config = self.theirs.config
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        kinds[:, len(self.rows[row].prompt_ids) :] = 0
        return made | ({"mm_token_type_ids": kinds} if self.shown[row] else {})

    def patches(self, one: Picture | Video) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Patches of both frames of each step, those of one token beside each other; and time, rows and columns."""
        if isinstance(one, Video):
            frames = [frame for step in one.steps for frame in self.frames[step.key + "video"]]
        else:
            frames = self.frames[one.key] * 2
        size = self.theirs.config.vision_config.patch_size
        numbers = (torch.from_numpy(np.stack(frames)).float() / 255 - 0.5) / 0.5
        times, height, width, _ = numbers.shape
        split = numbers.view(times // 2, 2, height // (2 * size), 2, size, width // (2 * size), 2, size, 3)
        patches = split.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 6 * size**2)
        return patches, (times // 2, height // size, width // size)

    def wanted(self) -> torch.Tensor:
        """Log-probs of all response tokens."""
        found: list[torch.Tensor] = []
        for number, row in enumerate(self.rows):
            ids, prompt = np.concatenate((row.prompt_ids, row.response_ids)), len(row.prompt_ids)
            logits = self.theirs(**self.inputs(number, ids)).logits[0, prompt - 1 : -1]
            found.append(logits.log_softmax(-1).gather(1, torch.from_numpy(row.response_ids)[:, None].long())[:, 0])
        return torch.cat(found)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def prompt(pictures: ModelPictures, tokenizer: Any, parts: Sequence[Part]) -> tuple[IntArray, tuple[Picture, ...]]:
    """Token ids of one message, and the pictures and steps where they stand."""
    kinds = {Picture: "image", Video: "video"}
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kinds[type(part)]} for part in parts
    ]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    expanded, _, placed = pictures.expand(ids, [part for part in parts if not isinstance(part, str)])
    return expanded, tuple(placed)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Prompts show a video, an odd one and a picture of its first two frames one below the other, nothing, and that
    video again; one that differs from the first in its last frame alone; one that stands still."""
    family, directory = request.param, tmp_path_factory.mktemp(request.param)
    path, store = make_model(family, directory / "model"), PictureStore(directory / "pictures")
    side, tokenizer = FAMILIES[family], make_tokenizer(family)
    pictures = ModelPictures(path, ImagesConfig(), store.directory, VideosConfig(min_pixels=side**2))
    drawn = np.random.default_rng(0)
    originals: dict[str, Frames] = {}

    def noise(rows: int, columns: int, count: int) -> Frames:
        return list(drawn.integers(0, 256, (count, rows * side, columns * side, 3), np.uint8))

    def stored(frames: Frames) -> Video:
        (video,) = pictures.prepare_all([VideoSource([png(frame) for frame in frames], FPS)], Path())
        assert isinstance(video, Video)
        whole = frames + frames[-1:] * (len(frames) % 2)
        for number, step in enumerate(video.steps):
            originals[step.key + "video"] = whole[2 * number : 2 * number + 2]
        return video

    first, odd, still = noise(2, 3, 4), noise(2, 5, 5), noise(1, 4, 1)
    a, b, d, e = (stored(frames) for frames in (first, odd, [*first[:3], noise(2, 3, 1)[0]], still * 4))
    stacked = np.concatenate(odd[:2])
    (c,) = pictures.prepare([png(stacked)], Path())
    assert c.key == b.steps[0].key and e.steps[0].key == e.steps[1].key
    assert [len(video.steps) for video in (a, b, d, e)] == [2, 3, 2, 2]
    originals[c.key] = [stacked]
    prompts: list[list[Part]] = [
        ["what ", a, "?"], [b, " or ", c, " then"], ["just text"], ["again ", b], ["what ", d, "?"], [e, e],
    ]  # fmt: skip
    rows, groups = list[Demonstration](), [0, 0, 0, 1, 1, 2, 3, 3, 4, 5]
    for group in groups:
        ids, placed = prompt(pictures, tokenizer, prompts[group])
        answer = drawn.integers(10, 90, drawn.integers(2, 9)).astype(np.int32)
        rows.append(Demonstration(0, ids, answer, np.ones(len(answer), bool), placed))
    shown = [[part for part in prompts[group] if not isinstance(part, str)] for group in groups]
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, attn_implementation="sdpa")
    return Case(
        family, path, store, tokenizer, pictures, rows, np.array(groups, np.int32), shown, originals, theirs.eval()
    )  # fmt: skip


def test_packed_rows_have_the_log_probs_and_gradients_of_a_forward_pass_each(case: Case) -> None:
    batch, engine = case.batch, engine_of(case)
    wanted = case.wanted()
    batch.tokens.loss_weights = np.random.default_rng(2).normal(size=len(batch.response_ids)).astype(np.float32)
    batch.tokens.shares = np.zeros_like(batch.tokens.loss_weights)
    case.theirs.zero_grad()
    (wanted * torch.from_numpy(batch.tokens.loss_weights)).sum().backward()
    theirs = {name: p.grad for name, p in case.theirs.named_parameters() if p.grad is not None}
    for tokens in (10_000, 60):
        assert (logprobs(engine, batch, tokens) - wanted).abs().max() < 1e-5
        engine.model.zero_grad()
        engine.forward_backward(micro_batches(batch, range(len(batch)), tokens), WeightedLogprobs())
        ours = {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            # A bias of all keys changes no softmax: what is there of its gradient is rounding alone.
            least = 0.1 if name.endswith("k_proj.bias") else 1e-3
            assert (ours[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp_min(least), name


def test_frames_are_encoded_once_a_micro_batch_whenever_they_are_shown(case: Case) -> None:
    engine, batch = engine_of(case), case.batch
    counts, shown = encoded_by(engine), {picture.content for picture in batch.pictures}
    logprobs(engine, batch)
    assert sum(counts) == len(shown) < sum(len(row.pictures) for row in case.rows)


def test_generated_tokens_and_log_probs(case: Case) -> None:
    """Greedy answers are those of generate; log-probs, of drawn answers, too, those of the trainer."""
    engine = engine_of(case)
    tower = PictureTower(engine.model, case.path, case.store.read)
    native = NativeEngine(engine.model, max_running=6, tower=tower)
    native.load_weights(0, None)
    first = {group: number for number, group in reversed(list(enumerate(case.groups.tolist())))}
    never = [[token] for token in tower.never_drawn]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_tokens=9)
        asked = [
            Request(case.rows[n].prompt_ids, sampling, (7, 8), pictures=case.rows[n].pictures) for n in first.values()
        ]
        answers = generate(native, asked)
        rows = [
            Demonstration(0, request.token_ids, c.token_ids, np.ones(len(c.token_ids), bool), request.pictures)
            for request, own in zip(asked, answers, strict=True)
            for c in own
        ]
        theirs = np.concatenate([c.logprobs for own in answers for c in own])
        assert np.abs(logprobs(engine, demonstrations_to_batch(rows)).numpy() - theirs).max() < 2e-5
        for number, (completion, _) in zip(first.values(), answers, strict=True):
            if temperature > 0:
                continue
            ids = case.rows[number].prompt_ids
            inputs = {**case.inputs(number, ids), "use_cache": True}
            wanted = case.theirs.generate(
                **inputs, max_new_tokens=9, do_sample=False, eos_token_id=None, bad_words_ids=never
            )
            assert wanted[0, len(ids) :].tolist() == completion.token_ids.tolist()


def test_what_follows_a_video_begins_after_its_last_position(case: Case) -> None:
    """Also where it has more steps than rows and columns, for which transformers 5.19 has another rule of its own."""
    if case.family not in ("qwen2_vl", "qwen2_5_vl"):
        return  # text stands between steps
    frames = np.random.default_rng(3).integers(0, 256, (8, FAMILIES[case.family], FAMILIES[case.family], 3), np.uint8)
    (video,) = case.pictures.prepare_all([VideoSource([png(frame) for frame in frames], FPS)], Path())
    assert isinstance(video, Video)
    ids, placed = prompt(case.pictures, case.tokenizer, ["a", video, "?"])
    answer = np.arange(40, 46, dtype=np.int32)
    row = Demonstration(0, ids, answer, np.ones(6, bool), placed)
    batch, begin = demonstrations_to_batch([row]), placed[0].place
    engine = engine_of(case)
    assert engine._tower is not None
    places = engine._tower.places_of_row(batch.prompt_ids, batch.pictures)
    times = {"qwen2_vl": [0, 1, 2, 3], "qwen2_5_vl": [0, 2, 4, 6]}[case.family]  # half a second each, of 4 positions
    after = list(range(begin + times[-1] + 1, times[-1] + 1 + len(ids) - 4))
    wanted = [[*range(begin), *(begin + time for time in shown), *after] for shown in (times, [0] * 4, [0] * 4)]
    assert places.positions.tolist() == wanted and places.ends.tolist() == [after[-1] + 1]

    numbers = [list(frames[n : n + 2]) for n in range(0, 8, 2)]
    case.frames |= {step.key + "video": pair for step, pair in zip(video.steps, numbers, strict=True)}
    pixels, grid = case.patches(video)
    whole = torch.from_numpy(np.concatenate((ids, answer))).long()[None]
    positions = torch.tensor([[*line, *range(after[-1] + 1, after[-1] + 7)] for line in wanted])[:, None]
    told = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid]), "position_ids": positions}
    with torch.no_grad():
        logits = case.theirs(input_ids=whole, use_cache=False, **told).logits[0, len(ids) - 1 : -1]
    theirs = logits.log_softmax(-1).gather(1, torch.from_numpy(answer)[:, None].long())[:, 0]
    assert (logprobs(engine, batch) - theirs).abs().max() < 1e-5
    at_once = tuple(replace(picture, step=VideoStep(0, picture.step.span)) for picture in placed if picture.step)
    assert (logprobs(engine, demonstrations_to_batch([replace(row, pictures=at_once)])) - theirs).abs().max() > 1e-2
