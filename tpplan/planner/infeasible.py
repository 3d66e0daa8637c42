"""The error for requests that fit no plan: the shortfall of each device, and suggestions verified by planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from tpplan.core.device import Device
from tpplan.core.model import ModelSpec
from tpplan.core.plan import CACHE_KINDS, Cache, Request
from tpplan.core.sizes import format_bytes, format_enough, listed
from tpplan.errors import TpplanError
from tpplan.hardware.spec import with_budget
from tpplan.planner.attempt import Attempt, attempt
from tpplan.planner.costs import Demands
from tpplan.planner.ledger import demands
from tpplan.planner.place import Effort

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Adds to a request the room on devices for a draft model, whose size depends on both, but not on the strategy.
Room = Callable[[Request, tuple[Device, ...]], Request]

#: Contexts to suggest are multiples of so many tokens.
CONTEXT_STEP = 256
_MEMORY_STEP = 2**26
#: Fewest tenths of a bit per weight to speak of.
FEWEST_TENTHS = 15
#: Largest budget to suggest; no GPU has this much memory.
_MOST_MEMORY = 2**39
_MOST_JOINING = 64
#: Most kinds of devices to try for suggestions of more devices or more memory: the largest ones.
_TRIED_DEVICES = 6
#: Of more devices than this, only the largest kind.
_MANY_DEVICES = 64
#: Devices that a suggestion names.
_NAMED = 3


@frozen
class Shortfall:
    """The memory that a device needs for the cut that lacks least, and how much of it is missing, in bytes.

    Missing bytes are attributed to the cache first, then to workspace, weights and overhead.

    Attributes:
        device: index of the device.
        name: display name of the device.
        budget_bytes: budget of the device.
        weights_bytes: bytes needed for weights.
        cache_bytes: bytes needed for the cache.
        workspace_bytes: bytes needed for the workspace.
        overhead_bytes: bytes needed for the overhead.
        missing_bytes: bytes needed in excess of the budget, 0 if the device has enough.
        missing_weights_bytes: part of the missing bytes attributed to weights.
        missing_cache_bytes: part of the missing bytes attributed to the cache.
        missing_workspace_bytes: part of the missing bytes attributed to the workspace.
        missing_overhead_bytes: part of the missing bytes attributed to the overhead.
        reserved_bytes: bytes of the budget that the request reserves.
        draft_bytes: bytes of the budget that are left to what drafts.
    """

    device: int
    name: str
    budget_bytes: int
    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    overhead_bytes: int
    missing_bytes: int
    missing_weights_bytes: int
    missing_cache_bytes: int
    missing_workspace_bytes: int
    missing_overhead_bytes: int
    reserved_bytes: int = 0
    draft_bytes: int = 0


@frozen
class Suggestion:
    """A single change with which planning succeeds.

    Attributes:
        kind: ``context``, ``tokens``, ``batch``, ``cache``, ``layout``, ``kv``, ``strategy``, ``reserve``, ``devices``,
            ``memory`` or ``draft-output``.
        value: tokens per sequence, those that sequences share, the number of sequences, the cache kind, the layout, kv
            mode or strategy, the bytes to reserve (0: nothing), the number of devices to add, the budget in bytes, or
            a file for the plan of the draft model.
        device: index of the device to add more of, or to give the budget to; -1 for the other kinds.
        message: description of the change.
        context: of ``tokens``, the context to lower to, so that a sequence fits into the pool; 0 to leave it.
        in_file: of ``memory``, whether another GPU has to have a known bandwidth, which only a devices file tells.
    """

    kind: str
    value: str
    device: int
    message: str
    context: int = 0
    in_file: bool = False


class InfeasibleError(TpplanError):
    """No plan fits the budgets.

    Attributes:
        shortfalls: one per device.
        suggestions: single changes that make the request fit, each verified by planning.
    """

    def __init__(
        self, message: str, hint: str, shortfalls: tuple[Shortfall, ...], suggestions: tuple[Suggestion, ...]
    ) -> None:
        super().__init__(message, hint)
        self.shortfalls = shortfalls
        self.suggestions = suggestions

    def with_first(self, suggestion: Suggestion) -> InfeasibleError:
        """Return the error with another suggestion, before its own."""
        hint = f"{suggestion.message}; or {self.hint}"
        return InfeasibleError(self.message, hint, self.shortfalls, (suggestion, *self.suggestions))


@frozen
class Trials:
    """Attempts to plan, with as little effort as tells whether there is a plan.

    Attributes:
        model: the model.
        devices: the devices.
        request: what was asked.
        room: leaves room in a request for a draft model; None if there is none, or the request says its room. A
            TpplanError says that there is no room.
        costs: the model's costs, by request and number of devices, as far as it matters.
        rooms: requests with their room, by request and devices: that of a draft model which is split takes a plan.
    """

    model: ModelSpec
    devices: tuple[Device, ...]
    request: Request
    room: Room | None = None
    costs: dict[tuple[Request, int], Demands] = field(factory=dict)
    rooms: dict[tuple[Request, tuple[Device, ...]], Request | None] = field(factory=dict)

    def whole(self, request: Request, devices: tuple[Device, ...]) -> Request | None:
        """Return a request with the room that it needs beside the model, computed once; None if there is none."""
        if self.room is None:
            return request
        key = _any_strategy(request), devices
        if key not in self.rooms:
            try:
                self.rooms[key] = self.room(request, devices)
            except TpplanError:
                self.rooms[key] = None
        found = self.rooms[key]
        return evolve(found, strategy=request.strategy) if found else None

    def wanted(self, request: Request, count: int) -> Demands:
        """Return the model's costs, computed once."""
        key = evolve(request, reserve=(), draft=None), count if request.kv == "replicate" else 0
        if key not in self.costs:
            self.costs[key] = demands(self.model, request, count)
        return self.costs[key]

    def fits(self, request: Request | None = None, devices: tuple[Device, ...] = ()) -> bool:
        """Return whether another request or other devices give a plan."""
        return self.attempt(request or self.request, devices=devices, efforts=(Effort.ANY,)) is not None

    def idle(self, request: Request | None = None, devices: tuple[Device, ...] = ()) -> str:
        """Return, to go on with, which devices have no part of the model where another request or others fit."""
        found = self.attempt(request or self.request, devices=devices)
        idle = [each.device for each in found.memory if not each.used_bytes] if found else []
        if not idle or found is None:
            return ""
        named = [f"{i} ({found.devices[i].name})" for i in idle[:_NAMED]]
        more = f" and {len(idle) - _NAMED} more" if len(idle) > _NAMED else ""
        return f", which leaves device{'s' * (len(idle) > 1)} {', '.join(named)}{more} without a part"

    def fits_bits(self, request: Request, tenths: int) -> bool:
        """Return whether weights of so many tenths of a bit give a plan, if all tensors are smaller in proportion."""
        return self.attempt(request, tenths, efforts=(Effort.ANY,)) is not None

    def attempt(
        self,
        request: Request,
        tenths: int = 0,
        devices: tuple[Device, ...] = (),
        efforts: tuple[Effort, ...] = (Effort.QUICK, Effort.ANY),
    ) -> Attempt | None:
        """Return what is found for another request, by the first effort that finds some; None if none does.

        Args:
            request: the request.
            tenths: tenths of a bit per weight, if all tensors change in proportion; 0 for weights as they are.
            devices: other devices than those that were asked for.
            efforts: how long to look.
        """
        devices = devices or self.devices
        # What does not fit alone does not fit beside a draft model, whose room takes longer to find than that.
        is_known = not self.room or (_any_strategy(request), devices) in self.rooms
        if not is_known and not self._found(request, tenths, devices, efforts[-1:]):
            return None
        whole = self.whole(request, devices)
        return self._found(whole, tenths, devices, efforts) if whole else None

    def _found(
        self, request: Request, tenths: int, devices: tuple[Device, ...], efforts: tuple[Effort, ...]
    ) -> Attempt | None:
        wanted = self.wanted(request, len(devices))
        if tenths:
            wanted = wanted.with_weights(tenths * self.model.parameter_count, 80 * self.model.weight_bytes)
        tries = (attempt(self.model, devices, request, effort=each, wanted=wanted) for each in efforts)
        return next((each for each in tries if each and not each.lacking), None)


