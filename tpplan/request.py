"""Validation of requests to the planner, before planning."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.devices import Device
from tpplan.errors import RequestError
from tpplan.model import ModelSpec
from tpplan.plan import CACHE_KINDS, KV_MODES, LAYOUTS, STRATEGIES, Cache, Request
from tpplan.rules import LEAST, MOST

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    Raises:
        RequestError: an unknown choice, a number out of range, or a context longer than the model's.
    """
    batch, max_rows = asked.batch, asked.max_rows
    layout = asked.layout or ("gather" if model.gather_only else "reduce")
    _known("layout", layout, LAYOUTS)
    _known("strategy", asked.strategy, STRATEGIES)
    _known("cache kind", asked.cache.kind, tuple(CACHE_KINDS))
    _known("kv mode", asked.kv, KV_MODES)
    _in_range("batch", batch, 1, _MOST_ROWS)
    _in_range("max_rows", max_rows, 1, _MOST_ROWS)
    tokens = asked.cache.tokens or model.max_context * batch
    _in_range("cache tokens", tokens, 1, _MOST_TOKENS)
    if max_rows < batch:
        hint = f"ask for at least {batch} rows"
        raise RequestError(f"max_rows {max_rows} is less than the {batch} sequences that decode together", hint)
    if tokens > model.max_context * batch:
        each = f"{-(-tokens // batch)} tokens per sequence"
        told = each if batch == 1 else f"{tokens} cache tokens for {batch} sequences, {each},"
        message = f"{told} are more than the {model.max_context} that {model.name} was made for"
        raise RequestError(message, f"ask for at most {model.max_context} per sequence")
    if tokens < batch:
        raise RequestError(f"{tokens} cache tokens are less than one for each of {batch} sequences", "ask for more")
    if layout == "reduce" and model.gather_only:
        message = f"the weights of {model.name} cannot be cut by rows: {model.gather_only}"
        raise RequestError(message, "use the layout gather, or leave the choice to tpplan")
    return evolve(asked, layout=layout, cache=Cache(asked.cache.kind, tokens))


def check_devices(devices: Sequence[Device], request: Request) -> None:
    """Check the number of devices, their values, what is reserved of them, and whether bandwidths are known.

    Raises:
        RequestError: there are no or too many devices, a value is out of range (the error names the device), a reserve
            names a device that is not there or one twice, or the strategy is ``latency`` and the bandwidth of a device
            is unknown.
    """
    if not 0 < len(devices) <= _MOST_DEVICES:
        raise RequestError(f"{len(devices)} devices, expected 1 to {_MOST_DEVICES}", "name GPUs such as 2x24GiB,12GiB")
    for name, least in LEAST[Device].items():
        for i, device in enumerate(devices):
            _in_range(f"{name} of device {i} ({device.name})", getattr(device, name), least, MOST)
    reserved: set[int] = set()
    for each in request.reserve:
        _in_range("the reserve in bytes", each.bytes, 1, MOST)
        if each.device in reserved or not -1 <= each.device < len(devices):
            again = "is reserved twice" if each.device in reserved else f"is not one of the {len(devices)} devices"
            raise RequestError(f"memory of device {each.device} {again}", "name each device once, counted from 0")
        reserved.add(each.device)
    unknown = [f"{i} ({d.name})" for i, d in enumerate(devices) if not d.bandwidth_bytes_per_second]
    if request.strategy == "latency" and unknown:
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        message = (
            f"the strategy latency needs every device's bandwidth, unknown for device {', '.join(unknown[:_NAMED])}"
        )
        hint = "name GPUs of the catalogue, such as RTX4090:20GiB, or give bandwidth_bytes_per_second in a devices file"
        raise RequestError(message + more, hint)


def _known(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        near = get_close_matches(str(value).casefold(), choices, 1)
        hint = f"did you mean {near[0]}?" if near else "choose one of these"
        raise RequestError(f"unknown {what} {str(value)[:40]!r}, expected {', '.join(choices)}", hint)


def _in_range(what: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        message = f"{what} is {str(value)[:40]}, expected a whole number from {least} to {most}"
        raise RequestError(message, "choose a number in that range")
