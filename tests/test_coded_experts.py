"""Experts of few rows whose matrices are 4-bit codes: the kernels' machine code, their words, what is left to torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from tests.dense_cases import floats
from tests.packed_cases import int_matrix
from tests.pointwise_cases import memory, number
from tests.test_kernels import _registers
from tests.test_mixture import PROCESSORS
from tpplan.decoder import experts, mixture
from tpplan.decoder.few_rows import GATES
from tpplan.decoder.launcher import DTYPES, bits_of
from tpplan.decoder.mixture import Mixture
from tpplan.decoder.quantised import IntMatrix, Stacked
from tpplan.decoder.settings import ACTIVATIONS
from tpplan.exec import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: Kinds of scales, as kernels are told them.
FORMS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: Experts, hidden, an expert's width, columns that share a scale, the scales' dtype, what is added to stored zeros.
Case = tuple[int, int, int, int, torch.dtype, int | None]


def matrices(case: Case, device: str = "cpu") -> tuple[Stacked, Stacked, Stacked]:
    """Return those of gates, what they are for, and back; what gates are for lies behind them."""
    count, hidden, width, group, scales, plus = case
    both = int_matrix(2 * count * width, hidden, group, scales, plus, device)
    gate, up = both.part(0, count * width), both.part(count * width, 2 * count * width)
    down = int_matrix(count * hidden, width, group, scales, plus, device)
    return Stacked(gate, count), Stacked(up, count), Stacked(down, count)


def gating_of(act: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what multiplies rounded gates and what they are for."""

    def gating(gate: Tensor, up: Tensor) -> Tensor:
        return ACTIVATIONS[act](gate.to(dtype)) * up.to(dtype)

    return gating


@pytest.mark.parametrize(("dtype", "capability"), [("bf16", (8, 0)), ("bf16", (9, 0)), ("f16", (12, 0))])
def test_they_make_floats_of_codes_where_they_are(dtype: str, capability: tuple[int, int]) -> None:
    """Loads of codes are of 16 bytes, a code costs no conversion, and two blocks have registers enough."""
    name = f"coded_product_{dtype}"
    text = kernel_cache.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    assert "ld.global.nc.L1::no_allocate.v4.u32" in text
    assert ("griddepcontrol.wait" in text) == (capability >= kernel_cache.OVERLAPS)
    assert ".f64" not in text
    assert "cvt.rn.f32.u" not in text[text.index("sub.f32") :]  # as of codes; experts' numbers are before
    assert ".local" not in text
    code, log = kernel_cache.assemble(text, capability)
    assert code[:4] == b"\x7fELF"
    assert _registers(log) * 512 <= 2**16
    if capability >= kernel_cache.OVERLAPS:  # on sm_80 the assembler keeps a few in memory
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


