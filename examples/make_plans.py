"""Make the plans in examples/plans again: seven models, each for several sets of GPUs.

Run it as ``python examples/make_plans.py``; a test tells when the committed plans are no longer what it makes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tpplan

HERE = Path(__file__).parent

#: Model; GPUs; what else is asked.
EXAMPLES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Llama-3.1-8B", "RTX4090,RTX3060", {"cache": tpplan.Cache("q8", 32768)}),
    ("Llama-3.1-8B", "2xRTX3060", {"cache": tpplan.Cache("q4", 16384)}),
    ("Llama-3.1-8B", "RTX3090,RTX3060,RTX4060Ti-16GB", {"cache": tpplan.Cache("fp16", 32768), "strategy": "latency"}),
    ("Llama-3.1-70B", "2xRTX5090,4xRTX4090", {"cache": tpplan.Cache("q8", 32768)}),
    ("Llama-3.1-70B", "4xA100-80GB", {"cache": tpplan.Cache("fp16", 4 * 32768), "batch": 4}),
    ("Llama-3.1-70B", "H100:72GiB,2xA100-40GB,RTX4090", {"cache": tpplan.Cache("q8", 16384), "strategy": "latency"}),
    ("Qwen2.5-7B", "RTX4090,RTX3060", {"cache": tpplan.Cache("fp16", 32768)}),
    ("Qwen2.5-7B", "3xRTX3060", {"cache": tpplan.Cache("q8", 32768)}),
    ("Qwen2.5-7B", "6xRTX3060", {"cache": tpplan.Cache("fp16", 32768), "kv": "replicate"}),
    ("Mixtral-8x7B", "2xA100-80GB", {"cache": tpplan.Cache("fp16", 32768)}),
    ("Mixtral-8x7B", "4xRTX4090,RTX3090", {"cache": tpplan.Cache("q8", 32768)}),
    ("Mixtral-8x7B", "A100-40GB,3xRTX3090", {"cache": tpplan.Cache("q8", 16384), "layout": "gather"}),
    ("gpt-oss-20b", "RTX3060,RTX4060", {"cache": tpplan.Cache("fp16", 131072)}),
    ("gpt-oss-20b", "2xRTX4060Ti-16GB", {"cache": tpplan.Cache("fp16", 8 * 32768), "batch": 8}),
    ("gpt-oss-20b", "RTX4090,RTX3060", {"cache": tpplan.Cache("fp8", 131072), "strategy": "latency"}),
    ("Qwen3-Next-80B-A3B", "2xH200", {"cache": tpplan.Cache("fp16", 16 * 65536), "batch": 16}),
    ("Qwen3-Next-80B-A3B", "3xA100-80GB", {"cache": tpplan.Cache("fp16", 262144)}),
    ("Qwen3-Next-80B-A3B", "H100,4xRTX5090", {"cache": tpplan.Cache("q8", 131072), "strategy": "latency"}),
    ("DeepSeek-V3", "8xH200", {"cache": tpplan.Cache("fp16", 131072)}),
    ("DeepSeek-V3", "8xMI300X", {"cache": tpplan.Cache("fp16", 4 * 131072), "batch": 4}),
    ("DeepSeek-V3", "6xH200,2xMI300X", {"cache": tpplan.Cache("fp8", 65536), "strategy": "latency"}),
)


def examples() -> dict[Path, tpplan.SplitPlan]:
    """Return every example plan with the path of its file."""
    plans = {}
    for model, gpus, options in EXAMPLES:
        spec = tpplan.read_model(HERE / "models" / model)
        name = gpus.replace(":", "-").replace(",", "+")
        plans[HERE / "plans" / model / f"{name}.json"] = tpplan.plan(spec, tpplan.parse_devices(gpus), **options)
    return plans


if __name__ == "__main__":
    for path, plan in examples().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
        print(path.relative_to(HERE.parent))
