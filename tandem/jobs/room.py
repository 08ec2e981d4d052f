"""Conversations whose opening leaves the policy no token: environments, tools of servers and agents may say so much.

What of an opening is known before a run is measured there (`openings.py`).
"""

from collections.abc import Mapping, Sequence

from tandem.errors import NoRoomToAnswer
from tandem.types import Group, Trajectory

_MEND = "let environments, tools and agents say less before the policy's first turn, or give a model of more positions"


class RoomWatch:
    """Tells the first of a run, by its data row, and ends a run in which all are such."""

    def __init__(self) -> None:
        self._first: Trajectory | None = None
        self._groups = self._conversations = 0
        """Rows that were asked, and conversations without room."""
        self._had_room = False
        """Some conversation."""

    def note(self, groups: Sequence[Group], where: str, *, counts: bool = True) -> None:
        """Take in answers. `where`: the step, for a person. `counts`: they are of the rows that `check` asks for."""
        answers = [answer for group in groups for answer in group.trajectories]
        without = [answer for answer in answers if has_no_room(answer)]
        self._groups += len(groups) if counts else 0
        self._conversations += len(without)
        self._had_room |= any(answer.turns for answer in answers)
        if without and self._first is None:
            self._first = without[0]
            print(
                f"{where}: {_named(without[0])} leaves no room for an answer: {without[0].error} "
                "(conversation/without_room counts such; told once)",
                flush=True,
            )

    def state(self) -> dict[str, int]:
        """For a checkpoint: what `check` goes by."""
        return {"had_room": int(self._had_room), "groups": self._groups, "conversations": self._conversations}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from that of a checkpoint; of one without, where nobody knows, a conversation had room."""
        self._had_room = bool(state.get("had_room", True))
        self._groups, self._conversations = state.get("groups", 0), state.get("conversations", 0)

    def check(self, rows: int = 0) -> None:
        """Raises NoRoomToAnswer where no conversation had room, and so many rows or more were asked."""
        if self._first is not None and not self._had_room and self._groups >= rows:
            raise NoRoomToAnswer(
                f"no conversation has room for an answer, and {self._conversations:,} were opened; "
                f"{_named(self._first)}: {self._first.error}; {_MEND}"
            )


def has_no_room(answer: Trajectory) -> bool:
    """Whether what the conversation was opened with left the policy no token."""
    return answer.numbers.get("without_room", 0.0) > 0


def _named(answer: Trajectory) -> str:
    return f"the conversation on data row {answer.prompt.index}"