class FakeLauncher:
    """Does what the kernel for codes does, by its words."""

    def __init__(self, name: str, place: torch.device) -> None:
        """Take any device."""
        assert place.type == "cuda"
        self._name, self._dtype = name, {text: each for each, text in DTYPES.items()}[name.rsplit("_", maxsplit=1)[1]]

    def __call__(self, blocks: tuple[int, int, int], threads: int, *words: int) -> None:
        """Do it."""
        assert self._name.startswith("coded_product")
        (across, groups, depth), (y, y_pitch, x, x_pitch, codes, size, half, choices, chosen, *more) = blocks, words
        many, width, batches, plus, plus_pitch, mode, team, teams, *rest = more
        assert depth == 1
        assert 128 < threads == 32 * team * teams <= 256
        assert across * groups <= max(2 * PROCESSORS, groups)
        assert (across - 1) * teams < batches
        rows = groups * many // chosen
        weights_RC, experts_RC = memory(choices, (rows, 2 * chosen), (8 * chosen, 4), torch.float32).chunk(2, dim=1)
        pairs = zip(weights_RC.flatten().tolist(), experts_RC.flatten().int().tolist(), strict=True)
        for pair, (by, expert) in enumerate(pairs):
            first, second = (self._rows(codes, half, (size, width), expert, rest, is_second=each) for each in (0, 1))
            x_K = memory(x + (pair // chosen if mode else pair) * x_pitch, (width,), (2,), self._dtype).float()
            if mode:
                act = ACTIVATIONS[{each: name for name, each in GATES.items()}[mode]]
                h_I = act((first @ x_K).to(self._dtype)) * (second @ x_K).to(self._dtype)
                memory(y + pair * y_pitch, (size,), (2,), self._dtype).copy_(h_I)
                continue
            assert torch.equal(first[2:], second)  # two rows further on
            row = pair // chosen
            if not pair % chosen:
                sum_N = memory(plus + row * plus_pitch, (size,), (2,), self._dtype).float() if plus else 0
            sum_N = sum_N + by * (first @ x_K)
            memory(y + row * y_pitch, (size,), (2,), self._dtype).copy_(sum_N)

    @staticmethod
    def _rows(codes: int, half: int, shape: tuple[int, int], expert: int, rest: list[int], *, is_second: int) -> Tensor:
        """Return the rows of an expert's matrix, or those that come third where four are read, as far as they go."""
        (size, width), (scales, form, zeros, scales_half, zeros_half, groups, later, inverse, offset) = shape, rest
        assert not any(word % 16 for word in (codes, half, width // 2))
        start = expert * size
        count = size - 2 if later and is_second else size
        at = codes + start * width // 2 + is_second * half
        words_NW = memory(at, (count, width // 8), (width // 2, 4), torch.int32)
        code_NK = torch.stack([words_NW >> 4 * i & 15 for i in (0, 4, 1, 5, 2, 6, 3, 7)], dim=-1).flatten(1)
        item = 4 if form == FORMS[torch.float32] else 2
        kind = {each: dtype for dtype, each in FORMS.items()}[form]
        first = start * groups + is_second * later
        at = scales + is_second * scales_half + first * item
        scale_NG = memory(at, (count, groups), (groups * item, item), kind).float()
        zero_NG = torch.full((count, groups), number(offset))
        if zeros:
            index_NG = first + torch.arange(count * groups).view(count, groups)
            words = memory(zeros + is_second * zeros_half, (int(index_NG.max()) // 8 + 1,), (4,), torch.int32)
            zero_NG += words[index_NG // 8] >> 4 * (index_NG % 8) & 15
        group_K = torch.arange(width) // 32 * inverse >> 31
        return (code_NK - zero_NG[:, group_K]) * scale_NG[:, group_K]


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mixture:
    """Return kernels of a device that is not there."""
    monkeypatch.setattr(mixture, "Launcher", FakeLauncher)
    found = SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return Mixture(torch.device("cuda", 0), request.param, "silu", coded=True)


def chosen_of(rows: int, chosen: int, count: int) -> Tensor:
    """Return choices of rows."""
    numbers_RC = torch.stack([torch.randperm(count)[:chosen] for _ in range(rows)])
    return torch.cat((torch.rand(rows, chosen), numbers_RC.float()), dim=1)


@pytest.mark.parametrize(("rows", "chosen"), [(1, 2), (1, 9), (3, 3), (9, 1)])
@pytest.mark.parametrize(
    ("group", "scales", "plus"),
    [(32, torch.bfloat16, None), (96, torch.float16, 1), (64, torch.float32, 0), (128, torch.float16, 0)],
)
def test_products(  # noqa: PLR0917
    kernels: Mixture, rows: int, chosen: int, group: int, scales: torch.dtype, plus: int | None
) -> None:
    """They are those of torch, for every kind of scales and zeros, and rows and results that are parts of others."""
    torch.manual_seed(rows)
    dtype, case = kernels._dtype, (9, 96, 160, group, scales, plus)
    gate_EID, up_EID, down_EDI = matrices(case)
    x_RD, to_RD = torch.randn(rows, 104).to(dtype)[:, :96], torch.randn(rows, 99).to(dtype)[:, :96]
    choice_RC = chosen_of(rows, chosen, 9)
    weights_RC, numbers_RC = choice_RC[:, :chosen], choice_RC[:, chosen:].long()

    def check(found: Tensor | None, expected: Tensor) -> None:
        assert found is not None
        torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.02)

    h_RCI = kernels.up(x_RD, gate_EID, up_EID, choice_RC)
    check(h_RCI, experts.up(x_RD.float(), gate_EID, up_EID, numbers_RC, gating_of("silu", dtype), fixed=True).float())
    assert h_RCI is not None
    exact_RD = experts.down(h_RCI.float(), down_EDI, numbers_RC, weights_RC, fixed=True)
    check(kernels.down(h_RCI, down_EDI, choice_RC), exact_RD)
    before = to_RD.float()
    assert kernels.down(h_RCI, down_EDI, choice_RC, to_RD) is to_RD
    check(to_RD, before + exact_RD)


def test_what_is_not_taken(kernels: Mixture) -> None:
    """Other codes, groups that end within 16 bytes, zeros that are bytes, and unlike matrices are left to torch."""
    dtype, choice_RC = kernels._dtype, chosen_of(2, 2, 4)
    x_RD, h_RCI = torch.randn(2, 96).to(dtype), torch.randn(2, 2, 64).to(dtype)
    case = (4, 96, 64, 32, torch.float16, 1)
    gate_EID, up_EID, down_EDI = matrices(case)
    matrix = down_EDI.matrix
    assert isinstance(matrix, IntMatrix)
    assert kernels.up(x_RD, gate_EID, up_EID, choice_RC) is not None
    assert kernels.down(h_RCI, down_EDI, choice_RC) is not None
    assert kernels.down(h_RCI, Stacked(matrix.part(0, 288), 3), choice_RC) is None  # fewer experts than pairs
    for odd in (
        (4, 96, 64, 64, torch.float16, 1),
        (4, 96, 64, 32, torch.float16, 0),
        (4, 96, 64, 32, torch.float16, None),
        (4, 96, 64, 32, torch.bfloat16, 1),
    ):
        assert kernels.up(x_RD, gate_EID, matrices(odd)[1], choice_RC) is None
    dense_EID = torch.randn(4, 64, 96).to(dtype)
    assert kernels.up(x_RD, gate_EID, dense_EID, choice_RC) is None
    assert kernels.up(x_RD, dense_EID, up_EID, choice_RC) is None
    assert kernels.up(x_RD.float(), gate_EID, up_EID, choice_RC) is None
    assert kernels.up(x_RD, *matrices((4, 96, 62, 32, torch.float16, 1))[:2], choice_RC) is None
    bytes_NG = torch.zeros(matrix.scales.shape, dtype=torch.uint8)
    for other in (
        int_matrix(384, 64, 16, torch.float16, 1),
        evolve(matrix, zeros=bytes_NG),
        evolve(matrix, columns=torch.zeros(64, dtype=torch.int32)),
        evolve(matrix, codes=torch.zeros(384, 64, dtype=torch.uint8), bits=8),
        evolve(matrix, scales=matrix.scales.mT.contiguous().mT),
        evolve(matrix, scales=torch.zeros(769, dtype=torch.float16)[1:].view(384, 2)),
        evolve(matrix, codes=torch.zeros(3073, dtype=torch.int32)[1:].view(384, 8)),
        floats("e4m3", (384, 64), (1, 64)),
    ):
        assert kernels.down(h_RCI, Stacked(other, 4), choice_RC) is None
    columns_EK = torch.arange(64).expand(4, 64)
    assert kernels.down(h_RCI, evolve(down_EDI, columns=columns_EK), choice_RC) is None
    assert kernels.down(h_RCI[..., :48].contiguous(), matrices((4, 96, 48, 48, torch.float16, 1))[2], choice_RC) is None
    assert Mixture(torch.device("cuda", 0), dtype, "silu").down(h_RCI, down_EDI, choice_RC) is None


def told(one: IntMatrix, other: IntMatrix | None = None) -> list[int]:
    """Return what a kernel is told of scales and zeros."""
    zeros, groups = one.zeros, one.scales.shape[1]
    halves = 0, 0, groups, 2 * groups
    if other is not None:
        more = 0 if zeros is None or other.zeros is None else other.zeros.data_ptr() - zeros.data_ptr()
        halves = other.scales.data_ptr() - one.scales.data_ptr(), more, groups, 0
    inverse = 0 if groups == 1 else -(-(2**31) // (one.group // 32))
    offset = bits_of(8.0 if zeros is None else float(one.plus))
    return [one.scales.data_ptr(), FORMS[one.scales.dtype], zeros.data_ptr() if zeros is not None else 0,
            *halves, inverse, offset]  # fmt: skip


@pytest.mark.parametrize(
    "case",  # dtype, rows, chosen, activation, team, teams, blocks, matrices
    [
        ("bf16", 1, 2, "silu", 1, 1, 1, (4, 64, 64, 32, torch.bfloat16, None)),  # nothing is left over
        ("f16", 2, 3, "gelu", 1, 2, 2, (4, 96, 32, 96, torch.float16, 1)),  # lanes of a warp have different experts
        ("bf16", 2, 2, "gelu_pytorch_tanh", 2, 1, 1, (9, 160, 64, 64, torch.float32, 0)),  # warps without columns
        ("f16", 1, 5, "silu", 1, 2, 1, (6, 32, 544, 64, torch.float16, 1)),  # several rounds
        ("bf16", 1, 1, "silu", 1, 1, 2, (2, 288, 32, 96, torch.bfloat16, 0)),  # more batches than a warp keeps
    ],
    ids=str,
)
def test_lanes_agree(case: tuple[str, int, int, str, int, int, int, Case]) -> None:
    """What the source does lane by lane is what torch does, and reaches for nothing beside its tensors."""
    lanes, sources = pytest.importorskip("tests.lanes"), pytest.importorskip("tpplan.decoder.coded_experts_kernels")
    name, rows, chosen, act, team, teams, blocks, of_matrices = case
    count, hidden, width, *_ = of_matrices
    torch.manual_seed(count)
    dtype, kernel = (
        {text: each for each, text in DTYPES.items()}[name],
        getattr(sources, f"CODED_PRODUCT_{name.upper()}"),
    )
    choice_RC = chosen_of(rows, chosen, count)
    weights_RC, numbers_RC = choice_RC[:, :chosen], choice_RC[:, chosen:].long()
    x_RD = torch.randn(rows, hidden + 8).to(dtype)[:, :-8]
    three = gate_EID, up_EID, down_EDI = matrices(of_matrices)
    gate, up, down = (each.matrix for each in three)
    assert isinstance(gate, IntMatrix)
    assert isinstance(up, IntMatrix)
    assert isinstance(down, IntMatrix)
    h_RCI, to_RD = x_RD.new_full((rows, chosen, width), torch.nan), torch.randn(rows, hidden + 3).to(dtype)
    of_choices, group = (choice_RC.data_ptr(), chosen), (team, teams)
    threads = 32 * team * teams
    parts = [x for each in (gate, up, down) for x in (each.codes, each.scales, each.zeros) if x is not None]
    own = (x_RD, h_RCI, choice_RC, to_RD, *parts)
    of_up = (
        h_RCI.data_ptr(), 2 * width, x_RD.data_ptr(), 2 * x_RD.stride(0), gate.codes.data_ptr(), width,
        up.codes.data_ptr() - gate.codes.data_ptr(), *of_choices, 1, hidden, width // 2, 0, 0, GATES[act], *group,
        *told(gate, up),
    )  # fmt: skip
    lanes.run(kernel, (blocks, rows * chosen), threads, of_up, own)
    step = torch.finfo(dtype).eps
    exact_RCI = experts.up(x_RD.float(), gate_EID, up_EID, numbers_RC, gating_of(act, dtype), fixed=True)
    torch.testing.assert_close(h_RCI, exact_RCI, atol=2 * step, rtol=2 * step)
    exact_RD = experts.down(h_RCI.float(), down_EDI, numbers_RC, weights_RC, fixed=True)
    before_RD = to_RD.clone()
    for start in (to_RD.data_ptr(), 0):
        of_down = (
            to_RD.data_ptr(), 2 * to_RD.stride(0), h_RCI.data_ptr(), 2 * width, down.codes.data_ptr(), hidden, width,
            *of_choices, chosen, width, hidden // 4, start, 2 * to_RD.stride(0), 0, *group, *told(down),
        )  # fmt: skip
        lanes.run(kernel, (blocks, rows), threads, of_down, own)
        expected_RD = (before_RD[:, :hidden] if start else 0) + exact_RD
        torch.testing.assert_close(to_RD[:, :hidden].float(), expected_RD, atol=2 * step, rtol=2 * step)
        assert torch.equal(to_RD[:, hidden:], before_RD[:, hidden:])
