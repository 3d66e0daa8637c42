"""How many examples Hypothesis tries where a test says it: fewer in a profile that tries fewer by default."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100


def examples(count: int) -> int:
    """Return how many examples to try of so many; the profile ``quick`` of conftest.py tries a part of all."""
    return max(1, count * settings().max_examples // _USUAL)
