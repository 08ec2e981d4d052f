"""Python in the sandbox, as a tool."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from tandem.config.base import MayChange, PositiveFloat, PositiveInt
from tandem.config.tools import ToolsConfig

if TYPE_CHECKING:
    from tandem.rollout.tools.base import CallLimits, ToolSet


class PythonToolConfig(ToolsConfig):
    """A tool `python(code)`: code of the policy runs in the sandbox, and what it defines stays for later calls of the
    trajectory. Code that passes a limit is ended with all that it has defined, and the policy is told. See
    docs/sandbox.md."""

    type: Literal["python"]
    containers_at_once: MayChange[PositiveInt] = 64
    """On one rank. A trajectory has one from its first call to its end; one that waits for its own is not slow."""
    cpu_s: MayChange[PositiveFloat] = 30.0
    """CPU time of a call, all its processes together. By the clock it has `limits.timeout_s`, also while the engine
    stands still."""
    memory_mib: PositiveInt = 1024
    """For each process of a container, and for all together."""
    processes: PositiveInt = 32
    """Beside the two that a container needs itself. Threads count."""
    file_mib: PositiveInt = 16
    """Largest file."""
    scratch_mib: PositiveInt = 64
    """The size of /tmp, the one writable place; it is memory, and stays for the trajectory."""
    packages: list[str] = []
    """Packages installed here, as pip names them, that code may import, with what they require."""
    run_untrusted_code_without_sandbox: bool = False
    """Resource limits are then all there is: code of the policy can read your keys and delete your files."""

    @model_validator(mode="before")
    @classmethod
    def _runs_here(cls, given: Any) -> Any:
        if isinstance(given, dict) and "sandbox_fusion_url" in given:
            raise ValueError(
                "sandbox_fusion_url: a SandboxFusion server keeps nothing from one call to the next; leave it out, and "
                "the code runs in bubblewrap on this machine"
            )
        return given  # pyright: ignore[reportUnknownVariableType]

    def tool_sets(self, limits: "CallLimits", result_characters: int) -> "list[ToolSet]":
        from tandem.rollout.tools.python_tool import PythonTools

        return [PythonTools(self, limits, result_characters)]
