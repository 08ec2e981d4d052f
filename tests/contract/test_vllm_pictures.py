"""vLLM on prompts with pictures: the trainer's log-probs, whatever was published, and transformers' greedy answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_generation import ask, collect

from examples.tiles.task import make_tokenizer
from tandem.batching.packing import demonstrations_to_batch, micro_batches
from tandem.config.data import ImagesConfig
from tandem.config.generation import VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import UserError
from tandem.generation.replicas import ReplicatedEngine
from tandem.generation.resumable import ResumableGeneration
from tandem.generation.start import start_engine
from tandem.models.tower import PictureTower, tower_of
from tandem.pictures.store import PictureStore
from tandem.training.fsdp import FsdpEngine, make_engine
from tandem.training.optimizers.adamw import AdamWConfig
from tandem.types import Completion, Demonstration, Picture, Request, SamplingParams
from tests import picture_families
from tests.pictures import make_model, prompt_of, store_pictures

BOUND = 2e-5
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@dataclass
class Case:
    """A model, what vLLM generates by it, and prompts of no picture, one and several, one of them in two prompts."""

    path: Path
    store: PictureStore
    engine: ReplicatedEngine
    prompts: list[tuple[Any, tuple[Picture, ...]]]

    def requests(self, temperature: float, samples: int, max_tokens: int = 9) -> list[Request]:
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        return [
            Request(ids, sampling, tuple(range(100 * number, 100 * number + samples)), pictures=pictures)
            for number, (ids, pictures) in enumerate(self.prompts)
        ]

    def trainer(self, vision_tower: Any = "train") -> FsdpEngine:
        model = ModelConfig(path=self.path, vision_tower=vision_tower)
        made = make_engine(model, FsdpTrainingConfig(), AdamWConfig(), pictures=self.store.directory)
        assert isinstance(made, FsdpEngine)
        return made


@pytest.fixture(scope="module", params=[pytest.param(FAMILIES[0], marks=pytest.mark.nightly), FAMILIES[1]])
def started(request: pytest.FixtureRequest, vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    directory = tmp_path_factory.mktemp(request.param)
    path, store = make_model(request.param, directory / "model"), PictureStore(directory / "pictures")
    tokenizer = make_tokenizer()
    a, b, c, d = store_pictures(store, request.param, [(2, 3), (4, 2), (7, 6), (2, 3)])
    prompts = [prompt_of(tokenizer, part) for part in parts_of(a, b, c, d)]
    with closing(start(path, store, tokenizer, ImagesConfig(max_pixels=50_000))) as engine:
        yield Case(path, store, engine, prompts)


def parts_of(a: Picture, b: Picture, c: Picture, d: Picture) -> list[list[str | Picture]]:
    return [["what ", a, "?"], [b, " or ", c, b, " then"], ["just text"], ["again ", b], ["what ", d, "?"]]


def start(path: Path, store: PictureStore, tokenizer: Any, images: ImagesConfig | None = None) -> ReplicatedEngine:
    options = {"gpu_memory_utilization": 0.1, "max_model_len": 512}
    config = VllmGenerationConfig(type="vllm", engine_args=options)
    return start_engine(ModelConfig(path=path), config, tokenizer, pictures=store.directory, images=images)


@pytest.fixture
def case(started: Case) -> Iterator[Case]:
    """Afterwards its engine has the directory's weights again."""
    yield started
    started.engine.load_weights(0, started.trainer().named_weights())


def logprobs(trainer: FsdpEngine, asked: Sequence[Request], answers: Sequence[Sequence[Completion]]) -> Any:
    """`[T]`, the trainer's, of all tokens of the answers."""
    rows = [
        Demonstration(0, request.token_ids, c.token_ids, np.ones(len(c.token_ids), bool), request.pictures)
        for request, own in zip(asked, answers, strict=True)
        for c in own
    ]
    batch = demonstrations_to_batch(rows)
    packed = micro_batches(batch, range(len(batch)), 10_000)
    found = np.zeros(len(batch.response_ids), np.float32)
    for micro_batch, outputs in zip(packed, trainer.forward(packed), strict=True):
        assert outputs.logprobs_S is not None
        found[micro_batch.source] = outputs.logprobs_S.numpy()
    return found


