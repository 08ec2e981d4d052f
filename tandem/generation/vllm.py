"""vLLM as the engine of a replica, through `LLMEngine` in the replica's own process: steps and updates alternate.

The only file that imports vLLM; its tensor-parallel workers import it too, for what they do with weights.
"""

# pyright: reportMissingImports=false, reportCallIssue=false
# vLLM has an environment of its own, where the types are not checked

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import mm_input
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from tandem.config.data import ImagesConfig
from tandem.config.generation import VllmGenerationConfig
from tandem.config.model import ModelConfig
from tandem.models.sight import sight_of
from tandem.models.tower import load_image_processor
from tandem.pictures.layouts.patches import Patches
from tandem.pictures.store import PictureStore, Pixels
from tandem.pictures.vlm_config import PictureFormat, picture_format
from tandem.types import Completion, Delta, FloatArray, IntArray, Picture, PromptLogprobs, Request, Status, TopLogprobs
from tandem.weights.base import BucketHalf, Commit, Directory, Part
from tandem.weights.shared_memory import attach

_BACKEND = "tandem"
_ANY_SIZE = ImagesConfig()
_TILED = ("internvl", "smolvlm", "idefics3")
"""Families of whose pictures vLLM asks how many tiles each has."""
_STATUSES = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class VllmEngine:
    """vLLM as a SteppedEngine."""

    def __init__(
        self,
        model: ModelConfig,
        config: VllmGenerationConfig,
        pictures: Path | None = None,
        images: ImagesConfig = _ANY_SIZE,
        never_drawn: Sequence[int] = (),
    ) -> None:
        """`pictures`: where those of prompts are stored, for a model that sees them; `images`: how large they are.
        `never_drawn`: ids that no token of the tokenizer has."""
        seen = picture_format(model.path) if pictures else None
        options: dict[str, Any] = {
            "model": str(model.path),
            "dtype": model.dtype if config.quantization is None else "bfloat16",
            "quantization": config.quantization,
            "trust_remote_code": model.trust_remote_code,
            "tensor_parallel_size": config.tensor_parallel,
            "enable_sleep_mode": torch.cuda.is_available() and config.sleep != "never",
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": _BACKEND},
            "worker_extension_cls": f"{__name__}.WorkerExtension",
            "async_scheduling": False,  # a step that is under way would be counted to the next version
            "enforce_eager": not torch.cuda.is_available(),
            "enable_chunked_prefill": torch.cuda.is_available(),  # on a CPU a part of a prompt breaks seeded requests
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **(_picture_options(seen, images) if seen else {}),
            **({} if config.memory_share is None else {"gpu_memory_utilization": config.memory_share}),
            **config.engine_args,
        }
        self._engine = LLMEngine.from_engine_args(EngineArgs(**options))
        of_pictures = (seen.placeholder_id, seen.video_id) if seen else ()
        never = [*never_drawn, *(token for token in of_pictures if token is not None)]
        self._engine.collective_rpc("prepare", args=(never,))
        self._engine.collective_rpc("init_weight_transfer_engine", args=({},))
        self._pictures = _Pictures(self._engine, seen, PictureStore(pictures)) if seen and pictures else None
        self._updating = False
        self._internal: dict[int, str] = {}
        """vLLM's own names of the samples."""
        self._streamed: set[int] = set()
        self._version = -1
        self.max_tokens = int(self._engine.model_config.max_model_len)
        self.vocabulary = int(self._engine.model_config.get_vocab_size())
        self.max_running = int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    def add(self, number: int, request: Request, sample: int, streamed: bool) -> None:
        try:
            prompt = self._prompt(request)
            params = _params(request, sample, streamed)
            self._internal[number] = self._engine.add_request(f"{number}:{sample}", prompt, params)
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        if streamed:
            self._streamed.add(number)

    def step(self) -> list[tuple[int, Completion | Delta]]:
        return [self._read(output) for output in self._engine.step()]

    def abort(self, numbers: Sequence[int]) -> list[tuple[int, Completion | Delta]]:
        ended: list[tuple[int, Completion | Delta]] = []
        for number in numbers:
            name = self._internal.get(number, "")
            state = self._engine.output_processor.request_states.get(name)
            if state is not None:  # else it ended before the wish came
                output = state.make_request_output([], None, FinishReason.ABORT, None, None, None)
                self._engine.abort_request([name], internal=True)
                ended.append(self._read(output))
        return ended

    def load(self, part: Part) -> None:
        if self._engine.is_sleeping():
            self._engine.wake_up(tags=["weights"])
        if isinstance(part, Commit):
            if self._updating:
                self._engine.collective_rpc("finish_weight_update")
                self._updating = False
            self._engine.collective_rpc("pack_output_layer")
            self._engine.reset_prefix_cache(reset_running_requests=True)
            if self._pictures:
                self._engine.reset_encoder_cache()  # of what the tower made of pictures by the weights before
            self._engine.set_weight_version(str(part.version))
            self._version = part.version
        elif isinstance(part, Directory):
            self._engine.collective_rpc("unpack_experts")
            directory = self._engine.model_config.model
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(part.path)})
            self._engine.model_config.model = directory  # where the image processor is, and not among weights
        else:
            if not self._updating:
                self._engine.collective_rpc("unpack_experts")
                self._engine.collective_rpc("start_weight_update")
                self._updating = True
            self._engine.collective_rpc("update_weights", args=({"bucket": part},))

    def sleep(self, weights: bool) -> None:
        if self._engine.vllm_config.model_config.enable_sleep_mode:
            self._engine.sleep(level=2 if weights else 1)

    def wake(self) -> None:
        if self._engine.is_sleeping():
            self._engine.wake_up()

    def _prompt(self, request: Request) -> Any:
        if not request.pictures:
            return {"prompt_token_ids": request.token_ids.tolist()}
        assert self._pictures is not None, "limits are checked before"
        return self._pictures.prompt(request)

    def _read(self, output: Any) -> tuple[int, Completion | Delta]:
        """One output of vLLM: the whole of a sample that ended, or what a streamed one has gained in this step."""
        number, sample = map(int, output.request_id.split(":"))
        made = output.outputs[0]
        status = _STATUSES[made.finish_reason] if output.finished else None
        if output.finished:
            del self._internal[number]
        token_ids = np.array(made.token_ids, dtype=np.int32)
        logprobs, top = _logprobs(made.logprobs, len(token_ids))
        prompt = PromptLogprobs(*_logprobs(output.prompt_logprobs)) if output.prompt_logprobs else None
        if number in self._streamed:
            versions = np.full(len(token_ids), self._version, dtype=np.int32)  # a step is by one version
            if output.finished:
                self._streamed.remove(number)
            return number, Delta(sample, token_ids, logprobs, versions, status, top, prompt)
        versions = np.full(len(token_ids), -1, dtype=np.int32)  # which no replica's answer may hold
        for span in made.weight_versions or ():
            versions[span.start : span.end] = int(span.version)
        assert status is not None, "vLLM gives an output before the end to streamed samples alone"
        return number, Completion(sample, token_ids, logprobs, versions, status, None, top, prompt)


