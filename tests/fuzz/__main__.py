"""Fuzz one target with atheris: ``python -m tests.fuzz plans -max_total_time=60``, and other options of libFuzzer."""

from __future__ import annotations

import sys

import atheris


def main() -> None:
    """Run the target that the first argument names."""
    with atheris.instrument_imports(include=["tpplan"]):
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415 (instrumented as it is imported)
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"name one of {', '.join(TARGETS)}")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
