"""The records of a run -> a summary for the terminal, and a table in Markdown for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from gpu_checks.figures import OK, End, Figure, Machine, Record

T = TypeVar("T", bound=Record)


def of_kind(records: Iterable[Record], kind: type[T]) -> list[T]:
    return [record for record in records if isinstance(record, kind)]


def summary(records: Sequence[Record]) -> Iterator[str]:
    """A line a check: how it ended, its seconds, and how many figures it has, or why it has none."""
    figures = of_kind(records, Figure)
    for end in of_kind(records, End):
        count = sum(figure.check == end.check for figure in figures)
        yield f"{end.check:<16} {end.state:<10} {end.seconds:>6.1f} s  {count:>3} figures  {end.reason}".rstrip()


def markdown(records: Sequence[Record]) -> Iterator[str]:
    """What was run where, a row a figure, and the checks that did not end well, with their reasons."""
    for machine in of_kind(records, Machine):
        about = f"torch {machine.torch}; {machine.versions}; commit {machine.commit}"
        yield f"{machine.card}, {machine.date}; {about}."
        yield ""
    yield "| check | of | figure | measured | published |"
    yield "| --- | --- | --- | --- | --- |"
    for figure in of_kind(records, Figure):
        cells = (f"`{figure.check}`", figure.case, figure.name, figure.text, figure.published_text)
        yield f"| {' | '.join(map(_cell, cells))} |".replace("|  |", "| |").replace("|  |", "| |")
    others = [end for end in of_kind(records, End) if end.state != OK]
    if others:
        yield ""
        yield from (f"- `{end.check}`: {end.state}{f', {end.reason}' if end.reason else ''}" for end in others)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
