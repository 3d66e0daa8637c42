"""The rules that every plan obeys, each with its number, TP001 and so on."""

from __future__ import annotations

import re
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from tpplan.core.limits import CAPABILITY, DTYPES, FINGERPRINT, LEAST, LONGEST_NAME, MOST
from tpplan.core.plan import (
    CACHE_KINDS,
    HEADS,
    KV_MODES,
    LAYOUTS,
    STRATEGIES,
    SplitPlan,
    least_version,
)
from tpplan.core.sizes import counted
from tpplan.core.versions import version_problem
from tpplan.files.jsontext import UNSEEN
from tpplan.planfile import split_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tpplan.core.speed import Pass, Speed
    from tpplan.planfile.split_rules import Finding

#: Numbers that a message lists.
_LISTED = 8


def known_version(plan: SplitPlan) -> Iterator[Finding]:
    """The format version is one that this tpplan knows completely, and the oldest that has all keys of the plan."""
    if message := version_problem(plan.format_version):
        yield "format_version", message
    elif plan.format_version != (least := least_version(plan)):
        yield "format_version", f"is {plan.format_version}, expected {least}, the oldest version with all of its keys"


def at_least(plan: SplitPlan) -> Iterator[Finding]:
    """Sizes and counts are 1 or more, bytes are 0 or more: no device is ever over its budget."""
    for path, value, least in _numbers(plan):
        if value < least:
            yield path, f"is {value}, expected {least} or more"


def at_most(plan: SplitPlan) -> Iterator[Finding]:
    """Every number fits in 64 bits."""
    for path, value, _ in _numbers(plan):
        if value > MOST:
            yield path, f"is beyond {MOST} (2^63 - 1)"


def some_device(plan: SplitPlan) -> Iterator[Finding]:
    """There is a device."""
    if not plan.devices:
        yield "devices", "has 0 entries, expected 1 or more"


def memory_per_device(plan: SplitPlan) -> Iterator[Finding]:
    """Memory has one entry per device, in order."""
    if len(plan.memory) != len(plan.devices):
        yield "memory", f"has {counted(len(plan.memory), 'entry')} for {counted(len(plan.devices), 'device')}"
    for i, entry in enumerate(plan.memory):
        if entry.device != i:
            yield f"memory[{i}].device", f"is {entry.device}, expected {i}"


def budget_adds_up(plan: SplitPlan) -> Iterator[Finding]:
    """The four buckets, what is reserved, what is left to a draft model and what is free add up to the budget."""
    for i, (device, entry) in enumerate(zip(plan.devices, plan.memory, strict=False)):
        total = entry.used_bytes + entry.left_bytes + entry.free_bytes
        if total != device.budget_bytes:
            off = f"{abs(total - device.budget_bytes)} too {'many' if total > device.budget_bytes else 'few'}"
            budget = f"the {device.budget_bytes} of the budget of {device.name[:40]!r}"
            yield f"memory[{i}]", f"adds up to {total} bytes, {off} for {budget}"


def idle_is_empty(plan: SplitPlan) -> Iterator[Finding]:
    """A device without a slice of any axis uses no memory."""
    used = _used_devices(plan)
    for i, entry in enumerate(plan.memory):
        if i not in used and entry.used_bytes:
            yield f"memory[{i}]", f"uses {entry.used_bytes} bytes on a device that holds no slice"


def overhead_is_the_device_s(plan: SplitPlan) -> Iterator[Finding]:
    """A device that holds a slice pays its overhead, or leaves it to the plan of the model that this one drafts for."""
    used, is_shared = _used_devices(plan), bool(plan.request.drafts_for)
    for i, (device, entry) in enumerate(zip(plan.devices, plan.memory, strict=False)):
        if i in used and entry.overhead_bytes != (0 if is_shared else device.overhead_bytes):
            of = "the model's plan has it" if is_shared else f"devices[{i}] declares {device.overhead_bytes}"
            yield f"memory[{i}].overhead_bytes", f"is {entry.overhead_bytes}, {of}"
        if i in used and is_shared and entry.free_bytes < device.overhead_bytes:
            yield f"memory[{i}].free_bytes", f"is {entry.free_bytes}, less than the overhead of {device.overhead_bytes}"


