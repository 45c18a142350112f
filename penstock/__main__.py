"""The ``penstock`` command, also as ``python -m penstock``; an interrupt while it is being loaded ends in one line."""

import atexit
import gc
import os
import re
import sys

from penstock.host.start import command_begins

__all__ = ["main"]


def main() -> None:
    """Load and run the command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started the command
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, for as long as the process lives
    os.environ.pop(
        "MPLBACKEND", None
    )  # pictures are written to files; a backend that is not there would end in a traceback
    threads = os.environ.get("NUMBA_NUM_THREADS", "1")
    if not re.fullmatch(
        r"\s*0*[1-9]\d{0,4}\s*", threads, re.ASCII
    ):  # Numba refuses it with a traceback while it is imported
        print(f"error: NUMBA_NUM_THREADS must be a number of threads, 1 or more, not {threads!r}", file=sys.stderr)
        sys.exit(2)
    command_begins()
    # Else the collector looks once more through all that was imported before the process ends, which takes half a second.
    atexit.register(gc.freeze)
    try:
        from penstock.commands.app import main as command

        command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
