"""Copies into tensors that are there: of any strides, and of what they have to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.exec.machine.move_cases import DIRECT, EACH_MACHINE, GPU, Machine, X
from tpplan.errors import ExecutionError
from tpplan.exec.machine.move import Mover, gpu_peer_copy

if TYPE_CHECKING:
    from collections.abc import Callable


@EACH_MACHINE
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, ::2], lambda x: x.transpose(0, 2)], ids=["", "cut", "t"])
@pytest.mark.parametrize("target_view", [lambda x: x, lambda x: x.transpose(0, 2)], ids=["", "t"])
def test_peer_copies_fill_existing_tensors(
    view: Callable[[torch.Tensor], torch.Tensor],
    target_view: Callable[[torch.Tensor], torch.Tensor],
    make: Callable[[], Machine],
    ways: list[tuple[str, str]],
) -> None:
    """The target gets the source's values in its own strides, by a way that works, and its neighbours keep theirs."""
    machine = make()
    source = view(X)
    backing = torch.full((6, *target_view(source).shape), -1.0)
    target = target_view(backing[2])
    assert target.shape == source.shape
    Mover(machine).copy(machine.put(target, GPU[1]), machine.put(source, GPU[0]))
    assert torch.equal(target, source)
    assert (backing[:2] == -1).all()
    assert (backing[3:] == -1).all()
    assert machine.ways()[: len(ways)] == ways


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "conjugated": torch.conj,
    "negated": torch._neg_view,
    "both": lambda x: torch._neg_view(x.conj()),
}


@EACH_MACHINE
@pytest.mark.parametrize("source_view", LAZY.values(), ids=LAZY)
@pytest.mark.parametrize("target_view", LAZY.values(), ids=LAZY)
def test_peer_copies_of_lazy_views_are_of_plain_bytes(
    source_view: Callable[[torch.Tensor], torch.Tensor],
    target_view: Callable[[torch.Tensor], torch.Tensor],
    make: Callable[[], Machine],
    ways: list[tuple[str, str]],
) -> None:
    """What is conjugated or negated by who reads it arrives by a way that works, in targets of the same kind too."""
    machine = make()
    source = source_view(torch.complex(X, X + 1))
    target = target_view(torch.zeros(2, 3, 4, dtype=torch.complex64))
    Mover(machine).copy(machine.put(target, GPU[1]), machine.put(source, GPU[0]))
    assert torch.equal(target.resolve_conj().resolve_neg(), source.resolve_conj().resolve_neg())
    assert machine.ways()[: len(ways)] == ways


def test_peer_copies_fill_parameters() -> None:
    """A parameter that needs gradients is filled in place, without a record of it."""
    machine = Machine()
    data = torch.zeros_like(X)
    target = machine.put(data, GPU[1]).requires_grad_()
    Mover(machine).copy(target, machine.put(X, GPU[0]))
    assert torch.equal(data, X)
    assert target.grad_fn is None
    assert machine.ways() == DIRECT


@pytest.mark.parametrize("source", [X[0], X.to(torch.float16), X[None]])
def test_peer_copies_of_another_shape_or_dtype_are_refused(source: torch.Tensor) -> None:
    """Nothing is written, broadcast or converted when source and target differ."""
    target = torch.zeros_like(X)
    with pytest.raises(ExecutionError, match=r"cannot copy torch\.float\d\d \(.*\) into torch\.float32 \(2, 3, 4\)"):
        gpu_peer_copy(target, source)
    assert not target.any()
