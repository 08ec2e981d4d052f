"""Where worker processes come from: this process, this machine, Ray."""

from tandem.config.tree import ModelsConfig
from tandem.controller.pools import ResourcePoolManager
from tandem.controller.worker_groups import Cluster


def make_cluster(config: ModelsConfig, pools: ResourcePoolManager | None = None) -> Cluster:
    """The cluster that the configuration names, for `pools` (default: those of the configuration).

    A local one with a single pool of a single process is this process.
    """
    settings = config.cluster
    if settings.type == "ray":
        from tandem.cluster.ray import RayCluster

        return RayCluster(settings.address, settings.timeout_s)
    from tandem.controller.placement import pools_of  # here: worker processes import this package, and not every engine

    if [pool.size for pool in (pools or pools_of(config)).pools.values()] == [1]:
        from tandem.cluster.inline import InlineCluster

        return InlineCluster()
    from tandem.cluster.local import LocalCluster

    return LocalCluster(settings.timeout_s)
