"""The planner against an exact MILP solver, on more than a hundred random tasks and on models of true shapes."""

from __future__ import annotations

import random

import pytest
from attrs import evolve
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.planner.integer_program import Program, measures
from tests.planning_cases import Case, case, shape, spec
from tpplan.core.axes import Axis, slices_of
from tpplan.core.device import Device
from tpplan.core.plan import Cache, Request
from tpplan.hardware.spec import parse_devices
from tpplan.planner.attempt import attempt
from tpplan.planner.ledger import demands
from tpplan.planner.plan import plan

GIB, MIB = 2**30, 2**20
_PAIRS = [("reduce", "balanced"), ("reduce", "latency"), ("gather", "latency"), ("gather", "balanced")]
#: How much better a solution may be, as far as was promised.
TOLERANCE = {"balanced": 0.001, "latency": 0.05}
#: Part of what the fullest device has free that ``balanced`` may give for attention on more devices.
SPARE = 1 / 128
#: Each seed's models and devices have both layouts, and both strategies.
TASKS = [(seed, *pair) for seed in range(62) for pair in _PAIRS[seed % 2 :: 2]]
#: Models with a price for holding any of an axis: a latent cache, an indexer, routers, tables, a linear state.
SHAPES = ("deepseek_v2", "glm4_moe_lite", "deepseek_v32", "qwen3_next", "gemma3_text")


def true_case(name: str, seed: int, strategy: str = "balanced") -> Case:
    """A random task for a model of a true shape: up to 6 cards, from too little memory to plenty."""
    rng = random.Random(f"{name} {seed}")
    model, count = shape(name), rng.randint(2, 6)
    cache = Cache(rng.choice(("fp16", "q8")), min(model.max_context, rng.choice((4096, 32768, 163840))))
    request = Request(rng.choice(("reduce", "gather")), strategy, cache, 1, 512, "idle")
    wanted = demands(model, request, count)
    total = sum(d.split.bytes + d.kept.bytes for d in wanted.axes)
    weights = [rng.choice((8, 11, 12, 16, 24, 32, 48)) for _ in range(count)]
    slack = rng.choice((0.99, 1.02, 1.2, 1.6))
    devices = [
        Device(
            name=f"{weight} GiB",
            budget_bytes=int(total * slack * weight / sum(weights)) + 512 * MIB + wanted.common.bytes,
            overhead_bytes=512 * MIB,
            bandwidth_bytes_per_second=rng.choice((288, 360, 936, 1792)) * 10**9,
        )
        for weight in weights
    ]
    return Case(model, tuple(devices), request)


def assert_near_the_optimum(task: Case) -> None:
    """Where there is no plan, HiGHS has no solution; where there is one, none is better by more than the tolerance."""
    program, found = Program.of(task), attempt(task.model, task.devices, task.request)
    if found is None or found.lacking:
        assert not program.is_solvable()
    else:
        reached = measures(task, found.bounds)
        assert program.allows(found.bounds, reached)
        least = sum(reached) / (1 + TOLERANCE[task.request.strategy])
        if task.request.strategy == "balanced":
            least = min(least, (sum(reached) - SPARE) / (1 - SPARE))
        assert not program.is_solvable(least)


def usual(gpus: str) -> tuple[Device, ...]:
    """Return devices with 512 MiB of overhead each, for which the expected shares were computed."""
    return tuple(evolve(device, overhead_bytes=2**29) for device in parse_devices(gpus))


@pytest.mark.parametrize(("seed", "layout", "strategy"), TASKS)
def test_a_plan_exists_if_any_does_and_none_is_much_better(seed: int, layout: str, strategy: str) -> None:
    """On small models with coarse units and hardly any slack, for both strategies."""
    assert_near_the_optimum(case(seed, layout, strategy))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_fixed_prices_are_paid_only_where_they_are_due(name: str, seed: int) -> None:
    """On models of true shapes: the largest share of a budget is the least there is, to within what was promised."""
    assert_near_the_optimum(true_case(name, seed))


