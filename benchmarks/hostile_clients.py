"""A server among clients that hold it up: how a good one is served meanwhile, and what memory that takes.

    python benchmarks/hostile_clients.py [--server serve|search] [--seconds 60] [--slow 2000] [--client-timeout 30]

The server is `tandem serve` with the tiny model of examples/sort4, or `tandem search serve` with twenty passages, in a
process of its own. A third of the slow clients sends half of a head, a third half of a body (with the token), a third
asks for much and reads nothing; each comes again when it is cut. Of `tandem serve` one client more asks 100,000 prompts
in one request again and again, and one a prompt of 15 MB. The good client asks one short thing after the other, each
with a connection of its own. Prints a line of JSON: how many of the good client's requests succeeded, its latencies in
milliseconds, the statuses that the greedy clients got, the server's memory in MiB at the start and at the most, the
bytes of its log, and the seconds from SIGTERM to its end, with all clients still there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from command_line import parse_arguments

from tandem.search.index import Passage, build_index

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.sort4 import task

TOKEN = "t0ken"
START = "import sys; from tandem.cli import main; sys.exit(main(sys.argv[1:]))"
GOOD = """
import json, socket, sys, time

port, seconds, sent = int(sys.argv[1]), float(sys.argv[2]), sys.stdin.buffer.read()
latencies_ms, failed, end = [], [], time.monotonic() + seconds
while time.monotonic() < end:
    start = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(sent)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        status = answer[9:12].decode() or "no answer"
    except OSError as error:
        status = repr(error)
    if status == "200":
        latencies_ms.append((time.monotonic() - start) * 1e3)
    else:
        failed.append(status)
    time.sleep(0.02)
