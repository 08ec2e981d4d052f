"""Models and data of the Hugging Face Hub, by id: what a configuration names becomes files of the local cache.

    Qwen/Qwen3-0.6B             a model, where there is no such local path; with `hub:` in any case
    Qwen/Qwen3-0.6B@v1.0        of a branch, a tag or a commit
    hub:openai/gsm8k/main[train]        a data set: its configuration, and a split of it
    hub:openai/gsm8k/main/train.parquet@2f3a    one file of it

Files come to the cache of `huggingface_hub` (HF_HOME), whose environment counts: HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
A snapshot's directory bears its commit: a run directory's configuration has it, and the run that is resumed takes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandem.config import yaml12
from tandem.files import ROW_ENDINGS
from tandem.model_files import indexed_files
from tandem.stored import read_text

Kind = Literal["model", "dataset"]
SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a model that say what it is: its configuration and its tokenizer."""
WEIGHTS = ("*.safetensors",)
_ID = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?P<inside>(?:/[^@\[\]]+)?)(?:@(?P<revision>[^@\[\]]+))?(?:\[(?P<split>[\w.-]+)\])?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(
    r"/(?P<kind>models|datasets)--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})"
)


class Pin(NamedTuple):
    """What a run has used of a repository."""

    kind: Kind
    repo: str


class HubReference(NamedTuple):
    """What an id says."""

    repo: str
    inside: str
    """Of a data set: the configuration, or the file."""
    revision: str | None
    split: str | None


def pins_in(text: str) -> dict[Pin, str]:
    """The commits of the snapshots that a resolved configuration names, of repositories of which it has one."""
    used: dict[Pin, set[str]] = {}
    for one in _SNAPSHOT.finditer(text):
        used.setdefault(Pin(_kind(one["kind"]), f"{one['owner']}/{one['name']}"), set()).add(one["commit"])
    return {pin: commits.pop() for pin, commits in used.items() if len(commits) == 1}


def _kind(folder: str) -> Kind:
    return "model" if folder == "models" else "dataset"


def model_id(path: Path) -> str | None:
    """The id that a model's path is, or None where it is a local one: it is there, its first directory is, or that is
    `runs` or `models`, where those that Tandem and its scripts make are."""
    text = str(path)
    if text.startswith("hub:"):
        return text.removeprefix("hub:")
    local = (
        path.is_absolute()
        or text.startswith(("~", "..", "runs/", "models/"))
        or path.exists()
        or Path(path.parts[0]).is_dir()
    )
    match = _ID.fullmatch(text)
    return text if not local and match and not match["inside"] and not match["split"] else None


def repository_of(path: Path) -> str | None:
    """`owner/name` of a snapshot in the cache."""
    found = _SNAPSHOT.search(str(path))
    return f"{found['owner']}/{found['name']}" if found else None


def model_snapshot(text: str, pins: Mapping[Pin, str]) -> Path:
    """The directory of a model's snapshot, with its configuration and tokenizer. Raises ValueError."""
    source = _source(text)
    if source.inside or source.split:
        raise ValueError(f"{text}: a model is owner/name, or owner/name@revision")
    return _snapshot("model", source, SMALL, pins)


def restored(path: Path) -> Path:
    """The path; a snapshot's that is gone from the cache, or was another machine's, is fetched again at its commit."""
    found = _SNAPSHOT.search(str(path))
    if found is None or path.exists():
        return path
    kind, repo, commit = _kind(found["kind"]), f"{found['owner']}/{found['name']}", found["commit"]
    inside = str(path)[found.end() :].strip("/")
    return _downloaded(kind, repo, commit, (inside,) if inside else SMALL) / inside


def fetch_weights(path: Path) -> None:
    """Bring the weights to a model's snapshot. Raises ValueError; other directories are left alone."""
    found = _SNAPSHOT.search(str(path))
    if found is None or found["kind"] != "models" or _is_whole(path):
        return
    repo = f"{found['owner']}/{found['name']}"
    print(f"fetching the weights of {repo} to {path}", file=sys.stderr, flush=True)
    _downloaded("model", repo, found["commit"], (*SMALL, *WEIGHTS))
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{repo} has no weights as safetensors; take a revision or a conversion that has")


def _is_whole(path: Path) -> bool:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return any(path.glob("*.safetensors"))
    return all((path / name).is_file() for name in indexed_files(index))


def data_files(text: str, pins: Mapping[Pin, str]) -> list[Path]:
    """The local files of a data set's split, in the order of their names. Raises ValueError."""
    source = _source(text.removeprefix("hub:"))
    inside = source.inside.strip("/")
    if inside.lower().endswith(ROW_ENDINGS):
        return [_snapshot("dataset", source, (inside,), pins) / inside]
    snapshot = _snapshot("dataset", source, ("README.md",), pins)
    commit = snapshot.name
    names = [name for name in _names(source.repo, commit) if name.lower().endswith(ROW_ENDINGS)]
    try:
        chosen = _of_split(names, _declared(snapshot / "README.md"), inside, source.split or "train")
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None
    if not chosen:
        shown = ", ".join(names[:8]) or "none"
        where = f" of {inside!r}" if inside else ""
        raise ValueError(
            f"{text}: no file of the split {source.split or 'train'!r}{where}; what can be read there (parquet, JSON "
            f"lines): {shown}; write owner/name/FILE for one of them"
        )
    return [_downloaded("dataset", source.repo, commit, tuple(chosen)) / name for name in chosen]


