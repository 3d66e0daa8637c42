"""The rules of a plan: each sees its violation, and only that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import plans
from tpplan.core.axes import Axis
from tpplan.core.model import NotPlanned
from tpplan.core.plan import Draft, Reserve
from tpplan.core.speed import DeviceTime, LinkSpeed, Pass, Speed
from tpplan.errors import PlanError
from tpplan.planfile.codec import load
from tpplan.planfile.rules import RULES
from tpplan.planfile.verify import problems, verify

if TYPE_CHECKING:
    from tpplan.core.plan import Split, SplitPlan

VALID = load(Path(__file__).parents[1] / "data/formats/plan-1.0.json")
KV, Q, ID, VC, RS, EX, EX5, SX = range(8)  # indices of its splits
UNSLICED = 3  # the device that holds nothing


def edited(obj: Any, path: str, value: Any) -> Any:
    """Return a plan, or a part of one, with the value at a path such as ``splits[1].bounds`` replaced."""
    if not path:
        return value
    step, rest = re.fullmatch(r"\[?(\w+)\]?\.?(.*)", path).groups()  # type: ignore[union-attr]
    if isinstance(obj, tuple):
        i = int(step)
        return (*obj[:i], edited(obj[i], rest, value), *obj[i + 1 :])
    return attrs.evolve(obj, **{step: edited(getattr(obj, step), rest, value)})


def reordered(*indices: int) -> tuple[Split, ...]:
    """Return splits of the valid plan."""
    return tuple(VALID.splits[i] for i in indices)


def with_extra(after: int, **changes: Any) -> tuple[Split, ...]:
    """Return the splits of the valid plan and a changed copy of one after it."""
    extra = attrs.evolve(VALID.splits[after], **changes)
    return (*VALID.splits[: after + 1], extra, *VALID.splits[after + 1 :])


def moved(device: int, bucket: str, count: int) -> dict[str, int]:
    """Return edits that move bytes from a device's free memory to a bucket."""
    entry = VALID.memory[device]
    return {
        f"memory[{device}].{bucket}": getattr(entry, bucket) + count,
        f"memory[{device}].free_bytes": entry.free_bytes - count,
    }


def reserved(*reserve: Reserve, bytes: int) -> dict[str, Any]:  # noqa: A002 (as the plan says)
    """Return edits that reserve memory, and leave some on device 0."""
    moves = moved(0, "reserved_bytes", bytes)
    return {"format_version": "1.1", "request.reserve": reserve, **moves}


def drafted(*room: int, name: str = "head", split: bool = True, **moves: int) -> dict[str, Any]:
    """Return edits that leave room for a draft model, and so many bytes on devices ``on_0``, ``on_1`` and so on."""
    edits: dict[str, Any] = {"format_version": "1.4", "request.draft": Draft(name, room, split)}
    for device, count in moves.items():
        edits |= moved(int(device.removeprefix("on_")), "draft_bytes", count)
    return edits


def drafting(name: str = "big", more: int = 0) -> dict[str, Any]:
    """Return edits that make the plan that of a draft model, whose device 0 holds so many bytes more."""
    edits: dict[str, Any] = {"format_version": "1.4", "request.drafts_for": name}
    for i, entry in enumerate(VALID.memory):
        free = entry.free_bytes + entry.overhead_bytes - (0 if i else more)
        edits |= {f"memory[{i}].overhead_bytes": 0, f"memory[{i}].free_bytes": free}
    return edits | {"memory[0].weights_bytes": VALID.memory[0].weights_bytes + more}


def timed(
    *devices: int, rows: tuple[int, ...] = (1, 2), prefills: int = 0, links: Any = (), total_ns: int = 0
) -> dict[str, Any]:
    """Return edits that predict times of these devices, and of their passes."""
    one = tuple(DeviceTime(i, 5, 5, 5, 5) for i in devices)
    decode, prefill = tuple(Pass(count, one, 0, total_ns) for count in rows), (Pass(9, one),) * prefills
    return {"format_version": "1.2", "speed": Speed(decode=decode, prefill=prefill, links=links)}


def link(first: int, second: int, latency_ns: int = 1) -> LinkSpeed:
    """Return a link of two devices."""
    return LinkSpeed(first=first, second=second, latency_ns=latency_ns, bytes_per_second=1)


