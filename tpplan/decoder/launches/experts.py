"""A mixture of experts for few rows, by kernels that read the matrices of chosen experts where they are.

Shapes are written at the end of a name: R rows, D hidden, E experts, C experts chosen for a row, I the device's part of
an expert's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tpplan.decoder.launches.chosen import Readable, readable
from tpplan.decoder.launches.few_rows import GATES
from tpplan.decoder.launches.gemv import shape_of
from tpplan.decoder.launches.launcher import DTYPES, Launcher

if TYPE_CHECKING:
    from collections.abc import Collection

    from tpplan.decoder.quantised import Stacked

#: Kinds of codes that kernels read, of :data:`tpplan.decoder.launches.dense.KINDS`.
KINDS: Final = ("4", "8", "e4m3")

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


def names_of(dtype: torch.dtype, codes: Collection[str] = ()) -> list[str]:
    """Return the names of the kernels for a dtype: what chooses, and what multiplies.

    Args:
        dtype: of rows.
        codes: what matrices are made of; there are no kernels for kinds that are not in :data:`KINDS`.
    """
    name = DTYPES[dtype]
    kinds = [f"coded_product_{name}_{kind}" for kind in KINDS if kind in codes]
    return [f"experts_choose_{name}", f"experts_product_{name}", *kinds]


class Experts:
    """Kernels for one device and dtype; every method tells by its result if it takes its tensors.

    Choices are ``[R, 2 × C]`` in float32: of each row the weights of its experts, then their numbers.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, activation: str, codes: Collection[str] = ()) -> None:
        """Load them.

        Args:
            place: a CUDA device.
            dtype: of rows, and of matrices that are not codes, of 16 bits.
            activation: of gates, one of :data:`tpplan.decoder.launches.few_rows.GATES`.
            codes: what quantised matrices are made of.
        """
        self._choose, self._product, *more = (Launcher(name, place) for name in names_of(dtype, codes))
        self._coded = dict(zip((kind for kind in KINDS if kind in codes), more, strict=True))
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
        gate, up = self._readable(gate_EID, choice_RC), self._readable(up_EID, choice_RC)
        if gate is None or gate != up or not self._is_vectors(x_RD):
            return None
        h_RCI = x_RD.new_empty(len(x_RD), choice_RC.shape[1] // 2, gate.size)
        target, rows = (h_RCI.data_ptr(), _ITEM * h_RCI.stride(1)), (x_RD.data_ptr(), _ITEM * x_RD.stride(0))
        self._run(target, rows, choice_RC, gate, up)
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
        down = self._readable(down_EDI, choice_RC)
        if down is None or h_RCI.dtype is not self._dtype:
            return None
        if to_RD is not None and (to_RD.dtype is not self._dtype or to_RD.stride(1) != 1):
            return None
        h_RCI = h_RCI.contiguous()  # whose strides say nothing where there is one expert of a row
        if h_RCI.data_ptr() % _VECTOR:
            return None
        y_RD = h_RCI.new_empty(len(h_RCI), down.size) if to_RD is None else to_RD
        target, pairs = (y_RD.data_ptr(), _ITEM * y_RD.stride(0)), (h_RCI.data_ptr(), _ITEM * h_RCI.shape[2])
        plus = (0, 0) if to_RD is None else target
        self._run(target, pairs, choice_RC, down, plus=plus)
        return y_RD

    def _readable(self, matrix_EOI: Tensor | Stacked, choice_RC: Tensor) -> Readable | None:
        """Return experts' matrices if a kernel takes them and choices: for more, torch reads all experts once."""
        pairs, chosen = choice_RC.numel() // 2, choice_RC.shape[1] // 2
        if not 0 < pairs <= min(len(matrix_EOI), _MOST_GROUPS) or chosen > _MOST_CHOSEN:
            return None
        if choice_RC.dtype is not torch.float32 or not choice_RC.is_contiguous() or matrix_EOI.shape[1] % _FOUR:
            return None
        if isinstance(matrix_EOI, Tensor) and not self._is_vectors(matrix_EOI):
            return None
        return readable(matrix_EOI, self._coded)

    def _is_vectors(self, tensor: Tensor) -> bool:
        """Tell whether the last dimension is of 16 bytes each, at multiples of them."""
        *steps, one = tensor.stride()
        if tensor.dtype is not self._dtype or one != 1 or not tensor.shape[-1]:
            return False
        places = [tensor.data_ptr(), *(_ITEM * count for count in (*steps, tensor.shape[-1]))]
        return not any(place % _VECTOR for place in places)

    def _run(  # noqa: PLR0917
        self,
        target: tuple[int, int],
        source: tuple[int, int],
        choice_RC: Tensor,
        matrix: Readable,
        up: Readable | None = None,
        plus: tuple[int, int] = (0, 0),
    ) -> None:
        """Multiply by matrices of experts, which are those of gates if there are others."""
        rows, chosen = choice_RC.shape[0], choice_RC.shape[1] // 2
        groups, many, per = (rows * chosen, 1, 2) if up else (rows, chosen, 4)
        batches = matrix.size // per
        shape = shape_of(groups * batches, many * matrix.row // _ITEM, self._processors)
        blocks = max(1, min(shape.blocks // groups, -(-batches // shape.teams)))
        words, more = matrix.words(up)
        (self._coded[matrix.kind] if matrix.kind else self._product)(
            (blocks, groups, 1), 32 * shape.team * shape.teams, *target, *source, *words,
            choice_RC.data_ptr(), chosen, many, matrix.width, batches, *plus, self._mode if up else 0,
            shape.team, shape.teams, *more,
        )  # fmt: skip
