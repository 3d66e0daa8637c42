"""A mixture of experts for few rows: routing, and GEMV kernels that read the chosen experts' matrices in place.

Shapes are suffixes of names: R rows, D hidden, E experts, C experts of a row, I intermediate (the device's part).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tpplan.decoder.fast.kernels.grouped_limits import MOST_EXPERTS
from tpplan.decoder.fast.launches.chosen import Readable, readable, words_of_biases
from tpplan.decoder.fast.launches.gemv import shape_of
from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher, bits_of
from tpplan.decoder.weights.row_kernels import GATES, is_vectors

if TYPE_CHECKING:
    from collections.abc import Collection

    from tpplan.decoder.model.router import Router
    from tpplan.decoder.weights.stacked import Projection

#: Kinds of codes that kernels read, of :data:`tpplan.decoder.fast.launches.dense.KINDS`.
KINDS: Final = ("4", "8", "e4m3", "e2m1")

#: Maximum experts of a row, without and with biases, as in the kernels.
_MOST_CHOSEN: Final = 32
_MOST_BIASED: Final = 8
#: Maximum groups of experts, a lane for each, and best experts of a group that it keeps.
_MOST_GROUPS_OF_EXPERTS: Final = 32
_MOST_BEST: Final = 2

_ITEM: Final = 2
#: Bytes of an element of the choices.
_FLOAT: Final = 4
#: Bytes of one access, and matrix rows that the kernel reads at a time.
_VECTOR, _FOUR = 16, 4
#: Maximum pairs of rows and experts per expert, by kind of codes; 1 for others. For more,
#: torch is faster, as it reads each expert once; for e2m1 it has to dequantise first.
_MOST_PAIRS: Final = {"e2m1": 4}
#: Maximum blocks of a grid in its second dimension.
_MOST_GROUPS: Final = 2**16 - 1


def names_of(dtype: torch.dtype, codes: Collection[str] = ()) -> list[str]:
    """Return the names of the kernels for a dtype: of routing, and of products.

    Args:
        dtype: dtype of rows.
        codes: kinds of codes of quantised matrices; kinds not in :data:`KINDS` have no kernels.
    """
    name = DTYPES[dtype]
    kinds = [f"coded_product_{name}_{kind}" for kind in KINDS if kind in codes]
    return [f"experts_choose_{name}", "experts_choose_f32", f"experts_product_{name}", *kinds]


class ExpertGemv:
    """Kernels of experts for one device and dtype; each method returns None if no kernel supports its tensors.

    Choices are ``[R, 2 × C]`` in float32: for each row the weights of its experts, then their numbers.
    """

    def __init__(self, place: torch.device, dtype: torch.dtype, activation: str, codes: Collection[str] = ()) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: 16-bit dtype of rows, and of matrices that are not quantised.
            activation: name of the gates' activation, one of :data:`tpplan.decoder.weights.row_kernels.GATES`.
            codes: kinds of codes of quantised matrices.
        """
        of_16_bits, of_32_bits, self._product, *more = (Launcher(name, place) for name in names_of(dtype, codes))
        self._choose = {dtype: of_16_bits, torch.float32: of_32_bits}
        self._coded = dict(zip((kind for kind in KINDS if kind in codes), more, strict=True))
        self._dtype, self._mode = dtype, GATES[activation]
        self._processors = torch.cuda.get_device_properties(place).multi_processor_count

    def choose(
        self, logits_RE: Tensor, count: int, router: Router, correction_E: Tensor | None = None
    ) -> Tensor | None:
        """Return the choices of rows; of experts that rank equally, the first wins.

        Args:
            logits_RE: router logits of all experts.
            count: number of experts of a row.
            router: how rows are routed.
            correction_E: selection bias.

        Returns:
            The choices, or None if the kernel does not take such tensors or routers.
        """
        rows, experts = logits_RE.shape
        launch = self._choose.get(logits_RE.dtype)
        if launch is None or logits_RE.stride(1) != 1 or not rows or experts > MOST_EXPERTS:
            return None
        if (
            not 0 < count <= min(_MOST_CHOSEN, experts)
            or router.best > _MOST_BEST
            or router.groups > _MOST_GROUPS_OF_EXPERTS
        ):
            return None
        correction = 0
        if correction_E is not None:
            if correction_E.dtype is not torch.float32 or not correction_E.is_contiguous():
                return None
            correction = correction_E.data_ptr()
        choice_RC = torch.empty(rows, 2 * count, dtype=torch.float32, device=logits_RE.device)
        launch(
            rows,
            32,
            *(logits_RE.data_ptr(), logits_RE.itemsize * logits_RE.stride(0), experts, correction),
            *(choice_RC.data_ptr(), 2 * _FLOAT * count, count),
            *(router.sigmoid, router.groups, router.eligible, router.best),
            *(router.normalised, bits_of(router.least), bits_of(router.factor)),
        )
        return choice_RC

    def up(self, x_RD: Tensor, gates: Projection, ups: Projection, choice_RC: Tensor) -> Tensor | None:
        """Return the intermediate activations of the chosen experts, ``[R, C, I]``; None if the kernel cannot.

        Products, activations and results are each rounded, as they would be by separate kernels.

        Args:
            x_RD: rows.
            gates: gate projections of all experts, whose outputs get the activation.
            ups: up projections of all experts, laid out likewise.
            choice_RC: choices of the rows.
        """
        gate, up = self._readable(gates, choice_RC), self._readable(ups, choice_RC)
        biases = words_of_biases(gates.bias, ups.bias)
        if gate is None or gate != up or biases is None or not is_vectors(x_RD, self._dtype):
            return None
        h_RCI = x_RD.new_empty(len(x_RD), choice_RC.shape[1] // 2, gate.size)
        target, rows = (h_RCI.data_ptr(), _ITEM * h_RCI.stride(1)), (x_RD.data_ptr(), _ITEM * x_RD.stride(0))
        self._run(target, rows, choice_RC, biases, gate, up)
        return h_RCI

    def down(self, h_RCI: Tensor, downs: Projection, choice_RC: Tensor, to_RD: Tensor | None = None) -> Tensor | None:
        """Return the weighted sum of the chosen experts' outputs, ``[R, D]``; None if the kernel cannot.

        It is rounded once.

        Args:
            h_RCI: intermediate activations of the experts; copied if not contiguous.
            downs: down projections of all experts.
            choice_RC: choices of the rows.
            to_RD: rows to which to add the sum in place before it is rounded; they are returned then.
        """
        down, biases = self._readable(downs, choice_RC), words_of_biases(downs.bias)
        if down is None or biases is None or h_RCI.dtype is not self._dtype:
            return None
        if downs.bias is not None and choice_RC.shape[1] > 2 * _MOST_BIASED:
            return None
        if to_RD is not None and (to_RD.dtype is not self._dtype or to_RD.stride(1) != 1):
            return None
        h_RCI = h_RCI.contiguous()  # with one expert of a row, strides are arbitrary
        if h_RCI.data_ptr() % _VECTOR:
            return None
        y_RD = h_RCI.new_empty(len(h_RCI), down.size) if to_RD is None else to_RD
        target, pairs = (y_RD.data_ptr(), _ITEM * y_RD.stride(0)), (h_RCI.data_ptr(), _ITEM * h_RCI.shape[2])
        plus = (0, 0) if to_RD is None else target
        self._run(target, pairs, choice_RC, biases, down, plus=plus)
        return y_RD

    def _readable(self, projection: Projection, choice_RC: Tensor) -> Readable | None:
        """Return the layout of experts' matrices; None if no kernel supports them, or torch is faster for the pairs."""
        matrix_EOI = projection.matrix
        if projection.bias is not None and projection.bias.dtype is not self._dtype:
            return None
        pairs, chosen = choice_RC.numel() // 2, choice_RC.shape[1] // 2
        if not 0 < pairs <= _MOST_GROUPS or chosen > _MOST_CHOSEN:
            return None
        if choice_RC.dtype is not torch.float32 or not choice_RC.is_contiguous() or matrix_EOI.shape[1] % _FOUR:
            return None
        if isinstance(matrix_EOI, Tensor) and not is_vectors(matrix_EOI, self._dtype):
            return None
        found = readable(matrix_EOI, self._coded)
        return found if found and pairs <= _MOST_PAIRS.get(found.kind, 1) * len(matrix_EOI) else None

    def _run(  # noqa: PLR0917
        self,
        target: tuple[int, int],
        source: tuple[int, int],
        choice_RC: Tensor,
        biases: tuple[int, ...],
        matrix: Readable,
        up: Readable | None = None,
        plus: tuple[int, int] = (0, 0),
    ) -> None:
        """Multiply by matrices of experts; if ``up`` is given, ``matrix`` has their gates."""
        rows, chosen = choice_RC.shape[0], choice_RC.shape[1] // 2
        groups, many, per = (rows * chosen, 1, 2) if up else (rows, chosen, 4)
        batches = matrix.size // per
        shape = shape_of(groups * batches, many * matrix.row // _ITEM, self._processors)
        blocks = max(1, min(shape.blocks // groups, -(-batches // shape.teams)))
        words, more = matrix.words(up)
        (self._coded[matrix.kind] if matrix.kind else self._product)(
            (blocks, groups, 1), 32 * shape.team * shape.teams, *target, *source, *words,
            choice_RC.data_ptr(), chosen, many, matrix.width, batches, *plus, *biases, self._mode if up else 0,
            shape.team, shape.teams, *more,
        )  # fmt: skip
