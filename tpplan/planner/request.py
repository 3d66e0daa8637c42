"""Validation of requests to the planner, before planning; and what a plan was asked for."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.device import BANDWIDTHS_HINT, Device
from tpplan.core.limits import LEAST, MOST
from tpplan.core.model import ModelSpec
from tpplan.core.plan import AUTO, CACHE_KINDS, HEADS, KV_MODES, LAYOUTS, STRATEGIES, Cache, Request, Reserve
from tpplan.core.sizes import counted, format_bytes
from tpplan.errors import RequestError
from tpplan.planner.speed import bandwidth_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.plan import SplitPlan

_MOST_ROWS = 2**24
_MOST_TOKENS = 2**40
_MOST_DEVICES = 4096
_NAMED = 3


def check_kinds(model: object, devices: Sequence[object], cache: object) -> None:
    """Check the types of a model, devices and a cache, for which names are a common mistake.

    Raises:
        RequestError: an argument has the wrong type; the hint names the function or class that makes the right one.
    """
    if not isinstance(model, ModelSpec):
        raise RequestError(f"the model is {model!r:.60}, expected a ModelSpec", "tpplan.read_model(path) reads one")
    if not isinstance(cache, Cache):
        raise RequestError(f"the cache is {cache!r:.60}, expected a Cache", 'such as tpplan.Cache("q8", tokens=32768)')
    if wrong := [device for device in devices if not isinstance(device, Device)]:
        hint = 'tpplan.parse_devices("2x24GiB,12GiB") makes them'
        raise RequestError(f"a device is {wrong[0]!r:.60}, expected a Device", hint)


def resolve(model: ModelSpec, asked: Request) -> Request:
    """Check a request against the model and fill in its defaults: an empty layout, 0 tokens.

    What changes nothing is left out: a context that is an equal part of the tokens, whole windows where none is shorter
    than a sequence, and leave to go beyond the model's context where no sequence does.

    Raises:
        RequestError: an unknown choice, a number out of range, a context longer than the model's, or a model that is
            a head, for itself.
    """
    if model.model_type in HEADS and not asked.drafts_for:
        raise _head_alone(model)
    batch, max_rows = asked.batch, asked.max_rows
    layout = asked.layout or ("gather" if model.gather_only else "reduce")
    _known("layout", layout, LAYOUTS)
    _known("strategy", asked.strategy, STRATEGIES)
    _known("cache kind", asked.cache.kind, tuple(CACHE_KINDS))
    _known("kv mode", asked.kv, KV_MODES)
    _in_range("batch", batch, 1, _MOST_ROWS)
    _in_range("max_rows", max_rows, 1, _MOST_ROWS)
    if max_rows < batch:
        hint = f"ask for at least {batch} rows"
        raise RequestError(f"max_rows {max_rows} is less than the {batch} sequences that decode together", hint)
    cache, context = _tokens(model, asked)
    sequence = context or -(-cache.tokens // batch)
    beyond = sequence > model.max_context
    if beyond:
        _check_beyond(model, asked, sequence)
    if layout == "reduce" and model.gather_only:
        message = f"the weights of {model.name} cannot be cut by rows: {model.gather_only}"
        raise RequestError(message, "use the layout gather, or leave the choice to tpplan")
    shorter = any(0 < block.attention.window < sequence for block in model.blocks if block.attention)
    return evolve(
        asked, layout=layout, cache=cache, context=context, full_window=asked.full_window and shorter, beyond=beyond
    )


def _head_alone(model: ModelSpec) -> RequestError:
    from tpplan.models.families.drafts import KINDS  # noqa: PLC0415 (all tables are read for it)

    kind = KINDS[model.model_type].name
    message = f"{model.name} is {kind}, which cannot run without the model that it drafts for"
    return RequestError(message, "name it with --draft beside its model")


def _tokens(model: ModelSpec, asked: Request) -> tuple[Cache, int]:
    """Return the cache with all of its tokens, and the context if it is more than an equal part of them, else 0."""
    batch, context = asked.batch, asked.context
    _in_range("context", context, 0, _MOST_TOKENS)
    tokens = asked.cache.tokens or (context or model.max_context) * batch
    _in_range("cache tokens", tokens, 1, _MOST_TOKENS)
    if tokens < batch:
        raise RequestError(f"{tokens} cache tokens are less than one for each of {batch} sequences", "ask for more")
    if context > tokens:
        message = f"a sequence of {context} tokens does not fit into a pool of {tokens} cache tokens"
        raise RequestError(message, f"ask for at least {context} cache tokens, or for a context of at most {tokens}")
    if context and tokens > context * batch:
        of = f"{counted(batch, 'sequence')} of at most {counted(context, 'token')}"
        hint = f"ask for at most {context * batch} cache tokens, for a longer context, or for more sequences"
        raise RequestError(f"{tokens} cache tokens are more than {of} can fill", hint)
    return Cache(asked.cache.kind, tokens), context if context > -(-tokens // batch) else 0


def _check_beyond(model: ModelSpec, asked: Request, sequence: int) -> None:
    """Check that a context longer than the model's is wanted, and that the model has positions for it."""
    batch, tokens, most = asked.batch, asked.cache.tokens, model.max_context
    split = batch > 1 and tokens and not asked.context
    told = f"{tokens} cache tokens for {batch} sequences, " if split else ""
    each = f"{counted(sequence, 'token')} per sequence{',' if split else ''}"
    message = f"{told}{each} are more than the {most} that {model.name}"
    hint = f"ask for at most {most} per sequence"
    if any(p.lookup and all(s.axis is not Axis.VOCAB for s in p.dims[0]) for p in model.parameters):
        raise RequestError(f"{message} has positions for", hint)
    if not asked.beyond:
        raise RequestError(f"{message} was made for", f"{hint}, or go beyond at your own risk: --beyond, beyond=True")


