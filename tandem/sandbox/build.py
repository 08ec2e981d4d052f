"""The sandbox that arguments ask for."""

from collections.abc import Sequence
from functools import cache

from tandem.errors import UserError
from tandem.sandbox.base import Limits, Sandbox
from tandem.sandbox.local import LocalSandbox
from tandem.sandbox.remote import SandboxFusion
from tandem.sandbox.visible_packages import find_packages


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
