"""A mixture of experts for few rows, by kernels that read the matrices of chosen experts where they are.

Shapes are written at the end of a name: R rows, D hidden, E experts, C experts chosen for a row, I the device's part of
an expert's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from tpplan.decoder.gemv import GATES, shape_of
from tpplan.decoder.launcher import DTYPES, Launcher

if TYPE_CHECKING:
    from torch import Tensor

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


def names_of(dtype: torch.dtype) -> list[str]:
    """Return the names of the kernels for a dtype."""
    return [f"experts_{what}_{DTYPES[dtype]}" for what in ("choose", "product")]


class Mixture:
    """Kernels for one device and dtype; every method tells by its result if it takes its tensors.

    Choices are ``[R, 2 × C]`` in float32: of each row the weights of its experts, then their numbers.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, activation: str) -> None:
        """Load them.

        Args:
            place: a CUDA device.
            dtype: of rows and matrices, of 16 bits.
            activation: of gates, one of :data:`tpplan.decoder.gemv.GATES`.
        """
        self._choose, self._product = (Launcher(name, place) for name in names_of(dtype))
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

    def up(self, x_RD: Tensor, gate_EID: Tensor, up_EID: Tensor, choice_RC: Tensor) -> Tensor | None:
        """Return what the chosen experts have between their matrices, if the kernel takes these: ``[R, C, I]``.

        Products, activations and what comes of both are rounded, as they are where each is a kernel.

        Args:
            x_RD: rows.
            gate_EID: the matrix of each expert to which the activation belongs.
            up_EID: the other one, which lies in the same way.
            choice_RC: of the rows.
        """
        chosen = choice_RC.shape[1] // 2
        if not self._takes(gate_EID, choice_RC) or not self._is_vectors(up_EID) or not self._is_vectors(x_RD):
            return None
        if gate_EID.stride() != up_EID.stride():
            return None
        h_RCI = x_RD.new_empty(len(x_RD), chosen, gate_EID.shape[1])
        target, rows = (h_RCI.data_ptr(), _ITEM * h_RCI.stride(1)), (x_RD.data_ptr(), _ITEM * x_RD.stride(0))
        self._run(target, rows, gate_EID, up_EID.data_ptr() - gate_EID.data_ptr(), choice_RC, mode=self._mode)
        return h_RCI

    def down(self, h_RCI: Tensor, down_EDI: Tensor, choice_RC: Tensor, to_RD: Tensor | None = None) -> Tensor | None:
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
        self._run(target, pairs, down_EDI, 2 * _ITEM * down_EDI.stride(1), choice_RC, plus=plus)
        return y_RD

    def _takes(self, matrix_EOI: Tensor, choice_RC: Tensor) -> bool:
        """Tell whether the kernel takes experts' matrices and choices: for more, torch reads all experts once."""
        pairs, chosen = choice_RC.numel() // 2, choice_RC.shape[1] // 2
        if not 0 < pairs <= min(len(matrix_EOI), _MOST_GROUPS) or chosen > _MOST_CHOSEN:
            return False
        is_whole = choice_RC.dtype is torch.float32 and choice_RC.is_contiguous()
        return is_whole and not matrix_EOI.shape[1] % _FOUR and self._is_vectors(matrix_EOI)

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
        matrix_EOI: Tensor,
        half: int,
        choice_RC: Tensor,
        *,
        plus: tuple[int, int] = (0, 0),
        mode: int = 0,
    ) -> None:
        rows, chosen = choice_RC.shape[0], choice_RC.shape[1] // 2
        groups, many, per = (rows * chosen, 1, 2) if mode else (rows, chosen, 4)
        _, size, width = matrix_EOI.shape
        batches = size // per
        shape = shape_of(groups * batches, many * width, self._processors)
        blocks = max(1, min(shape.blocks // groups, -(-batches // shape.teams)))
        self._product(
            (blocks, groups, 1), 32 * shape.team * shape.teams,
            *target, *source, matrix_EOI.data_ptr(), _ITEM * matrix_EOI.stride(0), _ITEM * matrix_EOI.stride(1), half,
            choice_RC.data_ptr(), chosen, many, width, batches, *plus, mode, shape.team, shape.teams,
        )  # fmt: skip