def known_choices(plan: SplitPlan) -> Iterator[Finding]:
    """Layout, strategy, cache kind, kv mode, dtype and the kind of a head are known ones."""
    draft = plan.request.draft
    for path, value, known in (
        *([("request.draft.head", draft.head, HEADS)] if draft and draft.head else []),
        ("model.dtype", plan.model.dtype, DTYPES),
        ("request.layout", plan.request.layout, LAYOUTS),
        ("request.strategy", plan.request.strategy, STRATEGIES),
        ("request.cache.kind", plan.request.cache.kind, tuple(CACHE_KINDS)),
        ("request.kv", plan.request.kv, KV_MODES),
    ):
        if value not in known:
            yield path, f"is {value[:40]!r}, expected {', '.join(known[:-1])} or {known[-1]}"


def something_for_each_sequence(plan: SplitPlan) -> Iterator[Finding]:
    """Each sequence of the batch has a row of a pass and a token of the cache."""
    request = plan.request
    for path, count, what in (
        ("request.max_rows", request.max_rows, "rows"),
        ("request.cache.tokens", request.cache.tokens, "tokens"),
    ):
        if 0 < count < request.batch:
            yield path, f"is {count}, {request.batch} sequences that decode together need {request.batch} {what}"


def pool_is_shared(plan: SplitPlan) -> Iterator[Finding]:
    """Where sequences share a pool of tokens, one may have more than an equal part of it, and at most all."""
    request = plan.request
    least = -(-request.cache.tokens // max(1, request.batch))
    if request.context and not least < request.context <= request.cache.tokens:
        of = f"{request.batch} sequences that share {request.cache.tokens} tokens"
        yield "request.context", f"is {request.context}, for {of} expected more than an equal part and at most all"


def reserved_as_asked(plan: SplitPlan) -> Iterator[Finding]:
    """Every device leaves the memory that the request reserves, which names each device once."""
    devices = [reserve.device for reserve in plan.request.reserve]
    for i, device in enumerate(devices):
        if device in devices[:i] or device >= len(plan.devices):
            again = "named before" if device in devices[:i] else f"not one of the {len(plan.devices)} devices"
            yield f"request.reserve[{i}].device", f"is {device}, {again}"
    for i, entry in enumerate(plan.memory):
        if entry.reserved_bytes != (asked := plan.request.reserved(i)):
            yield f"memory[{i}].reserved_bytes", f"is {entry.reserved_bytes}, the request reserves {asked}"


def room_as_asked(plan: SplitPlan) -> Iterator[Finding]:
    """Every device leaves the room that what drafts has there, with its overhead where it holds no slice."""
    used, request = _used_devices(plan), plan.request
    if request.drafts_for and (request.draft or request.mtp):
        yield "request.draft" if request.draft else "request.mtp", "is given in the plan of a draft model"
    if request.draft is None:
        if request.mtp:
            yield "request.draft", "is missing, expected the room of prediction layers"
    elif len(request.draft.room_bytes) != len(plan.devices):
        rooms, devices = counted(len(request.draft.room_bytes), "number"), counted(len(plan.devices), "device")
        yield "request.draft.room_bytes", f"has {rooms} for {devices}, expected one for each"
        return
    elif not any(request.draft.room_bytes):
        yield "request.draft.room_bytes", "is 0 on every device, expected the room of what drafts"
    elif not request.draft.split and len({*request.draft.room_bytes}) > 1:
        rooms = _listed([*request.draft.room_bytes])
        yield "request.draft.room_bytes", f"is {rooms}, expected the same on each device, as it is not split"
    for i, (device, entry) in enumerate(zip(plan.devices, plan.memory, strict=False)):
        room = request.room(i)
        wanted = room + (device.overhead_bytes if room and i not in used else 0)
        if entry.draft_bytes != wanted:
            yield f"memory[{i}].draft_bytes", f"is {entry.draft_bytes}, expected {wanted} for what drafts"


def fingerprint_form(plan: SplitPlan) -> Iterator[Finding]:
    """The fingerprint is a SHA-256."""
    if not re.fullmatch(FINGERPRINT, plan.model.fingerprint):
        yield "model.fingerprint", f"is {plan.model.fingerprint[:80]!r}, expected sha256: and 64 hexadecimal digits"


def capability_form(plan: SplitPlan) -> Iterator[Finding]:
    """A compute capability is two numbers, or left out."""
    for i, device in enumerate(plan.devices):
        if not re.fullmatch(CAPABILITY, device.capability):
            yield f"devices[{i}].capability", f"is {device.capability[:40]!r}, expected such as '8.9'"


def names_readable(plan: SplitPlan) -> Iterator[Finding]:
    """Names are short, not empty, and hide nothing from the reader."""
    model = plan.model
    names = [("model.name", model.name), ("model.architecture", model.architecture)]
    names += [(f"model.not_planned[{i}].what", part.what) for i, part in enumerate(model.not_planned)]
    told = (
        ("model.assumed", model.assumed),
        ("model.weight_format", model.weight_format),
        ("request.drafts_for", plan.request.drafts_for),
    )
    names += [(path, text) for path, text in told if text]
    names += [("request.draft.name", plan.request.draft.name)] if plan.request.draft else []
    for path, name in chain(names, ((f"devices[{i}].name", d.name) for i, d in enumerate(plan.devices))):
        if not name.strip():
            yield path, "is empty"
        elif len(name) > LONGEST_NAME:
            yield path, f"has {len(name)} characters, the most is {LONGEST_NAME}"
        elif hidden := UNSEEN.search(name):
            yield path, f"has the invisible character U+{ord(hidden[0]):04X} at position {hidden.start()}"


def reads_where_optimised(plan: SplitPlan) -> Iterator[Finding]:
    """With the strategy latency, and no other, each device that holds a slice reads some of its weights and cache."""
    used, strategy = _used_devices(plan), plan.request.strategy
    for i, entry in enumerate(plan.memory):
        path, reads, most = f"memory[{i}].reads_bytes", entry.reads_bytes, entry.weights_bytes + entry.cache_bytes
        if strategy == "latency" and i in used:
            if not 0 < reads <= most:
                yield path, f"is {reads}, expected 1 or more, and no more than the {most} of weights and cache"
        elif reads:
            where = (
                "on a device that holds no slice" if strategy == "latency" else f"with the strategy {strategy[:40]!r}"
            )
            yield path, f"is {reads} {where}"


def times_of_devices_in_use(plan: SplitPlan) -> Iterator[Finding]:
    """A prediction has times of each device in use, in order, of one sequence and the batch; none exceeds its pass."""
    if plan.speed is None:
        return
    used = sorted(_used_devices(plan))
    for name, passes in _passes(plan.speed):
        for i, one in enumerate(passes):
            yield from ((f"speed.{name}[{i}].{key}", text) for key, text in _of_pass(one, used))
    rows, wanted = [one.rows for one in plan.speed.decode], [*dict.fromkeys((1, plan.request.batch))]
    if rows != wanted:
        yield "speed.decode", f"is for batches of {_listed(rows)}, expected {_listed(wanted)}"
    if len(plan.speed.prefill) > 1:
        yield "speed.prefill", f"has {len(plan.speed.prefill)} entries, expected 1 at most"
    pairs = [(link.first, link.second) for link in plan.speed.links]
    for i, (first, second) in enumerate(pairs):
        if not 0 <= first < second < len(plan.devices) or (first, second) in pairs[:i]:
            again = "a second time" if (first, second) in pairs[:i] else f"expected two of {len(plan.devices)} devices"
            yield f"speed.links[{i}]", f"joins {first} and {second}, {again}"


def _of_pass(one: Pass, used: list[int]) -> Iterator[Finding]:
    if [each.device for each in one.devices] != used:
        yield "devices", f"is not of devices {_listed(used)}, which hold slices"
    for key in ("without_cache_ns", "total_ns"):
        longest, whole = max((getattr(each, key) for each in one.devices), default=0), getattr(one, key)
        if 0 < whole < longest:
            yield key, f"is {whole}, less than the {longest} of a device alone"


def _passes(speed: Speed) -> tuple[tuple[str, tuple[Pass, ...]], ...]:
    return ("decode", speed.decode), ("prefill", speed.prefill)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:_LISTED])) + (", …" if numbers[_LISTED:] else "") or "none"


