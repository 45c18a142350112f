"""The ``penstock`` command, also as ``python -m penstock``; an interrupt while it is being loaded ends in one line."""

import sys

__all__ = ["main"]


def main() -> None:
    """Load and run the command."""
    try:
        from penstock.cli import main as command

        command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
