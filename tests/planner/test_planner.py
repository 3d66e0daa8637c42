"""plan(): the properties that every plan has, whatever the model, the devices and the request."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.planner.memory_models import model as example
from tests.planning_cases import MIB, Case, case, spec
from tpplan.core.axes import Axis, unit_count
from tpplan.core.device import Device
from tpplan.core.plan import LAYOUTS, STRATEGIES, Cache, SplitPlan
from tpplan.errors import RequestError
from tpplan.files.codec import dumps
from tpplan.planfile.codec import fingerprint
from tpplan.planfile.verify import problems
from tpplan.planner.attempt import attempt
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.ledger import demands, ledger
from tpplan.planner.plan import plan, replan
from tpplan.planner.recount import differences

if TYPE_CHECKING:
    import random

GIB = 2**30
SEEDS = st.integers(0, 10**6)
#: Planning takes a second where things are tight, and seeds do not shrink.
few = settings(max_examples=examples(10), phases=(Phase.explicit, Phase.reuse, Phase.generate))


def planned(task: Case, devices: tuple[Device, ...] = (), **changes: Any) -> SplitPlan | None:
    """Plan a task, with other devices or another request if given; None if nothing fits."""
    r = task.request
    asked: dict[str, Any] = {"layout": r.layout, "strategy": r.strategy, "max_rows": r.max_rows, "kv": r.kv}
    try:
        return plan(task.model, devices or task.devices, cache=r.cache, **asked | changes)
    except InfeasibleError:
        return None


def fits(task: Case, devices: tuple[Device, ...]) -> bool:
    """Whether a task has a plan on these devices, without an explanation if not."""
    found = attempt(task.model, devices, task.request)
    return found is not None and not found.lacking


tasks = st.builds(case, SEEDS, st.sampled_from(LAYOUTS), st.sampled_from(STRATEGIES))
optimised = st.builds(case, SEEDS, st.sampled_from(LAYOUTS), st.sampled_from(("balanced", "latency")))


def holdings(found: SplitPlan) -> Counter[tuple[object, ...]]:
    """What devices of each kind hold, in units per split; the order of devices is lost.

    Units, because a ragged one is always the last, so that the order decides who has it. A kind is what the strategy
    looks at.
    """
    rows = zip(*([unit_count(b - a, s.unit) for a, b in pairwise(s.bounds)] for s in found.splits), strict=True)
    by_speed = found.request.strategy == "latency"
    return Counter(
        (d.budget_bytes, d.overhead_bytes, by_speed and d.bandwidth_bytes_per_second, *row)
        for d, row in zip(found.devices, rows, strict=True)
    )


@few
@given(tasks, st.sampled_from(("idle", "replicate")))
def test_every_plan_keeps_every_budget_and_every_rule(task: Case, kv: str) -> None:
    """The buckets, counted again from the bounds, fit each budget; the rules hold; planning again changes nothing."""
    found = planned(task, kv=kv)
    if found is None:
        return
    assert problems(found) == ()
    wanted = demands(task.model, found.request, len(task.devices))
    cuts = {(s.axis, s.layers): s.bounds for s in found.splits}
    again = ledger([cuts[d.axis, d.layers] for d in wanted.axes], wanted, task.devices, found.request)
    assert again == found.memory
    for entry, device in zip(found.memory, task.devices, strict=True):
        assert entry.used_bytes + entry.free_bytes == device.budget_bytes
        assert entry.free_bytes >= 0
    assert found.devices == task.devices
    assert found.model.fingerprint == fingerprint(task.model)
    assert dumps(replan(task.model, found)) == dumps(found)


@few
@given(optimised, st.randoms(use_true_random=False))
def test_devices_have_no_order(task: Case, rng: random.Random) -> None:
    """The same devices in another order hold the same, but that devices equal in everything may swap."""
    shuffled = list(task.devices)
    rng.shuffle(shuffled)
    found, other = planned(task), planned(task, tuple(shuffled))
    assert (found is None) == (other is None)
    if found and other:
        assert holdings(found) == holdings(other)


@pytest.mark.parametrize(
    ("keys", "kv", "count"),
    [({}, "idle", 1), ({"vocab_size": 4097}, "idle", 1), ({"num_key_value_heads": 1}, "replicate", 2)],
    ids=["whole units", "ragged vocab", "replicated heads"],
)
def test_a_budget_that_is_exactly_enough_is_enough(keys: dict[str, int], kv: str, count: int) -> None:
    """What a plan uses, to the byte, is all that it takes; a byte less on any device is refused with that byte."""
    asked: dict[str, Any] = {"cache": Cache("fp16", 256), "max_rows": 1, "kv": kv}
    found = plan(spec(**keys), [Device(name="x", budget_bytes=GIB, overhead_bytes=0)] * count, **asked)
    exact = [evolve(d, budget_bytes=e.used_bytes) for d, e in zip(found.devices, found.memory, strict=True)]
    assert plan(spec(**keys), exact, **asked).splits == found.splits
    with pytest.raises(InfeasibleError) as error:
        plan(spec(**keys), [evolve(exact[0], budget_bytes=exact[0].budget_bytes - 1), *exact[1:]], **asked)
    assert max(s.missing_bytes for s in error.value.shortfalls) > 0


def test_equal_shares_are_not_decided_by_order() -> None:
    """17 units of a residual stream that costs nothing, for equal budgets: 9 go where more room is, first or last."""
    devices = [Device(name="x", budget_bytes=GIB, overhead_bytes=overhead) for overhead in (0, MIB)]
    model = spec(hidden_size=17 * 32, num_hidden_layers=16)
    cuts = [
        plan(model, order, cache=Cache("fp16", 64), max_rows=1).bounds(Axis.RESIDUAL)
        for order in (devices, devices[::-1])
    ]
    assert cuts == [(0, 9 * 32, 17 * 32), (0, 8 * 32, 17 * 32)]


@few
@given(optimised, st.data())
def test_more_memory_never_takes_a_plan_away(task: Case, data: st.DataObject) -> None:
    """Where something fits, it still does with a larger budget on any device."""
    assume(fits(task, task.devices))
    i, more = data.draw(st.integers(0, len(task.devices) - 1)), data.draw(st.integers(1, 2**32))
    larger = evolve(task.devices[i], budget_bytes=task.devices[i].budget_bytes + more)
    assert fits(task, (*task.devices[:i], larger, *task.devices[i + 1 :]))


@few
@given(optimised, st.integers(1, 200 * MIB))
def test_a_device_more_never_takes_a_plan_away(task: Case, budget: int) -> None:
    """A further device can stay idle, however small it is."""
    assume(fits(task, task.devices))
    small = Device(name="small", budget_bytes=budget, overhead_bytes=MIB, bandwidth_bytes_per_second=10**11)
    assert fits(task, (*task.devices, small))


@few
@given(st.sampled_from(LAYOUTS), SEEDS)
def test_strategies_that_keep_budgets_agree_on_what_fits(layout: str, seed: int) -> None:
    """What can be balanced can be made fast, and the other way round; what ExLlamaV2's cut fits, both fit."""
    balanced, latency, original = (planned(case(seed, layout, strategy)) for strategy in STRATEGIES)
    assert (balanced is None) == (latency is None)
    assert balanced or not original


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 64])
def test_any_number_of_devices_serves(count: int, strategy: str, layout: str) -> None:
    """No number is too odd: all heads and all units are given out, and beyond 8 heads devices go without attention."""
    devices = [Device(name="x", budget_bytes=3 * GIB, bandwidth_bytes_per_second=10**12)] * count
    found = plan(spec(), devices, cache=Cache("fp16", 4096), strategy=strategy, layout=layout, max_rows=8)
    assert all(len(s.bounds) == count + 1 and s.bounds[-1] == s.size for s in found.splits)
    heads = [s.end - s.start for s in found.slices(Axis.KV_HEADS)]
    assert sum(heads) == 8
    assert len(heads) <= min(count, 8)
    if layout == "reduce":
        assert max(heads) - min(heads) <= 1


