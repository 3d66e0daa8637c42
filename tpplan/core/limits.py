"""The bounds of what a plan may say: least and most numbers, and the forms of texts."""

from __future__ import annotations

from tpplan.core.device import MEASURED, Device
from tpplan.core.model import NotPlanned
from tpplan.core.plan import (
    Cache,
    DeviceMemory,
    PlanModel,
    Request,
    Reserve,
    Split,
)
from tpplan.core.speed import DeviceTime, LinkSpeed, Pass

#: The least value of every whole number; the largest is 2^63 - 1 for all.
LEAST: dict[type, dict[str, int]] = {
    PlanModel: {"layers": 1},
    Cache: {"tokens": 1},
    NotPlanned: {"bytes": 0},
    Request: {"batch": 1, "max_rows": 1, "context": 0},
    Reserve: {"bytes": 1, "device": -1},
    Device: {
        "budget_bytes": 1,
        **dict.fromkeys(("overhead_bytes", "bandwidth_bytes_per_second", *MEASURED), 0),
    },
    Split: {"size": 1, "unit": 1, "width": 1, "replicas": 1},
    DeviceMemory: dict.fromkeys(
        (
            *("weights_bytes", "cache_bytes", "workspace_bytes", "overhead_bytes", "free_bytes", "reads_bytes"),
            *("reserved_bytes", "draft_bytes"),
        ),
        0,
    ),
    LinkSpeed: {"first": 0, "second": 1, "latency_ns": 1, "bytes_per_second": 1, "middle_ns": 0},
    Pass: {"rows": 1, "without_cache_ns": 0, "total_ns": 0},
    DeviceTime: dict.fromkeys(("device", "weights_ns", "cache_ns", "exchanges_ns", "rest_ns"), 0),
}


MOST = 2**63 - 1


DTYPES = ("float32", "float16", "bfloat16")


FINGERPRINT = r"sha256:[0-9a-f]{64}"


CAPABILITY = r"([1-9][0-9]?\.[0-9])?"


LONGEST_NAME = 200
