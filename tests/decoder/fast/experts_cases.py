"""Matrices of codes of experts, and what kernels make of any experts, beside what torch does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen

from tests.gate_cases import rounded_gate
from tests.packed_cases import int_matrix
from tpplan.decoder.fast.launches.experts import ExpertGemv
from tpplan.decoder.layer import experts
from tpplan.decoder.weights.quantised import Float4Matrix, Float8Matrix, IntMatrix, Quantised
from tpplan.decoder.weights.stacked import Projection, Stacked

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpplan.decoder.fast.launches.grouped import GroupedGemm

    Matrices = Tensor | Stacked

#: The middle of the numbers of random e4m3, in their squares.
_ROOT_OF_SQUARES = 110


@frozen
class Case:
    """Experts of a layer.

    Attributes:
        kind: of codes.
        count: of experts.
        hidden: rows of the matrices back.
        width: of an expert.
        block: rows and columns that share a scale.
        scales: the dtype of these.
        plus: is added to stored zeros; None if there are none.
    """

    kind: str
    count: int
    hidden: int
    width: int
    block: tuple[int, int]
    scales: torch.dtype
    plus: int | None = None

    def matrices(self, device: str = "cpu") -> tuple[Stacked, Stacked, Stacked]:
        """Return those of gates, what they are for, and back; the second lie behind the first, or of e2m1 between."""
        size = self.count * self.width
        both = self.matrix(2 * size, self.hidden, device)
        two: tuple[Quantised, Quantised] = both.part(0, size), both.part(size, 2 * size)
        if isinstance(both, Float4Matrix):
            two = Float4Matrix(both.codes[::2], both.scales[::2]), Float4Matrix(both.codes[1::2], both.scales[1::2])
        three = *two, self.matrix(self.count * self.hidden, self.width, device)
        gate, up, down = (Stacked(each, self.count) for each in three)
        return gate, up, down

    def matrix(self, size: int, width: int, device: str) -> Quantised:
        """Return a random matrix whose products are about as large as what is multiplied."""
        rows, columns = self.block
        if self.kind == "4":
            return int_matrix(size, width, columns, self.scales, self.plus, device)
        if self.kind == "e2m1":
            codes = torch.randint(256, (size, width // 2), dtype=torch.uint8, device=device)
            middle = 126 - (width.bit_length() + 1) // 2
            return Float4Matrix(codes, middle - torch.randint(3, (size, width // 32), device=device).to(torch.uint8))
        codes = torch.randint(256, (size, width), dtype=torch.uint8, device=device)
        shape = -(-size // rows), -(-width // columns)
        scales = (torch.rand(shape, device=device) + 0.5) / width**0.5
        if self.kind == "8":
            zeros = torch.randint(100, 156, shape, dtype=torch.uint8, device=device)
            own = None if self.plus is None else zeros
            return IntMatrix(codes, (scales / 64).to(self.scales), own, self.plus or 0, columns, 8)
        codes[codes & 127 == 127] = 126  # no NaN
        return Float8Matrix(codes.view(torch.float8_e4m3fn), (scales / _ROOT_OF_SQUARES).to(self.scales), rows, columns)

    def with_(self, **changes: Any) -> Case:
        """Return another one."""
        return evolve(self, **changes)


def with_biases(*matrices: Matrices, dtype: torch.dtype) -> list[Projection]:
    """Return projections whose biases alternate with each other, and with what is none of them."""
    count, size, _ = matrices[0].shape
    place = matrices[0].device if isinstance(matrices[0], torch.Tensor) else matrices[0].matrix.codes.device
    all_EO = torch.randn(count, (len(matrices) + 1) * size, device=place).to(dtype)
    return [Projection(each, all_EO[:, i :: len(matrices) + 1]) for i, each in enumerate(matrices)]


def exact(projection: Projection) -> Projection:
    """Return a projection whose products with float32 are float32."""
    matrix, bias = projection.matrix, projection.bias
    return Projection(
        matrix.float() if isinstance(matrix, torch.Tensor) else matrix, None if bias is None else bias.float()
    )


def gating_of(act: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what multiplies rounded gates and what they are for."""

    def gating(gate: Tensor, up: Tensor) -> Tensor:
        return rounded_gate(act, gate.to(dtype), up.to(dtype))

    return gating