def _of_split(names: Sequence[str], declared: Sequence[Mapping[str, Any]], inside: str, split: str) -> list[str]:
    """Files that the data set's card declares for it; where it declares none, those that bear its name. Raises
    ValueError where they may be of several configurations."""
    having: dict[str, list[str]] = {}
    for one in declared:
        patterns = _patterns(one.get("data_files"), split)
        if found := sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns)):
            having[str(one.get("config_name", "default"))] = found
    if inside in having or (not inside and "default" in having):
        return having[inside or "default"]
    if not inside and having:
        return _the_only(having)
    below = [name for name in names if not inside or name.startswith(f"{inside}/")]
    word = re.escape(split)
    shards = re.compile(rf"(^|/){word}([-_.]\d+)?([-_.]of[-_.]\d+)?[./]")
    chosen = [name for name in below if shards.search(name)]
    chosen = chosen or [name for name in below if re.search(rf"(^|[/_.-]){word}([/_.-]|$)", name)]
    folders: dict[str, list[str]] = {}
    for name in sorted(chosen):
        folders.setdefault(re.sub(rf"(^|/){word}$", "", str(Path(name).parent)), []).append(name)
    return _the_only(folders) if folders else []


def _the_only(configurations: Mapping[str, list[str]]) -> list[str]:
    if len(configurations) > 1:
        raise ValueError(f"it has several configurations; name one: {', '.join(sorted(configurations))}")
    (files,) = configurations.values()
    return files


def _declared(card: Path) -> list[dict[str, Any]]:
    """`configs` of the YAML on top of a data set's README.md."""
    if not card.is_file():
        return []
    parts = read_text(card).split("---\n")
    try:
        head: Any = yaml12.read(parts[1]) if len(parts) > 2 and not parts[0].strip() else {}
    except yaml12.YAMLError:
        return []
    configs = head.get("configs") if isinstance(head, dict) else None
    return [one for one in configs if isinstance(one, dict)] if isinstance(configs, list) else []


def _patterns(data: Any, split: str) -> list[str]:
    listed = data if isinstance(data, list) else [data]
    found: list[str] = []
    for one in listed:
        if isinstance(one, dict) and one.get("split") == split:
            path = one.get("path")
            found += path if isinstance(path, list) else [str(path)]
        elif isinstance(one, str) and split == "train":
            found.append(one)
    return found


def _source(text: str) -> HubReference:
    match = _ID.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no id of the Hub: owner/name, owner/name@revision; of data owner/name/config[split]"
        )
    return HubReference(match["repo"], match["inside"], match["revision"], match["split"])


def _snapshot(kind: Kind, source: HubReference, patterns: tuple[str, ...], pins: Mapping[Pin, str]) -> Path:
    revision, pin = source.revision, pins.get(Pin(kind, source.repo))
    if pin is not None and not _COMMIT.fullmatch(revision or ""):  # a branch or tag may have moved since
        revision = pin
    return _downloaded(kind, source.repo, revision, patterns)


@cache
def _downloaded(kind: Kind, repo: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Once a process: a configuration is validated several times."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # what is wrong is told below
    with told(kind, repo, revision):
        folder = snapshot_download(repo, repo_type=kind, revision=revision, allow_patterns=list(patterns))
    return Path(folder)


def _names(repo: str, commit: str) -> list[str]:
    """Files of a data set whose snapshot is in the cache: those of the repository, whether they are fetched or not."""
    from huggingface_hub import get_cached_repo_tree

    with told("dataset", repo, commit):
        return sorted(file.path for file in get_cached_repo_tree(repo, repo_type="dataset", revision=commit))


@contextmanager
def told(kind: Kind, repo: str, revision: str | None = None, *, uploads: bool = False) -> Iterator[None]:
    """What goes wrong with a repository inside is raised as ValueError that says what to do."""
    from huggingface_hub import constants, errors

    what = f"the {kind if kind == 'model' else 'data set'} {repo}"
    login = "log in (`hf auth login`) or set HF_TOKEN"
    try:
        yield
        return
    except errors.GatedRepoError:
        reason = f"{what} is gated: accept its terms on its page, and {login}"
    except (errors.OfflineModeIsEnabled, errors.EntryNotFoundError, errors.RepositoryNotFoundError) as error:
        if uploads:
            reason = f"nothing was uploaded to {repo} ({constants.ENDPOINT}): {str(error).splitlines()[0]}; {login}"
        else:
            reason = _absence(error, kind, repo, revision, what, login)
    except errors.RevisionNotFoundError:
        reason = f"{what} has no revision {revision!r}; give a branch, a tag or a commit"
    except errors.LocalTokenNotFoundError:
        reason = f"{what}: the Hub wants to know who you are; {login}"
    except errors.HfHubHTTPError as error:
        mend = f"; {login}" if error.response is not None and error.response.status_code in (401, 403) else ""
        reason = f"the Hub ({constants.ENDPOINT}) refused {what}: {str(error).splitlines()[0]}{mend}"
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        reason = f"{what}: no answer from {constants.ENDPOINT}: {error}"
    raise ValueError(reason)


def _absence(error: Exception, kind: Kind, repo: str, revision: str | None, what: str, login: str) -> str:
    """Why there is no such repository, or not all of it."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no {repo} here, and none on the Hub ({constants.ENDPOINT}), or it is private: then {login}"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"{what} has not all files that were asked for: {str(error).splitlines()[0]}"
    silent = f"the Hub ({constants.ENDPOINT}) does not answer"
    offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else silent
    at = f" at {revision}" if revision else ""
    fetch = f"hf download {repo}{' --repo-type dataset' if kind == 'dataset' else ''}"
    return (
        f"there is no {repo} here, its files{at} are not all in the cache ({constants.HF_HUB_CACHE}), and {offline}; "
        f"fetch it where there is a network (`{fetch}`), or give a local path"
    )
