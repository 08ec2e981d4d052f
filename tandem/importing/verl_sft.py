"""What verl's programs for supervised fine-tuning were told -> a configuration of `tandem sft`.

Facts about their keys and defaults are from verl's published configuration files: of the first program, whose model is
`model.partial_pretrain`, and of those with an engine (`model.path`, `engine.…`).
"""

from typing import Any

from tandem.config.counterparts import (
    Key,
    Table,
    if_true,
    int_or_zero,
    list_of,
    listed,
    nonzero,
    positive,
    precision,
    together,
    under,
)
from tandem.config.verl_keys import TRAINER
from tandem.importing.outcome import ForeignConfig, Imported, Keys, sort_the_rest
from tandem.importing.verl_tables import SFT_HARMLESS, SFT_WITHOUT_EFFECT
from tandem.importing.verl_trainer import tracked, trainer_of

_FSDP, _MEGATRON = ("training.type", "fsdp"), ("training.type", "megatron")


def table(engine: bool) -> Table:
    """The keys of its programs; the older ones and those with an engine have other defaults."""
    return {
        "model.path": Key("model.path", "MODEL_DIRECTORY", older=("model.partial_pretrain",)),
        "engine.dtype": Key("model.dtype", "bf16", precision, older=("model.fsdp_config.model_dtype",)),
        "model.trust_remote_code": Key("model.trust_remote_code", convert=if_true(True)),
        **under("model.", "model.lora.", {
            "lora_rank": Key("rank", convert=nonzero, older=("lora.rank",)),
            "lora_alpha": Key("alpha", 16, older=("lora.alpha",), when=("rank",)),
            "target_modules": Key("target_modules", "all-linear", when=("rank",)),
        }),
        **under("data.", "data.", {
            "train_files": Key("train_files", "TRAIN.parquet", listed),
            "val_files": Key("val_files", [], listed),
            "train_batch_size": Key("rows_per_step", 256),
            "max_length": Key("max_tokens", 1024),
            "truncation": "on_bad_row",
            "train_max_samples": "train_files",
        }),
        **together("rows of `messages`", "data.multiturn.enable", "data.messages_key", "data.multiturn.messages_key"),
        **together("`tools` of rows", "data.tools_key", "data.multiturn.tools_key"),
        **together(
            "the columns `prompt` and `completion`", "data.prompt_key", "data.response_key", "data.prompt_dict_keys",
            "data.response_dict_keys",
        ),
        "data.chat_template": "model.chat_template.file",
        "data.apply_chat_template_kwargs": "model.chat_template.arguments",
        "data.custom_cls.path": "a file of rows: tandem data columns makes one",
        "data.enable_thinking_key": "model.chat_template.arguments, which are the same for all rows",
        **together("training.type", "engine", "engine.strategy", "model_engine"),
        "model.enable_gradient_checkpointing": Key("training.activation_checkpointing", engine, if_true(True)),
        **under("engine.", "training.", {
            "tensor_model_parallel_size": Key("tensor_parallel", unless=1),
            "pipeline_model_parallel_size": Key("pipeline_parallel", unless=1),
            "expert_model_parallel_size": Key("expert_parallel", unless=1),
            "context_parallel_size": Key("context_parallel", unless=1),
        }, _MEGATRON),
        "engine.ulysses_sequence_parallel_size": Key(
            "training.context_parallel", unless=1, when=_FSDP, older=("ulysses_sequence_parallel_size",)
        ),
        **together("training.cpu_offload", "model.fsdp_config.cpu_offload", "engine.param_offload"),
        "engine.optimizer_offload": "training.optimizer_offload",
        **dict.fromkeys((
            "data.micro_batch_size_per_gpu", "data.micro_batch_size", "data.max_token_len_per_gpu",
            "data.use_dynamic_bsz",
        ), "training.tokens_per_micro_batch"),
        **under("optim.", "training.optimizer.", {
            "lr": Key("lr", 1e-3 if engine else 1e-5),
            "betas": Key("betas", [0.9, 0.999] if engine else [0.9, 0.95], list_of),
            "weight_decay": Key("weight_decay", 0.01),
            "clip_grad": Key("max_grad_norm", unless=1.0),
            **together("schedule", "lr_scheduler", "lr_scheduler_type"),
            "min_lr_ratio": "min_lr_ratio",
            "lr_warmup_steps": Key("warmup_steps", convert=positive),
            **together("warmup_steps", "warmup_steps_ratio", "lr_warmup_steps_ratio"),
        }),
        **TRAINER,
        **together(
            "cluster.ranks", "torchrun.nproc_per_node", "torchrun.nnodes", "trainer.nnodes", "trainer.n_gpus_per_node",
        ),
    }  # fmt: skip


