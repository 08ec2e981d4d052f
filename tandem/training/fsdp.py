"""The PyTorch engine: plain torch on one rank, FSDP2 on several; the model families of docs/models.md."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.attention import current_flash_attention_impl
from transformers import PreTrainedModel

from tandem.config.model import ModelConfig
from tandem.config.optimizer import OptimizerConfig
from tandem.config.training import FsdpTrainingConfig
from tandem.errors import EngineError, UserError
from tandem.models.attention.kernel_check import check_attention
from tandem.models.attention.versions import choose_version
from tandem.models.classes import is_picture_model, value_layer
from tandem.models.loading import fill, load_empty, load_model
from tandem.models.logits import Bend
from tandem.models.lora import Adapter, adapters_off, add_adapters, merged_weights, published
from tandem.models.mixing import has_mixers
from tandem.models.mixing.mixer_check import check_mixers
from tandem.models.storage import TensorFile, own_pieces, shard_file
from tandem.models.tower import PictureTower, is_frozen, tower_of
from tandem.pictures.store import PictureStore
from tandem.pictures.vlm_config import ENCODED_ALONE
from tandem.regions import Shard
from tandem.training.activation_checkpointing import checkpointed_layers, checkpointing
from tandem.training.base import LossResult, PassResult, TopTokens, TrainEngine, sum_parts, sum_results
from tandem.training.context import ContextParallel, Head, LocalMicroBatch
from tandem.training.copies import HostCopies, copy_adapters, copy_model
from tandem.training.head import ValueHead, VocabularyHead
from tandem.training.layout import Sharded, Whole
from tandem.training.optimizer import MasterOptimizer, read_whole_state
from tandem.training.tiled_head import TiledVocabularyHead
from tandem.types import MicroBatch, Outputs, TokenColumns, TokenLoss

_LOG = logging.getLogger(__name__)
_EMPTY_MICRO_BATCH = MicroBatch(
    token_ids=np.zeros(1, dtype=np.int32),
    offsets=np.array([0, 1]),
    prefixes=np.array([-1]),
    predicted_at=np.zeros(0, dtype=np.int64),
    targets=np.zeros(0, dtype=np.int32),
    columns=TokenColumns(),
    source=np.zeros(0, dtype=np.int64),
)
"""What a rank without micro-batches computes while others still have some: the collectives need it."""


class FsdpEngine:
    """A TrainEngine over a model in this process; it trains the model's own parameters, in place.

    Generation may share them at one rank: their storage is never replaced while they stay on one device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: FsdpTrainingConfig,
        optimizer: OptimizerConfig | None,
        total_steps: int = 1,
        temperature: float = 1.0,
        layout: Whole | None = None,
        tower: PictureTower | None = None,
        top: TopTokens | None = None,
    ) -> None:
        """A language model is a policy, `temperature` that of its log-probs; a token-classification one is a critic.

        `total_steps`: optimizer steps of the run. Without `optimizer` the model is frozen: `forward` only. `layout`:
        of the model over the ranks; default: all of it on this one. `tower`: the model's, for micro-batches with
        pictures. `top`: what `forward` of a policy tells of the most probable tokens.
        """
        self.model = model.eval()
        if not optimizer:
            model.requires_grad_(False)
        self._layout = layout or Whole(model)
        _choose_attention(model, config, self._layout)
        _check_mixers(model, config, self._layout)
        self._context = ContextParallel(config.context_parallel, model.config)
        where = config.cpu_offload, config.optimizer_offload
        self._optimizer = MasterOptimizer(model, optimizer, total_steps, *where) if optimizer else None
        how = config.activation_checkpointing
        self._checkpointed = checkpointed_layers(model, selective=how == "selective") if how else []
        self._compiled = _compiled_layers(model) if config.compile else nullcontext
        self._head = _head_of(model, temperature, self._layout.device, top)
        self._copies = HostCopies()
        self._tower = tower
        self._placeholder = model.config.image_token_id if is_picture_model(model.config) else None

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch], adapted: bool = True) -> list[Outputs[torch.Tensor]]:
        with self._layout.gathered(), self._compiled(), nullcontext() if adapted else adapters_off(self.model):
            passes = self._as_many_as_others(micro_batches)
            together = self._encode_together(passes)
            parts = self._local_parts(passes)
            outputs = [self._context.gather(part, self._head.forward(*self._inputs(part, together))) for part in parts]
        return outputs[: len(micro_batches)]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: TokenLoss[torch.Tensor]) -> PassResult:
        results: list[LossResult] = []
        with self._layout.gathered(), self._compiled(), checkpointing(self._checkpointed):
            passes = self._as_many_as_others(micro_batches)
            together = self._encode_together(passes)
            for number, part in enumerate(self._local_parts(passes), start=1):
                self._layout.starts(last=number == len(passes))
                results.append(self._context.backward(self._head, part, *self._inputs(part, together), loss))
        total = sum_parts(self._layout.of_all_ranks(sum_results(results)))
        return PassResult(*total, [result.outputs for result in results[: len(micro_batches)]])

    def optimizer_step(self) -> dict[str, float]:
        return self._trained.step()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return merged_weights(self.model, self._layout.full, changed=True)

    @contextmanager
    def shards(self) -> Iterator[list[Shard[torch.Tensor]]]:
        yield [self._shard(name, parameter) for name, parameter in published(self.model, changed=True)]

    def _shard(self, name: str, parameter: torch.Tensor) -> Shard[torch.Tensor]:
        region, dtype = self._layout.region(parameter), self._layout.served_dtype(parameter)
        adapter = Adapter.of(self.model, name, self._layout.full)

        def read() -> torch.Tensor:
            local = self._layout.local(parameter)
            return local if adapter is None else adapter.merged(local.to(dtype), region)

        short = str(dtype).removeprefix("torch.")
        return Shard(name.replace(".base_layer.", "."), tuple(parameter.shape), short, region, read)

    def offload(self) -> None:
        self._layout.offload()
        if self._tower is not None:
            self._tower.offload()
        if self._optimizer is not None:
            self._optimizer.move(torch.device("cpu"))
        if self._layout.device.type == "cuda":
            torch.cuda.synchronize(self._layout.device)  # until the copies are there

    def onload(self) -> None:
        self._layout.onload()
        if self._optimizer is not None:
            self._optimizer.move(self._layout.home)

    @torch.no_grad()
    def approach(self, other: "FsdpEngine", share: float) -> None:
        """Move by this share of the way to the weights of an engine of the same model on the same ranks, in float32;
        each may be in host memory or not."""
        theirs = dict(other.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            target: Any = theirs[name].detach()
            if isinstance(target, DTensor) and not isinstance(parameter, DTensor):  # of a tower that learns there
                target = target.to(self._layout.device)
                target = target.full_tensor()
            target = target.to(parameter.device, torch.float32)
            parameter.copy_(target if share == 1 else torch.lerp(parameter.float(), target, share))
        if self._tower is not None:
            self._tower.forget()

    def save(self, directory: Path) -> list[TensorFile]:
        if self._optimizer is None:
            return [self._save_frozen(directory / "state")]
        self._trained.check_finite()
        files = copy_model(self.model, self._layout, self._copies, directory / "model")
        files += copy_adapters(self.model, self._layout, self._copies, directory / "adapter")
        files.append(self._trained.save(directory / "state", self._copies))
        self._copies.wait()
        return files

    def _save_frozen(self, directory: Path) -> TensorFile:
        """The weights alone, of a model that does not learn but approaches another."""
        own = own_pieces(dict(self.model.named_parameters())).items()
        copied = {name: (self._copies.copy(name, tensor.detach()), piece) for name, (tensor, piece) in own}
        self._copies.wait()
        return shard_file(copied, directory)

    def load(self, directory: Path, new_schedule: bool = False) -> None:
        if self._optimizer is None:
            weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
            read_whole_state(weights, directory / "state")
            if self._tower is not None:
                self._tower.forget()
        else:
            self._trained.load(directory / "state", new_schedule)

    @property
    def _trained(self) -> MasterOptimizer:
        assert self._optimizer is not None, "this engine was made without an optimizer: it is frozen"
        return self._optimizer

    def _as_many_as_others(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With empty ones where the rank with the most of them has more."""
        most = self._layout.largest(len(micro_batches))
        return [*micro_batches, *[_EMPTY_MICRO_BATCH] * (most - len(micro_batches))]

    def _encode_together(self, passes: Sequence[MicroBatch]) -> bool:
        """Whether the tower runs in each of a pass, with pictures or without: it is in shards, and a rank has some."""
        if self._layout.ranks == 1 or self._tower is None or not self._tower.learns:
            return False
        return bool(self._layout.largest(int(any((one.token_ids < 0).any() for one in passes))))

    def _local_parts(self, passes: Sequence[MicroBatch]) -> Iterator[LocalMicroBatch]:
        """This rank's part of each, made when its turn has come: nothing of a part outlives its pass."""
        return (self._context.local_part(micro_batch, self._layout.device) for micro_batch in passes)

    def _inputs(self, part: LocalMicroBatch, together: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's: hidden states `[S, hidden]` and the tokens that they predict, `[S]`."""
        token_ids, options = self._seen(part, together)
        body: Any = self.model.base_model
        outputs = body(token_ids, attention_plan=part.plan, use_cache=False, return_dict=False, **options)
        return outputs[0][0].index_select(0, part.predicted_at), part.targets

    def _seen(self, part: LocalMicroBatch, together: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        """Token ids `[1, N]` of segments packed head to tail, their positions, and the pictures among them."""
        if self._placeholder is not None and (part.token_ids == self._placeholder).any():
            raise EngineError("rows have places for pictures, and no pictures there: their log-probs would be of none")
        if together or (part.token_ids < 0).any():
            if self._tower is None:
                raise EngineError("rows with pictures, but this engine was made without a directory of pictures")
            whole = part.whole
            places = self._tower.places(whole.token_ids, whole.offsets, whole.prefixes, whole.pictures)
            return self._tower.inputs(whole.token_ids, places, whole.pictures, together=together)
        token_ids = torch.from_numpy(part.token_ids)[None].to(part.plan.positions.device)
        return token_ids, {"position_ids": part.plan.positions[None]}


def make_engine(
    model: ModelConfig,
    training: FsdpTrainingConfig,
    optimizer: OptimizerConfig | None,
    *,
    total_steps: int = 1,
    temperature: float = 1.0,
    value_head: bool = False,
    scores_rows: bool = False,
    pictures: Path | None = None,
    processor: Path | None = None,
    top: TopTokens | None = None,
) -> TrainEngine:
    """The model of the configuration in an engine, sharded over the ranks of torch.distributed if there are several.

    `pictures`: the directory where those of the rows are stored, for a model that sees them; `processor`: the model
    directory whose image processor prepares them, default: that of this model. `top` as in FsdpEngine. `scores_rows` as
    in `add_adapters`, which a model that learns has where `model.lora` says so.
    """
    sharded, layout = dist.is_initialized() and dist.get_world_size() > 1, None
    loaded = load_empty(model, value_head) if sharded else load_model(model, value_head)
    loaded.requires_grad_(optimizer is not None)
    if is_picture_model(loaded.config) and training.context_parallel > 1:
        family = loaded.config.model_type
        raise UserError(f"training.context_parallel: not for a model that sees pictures ({family}) yet; leave it out")
    if is_picture_model(loaded.config) and model.vision_tower == "frozen":
        tower_of(loaded).requires_grad_(False)
    if model.lora and optimizer:
        add_adapters(loaded, model.lora, model.path, scores_rows)
    if sharded:
        _refuse_single_pictures(loaded)
        layout = Sharded(loaded, training)
        fill(loaded, model)
    tower = None
    if pictures is not None:
        device = layout.device if layout is not None else None
        tower = PictureTower(loaded, processor or model.path, PictureStore(pictures).read, device)
    return FsdpEngine(loaded, training, optimizer, total_steps, temperature, layout, tower, top)


def _refuse_single_pictures(model: PreTrainedModel) -> None:
    """Ranks that share a tower's weights encode together: each has the same number of calls."""
    if model.config.model_type in ENCODED_ALONE and is_picture_model(model.config) and not is_frozen(tower_of(model)):
        raise UserError(
            f"model.vision_tower: train: that of a {model.config.model_type} takes one picture at a time, and does not "
            "learn on several ranks yet; use frozen, or one rank"
        )


def _choose_attention(model: PreTrainedModel, config: FsdpTrainingConfig, layout: Whole) -> None:
    """EngineError where the kernel gives wrong numbers; of itself a later one is taken only where it does not."""
    choose_version(config.attention, layout.device)
    try:
        check_attention(model.config, layout.device, layout.dtype)
    except EngineError as error:
        if config.attention != "auto" or current_flash_attention_impl() is None:
            raise
        _LOG.warning("%s: fa2 it is", error)
        choose_version("fa2", layout.device)
        check_attention(model.config, layout.device, layout.dtype)


def _check_mixers(model: PreTrainedModel, config: FsdpTrainingConfig, layout: Whole) -> None:
    """UserError for what does not run with state mixers, EngineError where a kernel gives wrong numbers."""
    if not has_mixers(model):
        return
    carried = f"layers of a {model.config.model_type} carry a state from token to token"
    if config.context_parallel > 1:
        mend = "which ranks do not hand on to one another; leave it out"
        raise UserError(f"training.context_parallel: {carried}, {mend}")
    if config.compile:
        raise UserError(f"training.compile: {carried}, and are not compiled; leave it out")
    check_mixers(model, layout.device, layout.dtype)


def _compiled_layers(model: PreTrainedModel) -> Callable[[], AbstractContextManager[None]]:
    from tandem.training.compiling import CompiledLayers  # torch's compiler takes a second to import

    return CompiledLayers(model).passing


def _head_of(model: PreTrainedModel, temperature: float, device: torch.device, top: TopTokens | None) -> Head:
    if (values := value_layer(model)) is not None:
        return ValueHead(values.linear)
    layer: Any = model.get_output_embeddings()
    bend = Bend.of(model.config)
    if device.type != "cuda":
        return VocabularyHead(layer, temperature, bend=bend, top=top)
    tiled = TiledVocabularyHead(layer, temperature, bend, top=top)
    if layer.out_features > tiled.tile_vocabulary:
        return tiled
    # Rows are no wider than tiles: their logits are kept rather than made twice.
    return VocabularyHead(layer, temperature, tiled.tile_tokens * tiled.tile_vocabulary, bend, top)
