"""Rows with videos, as verl and TRL write them -> prompts with keys, places and times; and what is said of bad ones."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import verl_row, write_lines
from picture_rows import IMAGE_ID, TOKENIZER, VIDEO_ID, encoded, model_files, picture

from examples.one_tool import read_calls
from tandem.config.conversation import ConversationConfig, EndpointEnvironmentConfig
from tandem.config.data import DataConfig, ImagesConfig, SftDataConfig, VideosConfig
from tandem.config.generation import NativeGenerationConfig, VllmGenerationConfig
from tandem.data.dataset import RLHFDataset
from tandem.data.sft import SftDataset
from tandem.errors import UserError
from tandem.jobs.inputs import _check_videos
from tandem.pictures.shown import ModelPictures
from tandem.pictures.store import PictureStore
from tandem.pictures.videos import chosen
from tandem.rollout.formats.template import TemplateFormat
from tandem.rollout.transcript import Transcript
from tandem.types import VideoStep

PNGS = [encoded(picture(28, 56, seed)) for seed in range(5)]
VISION_IDS = [TOKENIZER.convert_tokens_to_ids(f"<|vision_{end}|>") for end in ("start", "end")]
TEXTS = [base64.b64encode(data).decode() for data in PNGS]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def pictures_of(tmp_path: Path, family: str = "qwen2_vl", **videos: Any) -> ModelPictures:
    settings = VideosConfig(**{"min_pixels": 784, **videos})
    beside = {"vision_start_token_id": VISION_IDS[0], "vision_end_token_id": VISION_IDS[1]}
    return ModelPictures(model_files(tmp_path / family, family, **beside), ImagesConfig(), tmp_path / "store", settings)


def load(tmp_path: Path, *rows: dict[str, Any], **videos: Any) -> RLHFDataset:
    file = write_lines(tmp_path / "rows.jsonl", list(rows))
    return RLHFDataset([file], TOKENIZER, DataConfig(), pictures_of(tmp_path, **videos))


def test_a_row_has_keys_places_and_times_and_no_pixels(tmp_path: Path) -> None:
    frames = [{"bytes": data, "path": None} for data in PNGS]
    file = tmp_path / "rows.parquet"
    row = verl_row("<image>What?<video>Why?", images=frames[:1], videos=[frames])
    pq.write_table(pa.Table.from_pylist([row]), file)
    dataset = RLHFDataset([file], TOKENIZER, DataConfig(), pictures_of(tmp_path))
    (prompt,) = dataset
    still, *steps = prompt.pictures
    assert still.step is None and still.grid == (1, 2) and prompt.token_ids[still.place] == IMAGE_ID
    assert [step.step for step in steps] == [VideoStep(0, 0), VideoStep(1, 0), VideoStep(2, 3)]
    for number, step in enumerate(steps):
        assert step.grid == (1, 2) and step.place == steps[0].place + 2 * number
        stored = PictureStore(tmp_path / "store").read(step.key)
        wanted = [np.asarray(picture(28, 56, seed)) for seed in (2 * number, min(2 * number + 1, 4))]
        assert (stored == np.concatenate(wanted)).all()
    assert np.flatnonzero(prompt.token_ids == VIDEO_ID).tolist() == [steps[0].place + n for n in range(6)]
    keys = {"keys": [step.key for step in steps], "seconds": [0.25, 1.25, 2.0], "fps": 2.0}
    assert prompt.row["videos"] == [keys] and prompt.row["images"] == [still.key]
    assert len(pickle.dumps(prompt)) < 3_000


def test_every_way_to_give_a_video_is_the_same_video(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNGS[0])
    frames = ["a.png", TEXTS[1], {"bytes": TEXTS[2]}]
    nulls = {"text": None, "fps": None}
    forms = [frames, {"frames": frames}, {"video": frames, "fps": 2}, {"type": "video", "video": frames, **nulls}]
    rows = [verl_row("<video>?", videos=[form]) for form in forms] + [
        {"prompt": [user([{"type": "video"}, {"type": "text", "text": "?"}])], "videos": [frames]},
        {"prompt": [user([{"type": "video", "video": frames}, {"type": "text", "text": "?"}])]},
        {"prompt": [user("?")], "videos": [frames]},  # no placeholder: before the text
    ]
    prompts = load(tmp_path, *rows)
    assert len({(p.token_ids.tobytes(), p.pictures) for p in prompts}) == 1 and len(prompts[0].pictures) == 2


def test_demonstrations_have_videos(tmp_path: Path) -> None:
    talk = [
        user("<video>?"),
        {"role": "assistant", "content": "A"},
        user("<image>"),
        {"role": "assistant", "content": "B"},
    ]
    file = write_lines(tmp_path / "sft.jsonl", [{"messages": talk, "images": TEXTS[:1], "videos": [TEXTS[:3]]}])
    (row,) = SftDataset([file], TOKENIZER, SftDataConfig(train_files=[file]), pictures_of(tmp_path))
    ids = np.concatenate([row.prompt_ids, row.response_ids])
    assert [ids[p.place] for p in row.pictures] == [VIDEO_ID, VIDEO_ID, IMAGE_ID]
    learned = TOKENIZER.convert_ids_to_tokens(row.response_ids[row.loss_mask].tolist())
    assert "".join(learned) == "A<|end|>\nB<|end|>\n"


def test_times_are_text_to_qwen3_vl(tmp_path: Path) -> None:
    """In the place of the tokens that the template has around a video."""
    pictures = pictures_of(tmp_path, "qwen3_vl")
    TOKENIZER.save_pretrained(tmp_path / "qwen3_vl")
    file = write_lines(tmp_path / "rows.jsonl", [verl_row("Of <video>?", videos=[{"frames": TEXTS, "fps": 2.5}])])
    (prompt,) = RLHFDataset([file], TOKENIZER, DataConfig(), pictures)
    told = "".join(TOKENIZER.convert_ids_to_tokens(prompt.token_ids.tolist()))
    pads = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
    assert f"Of <0.2 seconds>{pads}<1.0 seconds>{pads}<1.6 seconds>{pads}?" in told
    assert [step.step for step in prompt.pictures] == [VideoStep(0, 2)] * 3
    assert all(prompt.token_ids[[p.place, p.place + 1]].tolist() == [VIDEO_ID] * 2 for p in prompt.pictures)


def test_limits_of_all_frames_together(tmp_path: Path) -> None:
    """Qwen3-VL's: of four frames each may have a quarter."""
    pictures = pictures_of(tmp_path, "qwen3_vl", min_pixels=None)
    TOKENIZER.save_pretrained(tmp_path / "qwen3_vl")
    size = {"shortest_edge": 784, "longest_edge": 32 * 784}
    (tmp_path / "qwen3_vl/video_preprocessor_config.json").write_text(json.dumps({"size": size}))
    frames = [base64.b64encode(encoded(picture(280, 280, seed))).decode() for seed in range(8)]
    file = write_lines(tmp_path / "rows.jsonl", [verl_row("<video>?", videos=[frames[:n]]) for n in (2, 8)])
    first, second = RLHFDataset([file], TOKENIZER, DataConfig(), pictures)
    assert [first.pictures[0].grid, second.pictures[0].grid] == [(4, 4), (2, 2)]


