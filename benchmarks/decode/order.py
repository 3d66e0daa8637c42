"""What a process is told to measure of a whole model, and the plan that it makes for that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from attrs import asdict, evolve, frozen

import tpplan
from tpplan.core.device import MEASURED
from tpplan.hardware.catalogue import overhead
from tpplan.hardware.spec import links_of, parse_devices
from tpplan.planner.options import DEFAULT_MAX_ROWS
from tpplan.planner.speed import predict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.core.plan import SplitPlan

#: Shares of the largest budget, device after device, and the layout.
CUTS: Final = {"even": ((1.0,), "reduce"), "uneven": ((1.0, 40 / 60), "reduce"), "gather": ((1.0,), "gather")}
#: Tokens of a prompt that is decoded from.
PROMPT: Final = 32
#: Steps before the first that is timed: as it is written, captured, and one more.
WARM: Final = 3
_VIRTUAL_BYTES = 2**36


@frozen(kw_only=True)
class Order:
    """What to measure.

    Attributes:
        directory: directory of the checkpoint.
        gpus: number of GPUs.
        cut: how the model is cut, one of :data:`CUTS`.
        backend: ``cuda`` or ``cpu``.
        transport: the transport, for :func:`tpplan.exec.compile`.
        batches: numbers of sequences that decode together, each for one measurement.
        tokens: number of steps that are timed.
        prefill: number of tokens of the long prompt.
        max_rows: most rows of a pass; 0 for as many as the long prompt has, and no fewer than plans have by default.
        nccl: whether the same decoder also runs over NCCL.
        eager: whether prompts are read once more without graphs, where they have some.
        devices: a devices file, by whose speeds steps and prompts are predicted; empty for no predictions.
        started: when the process was started, as ``time.time()`` says.
    """

    directory: str
    gpus: int
    cut: str = "even"
    backend: str = "cuda"
    transport: str = "auto"
    batches: tuple[int, ...] = (1, 8, 64)
    tokens: int = 64
    prefill: int = 4096
    max_rows: int = 0
    nccl: bool = False
    eager: bool = False
    devices: str = ""
    started: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of a sequence that the cache needs room for."""
        return max(self.prefill, PROMPT + WARM + self.tokens + 1)

    def dump(self) -> str:
        """Return it as text, for :meth:`load`."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Self:
        """Return the order that a text is."""
        data: dict[str, Any] = json.loads(text)
        return cls(**{**data, "batches": tuple(data["batches"])})

    def places(self) -> list[torch.device]:
        """Return torch's devices, all the CPU if they are virtual."""
        if self.backend == "cpu":
            return [torch.device("cpu")] * self.gpus
        return [torch.device("cuda", i) for i in range(self.gpus)]

    def plan(self) -> SplitPlan:
        """Return a plan for these devices, with all the memory that is free on the first, or shares of that."""
        shares, layout = CUTS[self.cut]
        first = self._device()
        budgets = [int(first.budget_bytes * shares[i % len(shares)]) for i in range(self.gpus)]
        batch = max(self.batches)
        return tpplan.plan(
            tpplan.read_model(self.directory),
            [evolve(first, budget_bytes=budget) for budget in budgets],
            cache=tpplan.Cache(tokens=batch * self.length),
            layout=layout,
            batch=batch,
            max_rows=min(self.max_rows or max(self.prefill, DEFAULT_MAX_ROWS), batch * self.length),
        )

    def predictions(self, plan: SplitPlan) -> dict[int, int]:
        """Return the tokens a second that a plan predicts of each batch, by the speeds of the devices file, if any."""
        if not self.devices:
            return {}
        names, measured = ("bandwidth_bytes_per_second", *MEASURED), parse_devices(self.devices)
        devices = tuple(
            evolve(device, **{name: getattr(found, name) for name in names})
            for device, found in zip(plan.devices, measured, strict=False)
        )
        model, links = tpplan.read_model(self.directory), links_of(self.devices)
        asked = (evolve(plan, devices=devices, request=evolve(plan.request, batch=batch)) for batch in self.batches)
        speeds = zip(self.batches, (predict(each, model, links) for each in asked), strict=True)
        return {batch: speed.decode[-1].tokens_per_second for batch, speed in speeds if speed}

    def _device(self) -> tpplan.Device:
        if self.backend == "cpu":
            return tpplan.Device(name="virtual device", budget_bytes=_VIRTUAL_BYTES)
        free = min(torch.cuda.mem_get_info(place)[0] for place in self.places())
        capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
        taken = overhead(capability).bytes
        name = torch.cuda.get_device_name(0)
        return tpplan.Device(name=name, budget_bytes=free, overhead_bytes=taken, capability=capability)


def synchronize(places: Iterable[torch.device]) -> None:
    """Wait until devices have done what they were told; the CPU always has."""
    for place in places:
        if place.type == "cuda":
            torch.cuda.synchronize(place)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Return the prompts that everybody decodes from: the same for everybody, another one for each sequence."""
    return [
        [(7919 * place + 104729 * sequence + 11) % vocabulary for place in range(PROMPT)] for sequence in range(count)
    ]


def long_prompt(length: int, vocabulary: int) -> list[int]:
    """Return the prompt of the prefill."""
    return [(7919 * place + 11) % vocabulary for place in range(length)]
