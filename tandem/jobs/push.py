"""`tandem push`: a run's model to the Hub, with a card that says how it was made."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.config import yaml12
from tandem.errors import UserError
from tandem.hub import repository_of, told
from tandem.stored import DamagedFile, read_json, read_pointer, read_yaml
from tandem.tracking.jsonl import read_metrics

_POINTS = 12
"""Rows of the table of metrics."""
_CURVES = ("reward/mean", "sft/loss", "dpo/loss", "reward_model/loss", "val/loss")


def checkpoint_of(run: Path, step: str) -> Path:
    """The checkpoint of a run that `step` names: latest, best, or a number. Raises UserError."""
    folder = run / "checkpoints"
    if step.isdecimal():
        name = f"step_{int(step):06d}"
    elif step in ("latest", "best") and (folder / step).exists():
        name = read_pointer(folder / step).name
    else:
        raise UserError(f"{run}: it has no checkpoint {step!r}; give a run's directory, and a step it has saved")
    model = folder / name / "model"
    if not (model / "config.json").is_file():
        there = ", ".join(sorted(path.name for path in folder.glob("step_*"))) or "none"
        raise UserError(f"{run}: it has no {name}; there are: {there}")
    return folder / name


def push(run: Path, repo: str, step: str, private: bool, revision: str | None) -> str:
    """Upload the model of a checkpoint, and its card. Returns its address. Raises UserError."""
    checkpoint = checkpoint_of(run, step)
    card = model_card(run, checkpoint, repo)
    try:
        with told("model", repo, revision, uploads=True), tempfile.TemporaryDirectory() as aside:
            files = Path(aside)
            for name, file in files_of(checkpoint):
                (files / name).parent.mkdir(exist_ok=True)
                (files / name).symlink_to(file.absolute())
            (files / "README.md").write_text(card, encoding="utf-8")
            return _upload(files, repo, private, revision, f"{checkpoint.name} of {run.name}")
    except ValueError as error:
        raise UserError(str(error)) from None


def files_of(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """What is uploaded, by its name in the repository: the model, and below `adapter/` the adapter of a LoRA run."""
    for folder, prefix in (("model", ""), ("adapter", "adapter/")):
        for file in sorted((checkpoint / folder).iterdir()) if (checkpoint / folder).is_dir() else ():
            if file.is_file():
                yield prefix + file.name, file


def _upload(files: Path, repo: str, private: bool, revision: str | None, message: str) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    address = api.create_repo(repo, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo, branch=revision, exist_ok=True)
    api.upload_folder(repo_id=repo, folder_path=files, commit_message=message, revision=revision)
    return str(address)


def model_card(run: Path, checkpoint: Path, repo: str) -> str:
    """README.md, made of config.yaml and metrics.jsonl of the run. No path of this machine is in it. Raises
    DamagedFile."""
    config, records = read_yaml(run / "config.yaml", dict[str, Any]), read_metrics(run / "metrics.jsonl")
    try:
        return _card(config, records, checkpoint, repo)
    except (LookupError, TypeError, AttributeError) as error:  # of sections that are none
        reason = f"not the configuration of a run ({type(error).__name__}: {error})"
        raise DamagedFile(run / "config.yaml", reason, "give the directory of one") from None


def _card(config: dict[str, Any], records: Sequence[Mapping[str, Any]], checkpoint: Path, repo: str) -> str:
    base = _named(config["model"]["path"])
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["tandem", "reinforcement-learning"]}
    if (name := repository_of(Path(str(config["model"]["path"])))) is not None:
        head["base_model"] = name
    section = config.get("data", {})
    mixed = [path for one in (section.get("mixture") or {}).values() for path in one["files"]]
    data = [_named(path) for path in [*section.get("train_files", []), *mixed]]
    settings = {
        "algorithm": config.get("algorithm"), "preference": config.get("preference"),
        "optimizer": config.get("training", {}).get("optimizer"),
        "generation": {key: config.get("generation", {}).get(key) for key in ("temperature", "max_response_tokens")},
        "data": {key: config.get("data", {}).get(key) for key in ("prompts_per_step", "rows_per_step")},
    }  # fmt: skip
    shown = {name: _without_paths(value) for name, value in settings.items() if value}
    step = int(checkpoint.name.rpartition("_")[2])
    return "\n".join([
        "---", yaml12.write(head).strip(), "---", "", f"# {repo.rpartition('/')[2]}", "",
        f"{base}, trained by Tandem {__version__}; step {step}.", "",
        *_of_the_adapter(checkpoint, repo),
        f"Data: {', '.join(dict.fromkeys(data)) or 'not named'}.", "",
        *_of_other_models(config["model"]),
        "```yaml", yaml12.write(shown).strip(), "```", "",
        *_metrics(records, step), "",
    ])  # fmt: skip


def _of_other_models(models: Mapping[str, Any]) -> list[str]:
    """A line for those that the run learned from, where there are any."""
    kinds = {"Reward model": "reward_model_path", "Judge": "judge_path", "Teacher": "teacher_path"}
    named = [f"{kind}: {_named(models[key])}." for kind, key in kinds.items() if models.get(key) is not None]
    return [" ".join(named), ""] if named else []


def _of_the_adapter(checkpoint: Path, repo: str) -> list[str]:
    if not (checkpoint / "adapter").is_dir():
        return []
    settings = read_json(checkpoint / "adapter/adapter_config.json", dict[str, Any])
    scores = settings.get("task_type") == "SEQ_CLS"
    head = ", with its value head, where `base` is an `AutoModelForSequenceClassification` of `num_labels=1`"
    return [
        f"The weights have the LoRA adapter merged in; `adapter/` is the adapter alone{head if scores else ''}, as "
        f'`PeftModel.from_pretrained(base, "{repo}", subfolder="adapter")` reads it.',
        "",
    ]


def _named(path: Any) -> str:
    """What a path is called outside this machine: its repository, or the last part of its name."""
    parts = Path(str(path)).parts
    in_run = parts[parts.index("checkpoints") - 1] if "checkpoints" in parts[1:] else parts[-1]
    return repository_of(Path(str(path))) or in_run


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _has(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)


def _metrics(steps: Sequence[Mapping[str, Any]], last: int) -> Iterator[str]:
    """A table of the curves that the run has, validations whole and of the rest some steps."""
    steps = [record for record in steps if record.get("step", 0) <= last]
    names = [name for name in _CURVES if any(name in record for record in steps)]
    kinds = ("/acc/mean", "/reward/mean", "val/accuracy")
    validated = sorted({name for record in steps for name in record if name.startswith("val") and _has(name, kinds)})
    if not (columns := [*names, *validated[:4]]):
        return
    every = max(1, len(steps) // _POINTS)
    rows = [
        record
        for at, record in enumerate(steps)
        if at % every == 0 or at == len(steps) - 1 or any(name in record for name in validated)
    ]
    yield f"| step | {' | '.join(columns)} |"
    yield f"| --- |{' --- |' * len(columns)}"
    for record in rows:
        cells = [f"{record[name]:.4g}" if isfinite(record.get(name, nan)) else "" for name in columns]
        yield f"| {record.get('step', 0)} | {' | '.join(cells)} |"
