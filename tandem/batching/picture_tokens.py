"""The pictures of a micro-batch: each distinct one is named once, and every token of one says which feature it takes.

Suffixes: `_P` distinct prompts, `_N` tokens of the micro-batch, `_M` those of pictures.
"""

from collections.abc import Sequence

import numpy as np

from tandem.pictures.tokens import rope_positions, span
from tandem.types import IntArray, Picture, PictureTokens


def picture_tokens(
    pictures_P: Sequence[Sequence[Picture]],
    starts_P: IntArray,
    lengths_P: IntArray,
    source_N: IntArray,
    answer_lengths: IntArray,
    prompt_of_answer: IntArray,
) -> PictureTokens | None:
    """Of a micro-batch whose first tokens are those of prompts, and then come answers; None where none has pictures.

    `source_N`: of the tokens of prompts alone, where each stands among the tokens that `starts_P` count. An answer
    goes on from where its prompt's positions end, which is not how many tokens that has.
    """
    if not any(pictures_P):
        return None
    first_feature: dict[str, int] = {}
    features = 0
    positions_P: list[IntArray] = []
    features_P: list[IntArray] = []
    ends_P: list[int] = []
    for pictures, length in zip(pictures_P, lengths_P.tolist(), strict=True):
        positions, end = rope_positions(length, pictures)
        feature_of_token = np.full(length, -1, dtype=np.int64)
        for picture in pictures:
            place = span(picture)
            if picture.key not in first_feature:
                first_feature[picture.key] = features
                features += place.stop - place.start
            feature_of_token[place] = first_feature[picture.key] + np.arange(place.stop - place.start)
        positions_P.append(positions)
        features_P.append(feature_of_token)
        ends_P.append(end)
    order_P = np.argsort(starts_P)
    prompt_N = order_P[np.searchsorted(starts_P[order_P], source_N, side="right") - 1]
    place_N = source_N - starts_P[prompt_N] + (np.cumsum(lengths_P) - lengths_P)[prompt_N]
    feature_N = np.concatenate(features_P)[place_N]
    inside: IntArray = np.arange(int(answer_lengths.sum())) - np.repeat(
        np.cumsum(answer_lengths) - answer_lengths, answer_lengths
    )
    of_answers: IntArray = np.repeat(np.array(ends_P)[prompt_of_answer], answer_lengths) + inside
    of_prompts = np.concatenate(positions_P, axis=1)[:, place_N]
    return PictureTokens(
        keys=tuple(first_feature),
        features=feature_N[feature_N >= 0],
        positions=np.concatenate((of_prompts, np.broadcast_to(of_answers, (3, len(of_answers)))), axis=1),
    )