def supervised(source: ForeignConfig) -> Imported:
    """The configuration of ours, with what became of every key."""
    engine = any(key.startswith("engine.") or key in ("model.path", "engine", "model_engine") for key in source.values)
    keys, made = Keys(source.values, table(engine)), Imported({}, notes=list(source.notes))
    tree = made.tree
    kinds = [keys.take(key) for key in ("engine", "engine.strategy", "model_engine")]
    tree["training"] = {"type": "megatron" if "megatron" in kinds else "fsdp"}
    keys.take_rows(made)
    _data(keys, tree["data"], made)
    _training(keys, tree, engine, made)
    _schedule(keys, engine, made)
    tree |= _processes(keys)
    tree["trainer"] = trainer_of(keys, epochs=4) | tree.get("trainer", {})
    tree |= tracked(keys)
    sort_the_rest(keys, made, SFT_WITHOUT_EFFECT, SFT_HARMLESS)
    return made


def _data(keys: Keys, data: dict[str, Any], made: Imported) -> None:
    if keys.take("data.truncation", "error") != "error":
        data["on_bad_row"] = "skip"
        made.notes.append(f"a row of more than {data['max_tokens']} tokens is skipped here; verl cuts it")
    keys.take("data.multiturn.enable")
    named = {
        "messages": keys.take("data.multiturn.messages_key", keys.take("data.messages_key", "messages")),
        "tools": keys.take("data.multiturn.tools_key", keys.take("data.tools_key")),
        "prompt": _inner(keys, "prompt"),
        "completion": _inner(keys, "response"),
    }
    renamed = {ours: theirs for ours, theirs in named.items() if theirs and theirs != ours}
    if renamed:
        told = ", ".join(f"{ours} is its {theirs}" for ours, theirs in renamed.items())
        made.notes.append(f"columns: write files in which {told}, with `tandem data columns`, and name them here")
    if (most := keys.take("data.train_max_samples")) and most != -1:
        made.notes.append(f"data.train_max_samples={most}: rows are not cut off here; write as many as there should be")


def _inner(keys: Keys, column: str) -> str | None:
    """`extra_info.question`: where a prompt or an answer stands in a row; None: nothing is said of it."""
    outer, inner = keys.take(f"data.{column}_key"), keys.take(f"data.{column}_dict_keys")
    first = listed(inner)[0] if inner else None
    return ".".join(str(part) for part in (outer, first) if part) or None


def _training(keys: Keys, tree: dict[str, Any], engine: bool, made: Imported) -> None:
    training, longest = tree["training"], int_or_zero(tree["data"]["max_tokens"])
    if training["type"] == "fsdp":
        if True in [keys.take(key) for key in ("model.fsdp_config.cpu_offload", "engine.param_offload")]:
            training["cpu_offload"] = True
        elif keys.take("engine.optimizer_offload") is True:
            training["optimizer_offload"] = True
    rows = keys.take("data.micro_batch_size", keys.take("data.micro_batch_size_per_gpu", 4))
    tokens = keys.take("data.max_token_len_per_gpu", 8192 if engine else None)
    if keys.take("data.use_dynamic_bsz", engine) and int_or_zero(tokens):
        training["tokens_per_micro_batch"] = tokens * (int_or_zero(training.get("context_parallel")) or 1)
    elif int_or_zero(rows) and longest:
        training["tokens_per_micro_batch"] = max(rows * longest, 4096)
        made.notes.append(f"{rows} rows a micro-batch of {longest} tokens at most are {rows * longest} tokens")


def _schedule(keys: Keys, engine: bool, made: Imported) -> None:
    optimizer = made.tree["training"]["optimizer"]
    told = keys.take("optim.lr_scheduler", "constant" if engine else "cosine")
    style = keys.take("optim.lr_scheduler_type", told)
    if style == "cosine":
        optimizer["schedule"] = "cosine"
        if (least := keys.take("optim.min_lr_ratio")) is not None:
            optimizer["min_lr_ratio"] = least
    elif style != "constant":
        made.notes.append(f"optim.lr_scheduler={style}: constant stands there; give training.optimizer.schedule")
    ratio = keys.take("optim.warmup_steps_ratio", 0.0 if engine else 0.1)
    ratio = keys.take("optim.lr_warmup_steps_ratio", ratio)
    if ratio and "warmup_steps" not in optimizer:
        made.notes.append(
            f"the first {ratio:.0%} of verl's steps warm up: give training.optimizer.warmup_steps, a number of steps"
        )


def _processes(keys: Keys) -> dict[str, Any]:
    nodes = keys.take("torchrun.nnodes", keys.take("trainer.nnodes", 1))
    each = keys.take("torchrun.nproc_per_node", keys.take("trainer.n_gpus_per_node", 1))
    if int_or_zero(nodes) > 1:
        return {"cluster": {"type": "ray", "ranks": nodes * (int_or_zero(each) or 8)}}
    return {"cluster": {"type": "local", "ranks": each}} if int_or_zero(each) > 1 else {}
