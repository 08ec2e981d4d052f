"""The mark of tests that need the sandbox of this machine, which is tried once a process."""

import pytest

from tandem.errors import UserError
from tandem.sandbox.build import make_sandbox


def _refusal() -> str:
    try:
        make_sandbox()
    except UserError as error:
        return str(error)
    return ""


_REFUSAL = _refusal()
sandboxed = pytest.mark.skipif(bool(_REFUSAL), reason=f"no sandbox on this machine: {_REFUSAL[:200]}")