VIOLATIONS: list[tuple[str, dict[str, Any], str]] = [
    ("TP001", {"format_version": "2.0"}, "TP001 at format_version: is '2.0', this tpplan reads 1.x"),
    ("TP001", {"format_version": "1.5"}, "is 1.5, newer than 1.4, the latest that this tpplan knows"),
    ("TP001", {"format_version": "1.1"}, "is 1.1, expected 1.0, the oldest version with all of its keys"),
    ("TP001", {"request.beyond": True}, "is 1.0, expected 1.1"),
    ("TP008", {"format_version": "1.1", "model.not_planned": (NotPlanned("vision tower", -1),)}, "bytes: is -1"),
    ("TP026", {"format_version": "1.1", "model.not_planned": (NotPlanned("\u200b", 1),)}, "not_planned[0].what: has"),
    ("TP026", {"format_version": "1.1", "model.assumed": " "}, "model.assumed: is empty"),
    ("TP026", {"format_version": "1.3", "model.weight_format": "\u200b"}, "model.weight_format: has"),
    (
        "TP030",
        {"format_version": "1.1", "request.context": VALID.request.cache.tokens + 1},
        f"is {VALID.request.cache.tokens + 1}, for {VALID.request.batch} sequences that share",
    ),
    ("TP030", {"format_version": "1.1", "request.context": 1}, "request.context: is 1, for"),
    ("TP031", reserved(Reserve(1, 9), bytes=0), "request.reserve[0].device: is 9, not one of the 4 devices"),
    ("TP031", reserved(Reserve(5, 0), Reserve(5, 0), bytes=5), "request.reserve[1].device: is 0, named before"),
    ("TP031", reserved(Reserve(5, 0), bytes=4), "memory[0].reserved_bytes: is 4, the request reserves 5"),
    ("TP033", drafted(0, 7), "room_bytes: has 2 numbers for 4 devices, expected one for each"),
    ("TP033", drafted(0, 0, 0, 0), "request.draft.room_bytes: is 0 on every device, expected the room of"),
    ("TP033", drafted(5, 0, 0, 0), "memory[0].draft_bytes: is 0, expected 5 for what drafts"),
    ("TP033", drafted(0, 0, 0, 5, on_3=5), f"memory[3].draft_bytes: is 5, expected {5 + 2**29} for what drafts"),
    ("TP033", drafted(5, 5, 6, 5, split=False), "request.draft.room_bytes: is 5, 5, 6, 5, expected the same on each"),
    ("TP033", {"format_version": "1.4", "request.mtp": True}, "request.draft: is missing, expected the room of"),
    ("TP033", drafting("big") | {"request.mtp": True}, "request.mtp: is given in the plan of a draft model"),
    ("TP020", drafted(5, 0, 0, 0) | {"memory[0].draft_bytes": 5}, f"adds up to {VALID.devices[0].budget_bytes + 5}"),
    ("TP008", drafted(-1, 5, 0, 0, on_0=-1, on_1=5), "request.draft.room_bytes[0]: is -1, expected 0 or more"),
    ("TP026", drafted(5, 0, 0, 0, name=" ", on_0=5), "request.draft.name: is empty"),
    (
        "TP023",
        {**drafted(5, 0, 0, 0, on_0=5), "request.draft": Draft("d", (5, 0, 0, 0), split=True, head="eagle4")},
        "request.draft.head: is 'eagle4', expected eagle, eagle3, peagle, dflash, medusa or mlp_speculator",
    ),
    ("TP026", drafting(" "), "request.drafts_for: is empty"),
    ("TP022", {"format_version": "1.4", "request.drafts_for": "big"}, "is 650117120, the model's plan has it"),
    (
        "TP022",
        drafting(more=VALID.memory[0].free_bytes + 1),
        "memory[0].free_bytes: is 650117119, less than the overhead of 650117120",
    ),
    ("TP032", timed(0, 1), "speed.decode[0].devices: is not of devices 0, 1, 2, which hold slices"),
    ("TP032", timed(0, 1, 2, rows=(2,)), "speed.decode: is for batches of 2, expected 1, 2"),
    ("TP032", timed(0, 1, 2, rows=()), "speed.decode: is for batches of none, expected 1, 2"),
    ("TP032", timed(0, 1, 2, prefills=2), "speed.prefill: has 2 entries, expected 1 at most"),
    ("TP032", timed(0, 1, 2, links=(link(0, 4),)), "speed.links[0]: joins 0 and 4, expected two of 4 devices"),
    ("TP032", timed(0, 1, 2, links=(link(0, 1),) * 2), "speed.links[1]: joins 0 and 1, a second time"),
    ("TP032", timed(0, 1, 2, total_ns=19), "speed.decode[0].total_ns: is 19, less than the 20 of a device alone"),
    ("TP008", timed(0, 1, 2, links=(link(0, 1, 0),)), "speed.links[0].latency_ns: is 0, expected 1 or more"),
    ("TP001", {"format_version": "one"}, "is 'one'"),
    ("TP002", {f"splits[{RS}].bounds": (0, 1024, 1536, 2048)}, "residual has 4 numbers, expected 5 for 4 devices"),
    ("TP003", {f"splits[{RS}].bounds": (32, 1024, 1536, 2048, 2048)}, "residual starts at 32 on device 0, expected 0"),
    (
        "TP004",
        {f"splits[{RS}].bounds": (0, 1024, 1536, 1984, 1984)},
        "TP004 at splits[4].bounds: residual ends at 1984 on the last device, expected 2048",
    ),
    (
        "TP005",
        {f"splits[{RS}].bounds": (0, 1536, 1024, 2048, 2048)},
        "residual of device 1 starts at 1536, beyond its end 1024",
    ),
    (
        "TP006",
        {f"splits[{RS}].bounds": (0, 1000, 1536, 2048, 2048)},
        "residual is cut at 1000, between devices 0 and 1: no multiple of the unit 32",
    ),
    (
        "TP006",
        {f"splits[{VC}].bounds": (0, 25600, 38401, 50257, 50257)},
        "vocab is cut at 38401, between devices 1 and 2: no multiple of the unit 32",
    ),
    (
        "TP007",
        {f"splits[{RS}].bounds": (0, 1024, 1920, 2048, 2048)},
        "device 2 holds 128 elements of residual, 4 of the 8 units of 32",
    ),
    ("TP008", {"request.batch": 0}, "request.batch: is 0, expected 1 or more"),
    ("TP008", {"request.max_rows": -1}, "request.max_rows: is -1"),
    ("TP008", {"request.cache.tokens": 0}, "request.cache.tokens: is 0"),
    ("TP008", {"model.layers": 0}, "model.layers: is 0"),
    ("TP008", {f"splits[{VC}].unit": 0}, "splits[3].unit: is 0"),
    ("TP008", {f"splits[{VC}].width": 0}, "splits[3].width: is 0"),
    ("TP008", {f"splits[{VC}].replicas": 0}, "splits[3].replicas: is 0"),
    ("TP008", {f"devices[{UNSLICED}].overhead_bytes": -1}, "overhead_bytes: is -1, expected 0 or more"),
    ("TP008", {"devices[0].bandwidth_bytes_per_second": -1}, "bandwidth_bytes_per_second: is -1"),
    ("TP008", moved(0, "weights_bytes", 24 * 2**30), "memory[0].free_bytes: is -"),
    ("TP008", moved(0, "cache_bytes", -(2**30)), "memory[0].cache_bytes: is -536870912, expected 0 or more"),
    ("TP008", moved(0, "workspace_bytes", -(2**30)), "memory[0].workspace_bytes: is -"),
    ("TP009", {"request.max_rows": 2**63}, "request.max_rows: is beyond 9223372036854775807"),
    ("TP010", {f"splits[{ID}].layers": "1-0"}, "'1-0' is not a list of layers"),
    ("TP010", {f"splits[{ID}].layers": "0,1"}, "'0,1' is not"),
    ("TP010", {f"splits[{ID}].layers": "00-1"}, "'00-1' is not"),
    ("TP010", {f"splits[{ID}].layers": "0-1,"}, "'0-1,' is not"),
    ("TP010", {f"splits[{ID}].layers": "0-6"}, "reaches layer 6, the model has 0-5"),
    ("TP010", {f"splits[{ID}].layers": "0-999999999999"}, "is not a list of layers"),
    ("TP010", {"model.layers": 10_001}, "is 10001, the most is 10000"),
    ("TP011", {f"splits[{VC}].layers": "0-5"}, "is '0-5', but vocab is outside the layers"),
    ("TP011", {f"splits[{ID}].layers": ""}, "is missing, intermediate is split layer by layer"),
    (
        "TP012",
        {"splits": with_extra(ID, layers="1", bounds=(0, 1408, 2176, 2880, 2880))},
        "splits intermediate of layer 1 again, after splits[2]",
    ),
    (
        "TP013",
        {"splits": with_extra(ID, layers="3")},
        "the same cut of intermediate as in splits[2]: layers 0-1 and 3 belong in one entry",
    ),
    (
        "TP013",
        {"splits": with_extra(KV, layers="5"), f"splits[{KV}].layers": "0-4"},
        "the same cut of kv_heads as in splits[0]: layers 0-4 and 5 belong in one entry",
    ),
    ("TP014", {"splits": reordered(KV, Q, ID, RS, EX, EX5, SX)}, "has 0 entries for vocab, expected 1"),
    ("TP014", {"splits": reordered(KV, Q, ID, VC, RS, RS, EX, EX5, SX)}, "has 2 entries for residual, expected 1"),
    ("TP015", {"splits": reordered(KV, Q, ID, RS, VC, EX, EX5, SX)}, "splits[4]: vocab comes after residual"),
    ("TP015", {"splits": reordered(KV, Q, ID, VC, RS, EX5, EX, SX)}, "expert_intermediate 2-4 comes after"),
    (
        "TP016",
        {f"splits[{Q}].bounds": (0, 4, 12, 16, 16)},
        "is [0, 4, 12, 16, 16], expected [0, 8, 12, 16, 16]: 4 query heads for each KV head of splits[0]",
    ),
    (
        "TP016",
        {f"splits[{Q}].size": 18, f"splits[{Q}].bounds": (0, 8, 12, 18, 18)},
        "18 query heads are no multiple of 4 KV heads",
    ),
    ("TP016", {f"splits[{Q}].layers": "0-4"}, "has kv_heads but no q_heads for layer 5"),
    ("TP016", {f"splits[{KV}].layers": "1-5"}, "splits q_heads of layer 0, which has no kv_heads"),
    ("TP017", {f"splits[{KV}].replicas": 3}, "3 does not divide the 4 heads"),
    ("TP017", {f"splits[{VC}].replicas": 2}, "is 2, but vocab is never repeated"),
    ("TP017", {"request.kv": "idle"}, "is 2, but the request's kv is 'idle'"),
    ("TP018", {"devices": (), "memory": ()}, "has 0 entries, expected 1 or more"),
    ("TP019", {"memory": VALID.memory[:3]}, "has 3 entries for 4 devices"),
    ("TP019", {"memory[3].device": 2}, "memory[3].device: is 2, expected 3"),
    ("TP020", {"memory[1].free_bytes": VALID.memory[1].free_bytes + 1}, "1 too many for the 17179869184 of the budget"),
    ("TP020", {"devices[0].budget_bytes": 24 * 2**30 + 5}, "5 too few for the 25769803781 of the budget of 'RTX 4090'"),
    ("TP021", moved(UNSLICED, "weights_bytes", 7), "uses 7 bytes on a device that holds no slice"),
    ("TP022", moved(1, "overhead_bytes", 3), "is 536870915, devices[1] declares 536870912"),
    ("TP023", {"request.layout": "cut"}, "request.layout: is 'cut', expected reduce or gather"),
    ("TP023", {"request.strategy": "best"}, "is 'best', expected balanced, latency or exllamav2"),
    ("TP023", {"request.cache.kind": "q5"}, "is 'q5', expected fp16, fp8, q8, q6 or q4"),
    ("TP023", {"model.dtype": "int8"}, "is 'int8', expected float32, float16 or bfloat16"),
    ("TP024", {"model.fingerprint": "sha256:" + "G" * 64}, "expected sha256: and 64 hexadecimal digits"),
    ("TP024", {"model.fingerprint": "sha256:" + "0" * 64 + "\n"}, "expected sha256: and 64 hexadecimal digits"),
    ("TP025", {"devices[0].capability": "sm_89"}, "is 'sm_89', expected such as '8.9'"),
    ("TP026", {"model.name": " "}, "model.name: is empty"),
    ("TP026", {"model.architecture": ""}, "model.architecture: is empty"),
    ("TP026", {"devices[2].name": "x" * 201}, "devices[2].name: has 201 characters, the most is 200"),
    ("TP026", {"devices[2].name": "RTX\x1b[31m"}, "has the invisible character U+001B at position 3"),
    ("TP027", {"splits": (VALID.splits[VC],) * 5000}, "has 5000 entries, the most is 4096"),
    ("TP028", {"request.batch": 2049, "request.max_rows": 2048}, "request.max_rows: is 2048, 2049 sequences that"),
    ("TP028", {"request.batch": 9, "request.cache.tokens": 8}, "is 8, 9 sequences that decode together need 9 tokens"),
    ("TP029", {"memory[0].reads_bytes": 7}, "memory[0].reads_bytes: is 7 with the strategy 'balanced'"),
    ("TP029", {"request.strategy": "latency", f"memory[{UNSLICED}].reads_bytes": 7}, "is 7 on a device that holds no"),
    ("TP029", {"request.strategy": "latency"}, "memory[0].reads_bytes: is 0, expected 1 or more, and no more than the"),
    (
        "TP029",
        {"request.strategy": "latency", "memory[1].reads_bytes": 999_999_999_999_999_999},
        "memory[1].reads_bytes: is 999999999999999999, expected 1 or more, and no more than the 5637144653 of weights",
    ),
    ("TP026", {"model.name": "a\u202eb"}, "has the invisible character U+202E at position 1"),
    ("TP026", {"model.name": "ab\u061c"}, "has the invisible character U+061C at position 2"),
    ("TP026", {"model.name": "\U000e0041b"}, "has the invisible character U+E0041 at position 0"),
]


