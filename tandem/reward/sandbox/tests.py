"""A solution and its tests -> which of them pass."""

import inspect
import json
import re
import secrets
from collections.abc import Sequence
from functools import cache

from tandem.errors import UserError
from tandem.reward.sandbox import harness, proxies, wire
from tandem.reward.sandbox.base import Limits, Sandbox
from tandem.reward.sandbox.local import LocalSandbox
from tandem.reward.sandbox.packages import find_packages
from tandem.reward.sandbox.remote import SandboxFusion


def make_sandbox(
    sandbox_fusion_url: str | None = None,
    run_untrusted_code_without_sandbox: bool = False,
    packages: Sequence[str] = (),
    **limits: float,
) -> Sandbox:
    """The server if one is named, else bubblewrap; made once for the same arguments.

    `packages` are names of installed distributions that programs may import; `limits` are fields of Limits. Raises
    UserError where there is neither server nor bubblewrap, and for packages that are not installed.
    """
    if unknown := limits.keys() - Limits.__annotations__.keys():
        raise UserError(f"the sandbox has no {sorted(unknown)}; its limits are {', '.join(Limits.__annotations__)}")
    if isinstance(packages, str):
        raise UserError(f"packages: {packages!r} is no list; write [{packages}]")
    return _make(sandbox_fusion_url, run_untrusted_code_without_sandbox, tuple(packages), Limits(**limits))  # type: ignore[arg-type]


@cache
def _make(url: str | None, without_sandbox: bool, packages: tuple[str, ...], limits: Limits) -> Sandbox:
    if url and packages:
        raise UserError("packages: a SandboxFusion server has its own; leave them out")
    if url:
        return SandboxFusion(url, limits)
    return LocalSandbox(limits, contained=not without_sandbox, packages=find_packages(packages))


def run_tests(
    sandbox: Sandbox, solution: str, tests: Sequence[str], test_timeout_s: float = 10.0, preamble: str = ""
) -> tuple[list[str], str | None]:
    """For each test the reason why it failed, `""` if it passed; and what the run as a whole was stopped for.

    Each test is Python source that raises where the solution is wrong. It runs in a process of its own, in which the
    names of the solution stand for what the solution's process has (see `proxies.py`). The preamble runs before both.
    """
    secret = secrets.token_hex(16)
    task = {"preamble": preamble, "solution": solution, "tests": len(tests), "packages": sandbox.modules}
    times = {"test_timeout_s": test_timeout_s, "total_s": sandbox.limits.timeout_s - 1}
    run = sandbox.run(PROGRAM, "".join(map(wire.framed, [task | times, *tests, secret])))
    _, found, verdicts = run.stdout.rpartition(secret)
    if found and not run.stopped:
        return json.loads(verdicts), None
    stopped = run.stopped or f"ended with exit status {run.exit_code}: {run.stderr[-300:]}"
    return [f"the run {stopped}"] * len(tests), stopped


PROGRAM = (
    "\n".join(
        re.sub(r"^from tandem.*\n", "", inspect.getsource(module), flags=re.MULTILINE)
        for module in (wire, proxies, harness)
    )
    + "\nmain()\n"
)
"""One text, for in there is nothing of ours to import."""
