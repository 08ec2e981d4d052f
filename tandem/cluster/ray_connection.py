"""How this process joins a Ray cluster: one that runs at an address, or one that it starts for itself."""

import logging
import socket
import time

import ray
from ray._private import ray_constants
from ray._private.services import resolve_ip_for_localhost

from tandem.errors import UserError

_CONNECT_S = 5.0  # for one connection
_RETRY_S = 1.0


def connect(address: str | None, patience_s: float) -> None:
    """Connect this process to the Ray cluster at `address`, or start one here that only this machine reaches.

    Where nothing listens at HOST:PORT, `ray.init` would try for minutes: this raises UserError after `patience_s`.
    """
    reached_by_others = address is not None
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        # Ray takes a loopback address for this machine's own, where a cluster that only this machine reaches isn't.
        own = resolve_ip_for_localhost(host)
        reached_by_others = first_listening([host] if own == host else [own, host], int(port), patience_s) == own
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = reached_by_others
    try:
        ray.init(address or "local", include_dashboard=False, logging_level=logging.ERROR)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def first_listening(hosts: list[str], port: int, patience_s: float) -> str:
    """The first of `hosts` that takes a connection at `port`."""
    begin = time.monotonic()
    said = False
    while True:
        for host in hosts:
            try:
                socket.create_connection((host.strip("[]"), port), timeout=_CONNECT_S).close()
            except OSError as error:
                reason = error
            else:
                return host
        tried = " or ".join(f"{host}:{port}" for host in hosts)
        where = f"cluster.address or RAY_ADDRESS: no Ray at {tried} ({reason})"
        if time.monotonic() - begin >= patience_s:
            raise UserError(f"{where} for {patience_s:g} s; `ray start --head --port={port}` starts one there")
        if not said:
            print(f"{where}; waiting", flush=True)
            said = True
        time.sleep(min(_RETRY_S, patience_s))
