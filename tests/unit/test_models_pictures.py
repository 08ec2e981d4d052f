"""Packed rows with pictures against one forward pass of transformers a row: log-probs, gradients, the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tandem.batching.packing import demonstrations_to_batch, micro_batches
from tandem.config.model import ModelConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import EngineError, UserError
from tandem.generation.native import NativeEngine
from tandem.models.family_check import TOLERANCE, compare
from tandem.models.loading import load_model
from tandem.models.tower import PictureTower, tower_of
from tandem.pictures.positions import places_of
from tandem.pictures.store import PictureStore
from tandem.pictures.vlm_config import in_tower
from tandem.training.fsdp import FsdpEngine
from tandem.types import Batch, Completion, Demonstration, IntArray, Picture, Request, SamplingParams, TokenColumns
from tests.picture_engines import WeightedLogprobs, encoded_by, engine_of, generate, logprobs
from tests.picture_families import FAMILIES, NEEDS_FEATURES, Rows, config_of, make_model, make_tokenizer

pytestmark = NEEDS_FEATURES


@dataclass
class Case:
    """A model, rows of four prompts, and what transformers makes of them."""

    family: str
    path: Path
    store: PictureStore
    data: Rows
    rows: list[Demonstration]
    groups: IntArray
    theirs: Any
    """The model as transformers computes it."""

    @property
    def batch(self) -> Batch:
        return demonstrations_to_batch(self.rows, self.groups)

    def inputs(self, token_ids: IntArray, prompt: int, pictures: Sequence[Picture]) -> dict[str, Any]:
        """What a forward pass of one row of its own is called with, of the pictures as they were given."""
        ids = torch.from_numpy(token_ids)[None].long()
        return {"input_ids": ids, "use_cache": False, **self.data.inputs(token_ids, prompt, pictures)}

    def wanted(self) -> torch.Tensor:
        """Log-probs of all response tokens."""
        found: list[torch.Tensor] = []
        for row in self.rows:
            ids, prompt = np.concatenate((row.prompt_ids, row.response_ids)), len(row.prompt_ids)
            logits = self.theirs(**self.inputs(ids, prompt, row.pictures)).logits[0, prompt - 1 : -1]
            found.append(logits.log_softmax(-1).gather(1, torch.from_numpy(row.response_ids)[:, None].long())[:, 0])
        return torch.cat(found)

    def wanted_values(self, head: torch.nn.Linear) -> torch.Tensor:
        """Of all response tokens, with this head on the same body."""
        found: list[torch.Tensor] = []
        for row in self.rows:
            ids, prompt = np.concatenate((row.prompt_ids, row.response_ids)), len(row.prompt_ids)
            hidden = self.theirs.base_model(**self.inputs(ids, prompt, row.pictures)).last_hidden_state
            found.append(head(hidden[0, prompt - 1 : -1])[:, 0])
        return torch.cat(found)


USUAL = ("qwen2_5_vl", "qwen3_vl", "llava")
"""The three layouts of positions and towers; other families are variants of them."""


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=() if one in USUAL else pytest.mark.nightly) for one in FAMILIES]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = request.param
    directory = tmp_path_factory.mktemp(family)
    path, store = make_model(family, directory / "model"), PictureStore(directory / "pictures")
    data = Rows(family, path, store.directory)
    rows, groups = data.demonstrations()
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, attn_implementation="sdpa")
    return Case(family, path, store, data, rows, groups, theirs.eval())


class WeightedValues:
    token_local = True

    def __call__(self, outputs: Any, columns: TokenColumns[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert columns.loss_weights is not None
        return (columns.loss_weights * outputs.values_S).sum(), {}


@pytest.mark.parametrize("tokens", [10_000, 60])
def test_packed_rows_have_the_log_probs_of_a_forward_pass_each(case: Case, tokens: int) -> None:
    with torch.no_grad():
        wanted = case.wanted()
    assert (logprobs(engine_of(case), case.batch, tokens) - wanted).abs().max() < 1e-5


FROZEN, CHECKPOINTED = {"vision_tower": "frozen"}, {"activation_checkpointing": True}


@pytest.mark.parametrize(
    "options", [{}, FROZEN, CHECKPOINTED, pytest.param(FROZEN | CHECKPOINTED, marks=pytest.mark.nightly)], ids=str
)
def test_gradients_are_those_of_a_forward_pass_each(case: Case, options: dict[str, Any]) -> None:
    """Of the tower, too, where it learns."""
    batch = case.batch
    batch.tokens.loss_weights = np.random.default_rng(2).normal(size=len(batch.response_ids)).astype(np.float32)
    batch.tokens.shares = np.zeros_like(batch.tokens.loss_weights)
    engine = engine_of(case, **options)
    for tokens in (10_000, 60):
        engine.model.zero_grad()
        case.theirs.zero_grad()
        (case.wanted() * torch.from_numpy(batch.tokens.loss_weights)).sum().backward()
        engine.forward_backward(micro_batches(batch, range(len(batch)), tokens), WeightedLogprobs())
        theirs = dict(case.theirs.named_parameters())
        frozen = {name for name, p in engine.model.named_parameters() if p.grad is None}
        unused = {name for name, p in theirs.items() if p.grad is None}
        assert frozen == (unused | {name for name in theirs if in_tower(name)} if "vision_tower" in options else unused)
        for name, parameter in engine.model.named_parameters():
            if parameter.grad is not None:
                gradient = theirs[name].grad
                assert gradient is not None
                # A bias of all keys changes no softmax: what is there of its gradient is rounding alone.
                least = 0.1 if name.endswith("k_proj.bias") and in_tower(name) else 1e-3
                assert (parameter.grad - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp_min(least), name


@pytest.mark.parametrize("options", [{}, FROZEN], ids=str)
def test_a_picture_is_encoded_once_a_micro_batch_or_once_for_all(case: Case, options: dict[str, Any]) -> None:
    """Whichever rows show it; what is kept for all passes is made alone, so that a resumed run makes the same."""
    engine, batch = engine_of(case, **options), case.batch
    counts, distinct = encoded_by(engine), {picture.key for row in case.rows for picture in row.pictures}
    assert sum(len(row.pictures) for row in case.rows) > len(distinct) == len(batch.pictures)
    for passes in (1, 2):
        logprobs(engine, batch)
        assert sum(counts) == len(distinct) * (1 if options else passes)
    assert not options or set(counts) == {1}, "what is kept hangs on who was encoded with it"


def test_what_is_saved_is_what_transformers_would_save(case: Case, tmp_path: Path) -> None:
    """Names and shapes of weights, so whoever reads the published model reads it."""
    for file in engine_of(case).save(tmp_path):
        file.path.parent.mkdir(exist_ok=True)
        file.write()
    found, wanted = (load_file(path / "model.safetensors") for path in (tmp_path / "model", case.path))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_values_are_those_of_a_forward_pass_each(case: Case, tmp_path: Path) -> None:
    """And their gradients, of the tower, too. A critic's directory has the policy's names, and those of its head."""
    critic = load_model(ModelConfig(path=case.path), value_head=True)
    head: Any = critic.get_submodule("score")
    assert not head.weight.any() and not head.bias.any()
    with torch.no_grad():
        head.weight.normal_(0, 0.3)
        head.bias.fill_(0.5)
    critic.save_pretrained(tmp_path)
    saved, published = (load_file(path / "model.safetensors") for path in (tmp_path, case.path))
    bodies = {name for name in published if not name.endswith("lm_head.weight")}
    assert saved.keys() == bodies | {"score.weight", "score.bias"}
    batch = case.batch
    batch.tokens.loss_weights = np.random.default_rng(2).normal(size=len(batch.response_ids)).astype(np.float32)
    engine = engine_of(case, tmp_path)
    case.theirs.zero_grad()
    wanted = case.wanted_values(head)
    (wanted * torch.from_numpy(batch.tokens.loss_weights)).sum().backward()
    theirs = {**dict(case.theirs.named_parameters()), "score.weight": head.weight, "score.bias": head.bias}
    for tokens in (10_000, 60):
        engine.model.zero_grad()
        packed = micro_batches(batch, range(len(batch)), tokens)
        found = torch.zeros(len(wanted))
        for micro_batch, outputs in zip(packed, engine.forward(packed), strict=True):
            assert outputs.values_S is not None
            found[torch.from_numpy(micro_batch.source)] = outputs.values_S
        assert (found - wanted).abs().max() < 1e-5
        engine.forward_backward(packed, WeightedValues())
        for name, parameter in engine.model.named_parameters():
            gradient = theirs[name].grad
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None and parameter.grad is not None:
                least = 0.1 if name.endswith("k_proj.bias") and in_tower(name) else 1e-3  # as above
                assert (parameter.grad - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp_min(least), name


def test_positions_and_pictures_matter(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: with text's positions for pictures, and with one picture for another, log-probs are far off."""
    with torch.no_grad():
        wanted = case.wanted()
    engine = engine_of(case)
    tower = engine._tower
    assert tower is not None
    read = tower._read
    other = case.rows[-1].pictures[0].key
    monkeypatch.setattr(tower, "_read", lambda key: read(other)[::-1].copy() if key == other else read(key))
    assert (logprobs(engine, case.batch) - wanted)[-len(case.rows[-1].response_ids) :].abs().max() > 0.1
    monkeypatch.setattr(tower, "_read", read)
    if not tower.spatial:
        return
    monkeypatch.setattr(tower, "spatial", False)
    assert (logprobs(engine, case.batch) - wanted).abs().max() > 0.1


