"""The difference between two plans, in the words of the domain."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

import attrs
import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.planfile.test_verify import ID, KV, RS, UNSLICED, VALID, edited, moved
from tests.planning_cases import spec
from tests.render_cases import plain
from tests.strategies import plans
from tpplan.core.axes import Axis, parse_layers
from tpplan.core.device import Device
from tpplan.core.model import NotPlanned
from tpplan.core.plan import Cache
from tpplan.errors import RequestError
from tpplan.files.codec import dumps, unstructure
from tpplan.planfile.verify import problems
from tpplan.planner.plan import plan
from tpplan.render.diff import diff as diff_view
from tpplan.reports.diff import Bucket, BucketChange, Change, DevicePair, FieldChange, Reason, diff

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan

GIB = 2**30


def with_bytes(plan: SplitPlan, device: int, bucket: str, count: int) -> SplitPlan:
    """Return the valid plan's edit with bytes moved from a device's free memory to a bucket."""
    for path, value in moved(device, bucket, count).items():
        plan = edited(plan, path, value)
    return plan


def without_first(plan: SplitPlan) -> SplitPlan:
    """Return a plan without its first device, whose slices the next one takes over."""
    splits = tuple(attrs.evolve(s, bounds=(0, *s.bounds[2:])) for s in plan.splits)
    memory = tuple(attrs.evolve(m, device=i) for i, m in enumerate(plan.memory[1:]))
    return attrs.evolve(plan, devices=plan.devices[1:], splits=splits, memory=memory)


@settings(max_examples=examples(40))
@given(plans(), plans())
def test_false_means_equal(a: SplitPlan, b: SplitPlan) -> None:
    """A diff is false exactly if the plans are equal, and then says so and lists nothing."""
    nothing = diff(a, a)
    assert not nothing
    assert nothing.summary == "the plans are equal"
    assert (nothing.reasons, nothing.fields, nothing.devices, nothing.splits, nothing.memory) == ((),) * 5
    assert bool(diff(a, b)) == (a != b)


@settings(max_examples=examples(40))
@given(plans(), plans())
def test_nothing_is_lost(a: SplitPlan, b: SplitPlan) -> None:
    """Every device of both plans is paired once, and what is gained and lost accounts for both plans entirely."""
    change = diff(a, b)
    for bucket in change.total:
        name = f"{bucket.bucket}_bytes"
        assert bucket.before_bytes == sum(getattr(m, name) for m in a.memory)
        assert bucket.after_bytes == sum(getattr(m, name) for m in b.memory)
        listed = sum(x.delta_bytes for m in change.memory for x in m.buckets if x.bucket == bucket.bucket)
        assert bucket.delta_bytes == listed == bucket.after_bytes - bucket.before_bytes
    for split in change.splits:
        for bounds, side in ((split.before_bounds, "before"), (split.after_bounds, "after")):
            held = [getattr(share, f"{side}_elements") for share in split.shares]
            assert sum(held) == (bounds[-1] if bounds else 0)
            for share in split.shares:
                index = getattr(share.device, side)
                whole = bounds[index + 1] - bounds[index] if bounds and index is not None else 0
                assert getattr(share, f"{side}_elements") == whole
        assert all(share.delta_elements == share.after_elements - share.before_elements for share in split.shares)


@settings(max_examples=examples(40))
@given(plans(), plans())
def test_backwards(a: SplitPlan, b: SplitPlan) -> None:
    """The diff the other way round has the same reasons, and the opposite totals."""
    there, back = diff(a, b), diff(b, a)
    assert there.reasons == back.reasons
    assert there.split_count == back.split_count
    assert [x.delta_bytes for x in there.total] == [-x.delta_bytes for x in back.total]


def test_what_is_no_plan() -> None:
    """The path of a plan is not read for its plan: the error says what reads it."""
    for pair in ((VALID, "plan.json"), ("plan.json", VALID)):
        with pytest.raises(RequestError, match=r"diff takes two plans, this is str\nhint: .*tpplan.load"):
            diff(*cast("Any", pair))


def test_moved_cut() -> None:
    """A moved cut point is told with what each device gains and loses, in elements and bytes."""
    after = edited(VALID, f"splits[{ID}].bounds", (0, 1408, 2176, 2880, 2880))
    after = with_bytes(with_bytes(after, 0, "weights_bytes", GIB), 1, "weights_bytes", -GIB)
    assert problems(after) == ()
    change = diff(VALID, after)
    assert change.reasons == (Reason.PLANNING,)
    assert change.summary == (
        "1 of 8 splits change; device 0 RTX 4090 gains 1.00 GiB of weights, device 1 RTX 4080 loses 1.00 GiB of weights"
    )
    (split,) = change.splits
    assert (split.change, split.axis, split.layers, split.fields) == (Change.CHANGED, Axis.INTERMEDIATE, "0-1", ())
    assert split.before_bounds == (0, 1280, 2176, 2880, 2880)
    assert split.after_bounds == (0, 1408, 2176, 2880, 2880)
    assert [(s.device.name, s.delta_elements) for s in split.shares] == [
        ("RTX 4090", 128),
        ("RTX 4080", -128),
        ("RTX 3060 (Büro)", 0),
    ]
    assert [m.device for m in change.memory] == [DevicePair("RTX 4090", 0, 0), DevicePair("RTX 4080", 1, 1)]
    assert change.memory[0].buckets[0] == BucketChange(Bucket.WEIGHTS, 9663676539, 9663676539 + GIB, GIB)
    assert change.total[0].delta_bytes == 0


def test_only_what_a_token_reads() -> None:
    """A plan that differs in nothing but reads is told with them: in the summary, the table and the document."""
    memory = tuple(attrs.evolve(entry, reads_bytes=GIB if entry.used_bytes else 0) for entry in VALID.memory)
    before = attrs.evolve(edited(VALID, "request.strategy", "latency"), memory=memory)
    after = edited(before, "memory[1].reads_bytes", 3 * GIB)
    assert problems(after) == ()
    change = diff(before, after)
    assert change.reasons == (Reason.PLANNING,)
    assert change.summary == "0 of 8 splits change; device 1 RTX 4080 reads 2.00 GiB more per token"
    assert diff(after, before).summary.endswith("device 1 RTX 4080 reads 2.00 GiB less per token")
    (told,) = json.loads(dumps(change))["memory"]
    assert {key: told[key] for key in told if "reads" in key} == {
        "before_reads_bytes": GIB,
        "after_reads_bytes": 3 * GIB,
        "delta_reads_bytes": 2 * GIB,
    }
    text = plain(diff_view(unstructure(change)))
    assert re.search(r"workspace +overhead +free +reads\n1 +RTX 4080 +0 +0 +0 +0 +0 +\+2.00\n", text)
    assert re.search(r"together +0 +0 +0 +0 +0 +\+2.00\n", text)
    moved_too = plain(diff_view(unstructure(diff(VALID, with_bytes(VALID, 0, "weights_bytes", GIB)))))
    assert "reads" not in moved_too


def test_request_and_model() -> None:
    """Changed values of the request, the model and the format are listed with their paths, from and to."""
    after = edited(edited(VALID, "request.cache.tokens", 65536), "model.dtype", "float16")
    change = diff(VALID, after)
    assert change.reasons == (Reason.MODEL, Reason.REQUEST)
    assert change.fields == (
        FieldChange("model.dtype", "bfloat16", "float16"),
        FieldChange("request.cache.tokens", 32768, 65536),
    )
    assert change.summary == "the model and the request differ; 0 of 8 splits change"
    newer = diff(VALID, edited(VALID, "format_version", "1.1"))
    assert (newer.reasons, newer.summary) == ((Reason.FORMAT,), "the format differs; 0 of 8 splits change")


def test_another_name_is_no_other_model() -> None:
    """Who calls the same model by another name reads that, not that the model differs."""
    renamed = edited(VALID, "model.name", "Other")
    assert diff(VALID, renamed).summary.startswith("the model's name differs; 0 of ")
    other = edited(renamed, "model.fingerprint", f"sha256:{'f' * 64}")
    assert diff(VALID, other).summary.startswith("the model differs; 0 of ")


def test_device_removed() -> None:
    """Without its first device, the others are recognised at their new index."""
    change = diff(VALID, without_first(VALID))
    assert change.reasons == (Reason.DEVICES,)
    assert [(d.change, d.device.name, d.device.before, d.device.after) for d in change.devices] == [
        (Change.MOVED, "RTX 4080", 1, 0),
        (Change.MOVED, "RTX 3060 (Büro)", 2, 1),
        (Change.MOVED, "RTX A2000", 3, 2),
        (Change.REMOVED, "RTX 4090", 0, None),
    ]
    kv = change.splits[KV]
    assert [(s.device.name, s.before_elements, s.after_elements) for s in kv.shares] == [
        ("RTX 4080", 1, 3),
        ("RTX 3060 (Büro)", 1, 1),
        ("RTX 4090", 2, 0),
    ]
    assert change.summary == (
        "8 of 8 splits change; 1 device removed, 3 devices moved; removed device 0 RTX 4090 loses 9.00 GiB of weights"
    )


def test_device_added() -> None:
    """An added device is told as one, with what it now holds."""
    change = diff(without_first(VALID), VALID)
    added = change.devices[0]
    assert (added.change, added.device) == (Change.ADDED, DevicePair("RTX 4090", None, 0))
    assert "device 0 RTX 4090 gains 9.00 GiB of weights" in change.summary


def test_device_changed() -> None:
    """A device with another budget is the same device; a card that takes another's place is told as changed."""
    after = edited(VALID, f"devices[{UNSLICED}].budget_bytes", 8 * GIB)
    after = edited(after, f"memory[{UNSLICED}].free_bytes", 8 * GIB)
    assert problems(after) == ()
    change = diff(VALID, after)
    assert [(d.change, d.fields) for d in change.devices] == [
        (Change.CHANGED, (FieldChange("budget_bytes", 6 * GIB, 8 * GIB),)),
    ]
    assert [m.buckets[-1].delta_bytes for m in change.memory] == [2 * GIB]
    assert change.summary == "0 of 8 splits change; 1 device changed"
    renamed = diff(VALID, edited(VALID, "devices[1].name", "RTX 5080"))
    assert [(d.change, d.device, d.fields) for d in renamed.devices] == [
        (Change.CHANGED, DevicePair("RTX 5080", 1, 1), (FieldChange("name", "RTX 4080", "RTX 5080"),)),
    ]