def _any_strategy(request: Request) -> Request:
    """Return a request without its strategy, which a room does not depend on."""
    return evolve(request, strategy="")


def explain(best: Attempt, room: Room | None = None, *, is_advised: bool = True) -> InfeasibleError:
    """Return the error for a request that does not fit, with shortfalls and suggestions.

    Args:
        best: the attempt that lacks least, or ExLlamaV2's.
        room: see :class:`Trials`.
        is_advised: whether to look for what would help.
    """
    model, devices = best.model, best.devices
    trials = Trials(model, devices, evolve(best.request, draft=None) if room else best.request, room)
    shortfalls = tuple(_shortfall(best, i) for i in range(len(devices)))
    suggestions = tuple(_suggestions(trials)) if is_advised else ()
    needed = sum(entry.used_bytes for entry in best.memory)
    budget = sum(device.budget_bytes for device in devices)
    left = sum(entry.left_bytes for entry in best.memory)
    usable = sum(
        max(0, device.budget_bytes - device.overhead_bytes - best.request.left(entry.device))
        for device, entry in zip(devices, best.memory, strict=True)
    )
    kept = f", of which {format_bytes(budget - left)} are left beside {listed(_left(best))}," if left else ","
    worst = max(shortfalls, key=lambda s: s.missing_bytes)
    message = (
        f"{model.name} does not fit: it needs {format_bytes(needed)} on {len(devices)} "
        f"device{'s' if len(devices) > 1 else ''} with budgets of {format_bytes(budget)} together{kept} "
        f"and device {worst.device} ({worst.name}) would lack {format_bytes(worst.missing_bytes)}"
    )
    if needed <= budget - left:
        coarse = sorted({f"{each.axis} ({each.units})" for each in best.wanted.axes if each.units < len(devices)})
        why = f"some axes have too few units for {len(devices)} devices: " if coarse else "whole units do not divide so"
        message += f"; there is enough in all, but {why}{', '.join(coarse)}"
    elif 0 < usable < model.weight_bytes:  # in any plan; this one may hold some weights twice
        parts = {"a reserve": "reserved_bytes", "room for what drafts": "draft_bytes"}
        what = listed(
            ["an overhead", *(part for part, key in parts.items() if any(getattr(entry, key) for entry in best.memory))]
        )
        beside = "" if model.weight_bytes > budget else f", beside {what} of {format_bytes(budget - usable)}"
        message += f"; its weights alone are {format_bytes(model.weight_bytes)}{beside}"
        bits = _fewer_bits(trials) if is_advised else ""
        message += f": with these budgets it needs a checkpoint with fewer bits per weight{bits}"
    hint = "; or ".join(s.message for s in suggestions) or "use more or larger devices, or a smaller model"
    return InfeasibleError(message, hint, shortfalls, suggestions)


