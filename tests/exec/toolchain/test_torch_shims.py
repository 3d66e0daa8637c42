"""What tpplan takes from the inside of torch, held against what it relies on."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock
from weakref import ref

import pytest
import torch
from torch import distributed

from tpplan.exec.toolchain.torch_shims import alike, at_vectors, timeout_of

if TYPE_CHECKING:
    from pathlib import Path

CHECK = alike([torch.zeros(3, 4)])


class _Other(torch.Tensor):
    """A class of tensors of its own."""


@pytest.mark.parametrize("seconds", [5, 90])
def test_the_timeout_of_a_process_group(seconds: int, tmp_path: Path) -> None:
    """It is what the group was made with, not what torch.distributed has by default; of other groups it is unknown."""
    wait = timedelta(seconds=seconds)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=wait)
    try:
        world = distributed.group.WORLD
        assert world is not None
        assert timeout_of(world, torch.device("cpu")) == seconds
        later = distributed.new_group([0], timeout=timedelta(seconds=7))
        assert timeout_of(later, torch.device("cpu")) == 7
    finally:
        distributed.destroy_process_group()
    unknown: Any = Mock(_get_backend=lambda _: object())
    assert timeout_of(unknown, torch.device("cpu")) is None


def _sparse(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # some layouts are said to be in beta
        return torch.zeros(3, 4).to_sparse(layout=layout)


@pytest.mark.parametrize("tensor", [torch.ones(3, 4), torch.zeros(5, 4)[1:4], torch.zeros(12).view(3, 4).detach()])
def test_the_same_kind_elsewhere_is_alike(tensor: torch.Tensor) -> None:
    """Neither contents nor storage matter, nor how a tensor came about."""
    assert CHECK(tensor)
    with torch.no_grad():
        assert CHECK(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(4, 3), id="shape"),
        pytest.param(torch.zeros(3, 4, 1), id="dimensions"),
        pytest.param(torch.zeros(4, 3).t(), id="strides"),
        pytest.param(torch.zeros(3, 8)[:, ::2], id="steps"),
        pytest.param(torch.zeros(3, 4, dtype=torch.int32), id="dtype"),
        pytest.param(torch.zeros(3, 4, device="meta"), id="device"),
        pytest.param(torch.zeros(3, 4, requires_grad=True), id="gradients"),
        pytest.param(torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False), id="parameter"),
        pytest.param(torch.zeros(3, 4).as_subclass(_Other), id="class"),
        pytest.param(_sparse(torch.sparse_coo), id="coordinates"),
        pytest.param(_sparse(torch.sparse_csr), id="rows"),
    ],
)
def test_another_kind_is_not(tensor: torch.Tensor) -> None:
    """Whatever of a tensor is another makes it so, by itself."""
    assert not CHECK(tensor)


def test_negated_and_conjugated_views_are_kinds_of_their_own() -> None:
    """Their memory holds other values than they do."""
    plain = torch.zeros(3, 4, dtype=torch.complex64)
    assert alike([plain])(plain.clone())
    assert not alike([plain])(plain.conj())
    assert alike([plain.imag])(plain.clone().imag)
    assert not alike([plain.imag])(plain.conj().imag)
    negated = alike([plain.conj().imag])
    assert negated(plain.clone().conj().imag)
    assert not negated(plain.imag)


def test_a_tensor_that_comes_to_record_gradients_is_alike_no_more() -> None:
    """Also the very one that was compared with."""
    tensor = torch.zeros(3, 4)
    check = alike([tensor])
    assert check(tensor)
    assert not check(tensor.requires_grad_())
    assert check(tensor.requires_grad_(False))


def test_inference_mode_is_another_place() -> None:
    """What was asked for in that mode, or out of it, holds there only, and tensors made there are of another kind."""
    plain = torch.zeros(3, 4)
    with torch.inference_mode():
        made = torch.zeros(3, 4)
        assert not CHECK(plain)
        assert not CHECK(made)
        plain_inside, made_inside = alike([plain]), alike([made])
        assert plain_inside(plain)
        assert made_inside(torch.ones(3, 4))
        assert not plain_inside(made)
        assert not made_inside(plain)
    assert not CHECK(made)
    assert not plain_inside(plain)
    assert not made_inside(made)


def test_each_is_compared_with_the_one_in_its_place() -> None:
    """All of them have to be alike, and there have to be as many."""
    first, second = torch.zeros(3, 4), torch.zeros(2)
    check = alike([first, second])
    assert check(first, second)
    assert not check(second, first)
    assert not check(first, first)
    assert alike([])()
    for wrong in ([first], [first, second, first]):
        with pytest.raises(TypeError):
            check(*wrong)


def test_no_tensor_is_kept() -> None:
    """Memory that somebody once gave a context is theirs to free."""
    tensor = torch.zeros(3, 4)
    tensors = [tensor]
    kept = ref(tensor)
    check = alike(tensors)
    del tensor, tensors
    assert kept() is None
    assert check(torch.zeros(3, 4))


class _OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("x", "is_kept"),
    [
        (torch.zeros(4, 3, 8).bfloat16(), True),
        (torch.zeros(4, 24).bfloat16()[:, 8:].view(4, 2, 8), True),
        (torch.zeros(3, 5, 8).bfloat16().transpose(0, 1)[:1], True),
        (torch.zeros(1, 5).bfloat16(), True),  # a single row has no next one
        (torch.zeros(4, 24).bfloat16()[:, 4:20].view(4, 2, 8), False),  # behind 8 bytes
        (torch.zeros(4, 20).bfloat16()[:, :16], False),  # rows of 40 bytes
    ],
)
def test_rows_between_vectors_are_copied(x: torch.Tensor, is_kept: bool) -> None:
    """On a GPU; elsewhere everything is read as it is."""
    assert at_vectors(x) is x
    y = x.as_subclass(_OnGpu)
    found = at_vectors(y)
    assert (found is y) is is_kept
    assert torch.equal(found, x)
    assert is_kept or found.is_contiguous()