def joined(answers: Sequence[Sequence[Completion]]) -> Any:
    return np.concatenate([completion.logprobs for own in answers for completion in own])


@torch.no_grad()
def change(model: torch.nn.Module, seed: int, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.empty_like(parameter).normal_(0, scale, generator=generator))


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["internvl", "llava", "mistral3"])
def test_other_families(family: str, vllm: None, tmp_path: Path) -> None:
    """Tiles, one square, and rows with text between them; LLaVA's tower has other names than in transformers 5."""
    rows = picture_families.Rows(family, picture_families.make_model(family, tmp_path / "model"), tmp_path / "pictures")
    prompts = [rows.prompt(part) for part in parts_of(*rows.pictures_of_noise())]
    with closing(start(tmp_path / "model", rows.pictures.store, rows.tokenizer)) as engine:
        compare_after_publishes(Case(tmp_path / "model", rows.pictures.store, engine, prompts))


def test_after_publishes_that_change_the_tower_logprobs_are_the_trainers(case: Case) -> None:
    compare_after_publishes(case)


def compare_after_publishes(case: Case) -> None:
    trainer, before = case.trainer(), case.trainer()
    for version in range(3):
        if version:
            change(tower_of(trainer.model), version)
        case.engine.load_weights(version, trainer.named_weights())
        for temperature, samples in ((0.0, 1), (1.0, 4)):
            asked = case.requests(temperature, samples)
            answers = ask(case.engine, *asked)
            assert {v for own in answers for c in own for v in c.versions.tolist()} == {version}
            found = joined(answers)
            np.testing.assert_allclose(found, logprobs(trainer, asked, answers), atol=BOUND, rtol=0)
            if version:
                assert np.abs(found - logprobs(before, asked, answers)).max() > 0.1, "old features would be seen"


def test_publishes_and_sleeps_while_answers_are_made_change_what_they_see(case: Case) -> None:
    """Each token has the log-prob of the version that it names, with the tower of that version; also in answers that
    were aborted and go on."""
    actors = [case.trainer() for _ in range(3)]
    for number, trainer in enumerate(actors):
        change(tower_of(trainer.model), number)
    case.engine.load_weights(0, actors[0].named_weights())
    asked = case.requests(1.0, 2, max_tokens=30)
    generation = ResumableGeneration(case.engine, make_tokenizer())

    async def publish_under_load() -> list[list[Completion]]:
        answers: list[asyncio.Task[list[Completion]]] = []
        for version in range(1, 13):
            if all(answer.done() for answer in answers):
                answers += [asyncio.create_task(collect(generation, one)) for one in asked]
            words = case.requests(1.0, 1, max_tokens=1 + version % 5)[2]
            await collect(generation, words)  # the others make tokens meanwhile
            if version % 2:
                generation.pause()
            case.engine.load_weights(version, actors[version % 3].named_weights())
            generation.resume()
        return await asyncio.gather(*answers)

    answers = asyncio.run(publish_under_load())
    versions = np.concatenate([c.versions for own in answers for c in own])
    asked *= len(answers) // len(asked)
    by_version = np.stack([logprobs(trainer, asked, answers) for trainer in actors])
    expected = by_version[versions % 3, np.arange(len(versions))]
    np.testing.assert_allclose(joined(answers), expected, atol=2 * BOUND, rtol=0)
    assert len({*versions.tolist()}) > 1, "publishes met the answers"
    assert np.abs(by_version[0] - expected).max() > 0.1