def _left(best: Attempt) -> list[str]:
    """Return in words what of the budgets is left to others."""
    reserved, draft = (sum(getattr(entry, f"{key}_bytes") for entry in best.memory) for key in ("reserved", "draft"))
    told = [f"{format_bytes(reserved)} that are reserved"] * (reserved > 0)
    if draft and best.request.draft:
        told.append(f"{format_bytes(draft)} for {best.request.draft.name}")
    return told


def explain_draft(
    error: InfeasibleError, model: ModelSpec, devices: tuple[Device, ...], request: Request, room: Room
) -> InfeasibleError:
    """Return the error for a request whose draft model does not fit, with what would make both models fit.

    Args:
        error: why the draft model does not fit.
        model: the model that it drafts for.
        devices: the devices.
        request: for the model, without the room.
        room: see :class:`Trials`.
    """
    suggestions = tuple(_suggestions(Trials(model, devices, request, room)))
    hints = [suggestion.message for suggestion in suggestions]
    if not hints or not error.shortfalls:  # these say what a split lacks
        hints.append(error.hint)
    return InfeasibleError(error.message, "; or ".join(hints), error.shortfalls, suggestions)


def _fewer_bits(trials: Trials) -> str:
    """Return how many bits per weight would do, with as many of the tokens that were asked for as possible."""
    model, request = trials.model, trials.request
    now = model.weight_bytes * 80 // model.parameter_count
    tokens = request.cache.tokens // request.batch
    while tokens >= CONTEXT_STEP or tokens == request.cache.tokens // request.batch:
        cache = Cache(request.cache.kind, tokens * request.batch)
        context = min(request.context, cache.tokens)
        smaller = evolve(request, strategy="balanced", cache=cache, context=context)
        bits = most_that_fit(lambda tenths, smaller=smaller: trials.fits_bits(smaller, tenths), now)  # type: ignore[misc]
        if bits >= FEWEST_TENTHS:
            each = f" for each of {request.batch} sequences" if request.batch > 1 else ""
            at = f"a pool of {cache.tokens} tokens" if request.context else f"{tokens} tokens{each}"
            return (
                f": at most {bits // 10}.{bits % 10} at {at} in {request.cache.kind}, "
                f"if all tensors are smaller in proportion (now {now // 10}.{now % 10})"
            )
        tokens //= 2
    return ""


