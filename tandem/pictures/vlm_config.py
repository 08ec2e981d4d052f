"""What the rows of a vision-language model must know of it, from its directory's JSON files: no weights, no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.model_files import MEND, known_config, read_model_config
from tandem.pictures.layouts.base import Layout, ModelFiles
from tandem.pictures.layouts.patches import glm, qwen
from tandem.pictures.layouts.row_breaks import mistral3
from tandem.pictures.layouts.square import llava
from tandem.pictures.layouts.tiles import internvl, smolvlm
from tandem.pictures.layouts.videos import VideoLayout, qwen2_5_videos, qwen2_videos, qwen3_videos
from tandem.stored import read_json

LAYOUTS: dict[str, Callable[[ModelFiles], Layout]] = {
    "qwen2_vl": qwen,
    "qwen2_5_vl": qwen,
    "qwen3_vl": qwen,
    "qwen3_vl_moe": qwen,
    "glm4v": glm,
    "llava": llava,
    "internvl": internvl,
    "smolvlm": smolvlm,
    "idefics3": smolvlm,
    "mistral3": mistral3,
}
"""Model type -> how its pictures are sized, and which tokens stand for them."""
MODEL_TYPES = tuple(LAYOUTS)
PICTURES_ON_VLLM = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava", "mistral3", "smolvlm"})
"""Those of them whose log-probs on vLLM were compared with the trainer's, and equal."""
ENCODED_ALONE = frozenset({"mistral3"})
"""Those whose tower takes one picture a call, for it attends over all pictures of a call at once."""
VIDEO_LAYOUTS: dict[str, Callable[[ModelFiles], VideoLayout]] = {
    "qwen2_vl": qwen2_videos,
    "qwen2_5_vl": qwen2_5_videos,
    "qwen3_vl": qwen3_videos,
    "qwen3_vl_moe": qwen3_videos,
}
"""Model type -> how videos are shown to it, where they are."""
SPATIAL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
"""Those of them in which a picture's tokens have positions in three dimensions."""
TOWER_MODULES = ("visual", "vision_tower", "multi_modal_projector", "vision_model", "connector")
"""What the tower is called in any of the families, and what joins it to the language model."""
_UNSEEN = {
    "the tokens of a picture see one another, later ones too, and attention is causal here": """gemma3 gemma3n gemma4
    gemma4_unified paligemma""",
    "its text runs, but nobody has compared its tower beside state mixers": "qwen3_5 qwen3_5_moe lfm2_vl",
    "its layers look at a picture apart from the tokens (cross-attention)": "mllama idefics",
    "its tower puts tokens of its own between the rows of tiles, which are not laid out here": """llava_next
    llava_onevision""",
    "transformers knows its tower as kimi_k25 alone, and saves that under other names than it reads": """kimi_vl
    kimi_k25""",
}
UNSEEN = {family: reason for reason, families in _UNSEEN.items() for family in families.split()}
"""Model type -> why its pictures are refused; of others nobody has tried."""


@dataclass(frozen=True, slots=True)
class PictureFormat:
    """How a picture stands among the token ids of a model."""

    placeholder_id: int
    """The token that takes a feature; the chat template writes it once for a picture."""
    video_id: int | None
    """The token that stands for a video."""
    layout: Layout
    videos: VideoLayout | None = None
    """None where the model is shown no videos."""


def in_tower(name: str) -> bool:
    """Is the parameter or layer with this name in the tower of a model that sees pictures?"""
    return any(f".{module}." in f".{name}." for module in TOWER_MODULES)


def picture_format(directory: Path) -> PictureFormat | None:
    """The format of the model in `directory`, None where its family is not one of MODEL_TYPES.

    Raises UserError where its files lack what a picture needs, or contradict each other.
    """
    config = read_model_config(directory) if (directory / "config.json").is_file() else {}
    layout = LAYOUTS.get(str(config.get("model_type")))
    if layout is None:
        return None
    processor = _read(directory / "preprocessor_config.json")
    processor = processor or _read(directory / "processor_config.json").get("image_processor") or {}
    of_videos = _read(directory / "video_preprocessor_config.json")
    of_videos = of_videos or _read(directory / "processor_config.json").get("video_processor") or {}
    files = ModelFiles(directory, config, processor, of_videos)
    videos, video_id = VIDEO_LAYOUTS.get(str(config.get("model_type"))), config.get("video_token_id")
    try:
        shown = videos(files) if videos is not None and video_id is not None else None
        return PictureFormat(files.placeholder, video_id, layout(files), shown)
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:  # a value of another type
        raise UserError(
            f"{directory}: config.json and the processor's file say nothing of pictures that makes sense "
            f"({type(error).__name__}: {error}); copy them again"
        ) from error


def why_unseen(directory: Path) -> str:
    """Why the model of a directory sees no pictures here."""
    config = _read(directory / "config.json")
    kind = model_type(directory)
    nothing = (
        "nobody has told how its pictures stand among tokens" if config.get("vision_config") else "it has no tower"
    )
    return f"model type {kind}: {UNSEEN.get(str(kind), nothing)}"


def model_type(directory: Path) -> str | None:
    """As the directory's config.json says it; None where it cannot be read, which loading the model tells."""
    return known_config(directory).get("model_type")


def sees_pictures(directory: Path) -> bool:
    """By its config.json; one that cannot be read sees none."""
    return model_type(directory) in MODEL_TYPES


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file, which loading the model tells where it matters."""
    return read_json(path, dict[str, Any], MEND) if path.is_file() else {}