def test_frames_are_chosen_evenly() -> None:
    assert chosen(3, 4) == [0, 1, 2] and chosen(9, 3) == [0, 4, 8] and chosen(768, 4) == [0, 256, 511, 767]


def test_limits(tmp_path: Path) -> None:
    row = verl_row("<video>?", videos=[TEXTS])
    (prompt,) = load(tmp_path, row, max_frames=2)
    (step,) = prompt.pictures
    ends = np.concatenate([np.asarray(picture(28, 56, seed)) for seed in (0, 4)])
    assert (PictureStore(tmp_path / "store").read(step.key) == ends).all()
    assert prompt.row["videos"][0]["fps"] == 2.0 * 2 / 5
    (prompt,) = load(tmp_path, row, min_pixels=4 * 784)
    assert {step.grid for step in prompt.pictures} == {(2, 3)}
    (prompt,) = load(tmp_path, row, min_pixels=1, max_pixels=784)
    assert {step.grid for step in prompt.pictures} == {(1, 1)}
    with pytest.raises(UserError, match=r"data.videos.max_pixels: 700 is less"):
        load(tmp_path, row, min_pixels=1, max_pixels=700)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (verl_row("<video>", videos=["a.mp4"]), "a video is 'a.mp4': files of videos are not decoded"),
        (verl_row("<video>", videos=[{"video": "a.mp4"}]), "a video is 'a.mp4': files of videos are not decoded"),
        (verl_row("<video>", videos="a.mp4"), "column `videos` has the wrong type: text, not a list of videos"),
        (verl_row("<video>", videos=[[]]), "it must be a list of frames"),
        (verl_row("<video>", videos=[{"fps": 2}]), "it must be a list of frames"),
        (verl_row("<video>", videos=[{"frames": TEXTS, "nframes": 2}]), "a video has nframes, which its row"),
        (verl_row("<video>", videos=[{"frames": TEXTS, "fps": 0}]), "a video's fps is 0"),
        (verl_row("<video><video>", videos=[TEXTS]), "placeholders: 2, but videos: 1"),
        (verl_row("<video>"), "placeholders: 1, but videos: 0; they are looked for in the column `videos`"),
        (verl_row("<video>", videos=[["no.png"]]), "video 1 of 1: frames 1 and 1 of 1: 'no.png' is no base64"),
        (verl_row("<video>", videos=[[TEXTS[0], base64.b64encode(encoded(picture(28, 84))).decode()]]), "one size"),
        (verl_row("<video><|video_pad|>", videos=[TEXTS]), "1 videos and 2 placeholders for them, after the chat"),
        ({"prompt": "?", "videos": [TEXTS]}, "need a prompt of messages"),
    ],
)
def test_a_bad_row_is_told(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, row)
    assert "rows.jsonl, row 1: " in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize(("family", "seen"), [("glm4v", True), ("qwen3", False)])