def test_greedy_answers_are_those_of_generate(case: Case) -> None:
    theirs: Any = transformers.AutoModelForImageTextToText.from_pretrained(case.path, attn_implementation="sdpa").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(case.path, backend="pil")
    never = [[theirs.config.image_token_id], [theirs.config.video_token_id]]
    asked = case.requests(0.0, 1)
    for request, (completion,) in zip(asked, ask(case.engine, *asked), strict=True):
        ids, shown = torch.from_numpy(request.token_ids)[None].long(), dict[str, Any]()
        if request.pictures:
            images = [case.store.read(picture.key) for picture in request.pictures]
            shown = dict(processor(images=images, do_resize=False, return_tensors="pt"))
            shown["mm_token_type_ids"] = (ids == theirs.config.image_token_id).int()
        made = theirs.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, bad_words_ids=never, **shown)
        assert made[0, ids.shape[1] :].tolist() == completion.token_ids.tolist()


def test_a_later_turn_sees_what_was_shown_before_and_since(case: Case) -> None:
    """As a conversation asks: the exact tokens so far, and what is told then."""
    asked, (told, shown) = case.requests(1.0, 1)[:1], case.prompts[1]
    ((completion,),) = ask(case.engine, *asked)
    begun = np.concatenate((asked[0].token_ids, completion.token_ids))
    moved = tuple(replace(picture, place=len(begun) + picture.place) for picture in shown)
    pictures = (*asked[0].pictures, *moved)
    later = [Request(np.concatenate((begun, told)), asked[0].sampling, (7, 8), pictures=pictures)]
    answers = ask(case.engine, *later)
    np.testing.assert_allclose(joined(answers), logprobs(case.trainer(), later, answers), atol=BOUND, rtol=0)


def test_a_frozen_tower_does_not_travel(case: Case) -> None:
    trainer = case.trainer("frozen")
    change(trainer.model.get_input_embeddings(), 1)
    published = dict(trainer.named_weights())
    assert published and not any(".visual." in name for name in published)
    case.engine.load_weights(7, published.items())
    asked = case.requests(1.0, 2)
    answers = ask(case.engine, *asked)
    np.testing.assert_allclose(joined(answers), logprobs(trainer, asked, answers), atol=BOUND, rtol=0)


def test_a_tempted_policy_draws_no_picture_token(case: Case) -> None:
    """Though much of its probability is on it; log-probs stay those of the whole softmax."""
    trainer = case.trainer()
    tower = PictureTower(trainer.model, case.path, case.store.read)
    embeddings: Any = trainer.model.get_input_embeddings()
    with torch.no_grad():
        embeddings.weight[list(tower.never_drawn)] *= 8
    case.engine.load_weights(8, trainer.named_weights())
    for temperature, samples in ((0.0, 1), (1.0, 8)):
        asked = case.requests(temperature, samples)
        answers = ask(case.engine, *asked)
        drawn = np.concatenate([c.token_ids for own in answers for c in own])
        assert not np.isin(drawn, tower.never_drawn).any()
        expected = logprobs(trainer, asked, answers)
        np.testing.assert_allclose(joined(answers), expected, atol=BOUND, rtol=1e-5)
        assert expected.min() < -5 if temperature else expected.mean() < -2, "the rest of the vocabulary has little"


def test_pictures_that_are_not_as_they_were_counted_are_the_fault_of_their_request_alone(case: Case) -> None:
    sound = case.requests(1.0, 1)
    request = sound[0]
    (picture,) = request.pictures
    gone = replace(request, pictures=(replace(picture, key="0" * 64),))
    turned = replace(request, pictures=(replace(picture, grid=(3, 2)),))
    for wrong, told in (
        (gone, "picture 0+ is missing"),
        (turned, "is stored with 2 x 3 tokens, and asked for with 3 x 2"),
        (replace(request, pictures=()), "places for pictures, and no pictures there"),
        (replace(request, pictures=(replace(picture, place=picture.place + 1),)), "takes 6 tokens from .*, and 5 of"),
        (replace(request, prompt_logprobs=True), "prompt_logprobs of a prompt with pictures"),
    ):
        with pytest.raises(UserError, match=told):
            ask(case.engine, wrong)
    answers = ask(case.engine, *sound)
    np.testing.assert_allclose(joined(answers), logprobs(case.trainer(), sound, answers), atol=BOUND, rtol=0)