def chosen_of(rows: int, chosen: int, count: int) -> Tensor:
    """Return choices of rows."""
    numbers_RC = torch.stack([torch.randperm(count)[:chosen] for _ in range(rows)])
    return torch.cat((torch.rand(rows, chosen), numbers_RC.float()), dim=1)


def parts(matrix: Quantised) -> list[Tensor]:
    """Return the tensors of a matrix."""
    zeros = matrix.zeros if isinstance(matrix, IntMatrix) else None
    return [matrix.codes, matrix.scales, *([] if zeros is None else [zeros])]


def check(found: Tensor | None, exact: Tensor) -> None:
    """Compare with a result that is not rounded: a step of 16 bits of the largest, as roundings between may make."""
    assert found is not None
    assert found.isfinite().all()
    step = torch.finfo(found.dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= 2 * step
    assert (found - exact).abs().mean() <= step / 4


def check_products(
    run: ExpertGemv | GroupedGemm, three: tuple[Matrices, Matrices, Matrices], x_RD: Tensor, choice_RC: Tensor
) -> None:
    """Multiply rows by their own experts' matrices, and add what comes of it to rows that are parts of longer ones.

    There are biases if the number of rows is even.

    Args:
        run: the kernels.
        three: matrices of gates, what they are for, and back.
        x_RD: rows.
        choice_RC: their choices.
    """
    (gate_EID, up_EID, down_EDI), (rows, hidden), dtype = three, x_RD.shape, x_RD.dtype
    gates, ups, downs = map(Projection, three)
    if rows % 2 == 0:
        (gates, ups), (downs,) = with_biases(gate_EID, up_EID, dtype=dtype), with_biases(down_EDI, dtype=dtype)
    weights_RC, numbers_RC = choice_RC.chunk(2, dim=1)
    numbers_RC = numbers_RC.long()
    h_RCI, gating = run.up(x_RD, gates, ups, choice_RC), gating_of("silu", torch.float32)
    check(h_RCI, experts.up(x_RD.float(), exact(gates), exact(ups), numbers_RC, gating, fixed=True))
    assert h_RCI is not None
    again_RCI = run.up(x_RD, gates, ups, choice_RC)
    assert again_RCI is not None
    assert torch.equal(h_RCI, again_RCI)
    exact_RD = experts.down(h_RCI.float(), exact(downs), numbers_RC, weights_RC, fixed=True)
    check(run.down(h_RCI, downs, choice_RC), exact_RD)
    spare = 1 if isinstance(run, ExpertGemv) else 8  # others write vectors
    to_RD = torch.randn(rows, hidden + 2 * spare, device=x_RD.device).to(dtype)
    before = to_RD.clone()
    run.down(h_RCI, downs, choice_RC, to_RD[:, spare:-spare])
    check(to_RD[:, spare:-spare], before[:, spare:-spare] + exact_RD)
    assert torch.equal(to_RD[:, :spare], before[:, :spare])
    assert torch.equal(to_RD[:, -spare:], before[:, -spare:])


def check_gates(
    run: ExpertGemv | GroupedGemm, name: str, gate_EID: Matrices, up_EID: Matrices, dtype: torch.dtype
) -> None:
    """Compare gates of three rows with torch's, which are rounded at the same places; for most rows they are equal.

    Args:
        run: kernels on a GPU.
        name: the activation.
        gate_EID: matrices of 16 experts.
        up_EID: what they are for.
        dtype: of rows.
    """
    x_RD = torch.randn(3, gate_EID.shape[2], device="cuda").to(dtype)
    choice_RC = torch.tensor([[0.5, 0.5, 3, 11], [0.5, 0.5, 3, 0], [0.5, 0.5, 15, 3]], device="cuda")
    found = run.up(x_RD, Projection(gate_EID), Projection(up_EID), choice_RC)
    assert found is not None
    numbers_RC, gating = choice_RC[:, 2:].long(), gating_of(name, dtype)
    gates, ups = (exact(Projection(each)) for each in (gate_EID, up_EID))
    expected = experts.up(x_RD.float(), gates, ups, numbers_RC, gating, fixed=True).float()
    assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (found != expected).float().mean() < 0.25
