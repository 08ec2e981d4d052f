"""What verl's programs for supervised fine-tuning were told -> a configuration of `tandem sft`.

Facts about their keys and defaults are from verl's published configuration files: of the first program, whose model is
`model.partial_pretrain`, and of those with an engine (`model.path`, `engine.…`).
"""

from typing import Any

from tandem.importing.outcome import Imported, Keys, listed, put, sort_the_rest, whole
from tandem.importing.verl_tables import OF_SFT, SFT_HARMLESS, SFT_WITHOUT_EFFECT
from tandem.importing.verl_trainer import list_of, tracked, trainer_of


def supervised(keys: Keys, made: Imported) -> Imported:
    """The configuration of ours, with what became of every key."""
    tree = made.tree
    engine = any(key.startswith("engine.") or key in ("model.path", "engine", "model_engine") for key in keys.values)
    tree["model"] = _model(keys)
    tree["data"] = _data(keys, made)
    tree["training"] = _training(keys, whole(tree["data"]["max_tokens"]), engine, made)
    nodes, each = keys.take("trainer.nnodes", "cluster", 1), keys.take("trainer.n_gpus_per_node", "cluster.ranks", 1)
    each = keys.take("torchrun.nproc_per_node", "cluster.ranks", each)
    nodes = keys.take("torchrun.nnodes", "cluster", nodes)
    if whole(nodes) > 1:
        tree["cluster"] = {"type": "ray", "ranks": nodes * (whole(each) or 8)}
    elif whole(each) > 1:
        tree["cluster"] = {"type": "local", "ranks": each}
    tree["trainer"] = trainer_of(keys, epochs=4)
    tree |= tracked(keys)
    sort_the_rest(keys, made, SFT_WITHOUT_EFFECT, SFT_HARMLESS, OF_SFT)
    return made


def _model(keys: Keys) -> dict[str, Any]:
    path = keys.take("model.partial_pretrain", "model.path", "MODEL_DIRECTORY")
    model: dict[str, Any] = {"path": keys.take("model.path", "model.path", path), "dtype": "bfloat16"}
    half = keys.take("engine.dtype", "model.dtype", keys.take("model.fsdp_config.model_dtype", "model.dtype", "bf16"))
    if half in ("fp32", "float32"):
        model["dtype"] = "float32"
    if keys.take("model.trust_remote_code", "model.trust_remote_code"):
        model["trust_remote_code"] = True
    if rank := keys.take("model.lora_rank", "model.lora.rank", keys.take("model.lora.rank", "model.lora.rank")):
        alpha = keys.take("model.lora_alpha", "model.lora.alpha", keys.take("model.lora.alpha", "model.lora.alpha", 16))
        target = keys.take("model.target_modules", "model.lora.target_modules", "all-linear")
        model["lora"] = {"rank": rank, "alpha": alpha, "target_modules": target}
    return model


def _data(keys: Keys, made: Imported) -> dict[str, Any]:
    data: dict[str, Any] = {
        "train_files": listed(keys.take("data.train_files", "data.train_files", "TRAIN.parquet")),
        "val_files": listed(keys.take("data.val_files", "data.val_files", [])),
        "rows_per_step": keys.take("data.train_batch_size", "data.rows_per_step", 256),
        "max_tokens": keys.take("data.max_length", "data.max_tokens", 1024),
    }
    if keys.take("data.truncation", "data.on_bad_row", "error") != "error":
        data["on_bad_row"] = "skip"
        made.notes.append(f"a row of more than {data['max_tokens']} tokens is skipped here; verl cuts it")
    keys.take("data.multiturn.enable", "rows of `messages`")
    messages = keys.take("data.messages_key", "rows of `messages`", "messages")
    messages = keys.take("data.multiturn.messages_key", "rows of `messages`", messages)
    named = {
        "messages": messages,
        "tools": keys.take(
            "data.multiturn.tools_key", "`tools` of rows", keys.take("data.tools_key", "`tools` of rows")
        ),
        "prompt": _inner(keys, "prompt"),
        "completion": _inner(keys, "response"),
    }
    renamed = {ours: theirs for ours, theirs in named.items() if theirs and theirs != ours}
    if renamed:
        told = ", ".join(f"{ours} is its {theirs}" for ours, theirs in renamed.items())
        made.notes.append(f"columns: write files in which {told}, with `tandem data columns`, and name them here")
    if (most := keys.take("data.train_max_samples", "data.train_files")) and most != -1:
        made.notes.append(f"data.train_max_samples={most}: rows are not cut off here; write as many as there should be")
    return data