def requests_of(case: Case, temperature: float, samples: int, keep: bool = False) -> list[Request]:
    first = {int(group): row for group, row in zip(case.groups[::-1], case.rows[::-1], strict=True)}
    sampling = SamplingParams(temperature=temperature, max_tokens=9)
    return [
        Request(row.prompt_ids, sampling, tuple(range(100 * group, 100 * group + samples)), pictures=row.pictures,
                keep=keep)
        for group, row in sorted(first.items())
    ]  # fmt: skip


def test_generated_log_probs_are_the_trainers(case: Case) -> None:
    """Of greedy and of drawn answers, several to a prompt, in more rows than the engine has slots; with what earlier
    requests have left; and after the tower has other weights."""
    engine = engine_of(case)
    tower = PictureTower(engine.model, case.path, case.store.read)
    recorded = case.family in ("qwen2_5_vl", "qwen3_vl", "smolvlm")  # with positions of both kinds
    native = NativeEngine(engine.model, max_running=6, record=recorded, tower=tower)
    for version in range(2):
        native.load_weights(version, None)
        for temperature, samples, keep in ((0.0, 1, False), (1.0, 4, True), (1.0, 3, True)):
            asked = requests_of(case, temperature, samples, keep)
            answers = generate(native, asked)
            rows = [
                Demonstration(0, request.token_ids, c.token_ids, np.ones(len(c.token_ids), bool), request.pictures)
                for request, own in zip(asked, answers, strict=True)
                for c in own
            ]
            theirs = np.concatenate([c.logprobs for own in answers for c in own])
            ours = logprobs(engine, demonstrations_to_batch(rows)).numpy()
            assert np.abs(ours - theirs).max() < 2e-5
            assert not any(np.isin(row.response_ids, tower.never_drawn).any() for row in rows)
        with torch.no_grad():
            for parameter in tower_of(engine.model).parameters():
                parameter.mul_(1.1)


