"""Rows with pictures, as verl and TRL write them -> prompts with keys and places; and what is said of bad ones."""

from __future__ import annotations

import base64
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import verl_row, write_lines
from picture_rows import IMAGE_ID, TOKENIZER, animated, bomb, encoded, model_files, picture

from tandem.config.data import DataConfig, ImagesConfig, SftDataConfig
from tandem.data.dataset import RLHFDataset
from tandem.data.preference import PreferenceDataset
from tandem.data.rows import _may_hold_pictures, read_rows, without_pictures
from tandem.data.sft import SftDataset
from tandem.errors import UserError
from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.pictures.sources import read_picture
from tandem.pictures.store import PictureStore

PNG = encoded(picture())
ANSWER = {"role": "assistant", "content": "A"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def pictures_of(tmp_path: Path, **images: Any) -> ModelPictures:
    return ModelPictures(model_files(tmp_path / "model"), ImagesConfig(**images), tmp_path / "store")


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def load(tmp_path: Path, file: Path, **images: Any) -> RLHFDataset:
    return RLHFDataset([file], TOKENIZER, DataConfig(), pictures_of(tmp_path, **images))


def refused(tmp_path: Path, row: dict[str, Any], **images: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(tmp_path, write_lines(tmp_path / "rows.jsonl", [row]), **images)
    return str(caught.value)


def test_a_verl_row_has_keys_and_places_and_no_pixels(tmp_path: Path) -> None:
    images = [{"bytes": PNG, "path": None}, {"bytes": encoded(picture(28, 84, 1)), "path": "b.png"}]
    file = parquet(tmp_path / "rows.parquet", [verl_row("<image>What? <image>Why?", images=images)])
    (prompt,) = load(tmp_path, file)
    assert [p.grid for p in prompt.pictures] == [(1, 2), (1, 3)]
    for p in prompt.pictures:
        rows, columns = p.grid
        assert (prompt.token_ids[p.place : p.place + rows * columns] == IMAGE_ID).all()
        around = prompt.token_ids[[p.place - 1, p.place + rows * columns]].tolist()
        assert TOKENIZER.convert_ids_to_tokens(around) == ["<|vision_start|>", "<|vision_end|>"]
        assert PictureStore(tmp_path / "store").read(p.key).shape == (28 * rows, 28 * columns, 3)
    assert (prompt.token_ids == IMAGE_ID).sum() == 5 and prompt.token_ids.dtype == np.int32
    assert prompt.row["images"] == [p.key for p in prompt.pictures]
    assert len(pickle.dumps(prompt)) < 2_000


def test_every_way_to_give_a_picture_is_the_same_picture(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a b.png").write_bytes(PNG)
    text = base64.b64encode(PNG).decode()
    url = f"data:image/png;base64,{text}"
    forms: list[Any] = [
        ["sub/a b.png"], "sub/a b.png", [{"path": "sub/a b.png"}], {"image": str(tmp_path / "sub/a b.png")},
        [f"file://{tmp_path}/sub/a%20b.png"], [text], [url], [{"bytes": text}], [{"image": {"path": "sub/a b.png"}}],
        [{"url": url}],
    ]  # fmt: skip
    rows = [verl_row("<image>?", images=form) for form in forms] + [
        verl_row("<image>?", image="sub/a b.png"),
        {"prompt": [user([{"type": "image"}, {"type": "text", "text": "?"}])], "images": [text]},
        {"prompt": [user([{"type": "image", "image": "sub/a b.png"}, {"type": "text", "text": "?"}])]},
        {"prompt": [user([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}])]},
        {"prompt": [user("?")], "images": [text]},  # no placeholder: before the text, as in TRL
    ]
    prompts = load(tmp_path, write_lines(tmp_path / "rows.jsonl", rows))
    assert len({(p.token_ids.tobytes(), p.pictures) for p in prompts}) == 1
    assert prompts[0].pictures[0].grid == (1, 2)


def test_base64_about_as_long_as_a_path_may_be(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("longer" * 20)
    folder.mkdir(parents=True)
    noise = PNG[:8] + np.random.default_rng(0).integers(0, 256, 9 * 3000, np.uint8).tobytes()
    for length in range(2950, 3070, 7):  # 3,936 to 4,092 letters, with a slash in every 64 of them
        text = base64.b64encode(noise[:length]).decode()
        assert read_picture(text, folder) == noise[:length]


def test_a_picture_alone_is_a_prompt(tmp_path: Path) -> None:
    part = {"type": "image", "image": base64.b64encode(PNG).decode()}
    rows = [{"prompt": [user([{**part, **rest}])]} for rest in ({}, {"text": ""}, {"text": 5})]
    assert [len(p.pictures) for p in load(tmp_path, write_lines(tmp_path / "rows.jsonl", rows))] == [1, 1, 1]


def test_pictures_stand_in_the_order_of_their_placeholders(tmp_path: Path) -> None:
    files = [encoded(picture(28, 28 * n, n)) for n in (1, 2, 3)]
    texts = [base64.b64encode(data).decode() for data in files]
    system = {"role": "system", "content": "See <image>"}
    rows = [
        {"prompt": [first, user("<image><image>"), {**ANSWER, "content": "<image>"}, user("?")], "images": texts}
        for first in (system, {**system, "role": "developer"})
    ]
    for prompt in load(tmp_path, write_lines(tmp_path / "rows.jsonl", rows)):
        assert [p.grid for p in prompt.pictures] == [(1, 1), (1, 2), (1, 3)]
        assert prompt.text.count("<|image_pad|>") == 3 and "<image>" in prompt.text, "an answer's text stays as it is"


def test_rows_without_pictures_are_as_before(tmp_path: Path) -> None:
    row = {"prompt": [user("<img> is a tag")], "images": []}
    parts = {"prompt": [user([{"type": "text", "text": "<img> is "}, {"type": "text", "text": "a tag"}])]}
    first, second = load(tmp_path, write_lines(tmp_path / "rows.jsonl", [row, parts]))
    assert "<img> is a tag" in first.text and first.text == second.text and first.pictures == ()
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (verl_row("<image><image>", images=["a.png"]), "placeholders: 2, but pictures: 1"),
        (verl_row("<image>", imges=["a.png"]), "placeholders: 1, but pictures: 0; they are looked for in the columns"),
        (verl_row("<image>", images=[]), "placeholders: 1, but pictures: 0"),
        (verl_row("?", video="a.mp4"), "column `video`: videos are read from the column `videos`"),
        (verl_row("<image>", images=["a.png", "a.png"]), "placeholders: 1, but pictures: 2"),
        (verl_row("<image><|image_pad|>", images=["a.png"]), "1 pictures and 2 placeholders for them, after the chat"),
        (verl_row("a <|image_pad|>"), "0 pictures and 1 placeholders"),
        (verl_row("a <|image_pad|>"), "<|image_pad|> in a text counts as one: take it out, or write <image> and give"),
        (verl_row("a <|video_pad|>"), "0 videos and 1 placeholders"),
        (verl_row("a <|video_pad|>"), "<|video_pad|> in a text counts as one: take it out, or write <video> and give"),
        ({"prompt": [user([{"type": "image"}])]}, "placeholders: 1, but pictures: 0"),
        ({"prompt": [user([{"type": "audio", "audio": "a.mp3"}])]}, "a part of type 'audio'"),
        ({"prompt": "<image>?", "images": ["a.png"]}, "need a prompt of messages"),
        ({"prompt": "How many?", "image": {"path": "a.png"}}, "need a prompt of messages"),
        (verl_row("<image>", images=["图" * 200 + ".png"]), "is no base64 and no file"),
        (verl_row("<image>", videos=[["a.png"]]), "placeholders: 1, but pictures: 0"),
        (verl_row("<image>", images=["a.png"], image="a.png"), "both columns"),
        (verl_row("<image>", images=["no.png"]), "no.png' is no base64 and no file"),
        (verl_row("<image>", images=["https://a/b.png"]), "nothing is fetched"),
        (verl_row("<image>", images=["data:image/png,abc"]), "not base64"),
        (verl_row("<image>", images=[{"bytes": None, "path": None}]), "a dict with bytes, path"),
        (verl_row("<image>", images=[7]), "picture 1 of 1: the wrong type: int"),
    ],
)
def test_a_bad_row_is_told(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    told = refused(tmp_path, row)
    assert "rows.jsonl, row 1: " in told and reason in told


def test_a_path_that_is_missing_is_told_even_where_base64_has_its_letters(tmp_path: Path) -> None:
    told = refused(tmp_path, verl_row("<image>?", images=["train/img/0001"]))  # no length of base64
    assert "'train/img/0001' is no base64 and no file" in told
    told = refused(tmp_path, verl_row("<image>?", images=["images/train0001"]))
    assert f"'images/train0001' is no file (looked in {tmp_path} and {Path.cwd()}), and in base64 no picture" in told


def test_a_store_that_cannot_be_written_is_told_and_is_no_bad_row(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no directory")
    file = write_lines(tmp_path / "rows.jsonl", [verl_row("<image>What?", images=[{"path": "a.png"}])])
    (tmp_path / "a.png").write_bytes(PNG)
    with pytest.raises(
        UserError, match=r"data.images.directory: .*store: pictures cannot be stored there .*free space"
    ):
        RLHFDataset([file], TOKENIZER, DataConfig(on_bad_row="skip"), pictures_of(tmp_path))


@pytest.mark.parametrize("given", [PNG, base64.b64encode(PNG).decode()])
def test_a_picture_of_too_many_bytes_is_not_decoded(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file of so many is not read; tools and servers may send any number."""
    monkeypatch.setattr("tandem.pictures.sources.MAX_SOURCE_BYTES", len(PNG) - 9)
    for source in [given] if isinstance(given, bytes) else [given, f"data:image/png;base64,{given}"]:
        with pytest.raises(BadPicture, match=r"bytes, more than"):
            read_picture(source, Path())


def test_limits(tmp_path: Path) -> None:
    row = verl_row("<image><image>", images=[base64.b64encode(encoded(picture(28, 112, n))).decode() for n in (1, 2)])
    assert "take 8 tokens; data.images.max_image_tokens is 7" in refused(tmp_path, row, max_image_tokens=7)
    file = tmp_path / "rows.jsonl"
    assert [p.grid for p in load(tmp_path, file, max_pixels=2 * 28 * 28)[0].pictures] == [(1, 2)] * 2
    assert "more than data.images.max_source_pixels, 3,000" in refused(tmp_path, row, max_source_pixels=3_000)
    assert "data.images.max_pixels: 700 is less" in refused(tmp_path, row, max_pixels=700)
    with pytest.raises(UserError, match=r"tokens long, 8 of them for its pictures; data.max_prompt_tokens is 30"):
        RLHFDataset([file], TOKENIZER, DataConfig(max_prompt_tokens=30), pictures_of(tmp_path))


def test_rows_that_are_kept_hold_no_pictures(tmp_path: Path) -> None:
    """Wherever they stand; a parquet file of such messages is read few rows at a time."""
    large = "data:image/png;base64," + "A" * 10_000
    for part in ({"image": large}, {"image": PNG * 99}, {"image_url": {"url": large}}, {"image": {"bytes": PNG}}):
        shown = [{"type": "image", **part}, {"type": "image", "image": "a.png"}, {"type": "text", "text": "?" * 5000}]
        kept = without_pictures({"prompt": [user(shown)], "messages": [user("?")], "images": [PNG], "n": [1]})
        light, path, text = kept["prompt"][0]["content"]
        assert light == {"type": "image", next(iter(part)): None} and (path, text) == (shown[1], shown[2])
        assert {**kept, "prompt": 0} == {"prompt": 0, "messages": [user("?")], "images": None, "n": [1]}
        assert shown[0] == {"type": "image", **part}, "the row itself stays as it is"
    table = pa.table({"prompt": [[user([{"type": "image", "image": b"x"}])]] * 17})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert _may_hold_pictures(table.schema.field("prompt")) and not _may_hold_pictures(pa.field("prompt", pa.string()))
    assert [number for number, _ in read_rows(tmp_path / "rows.parquet")] == [*range(1, 18)]


def test_a_model_without_pictures_is_told_once(tmp_path: Path) -> None:
    rows = [verl_row("<image>?", images=["a.png"])] * 3
    pictures = ModelPictures(model_files(tmp_path / "text", "qwen3"), ImagesConfig(), tmp_path / "store")
    file = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        UserError, match=r"^the rows have pictures, and .*text is no model that sees them here .model type qwen3: "
    ):
        RLHFDataset([file], TOKENIZER, DataConfig(on_bad_row="skip"), pictures)
    other = write_lines(tmp_path / "other.jsonl", [verl_row("<image>", image="python:3.11")])
    (prompt,) = RLHFDataset([other], TOKENIZER, DataConfig(), pictures)
    assert prompt.row["image"] == "python:3.11" and prompt.pictures == ()


def test_files_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    directory = model_files(tmp_path / "model", vision_config={"patch_size": 16, "spatial_merge_size": 2})
    with pytest.raises(UserError, match="patch_size 14 in the image processor's file, 16 in"):
        ModelPictures(directory, ImagesConfig(), tmp_path).prepare([PNG], tmp_path)


def test_demonstrations_and_pairs_have_pictures(tmp_path: Path) -> None:
    text = base64.b64encode(encoded(picture(28, 84))).decode()
    talk = [user("<image>?<image>"), ANSWER, user("!"), {**ANSWER, "content": "BC"}]
    file = write_lines(tmp_path / "sft.jsonl", [{"messages": talk, "images": [text, text]}])
    (shown,) = SftDataset([file], TOKENIZER, SftDataConfig(train_files=[file]), pictures_of(tmp_path))
    ids = np.concatenate([shown.prompt_ids, shown.response_ids])
    assert np.flatnonzero(ids == IMAGE_ID).tolist() == [p.place + n for p in shown.pictures for n in range(3)]
    assert len(shown.pictures) == 2
    learned = TOKENIZER.convert_ids_to_tokens(shown.response_ids[shown.loss_mask].tolist())
    assert "".join(learned) == "A<|end|>\nBC<|end|>\n"

    shows = {"role": "tool", "content": [{"type": "text", "text": "see"}, {"type": "image"}]}
    row = {"messages": [user("<image>?"), ANSWER, user("<image>"), ANSWER, shows, ANSWER], "images": [text] * 3}
    file = write_lines(tmp_path / "late.jsonl", [row])
    (shown,) = SftDataset([file], TOKENIZER, SftDataConfig(train_files=[file]), pictures_of(tmp_path))
    ids = np.concatenate([shown.prompt_ids, shown.response_ids])
    assert np.flatnonzero(ids == IMAGE_ID).tolist() == [p.place + n for p in shown.pictures for n in range(3)]
    assert [p.place < len(shown.prompt_ids) for p in shown.pictures] == [True, False, False]
    learned = TOKENIZER.convert_ids_to_tokens(shown.response_ids[shown.loss_mask].tolist())
    assert "".join(learned) == "A<|end|>\n" * 3

    said = {"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "A"}]}
    file = write_lines(tmp_path / "said.jsonl", [{"messages": [user("?"), said], "images": [text]}])
    with pytest.raises(UserError, match="an answer has a picture in it, which no policy can say"):
        SftDataset([file], TOKENIZER, SftDataConfig(train_files=[file]), pictures_of(tmp_path))

    pair = {
        "prompt": [user("<image>?")],
        "chosen": [ANSWER],
        "rejected": [{**ANSWER, "content": "B"}],
        "images": [text],
    }
    whole = {**pair, "prompt": None, **{name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")}}
    file = write_lines(tmp_path / "pairs.jsonl", [pair, whole])
    first, second = PreferenceDataset([file], TOKENIZER, SftDataConfig(train_files=[file]), pictures_of(tmp_path))
    for one in (first.chosen, first.rejected, second.chosen, second.rejected):
        assert one.pictures == first.chosen.pictures and len(one.pictures) == 1
        assert one.prompt_ids.tolist() == first.chosen.prompt_ids.tolist()


def damages() -> dict[str, Any]:
    flipped = bytearray(PNG)
    flipped[len(PNG) // 2] ^= 16
    return {
        "flipped": bytes(flipped),
        "truncated": PNG[: len(PNG) // 2],
        "text": b"<html>404</html>",
        "empty": b"",
        "bomb": bomb(),
        "animated": animated(),
        "thin": encoded(picture(1, 300)),
        "missing": None,
    }


def test_a_thousand_rows_with_damaged_pictures(tmp_path: Path) -> None:
    """Each damaged one is told with its row, or left out; memory does not grow with the pictures."""
    wrong = list(damages().items())
    rows: list[dict[str, Any]] = []
    expected: dict[int, str] = {}
    for number in range(1, 1001):
        if number % 10 == 0:
            name, data = wrong[number // 10 % len(wrong)]
            expected[number] = name
        else:
            data = encoded(picture(seed=number % 200))
        rows.append(verl_row("<image>?", images=[{"bytes": data, "path": None}], extra_info={"answer": str(number)}))
    file = parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(UserError) as caught:
        load(tmp_path, file)
    told = str(caught.value)
    assert told.startswith("100 of 1,000 rows are bad; mend them, or leave them out with data.on_bad_row=skip")
    for number, reason in (
        (10, "damaged"), (20, "no picture"), (30, "no bytes"), (40, "more pixels than"), (50, "animated"),
        (60, "200 times"), (70, "it must have"), (80, "damaged"),
    ):  # fmt: skip
        line = next(line for line in told.splitlines() if f"row {number}: " in line)
        assert reason in line, line
    pictures = pictures_of(tmp_path)
    tracemalloc.start()
    kept = RLHFDataset([file], TOKENIZER, DataConfig(on_bad_row="skip"), pictures)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == 900 and kept.skipped == 100
    assert {int(p.row["extra_info"]["answer"]) for p in kept} == set(range(1, 1001)) - set(expected)
    assert len({p.pictures[0].key for p in kept}) == 180
    assert pictures._preparer.decoded == 0, "the first start has stored them"
    assert peak < 16 << 20, peak


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gemma3", "see one another, later ones too"), ("kimi_vl", "as kimi_k25 alone"), ("new", "nobody has told how")],
)
def test_a_family_whose_pictures_are_refused_is_told_why(tmp_path: Path, family: str, reason: str) -> None:
    """Its rows of text are read."""
    pictures = ModelPictures(model_files(tmp_path / "model", family), ImagesConfig(), tmp_path / "store")
    text = write_lines(tmp_path / "text.jsonl", [verl_row("What?")])
    assert len(RLHFDataset([text], TOKENIZER, DataConfig(), pictures)) == 1
    file = write_lines(tmp_path / "rows.jsonl", [verl_row("<image>?", images=["a.png"])])
    with pytest.raises(UserError, match=f"here .model type {family}: .*{reason}.*take one of qwen2_vl, .*mistral3"):
        RLHFDataset([file], TOKENIZER, DataConfig(), pictures)
