"""Programs on a SandboxFusion server (ByteDance, github.com/bytedance/SandboxFusion): POST /run_code."""

import math
from collections.abc import Sequence

from tandem.errors import TandemError
from tandem.http import post_json
from tandem.sandbox.base import ExecutionResult, Limits


class SandboxFusion:
    """What the server contains is its operator's affair; of our limits it gets time and memory."""

    def __init__(self, url: str, limits: Limits) -> None:
        self.limits = limits
        self.modules: Sequence[str] = ()
        self._url = f"{url.rstrip('/')}/run_code"

    def run(self, program: str, stdin: str = "", timeout_s: float = math.inf) -> ExecutionResult:
        timeout_s = min(timeout_s, self.limits.timeout_s)
        limits = {"run_timeout": timeout_s, "memory_limit_MB": self.limits.memory_mib}
        body = {"language": "python", "code": program, "stdin": stdin, **limits}
        answer = post_json(self._url, body, timeout_s=timeout_s + 30)
        result = answer.get("run_result")
        if answer.get("status") == "SandboxError" or not isinstance(result, dict):
            raise TandemError(f"{self._url} could not run a program: {answer.get('message') or answer}")
        late = result["status"] == "TimeLimitExceeded"
        stopped = f"took longer than {timeout_s:.3g} s" if late else None
        code, seconds = result.get("return_code") or 0, result.get("execution_time") or 0.0
        return ExecutionResult(code, result.get("stdout") or "", result.get("stderr") or "", seconds, stopped)
