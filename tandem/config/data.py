"""Rows: their files and sets, their pictures and videos, how many a step takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tandem.config.base import MayChange, NonNegativeFloat, PositiveFloat, PositiveInt, Section, rule
from tandem.config.mixture import MixtureConfig, SetName
from tandem.config.paths import DataPaths, LocalPath, Reference
from tandem.config.sampler import SamplerConfig
from tandem.config.validation import ValSetConfig


class PixelLimits(Section):
    """Of a picture, or of a video's frame."""

    min_pixels: PositiveInt | None = None
    """A smaller picture is enlarged to as many. Default: that of the model's processor."""
    max_pixels: PositiveInt | None = None
    """A larger one is reduced to as many. Default: that of the model's processor."""

    @rule()
    def _in_order(self) -> Iterator[str]:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            yield f"min_pixels: {self.min_pixels:,} is more than max_pixels: {self.max_pixels:,}"


class ImagesConfig(PixelLimits):
    """Pictures of rows (docs/pictures.md): each is resized once, and stored."""

    max_image_tokens: PositiveInt | None = None
    """A row whose pictures take more tokens is a bad row. Default: no limit but that of the row's length."""
    directory: MayChange[LocalPath | None] = None
    """The store, which all nodes must see and several runs may share. Default: `pictures/` in the run directory; of
    `tandem eval`, `~/.cache/tandem/pictures`."""
    max_source_pixels: PositiveInt = Field(default=50_000_000, le=178_956_970)
    """A picture that has more before it is resized is a bad row, found before it is decoded."""


class VideosConfig(PixelLimits):
    """Videos of rows, which are lists of frames (docs/pictures.md#videos)."""

    max_frames: PositiveInt = 768
    """Of a longer video as many are taken, evenly from the first to the last."""
    fps: PositiveFloat = 2.0
    """Frames a second of a video whose row does not say it."""


class RowCacheConfig(Section):
    """Where tokenised rows of large files are kept, from which they are read through a memory map (docs/data.md)."""

    directory: LocalPath | None = None
    """Runs may share it, and it may be deleted at any time. Default: `~/.cache/tandem/rows`."""
    files_from_mib: NonNegativeFloat | None = 4.0
    """Smaller files are tokenised at each start and kept in memory; null: all files are."""
    workers: PositiveInt | None = None
    """Processes that tokenise. Default: as many as CPUs that the command may use."""


class DataFilesConfig(Section):
    """Parquet or JSON-lines (also .gz), and ids of the Hub: `hub:OWNER/NAME/CONFIGURATION[SPLIT]`."""

    train_files: DataPaths = []
    mixture: MixtureConfig = {}
    """In the place of `train_files`: sets by name, each with its share of the rows (docs/data.md)."""
    val_files: DataPaths = []
    shuffle: bool = True
    """A new order every epoch, from `trainer.seed`."""
    on_bad_row: Literal["error", "skip"] = "error"
    images: ImagesConfig = ImagesConfig()
    videos: VideosConfig = VideosConfig()
    cache: MayChange[RowCacheConfig] = RowCacheConfig()

    @rule("mixture")
    def _is_alone(self) -> Iterator[str]:
        if self.mixture and self.train_files:
            yield "give the files as train_files or as sets of mixture, not both"

    @property
    def train_paths(self) -> list[Path]:
        """`train_files`, or those of all sets one after another."""
        return self.train_files + [path for one in self.mixture.values() for path in one.files]

    @property
    def train_key(self) -> str:
        """The key that names them."""
        return "data.mixture" if self.mixture else "data.train_files"

    @property
    def val_paths(self) -> list[Path]:
        """All files of rows to validate on."""
        return self.val_files


class DataConfig(DataFilesConfig):
    """One row a prompt."""

    val_sets: dict[SetName, ValSetConfig] = {}
    """Besides `val_files`: sets by name, each with a sampling and metrics of its own (docs/data.md)."""
    dataset: Reference | None = None
    """A class whose rows are trained on, `path/to/file.py:Class` or `package.module:Class`, made with the files of
    `train_files` (docs/data.md)."""
    dataset_arguments: dict[str, Any] = {}
    """What it is made with besides, by name."""
    sampler: SamplerConfig = Field(default={"type": "epochs"}, validate_default=True)
    prompts_per_step: PositiveInt = 128
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is a bad row. The prompt of a conversation is what it opens with: the row's messages with the
    descriptions of tools, but for what an environment, an agent or an MCP server adds when the conversation is held."""

    @rule("dataset")
    def _has_no_sets(self) -> Iterator[str]:
        if self.dataset is not None and self.mixture:
            yield "mixture is of sets of files; leave it out, or mix rows in the class"

    @rule("sampler")
    def _draws_from_one_set(self) -> Iterator[str]:
        if self.sampler.type != "epochs" and self.mixture:
            yield f"type: {self.sampler.type} draws from one set; leave out mixture, or take epochs"

    @property
    def val_paths(self) -> list[Path]:
        """`val_files`, then those of all sets one after another."""
        return self.val_files + [path for one in self.val_sets.values() for path in one.files]


class SftDataConfig(DataFilesConfig):
    """One row a demonstration (`messages`, or `prompt` + `completion`), or a pair of answers (`chosen`, `rejected`)."""

    rows_per_step: PositiveInt = 128
    max_tokens: PositiveInt = 2048
    """Prompt and answer together; a longer row is a bad row."""
