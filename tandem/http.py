"""JSON over HTTP, tried again while it may help; several requests at once."""

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from tandem.errors import TandemError

T = TypeVar("T")
R = TypeVar("R")

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)


def post_json(
    url: str, body: Any, *, timeout_s: float, attempts: int = 4, headers: Mapping[str, str] | None = None
) -> Any:
    """The answer to `body`. Waits 1, 2, 4 … s, or as `Retry-After` asks, between attempts; then raises TandemError."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    for attempt in range(1, attempts + 1):
        wait_s = 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            problem = f"status {error.code}: {error.read(500).decode(errors='replace')}"
            asked = error.headers.get("Retry-After", "")
            wait_s = float(asked) if asked.isdigit() else wait_s
            if error.code not in RETRIED:
                break
        except (OSError, ValueError) as error:
            problem = str(error)
        if attempt < attempts:
            time.sleep(wait_s)
    raise TandemError(f"{url} gave no answer in {attempt} of {attempts} attempts; the last: {problem}")


class RequestThreads:
    """Calls that wait for a server, at most `count` at once; a thread ends where no call is waiting for it.

    The end of the process waits for the threads of a ThreadPoolExecutor, and so for servers that do not answer; these
    threads are left behind.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running = 0

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """What the call returns or raises; one that has not begun can be cancelled."""
        future: Future[R] = Future()
        with self._lock:
            self._waiting.append((future, partial(function, *arguments)))
            starts = self._running < self._count
            self._running += starts
        if starts:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """What the calls return, in the order of the items. Raises what the first one of them that fails raises; calls
        that have not begun are then left out."""
        futures = [self.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                future, call = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                future.set_exception(error)