def test_equal_devices_are_treated_equally() -> None:
    """Four equal devices and sizes that divide by four: every device holds the same, to the byte."""
    found = plan(spec(), [Device(name="x", budget_bytes=GIB)] * 4, cache=Cache("fp16", 4096))
    assert len({(e.weights_bytes, e.cache_bytes, e.workspace_bytes) for e in found.memory}) == 1
    assert found.bounds(Axis.KV_HEADS) == (0, 2, 4, 6, 8)
    assert found.bounds(Axis.INTERMEDIATE) == (0, 512, 1024, 1536, 2048)


def test_balanced_follows_budgets_and_latency_bandwidths() -> None:
    """A device of twice the memory but half the bandwidth gets twice as much of one plan, half as much of the other."""
    big = Device(name="big", budget_bytes=4 * GIB, overhead_bytes=0, bandwidth_bytes_per_second=10**12)
    fast = evolve(big, name="fast", budget_bytes=2 * GIB, bandwidth_bytes_per_second=2 * 10**12)
    model = spec(num_attention_heads=48, num_key_value_heads=48, num_hidden_layers=8, intermediate_size=6144)
    shares = {}
    for strategy in ("balanced", "latency"):
        found = plan(model, (big, fast), cache=Cache("fp16", 1024), strategy=strategy, max_rows=1)
        shares[strategy] = [entry.weights_bytes + entry.cache_bytes for entry in found.memory]
        stated = [entry.reads_bytes for entry in found.memory]
        assert any(stated) == (strategy == "latency")
        assert all(read <= total for read, total in zip(stated, shares[strategy], strict=True))
    assert shares["balanced"][0] == pytest.approx(2 * shares["balanced"][1], rel=0.1)
    assert shares["latency"][1] == pytest.approx(2 * shares["latency"][0], rel=0.1)


