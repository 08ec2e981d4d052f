"""`python -m tandem` is the command line: for debuggers and editors, which start modules."""

import sys

from tandem.cli import main

if __name__ == "__main__":  # worker processes import it, too
    sys.exit(main())
