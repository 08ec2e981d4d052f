"""GPUs by name, and how many there are."""

import pytest

from tandem.errors import UserError
from tandem.planning.hardware import CARDS, parse_machines


@pytest.mark.parametrize(
    ("text", "name", "nodes", "per_node"),
    [
        ("8xH100", "H100", 1, 8),
        ("2x8xh200", "H200", 2, 8),
        ("16xH100-80", "H100", 2, 8),
        ("8x4090", "RTX4090", 1, 8),
        ("3x4xRTX4090", "RTX4090", 3, 4),
        ("72xGB200", "GB200", 1, 72),
        ("1xMI300X", "MI300X", 1, 1),
    ],
)
def test_machines_are_read(text: str, name: str, nodes: int, per_node: int) -> None:
    machines = parse_machines(text)
    assert (machines.name, machines.nodes, machines.per_node) == (name, nodes, per_node)
    assert machines.card.node == per_node
    assert parse_machines(str(machines)) == machines


@pytest.mark.parametrize("text", ["H100", "8", "0xH100", "8x", "x", "8xFoo", "12xH100", "2x2x2xH100", "-8xH100", ""])
def test_what_is_no_machine_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(UserError, match="--gpus"):
        parse_machines(text)


def test_peaks_are_those_of_dense_matrices() -> None:
    """A sparse peak is twice the dense one, and data sheets print it larger: no card computes beyond 400 a byte."""
    for name, card in CARDS.items():
        assert card.bf16_tflops / card.memory_tb_s < 450, name
        assert card.fp8_tflops is None or 1.9 < card.fp8_tflops / card.bf16_tflops < 2.1, name
        assert card.source, name
