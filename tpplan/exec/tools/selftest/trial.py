"""Trials: operations on random operands, with checks of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, evolve, frozen
from torch import Tensor

from tpplan.core.axes import Axis
from tpplan.exec.context import TPContext
from tpplan.exec.handles import Gathered
from tpplan.exec.memory.binding import BITS
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from random import Random

#: Period of the noise in elements; not a power of two, so that rows differ.
_PERIOD = 2**20 + 24

#: Columns beside an output that must not be written; odd, so that rows are unaligned.
_MARGIN = 3


@frozen
class Form:
    """The memory layout of operands and the kind of outputs.

    Attributes:
        name: description in words.
        gap: columns between the rows of an input that do not belong to it.
        step: elements from one column of an input to the next.
        out: where results go: ``new`` tensors, ``given`` ones, or, for an all-reduce, in place over its ``parts`` or
            ``residual``. Other operations treat the last two as ``given``.
    """

    name: str
    gap: int = 0
    step: int = 1
    out: str = "new"


FORMS = (
    Form("dense"),
    Form("rows apart", gap=5),
    Form("columns apart", step=2),
    Form("given outputs", out="given"),
    Form("over the parts", out="parts"),
    Form("over the residual", out="residual"),
)


class Noise:
    """Contents for tensors: windows of periodic random bytes or random numbers."""

    def __init__(self, random: Random) -> None:
        self._random = random
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        self._bytes = torch.randint(256, (_PERIOD,), dtype=torch.uint8, generator=generator)
        self._numbers = torch.randn(_PERIOD, generator=generator)
        self._blocks: dict[torch.dtype, Tensor] = {}

    def window(self, shape: Sequence[int], dtype: torch.dtype, *, numbers: bool) -> Tensor:
        """Return a read-only tensor of numbers that can be added, or of arbitrary bytes."""
        source, kind, each = (self._numbers, dtype, 1) if numbers else (self._bytes, torch.uint8, dtype.itemsize)
        size = prod(shape) * each
        block = self._blocks.get(kind)
        if block is None or block.shape[0] < size + _PERIOD:
            block = self._blocks[kind] = source.to(kind).repeat(size // _PERIOD + 2)
        start = 8 * self._random.randrange(_PERIOD // 8)
        return block[start : start + size].view(dtype).view(tuple(shape))


@frozen(eq=False)
class Operand:
    """A tensor with its current or expected contents.

    Attributes:
        device: index of its device, or HOST.
        tensor: the tensor itself, a view of ``whole``.
        whole: the larger tensor around it.
        right: contents of ``whole``, or those expected in the end, on the CPU.
    """

    device: int
    tensor: Tensor
    whole: Tensor
    right: Tensor


@define(eq=False)
class Trial:
    """An operation on operands.

    Attributes:
        call: runs the operation, with the given outputs if there are any.
        inputs: operands that are read and must not change.
        expected: expected results, on the CPU, with their devices.
        before: initial contents of outputs that are also read.
        over: inputs that are also the outputs.
        outputs: outputs passed to the call.
        results: results that the call returned.
    """

    call: Callable[[list[Tensor] | None], Sequence[Tensor | Gathered]]
    inputs: tuple[Operand, ...]
    expected: tuple[tuple[int, Tensor], ...]
    before: tuple[Tensor, ...] = ()
    over: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    results: Sequence[Tensor | Gathered] = Factory(tuple)


@frozen
class Wrong:
    """A tensor with wrong contents.

    Attributes:
        device: index of its device, or HOST.
        byte: offset of the first wrong byte.
        message: description in words.
    """

    device: int
    byte: int
    message: str


@frozen(kw_only=True)
class Scene:
    """The parameters of a trial.

    Attributes:
        context: a compiled plan.
        axis: None for all devices.
        layer: layer whose cut is used.
        source: device of a single operand.
        lead: all dimensions but the last.
        dim: columns per element of the axis; of operations that cut nothing, the columns.
        dtype: dtype of the operands.
        form: form of the operands.
        noise: source of their contents.
        numbers: whether the contents are numbers that can be added.
        aside: whether the operation runs beside other work.
    """

    context: TPContext
    axis: Axis | None
    layer: int | None
    source: int
    lead: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    form: Form
    noise: Noise
    numbers: bool
    aside: bool

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that hold a part of the axis."""
        return self.context.devices_of(self.axis, self.layer)

    @property
    def slices(self) -> tuple[tuple[int, int, int], ...]:
        """Device, first column and end column (exclusive) of each slice."""
        found = self.context.split(self.axis or "", self.layer)
        return tuple((s.device, s.start * self.dim, s.end * self.dim) for s in found)

    def operands(self, widths: Iterable[tuple[int, int]], *, same: bool = False) -> tuple[Operand, ...]:
        """Return an input for each (device, columns) pair, with equal contents if ``same``."""
        made: list[Operand] = []
        for device, columns in widths:
            gap, step = self.form.gap, self.form.step
            shape = (*self.lead, columns * step + gap)
            content = made[0].right if same and made else self.noise.window(shape, self.dtype, numbers=self.numbers)
            whole = content.to(self._place(device), copy=True)
            made.append(Operand(device, whole[..., : columns * step : step], whole, content))
        return tuple(made)

    def holding(self, operand: Operand, columns: int) -> Tensor:
        """Return the contents of an input, on the CPU."""
        return operand.right[..., : columns * self.form.step : self.form.step]

    def room(self, device: int, right: Tensor, before: Tensor | None) -> Operand:
        """Return an output with expected contents ``right``, in a larger tensor whose other columns must not change."""
        columns = right.shape[-1]
        content = self.noise.window((*self.lead, columns + _MARGIN), self.dtype, numbers=self.numbers)
        whole = content.to(self._place(device), copy=True)
        if before is not None:
            whole[..., :columns] = before.to(whole.device)
        content = content.clone()
        content[..., :columns] = right
        return Operand(device, whole[..., :columns], whole, content)

    def _place(self, device: int) -> torch.device:
        return torch.device("cpu") if device == HOST else self.context.devices[device].device


