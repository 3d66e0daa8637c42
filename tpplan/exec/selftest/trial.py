"""A trial: an operation on operands full of noise, and whether it gave what it has to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, evolve, frozen
from torch import Tensor

from tpplan.axes import Axis
from tpplan.exec.binding import BITS
from tpplan.exec.context import TPContext
from tpplan.exec.gathered import Gathered
from tpplan.exec.programs.program import HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from random import Random

#: Elements that noise has before it repeats itself; no power of two, so that rows differ.
_PERIOD = 2**20 + 24

#: Columns beside an output that nobody may write; an odd number, so that rows begin anywhere.
_MARGIN = 3


@frozen
class Form:
    """What is special about operands.

    Attributes:
        name: in words.
        gap: columns between the rows of an input that do not belong to it.
        step: elements from one column of an input to the next.
        out: where results go: to ``new`` tensors, to ``given`` ones, or, of an all-reduce, over its ``parts`` or its
            ``residual``; other operations take these as given.
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
    """Contents for tensors: windows of endless random bytes, and of endless random numbers."""

    def __init__(self, random: Random) -> None:
        self._random = random
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        self._bytes = torch.randint(256, (_PERIOD,), dtype=torch.uint8, generator=generator)
        self._numbers = torch.randn(_PERIOD, generator=generator)
        self._blocks: dict[torch.dtype, Tensor] = {}

    def window(self, shape: Sequence[int], dtype: torch.dtype, *, numbers: bool) -> Tensor:
        """Return a tensor that nobody may write: numbers that can be added, or any bytes."""
        source, kind, each = (self._numbers, dtype, 1) if numbers else (self._bytes, torch.uint8, dtype.itemsize)
        size = prod(shape) * each
        block = self._blocks.get(kind)
        if block is None or len(block) < size + _PERIOD:
            block = self._blocks[kind] = source.to(kind).repeat(size // _PERIOD + 2)
        start = 8 * self._random.randrange(_PERIOD // 8)
        return block[start : start + size].view(dtype).view(tuple(shape))


@frozen(eq=False)
class Operand:
    """A tensor and what it holds, or has to hold in the end.

    Attributes:
        device: that it is on, or HOST.
        given: the tensor itself, within a larger one.
        whole: the larger one.
        right: what ``whole`` holds, on the CPU.
    """

    device: int
    given: Tensor
    whole: Tensor
    right: Tensor


@define(eq=False)
class Trial:
    """An operation on operands.

    Attributes:
        call: runs it, with these outputs if there are any.
        inputs: read, and not to be changed.
        expected: the results, on the CPU, with their devices.
        before: what the outputs hold that are read, too.
        over: inputs that are the outputs.
        outputs: given to the call.
        results: that it returned.
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
    """A tensor that does not hold what it should.

    Attributes:
        device: that it is on, or HOST.
        byte: the first one that is wrong.
        message: in words.
    """

    device: int
    byte: int
    message: str


@frozen(kw_only=True)
class Scene:
    """Where an operation is tried.

    Attributes:
        context: a compiled plan.
        axis: None for all devices.
        layer: whose cut is meant.
        source: the device that a single tensor is on.
        lead: all dimensions but the last.
        dim: columns per element of the axis; of operations that cut nothing, the columns.
        dtype: of the operands.
        form: of the operands.
        noise: their contents.
        numbers: whether these can be added.
        aside: whether the operation goes beside other work.
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
        """Those that hold a part of the axis."""
        return self.context.devices_of(self.axis, self.layer)

    @property
    def slices(self) -> tuple[tuple[int, int, int], ...]:
        """Device, first column and one past the last, of every slice."""
        found = self.context.split(self.axis or "", self.layer)
        return tuple((s.device, s.start * self.dim, s.end * self.dim) for s in found)

    def operands(self, widths: Iterable[tuple[int, int]], *, same: bool = False) -> tuple[Operand, ...]:
        """Return an input for each device and number of columns, all with the ``same`` contents if told so."""
        made: list[Operand] = []
        for device, columns in widths:
            gap, step = self.form.gap, self.form.step
            shape = (*self.lead, columns * step + gap)
            content = made[0].right if same and made else self.noise.window(shape, self.dtype, numbers=self.numbers)
            whole = content.to(self._place(device), copy=True)
            made.append(Operand(device, whole[..., : columns * step : step], whole, content))
        return tuple(made)

    def holding(self, operand: Operand, columns: int) -> Tensor:
        """Return what an input holds, on the CPU."""
        return operand.right[..., : columns * self.form.step : self.form.step]

    def room(self, device: int, right: Tensor, before: Tensor | None) -> Operand:
        """Return an output that is to hold ``right`` within a larger tensor, whose other columns are to stay."""
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
    """Run an operation, into outputs of its own if that is the form."""
    _make_room(scene, trial)
    issue_again(scene, trial)


def issue_again(scene: Scene, trial: Trial) -> None:
    """Run an operation on the same tensors as before."""
    outputs = [operand.given for operand in (*trial.over, *trial.outputs)]
    if not scene.aside:
        trial.results = trial.call(outputs or None)
        return
    with scene.context.aside() as aside:
        trial.results = trial.call(outputs or None)
    aside.wait()


def renew(scene: Scene, trial: Trial, other: Trial) -> Trial:
    """Write to the tensors of a trial what those of another one hold; return the other one, on these tensors."""
    _make_room(scene, other)
    return evolve(
        other,
        inputs=_filled(trial.inputs, other.inputs),
        over=_filled(trial.over, other.over),
        outputs=_filled(trial.outputs, other.outputs),
        results=trial.results,
    )


def _make_room(scene: Scene, trial: Trial) -> None:
    """Make the outputs of a trial, if it is to have any of its own."""
    if not trial.over and (trial.before or scene.form.out != "new"):
        before = trial.before or (None,) * len(trial.expected)
        trial.outputs = tuple(scene.room(d, x, b) for (d, x), b in zip(trial.expected, before, strict=True))


def _filled(operands: tuple[Operand, ...], others: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Write to operands what others hold."""
    pairs = list(zip(operands, others, strict=True))
    for mine, other in pairs:
        mine.whole.copy_(other.whole)
    return tuple(evolve(other, given=mine.given, whole=mine.whole) for mine, other in pairs)


def judge(trial: Trial) -> Iterator[Wrong]:
    """Yield everything that is wrong after an operation; waits for its results."""
    for result, (device, right) in zip(trial.results, trial.expected, strict=True):
        tensor = result.result() if isinstance(result, Gathered) else result
        yield from _compare(device, "the result", tensor, right)
    for operand in trial.outputs:
        yield from _compare(operand.device, "an output with the columns beside it", operand.whole, operand.right)
    for operand in trial.inputs:
        yield from _compare(operand.device, "an input, afterwards,", operand.whole, operand.right)


def compared_bytes(trial: Trial) -> int:
    """Return how many bytes are compared to judge a trial."""
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
        differ = (got != expected).nonzero()
        byte = int(differ[0])
        count = f"{len(differ)} of {len(expected)} bytes differ"
        text = f"{what} {where} has {got[byte]:#04x} at byte {byte}, expected {expected[byte]:#04x}; {count}"
        yield Wrong(device, byte, text)