@pytest.mark.parametrize(("layout", "strategy"), _PAIRS)
def test_the_solver_finds_what_the_planner_finds(layout: str, strategy: str) -> None:
    """With the measure of a plan as the limit, HiGHS has a solution; with less than it, the plan is none."""
    task = case(7, layout, strategy)
    program, found = Program.of(task), attempt(task.model, task.devices, task.request)
    assert found is not None
    assert not found.lacking
    reached = measures(task, found.bounds)
    assert program.is_solvable(sum(reached) * (1 + 1e-6))
    assert not program.allows(found.bounds, [each * (1 - 1e-3) for each in reached])


@pytest.mark.parametrize(
    ("name", "gpus", "most"),
    [
        ("deepseek_v2", "4x12GiB", 0.761),  # its cut for 4x9.5GiB, in 12 GiB each
        ("glm4_moe_lite", "4x24GiB", 0.721),
    ],
)
def test_a_latent_cache_is_held_by_few_devices(name: str, gpus: str, most: float) -> None:
    """Each device with attention holds the whole of it, so one does, and no device is fuller than the others."""
    found = plan(shape(name), usual(gpus))
    assert max(e.used_bytes / d.budget_bytes for e, d in zip(found.memory, found.devices, strict=True)) <= most
    assert len(found.slices(Axis.KV_HEADS)) == 1


@pytest.mark.parametrize(("gpus", "holders"), [("4x24GiB", 4), ("2x48GiB,8GiB", 3), ("3x48GiB,2x8GiB", 5)])
def test_all_get_attention_where_that_costs_next_to_nothing(gpus: str, holders: int) -> None:
    """A device whose part of the memory is less than a head has one, if the fullest is not fuller by 0.1 %."""
    found = plan(shape("gemma3_text"), usual(gpus), cache=Cache("q8", 1024), max_rows=64)
    assert (
        len({s.device for split in found.splits if split.axis == Axis.KV_HEADS for s in slices_of(split.bounds)})
        == holders
    )


def test_tables_of_attention_are_no_reason_to_give_all_of_it_to_one() -> None:
    """Llama 3.2 1B for 32768 tokens on 24 and 16 GiB: 8 MiB of tables on both are 0.02 % of the memory.

    Alone the first would hold 8 of 8 heads; both hold heads, and the fullest one is fuller by less than that.
    """
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16}
    model = spec(**sizes, vocab_size=128256, tie_word_embeddings=True)
    tables = 2 * 32768 * 64 * 2
    devices = usual("24GiB,16GiB")
    found = plan(model, devices, cache=Cache("fp16", 32768))
    assert len(found.slices(Axis.KV_HEADS)) == 2
    used = sum(e.used_bytes for e in found.memory) - tables  # one of both would have to have them in any case
    assert max(e.used_bytes / d.budget_bytes for e, d in zip(found.memory, devices, strict=True)) < (
        used / sum(d.budget_bytes for d in devices) + (tables / (24 * GIB))
    )


@settings(max_examples=examples(15), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.sampled_from(SHAPES), st.integers(0, 10**6), st.data())
def test_more_memory_never_makes_a_fuller_card(name: str, seed: int, data: st.DataObject) -> None:
    """With more memory on a device, or a device more, the fullest one is no fuller, to within what was promised."""
    task = true_case(name, seed)
    before = attempt(task.model, task.devices, task.request)
    assume(before is not None and not before.lacking)
    assert before is not None
    i = data.draw(st.integers(0, len(task.devices) - 1))
    more = data.draw(st.integers(1, 8 * GIB))
    larger = evolve(task.devices[i], budget_bytes=task.devices[i].budget_bytes + more)
    others = data.draw(
        st.sampled_from(((*task.devices[:i], larger, *task.devices[i + 1 :]), (*task.devices, task.devices[i])))
    )
    after = attempt(task.model, others, task.request)
    assert after is not None
    assert not after.lacking
    shares = [
        max(e.used_bytes / d.budget_bytes for e, d in zip(each.memory, each.devices, strict=True))
        for each in (before, after)
    ]
    assert shares[1] <= shares[0] + max(shares[0] * TOLERANCE["balanced"], (1 - shares[0]) * SPARE)
