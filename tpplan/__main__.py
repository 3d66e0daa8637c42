"""Where ``tpplan`` and ``python -m tpplan`` start, light, for Ctrl-C to end them quietly while they import the rest."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command, see :func:`tpplan.cli.main.main`, and return its exit code; after Ctrl-C that of shells."""
    try:
        from tpplan.cli import main as cli  # noqa: PLC0415

        return cli.main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
