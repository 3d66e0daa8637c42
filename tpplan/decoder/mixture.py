"""A mixture of experts for few rows, by kernels that read the matrices of chosen experts where they are.

Shapes are written at the end of a name: R rows, D hidden, E experts, C experts chosen for a row, I the device's part of
an expert's width.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tpplan.decoder.few_rows import GATES
from tpplan.decoder.gemv import shape_of
from tpplan.decoder.launcher import DTYPES, Launcher, bits_of
from tpplan.decoder.quantised import IntMatrix, Stacked

#: As the kernels have them: experts to choose from, and those that a row can choose.
_MOST_EXPERTS: Final = 512
_MOST_CHOSEN: Final = 32

_ITEM: Final = 2
#: Of the choices.
_FLOAT: Final = 4
#: Bytes that one access moves, matrix rows that the kernel reads at a time.
_VECTOR, _FOUR = 16, 4
#: Groups of pairs that a grid has, at most.
_MOST_GROUPS: Final = 2**16 - 1
#: Of 4-bit codes: bits of one, columns in 16 bytes, and those of a matrix, at most.
_NIBBLE, _UNIT, _WIDEST = 4, 32, 2**20
#: What the kernel calls the dtypes of scales.
_FORMS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: By what fractions are multiplied to be whole.
_ONE: Final = 2**31


def names_of(dtype: torch.dtype, *, coded: bool = False) -> list[str]:
    """Return the names of the kernels for a dtype: what chooses, and what multiplies.

    Args:
        dtype: of rows.
        coded: whether also what multiplies by matrices of 4-bit codes.
    """
    names = ["experts_choose", "experts_product", *(["coded_product"] if coded else [])]
    return [f"{name}_{DTYPES[dtype]}" for name in names]


class Mixture:
    """Kernels for one device and dtype; every method tells by its result if it takes its tensors.

    Choices are ``[R, 2 × C]`` in float32: of each row the weights of its experts, then their numbers.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, activation: str, *, coded: bool = False) -> None:
        """Load them.

        Args:
            place: a CUDA device.
            dtype: of rows, and of matrices that are not codes, of 16 bits.
            activation: of gates, one of :data:`tpplan.decoder.few_rows.GATES`.
            coded: whether there are matrices of 4-bit codes.
        """
        self._choose, self._product, *more = (Launcher(name, place) for name in names_of(dtype, coded=coded))
        self._coded = more[0] if more else None
        self._dtype, self._mode = dtype, GATES[activation]
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count

    def choose(self, scores_RE: Tensor, count: int, *, normalised: bool) -> Tensor | None:
        """Return the choices of rows: of equal scores the first.

        Args:
            scores_RE: of the experts.
            count: of experts that a row is sent to.
            normalised: whether their weights add up to 1; else they are parts of all experts' by softmax.

        Returns:
            The choices, or None if the kernel does not take such scores.
        """
        rows, experts = scores_RE.shape
        if scores_RE.dtype is not self._dtype or scores_RE.stride(1) != 1 or not rows:
            return None
        if experts > _MOST_EXPERTS or not 0 < count <= min(_MOST_CHOSEN, experts):
            return None
        choice_RC = torch.empty(rows, 2 * count, dtype=torch.float32, device=scores_RE.device)
        words = scores_RE.data_ptr(), _ITEM * scores_RE.stride(0), experts
        self._choose(rows, 32, *words, choice_RC.data_ptr(), 2 * _FLOAT * count, count, normalised)
        return choice_RC

    def up(
        self, x_RD: Tensor, gate_EID: Tensor | Stacked, up_EID: Tensor | Stacked, choice_RC: Tensor
    ) -> Tensor | None:
        """Return what the chosen experts have between their matrices, if the kernel takes these: ``[R, C, I]``.

        Products, activations and what comes of both are rounded, as they are where each is a kernel.

        Args:
            x_RD: rows.
            gate_EID: the matrix of each expert to which the activation belongs.
            up_EID: the other one, which lies in the same way.
            choice_RC: of the rows.
        """
        chosen = choice_RC.shape[1] // 2
        if not self._takes(gate_EID, choice_RC) or not self._is_vectors(x_RD):
            return None
        if not self._takes(up_EID, choice_RC) or not _are_alike(gate_EID, up_EID):
            return None
        h_RCI = x_RD.new_empty(len(x_RD), chosen, gate_EID.shape[1])
        target, rows = (h_RCI.data_ptr(), _ITEM * h_RCI.stride(1)), (x_RD.data_ptr(), _ITEM * x_RD.stride(0))
        self._run(target, rows, gate_EID, up_EID, choice_RC, mode=self._mode)
        return h_RCI

    def down(
        self, h_RCI: Tensor, down_EDI: Tensor | Stacked, choice_RC: Tensor, to_RD: Tensor | None = None
    ) -> Tensor | None:
        """Return the weighed sum of what the chosen experts make of ``h``, if the kernel takes them: ``[R, D]``.

        It is rounded once.

        Args:
            h_RCI: what they have between their matrices; it is copied if its elements do not lie side by side.
            down_EDI: the matrix of each expert.
            choice_RC: of the rows.
            to_RD: rows that the sum is added to, where they are, before it is rounded; they are returned then.
        """
        if not self._takes(down_EDI, choice_RC) or h_RCI.dtype is not self._dtype:
            return None
        if to_RD is not None and (to_RD.dtype is not self._dtype or to_RD.stride(1) != 1):
            return None
        h_RCI = h_RCI.contiguous()  # whose strides say nothing where there is one expert of a row
        if h_RCI.data_ptr() % _VECTOR:
            return None
        y_RD = h_RCI.new_empty(len(h_RCI), down_EDI.shape[1]) if to_RD is None else to_RD
        target, pairs = (y_RD.data_ptr(), _ITEM * y_RD.stride(0)), (h_RCI.data_ptr(), _ITEM * h_RCI.shape[2])
        plus = (0, 0) if to_RD is None else target
        self._run(target, pairs, down_EDI, down_EDI, choice_RC, plus=plus)
        return y_RD

    def _takes(self, matrix_EOI: Tensor | Stacked, choice_RC: Tensor) -> bool:
        """Tell whether a kernel takes experts' matrices and choices: for more, torch reads all experts once."""
        pairs, chosen = choice_RC.numel() // 2, choice_RC.shape[1] // 2
        if not 0 < pairs <= min(len(matrix_EOI), _MOST_GROUPS) or chosen > _MOST_CHOSEN:
            return False
        if choice_RC.dtype is not torch.float32 or not choice_RC.is_contiguous() or matrix_EOI.shape[1] % _FOUR:
            return False
        if isinstance(matrix_EOI, Tensor):
            return self._is_vectors(matrix_EOI)
        if self._coded is None or matrix_EOI.columns is not None:
            return False
        return isinstance(matrix_EOI.matrix, IntMatrix) and _is_coded(matrix_EOI.matrix)

    def _is_vectors(self, tensor: Tensor) -> bool:
        """Tell whether the last dimension is of 16 bytes each, at multiples of them."""
        *steps, one = tensor.stride()
        if tensor.dtype is not self._dtype or one != 1 or not tensor.shape[-1]:
            return False
        places = [tensor.data_ptr(), *(_ITEM * count for count in (*steps, tensor.shape[-1]))]
        return not any(place % _VECTOR for place in places)

    def _run(
        self,
        target: tuple[int, int],
        source: tuple[int, int],
        matrix_EOI: Tensor | Stacked,
        other_EOI: Tensor | Stacked,
        choice_RC: Tensor,
        *,
        plus: tuple[int, int] = (0, 0),
        mode: int = 0,
    ) -> None:
        """Multiply by matrices of experts, and others by which gates are multiplied, if there is such a mode."""
        rows, chosen = choice_RC.shape[0], choice_RC.shape[1] // 2
        groups, many, per = (rows * chosen, 1, 2) if mode else (rows, chosen, 4)
        _, size, width = matrix_EOI.shape
        batches = size // per
        vectors = many * width if isinstance(matrix_EOI, Tensor) else many * width * _NIBBLE // (8 * _ITEM)
        shape = shape_of(groups * batches, vectors, self._processors)
        blocks = max(1, min(shape.blocks // groups, -(-batches // shape.teams)))
        grid, threads = (blocks, groups, 1), 32 * shape.team * shape.teams
        choices = choice_RC.data_ptr(), chosen, many, width, batches, *plus, mode, shape.team, shape.teams
        if isinstance(matrix_EOI, Tensor) and isinstance(other_EOI, Tensor):
            of_expert, pitch, _ = (_ITEM * step for step in matrix_EOI.stride())
            half = other_EOI.data_ptr() - matrix_EOI.data_ptr() if mode else 2 * pitch
            self._product(grid, threads, *target, *source, matrix_EOI.data_ptr(), of_expert, pitch, half, *choices)
            return
        one, other = (each.matrix for each in (matrix_EOI, other_EOI) if isinstance(each, Stacked))
        if self._coded and isinstance(one, IntMatrix) and isinstance(other, IntMatrix):
            words = one.codes.data_ptr(), size, other.codes.data_ptr() - one.codes.data_ptr() if mode else width
            more = _scales_and_zeros(one, other, is_gate=bool(mode))
            self._coded(grid, threads, *target, *source, *words, *choices, *more)


def _is_coded(matrix: IntMatrix) -> bool:
    """Tell whether a kernel takes a matrix: 4-bit codes, of which 16 bytes share a scale and a zero."""
    (_, width), group, zeros = matrix.shape, matrix.group, matrix.zeros
    tensors = [matrix.codes, matrix.scales, *([] if zeros is None else [zeros])]
    return (
        matrix.bits == _NIBBLE
        and matrix.columns is None
        and matrix.scales.dtype in _FORMS
        and (zeros is None or zeros.dtype is torch.int32)
        and 0 < width <= _WIDEST
        and not width % _UNIT
        and (group >= width or not group % _UNIT)
        and all(each.is_contiguous() and not each.data_ptr() % 4 for each in tensors)
        and not matrix.codes.data_ptr() % _VECTOR
    )


def _are_alike(one_EOI: Tensor | Stacked, other_EOI: Tensor | Stacked) -> bool:
    """Tell whether matrices that a kernel takes lie in the same way."""
    if isinstance(one_EOI, Tensor):
        return isinstance(other_EOI, Tensor) and one_EOI.stride() == other_EOI.stride()
    if isinstance(other_EOI, Tensor):
        return False
    one, other = (
        (x.shape, x.group, x.plus, x.zeros is None, x.scales.dtype)
        for x in (one_EOI.matrix, other_EOI.matrix)
        if isinstance(x, IntMatrix)
    )
    return one == other


def _scales_and_zeros(one: IntMatrix, other: IntMatrix, *, is_gate: bool) -> tuple[int, ...]:
    """Return what a kernel is told of these of a matrix, and of another if the first makes gates."""
    groups, form = one.scales.shape[1], _FORMS[one.scales.dtype]
    inverse = 0 if groups == 1 else -(-_ONE // (one.group // _UNIT))
    zeros, others = (0 if each.zeros is None else each.zeros.data_ptr() for each in (one, other))
    halves = (other.scales.data_ptr() - one.scales.data_ptr(), others - zeros, groups, 0) if is_gate else (
        0, 0, groups, 2 * groups
    )  # fmt: skip
    offset = bits_of(8.0 if one.zeros is None else float(one.plus))
    return one.scales.data_ptr(), form, zeros, *halves, inverse, offset
