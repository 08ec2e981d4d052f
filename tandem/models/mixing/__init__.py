"""State mixers: layers that carry a state of a fixed size from token to token, as recurrences and convolutions do.

mixer        one of them as a function: hidden states and the states before them -> outputs and the states after them
finding      the mixers of a model, and how the plan of a forward pass reaches them
mixed_rows   packed rows as calls of a mixer: a prompt's state is computed once and given to its answers
slot_states  the states of the rows that are being generated
"""

from tandem.models.mixing.finding import has_mixers, mend_time_steps, mixers_of, wrap_mixers
from tandem.models.mixing.mixed_rows import MixedRows
from tandem.models.mixing.mixer import State, StateMixer
from tandem.models.mixing.slot_states import SlotStates

__all__ = [
    "MixedRows",
    "SlotStates",
    "State",
    "StateMixer",
    "has_mixers",
    "mend_time_steps",
    "mixers_of",
    "wrap_mixers",
]