def test_budgets_come_before_speed() -> None:
    """A device far faster but with hardly any memory gets what fits, and no more."""
    slow = Device(name="slow", budget_bytes=4 * GIB, overhead_bytes=0, bandwidth_bytes_per_second=10**11)
    fast = Device(name="fast", budget_bytes=20 * MIB, overhead_bytes=0, bandwidth_bytes_per_second=10**13)
    found = plan(spec(), (slow, fast), cache=Cache("fp16", 1024), strategy="latency", max_rows=1)
    used = [entry.used_bytes for entry in found.memory]
    assert 10 * MIB < used[1] <= 20 * MIB
    assert used[0] > 20 * MIB


def test_a_device_that_is_too_small_stays_idle() -> None:
    """It holds nothing and pays nothing, overhead included."""
    tiny = Device(name="tiny", budget_bytes=MIB)
    found = plan(spec(), (tiny, Device(name="x", budget_bytes=2 * GIB)), cache=Cache("fp16", 1024))
    assert found.memory[0].used_bytes == 0
    assert all(s.bounds[1] == 0 for s in found.splits)


def test_nobody_gets_less_than_the_minimum() -> None:
    """A device of a hundredth of the memory holds the least shares or none: 2, 16 and 8 units."""
    devices = [
        Device(name=str(i), budget_bytes=b, overhead_bytes=0) for i, b in enumerate((4 * GIB, 4 * GIB, 40 * MIB))
    ]
    for layout in LAYOUTS:
        found = plan(spec(), devices, cache=Cache("fp16", 1024), layout=layout, max_rows=1)
        for axis, least in ((Axis.INTERMEDIATE, 256), (Axis.VOCAB, 512), (Axis.RESIDUAL, 256)):
            assert all(s.end - s.start >= least for s in found.slices(axis))


