"""What travels between host memory and a GPU where a configuration keeps part of a model in host memory."""

from tandem.planning.fsdp_memory import FsdpSizes, kept_on_host
from tandem.planning.passes import IN_PLACE, HostTraffic


def host_traffic(sizes: FsdpSizes) -> HostTraffic:
    """Of `cpu_offload` and `optimizer_offload`, on each rank (`tandem/training/optimizer.py`)."""
    state = kept_on_host(sizes)
    if sizes.optimizer_offload:
        return HostTraffic(a_step=2 * state)
    if not sizes.cpu_offload:
        return IN_PLACE
    shards = sizes.shards if sizes.sharded else 1
    learning, moments = sizes.learning // shards, sizes.moments // shards
    gradients = 4 * learning
    computed = 2 * (moments + 4 * learning) + gradients
    if sizes.sharded:
        return HostTraffic(a_pass=state - moments, a_backward=gradients, computed=computed)
    return HostTraffic(a_step=gradients + sizes.item_bytes * learning, computed=computed)