@pytest.mark.parametrize(("rule", "edits", "message"), VIOLATIONS)
def test_violation(rule: str, edits: dict[str, Any], message: str) -> None:
    """A plan that breaks one rule is told that rule, the path and the numbers, and nothing else."""
    plan = VALID
    for path, value in edits.items():
        plan = edited(plan, path, value)
    found = problems(plan)
    assert {problem.rule for problem in found} == {rule}
    assert message in "\n".join(map(str, found))


def test_every_rule_has_a_violation() -> None:
    """No rule is without a test, and rules are numbered without gaps."""
    assert {rule for rule, _, _ in VIOLATIONS} == set(RULES)
    assert list(RULES) == [f"TP{i:03}" for i in range(1, len(RULES) + 1)]


def test_rules_explain_themselves() -> None:
    """Every rule says in one sentence what must be so."""
    sentences = [(rule.__doc__ or "").strip() for rule in RULES.values()]
    assert all(s.endswith(".") and "\n" not in s for s in sentences)
    assert len(set(sentences)) == len(RULES)


@given(plans())
def test_valid_plans_pass(plan: SplitPlan) -> None:
    """Plans made by the rules break none of them."""
    assert problems(plan) == ()
    verify(plan)


def test_verify_lists_everything() -> None:
    """The error names the plan and carries every problem of every rule, in its message and as data."""
    plan = edited(edited(VALID, "request.batch", 0), f"splits[{RS}].bounds", (0, 1000, 1536, 1984, 1984))
    with pytest.raises(PlanError) as caught:
        verify(plan, "llama.json")
    assert [p.rule for p in caught.value.problems] == ["TP004", "TP006", "TP008"]
    assert caught.value.message.startswith(
        "llama.json has 3 problems:\n  TP004 at splits[4].bounds: residual ends at 1984"
    )
    assert all(str(p) in caught.value.message for p in caught.value.problems)


