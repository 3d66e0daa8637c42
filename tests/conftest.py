"""What all tests share: Hypothesis profiles, and skipping what this machine has no GPUs for."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = (HealthCheck.too_slow,)  # one slow core must not turn a green run red

settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("ci", deadline=None, suppress_health_check=_SLOW_IS_FINE, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def _gpu_count() -> int:
    import torch  # noqa: PLC0415 - three seconds that only GPU tests pay

    return torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that are marked ``gpu`` or ``multi_gpu`` where there are too few GPUs."""
    needs = {item: 2 if item.get_closest_marker("multi_gpu") else 1 for item in items if _wants_gpu(item)}
    have = _gpu_count() if needs else 0
    for item, count in needs.items():
        if have < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} GPUs, found {have}"))


def _wants_gpu(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("gpu", "multi_gpu"))