def _shortfall(best: Attempt, index: int) -> Shortfall:
    entry, device = best.memory[index], best.devices[index]
    left = missing = max(0, -entry.free_bytes)
    parts = []
    for size in (entry.cache_bytes, entry.workspace_bytes, entry.weights_bytes, entry.overhead_bytes):
        parts.append(min(left, size))
        left -= parts[-1]
    cache, workspace, weights, overhead = parts
    return Shortfall(
        device=index,
        name=device.name,
        budget_bytes=device.budget_bytes,
        weights_bytes=entry.weights_bytes,
        cache_bytes=entry.cache_bytes,
        workspace_bytes=entry.workspace_bytes,
        overhead_bytes=entry.overhead_bytes,
        missing_bytes=missing,
        missing_weights_bytes=weights,
        missing_cache_bytes=cache,
        missing_workspace_bytes=workspace,
        missing_overhead_bytes=overhead,
        reserved_bytes=entry.reserved_bytes,
        draft_bytes=entry.draft_bytes,
    )


def _suggestions(trials: Trials) -> Iterator[Suggestion]:
    """Yield single changes that make the request fit, those that cost the user least first."""
    request, fits = trials.request, trials.fits
    kinds = [kind for kind, size in CACHE_KINDS.items() if size < CACHE_KINDS[request.cache.kind]]
    kind = next((k for k in kinds if fits(evolve(request, cache=Cache(k, request.cache.tokens)))), "")
    if kind:
        idle = trials.idle(evolve(request, cache=Cache(kind, request.cache.tokens)))
        yield Suggestion("cache", kind, -1, f"cache the keys and values as {kind}{idle}")
    if request.context:
        yield from _largest_pool(request, fits)
    elif context := _largest_context(request, fits):
        idle = trials.idle(evolve(request, cache=Cache(request.cache.kind, context * request.batch)))
        yield Suggestion("context", str(context), -1, f"shorten the context to {context} tokens per sequence{idle}")
    batch = _largest_batch(request, fits)
    if batch:
        words = f"cache {batch} sequence{'s' if batch > 1 else ''} instead of {request.batch}"
        yield Suggestion("batch", str(batch), -1, words)
    layout = "gather" if request.layout == "reduce" else "reduce"
    if not (layout == "reduce" and trials.model.gather_only) and fits(evolve(request, layout=layout)):
        yield Suggestion("layout", layout, -1, f"use the layout {layout}")
    once = request.kv == "replicate"
    kv, words = ("idle", "store each KV head once") if once else ("replicate", "replicate the KV heads")
    is_fixed = bool(request.draft and request.draft.split)  # though with these changes it would be split otherwise
    if not is_fixed and fits(evolve(request, kv=kv)):
        yield Suggestion("kv", kv, -1, words)
    if request.strategy == "exllamav2" and not is_fixed and fits(evolve(request, strategy="balanced")):
        yield Suggestion("strategy", "balanced", -1, "use the strategy balanced, which keeps budgets")
    if request.reserve and fits(evolve(request, reserve=())):
        yield Suggestion("reserve", "0", -1, "reserve nothing")
    if not is_fixed:
        yield from _more_devices(trials)
        yield from _more_memory(trials)


