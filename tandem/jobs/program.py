"""What `tandem COMMAND` does around a run, for a program of the user's own."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from tandem.config.tree import ModelsConfig, RunConfig
from tandem.errors import TandemError, UserError, with_notes
from tandem.jobs.preflight import load_checked

Config = TypeVar("Config", bound=ModelsConfig)


def run_program(kind: type[Config], main: Callable[[Config], object]) -> NoReturn:
    """Call `main` with the configuration that the command line gives, `CONFIG.yaml [section.key=value …]`, and exit.

    `--help` prints the usage and what the program's own docstring says.
    An error of Tandem's ends the program with one message and without a traceback: exit status 2 for the user's mistake
    (UserError), all of those in the configuration and its files together, 1 for any other. Anything else that `main`
    raises is its own affair.
    """
    program, *arguments = sys.argv
    name = Path(program).name
    usage = f"usage: {name} CONFIG.yaml [section.key=value …]"
    if arguments[:1] in (["--help"], ["-h"]):
        print(usage, inspect.getdoc(sys.modules["__main__"]) or "", sep="\n\n")
        sys.exit(0)
    try:
        if not arguments:
            raise UserError(f"no configuration given; {usage}")
        path, *overrides = arguments
        main(load_checked(kind, Path(path), overrides, claims_run_dir=issubclass(kind, RunConfig)))
    except TandemError as error:
        print(f"{name}: {with_notes(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    sys.exit(0)
