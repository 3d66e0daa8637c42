"""Experts of few rows whose matrices are codes: the kernels' machine code, their words, what is left to torch."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from tests import machine_code
from tests.decoder.fast.dense_cases import floats
from tests.decoder.fast.experts_cases import Case, chosen_of, exact, gating_of, parts, with_biases
from tests.decoder.fast.overlap import check_overlap
from tests.decoder.fast.test_experts import PROCESSORS, biases_at
from tests.decoder.pointwise_cases import memory, number
from tests.machine_code import registers
from tests.packed_cases import int_matrix
from tpplan.decoder.fast.kernels.scale_kinds import FORMS
from tpplan.decoder.fast.launches.chosen import readable
from tpplan.decoder.fast.launches.experts import KINDS, ExpertGemv
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.layer import experts
from tpplan.decoder.model.gates import ACTIVATIONS
from tpplan.decoder.weights.quantised import Float4Matrix, IntMatrix, Quantised
from tpplan.decoder.weights.row_kernels import GATES
from tpplan.decoder.weights.stacked import Projection, Stacked

if TYPE_CHECKING:
    from torch import Tensor

#: Kernels, each with a generation of GPUs that it is compiled for, and bytes that the assembler may keep in memory.
KERNELS = [
    ("bf16_4", (9, 0), 0),
    ("f16_4", (8, 0), 96),
    ("bf16_8", (8, 0), 64),
    ("f16_8", (12, 0), 0),
    ("f16_e4m3", (9, 0), 0),
    ("bf16_e4m3", (12, 0), 0),
    ("bf16_e2m1", (8, 0), 8),
    ("f16_e2m1", (9, 0), 0),
    ("f16_e2m1", (12, 0), 0),
]


@pytest.mark.parametrize(("name", "capability", "spare"), KERNELS)
def test_they_make_floats_of_codes_where_they_are(name: str, capability: tuple[int, int], spare: int) -> None:
    """Loads of codes are of 16 bytes, a code costs no conversion of whole numbers, and two blocks have registers."""
    name = f"coded_product_{name}"
    text = machine_code.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    check_overlap(name, text, capability)
    assert "ld.global.nc.L1::no_allocate.L2::128B.v4.u32" in text
    assert "cvt.rn.f32.u" not in text  # nor of experts' numbers, which are floats
    log = machine_code.assembled(text, capability)
    assert registers(log) * 512 <= 2**16
    (frame,) = re.findall(r"(\d+) bytes stack frame", log)
    assert int(frame) <= spare


class FakeLauncher:
    """Does what the kernels for codes do, by their words."""

    def __init__(self, name: str, place: torch.device) -> None:
        """Take any device."""
        assert place.type == "cuda"
        self._what, _, dtype, *kind = name.split("_")
        self._dtype = {text: each for each, text in DTYPES.items()}.get(dtype, torch.float32)
        self._kind = kind[0] if kind else ""

    def __call__(self, blocks: tuple[int, int, int], threads: int, *words: int) -> None:
        """Do it."""
        assert self._what == "coded"
        if self._kind == "e2m1":  # rows may be apart
            size = (2 if words[19] else 4) * words[12]
            words = (*words[:5], size, *words[7:], words[5], words[6])
        (across, groups, depth), (y, y_pitch, x, x_pitch, codes, size, half, choices, chosen, *more) = blocks, words
        many, width, batches, plus, plus_pitch, *biases, mode, team, teams = more[:12]
        rest = more[12:]
        assert depth == 1
        assert 128 < threads == 32 * team * teams <= 256
        assert across * groups <= max(2 * PROCESSORS, groups)
        assert (across - 1) * teams < batches
        rows = groups * many // chosen
        weights_RC, experts_RC = memory(choices, (rows, 2 * chosen), (8 * chosen, 4), torch.float32).chunk(2, dim=1)
        pairs = zip(weights_RC.flatten().tolist(), experts_RC.flatten().int().tolist(), strict=True)
        for pair, (by, expert) in enumerate(pairs):
            first, second = (self._rows(codes, half, (size, width), expert, rest, is_second=each) for each in (0, 1))
            bias, up_bias = biases_at(biases, expert, size, self._dtype)
            x_K = memory(x + (pair // chosen if mode else pair) * x_pitch, (width,), (2,), self._dtype).float()
            if mode:
                act = ACTIVATIONS[{each: name for name, each in GATES.items()}[mode]]
                h_I = act((first @ x_K + bias).to(self._dtype)) * (second @ x_K + up_bias).to(self._dtype)
                memory(y + pair * y_pitch, (size,), (2,), self._dtype).copy_(h_I)
                continue
            torch.testing.assert_close(first[2:], second, atol=0, rtol=0, equal_nan=True)  # two rows further on
            row = pair // chosen
            if not pair % chosen:
                sum_N = memory(plus + row * plus_pitch, (size,), (2,), self._dtype).float() if plus else 0
            sum_N = sum_N + by * (first @ x_K + bias)
            memory(y + row * y_pitch, (size,), (2,), self._dtype).copy_(sum_N)

    def _rows(
        self, codes: int, half: int, shape: tuple[int, int], expert: int, rest: list[int], *, is_second: int
    ) -> Tensor:
        """Return the rows of an expert's matrix, or those that come third where four are read, as far as they go."""
        if self._kind == "e2m1":
            (size, width), pitch = shape, rest[2]
            count = size - 2 if is_second and half == 2 * pitch else size
            return self._floats(codes + is_second * half, (count, width), expert, *rest)
        (size, width), (scales, scales_half, form, groups, ahead, row, column, zeros, zeros_half, offset) = shape, rest
        pitch = width // 2 if self._kind == "4" else width
        assert not any(word % 16 for word in (codes, half, pitch))
        start, count = expert * size, size - ahead if is_second else size
        bytes_NK = memory(codes + start * pitch + is_second * half, (count, pitch), (pitch, 1), torch.uint8)
        group_K = torch.arange(width) // (16 * width // pitch) * column >> 31
        rows_N = start + is_second * ahead + torch.arange(count)
        if self._kind == "e4m3":
            rows_N = rows_N * row >> 31
        index_NK = rows_N[:, None] * groups + group_K
        last = int(index_NK.max())
        kind = next(dtype for dtype in (*DTYPES, torch.float32) if FORMS[str(dtype)] == form)
        scale_NK = memory(scales + is_second * scales_half, (last + 1,), (kind.itemsize,), kind).float()[index_NK]
        if self._kind == "e4m3":
            assert (zeros, zeros_half, offset) == (0, 0, 0)
            return bytes_NK.view(torch.float8_e4m3fn).float() * scale_NK
        zero_NK, at = torch.full((count, width), number(offset)), zeros + is_second * zeros_half
        if self._kind == "8":
            if zeros:
                zero_NK += memory(at, (last + 1,), (1,), torch.uint8)[index_NK]
            return (bytes_NK.float() - 128 - zero_NK) * scale_NK
        if zeros:
            zero_NK += memory(at, (last // 8 + 1,), (4,), torch.int32)[index_NK // 8] >> 4 * (index_NK % 8) & 15
        words_NW = bytes_NK.view(torch.int32)
        code_NK = torch.stack([words_NW >> 4 * i & 15 for i in (0, 4, 1, 5, 2, 6, 3, 7)], dim=-1).flatten(1)
        return (code_NK - zero_NK) * scale_NK

    @staticmethod
    def _floats(place: int, shape: tuple[int, int], expert: int, scales: int, of_expert: int, pitch: int) -> Tensor:  # noqa: PLR0917
        (size, width), start = shape, place + expert * of_expert
        assert not any(word % 16 for word in (place, of_expert, pitch))
        codes = memory(start, (size, width // 2), (pitch, 1), torch.uint8)
        exponents = memory((scales + start // 16) % 2**64, (size, width // 32), (pitch // 16, 1), torch.uint8)
        return Float4Matrix(codes, exponents).dense(0, size, torch.float32)


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ExpertGemv:
    """Return kernels of a device that is not there."""
    monkeypatch.setattr("tpplan.decoder.fast.launches.experts.Launcher", FakeLauncher)
    found = SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return ExpertGemv(torch.device("cuda", 0), request.param, "silu", ("e5m2", *KINDS))


@pytest.mark.parametrize(("rows", "chosen"), [(1, 2), (1, 9), (3, 3), (9, 1)])
@pytest.mark.parametrize(
    "case",
    [
        Case("4", 9, 96, 160, (1, 32), torch.bfloat16),
        Case("4", 9, 96, 160, (1, 96), torch.float16, 1),
        Case("4", 9, 96, 160, (1, 64), torch.float32, 0),
        Case("4", 9, 96, 160, (1, 128), torch.float16, 0),
        Case("8", 9, 96, 144, (1, 48), torch.float16, 1),
        Case("8", 9, 80, 112, (1, 112), torch.bfloat16),
        Case("e4m3", 9, 96, 144, (3, 32), torch.float32),
        Case("e4m3", 9, 80, 112, (112, 128), torch.bfloat16),
        Case("e2m1", 9, 96, 160, (1, 32), torch.uint8),
    ],
    ids=str,
)
def test_products(kernels: ExpertGemv, rows: int, chosen: int, case: Case) -> None:
    """They are those of torch, for every kind of codes and scales, and rows and results that are parts of others.

    There are biases, but where a row has too many experts for them.
    """
    torch.manual_seed(rows)
    dtype, hidden = kernels._dtype, case.hidden
    gate_EID, up_EID, down_EDI = three = case.matrices()
    gates, ups, downs = map(Projection, three)
    if chosen < 9:
        (gates, ups), (downs,) = with_biases(gate_EID, up_EID, dtype=dtype), with_biases(down_EDI, dtype=dtype)
    x_RD, to_RD = torch.randn(rows, hidden + 8).to(dtype)[:, :hidden], torch.randn(rows, 99).to(dtype)[:, :hidden]
    choice_RC = chosen_of(rows, chosen, 9)
    weights_RC, numbers_RC = choice_RC[:, :chosen], choice_RC[:, chosen:].long()

    def check(found: Tensor | None, expected: Tensor) -> None:
        assert found is not None
        torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.02)

    h_RCI, gating = kernels.up(x_RD, gates, ups, choice_RC), gating_of("silu", dtype)
    check(h_RCI, experts.up(x_RD.float(), exact(gates), exact(ups), numbers_RC, gating, fixed=True).float())
    assert h_RCI is not None
    exact_RD = experts.down(h_RCI.float(), exact(downs), numbers_RC, weights_RC, fixed=True)
    check(kernels.down(h_RCI, downs, choice_RC), exact_RD)
    before = to_RD.float()
    assert kernels.down(h_RCI, downs, choice_RC, to_RD) is to_RD
    check(to_RD, before + exact_RD)


def test_what_is_not_taken(kernels: ExpertGemv) -> None:
    """Other codes, groups that end within 16 bytes, zeros of another kind, and unlike matrices are left to torch."""
    dtype, choice_RC = kernels._dtype, chosen_of(2, 2, 4)
    x_RD, h_RCI = torch.randn(2, 96).to(dtype), torch.randn(2, 2, 64).to(dtype)
    case = Case("4", 4, 96, 64, (1, 32), torch.float16, 1)
    gate_EID, up_EID, down_EDI = case.matrices()
    matrix = down_EDI.matrix
    assert isinstance(matrix, IntMatrix)
    assert kernels.up(x_RD, Projection(gate_EID), Projection(up_EID), choice_RC) is not None
    assert kernels.down(h_RCI, Projection(down_EDI), choice_RC) is not None
    assert (
        kernels.down(h_RCI, Projection(Stacked(matrix.part(0, 288), 3)), choice_RC) is None
    )  # fewer experts than pairs
    for odd in (
        case.with_(block=(1, 64)),
        case.with_(plus=0),
        case.with_(plus=None),
        case.with_(scales=torch.bfloat16),
        case.with_(kind="8"),
        case.with_(kind="e4m3"),
    ):
        assert kernels.up(x_RD, Projection(gate_EID), Projection(odd.matrices()[1]), choice_RC) is None
    dense_EID = torch.randn(4, 64, 96).to(dtype)
    assert kernels.up(x_RD, Projection(gate_EID), Projection(dense_EID), choice_RC) is None
    assert kernels.up(x_RD, Projection(dense_EID), Projection(up_EID), choice_RC) is None
    assert kernels.up(x_RD.float(), Projection(gate_EID), Projection(up_EID), choice_RC) is None
    odd_gates, odd_ups = map(Projection, case.with_(width=62).matrices()[:2])
    assert kernels.up(x_RD, odd_gates, odd_ups, choice_RC) is None
    bytes_NG, words_W = torch.zeros(matrix.scales.shape, dtype=torch.uint8), torch.zeros(96, dtype=torch.int32)
    eights = evolve(matrix, codes=torch.zeros(384, 64, dtype=torch.uint8), bits=8, zeros=bytes_NG)
    each: Quantised
    for each, taken in (
        (int_matrix(384, 64, 16, torch.float16, 1), False),
        (evolve(matrix, zeros=bytes_NG), False),
        (evolve(matrix, columns=torch.zeros(64, dtype=torch.int32)), False),
        (evolve(matrix, scales=matrix.scales.mT.contiguous().mT), False),
        (evolve(matrix, scales=torch.zeros(769, dtype=torch.float16)[1:].view(384, 2)), True),
        (evolve(matrix, codes=torch.zeros(3073, dtype=torch.int32)[1:].view(384, 8)), False),
        (eights, True),
        (evolve(eights, zeros=words_W), False),
        (evolve(eights, group=8), False),
        (evolve(eights, codes=torch.zeros(384, 72, dtype=torch.uint8)), False),
        (evolve(eights, scales=matrix.scales.double()), False),
        (floats("e4m3", (384, 64), (1, 64)), True),
        (floats("e4m3", (384, 64), (128, 16)), True),
        (floats("e4m3", (384, 64), (128, 24)), False),
        (floats("e5m2", (384, 64), (1, 64)), False),
    ):
        assert (kernels.down(h_RCI, Projection(Stacked(each, 4)), choice_RC) is not None) == taken
    columns_EK = torch.arange(64).expand(4, 64)
    assert kernels.down(h_RCI, Projection(evolve(down_EDI, columns=columns_EK)), choice_RC) is None
    assert kernels.down(h_RCI[..., :48].contiguous(), Projection(case.with_(width=48).matrices()[2]), choice_RC) is None
    others = ExpertGemv(torch.device("cuda", 0), dtype, "silu", ("8",))
    assert others.down(h_RCI, Projection(down_EDI), choice_RC) is None
    assert others.down(h_RCI, Projection(Stacked(eights, 4)), choice_RC) is not None


def test_quotients_are_exact() -> None:
    """Rows share scales by quotients, which 31 bits have only of so many rows; all of Mixtral's have them."""
    codes = torch.empty(8 * 14336, 16, dtype=torch.float8_e4m3fn)
    matrix = evolve(floats("e4m3", (2, 16), (1, 16)), codes=codes, scales=torch.ones(8, 1), rows=14336)
    found = readable(Stacked(matrix, 8), KINDS)
    assert found is not None
    rows = torch.arange(8 * 14336)
    assert torch.equal(rows * found.scaling[2] >> 31, rows // 14336)
    more = evolve(matrix, codes=torch.empty(16 * 14336, 16, dtype=torch.float8_e4m3fn), scales=torch.ones(16, 1))
    assert readable(Stacked(more, 16), KINDS) is None


@pytest.mark.parametrize(
    "case",  # dtype, rows, chosen, activation, team, teams, blocks, matrices
    [
        ("bf16", 1, 2, "silu", 1, 1, 1, Case("4", 4, 64, 64, (1, 32), torch.bfloat16)),  # nothing is left over
        # lanes of a warp have different experts
        ("f16", 2, 3, "gelu", 1, 2, 2, Case("4", 4, 96, 32, (1, 96), torch.float16, 1)),
        # warps without columns
        ("bf16", 1, 2, "gelu_pytorch_tanh", 2, 1, 1, Case("4", 5, 96, 64, (1, 64), torch.float32, 0)),
        # several rounds, and pairs of rows in two blocks
        ("f16", 1, 5, "silu", 1, 2, 1, Case("e4m3", 6, 16, 224, (3, 32), torch.float32)),
        # more batches than a warp keeps
        ("bf16", 1, 1, "silu", 1, 1, 2, Case("4", 2, 288, 32, (1, 96), torch.bfloat16, 0)),
        ("f16", 2, 1, "silu", 2, 1, 1, Case("8", 2, 32, 80, (1, 128), torch.bfloat16)),
        ("f16", 1, 2, "silu", 1, 2, 1, Case("8", 3, 48, 80, (1, 16), torch.float16, 1)),
        ("bf16", 2, 1, "gelu", 1, 1, 2, Case("e4m3", 3, 64, 32, (32, 64), torch.float16)),  # a scale for an expert
        ("bf16", 1, 1, "silu", 1, 1, 1, Case("e4m3", 2, 16, 48, (1, 48), torch.bfloat16)),
        ("bf16", 2, 3, "silu", 1, 1, 1, Case("e2m1", 4, 64, 32, (1, 32), torch.uint8)),
        ("f16", 1, 2, "silu", 2, 1, 1, Case("e2m1", 3, 32, 64, (1, 32), torch.uint8)),
    ],
    ids=str,
)
def test_lanes_agree(case: tuple[str, int, int, str, int, int, int, Case]) -> None:
    """What the source does lane by lane is what torch does, and reaches for nothing beside its tensors."""
    lanes, sources = (
        pytest.importorskip("tests.lanes"),
        pytest.importorskip("tpplan.decoder.fast.kernels.coded_experts"),
    )
    name, rows, chosen, act, team, teams, blocks, experts_of = case
    count, hidden, width, kind = experts_of.count, experts_of.hidden, experts_of.width, experts_of.kind
    torch.manual_seed(count)
    dtype = {text: each for each, text in DTYPES.items()}[name]
    kernel = getattr(sources, f"CODED_PRODUCT_{name}_{kind}".upper())
    choice_RC = chosen_of(rows, chosen, count)
    weights_RC, numbers_RC = choice_RC[:, :chosen], choice_RC[:, chosen:].long()
    x_RD = torch.randn(rows, hidden + 8).to(dtype)[:, :-8]
    three = gate_EID, up_EID, down_EDI = experts_of.matrices()
    gate, up, down = (readable(each, KINDS) for each in three)
    assert gate is not None
    assert gate == up
    assert down is not None
    h_RCI, to_RD = x_RD.new_full((rows, chosen, width), torch.nan), torch.randn(rows, hidden + 3).to(dtype)
    of_choices, group = (choice_RC.data_ptr(), chosen), (team, teams)
    threads = 32 * team * teams
    own = (x_RD, h_RCI, choice_RC, to_RD, *(part for each in three for part in parts(each.matrix)))
    words, more = gate.words(up)
    of_up = (
        h_RCI.data_ptr(), 2 * width, x_RD.data_ptr(), 2 * x_RD.stride(0), *words, *of_choices, 1, hidden, width // 2,
        0, 0, 0, 0, 0, 0, GATES[act], *group, *more,
    )  # fmt: skip
    lanes.run(kernel, (blocks, rows * chosen), threads, of_up, own)
    step = torch.finfo(dtype).eps
    exact_RCI = experts.up(
        x_RD.float(), Projection(gate_EID), Projection(up_EID), numbers_RC, gating_of(act, dtype), fixed=True
    )
    torch.testing.assert_close(h_RCI, exact_RCI, atol=2 * step, rtol=2 * step)
    exact_RD = experts.down(h_RCI.float(), Projection(down_EDI), numbers_RC, weights_RC, fixed=True)
    before_RD = to_RD.clone()
    words, more = down.words()
    for start in (to_RD.data_ptr(), 0):
        of_down = (
            to_RD.data_ptr(), 2 * to_RD.stride(0), h_RCI.data_ptr(), 2 * width, *words, *of_choices, chosen, width,
            hidden // 4, start, 2 * to_RD.stride(0), 0, 0, 0, 0, 0, *group, *more,
        )  # fmt: skip
        lanes.run(kernel, (blocks, rows), threads, of_down, own)
        expected_RD = (before_RD[:, :hidden] if start else 0) + exact_RD
        torch.testing.assert_close(to_RD[:, :hidden].float(), expected_RD, atol=2 * step, rtol=2 * step)
        assert torch.equal(to_RD[:, hidden:], before_RD[:, hidden:])


def test_all_codes_of_4_bits_are_exact() -> None:
    """Each code is multiplied as what it says, in each column, with any power of two; the smallest one is 0."""
    lanes, sources = (
        pytest.importorskip("tests.lanes"),
        pytest.importorskip("tpplan.decoder.fast.kernels.coded_experts"),
    )
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(256, 16)
    given = Float4Matrix(codes, torch.full((256, 1), 124, dtype=torch.uint8))
    given.scales[::7] = 0
    down = readable(Stacked(given, 1), KINDS)
    assert down is not None
    choice_RC = torch.tensor([[1.0, 0.0]])
    for column in (0, 3, 22, 29):
        x_RI, y_RD = torch.zeros(1, 32).half(), torch.zeros(1, 256).half()
        x_RI[0, column] = 1
        words, more = down.words()
        told = (
            y_RD.data_ptr(), 512, x_RI.data_ptr(), 64, *words, choice_RC.data_ptr(), 1, 1, 32, 64, *[0] * 7, 1, 1, *more
        )  # fmt: skip
        lanes.run(sources.CODED_PRODUCT_F16_E2M1, (1, 1), 32, told, (x_RI, y_RD, choice_RC, codes, given.scales))
        assert torch.equal(y_RD[0].float(), given.dense(0, 256, torch.float32)[:, column])


def test_floats_of_4_bits_that_are_not_taken(kernels: ExpertGemv) -> None:
    """Scales that lie otherwise than codes, and rows that are not of whole 16 bytes, are left to torch."""
    dtype, choice_RC = kernels._dtype, chosen_of(2, 2, 4)
    x_RD = torch.randn(2, 96).to(dtype)
    gate_EID, up_EID, _ = Case("e2m1", 4, 96, 64, (1, 32), torch.uint8).matrices()
    gates, up = Projection(gate_EID), up_EID.matrix
    assert isinstance(up, Float4Matrix)
    assert kernels.up(x_RD, gates, Projection(up_EID), choice_RC) is not None
    for odd in (Float4Matrix(up.codes, up.scales.clone()), Float4Matrix(up.codes.clone(), up.scales.clone())):
        assert kernels.up(x_RD, gates, Projection(Stacked(odd, 4)), choice_RC) is None
    h_RCI = torch.randn(2, 2, 96).to(dtype)
    for odd, taken in (
        (Float4Matrix(up.codes.clone(), up.scales.clone()), True),
        (up, True),
        (Float4Matrix(up.codes, up.scales.clone()), False),
        (Float4Matrix(up.codes.clone(), up.scales.mT.contiguous().mT), False),
        (Float4Matrix(torch.zeros(256 * 48 + 1, dtype=torch.uint8)[1:].view(256, 48), up.scales.clone()), False),
    ):
        assert (kernels.down(h_RCI, Projection(Stacked(odd, 4)), choice_RC) is not None) == taken


def test_all_codes_are_exact() -> None:
    """Each code is multiplied as what it says, the smallest ones too; those that are no numbers are 480."""
    lanes, sources = (
        pytest.importorskip("tests.lanes"),
        pytest.importorskip("tpplan.decoder.fast.kernels.coded_experts"),
    )
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(256, 16)
    given = evolve(floats("e4m3", (2, 16), (1, 16)), codes=codes.view(torch.float8_e4m3fn), scales=torch.ones(256, 1))
    down = readable(Stacked(given, 1), KINDS)
    assert down is not None
    x_RI, y_RD, choice_RC = torch.zeros(1, 16).half(), torch.zeros(1, 256).half(), torch.tensor([[1.0, 0.0]])
    x_RI[0, 5] = 1
    words, more = down.words()
    told = (
        y_RD.data_ptr(), 512, x_RI.data_ptr(), 32, *words, choice_RC.data_ptr(), 1, 1, 16, 64, *[0] * 7, 1, 1, *more
    )  # fmt: skip
    lanes.run(
        sources.CODED_PRODUCT_F16_E4M3, (1, 1), 32, told, (x_RI, y_RD, choice_RC, given.codes, given.scales)
    )  # fmt: skip
    expected_D = given.codes[:, 5].float()
    expected_D[expected_D.isnan()] = torch.tensor([480.0, -480.0])
    assert torch.equal(y_RD[0].float(), expected_D)