def test_problems_are_bounded() -> None:
    """A plan with a thousand problems of a kind is told the first hundred."""
    splits = tuple(attrs.evolve(VALID.splits[VC], unit=0) for _ in range(1000))
    found = problems(edited(VALID, "splits", splits))
    assert sum(p.rule == "TP008" for p in found) == 100
    with pytest.raises(PlanError) as caught:
        verify(edited(VALID, "splits", splits))
    assert caught.value.problems == found
    assert len(caught.value.message.splitlines()) == 102
    assert caught.value.message.endswith(f"  and {len(found) - 100} more")


@given(
    plans(),
    st.sampled_from(["size", "unit", "width", "replicas", "bounds", "layers", "axis"]),
    st.data(),
)
def test_rules_never_stumble(plan: SplitPlan, field: str, data: st.DataObject) -> None:
    """Whatever a field holds, the rules answer; they never fail themselves."""
    i = data.draw(st.integers(0, len(plan.splits) - 1))
    values: dict[str, st.SearchStrategy[Any]] = {
        "bounds": st.lists(st.integers(-5, 5000), max_size=8).map(tuple),
        "layers": st.text("0123456789-,", max_size=12),
        "axis": st.sampled_from(Axis),
    }
    value = data.draw(values.get(field, st.integers()))
    changed = edited(plan, f"splits[{i}].{field}", value)
    if problems(changed):
        with pytest.raises(PlanError):
            verify(changed)


def test_different_query_groups_may_share_a_kv_split() -> None:
    """Layers with equal KV heads and different query heads share the KV entry; each Q entry follows it."""
    wide = attrs.evolve(VALID.splits[Q], layers="3-5", size=32, bounds=(0, 16, 24, 32, 32))
    narrow = attrs.evolve(VALID.splits[Q], layers="0-2")
    assert problems(edited(VALID, "splits", (VALID.splits[KV], narrow, wide, *VALID.splits[2:]))) == ()
