"""Where the command starts, also as `python -m tandem`: for debuggers and editors, which start modules."""

import signal
import sys


def main() -> int:
    """The command line. Ctrl-C ends it without a traceback from its first import on, and once more while it ends."""
    try:
        from tandem.cli import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted before anything was started", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":  # worker processes import it, too
    sys.exit(main())
