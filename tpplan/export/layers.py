"""Whole layers on devices, in proportion to what a plan gives them, for engines that cut no matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from tpplan.core.sizes import format_bytes, listed
from tpplan.export.facts import Facts

if TYPE_CHECKING:
    from collections.abc import Iterator


@frozen
class Layers:
    """How layers go to a plan's devices.

    Attributes:
        plan: the plan.
        kind: sixteenths of a byte for each element of the cache.
        beside: bytes outside the layers on each device, such as an output matrix.
        outside: bytes of the plan's weights that are not in layers.
    """

    plan: Facts
    kind: int
    beside: tuple[int, ...]
    outside: int

    @classmethod
    def but_embedding(cls, plan: Facts, kind: int) -> Layers:
        """Return the layers where the host has the embedding, and the last device the output matrix.

        In GGUF both may have few bits, so that their size in the dtype of the activations is not taken off the weights
        there: layers would be counted too small.
        """
        matrix = plan.outside_bytes // 2
        return cls(plan, kind, (0,) * (plan.count - 1) + (matrix,), 0 if plan.is_gguf else 2 * matrix)

    @property
    def mean_bytes(self) -> int:
        """The mean of a layer's weights and cache, rounded up; what a plan has on several devices counts each time."""
        weights = sum(entry.weights_bytes for entry in self.plan.memory) - self.outside
        return -(-(max(1, weights) + sum(self.plan.cache_bytes(self.kind))) // self.plan.model.layers)

    @property
    def most(self) -> tuple[int, ...]:
        """How many mean layers each device has room for."""
        rooms = zip(self.plan.room_bytes, self.beside, strict=True)
        return tuple(max(0, room - beside) // self.mean_bytes for room, beside in rooms)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many layers each device gets: near the plan's share, and no more than it has room for."""
        layers, most = self.plan.model.layers, self.most
        own = [max(0, held - beside) for held, beside in zip(self.plan.held_bytes, self.beside, strict=True)]
        whole = max(1, sum(own))
        counts = [min(size * layers // whole, room) for size, room in zip(own, most, strict=True)]
        for _ in range(layers - sum(counts)):
            able = [i for i, room in enumerate(most) if counts[i] < room]
            if not able:
                break
            counts[max(able, key=lambda i: own[i] * layers - counts[i] * whole)] += 1
        return tuple(counts)

    def obstacles(self) -> Iterator[str]:
        """Yield why the layers do not fit."""
        layers = self.plan.model.layers
        if sum(self.most) < layers:
            cache = format_bytes(sum(self.plan.cache_bytes(self.kind)))
            yield (
                f"the devices have room for {listed(self.most)} whole layers of {format_bytes(self.mean_bytes)} each, "
                f"and the model has {layers}, with a cache of {cache} in all"
            )
