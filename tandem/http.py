"""JSON over HTTP, tried again while it may help."""

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from tandem.errors import TandemError

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