def test_layers_that_differ_are_cut_each_in_their_way() -> None:
    """Dense and sparse layers of one model have their own axes, and every layer finds its own."""
    found = plan(example("deepseek_v3"), [Device(name="x", budget_bytes=2 * GIB)] * 3, cache=Cache("fp16", 512))
    assert found.split(Axis.INTERMEDIATE, 0).layers == "0"
    assert found.split(Axis.EXPERT_INTERMEDIATE, 2).layers == found.split(Axis.SHARED_INTERMEDIATE, 2).layers == "1-2"
    assert found.split(Axis.KV_HEADS, 1).layers == "0-2"


def test_layers_that_differ_only_in_query_heads_share_the_cut_of_their_kv_heads() -> None:
    """KV heads that serve other numbers of query heads, but are cut alike, are one split; counting again agrees."""
    keys = {"model_type": "laguna", "architectures": ["LagunaForCausalLM"], "num_attention_heads_per_layer": [8, 16]}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = spec(
        **keys, **sizes, **experts, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=32
    )
    found = plan(model, (Device(name="a", budget_bytes=GIB), Device(name="b", budget_bytes=GIB)))
    cuts = [(split.layers, split.size) for split in found.splits if split.axis in {Axis.KV_HEADS, Axis.Q_HEADS}]
    assert cuts == [("0-1", 4), ("0", 8), ("1", 16)]
    assert differences(found, model) == []


@pytest.mark.parametrize("strategy", ["balanced", "latency"])
@pytest.mark.parametrize(("heads", "kv_heads", "count"), [(8, 2, 4), (8, 2, 3), (16, 2, 8), (8, 1, 8), (24, 2, 6)])
def test_replicated_heads_reach_every_device(strategy: str, heads: int, kv_heads: int, count: int) -> None:
    """With enough query heads every device gets attention; the copies of a head are paid for on each device."""
    model = spec(num_attention_heads=heads, num_key_value_heads=kv_heads)
    devices = [
        Device(name=str(i), budget_bytes=GIB + i * 50 * MIB, bandwidth_bytes_per_second=(i + 1) * 10**11)
        for i in range(count)
    ]
    found, idle = (
        plan(model, devices, cache=Cache("fp16", 8192), strategy=strategy, kv=kv) for kv in ("replicate", "idle")
    )
    assert [s.device for s in found.slices(Axis.KV_HEADS)] == list(range(count))
    assert len(idle.slices(Axis.KV_HEADS)) <= kv_heads
    assert found.split(Axis.KV_HEADS).replicas > 1 == idle.split(Axis.KV_HEADS).replicas
    assert found.split(Axis.Q_HEADS).size == heads
    head = 8192 * 4 * 2 * 64 * 2
    factor = found.split(Axis.KV_HEADS).replicas
    copies = sum(-(-s.end // factor) - s.start // factor for s in found.slices(Axis.KV_HEADS))
    assert sum(entry.cache_bytes for entry in found.memory) == copies * head
    assert copies >= count
    assert sum(entry.cache_bytes for entry in idle.memory) == kv_heads * head


def test_weights_that_cannot_be_cut_by_rows_are_gathered() -> None:
    """The layout is reduce by default, gather where it must be, and reduce is then refused with the reason."""
    devices = [Device(name="x", budget_bytes=GIB)] * 2
    model = spec()
    assert plan(model, devices, cache=Cache("fp16", 512)).request.layout == "reduce"
    permuted = evolve(model, gather_only="its rows are permuted")
    assert plan(permuted, devices, cache=Cache("fp16", 512)).request.layout == "gather"
    with pytest.raises(RequestError, match="cannot be cut by rows: its rows are permuted") as error:
        plan(permuted, devices, cache=Cache("fp16", 512), layout="reduce")
    assert "gather" in error.value.hint


def test_the_default_cache_is_the_longest_context_of_every_sequence() -> None:
    """0 tokens mean the model's context times the batch, in 16 bits; the plan says which."""
    model = spec(max_position_embeddings=2048)
    found = plan(model, [Device(name="x", budget_bytes=4 * GIB)], batch=3)
    assert found.request.cache == Cache("fp16", 3 * 2048)
    assert found.memory[0].cache_bytes == 3 * 2048 * 4 * 8 * 2 * 64 * 2
