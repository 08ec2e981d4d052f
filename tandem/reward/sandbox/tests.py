"""A solution and its tests -> which of them pass."""

import inspect
import json
import secrets
from collections.abc import Sequence
from functools import cache

from tandem.errors import UserError
from tandem.reward.sandbox import harness
from tandem.reward.sandbox.base import Limits, Sandbox
from tandem.reward.sandbox.local import LocalSandbox
from tandem.reward.sandbox.remote import SandboxFusion


@cache
def make_sandbox(
    sandbox_fusion_url: str | None = None, run_untrusted_code_without_sandbox: bool = False, **limits: float
) -> Sandbox:
    """The server if one is named, else bubblewrap; `limits` are fields of Limits. Raises UserError without either."""
    if unknown := limits.keys() - Limits.__annotations__.keys():
        raise UserError(f"the sandbox has no {sorted(unknown)}; its limits are {', '.join(Limits.__annotations__)}")
    if sandbox_fusion_url:
        return SandboxFusion(sandbox_fusion_url, Limits(**limits))  # type: ignore[arg-type]
    return LocalSandbox(Limits(**limits), contained=not run_untrusted_code_without_sandbox)  # type: ignore[arg-type]


def run_tests(
    sandbox: Sandbox, solution: str, tests: Sequence[str], test_timeout_s: float = 10.0
) -> tuple[list[str], str | None]:
    """For each test the reason why it failed, `""` if it passed; and what the run as a whole was stopped for.

    Each test is Python source that raises where the solution is wrong; it runs in the solution's namespace, after it.
    """
    total_s = sandbox.limits.timeout_s - 1
    secret = secrets.token_hex(16)
    program = f"{inspect.getsource(harness)}\nmain({solution!r}, {list(tests)!r}, {test_timeout_s}, {total_s})\n"
    run = sandbox.run(program, secret + "\n")
    _, found, verdicts = run.stdout.rpartition(secret)
    if found and not run.stopped:
        return json.loads(verdicts), None
    stopped = run.stopped or f"ended with exit status {run.exit_code}: {run.stderr[-300:]}"
    return [f"the run {stopped}"] * len(tests), stopped
