"""Attention over rows that are packed head to tail, for any transformers model, in training and generation alike.

interface   what a model's layers call, and the plan that answers them
rows        the plan for packed rows; scattered: that of one of several ranks
pieces      a plan's work as calls of flash kernels, merged exactly
kernels     those calls on a GPU; rectangles: on a CPU, and where no flash kernel will do; choice: which of them
versions    FlashAttention 2, 3 or 4 behind torch's operators
check       whether a GPU's kernel does what pieces rely on
"""

from tandem.models.attention.interface import ATTENTION, HARMLESS, refuse_arguments
from tandem.models.attention.packed_attention import PackedRows
from tandem.models.attention.pieces import Scoring
from tandem.models.attention.scattered import ScatteredRows

__all__ = ["ATTENTION", "HARMLESS", "PackedRows", "ScatteredRows", "Scoring", "refuse_arguments"]