class _Pictures:
    """Prompts with pictures as vLLM's own processor would hand them on. They are made here of what the trainer's tower
    takes, so that no picture is resized or cut, and no token counted, by another rule."""

    def __init__(self, engine: LLMEngine, described: PictureFormat, store: PictureStore) -> None:
        self._format, self._store = described, store
        self._processor = load_image_processor(Path(engine.model_config.model))
        self._kind: str = engine.model_config.hf_config.model_type
        self._sight = sight_of(engine.model_config.hf_config)
        self._theirs: Any = engine.renderer.get_mm_processor()
        self._last: tuple[Request, Any] | None = None
        """The last request, and what was made of it: siblings come one after the other."""

    def prompt(self, request: Request) -> Any:
        """Raises UserError and ValueError where a stored picture is not the one that the request counts on."""
        if any(picture.step for picture in request.pictures):
            raise ValueError("vLLM is shown no videos yet; take generation.type=native")
        if self._last is None or self._last[0] is not request:
            ids, keys = request.token_ids, [picture.key for picture in request.pictures]
            items = [self._item(picture) for picture in request.pictures]
            ranges = [self._range(ids, picture) for picture in request.pictures]
            made = mm_input(ids.tolist(), MultiModalKwargsItems({"image": items}), {"image": keys}, {"image": ranges})
            self._last = request, made
        return self._last[1]

    def _range(self, token_ids: IntArray, picture: Picture) -> PlaceholderRange:
        """From the first token with a feature to the last; what stands between rows or tiles is text."""
        taking = token_ids[picture.place :] == self._format.placeholder_id
        count = picture.grid[0] * picture.grid[1]
        length = int(np.flatnonzero(taking)[count - 1]) + 1
        return PlaceholderRange(picture.place, length, None if length == count else torch.from_numpy(taking[:length]))

    def _item(self, picture: Picture) -> Any:
        """The arguments of vLLM's model for one picture."""
        numbers = self._sight.pixels(self._processor, self._pixels(picture))
        arguments = self._tiles(numbers) if self._kind in _TILED else self._sight.arguments([numbers])
        fields = self._theirs._get_mm_fields_config(arguments, {})
        (item,) = MultiModalKwargsItems.from_hf_inputs(arguments, fields)["image"]
        return item

    def _tiles(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        """`numbers`: `[tiles, 3, side, side]`."""
        count, shown = torch.tensor([len(numbers)]), torch.ones_like(numbers[:, 0], dtype=torch.bool)
        if self._kind == "internvl":
            placeholder = torch.tensor(self._format.placeholder_id)
            return {"pixel_values": numbers, "image_num_patches": count, "image_token_id": placeholder}
        return {"pixel_values": numbers, "num_patches": count, "pixel_attention_mask": shown}

    def _pixels(self, picture: Picture) -> Pixels:
        """As they are stored. ValueError where they have another size than the picture's tokens say."""
        pixels = self._store.read(picture.key)
        grid = self._format.layout.shape(*pixels.shape[:2]).grid
        if grid != picture.grid:
            told = f"is stored with {grid[0]} x {grid[1]} tokens, and asked for with {picture.grid[0]} x"
            raise ValueError(f"picture {picture.key} {told} {picture.grid[1]}")
        return pixels


def _picture_options(seen: PictureFormat, images: ImagesConfig) -> dict[str, Any]:
    """Of EngineArgs. What vLLM keeps of pictures must have room for the largest one, and need not for larger ones."""
    layout = seen.layout.limited(images.min_pixels, images.max_pixels)
    options: dict[str, Any] = {
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_cache_gb": 0,  # a prompt's pictures are read once for all its samples, and not again for long
        "mm_device_do_normalize": False,  # they come normalised, by the image processor of the trainer
    }
    if images.max_pixels is None or not isinstance(layout, Patches):
        return options
    largest = layout.max_pixels * (2 if layout.at_least_a_token else 1)  # GLM-4V counts a picture as two frames
    return options | {"mm_processor_kwargs": {"max_pixels": largest}}


def _logprobs(flat: Any, count: int | None = None) -> tuple[FloatArray, TopLogprobs | None]:
    """Log-probs of the tokens at the first `count` positions that have any, and the most probable tokens there.

    vLLM has them flat: at each position the token, then the most probable ones. A prompt's first token has none.
    """
    ends = [end for start, end in zip(flat.start_indices, flat.end_indices, strict=True) if end > start][:count]
    if not ends:
        return np.zeros(0, dtype=np.float32), None
    values = np.array(flat.logprobs[: ends[-1]], dtype=np.float32).reshape(len(ends), -1)
    if values.shape[1] == 1:
        return values[:, 0], None
    ids = np.array(flat.token_ids[: ends[-1]], dtype=np.int32).reshape(len(ends), -1)
    return values[:, 0], TopLogprobs(ids[:, 1:], values[:, 1:])


def _params(request: Request, sample: int, streamed: bool) -> Any:
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop_strings),
        skip_special_tokens=False,  # a stop string may be the text of one
        ignore_eos=True,
        seed=request.seed(sample),
        logprobs=request.top_logprobs,
        prompt_logprobs=request.top_logprobs if request.prompt_logprobs else None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )


