"""Other names and forms in which tools store the experts of a layer: one by one, all in one tensor, or renamed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.model import Parameter, Segment

if TYPE_CHECKING:
    from collections.abc import Iterator

#: All experts in one tensor; and each in tensors of its own.
_STACKED: Final = re.compile(r"(?P<start>.*)experts\.(?P<matrix>gate_up_proj|down_proj)(?P<bias>_bias)?")
_SINGLE: Final = re.compile(r"(?P<start>.*)experts\.\{expert\}\.(?P<matrix>\w+)\.(?P<kind>weight|bias)")

#: Mixtral's names of an expert's matrices, and those of most other models.
_NAMES: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OLDER: Final = {new: old for old, new in _NAMES.items()}
_MODULES: Final = ("block_sparse_moe.", "mlp.")


def variants(parameter: Parameter, experts: int) -> Iterator[tuple[Parameter, ...]]:
    """Yield the tensors that other tools store in place of a parameter of a mixture's layer.

    Args:
        parameter: weights or biases of experts, or a router; there are no variants of anything else.
        experts: number of routed experts.

    Yields:
        Parameters whose names may have ``{expert}`` in them. There are none where another parameter of the layer has
        these weights too: the up projection, if it is in one tensor with the gate.
    """
    if match := _STACKED.fullmatch(parameter.name):
        yield from _apart(parameter, match)
    elif match := _SINGLE.fullmatch(parameter.name):
        yield from _single(parameter, match, experts)
    elif _MODULES[0] in parameter.name:
        yield (evolve(parameter, name=parameter.name.replace(*_MODULES)),)


def _apart(parameter: Parameter, match: re.Match[str]) -> Iterator[tuple[Parameter, ...]]:
    """Yield what may be there in place of a tensor of all experts."""
    start, matrix = f"{match['start']}experts.", match["matrix"]
    kind = "bias" if match["bias"] else "weight"
    ((experts,), *_) = parameter.dims
    outputs = parameter.dims[len(parameter.dims) - 1 if parameter.out is None else parameter.out]
    inputs = () if match["bias"] else (parameter.dims[3 - (parameter.out or 2)],)
    one = evolve(parameter, dims=(outputs, *inputs), out=0, copies=experts.length)
    for name in (f"{start}{matrix}s.{{expert}}", f"{start}{{expert}}.{matrix}"):
        yield (evolve(one, name=f"{name}.{kind}"),)
    halves = {"down_proj": outputs} if matrix == "down_proj" else _halves(outputs)
    for names in ({}, _OLDER):
        yield tuple(
            evolve(one, name=f"{start}{{expert}}.{names.get(name, name)}.{kind}", dims=(half, *inputs))
            for name, half in halves.items()
        )
    for at in (start, f"{match['start']}switch_mlp."):
        yield tuple(
            evolve(parameter, name=f"{at}{name}.{kind}", dims=((experts,), half, *inputs), out=1)
            for name, half in halves.items()
        )


def _halves(outputs: tuple[Segment, ...]) -> dict[str, tuple[Segment, ...]]:
    """Return the outputs of gate and up projection, which are behind each other, or interleaved in one segment."""
    gate, up = outputs if len(outputs) > 1 else (evolve(outputs[0], length=outputs[0].length // 2),) * 2
    return {"gate_proj": (gate,), "up_proj": (up,)}


def _single(parameter: Parameter, match: re.Match[str], experts: int) -> Iterator[tuple[Parameter, ...]]:
    """Yield what may be there in place of the tensors of single experts."""
    kind, name = match["kind"], _NAMES.get(match["matrix"], match["matrix"])
    starts = dict.fromkeys((match["start"], match["start"].replace(*_MODULES)))
    for start in starts:
        for own in (name, _OLDER.get(name, name)):
            yield (evolve(parameter, name=f"{start}experts.{{expert}}.{own}.{kind}"),)
    dims = ((Segment(None, experts),), *parameter.dims)
    all_of = evolve(parameter, dims=dims, out=None if parameter.out is None else parameter.out + 1, copies=1)
    bias = "_bias" if kind == "bias" else ""
    for start in starts:
        for module in ("switch_mlp", "experts"):
            yield (evolve(all_of, name=f"{start}{module}.{name}.{kind}"),)
        if name == "down_proj":
            yield (evolve(all_of, name=f"{start}experts.down_proj{bias}"),)
        else:
            both = (dims[0], dims[1] * 2, *dims[2:])
            yield (evolve(all_of, name=f"{start}experts.gate_up_proj{bias}", dims=both),)
