"""Requests to plan() that have no meaning."""

from __future__ import annotations

from typing import Any, cast

import pytest
from attrs import evolve

from tests.planning_cases import spec
from tpplan.core.device import Device
from tpplan.core.plan import Cache
from tpplan.errors import RequestError
from tpplan.planner.plan import plan

GIB = 2**30
ONE = Device(name="GPU", budget_bytes=GIB)


@pytest.mark.parametrize(
    ("asked", "message", "hint"),
    [
        ({"layout": "gahter"}, "unknown layout 'gahter', expected reduce, gather", "did you mean gather?"),
        ({"strategy": "latencies"}, "unknown strategy 'latencies'", "did you mean latency?"),
        ({"cache": Cache("fp-16")}, "unknown cache kind 'fp-16', expected fp16, fp8, q8, q6, q4", "did you mean fp16?"),
        ({"cache": Cache("int3")}, "unknown cache kind 'int3'", "choose one"),
        ({"kv": "replicated"}, "unknown kv mode 'replicated', expected idle, replicate", "did you mean replicate?"),
        ({"batch": 0}, "batch is 0, expected a whole number from 1", ""),
        ({"batch": True}, "batch is True", ""),
        ({"max_rows": 2.0}, "max_rows is 2.0", ""),
        ({"max_rows": 2**24 + 1}, "max_rows is 16777217", ""),
        ({"batch": 9, "max_rows": 8}, "max_rows 8 is less than the 9 sequences", "at least 9"),
        ({"cache": Cache("fp16", -1)}, "cache tokens is -1", ""),
        ({"cache": Cache("fp16", True)}, "cache tokens is True", ""),
        ({"cache": Cache("fp16", 3), "batch": 4}, "3 cache tokens are less than one for each of 4 sequences", ""),
        (
            {"cache": Cache("fp16", 8200), "batch": 2},
            "8200 cache tokens for 2 sequences, 4100 tokens per sequence, are more than the 4096 that tiny",
            "at most 4096 per sequence",
        ),
        ({"strategy": "latency"}, "needs every device's bandwidth, unknown for device 0 (GPU)", "bandwidth_bytes_per"),
        ({"devices": "24GiB"}, "a device is '2', expected a Device", "tpplan.parse_devices"),
        ({"devices": ("24GiB",)}, "a device is '24GiB', expected a Device", "tpplan.parse_devices"),
        ({"cache": "q8"}, "the cache is 'q8', expected a Cache", 'tpplan.Cache("q8", tokens='),
        ({"model": "models/llama"}, "the model is 'models/llama', expected a ModelSpec", "tpplan.read_model"),
        ({"devices": ()}, "0 devices, expected 1 to 4096", "2x24GiB"),
        ({"devices": (ONE,) * 4097}, "4097 devices", "2x24GiB"),
        ({"devices": (ONE,) * 5, "strategy": "latency"}, "0 (GPU), 1 (GPU), 2 (GPU) and 2 more", ""),
        ({"devices": (evolve(ONE, budget_bytes=0),)}, "budget_bytes of device 0 (GPU) is 0", ""),
        (
            {"devices": (ONE, evolve(ONE, budget_bytes=cast("int", 1.5e9)))},
            "budget_bytes of device 1 (GPU) is 1500000000.0",
            "",
        ),
        ({"devices": (evolve(ONE, overhead_bytes=-1),)}, "overhead_bytes of device 0 (GPU) is -1", ""),
        ({"devices": (evolve(ONE, bandwidth_bytes_per_second=-1),)}, "bandwidth_bytes_per_second of device 0", ""),
    ],
)
def test_requests_without_meaning_are_refused(asked: dict[str, Any], message: str, hint: str) -> None:
    """One sentence with the names and numbers, and what to ask for instead."""
    asked = {"model": spec(max_position_embeddings=4096), "devices": (ONE,), "cache": Cache("fp16", 512), **asked}
    with pytest.raises(RequestError) as error:
        plan(**asked)
    assert message in error.value.message
    assert hint in error.value.hint