class WorkerExtension:
    """What each of vLLM's workers does for Tandem; a mixin of their class."""

    model_runner: Any

    def prepare(self, never_drawn: Sequence[int]) -> None:
        """Make log-probs those after temperature but before top-k and top-p, by which vLLM would renormalise them.

        Tokens of `never_drawn` have a share in them all the same.
        """
        sampler = self.model_runner.sampler
        sampler.topk_topp_sampler = _WholeVocabulary(sampler.topk_topp_sampler, never_drawn)
        if never_drawn:
            greedy = sampler.greedy_sample
            sampler.greedy_sample = lambda logits: greedy(_without(logits.clone(), never_drawn))

    def unpack_experts(self) -> None:
        """On a CPU a mixture of experts multiplies with packed weights, which vLLM packs for its first kernel only."""
        if current_platform.is_cpu():
            for layer in self.model_runner.get_model().modules():
                if isinstance(layer, RoutedExperts):
                    layer.quant_method.moe_kernel = None

    def pack_output_layer(self) -> None:
        """On a CPU the output layer multiplies with a packed copy, which a reload leaves old where its weight is the
        embedding's."""
        if current_platform.is_cpu():
            for layer in self.model_runner.get_model().modules():
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)


class _WholeVocabulary(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, never_drawn: Sequence[int]) -> None:
        super().__init__()
        self._inner = inner
        self._never_drawn = never_drawn

    def forward(self, logits: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        return self._inner(_without(logits, self._never_drawn), *others)[0], logprobs


def _without(logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """In place: tokens that cannot be drawn."""
    if token_ids:
        logits[:, list(token_ids)] = -torch.inf
    return logits


@dataclass
class _Init(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class _Update(WeightTransferUpdateInfo):
    bucket: BucketHalf


class _Receiver(WeightTransferEngine[_Init, _Update]):
    """vLLM's interface for weights in Hugging Face names: it cuts, fuses and packs them as its layers want."""

    init_info_cls = _Init
    update_info_cls = _Update

    def init_transfer_engine(self, init_info: _Init) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: _Update) -> None:
        # vLLM keeps what it is given until a layer is complete, longer than the bucket lives
        self.model.load_weights((self._named(name), tensor.clone()) for name, tensor in attach(update_info.bucket))

    def _named(self, name: str) -> str:
        """As vLLM reads it: LLaVA's towers have one more name in published directories than in transformers 5."""
        tower: Any = getattr(self.model, "vision_tower", None)
        if hasattr(tower, "vision_model") and ".vision_tower.vision_model." not in name:
            return name.replace(".vision_tower.", ".vision_tower.vision_model.")
        return name

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


WeightTransferEngineFactory.register_engine(_BACKEND, _Receiver)
