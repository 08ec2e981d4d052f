"""Hugging Face directory -> this rank's part of the model -> Hugging Face names and tensors, through the bridge."""

# pyright: reportMissingImports=false

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from mbridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import is_te_min_version
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.config.model import ModelConfig
from tandem.config.rules.ranks import BRIDGED_ROPES
from tandem.config.training import MegatronTrainingConfig
from tandem.errors import UserError
from tandem.models.storage import read_safetensors
from tandem.regions import Shard
from tandem.training.megatron.layers import FUSED, LOCAL, layer_specs
from tandem.training.megatron.routers import tell_routers
from tandem.training.megatron.shards import shards_of

VALUE_HEAD = {"score.weight": "weight", "score.bias": "bias"}
"""Hugging Face names of the parameters of a critic's output layer."""


class Stage(GPTModel):
    """A pipeline stage; the last one ends with hidden states of all tokens, `[tokens, 1, hidden]`."""

    def __init__(self, *args: Any, values: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tell_routers(self)
        if not self.post_process:
            return
        if values:
            self.output_layer = nn.Linear(
                self.config.hidden_size, 1, device=torch.cuda.current_device(), dtype=self.config.params_dtype
            )
        else:
            vars(self.output_layer)["sequence_parallel"] = False  # it sees the predicted tokens only, on every rank
            self.output_layer.allreduce_dgrad = self.pg_collection.tp.size() > 1

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.post_process and self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states

    def logits(self, hidden_C: Tensor, vocabulary: int) -> tuple[Tensor, int]:
        """This rank's part of the logits, without padding, and the token id that it begins with."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits_CV = self.output_layer(hidden_C[:, None], weight=weight)[0][:, 0]
        first = self.pg_collection.tp.rank() * logits_CV.shape[1]
        return logits_CV[:, : max(vocabulary - first, 0)], first


class Bridged:
    """A model directory's family, and its parameters by Hugging Face names; every rank of the model calls along."""

    def __init__(self, model: ModelConfig, training: MegatronTrainingConfig, value_head: bool) -> None:
        self.path = model.path
        self.value_head = value_head
        self.hf_config = transformers.AutoConfig.from_pretrained(
            self.path,
            local_files_only=True,
            trust_remote_code=model.trust_remote_code,
            dtype=model.dtype,
            **({"num_labels": 1} if value_head else {}),
        )
        self._tied = self.hf_config.tie_word_embeddings and not value_head
        self._bridge: Any = AutoBridge.from_config(
            _with_rope_theta(deepcopy(self.hf_config)),
            dtype=getattr(torch, model.dtype),
            make_vocab_size_divisible_by=training.tensor_parallel,
        )
        embedding, output = "model.embed_tokens.weight", "lm_head.weight"
        # the bridge marks tied embeddings in a table that all models of its class share
        self._bridge._DIRECT_MAPPING = {
            **self._bridge._DIRECT_MAPPING,
            "output_layer.weight": embedding if self._tied else output,
        }
        normalised = getattr(self.hf_config, "norm_topk_prob", True)
        self._frequencies, scaled = _scaled_rotary(self.hf_config)
        self._bridge.set_extra_args(**_options(training), **scaled, moe_router_pre_softmax=not normalised)

    @property
    def config(self) -> Any:
        """Megatron-Core's TransformerConfig."""
        return self._bridge.config

    def build(self, virtual_stages: int) -> list[Stage]:
        """This rank's stages, with random weights."""
        stages: list[int | None] = [None] if virtual_stages == 1 else list(range(virtual_stages))
        return [self._stage(stage) for stage in stages]

    def _stage(self, stage: int | None) -> Stage:
        where = {"ignore_virtual": stage is None, "vp_stage": stage}
        bridge, shape = self._bridge, self._bridge._get_gptmodel_args()
        bridge.vocab_size, parts = shape["vocab_size"], bridge.make_vocab_size_divisible_by
        bridge.padded_vocab_size = shape["vocab_size"] = -(-bridge.vocab_size // parts) * parts
        made = Stage(
            config=self.config,
            transformer_layer_spec=layer_specs(self.config, stage),
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=self._tied,
            vp_stage=stage,
            values=self.value_head,
            **shape,
        )
        if self._frequencies is not None:
            made.rotary_pos_emb.inv_freq = self._frequencies.to(made.rotary_pos_emb.inv_freq)
        return made

    @torch.no_grad()
    def load(self, stages: Sequence[Stage], directory: Path) -> None:
        """Fill the stages from a model directory; a critic's head that it lacks becomes zero."""
        self._bridge.load_weights([_View(stage) for stage in stages], str(directory))
        if self.value_head and stages[-1].post_process:
            head = stages[-1].output_layer
            tensors = {name: head.get_parameter(ours) for name, ours in VALUE_HEAD.items()}
            for name in read_safetensors({name: tensor.data for name, tensor in tensors.items()}, directory):
                tensors[name].zero_()

    @torch.no_grad()
    def export(self, stages: Sequence[Stage]) -> Iterator[tuple[str, Tensor]]:
        """Each parameter once, whole; one is gathered at a time."""
        seen: set[str] = set()
        for name, tensor in self._bridge.export_weights([_View(stage) for stage in stages]):
            if name not in seen:  # of tied embeddings the last stage has a copy
                seen.add(name)
                yield name, tensor
        if self.value_head:
            yield from self._value_head(stages[-1])

    def shards(self, stages: Sequence[Stage]) -> list[Shard[Tensor]]:
        """What this rank holds of the parameters of a policy, each once."""
        found = (shard for stage in stages for shard in shards_of(self._bridge, _View(stage)))
        return list({shard.name: shard for shard in found}.values())

    def save_config(self, directory: Path) -> None:
        """What a Hugging Face directory has besides the weights."""
        if self.value_head:
            mapping: Any = transformers.AutoModelForTokenClassification._model_mapping
            self.hf_config.architectures = [mapping[type(self.hf_config)].__name__]
        self.hf_config.save_pretrained(directory)
        if (drawing := self.path / "generation_config.json").is_file():
            copyfile(drawing, directory / drawing.name)

    def _value_head(self, stage: Stage) -> Iterator[tuple[str, Tensor]]:
        group = parallel_state.get_pipeline_model_parallel_group()
        shapes = {"score.weight": (1, self.config.hidden_size), "score.bias": (1,)}
        for name, ours in VALUE_HEAD.items():
            tensor = torch.empty(shapes[name], dtype=self.config.params_dtype, device=torch.cuda.current_device())
            if stage.post_process:
                tensor.copy_(stage.output_layer.get_parameter(ours))
            dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
            yield name, tensor


class _View:
    """A stage as the bridge expects it: with the parameter names of TransformerEngine's modules."""

    def __init__(self, stage: Stage) -> None:
        self.decoder = stage.decoder
        tensors = stage.state_dict(keep_vars=True)
        critic = stage.post_process and isinstance(stage.output_layer, nn.Linear)
        experts = {".".join(name.split(".")[:3]) for name in tensors if ".mlp.router." in name}
        self._tensors = {
            _fused_name(name, experts): tensor
            for name, tensor in tensors.items()
            if "_extra_state" not in name and not (critic and name.startswith("output_layer."))
        }

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self._tensors.items() if isinstance(tensor, nn.Parameter))

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors


def _fused_name(name: str, experts: set[str]) -> str:
    """What TransformerEngine's modules call the parameter that local ones call `name`."""
    if FUSED:
        return name
    layer = ".".join(name.split(".")[:3])
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if layer not in experts:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"\.local_experts\.(\d+)\.(\w+)\.weight", r".\2.weight\1", name)