def test_a_model_that_is_shown_none_is_told_once(tmp_path: Path, family: str, seen: bool) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [verl_row("<video>?", videos=[TEXTS])] * 3)
    with pytest.raises(UserError, match=rf"^the rows have videos, and .*model type {family}\) is shown none here; "):
        RLHFDataset([file], TOKENIZER, DataConfig(on_bad_row="skip"), pictures_of(tmp_path, family))
    text = write_lines(tmp_path / "text.jsonl", [verl_row("<video> is a tag")])
    (prompt,) = RLHFDataset([text], TOKENIZER, DataConfig(), pictures_of(tmp_path, family))
    assert "<video> is a tag" in prompt.text


def test_a_conversation_opens_with_a_video(tmp_path: Path) -> None:
    """In messages of rows there are keys alone; a video that something else shows is refused."""
    pictures = pictures_of(tmp_path)
    file = write_lines(tmp_path / "rows.jsonl", [verl_row("<image><video>?", images=TEXTS[:1], videos=[TEXTS])])
    (prompt,) = RLHFDataset([file], TOKENIZER, DataConfig(), pictures)
    stop: Any = TOKENIZER.convert_tokens_to_ids("<|end|>")
    lines = TemplateFormat(TOKENIZER, [stop], read_calls)
    transcript = Transcript(lines, prompt.row["prompt"], (), pictures)
    assert transcript.ids.tolist() == prompt.token_ids.tolist() and transcript.shown == prompt.pictures
    for part, why in (({"frames": TEXTS}, "a video that is no row's"), ({"keys": ["0" * 64]}, "are not in")):
        with pytest.raises(UserError, match=why):
            Transcript(lines, [user([{"type": "video", "seconds": [0.0], "fps": 2.0, **part}])], (), pictures)


def test_where_videos_are_not_shown(tmp_path: Path) -> None:
    prompts = load(tmp_path, verl_row("<video>?", videos=[TEXTS]))
    with pytest.raises(UserError, match=r"rows have videos, which generation.type vllm is not shown yet; use native"):
        _check_videos(VllmGenerationConfig(type="vllm"), None, prompts)
    native, agent = NativeGenerationConfig(), EndpointEnvironmentConfig(type="endpoint", command="agent")
    with pytest.raises(UserError, match="rows have videos, which agents with a base URL are not shown yet"):
        _check_videos(native, ConversationConfig(environment=agent), prompts)
    _check_videos(native, None, prompts)
    _check_videos(VllmGenerationConfig(type="vllm"), None, load(tmp_path, verl_row("?")))