def test_equal_devices_keep_their_places() -> None:
    """Of several devices with one name, the ones that stay where they are are not told as moved."""
    twins = edited(VALID, "devices", (VALID.devices[1],) * 4)
    assert diff(twins, twins).devices == ()
    swapped = edited(VALID, "devices", (VALID.devices[1], VALID.devices[0], *VALID.devices[2:]))
    assert [(d.change, d.device.before, d.device.after) for d in diff(VALID, swapped).devices] == [
        (Change.MOVED, 1, 0),
        (Change.MOVED, 0, 1),
    ]


def test_regrouped_layers() -> None:
    """Where plans group layers differently, a change is told for the layers in which it is the same."""
    ex = VALID.splits[5]
    after = edited(VALID, "splits[5].layers", "2-5")
    after = attrs.evolve(after, splits=(*after.splits[:6], *after.splits[7:]))
    assert problems(after) == ()
    (split,) = diff(VALID, after).splits
    assert (split.axis, split.layers) == (Axis.EXPERT_INTERMEDIATE, "5")
    assert (split.before_bounds, split.after_bounds) == ((0, 256, 512, 768, 768), ex.bounds)


def test_axis_added_and_removed() -> None:
    """An axis that only one of the plans has in a layer is told as added or removed there."""
    fewer = attrs.evolve(VALID, splits=(*VALID.splits[:ID], *VALID.splits[ID + 1 :]))
    (gone,) = diff(VALID, fewer).splits
    assert (gone.change, gone.after_bounds, gone.layers) == (Change.REMOVED, (), "0-1")
    (new,) = diff(fewer, VALID).splits
    assert (new.change, new.before_bounds, new.after_bounds) == (Change.ADDED, (), VALID.splits[ID].bounds)
    assert parse_layers(new.layers) == {0, 1}