def _numbers(plan: SplitPlan) -> Iterator[tuple[str, int, int]]:
    """Yield path, value and least value of every whole number that no other rule pins down."""
    parts: list[tuple[str, object]] = [
        ("model", plan.model),
        ("request", plan.request),
        ("request.cache", plan.request.cache),
    ]
    listed: list[tuple[str, tuple[object, ...]]] = [
        (name, getattr(plan, name)) for name in ("devices", "splits", "memory")
    ]
    listed += [("model.not_planned", plan.model.not_planned), ("request.reserve", plan.request.reserve)]
    if plan.speed:
        passes = [(f"speed.{name}", found) for name, found in _passes(plan.speed)]
        listed += [("speed.links", plan.speed.links), *passes]
        listed += [(f"{name}[{i}].devices", one.devices) for name, found in passes for i, one in enumerate(found)]
    parts += [(f"{name}[{i}]", part) for name, rows in listed for i, part in enumerate(rows)]
    for path, part in parts:
        for name, least in LEAST[type(part)].items():
            yield f"{path}.{name}", getattr(part, name), least
    for i, room in enumerate(plan.request.draft.room_bytes if plan.request.draft else ()):
        yield f"request.draft.room_bytes[{i}]", room, 0


def _used_devices(plan: SplitPlan) -> frozenset[int]:
    """Return the devices that hold a slice."""
    return frozenset(i for s in plan.splits for i, (a, b) in enumerate(pairwise(s.bounds)) if a != b)


