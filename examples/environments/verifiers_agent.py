"""One run of an agent: a rollout of verifiers, which verifiers_server.py plays and scores.

conversation: {environment: {type: endpoint, command: "python verifiers_agent.py http://127.0.0.1:8001"}}

The row's `seed` is the number of the task, so `tandem data episodes` writes the rows.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request


def main() -> None:
    row = json.load(sys.stdin)
    access = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"task": row["seed"], **access}).encode()
    try:
        with urllib.request.urlopen(f"{sys.argv[1]}/play", body) as answer:
            print(answer.read().decode())
    except urllib.error.HTTPError as error:
        sys.exit(f"verifiers: {error.read().decode()}")
    except urllib.error.URLError as error:
        sys.exit(f"no verifiers_server.py answers at {sys.argv[1]}: {error.reason}")


if __name__ == "__main__":
    main()