def issue(scene: Scene, trial: Trial) -> None:
    """Run an operation, with outputs passed to it if the form says so."""
    _make_room(scene, trial)
    issue_again(scene, trial)


def issue_again(scene: Scene, trial: Trial) -> None:
    """Run an operation on the same tensors as before."""
    outputs = [operand.tensor for operand in (*trial.over, *trial.outputs)]
    if not scene.aside:
        trial.results = trial.call(outputs or None)
        return
    with scene.context.aside() as aside:
        trial.results = trial.call(outputs or None)
    aside.wait()


def renew(scene: Scene, trial: Trial, other: Trial) -> Trial:
    """Fill the tensors of a trial with the contents of another; return the other trial, on these tensors."""
    _make_room(scene, other)
    return evolve(
        other,
        inputs=_filled(trial.inputs, other.inputs),
        over=_filled(trial.over, other.over),
        outputs=_filled(trial.outputs, other.outputs),
        results=trial.results,
    )


def _make_room(scene: Scene, trial: Trial) -> None:
    """Create the outputs of a trial, if its form requires them."""
    if not trial.over and (trial.before or scene.form.out != "new"):
        before = trial.before or (None,) * len(trial.expected)
        trial.outputs = tuple(scene.room(d, x, b) for (d, x), b in zip(trial.expected, before, strict=True))


def _filled(operands: tuple[Operand, ...], others: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Fill operands with the contents of others, and return them with these contents."""
    pairs = list(zip(operands, others, strict=True))
    for mine, other in pairs:
        mine.whole.copy_(other.whole)
    return tuple(evolve(other, tensor=mine.tensor, whole=mine.whole) for mine, other in pairs)


def judge(trial: Trial) -> Iterator[Wrong]:
    """Wait for the results of a trial, and yield all wrong tensors."""
    for result, (device, right) in zip(trial.results, trial.expected, strict=True):
        tensor = result.result() if isinstance(result, Gathered) else result
        yield from _compare(device, "the result", tensor, right)
    for operand in trial.outputs:
        yield from _compare(operand.device, "an output with the columns beside it", operand.whole, operand.right)
    for operand in trial.inputs:
        yield from _compare(operand.device, "an input, afterwards,", operand.whole, operand.right)


def compared_bytes(trial: Trial) -> int:
    """Return the number of bytes compared when judging a trial."""
    operands = [operand.right for operand in (*trial.inputs, *trial.outputs)]
    return sum(x.numel() * x.element_size() for x in (*operands, *(right for _, right in trial.expected)))


def _compare(device: int, what: str, tensor: Tensor, right: Tensor) -> Iterator[Wrong]:
    where = "in host memory" if device == HOST else f"of device {device}"
    if (tensor.shape, tensor.dtype) != (right.shape, right.dtype):
        message = f"{what} {where} is {tensor.dtype}{list(tensor.shape)}, expected {right.dtype}{list(right.shape)}"
        yield Wrong(device, 0, message)
        return
    bits = BITS[right.dtype.itemsize]
    tensor = tensor.cpu()
    if not torch.equal(tensor.view(bits), right.view(bits)):
        got, expected = (
            x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in (tensor, right)
        )
        differ = (got != expected).view(torch.uint8)
        byte = int(differ.argmax())  # the first of equal ones
        count = f"{int(differ.count_nonzero())} of {differ.numel()} bytes differ"
        text = f"{what} {where} has {got[byte]:#04x} at byte {byte}, expected {expected[byte]:#04x}; {count}"
        yield Wrong(device, byte, text)
