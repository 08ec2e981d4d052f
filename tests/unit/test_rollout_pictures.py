"""Pictures in conversations: rows, tools and worlds show them; their tokens are exact, masked, and never cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mcp_types
import numpy as np
import pytest
from picture_rows import animated, encoded, model_files, picture
from PIL import Image
from published_templates import format_of, needs_trl, with_template

from examples.one_tool import CALL_TAGS, read_calls
from examples.tiles.look import TEMPLATE
from examples.tiles.task import make_tokenizer
from tandem.config.conversation import ConversationConfig, ToolsEnvironmentConfig
from tandem.config.data import ImagesConfig
from tandem.errors import UserError
from tandem.pictures.shown import ModelPictures
from tandem.rollout.conversation import Conversations
from tandem.rollout.conversation_images import Lines, shown
from tandem.rollout.environment import Answer, Reply
from tandem.rollout.formats.template import TemplateFormat
from tandem.rollout.make import make_environments
from tandem.rollout.tools.mcp_tools import content_of
from tandem.rollout.transcript import Transcript
from tandem.types import Completion, Message, Picture, Prompt, Request, SamplingParams, Status, Trajectory

TOKENIZER = make_tokenizer(TEMPLATE, CALL_TAGS)


def token(name: str, tokenizer: Any = TOKENIZER) -> int:
    return tokenizer.convert_tokens_to_ids(name)


STOP, PAD = token("<|im_end|>"), token("<|image_pad|>")
SAMPLING = SamplingParams(max_tokens=200, stop_token_ids=(STOP,))
ASKS = Prompt(0, np.array([1], np.int32), "?", "default", None, {"prompt": [{"role": "user", "content": "?"}]})
TOOLS = '''
import io
from PIL import Image

def look(pair: str):
    """Look.

    Args:
        pair: At what.
    """
    image = Image.new("RGB", (56, 28), "red")
    if pair == "part":
        return [{"type": "text", "text": "see "}, image, "!"]
    if pair == "bytes":
        file = io.BytesIO()
        image.save(file, "PNG")
        return [{"type": "image", "bytes": file.getvalue()}], 0.5, {"looks": 1}
    if pair == "broken":
        return [{"type": "image", "bytes": b"GIF89a"}], 0.5
    if pair == "thin":
        return Image.new("RGB", (28, 28 * 300))
    if pair == "long":
        return ["x" * 90, image, "y" * 90]
    return image
'''


@pytest.fixture
def pictures(tmp_path: Path) -> ModelPictures:
    ids: dict[str, Any] = {"image_token_id": PAD, "video_token_id": token("<|video_pad|>")}
    return ModelPictures(model_files(tmp_path / "model", **ids), ImagesConfig(), tmp_path / "store")


@dataclass
class Scripted:
    """Says what stands in `lines`, one a turn, and notes what it was asked."""

    lines: Sequence[str]
    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> AsyncIterator[Completion]:
        said = TOKENIZER.encode(self.lines[len(self.requests)], add_special_tokens=False)
        self.requests.append(request)
        ids = np.array([*said, STOP], np.int32)[: request.sampling.max_tokens]
        status = Status.COMPLETED if ids[-1] == STOP else Status.TRUNCATED
        yield Completion(0, ids, -np.ones(len(ids), np.float32), np.full(len(ids), 3, np.int32), status)


@dataclass
class World:
    """Shows `shows` after each turn but the last."""

    shows: Sequence[Any]
    tools: tuple[Any, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.row["prompt"]

    async def step(self, answer: Answer) -> Reply:
        self.steps += 1
        if self.steps > len(self.shows):
            return Reply(reward=1.0)
        parts = [{"type": "text", "text": "now "}, {"type": "image", "image": self.shows[self.steps - 1]}]
        return Reply([{"role": "user", "content": parts}])

    async def close(self) -> float | None:
        return None


@dataclass
class Worlds:
    shows: Sequence[Any]

    async def open(self) -> None: ...

    def make(self, prompt: Prompt) -> World:
        return World(self.shows)

    async def close(self) -> None: ...


def hold(
    environments: Any,
    lines: Sequence[str],
    pictures: ModelPictures | None,
    prompt: Prompt = ASKS,
    sampling: SamplingParams = SAMPLING,
    thinking: Any = "all",
) -> tuple[Trajectory, list[Request]]:
    engine, tokens = Scripted(lines), TemplateFormat(TOKENIZER, [STOP], read_calls, thinking)
    section = ConversationConfig.model_validate(
        {"environment": {"type": "own", "environment": "a:b"}, "environment_retries": 0}
    )

    async def answer() -> list[Trajectory]:
        conversations = Conversations(
            section, environments, tokens, engine.generate, TOKENIZER.batch_decode, lambda: 1000, pictures
        )
        await conversations.open()
        return await conversations.answer(prompt, [7], sampling)

    (trajectory,) = asyncio.run(answer())
    return trajectory, engine.requests


def look(tmp_path: Path, pair: str, pictures: ModelPictures | None, **given: Any) -> tuple[Trajectory, list[Request]]:
    (tmp_path / "tools.py").write_text(TOOLS)
    section = {"tools": [f"{tmp_path}/tools.py:look"], "limits": {"result_characters": 100}}
    environments = make_environments(ToolsEnvironmentConfig.model_validate(section), pictures)
    return hold(environments, [f"<tool_call>{pair}</tool_call>", "r"], pictures, **given)


def spelled(trajectory: Trajectory) -> str:
    return TOKENIZER.decode(trajectory.response_ids.tolist())


def check_places(ids: np.ndarray[Any, Any], shown: Sequence[Picture]) -> None:
    found = [p.place + n for p in shown for n in range(p.grid[0] * p.grid[1])]
    assert np.flatnonzero(ids == PAD).tolist() == found


def test_what_a_tool_shows_is_among_the_tokens_and_is_not_trained_on(tmp_path: Path, pictures: ModelPictures) -> None:
    trajectory, (first, second) = look(tmp_path, "part", pictures)
    told = "<|im_start|>tool\nsee <|vision_start|><|image_pad|><|image_pad|><|vision_end|>!<|im_end|>\n"
    turn = "<tool_call>part</tool_call><|im_end|>"
    assert spelled(trajectory) == f"{turn}\n{told}<|im_start|>assistant\nr<|im_end|>"
    trained = trajectory.response_ids[trajectory.loss_mask]
    assert TOKENIZER.decode(trained.tolist()) == f"{turn}r<|im_end|>"
    (shown_one,) = trajectory.pictures
    assert first.pictures == () and second.pictures == trajectory.pictures and shown_one.grid == (1, 2)
    check_places(second.token_ids, second.pictures)
    whole = np.concatenate((trajectory.prompt.token_ids, trajectory.response_ids))
    check_places(whole, trajectory.every_branch[0].pictures)
    np.testing.assert_array_equal(whole[: len(second.token_ids)], second.token_ids)
    assert (pictures.store.read(shown_one.key) == (255, 0, 0)).all()
    parts = [{"type": "text", "text": "see "}, {"type": "image", "key": shown_one.key}, {"type": "text", "text": "!"}]
    assert json.loads(json.dumps(trajectory.messages))[1]["content"] == parts
    assert trajectory.numbers["calls"] == 1 and "failed_calls" not in trajectory.numbers


@pytest.mark.parametrize("pair", ["image", "bytes"])
def test_one_picture_has_one_key_whatever_it_comes_as(tmp_path: Path, pictures: ModelPictures, pair: str) -> None:
    trajectory, _ = look(tmp_path, pair, pictures)
    red = pictures.prepare([encoded(Image.new("RGB", (56, 28), "red"))], tmp_path)
    assert [one.key for one in trajectory.pictures] == [red[0].key], trajectory.messages
    assert trajectory.reward == (0.5 if pair == "bytes" else None)


@pytest.mark.parametrize(
    ("pair", "why"),
    [("broken", "error: picture 1 of 1: the 6 bytes are no picture"), ("thin", "error: picture 1 of 1: 28 x 8400")],
)
def test_a_tool_that_shows_no_picture_has_failed(tmp_path: Path, pictures: ModelPictures, pair: str, why: str) -> None:
    """The policy is told, and goes on."""
    trajectory, _ = look(tmp_path, pair, pictures)
    assert trajectory.status is Status.COMPLETED and trajectory.pictures == () and trajectory.reward is None
    assert trajectory.messages[1]["content"].startswith(why) and trajectory.numbers["failed_calls"] == 1


def test_long_text_is_cut_and_pictures_are_not(tmp_path: Path, pictures: ModelPictures) -> None:
    trajectory, _ = look(tmp_path, "long", pictures, sampling=SamplingParams(max_tokens=400, stop_token_ids=(STOP,)))
    first, image, second, more = trajectory.messages[1]["content"]
    assert first["text"] == "x" * 90 and second["text"] == "y" * 10 and "80 more characters" in more["text"]
    assert image["key"] == trajectory.pictures[0].key and trajectory.numbers["cut_results"] == 1


def test_a_model_that_sees_none_is_told_of_it(tmp_path: Path) -> None:
    trajectory, (_, second) = look(tmp_path, "part", None)
    assert trajectory.messages[1]["content"] == "see [image: not shown]!" and second.pictures == ()


def test_a_conversation_ends_before_a_picture_that_has_no_room(tmp_path: Path, pictures: ModelPictures) -> None:
    whole, _ = look(tmp_path, "image", pictures)
    place, start = whole.pictures[0].place, len(whole.prompt.token_ids)
    limited = SamplingParams(max_tokens=place - start + 1, stop_token_ids=(STOP,))
    trajectory, requests = look(tmp_path, "image", pictures, sampling=limited)
    assert len(requests) == 1 and trajectory.status is Status.TRUNCATED
    assert trajectory.pictures == () and PAD not in trajectory.response_ids and trajectory.loss_mask.all()


def shown_row(pictures: ModelPictures, tmp_path: Path) -> Prompt:
    """As RLHFDataset leaves it."""
    (one,) = pictures.prepare([encoded(picture(28, 84))], tmp_path)
    parts = [{"type": "image", "key": one.key}, {"type": "text", "text": "?"}]
    return Prompt(0, np.array([1], np.int32), "?", "default", None, {"prompt": [{"role": "user", "content": parts}]})


def test_worlds_show_pictures_and_a_branch_shows_them_all(tmp_path: Path, pictures: ModelPictures) -> None:
    """An array, and bytes; where thinking may be dropped the conversation is rendered anew after each."""
    prompt, array = shown_row(pictures, tmp_path), np.full((56, 28, 3), 7, np.uint8)
    for thinking, branches in (("all", 1), ("template", 3)):
        trajectory, requests = hold(
            Worlds([array, encoded(picture())]), ["a", "b", "c"], pictures, prompt, thinking=thinking
        )
        assert [len(request.pictures) for request in requests] == [1, 2, 3]
        for request in requests:
            check_places(request.token_ids, request.pictures)
        every = trajectory.every_branch
        assert len(every) == branches and len(every[-1].pictures) == 3
        assert trajectory.prompt.pictures == requests[0].pictures
        for branch in every:
            check_places(np.concatenate((branch.prompt_ids, branch.response_ids)), branch.pictures)
        assert (
            requests[2].token_ids.tolist()
            == hold(Worlds([array, encoded(picture())]), ["a", "b", "c"], pictures, prompt)[1][2].token_ids.tolist()
        )


@pytest.mark.parametrize(("shows", "why"), [(animated(), "an animated GIF"), (7, "the wrong type: int")])
def test_a_world_that_shows_no_picture_has_failed(pictures: ModelPictures, shows: Any, why: str) -> None:
    trajectory, _ = hold(Worlds([shows]), ["a", "b"], pictures)
    assert trajectory.status is Status.ENVIRONMENT_ERROR and why in (trajectory.error or "")


def test_only_stored_pictures_have_keys(pictures: ModelPictures) -> None:
    for key in ("0" * 64, "../../etc/passwd"):
        parts = [{"type": "image", "key": key}]
        with pytest.raises(ValueError, match="there is no picture"):
            Transcript(
                TemplateFormat(TOKENIZER, [STOP], read_calls), [{"role": "user", "content": parts}], (), pictures
            )


def test_pictures_of_mcp_servers(tmp_path: Path, pictures: ModelPictures) -> None:
    import base64

    data = base64.b64encode(encoded(picture())).decode()
    parts = [
        mcp_types.TextContent(text="look:"),
        mcp_types.ImageContent(data=data, mime_type="image/png"),
        mcp_types.TextContent(text="there"),
    ]
    content = content_of(mcp_types.CallToolResult(content=[*parts]))
    seen: Any = asyncio.run(shown(content, pictures))
    assert [part.get("text", "picture") for part in seen] == ["look:\n", "picture", "\nthere"]
    assert asyncio.run(shown(content, None)) == f"look:\n[image/png, {len(data) * 3 // 4} bytes: not shown]\nthere"
    (tmp_path / "secret.png").write_bytes(encoded(picture()))
    named = mcp_types.ImageContent(data=str(tmp_path / "secret.png"), mime_type="image/png")
    with pytest.raises(ValueError, match="the data: URL is no base64"):
        asyncio.run(shown(content_of(mcp_types.CallToolResult(content=[named])), pictures))


@needs_trl
@pytest.mark.parametrize(("name", "role"), [("qwen2_5_vl", "user"), ("qwen3_vl", "user"), ("qwen3_vl", "tool")])
def test_published_templates(tmp_path: Path, name: str, role: str) -> None:
    """What is appended is what the template makes of the whole conversation."""
    tokenizer = with_template(name)
    pad, video = token("<|image_pad|>", tokenizer), token("<|video_pad|>", tokenizer)
    files = model_files(tmp_path / "model", image_token_id=pad, video_token_id=video)
    pictures = ModelPictures(files, ImagesConfig(), tmp_path / "store")
    (one,), (other,) = (pictures.prepare([encoded(picture(28, 84, seed))], tmp_path) for seed in (1, 2))
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}] * (role == "tool")
    opening = [
        {"role": "user", "content": [{"type": "image", "key": one.key}, {"type": "text", "text": "<|image_pad|>?"}]}
    ]
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    turn: Message = {"role": "assistant", "content": "a"} | ({"tool_calls": [call]} if tools else {})
    said = [{"type": "text", "text": "see"}, {"type": "image", "key": other.key}]
    new = [{"role": role, "content": said} | ({"tool_call_id": "call00001", "name": "f"} if tools else {})]
    lines, tokens = Lines(format_of(tokenizer), pictures), format_of(tokenizer)
    before = lines.open(opening, tools)
    assert len(before.pictures) == 1 and "<|image_pad|>?" in tokens.text(before.ids.tolist())
    whole = lines.open([*opening, turn, *new], tools)
    start = len(before.ids)
    stop = start + whole.ids[start:].tolist().index(token("<|im_end|>", tokenizer)) + 1
    line = lines.extend(before._replace(ids=whole.ids[:stop]), new, tools)
    assert line is not None and line.ids.tolist() == whole.ids.tolist() and line.pictures == whole.pictures
    found = [p.place + n for p in line.pictures for n in range(3)]
    assert np.flatnonzero(line.ids == pad).tolist() == found and len(found) == 6


def test_a_template_that_leaves_pictures_out_is_told(pictures: ModelPictures, tmp_path: Path) -> None:
    (one,) = pictures.prepare([encoded(picture())], tmp_path)
    tokenizer = make_tokenizer(TEMPLATE.replace("part.type == 'image'", "part.type == 'image' and m.role == 'user'"))
    lines = Lines(TemplateFormat(tokenizer, [STOP], read_calls), pictures)
    message = {"role": "tool", "content": [{"type": "image", "key": one.key}]}
    with pytest.raises(UserError, match="the pictures in messages of tool: 1 pictures and 0 placeholders"):
        lines.open([message], ())
