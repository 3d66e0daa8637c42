"""What the tests of refused calls share: operands that are remembered, mistakes of types, and what has to hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import Factory, define
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.contexts import UNEVEN, context
from tests.exec.reference import same
from tpplan.core.axes import Axis
from tpplan.exec import TPContext
from tpplan.exec.rope.scaling import Default
from tpplan.exec.rope.tables import Rope

if TYPE_CHECKING:
    from tpplan.errors import TpplanError

RS = Axis.RESIDUAL
ROPE = Rope(10000.0, 8, Default())
COLUMNS = (11, 18, 11)  # of the residual stream, on devices 0, 2 and 3 of UNEVEN


@define(eq=False)
class Tensors:
    """Makes operands, and remembers what they hold.

    Attributes:
        known: tensors with copies of them.
    """

    known: list[tuple[Tensor, Tensor]] = Factory(list)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
        """Return a tensor."""
        tensor = torch.ones(shape, device=device).to(dtype)
        if device == "cpu":
            self.known.append((tensor, tensor.clone()))
        return tensor

    def parts(self, *lead: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Return parts of the residual stream."""
        return [self(*(lead or (2,)), columns, dtype=dtype) for columns in COLUMNS]

    def wholes(self, columns: int = 40, count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Return two rows for each device."""
        return [self(2, columns, dtype=dtype) for _ in range(count)]


Call = Callable[[TPContext, Tensors], object]


def untyped(mistake: object) -> Any:
    """Return an argument that type checkers do not let pass."""
    return mistake


def shrunk(x: Tensor, size: int) -> Tensor:
    """Return a tensor whose storage was resized to so many bytes, as sharded modules do between their uses."""
    x.untyped_storage().resize_(size)
    return x


def fake(*shape: int) -> Tensor:
    """Return a tensor without values that says it is on the CPU."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=torch.bfloat16)


def assert_refused(call: Call, kind: type[TpplanError], message: str) -> None:
    """Make sure that a call ends in an error with a hint, before anything moves, and that the context goes on."""
    tensors = Tensors()
    with context(UNEVEN, "events") as ctx:
        before = [(device.exchange.clone(), device.arena.free_bytes) for device in ctx.devices.values()]
        with pytest.raises(kind, match=message) as error:
            call(ctx, tensors)
        assert type(error.value) is kind
        assert error.value.hint
        assert all(same(tensor, copy) for tensor, copy in tensors.known)
        for device, (old, free) in zip(ctx.devices.values(), before, strict=True):
            assert torch.equal(device.exchange, old)
            assert device.arena.free_bytes == free
        x = torch.randn(2, 40)
        assert same(ctx.gather(ctx.scatter(x, RS), RS).tensor, x)