def test_size_and_unit() -> None:
    """Another unit of an axis is told as a value from and to, though no cut moves."""
    (split,) = diff(VALID, edited(VALID, f"splits[{RS}].unit", 64)).splits
    assert split.fields == (FieldChange("unit", 32, 64),)
    assert split.before_bounds == split.after_bounds


def test_summary_names_the_largest() -> None:
    """The summary names the three devices with the largest change, and counts the others."""
    nearly = VALID
    for device, count in ((0, 1), (1, 3), (2, 2)):
        nearly = with_bytes(nearly, device, "cache_bytes", count * GIB)
    summary = diff(VALID, nearly).summary
    order = ["device 1 RTX 4080 gains 3.00 GiB", "device 2 RTX 3060 (Büro) gains 2.00 GiB", "device 0 RTX 4090 gains 1"]
    assert [summary.index(text) for text in order] == sorted(summary.index(text) for text in order)
    assert "more" not in summary
    four = with_bytes(nearly, UNSLICED, "cache_bytes", 5 * GIB)
    assert diff(VALID, four).summary.endswith(", and 1 more")


@settings(max_examples=examples(40))
@given(plans(), plans())
def test_json(a: SplitPlan, b: SplitPlan) -> None:
    """A diff is written as JSON without nulls, the same every time."""
    text = dumps(diff(a, b))
    assert text == dumps(diff(a, b))
    assert None not in json.loads(text, object_pairs_hook=lambda pairs: [value for _, value in pairs])
    assert ": null" not in text


