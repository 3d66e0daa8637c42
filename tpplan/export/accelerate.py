"""Accelerate, through transformers: whole layers on devices, in proportion to what the plan gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.plan import CACHE_KINDS
from tpplan.core.sizes import format_bytes
from tpplan.export.engine import MODEL, CacheKind, Engine
from tpplan.export.facts import MIB, bytes_each, listed
from tpplan.models.families import FAMILIES
from tpplan.reports.export import TextFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.export.facts import Facts
    from tpplan.models.families.table import Family

#: The cache of transformers' models has the dtype of their activations.
_SIXTEEN_BITS = CacheKind(name="16-bit", sixteenths=32)
CACHES = dict.fromkeys(CACHE_KINDS, _SIXTEEN_BITS)

#: Architectures without RoPE, or with its tables in each layer.
_NO_TABLES = frozenset({
    *("BloomForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "OPTForCausalLM"),
})  # fmt: skip
#: Modules that transformers calls otherwise than the checkpoints, or has besides.
_RENAMED = {"embed_out": "lm_head"}
_BESIDES = {"GraniteSWAForCausalLM": ("model.rotary_embs",)}


def family_of(architecture: str) -> Family | None:
    """Return the tables of a language model by its architecture, None for a model that has one as a part."""
    return next((family for family in FAMILIES.values() if architecture in family.architectures), None)


def modules(architecture: str, family: Family) -> tuple[str, ...]:
    """Return the modules of transformers' model outside the layers."""
    names = [row.name.rpartition(".")[0] for row in family.outside]
    root = family.layers.partition("layers.")[0].partition("h.{")[0]
    tables = () if architecture in _NO_TABLES else (f"{root}rotary_emb",)
    return tuple(dict.fromkeys((*(_RENAMED.get(name, name) for name in names), *tables, *_BESIDES.get(architecture, ()))))


def room_bytes(plan: Facts) -> tuple[int, ...]:
    """Return for each device what its budget leaves for weights and cache."""
    return tuple(entry.weights_bytes + entry.cache_bytes + entry.free_bytes for entry in plan.memory)


def home(plan: Facts) -> int:
    """Return the device with the most room, which gets all that is outside the layers."""
    room = room_bytes(plan)
    return room.index(max(room))


def layer_bytes(plan: Facts) -> int:
    """Return the mean of a layer's weights and cache, rounded up; what the plan replicates counts each time."""
    inside = sum(entry.weights_bytes for entry in plan.memory) - plan.outside_bytes
    return -(-(max(0, inside) + sum(plan.cache_bytes(_SIXTEEN_BITS.sixteenths))) // plan.plan.model.layers)


def _most_layers(plan: Facts) -> tuple[int, ...]:
    """Return how many mean layers each device has room for."""
    room = [size - plan.outside_bytes * (i == home(plan)) for i, size in enumerate(room_bytes(plan))]
    return tuple(max(0, size // max(1, layer_bytes(plan))) for size in room)


def layer_counts(plan: Facts) -> tuple[int, ...]:
    """Return how many layers each device gets: near the plan's share of all bytes, and no more than it has room for."""
    layers, most, held = plan.plan.model.layers, _most_layers(plan), plan.held_bytes
    # Targets are in layers × all bytes, so that nothing is rounded.
    outside = plan.outside_bytes
    whole = max(1, sum(held) - outside)
    targets = [max(0, size - outside * (i == home(plan))) * layers for i, size in enumerate(held)]
    counts = [min(target // whole, room) for target, room in zip(targets, most, strict=True)]
    while sum(counts) != layers:
        step = 1 if sum(counts) < layers else -1
        open_ = [i for i, n in enumerate(counts) if (n < most[i] if step > 0 else n > 0)]
        if not open_:
            break
        counts[max(open_, key=lambda i: step * (targets[i] - counts[i] * whole))] += step
    return tuple(counts)


def _refused(plan: Facts) -> Iterator[str]:
    layers, room = plan.plan.model.layers, _most_layers(plan)
    if sum(room) < layers:
        yield (
            f"the devices have room for {listed(room)} whole layers of {format_bytes(layer_bytes(plan))}, which is less "
            f"than the model's {layers}, with a cache of 16 bits for {plan.request.cache.tokens} tokens"
        )


def _load_py(plan: Facts) -> tuple[TextFile, ...]:
    memory = ", ".join(
        f'{i}: "{max(0, size - cache) // MIB}MiB"'
        for i, (size, cache) in enumerate(
            zip(room_bytes(plan), plan.cache_bytes(_SIXTEEN_BITS.sixteenths), strict=True)
        )
    )
    architecture = plan.plan.model.architecture
    family = family_of(architecture)
    text = f"""\
import torch
from transformers import {"AutoModelForCausalLM" if family else "AutoModelForImageTextToText"}

max_memory = {{{memory}}}  # of weights, for a map of its own: device_map="auto"
{_device_map(plan, family) if family else 'device_map = "auto"'}
model = {"AutoModelForCausalLM" if family else "AutoModelForImageTextToText"}.from_pretrained(
    "{MODEL}", dtype=torch.{plan.plan.model.dtype}, device_map=device_map, max_memory=max_memory
)
"""
    return (TextFile("load.py", text),)


def _device_map(plan: Facts, family: Family) -> str:
    lines, start = [], 0
    for i, count in enumerate(layer_counts(plan)):
        if count:
            layer = f"{family.root}{family.layers}".rstrip(".")
            lines.append(f'    **{{f"{layer}": {i} for layer in range({start}, {start + count})}},')
            start += count
    lines += [f'    "{name}": {home(plan)},' for name in modules(plan.plan.model.architecture, family)]
    return "\n".join(("device_map = {", *lines, "}"))


def _differs(plan: Facts) -> Iterator[str]:
    layers = plan.plan.model.layers
    if plan.count > 1:
        yield "it cuts no matrix: a token goes through whole layers on one device after the other, which wait for it"
        if family_of(plan.plan.model.architecture):
            yield (
                f"the devices get {listed(layer_counts(plan))} of {layers} layers, each with its cache; embedding, last "
                f"norm and output matrix are on {plan.name(home(plan))}"
            )
        else:
            yield "device_map=\"auto\" fills the devices by their max_memory, the model's vision tower too"
    caches = bytes_each(plan.cache_bytes(_SIXTEEN_BITS.sixteenths))
    yield f"max_memory counts weights only; the plan's cache was taken off it ({caches}), and nothing holds it there"


ENGINE = Engine(
    name="accelerate",
    version="1.15.0, with transformers 5.24.0",
    command=("python", "load.py"),
    flags={},
    caches=CACHES,
    files=_load_py,
    refused=_refused,
    differs=_differs,
)
