"""What lasts: random operations without end, interrupts anywhere, or processes of which one is lost.

Run it as ``python -m benchmarks.soak [operations|interrupts|lost] ...``; without a word, it is operations.
"""

from __future__ import annotations

import sys
from importlib import import_module

#: The words, and the module of each, which has a ``main``; only the one that is asked for is imported.
MODULES = {"operations": "operations", "interrupts": "interrupts", "lost": "lost_process"}


def main() -> None:
    """Run what the first word says with the other arguments."""
    arguments = sys.argv[1:]
    word = "operations"
    if arguments and not arguments[0].startswith("-"):
        word = arguments.pop(0)
    if word not in MODULES:
        print(f"error: soak has no {word!r}\nhint: it has {', '.join(MODULES)}", file=sys.stderr)
        sys.exit(2)
    import_module(f"benchmarks.reliability.{MODULES[word]}").main(arguments)


if __name__ == "__main__":
    main()
