"""What planning knows of GPUs, and how many of them there are: `8xH100`, `2x8xH100`.

Sources (checked 2026-11-22): T torchtitan's `get_peak_flops`, which links NVIDIA's and AMD's data sheets; V verl's
`utils/flops_counter.py`; K glennklockwood.com/garden/processors, from NVIDIA's briefs; L LLM-Prof's `hardware_spec.md`;
I InferSim's `hardware/gpu.py`; G github.com/astroC86/gpu-datasheet; W NVIDIA's white papers on Ada and Blackwell
GeForce; B NVIDIA's product brief PB-11133; E estimated: nobody published it, a machine will tell. Data sheets print
peaks of tensor cores for sparse matrices: the dense ones here are half of those.
"""

import re
from dataclasses import dataclass, replace

from tandem.errors import UserError


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, and its links in one direction."""

    bf16_tflops: float
    """Peak of dense matrices."""
    fp8_tflops: float | None
    memory_gib: float
    """As the driver reports it (`torch.cuda.mem_get_info()[1]`), less than the data sheet says."""
    memory_tb_s: float
    peers_gb_s: float | None
    """NVLink, NVSwitch or Infinity Fabric, all links together. None: peers talk over PCIe."""
    host_gb_s: float
    """PCIe or C2C."""
    network_gb_s: float
    """A GPU's share of the network cards that its node usually has."""
    node: int
    """GPUs that `peers_gb_s` connects, as machines of this card are usually built."""
    source: str

    @property
    def flops_per_s(self) -> float:
        return 1e12 * self.bf16_tflops

    @property
    def bytes_per_s(self) -> float:
        """Of the device's memory."""
        return 1e12 * self.memory_tb_s

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def peer_bytes_per_s(self) -> float:
        return 1e9 * (self.peers_gb_s or self.host_gb_s)

    @property
    def host_bytes_per_s(self) -> float:
        return 1e9 * self.host_gb_s

    @property
    def network_bytes_per_s(self) -> float:
        return 1e9 * self.network_gb_s


CARDS = {
    "A100-40": Card(312, None, 39.4, 1.555, 300, 32, 25, 8, "T G; memory E"),
    "A100": Card(312, None, 79.2, 2.039, 300, 32, 25, 8, "T L G; memory E"),
    "H100": Card(989, 1979, 79.1, 3.35, 450, 64, 50, 8, "T V K G"),
    "H100-PCIE": Card(756, 1513, 79.1, 2.0, None, 64, 50, 8, "T; memory's bandwidth B; network, node E"),
    "H800": Card(989, 1979, 79.1, 3.35, 200, 64, 50, 8, "V L I"),
    "H200": Card(989, 1979, 139.8, 4.8, 450, 64, 50, 8, "T V G"),
    "H20": Card(148, 296, 95.6, 4.0, 450, 64, 40, 8, "T V L I"),
    "B200": Card(2250, 4500, 178.4, 8.0, 900, 64, 50, 8, "T V K L; memory E"),
    "GB200": Card(2500, 5000, 185.0, 8.0, 900, 450, 50, 72, "T V K; memory E"),
    "L40S": Card(362, 733, 44.5, 0.864, None, 32, 25, 8, "T V; memory, network, node E"),
    "RTX4090": Card(165.2, 330.3, 23.5, 1.008, None, 32, 3, 8, "W; network, node E; no peer-to-peer"),
    "RTX5090": Card(209.5, 419, 31.4, 1.792, None, 64, 3, 8, "W; network, node E"),
    "MI300X": Card(1307, 2615, 191.5, 5.3, 448, 64, 50, 8, "T V; all but the peaks E"),
}
ALIASES = {"4090": "RTX4090", "5090": "RTX5090", "A100-80": "A100", "H100-80": "H100"}


@dataclass(frozen=True, slots=True)
class Machines:
    """GPUs of one kind, on nodes of the same size."""

    name: str
    card: Card
    nodes: int
    per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.per_node}x{self.name}"


def parse_machines(text: str) -> Machines:
    """Of `8xH100`, or `2x8xH100`: two nodes of eight. Without nodes, more GPUs than a node's links join are several.

    UserError for anything else, and for a card that is not in CARDS.
    """
    matched = re.fullmatch(r"(?:(0*[1-9]\d*)x)?(0*[1-9]\d*)x(\D.*|\d{4})", text.strip(), re.IGNORECASE)
    if not matched:
        raise UserError(f"--gpus {text}: write how many of which, as 8xH100, or 2x8xH100 for two nodes of eight")
    written_nodes, count, name = matched.groups()
    known = {key.lower(): key for key in CARDS} | {alias.lower(): key for alias, key in ALIASES.items()}
    if name.lower() not in known:
        raise UserError(f"--gpus {text}: nothing is known of {name!r}; take the nearest of {', '.join(CARDS)}")
    key = known[name.lower()]
    card = CARDS[key]
    nodes, per_node = (int(written_nodes), int(count)) if written_nodes else _nodes(int(count), card)
    return Machines(key, replace(card, node=per_node), nodes, per_node)


def _nodes(gpus: int, card: Card) -> tuple[int, int]:
    if gpus <= card.node:
        return 1, gpus
    if gpus % card.node:
        raise UserError(f"--gpus: {gpus} GPUs are no whole nodes of {card.node}; write nodes too, as in 3x4xH100")
    return gpus // card.node, card.node