def _largest_context(request: Request, fits: Callable[[Request], bool]) -> int:
    """Return the most tokens per sequence that fit, a multiple of 256, or 0."""
    each = CONTEXT_STEP * request.batch
    most = -(-request.cache.tokens // each) - 1
    steps = most_that_fit(lambda steps: fits(evolve(request, cache=Cache(request.cache.kind, steps * each))), most)
    return steps * CONTEXT_STEP


def _largest_pool(request: Request, fits: Callable[[Request], bool]) -> Iterator[Suggestion]:
    """Yield the largest pool that fits, a multiple of 256 tokens, with a lower context if that has to fit into it."""

    def smaller(steps: int) -> Request:
        tokens = steps * CONTEXT_STEP
        return evolve(request, cache=Cache(request.cache.kind, tokens), context=min(request.context, tokens))

    most = -(-request.cache.tokens // CONTEXT_STEP) - 1
    tokens = most_that_fit(lambda steps: fits(smaller(steps)), most) * CONTEXT_STEP
    if tokens >= request.batch:
        context = tokens if tokens < request.context else 0
        words = f"share a pool of {tokens} tokens" + f", with a context of {context}" * (context > 0)
        yield Suggestion("tokens", str(tokens), -1, words, context)


def _largest_batch(request: Request, fits: Callable[[Request], bool]) -> int:
    """Return the most sequences that fit with the same context each, or 0."""
    each, rest = divmod(request.cache.tokens, request.batch)
    if rest or request.context:  # of a pool, another number of sequences does not change the tokens
        return 0
    return most_that_fit(
        lambda batch: fits(evolve(request, batch=batch, cache=Cache(request.cache.kind, batch * each))),
        request.batch - 1,
    )


def most_that_fit(fits: Callable[[int], bool], most: int) -> int:
    """Return the greatest number up to ``most`` that fits, or 0.

    Args:
        fits: whether a number fits; it must be monotonic.
        most: the greatest number to try.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _different(devices: tuple[Device, ...]) -> list[tuple[int, Device]]:
    """Return the largest distinct devices, each with the index where it first occurs."""
    first = {device: i for i, device in reversed([*enumerate(devices)])}
    largest = sorted(((i, d) for d, i in first.items()), key=lambda pair: (-pair[1].budget_bytes, pair[0]))
    return largest[: _TRIED_DEVICES if len(devices) <= _MANY_DEVICES else 1]


def _more_devices(trials: Trials) -> Iterator[Suggestion]:
    """Yield the smallest number of devices to add, copies of one of the given devices."""
    devices = trials.devices
    best: tuple[int, int] | None = None
    for index, device in _different(devices):
        count = least_that_fits(
            lambda more, device=device: trials.fits(devices=(*devices, *[device] * more)),  # type: ignore[misc]
            best[0] - 1 if best else _MOST_JOINING,
        )
        if count:
            best = (count, index)
    if best:
        count, index = best
        idle = trials.idle(devices=(*devices, *[devices[index]] * count))
        yield Suggestion("devices", str(count), index, f"add {count} more {devices[index].name}{idle}")


def _more_memory(trials: Trials) -> Iterator[Suggestion]:
    """Yield the device that needs the smallest additional budget on its own, with its new budget."""
    devices = trials.devices
    best: tuple[int, int] | None = None
    for index, device in _different(devices):

        def fits(steps: int, index: int = index, device: Device = device) -> bool:
            larger = evolve(device, budget_bytes=device.budget_bytes + steps * _MEMORY_STEP)
            return trials.fits(devices=(*devices[:index], larger, *devices[index + 1 :]))

        most = (_MOST_MEMORY - device.budget_bytes) // _MEMORY_STEP
        steps = least_that_fits(fits, min(most, best[0] - 1) if best else most)
        if steps:
            best = (steps, index)
    if best:
        more, index = best[0] * _MEMORY_STEP, best[1]
        device, budget = devices[index], devices[index].budget_bytes + more
        words = f"give device {index} ({device.name}) {format_bytes(more)} more, {format_enough(budget)} in all"
        in_file = False
        if not with_budget(device, budget):
            in_file = trials.request.strategy == "latency"
            known = " and a known bandwidth" if in_file else ""
            words = f"take a GPU with {format_enough(budget)}{known} instead of device {index} ({device.name})"
        larger = evolve(device, budget_bytes=budget)
        idle = trials.idle(devices=(*devices[:index], larger, *devices[index + 1 :]))
        yield Suggestion("memory", str(budget), index, f"{words}{idle}", in_file=in_file)


def least_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Return the least number from 1 to ``most`` that fits, or 0; ``fits`` must be monotonic."""
    high = 1
    while high < most and not fits(high):
        high *= 2
    high = min(high, most)
    if high < 1 or not fits(high):
        return 0
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
