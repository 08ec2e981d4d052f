"""Operators of our own, each with its arithmetic in torch and, on a GPU, one Triton kernel in its place.

They are torch operators, so that those who compute with shapes alone (`tandem plan --trace`) meet no kernel. A torch
that is built for CUDA brings Triton along; without it torch's arithmetic runs on the GPU, too.
"""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def with_triton(tensor: Tensor) -> bool:
    """Whether what is computed of this tensor is computed by a kernel."""
    return tensor.is_cuda and _triton_is_there()


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None
