"""Ranking by words: BM25 (Robertson and Zaragoza 2009, doi:10.1561/1500000019) as bm25s computes it.

Every word counts, in any language that puts spaces between its words; words are compared in lower case, whole.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import bm25s
import numpy as np
from bm25s.tokenization import Tokenized

from tandem.errors import UserError
from tandem.types import FloatArray

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class WordRanker:
    """Scores of all passages for a query."""

    def __init__(self, bm25: bm25s.BM25) -> None:
        self._bm25 = bm25

    @classmethod
    def build(cls, texts: Iterable[str], folder: Path) -> None:
        """Write the ranker of some texts to a folder. Raises UserError where there is not one word."""
        vocabulary: dict[str, int] = {}
        ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in words_of(text)] for text in texts]
        if not vocabulary:
            raise UserError("the passages hold no words: nothing but marks and spaces; is this the right file?")
        bm25 = bm25s.BM25()
        bm25.index(Tokenized(ids=ids, vocab=vocabulary), show_progress=False)
        bm25.save(folder, show_progress=False, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> "WordRanker":
        """The arrays stay on disk, and in memory once for all processes. Raises OSError and ValueError."""
        return cls(bm25s.BM25.load(folder, mmap=True, show_progress=False, allow_pickle=False))

    def scores(self, query: str) -> FloatArray:
        """`[passages]`; 0 where no word is the same."""
        words = words_of(query)
        if not words:
            return np.zeros(self._bm25.scores["num_docs"], np.float32)
        return self._bm25.get_scores(words)