def _with_rope_theta(hf_config: Any) -> Any:
    """The configuration with the rotary base where transformers 4 had it, and where the bridge looks for it. How it is
    scaled is kept from the bridge, which takes every kind for the linear one."""
    hf_config.rope_theta, hf_config.rope_scaling = hf_config.rope_parameters["rope_theta"], None
    return hf_config


def _scaled_rotary(hf_config: Any) -> tuple[Tensor | None, dict[str, Any]]:
    """The frequencies as transformers scales them, `[head_dim / 2]`, None where it does not; and what scales attention
    with them, as YaRN does: queries and keys by a factor each, so here their product by its square."""
    kind = hf_config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        return None, {}
    if kind not in BRIDGED_ROPES:
        raise UserError(f"model.path: Megatron has no RoPE of type {kind}; use training.type: fsdp")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    if FUSED and factor != 1 and not is_te_min_version("1.10.0"):
        raise UserError(f"model.path: RoPE of type {kind} needs TransformerEngine 1.10 or newer; install that")
    head = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return frequencies, {} if factor == 1 else {"softmax_scale": factor**2 * head**-0.5}


def _options(training: MegatronTrainingConfig) -> dict[str, Any]:
    """Fields of TransformerConfig beyond what the family says."""
    options: dict[str, Any] = {} if FUSED else {**LOCAL}
    options |= {
        "sequence_parallel": training.sequence_parallel,
        "variable_seq_lengths": True,
        "moe_router_fusion": False,
        "calculate_per_token_loss": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if training.activation_checkpointing:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return options