@pytest.mark.parametrize("case", ["qwen3_vl"], indirect=True)
def test_pictures_do_not_pile_up_and_features_leave_the_device(case: Case) -> None:
    """An engine forgets pictures at a publish, and its numbers at many; log-probs stay those of the pictures shown."""
    moved: list[str] = []

    class Noted(PictureTower):
        def offload(self) -> None:
            moved.append("out")
            super().offload()

    engine = engine_of(case, vision_tower="frozen")
    tower = Noted(engine.model, case.path, case.store.read)
    native = NativeEngine(engine.model, max_running=6, tower=tower)
    first: list[list[Completion]] | None = None
    for version in range(3):
        native.load_weights(version, None)
        # The same pictures have other numbers in another order.
        asked = requests_of(case, 0.0, 1, keep=True)[:: 1 if version % 2 else -1]
        answers = generate(native, asked)[:: 1 if version % 2 else -1]
        first = first or answers
        for (one,), (other,) in zip(first, answers, strict=True):
            assert np.abs(one.logprobs - other.logprobs).max() < 1e-5
        distinct = {picture.key for request in asked for picture in request.pictures}
        assert len(native._pictures.pictures) == len(distinct)
        native.sleep()
        native.wake()
    assert len(moved) == 3
    trained = FsdpEngine(engine.model, FsdpTrainingConfig(), None, tower=tower)
    trained.offload()
    assert len(moved) == 4


@pytest.mark.parametrize("case", ["qwen3_vl"], indirect=True)
def test_positions_of_a_text_are_its_own_in_a_slot_that_had_pictures(case: Case) -> None:
    engine = engine_of(case)
    native = NativeEngine(engine.model, max_running=1, tower=PictureTower(engine.model, case.path, case.store.read))
    native.load_weights(0, None)
    asked = requests_of(case, 0.0, 1)
    (text,) = (request for request in asked if not request.pictures)
    ((before,),) = generate(native, [text])
    for shown in (request for request in asked if request.pictures):
        _, (after,) = generate(native, [shown, text])
        assert after.token_ids.tolist() == before.token_ids.tolist()
        np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5, rtol=0)


def test_greedy_answers_are_those_of_generate(case: Case) -> None:
    engine = engine_of(case)
    tower = PictureTower(engine.model, case.path, case.store.read)
    native = NativeEngine(engine.model, max_running=6, tower=tower)
    native.load_weights(0, None)
    asked = requests_of(case, 0.0, 1)
    for request, (completion,) in zip(asked, generate(native, asked), strict=True):
        ids = torch.from_numpy(request.token_ids)[None].long()
        shown = case.data.inputs(request.token_ids, len(request.token_ids), request.pictures)
        never = [[token] for token in tower.never_drawn]
        theirs = case.theirs.generate(
            ids, max_new_tokens=9, do_sample=False, eos_token_id=None, bad_words_ids=never, **shown
        )
        assert theirs[0, ids.shape[1] :].tolist() == completion.token_ids.tolist()