def test_sizes_that_look_alike_are_told_apart() -> None:
    """Of what is not planned, a change of a few bytes shows, though both sizes are the same in GiB."""
    a, b = (
        attrs.evolve(VALID, format_version="1.1", model=attrs.evolve(VALID.model, not_planned=(NotPlanned("x", size),)))
        for size in (2**33, 2**33 + 5)
    )
    (change,) = diff(a, b).fields
    assert (change.before, change.after) == ("x, 8.00 GiB (8589934592 bytes)", "x, 8.00 GiB (8589934597 bytes)")


def test_what_auto_chose_was_not_asked_for() -> None:
    """Where auto made both plans, another strategy is what it chose by the devices, and no other request."""
    model = spec(num_hidden_layers=16, hidden_size=2048, intermediate_size=8192)
    slow = Device(name="slow", budget_bytes=24 * GIB, bandwidth_bytes_per_second=300 * 10**9)
    fast = Device(name="fast", budget_bytes=8 * GIB, bandwidth_bytes_per_second=900 * 10**9)
    before = plan(model, [slow, fast], cache=Cache(tokens=4096), strategy="auto")
    assert before.request.strategy == "latency"
    equal = plan(model, [attrs.evolve(slow, name="fast"), slow], cache=Cache(tokens=4096), strategy="auto")
    assert equal.request.strategy == "balanced"
    found = diff(equal, before)
    assert found.chosen == (FieldChange("request.strategy", "balanced", "latency"),)
    assert (found.fields, found.reasons) == ((), (Reason.DEVICES,))
    assert found.summary.startswith("auto chose latency instead of balanced; ")
    text = plain(diff_view(unstructure(found)))
    assert "Chosen by auto" in text
    assert "Inputs" not in text
    assert "reads" not in text  # which only one of both says
    assert {(one.before_reads_bytes, one.delta_reads_bytes) for one in found.memory} == {(None, None)}
    assert all(one.after_reads_bytes for one in found.memory)
    dark = plan(
        model, [attrs.evolve(slow, bandwidth_bytes_per_second=0), fast], cache=Cache(tokens=4096), strategy="auto"
    )
    found = diff(before, dark)  # auto balances where bandwidths are not known
    assert found.chosen == (FieldChange("request.strategy", "latency", "balanced"),)
    assert [change.path for change in found.fields] == ["format_version"]
    assert found.summary.startswith("the format differs; auto chose balanced instead of latency; ")
    text = plain(diff_view(unstructure(found)))
    assert "Inputs" not in text
    assert re.search(r"File\n~ +format_version +1.2 +→ +1.0\n", text)
    named = plan(model, [slow, fast], cache=Cache(tokens=4096))
    assert diff(named, before).fields[0].path == "request.strategy"
    assert Reason.REQUEST in diff(named, before).reasons


def test_why_two_plans_or_one_of_them_predict_nothing() -> None:
    """A rate that is unknown has its reason: a bandwidth, or that the strategy was named; equal plans need none."""
    model = spec(num_hidden_layers=4, hidden_size=2048, intermediate_size=8192)
    fast = Device(name="fast", budget_bytes=24 * GIB, bandwidth_bytes_per_second=900 * 10**9)
    dark = Device(name="dark", budget_bytes=24 * GIB)
    predicted, unknown, also_unknown, named = (
        plan(model, devices, cache=Cache(tokens=4096), strategy=strategy)
        for devices, strategy in (
            ([fast, fast], "auto"),
            ([fast, dark], "auto"),
            ([dark, dark], "auto"),
            ([fast, fast], "latency"),
        )
    )
    why = "the second plan has no tokens/s, because the bandwidth of device 1 (dark) is unknown"
    assert diff(predicted, unknown).unpredicted == why
    assert why in plain(diff_view(unstructure(diff(predicted, unknown))))
    assert diff(unknown, predicted).unpredicted == why.replace("second", "first")
    found = diff(predicted, named).unpredicted
    assert found == "the second plan has no tokens/s, because it was not made with --strategy auto"
    found = diff(unknown, also_unknown).unpredicted
    assert found == (
        "the first plan has no tokens/s, because the bandwidth of device 1 (dark) is unknown; "
        "the second plan has no tokens/s, because the bandwidth of device 0 (dark), 1 (dark) is unknown"
    )
    shorter = plan(model, [fast, dark], cache=Cache(tokens=2048), strategy="auto")
    changes = diff(unknown, shorter)
    assert changes.unpredicted == "both plans have no tokens/s, because the bandwidth of device 1 (dark) is unknown"
    lines = plain(diff_view(unstructure(changes))).splitlines()
    assert lines[lines.index(changes.unpredicted) - 1] == "Speed"
    named_shorter = plan(model, [fast, fast], cache=Cache(tokens=2048), strategy="latency")
    for a, b in ((predicted, predicted), (unknown, unknown), (named, named_shorter)):
        assert diff(a, b).unpredicted == ""
