"""The devices' models run side by side: each in a greenlet, which waits at an operation until all have come to it.

Greenlets are switched by this module alone, at operations, so nothing runs at the same time and no lock is needed. A
GPU works on while another one's model is run, as its kernels are launched without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from attrs import frozen
from greenlet import getcurrent, greenlet
from torch import Tensor

from tpplan.errors import ExecutionError


@frozen
class Operation:
    """An operation between devices.

    Attributes:
        name: name of the module whose output it takes: the devices that meet have to name the same.
        run: returns each device's result, given each device's operand.
    """

    name: str
    run: Callable[[Mapping[int, Tensor]], Mapping[int, Tensor]]


class Lockstep:
    """Runs a function on each device of this process.

    Attributes:
        device: the device whose function runs now; None outside of functions.
    """

    def __init__(self, places: Mapping[int, torch.device]) -> None:
        """Run nothing yet.

        Args:
            places: the torch device of each device of this process.
        """
        self.device: int | None = None
        self._places = places
        self._scheduler: greenlet | None = None

    def __deepcopy__(self, memo: object) -> Self:
        """Return this: copies of a cache are of the same devices."""
        return self

    def run(self, functions: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Return what each device's function returns.

        An error in one of them ends all.

        Raises:
            ExecutionError: the functions came to different operations.
        """
        if self.device is not None:
            message = "a sharded model was called by itself, from within its forward pass"
            raise ExecutionError(message, "call the model that tpplan.transformers.shard returned")
        waiting = {device: greenlet(function) for device, function in functions.items()}
        resume: dict[int, tuple[Any, ...]] = dict.fromkeys(functions, ())
        results: dict[int, Any] = {}
        before = torch.cuda.current_device() if self._on_gpus() else None
        self._scheduler = getcurrent()
        try:
            while waiting:
                asked: dict[int, tuple[Operation, Tensor]] = {}
                for device, runner in [*waiting.items()]:
                    self._enter(device)
                    answer = runner.switch(*resume[device])
                    if runner.dead:
                        results[device] = answer
                        del waiting[device]
                    else:
                        asked[device] = answer
                resume = {device: (part,) for device, part in self._met(asked, waiting).items()}
        finally:
            self.device = self._scheduler = None
            for runner in waiting.values():
                runner.throw()  # GreenletExit, which lets go of what it holds
            if before is not None:
                torch.cuda.set_device(before)
        return results

    def meet(self, operation: Operation, operand: Tensor) -> Tensor:
        """Return this device's result of an operation, when all devices of this process have come to it."""
        if self._scheduler is None or self.device is None:
            message = f"a part of a sharded model ({operation.name}) was called outside of the model"
            raise ExecutionError(message, "call the model that tpplan.transformers.shard returned")
        result: Tensor = self._scheduler.switch((operation, operand))
        return result

    def _enter(self, device: int) -> None:
        self.device = device
        if self._places[device].type == "cuda":
            torch.cuda.set_device(self._places[device])

    def _on_gpus(self) -> bool:
        return any(place.type == "cuda" for place in self._places.values())

    @staticmethod
    def _met(asked: Mapping[int, tuple[Operation, Tensor]], waiting: Mapping[int, object]) -> Mapping[int, Tensor]:
        """Run the operation that all devices have come to.

        Raises:
            ExecutionError: some have come to another one, or to the end.
        """
        if not asked:
            return {}
        names = {operation.name for operation, _ in asked.values()}
        if len(names) > 1 or asked.keys() != waiting.keys():
            message = f"the devices' models came to different operations: {', '.join(sorted(names))}"
            raise ExecutionError(message, "report it: transformers has changed what a forward pass does")
        operation = next(iter(asked.values()))[0]
        return operation.run({device: operand for device, (_, operand) in asked.items()})