def test_places_without_pictures_are_told(case: Case) -> None:
    """Of what was written by something else than ours, say: the model would see the placeholder's own embedding."""
    engine = engine_of(case)
    tower = PictureTower(engine.model, case.path, case.store.read)
    native = NativeEngine(engine.model, max_running=6, tower=tower)
    native.load_weights(0, None)
    bare = replace(case.rows[0], pictures=())
    with pytest.raises(EngineError, match="places for pictures, and no pictures there"):
        logprobs(engine, demonstrations_to_batch([bare]))
    request = Request(bare.prompt_ids, SamplingParams(max_tokens=2), (0,))
    with pytest.raises(UserError, match="places for pictures, and no pictures there"):
        generate(native, [request])
    blind = NativeEngine(engine.model, max_running=6)
    blind.load_weights(0, None)
    with pytest.raises(UserError, match="sees no pictures"):
        generate(blind, [replace(request, pictures=case.rows[0].pictures)])


def test_a_tempted_policy_draws_no_picture_token(case: Case) -> None:
    """Though nearly all of its probability is on it; log-probs stay those of the whole softmax."""
    engine = engine_of(case)
    tower = PictureTower(engine.model, case.path, case.store.read)
    layer = engine.model.get_output_embeddings()
    tempting = torch.nn.Linear(layer.in_features, layer.out_features)
    tempting.weight, tempting.bias.data = layer.weight, torch.zeros(layer.out_features)
    tempting.bias.data[list(tower.never_drawn)] = 20.0
    engine.model.lm_head = tempting
    native = NativeEngine(engine.model, max_running=6, tower=tower)
    native.load_weights(0, None)
    for temperature in (0.0, 1.0):
        for own in generate(native, requests_of(case, temperature, 1)):
            assert not np.isin(own[0].token_ids, tower.never_drawn).any()
            assert (own[0].logprobs < -5).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_before_weights_are_read_shows_a_picture(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(family, make_tokenizer(family))
    assert max(compare(config)) < TOLERANCE
    if not FAMILIES[family].spatial:
        return
    monkeypatch.setattr("tandem.models.family_check.places_of", lambda *a, **_: places_of(*a, spatial=False))
    assert max(compare(config)) > 100 * TOLERANCE  # text's positions for a picture


PUBLISHED: dict[str, Any] = {
    "llava": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
        "vision_feature_layer": [-2, 5],
        "vision_feature_select_strategy": "full",
    },
    "internvl": {"text_config": {"model_type": "qwen3_moe"}, "vision_config": {"use_qk_norm": True}},
    "smolvlm": {"vision_config": {"image_size": 384, "patch_size": 14}, "scale_factor": 3},
    "mistral3": {"image_token_index": 10},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_models_of_published_sizes_are_made_small(family: str) -> None:
    assert max(compare(transformers.CONFIG_MAPPING[family](**PUBLISHED[family]))) < TOLERANCE


def test_a_picture_that_is_cut_is_told() -> None:
    picture = Picture("key", (2, 2), 1)
    with pytest.raises(ValueError, match="picture 0 ends after 3 of its tokens"):
        places_of(np.array([5, -1, -1, -1, 6]), np.array([0, 5]), np.array([-1]), [picture], spatial=True)


def test_positions_are_those_of_transformers(case: Case) -> None:
    """Wherever a prompt is cut into segments, within a picture, too; and of a picture beside itself."""
    row = case.rows[3]
    if not case.data.family.spatial:
        return
    batch = demonstrations_to_batch([row])
    ids, wanted = batch.prompt_ids, None
    for cut in range(1, len(ids)):
        offsets, prefixes = np.array([0, cut, len(ids)]), np.array([-1, 0])
        places = places_of(ids, offsets, prefixes, batch.pictures, spatial=True)
        if wanted is None:
            raw = torch.from_numpy(row.prompt_ids)[None].long()
            kinds = (raw == case.theirs.config.image_token_id).int()
            grids = case.data.inputs(row.prompt_ids, len(row.prompt_ids), row.pictures)["image_grid_thw"]
            index = case.theirs.base_model.get_rope_index(raw, mm_token_type_ids=kinds, image_grid_thw=grids)
            wanted = index[0][:, 0].numpy(), int(index[1][0, 0])
        assert (places.positions == wanted[0]).all()
        assert places.ends[-1] == len(ids) + wanted[1]
        assert (places.features == np.arange(4 * 2 + 7 * 6)).all()
    twice = replace(row.pictures[0], grid=(1, 2))
    side = places_of(np.array([-1, -1, -1, -1]), np.array([0, 4]), np.array([-1]), [twice], spatial=True)
    assert side.positions.tolist() == [[0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 3]]
    assert side.features.tolist() == [0, 1, 0, 1]
