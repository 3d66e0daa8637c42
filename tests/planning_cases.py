"""Small random planning tasks, and the exact optimum of each by an independent MILP solver."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from tpplan.axes import minimum_units
from tpplan.config import parse_config
from tpplan.devices import Device
from tpplan.families import spec_from_config
from tpplan.memory import demands
from tpplan.model import ModelSpec
from tpplan.plan import Cache, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.costs import Demands


MIB = 2**20
INFEASIBLE = 2


@frozen
class Case:
    """A planning task."""

    model: ModelSpec
    devices: tuple[Device, ...]
    request: Request

    @property
    def wanted(self) -> Demands:
        """What the model costs."""
        return demands(self.model, self.request, len(self.devices))


def spec(**keys: object) -> ModelSpec:
    """A llama in 16 bits, small unless the keys say otherwise."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "head_dim": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "intermediate_size": 2048,
        "vocab_size": 4096,
        "max_position_embeddings": 2**20,
        "torch_dtype": "bfloat16",
    }
    return spec_from_config(parse_config(json.dumps(config | keys).encode(), "config.json"), "tiny")


def tiny_model(rng: random.Random) -> ModelSpec:
    """A model of a random family with a handful of units per axis."""
    kv = rng.choice((1, 2, 3, 4, 6, 8))
    heads = kv * rng.choice((1, 2, 4))
    config: dict[str, Any] = {
        "hidden_size": heads * 32,
        "head_dim": 32,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": rng.randint(1, 12),
        "intermediate_size": 128 * rng.randint(2, 24),
        "vocab_size": rng.choice((32 * rng.randint(20, 120), rng.randint(700, 4000))),
        "max_position_embeddings": 65536,
        "tie_word_embeddings": rng.random() < 0.3,
        "torch_dtype": rng.choice(("bfloat16", "float32")),
    }
    if rng.random() < 0.3:
        config |= {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts_per_tok": 2}
        config |= {"num_experts": 4, "moe_intermediate_size": 32 * rng.randint(2, 12), "decoder_sparse_step": 1}
        config |= {"shared_expert_intermediate_size": 32 * rng.randint(2, 12), "mlp_only_layers": [0]}
    return spec(**config)


def case(seed: int, layout: str, strategy: str) -> Case:
    """A random task: 1 to 8 uneven devices with little slack, sometimes too little."""
    rng = random.Random(seed)
    model = tiny_model(rng)
    tokens = rng.choice((64, 1024, 8192, 65536))
    request = Request(layout, strategy, Cache(rng.choice(("fp16", "q8", "q4")), tokens), 1, rng.choice((1, 64)), "idle")
    count = rng.randint(1, 8)
    wanted = demands(model, request, count)
    total = sum(
        d.split.bytes - d.split.workspace + d.kept.bytes + d.units * d.unit_cost().workspace for d in wanted.axes
    )
    weights = [rng.choice((1, 2, 3, 4, 6)) for _ in range(count)]
    slack = rng.choice((0.98, 1.01, 1.05, 1.2, 2))
    devices = []
    for i, weight in enumerate(weights):
        overhead = rng.choice((0, 2 * MIB, rng.randint(0, 4 * MIB)))
        room = int(total * slack * weight / sum(weights))
        budget = wanted.common.bytes + overhead + room + rng.randint(0, 1000)
        speed = rng.choice((300, 900, rng.randint(100, 4000))) * 10**9
        devices.append(
            Device(name=f"GPU {i}", budget_bytes=budget, overhead_bytes=overhead, bandwidth_bytes_per_second=speed)
        )
    return Case(model, tuple(devices), request)


def optimum(task: Case) -> float | None:
    """A lower bound of the strategy's measure, by HiGHS, within 0.02 % of the optimum; None if nothing fits.

    The measure is the largest share of a budget, or the longest time in seconds; every device in use counts the fixed
    costs of all axes.

    Variables: units x and a flag y per axis and device, a flag z per device in use, and the maximum t, in that order.
    """
    wanted, devices = task.wanted, task.devices
    axes, count = wanted.axes, len(devices)
    flags, uses, last = len(axes) * count, 2 * len(axes) * count, 2 * len(axes) * count + count
    rows: list[tuple[dict[int, float], float, float]] = []
    by_reads = task.request.strategy == "latency"
    for i, axis in enumerate(axes):
        least = minimum_units(axis.axis, axis.size, axis.unit)
        rows.append(({i * count + d: 1 for d in range(count)}, axis.units, axis.units))
        for d in range(count):
            x, y = i * count + d, flags + i * count + d
            rows.append(({x: 1, y: -axis.units}, -np.inf, 0))
            rows.append(({x: 1, y: -least}, 0, np.inf))
            rows.append(({y: 1, uses + d: -1}, -np.inf, 0))
    for d, device in enumerate(devices):
        used: dict[int, float] = {uses + d: wanted.common.bytes + device.overhead_bytes}
        load: dict[int, float] = {uses + d: wanted.common.reads if by_reads else used[uses + d]}
        for i, axis in enumerate(axes):
            unit, x, y = axis.unit_cost(), i * count + d, flags + i * count + d
            fixed = axis.fixed_cost()
            used |= {x: unit.bytes, y: fixed.bytes}
            load[x] = unit.reads if by_reads else unit.bytes
            load[uses + d] += fixed.reads if by_reads else fixed.bytes
        rows.append(({k: v / MIB for k, v in used.items()}, -np.inf, device.budget_bytes / MIB))
        speed = device.bandwidth_bytes_per_second / 1e6 if by_reads else device.budget_bytes
        rows.append(({last: -1, **{k: v / speed for k, v in load.items()}}, -np.inf, 0))
    matrix = lil_array((len(rows), last + 1))
    for r, (entries, _, _) in enumerate(rows):
        for column, value in entries.items():
            matrix[r, column] = value
    upper = np.ones(last + 1)
    upper[:flags] = np.repeat([axis.units for axis in axes], count)
    upper[last] = np.inf
    objective = np.zeros(last + 1)
    objective[last] = 1
    answer = milp(
        objective,
        constraints=LinearConstraint(matrix.tocsr(), [lo for _, lo, _ in rows], [hi for _, _, hi in rows]),
        bounds=Bounds(np.zeros(last + 1), upper),
        integrality=np.array([1] * last + [0]),
        options={"mip_rel_gap": 2e-4, "time_limit": 60},
    )
    assert answer.x is not None or answer.status == INFEASIBLE, answer.message
    return None if answer.x is None else float(answer.mip_dual_bound) / (1e6 if by_reads else 1)


def measure(task: Case, bounds: Sequence[Sequence[int]]) -> float:
    """The same measure of a plan: every device in use counts the fixed costs of all axes."""
    wanted, by_reads = task.wanted, task.request.strategy == "latency"
    fixed = sum((axis.fixed_cost() for axis in wanted.axes), wanted.common)
    found = []
    for d, device in enumerate(task.devices):
        held = [(axis, -(-(row[d + 1] - row[d]) // axis.unit)) for axis, row in zip(wanted.axes, bounds, strict=True)]
        if not any(units for _, units in held):
            continue
        load = sum(((axis.unit_cost().part(units, 1)) for axis, units in held), fixed)
        if by_reads:
            found.append(load.reads / device.bandwidth_bytes_per_second)
        else:
            found.append((load.bytes + device.overhead_bytes) / device.budget_bytes)
    return max(found)