print(json.dumps([latencies_ms, failed]))
"""
"""The good client: a process of its own, which the others do not slow down."""
GREEDY_PAUSE_S = 0.2
SLOW_PAUSE_S = 0.1


@dataclass(frozen=True)
class Target:
    """A server, and what its clients ask."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    good: bytes
    """The request of the good client."""
    much: bytes
    """One whose answer fills every buffer on the way."""
    greedy: dict[str, bytes]
    """Further requests, by their names."""

    @property
    def memory_mib(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@dataclass
class Outcome:
    """What became of requests."""

    latencies_ms: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    """Slow connections that the server has ended."""
    most_mib: float = 0.0


def request(path: str, body: Any, token: str = TOKEN) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def completion(**asked: Any) -> bytes:
    return request("/v1/completions", {"model": "model", **asked})


@contextmanager
def started(folder: Path, server: str, *options: str) -> Iterator[Target]:
    """The server in a process of its own, killed at the end if it has not ended."""
    log = folder / "server.log"
    what = ["serve", str(folder / "sort4" / "model"), "--name", "model"]
    if server == "search":
        what = ["search", "serve", str(folder / "index")]
        passages = [Passage(str(n), f"River {n}", f"It is number {n}. " + "blue " * 1000) for n in range(20)]
        build_index(passages, folder / "index")
        good = request("/search", {"query": "river number 7", "k": 2})
        much, greedy = request("/retrieve", {"queries": ["blue river"] * 500, "topk": 20}), dict[str, bytes]()
    else:
        task.make(folder / "sort4", seed=0)
        good = completion(prompt="4821=", max_tokens=8)
        much = completion(prompt="4821=", n=64, max_tokens=500, stream=True)
        prompts, letters = completion(prompt=["4821="] * 100_000), completion(prompt="4821=" * 3_000_000)
        greedy = {"100,000 prompts": prompts, "15 MB": letters}
    command = [sys.executable, "-c", START, *what, "--port", "0", *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "TANDEM_API_KEY": TOKEN}
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().split()[0]
        yield Target(process, int(url.split(":")[2].split("/")[0]), log, good, much, greedy)
    finally:
        process.kill()
        process.communicate()


async def asked(port: int, sent: bytes, timeout_s: float) -> str:
    """The status of the answer, once it is there whole."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(sent)
            await writer.drain()
            answer = await reader.read()
        finally:
            writer.transport.abort()
    return answer.split(b" ", 2)[1].decode() if answer else "no answer"


async def good_client(target: Target, seconds: float, outcome: Outcome) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", GOOD, str(target.port), str(seconds)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate(target.good)
    outcome.latencies_ms, outcome.failed = json.loads(told)


async def greedy_client(target: Target, name: str, outcome: Outcome) -> None:
    while True:
        try:
            status = await asked(target.port, target.greedy[name], 60)
        except (OSError, TimeoutError) as error:
            status = type(error).__name__
        outcome.statuses[f"{name}: {status}"] += 1
        await asyncio.sleep(GREEDY_PAUSE_S)


async def slow_client(target: Target, number: int, outcome: Outcome) -> None:
    """Sends half of something and waits, or reads nothing."""
    sent = (target.good[:30], target.good[:-5], target.much)[number % 3]
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as connection, suppress(OSError):
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(connection, ("127.0.0.1", target.port))
            await loop.sock_sendall(connection, sent)
            while number % 3 == 2 and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                await asyncio.sleep(0.5)
            while number % 3 != 2 and await loop.sock_recv(connection, 4096):
                pass
        outcome.cut += 1
        await asyncio.sleep(SLOW_PAUSE_S)


async def watch_memory(target: Target, outcome: Outcome) -> None:
    while True:
        outcome.most_mib = max(outcome.most_mib, target.memory_mib)
        await asyncio.sleep(0.05)


async def measure(target: Target, seconds: float, slow: int) -> dict[str, Any]:
    outcome, start_mib = Outcome(), target.memory_mib
    assert await asked(target.port, target.good, 60) == "200"
    clients = [slow_client(target, number, outcome) for number in range(slow)]
    clients += [greedy_client(target, name, outcome) for name in target.greedy]
    hostile = [asyncio.create_task(client) for client in [*clients, watch_memory(target, outcome)]]
    await asyncio.sleep(min(2.0, seconds / 4))  # they are all there
    await good_client(target, seconds, outcome)
    statuses, cut = dict(outcome.statuses), outcome.cut
    ended_s = await stopped(target)
    for one in hostile:
        one.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    return {
        "good": len(outcome.latencies_ms),
        "failed": len(outcome.failed),
        "failures": dict(Counter(outcome.failed)),
        "median_ms": round(median(outcome.latencies_ms), 1) if outcome.latencies_ms else None,
        "worst_ms": round(max(outcome.latencies_ms, default=0.0), 1),
        "greedy": statuses,
        "cut": cut,
        "start_mib": round(start_mib),
        "most_mib": round(outcome.most_mib),
        "log_bytes": target.log.stat().st_size,
        "stopped_s": round(ended_s, 2),
        "exit_status": target.process.returncode,
    }


async def stopped(target: Target) -> float:
    """Seconds from SIGTERM to the end."""
    start = time.perf_counter()
    target.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(120):
        while target.process.poll() is None:
            await asyncio.sleep(0.02)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("serve", "search"), default="serve")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--slow", type=int, default=2000)
    parser.add_argument("--client-timeout", type=float, default=30)
    given = parse_arguments(parser, seconds=3, slow=30, client_timeout=2)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = given.slow + 100
    if most != resource.RLIM_INFINITY and most < wanted:
        parser.error(f"--slow {given.slow}: this process may open {most} files; give fewer")
    with tempfile.TemporaryDirectory() as folder:
        timeout = ("--client-timeout", str(given.client_timeout))
        with started(Path(folder), given.server, *timeout) as target:
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (max(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0]), most)
            )
            print(json.dumps(asyncio.run(measure(target, given.seconds, given.slow))))


if __name__ == "__main__":
    main()
