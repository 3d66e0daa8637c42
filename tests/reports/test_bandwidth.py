"""What memory bandwidths allow: bytes ÷ bandwidth, by hand."""

from __future__ import annotations

import pytest

from tests.planning_cases import spec
from tpplan.core.device import Device
from tpplan.core.plan import Cache, DeviceMemory
from tpplan.planner.plan import plan
from tpplan.reports.show import faster_by_latency, most_tokens_per_second

GIB = 2**30


def device(gibibytes: int, gigabytes: int) -> Device:
    """A device by its memory and its bandwidth a second."""
    return Device(name="x", budget_bytes=gibibytes * GIB, bandwidth_bytes_per_second=gigabytes * 10**9)


@pytest.mark.parametrize(
    ("reads", "gigabytes", "batch", "rate"),
    [
        ((4, 4), (100, 200), 1, 25),  # the slower one decides
        ((4, 4), (100, 200), 3, 75),  # what is read once serves three sequences
        ((3, 0), (100, 1), 1, 33),  # an idle device does not count
        ((0, 0), (1, 1), 1, 0),
    ],
)
def test_the_slowest_device_decides(reads: tuple[int, int], gigabytes: tuple[int, int], batch: int, rate: int) -> None:
    """10^9 bytes to read at so many 10^9 bytes a second, rounded down."""
    memory = [DeviceMemory(i, 0, 0, 0, 0, 0, size * 10**9) for i, size in enumerate(reads)]
    assert most_tokens_per_second(memory, [device(24, g) for g in gigabytes], batch) == rate


def test_only_a_clear_gain_is_told() -> None:
    """A fast small card beside a slow large one gains; equal cards, unknown bandwidths and other strategies do not."""
    model, cache = spec(num_hidden_layers=16, hidden_size=2048, intermediate_size=8192), Cache("q8", 4096)
    uneven, equal = [device(24, 300), device(8, 900)], [device(16, 600)] * 2
    rates = faster_by_latency(plan(model, uneven, cache=cache), model)
    assert rates
    assert 5 * rates[1] >= 6 * rates[0] > 0
    fast = plan(model, uneven, cache=cache, strategy="latency")
    reached = most_tokens_per_second(fast.memory, fast.devices)
    assert 0.97 * reached <= rates[1] <= reached * 1.001
    assert faster_by_latency(fast, model) is None
    assert faster_by_latency(plan(model, equal, cache=cache), model) is None
    unknown = [Device(name="x", budget_bytes=24 * GIB), uneven[1]]
    assert faster_by_latency(plan(model, unknown, cache=cache), model) is None