def _inner(keys: Keys, column: str) -> str | None:
    """`extra_info.question`: where a prompt or an answer stands in a row; None: nothing is said of it."""
    outer = keys.take(f"data.{column}_key", "the columns `prompt` and `completion`")
    inner = keys.take(f"data.{column}_dict_keys", "the columns `prompt` and `completion`")
    first = listed(inner)[0] if inner else None
    return ".".join(str(part) for part in (outer, first) if part) or None


def _training(keys: Keys, longest: int, engine: bool, made: Imported) -> dict[str, Any]:
    megatron = "megatron" in (keys.take("engine", "training.type"), keys.take("engine.strategy", "training.type"),
                              keys.take("model_engine", "training.type"))  # fmt: skip
    training: dict[str, Any] = {"type": "megatron" if megatron else "fsdp"}
    recomputed = keys.take("model.enable_gradient_checkpointing", "training.activation_checkpointing", engine)
    if recomputed:
        training["activation_checkpointing"] = True
    if megatron:
        for name in ("tensor", "pipeline", "expert"):
            ours = f"{name}_parallel"
            their = f"engine.{name}_model_parallel_size"
            put(training, ours, keys.take(their, f"training.{ours}", 1), default=1)
        put(training, "context_parallel", keys.take("engine.context_parallel_size", "training.context_parallel", 1), 1)
    else:
        context = keys.take("ulysses_sequence_parallel_size", "training.context_parallel", 1)
        context = keys.take("engine.ulysses_sequence_parallel_size", "training.context_parallel", context)
        put(training, "context_parallel", context, default=1)
        offloads = [keys.take(key, "training.cpu_offload") for key in ("model.fsdp_config.cpu_offload",
                    "engine.param_offload")]  # fmt: skip
        if True in offloads:
            training["cpu_offload"] = True
        elif keys.take("engine.optimizer_offload", "training.optimizer_offload") is True:
            training["optimizer_offload"] = True
    rows = keys.take("data.micro_batch_size_per_gpu", "training.tokens_per_micro_batch", 4)
    rows = keys.take("data.micro_batch_size", "training.tokens_per_micro_batch", rows)
    tokens = keys.take("data.max_token_len_per_gpu", "training.tokens_per_micro_batch", 8192 if engine else None)
    dynamic = keys.take("data.use_dynamic_bsz", "training.tokens_per_micro_batch", engine)
    if dynamic and whole(tokens):
        training["tokens_per_micro_batch"] = tokens * (whole(training.get("context_parallel")) or 1)
    elif whole(rows) and longest:
        training["tokens_per_micro_batch"] = max(rows * longest, 4096)
        made.notes.append(f"{rows} rows a micro-batch of {longest} tokens at most are {rows * longest} tokens")
    training["optimizer"] = _optimizer(keys, engine, made)
    return training


def _optimizer(keys: Keys, engine: bool, made: Imported) -> dict[str, Any]:
    optimizer: dict[str, Any] = {
        "lr": keys.take("optim.lr", "training.optimizer.lr", 1e-5 if not engine else 1e-3),
        "betas": list_of(keys.take("optim.betas", "training.optimizer.betas", [0.9, 0.999] if engine else [0.9, 0.95])),
        "weight_decay": keys.take("optim.weight_decay", "training.optimizer.weight_decay", 0.01),
    }
    clip = keys.take("optim.clip_grad", "training.optimizer.max_grad_norm", 1.0)
    put(optimizer, "max_grad_norm", clip, default=1.0)
    default = "constant" if engine else "cosine"
    told = keys.take("optim.lr_scheduler", "training.optimizer.schedule", default)
    style = keys.take("optim.lr_scheduler_type", "training.optimizer.schedule", told)
    if style == "cosine":
        optimizer["schedule"] = "cosine"
        put(optimizer, "min_lr_ratio", keys.take("optim.min_lr_ratio", "training.optimizer.min_lr_ratio"), default=None)
    elif style != "constant":
        made.notes.append(f"optim.lr_scheduler={style}: constant stands there; give training.optimizer.schedule")
    steps = keys.take("optim.lr_warmup_steps", "training.optimizer.warmup_steps", -1)
    ratio = keys.take("optim.warmup_steps_ratio", "training.optimizer.warmup_steps", 0.0 if engine else 0.1)
    ratio = keys.take("optim.lr_warmup_steps_ratio", "training.optimizer.warmup_steps", ratio)
    if whole(steps) > 0:
        optimizer["warmup_steps"] = steps
    elif ratio:
        made.notes.append(
            f"the first {ratio:.0%} of verl's steps warm up: give training.optimizer.warmup_steps, a number of steps"
        )
    return optimizer
