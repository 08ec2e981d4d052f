"""Ranking by vectors: a sentence-embedding model's mean over its last hidden states, by cosine (Reimers and Gurevych
2019, arXiv:1908.10084). Exact: every passage is compared.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tandem.errors import UserError
from tandem.stored import read_json
from tandem.types import FloatArray

_BATCH = 32
_MOST_TOKENS = 512
_SETTINGS = "vectors.json"


@dataclass(frozen=True, slots=True)
class Embedding:
    """A model directory, and what its model card wants before texts: `query: ` and `passage: ` for E5, say."""

    model: str
    query_prefix: str = ""
    passage_prefix: str = ""


class Embedder:
    """Texts -> vectors of length 1."""

    def __init__(self, embedding: Embedding) -> None:
        """Raises UserError where the directory holds no model that is used so."""
        from transformers import AutoModel, AutoTokenizer

        self._check_pooling(Path(embedding.model))
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(embedding.model, local_files_only=True)
            self._model = AutoModel.from_pretrained(embedding.model, local_files_only=True).eval().float()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{embedding.model}: no model can be loaded from there: {error}") from None
        self._most_tokens = min(_MOST_TOKENS, self._tokenizer.model_max_length)

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """`[texts, dimensions]`; of a long text its first 512 tokens."""
        import torch

        with torch.inference_mode():
            tokens = self._tokenizer(
                list(texts), padding=True, truncation=True, max_length=self._most_tokens, return_tensors="pt"
            )
            hidden = self._model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            return torch.nn.functional.normalize(mean, dim=-1).numpy()

    @staticmethod
    def _check_pooling(directory: Path) -> None:
        pooling = directory / "1_Pooling" / "config.json"
        if pooling.is_file() and not read_json(pooling, dict[str, Any]).get("pooling_mode_mean_tokens"):
            raise UserError(f"{directory}: its 1_Pooling/config.json takes no mean over tokens; give a model that does")


class VectorRanker:
    """Scores of all passages for a query."""

    def __init__(self, embedding: Embedding, embedder: Embedder, vectors: FloatArray) -> None:
        self._prefix = embedding.query_prefix
        self._embedder = embedder
        self._vectors = vectors

    @classmethod
    def build(cls, texts: Iterable[str], folder: Path, embedding: Embedding) -> None:
        """Write the ranker of some texts to a folder. Raises UserError as Embedder does."""
        embedder = Embedder(embedding)
        vectors = [embedder.embed([embedding.passage_prefix + text for text in batch]) for batch in _batches(texts)]
        np.save(folder / "vectors.npy", np.concatenate(vectors), allow_pickle=False)
        (folder / _SETTINGS).write_text(json.dumps(asdict(embedding)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "VectorRanker":
        """Raises OSError and ValueError, and UserError where the model is not there any more."""
        embedding = read_json(folder / _SETTINGS, Embedding)
        vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
        return cls(embedding, Embedder(embedding), vectors)

    def scores(self, query: str) -> FloatArray:
        """`[passages]`: cosines."""
        return self._vectors @ self._embedder.embed([self._prefix + query])[0]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(texts)
    while batch := list(islice(rest, _BATCH)):
        yield batch