#: A number once given is never given to another rule: people write it in reviews and in searches.
RULES: dict[str, Callable[[SplitPlan], Iterator[Finding]]] = {
    "TP001": known_version,
    "TP002": split_rules.bounds_length,
    "TP003": split_rules.bounds_start,
    "TP004": split_rules.bounds_end,
    "TP005": split_rules.bounds_ascend,
    "TP006": split_rules.whole_units,
    "TP007": split_rules.minimum_share,
    "TP008": at_least,
    "TP009": at_most,
    "TP010": split_rules.layer_ranges,
    "TP011": split_rules.layers_where_due,
    "TP012": split_rules.layers_once,
    "TP013": split_rules.alike_together,
    "TP014": split_rules.outer_axes_once,
    "TP015": split_rules.split_order,
    "TP016": split_rules.query_follows_kv,
    "TP017": split_rules.replicas_where_asked,
    "TP018": some_device,
    "TP019": memory_per_device,
    "TP020": budget_adds_up,
    "TP021": idle_is_empty,
    "TP022": overhead_is_the_device_s,
    "TP023": known_choices,
    "TP024": fingerprint_form,
    "TP025": capability_form,
    "TP026": names_readable,
    "TP027": split_rules.few_splits,
    "TP028": something_for_each_sequence,
    "TP029": reads_where_optimised,
    "TP030": pool_is_shared,
    "TP031": reserved_as_asked,
    "TP032": times_of_devices_in_use,
    "TP033": room_as_asked,
}