def asked_strategy(plan: SplitPlan) -> str:
    """Return the strategy that a plan was asked for: ``auto`` where that gives this plan, else the plan's own."""
    strategy = plan.request.strategy
    is_known = all(map(bandwidth_of, plan.devices))
    return AUTO if plan.speed or (strategy == "balanced" and not is_known) else strategy


def check_devices(devices: Sequence[Device], request: Request) -> None:
    """Check the number of devices, their values, what is reserved of them, and whether bandwidths are known.

    Raises:
        RequestError: there are no or too many devices, a value is out of range (the error names the device), a reserve
            is impossible, or the strategy is ``latency`` and the bandwidth of a device is unknown.
    """
    if not 0 < len(devices) <= _MOST_DEVICES:
        raise RequestError(f"{len(devices)} devices, expected 1 to {_MOST_DEVICES}", "name GPUs such as 2x24GiB,12GiB")
    for name, least in LEAST[Device].items():
        for i, device in enumerate(devices):
            _in_range(f"{name} of device {i} ({device.name})", getattr(device, name), least, MOST)
    _check_reserve(devices, request)
    unknown = [f"{i} ({d.name})" for i, d in enumerate(devices) if not bandwidth_of(d)]
    if request.strategy == "latency" and unknown:
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        message = (
            f"the strategy latency needs every device's bandwidth, unknown for device {', '.join(unknown[:_NAMED])}"
        )
        hint = f"{BANDWIDTHS_HINT}, or measure it: tpplan devices --measure -o devices.json"
        raise RequestError(message + more, hint)


def _check_reserve(devices: Sequence[Device], request: Request) -> None:
    """Check that reserves are for devices that are there, once for each, and leave something of their budgets.

    What drafts has room on each device.

    Raises:
        RequestError: one is not, or it has not.
    """
    named: set[int] = set()
    for each in request.reserve:
        if type(each) is not Reserve:
            hint = "such as tpplan.Reserve(2**30), or tpplan.Reserve(2**30, device=0)"
            raise RequestError(f"a reserve is {each!r:.60}, expected a Reserve", hint)
        _in_range("a reserve in bytes", each.bytes, 1, MOST)
        if type(each.device) is not int or not -1 <= each.device < len(devices):
            there = f"are devices 0 to {len(devices) - 1} only" if len(devices) > 1 else "is device 0 only"
            message = f"{format_bytes(each.bytes)} are reserved on device {each.device!s:.40}, but there {there}"
            raise RequestError(message, "reserve memory of a device that is there, or name more devices")
        if each.device in named:
            which = f"device {each.device}" if each.device >= 0 else "every device"
            raise RequestError(f"memory of {which} is reserved twice", "reserve once what is to be left in all")
        named.add(each.device)
    for i, device in enumerate(devices):
        if (reserved := request.reserved(i)) >= device.budget_bytes:
            of = f"device {i} ({device.name}) has a budget of {format_bytes(device.budget_bytes)}"
            hint = f"reserve less of it, as in --reserve 1GiB@{i}, or leave it out"
            raise RequestError(f"{of}, of which {format_bytes(reserved)} are to be reserved", hint)
    if request.draft and len(request.draft.room_bytes) != len(devices):
        parts = counted(len(request.draft.room_bytes), "device")
        message = f"the room of {request.draft.name} is for {parts} that it is split over, and there are {len(devices)}"
        raise RequestError(message, f"plan again with it: {'--mtp' if request.mtp else '--draft and --draft-output'}")


def _known(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        near = get_close_matches(str(value).casefold(), choices, 1)
        hint = f"did you mean {near[0]}?" if near else "choose one of these"
        raise RequestError(f"unknown {what} {str(value)[:40]!r}, expected {', '.join(choices)}", hint)


def _in_range(what: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        message = f"{what} is {str(value)[:40]}, expected a whole number from {least} to {most}"
        raise RequestError(message, "choose a number in that range")
