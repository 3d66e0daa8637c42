"""Products of few rows: the kernels' machine code, how warps share a matrix, and the words that kernels are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from tests import machine_code
from tests.decoder.fast.overlap import check_overlap
from tests.decoder.pointwise_cases import memory, number
from tests.machine_code import CAPABILITIES, check_code, registers
from tpplan.decoder.fast.launches import gemv
from tpplan.decoder.fast.launches.gemv import Gemv, shape_of
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.norms import Norm
from tpplan.decoder.math import rms_norm
from tpplan.decoder.model.gates import ACTIVATIONS
from tpplan.decoder.weights.row_kernels import GATES
from tpplan.exec.toolchain import kernel_cache

SIZES = [(1536, 4096), (4096, 1024), (4096, 3584), (28672, 4096), (4096, 14336), (7, 8), (9, 2304), (33, 896), (5, 520)]
#: Kernels, each with the generation of GPUs that it is compiled for: it takes long, and they differ by dtype in little.
#: The one with most registers is for that on which two blocks have to fit.
KERNELS = [
    ("gemv_bf16_1", CAPABILITIES[0]),
    ("gemv_f16_2", CAPABILITIES[-1]),
    ("gemv_norm_bf16_1", CAPABILITIES[-1]),
    ("gemv_norm_f16_1", (9, 0)),
    ("gemv_norm_f16_2", CAPABILITIES[0]),
    ("gemv_joint_bf16_2", CAPABILITIES[0]),
    ("gemv_joint_f16_1", (9, 0)),
    ("gemv_norm_bf16_2", (9, 0)),
]
EPS = 1e-5
PROCESSORS = 132


@pytest.mark.parametrize(("name", "capability"), KERNELS)
def test_they_read_vectors_and_spill_nothing(name: str, capability: tuple[int, int]) -> None:
    """Loads are of 16 bytes, all is computed in 32 bits in registers, of which blocks have enough."""
    text = machine_code.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    check_overlap(name, text, capability)
    assert "ld.global.nc.L1::no_allocate.L2::128B.v4.u32" in text
    assert ("st.shared.v4.u32" in text) == ("_norm_" in name)
    log = check_code(text, capability)
    warps = 16 if capability == (9, 0) else 8  # elsewhere the compiler keeps more: a second block may have to wait
    assert registers(log) * 32 * warps <= 2**16


@pytest.mark.parametrize(("size", "width"), SIZES)
@pytest.mark.parametrize("per", [2, 4])
def test_all_of_a_matrix_has_warps_at_once(size: int, width: int, per: int) -> None:
    """No block waits for another to end, none has nothing to do, and no team has a warp without columns."""
    batches = -(-size // per)
    shape = shape_of(batches, width, PROCESSORS)
    warps = shape.team * shape.teams
    assert 4 < warps <= 8
    assert (shape.blocks - 1) * shape.teams < batches
    assert shape.blocks <= PROCESSORS * (16 // warps)
    assert (shape.team - 1) * 256 < width
    assert shape.blocks * shape.teams >= min(batches, PROCESSORS * (16 // warps))


@pytest.mark.parametrize(("width", "team"), [(4096, 8), (3584, 7), (14336, 7), (1024, 2), (2304, 5), (896, 2), (8, 1)])
def test_teams_have_even_steps(width: int, team: int) -> None:
    """A team's warps have two steps of 256 columns at a time, and as few as possible behind the last column."""
    assert shape_of(1000, width, PROCESSORS).team == team


class FakeLauncher:
    """Does what a kernel does, by its words."""

    def __init__(self, name: str, place: torch.device) -> None:
        """Take any device."""
        *way, dtype, count = name.split("_")
        assert place.type == "cuda"
        self._normed, self._count = way == ["gemv", "norm"], int(count)
        self._dtype = {text: each for each, text in DTYPES.items()}[dtype]

    def __call__(self, blocks: int, threads: int, *words: int) -> None:
        """Do it."""
        y, y_pitch, x, x_pitch, weight, pitch, half, size, per, width, rows, plus, plus_pitch, mode, *rest = words
        team, teams, inverse, gain, eps, offset = rest
        assert rows == self._count
        assert threads == 32 * team * teams
        assert [warp * inverse >> 16 for warp in range(team * teams)] == [warp // team for warp in range(team * teams)]
        assert blocks * teams <= -(-size // per) + teams - 1
        assert (per, half) == ((2, pitch * size) if mode else (4, 2 * pitch))
        assert (gain != 0) == self._normed
        count = 2 * size if mode else size
        rows_RK = memory(x, (rows, width), (x_pitch, 2), self._dtype)
        if self._normed:
            weight_K = memory(gain, (width,), (2,), self._dtype)
            rows_RK = rms_norm(rows_RK, weight_K, number(eps), number(offset))
        found = rows_RK.float() @ memory(weight, (count, width), (pitch, 2), self._dtype).float().mT
        if plus:
            found += memory(plus, (rows, count), (plus_pitch, 2), self._dtype)
        found = found.to(self._dtype)
        if mode:
            gate, up = found.chunk(2, dim=-1)
            found = ACTIVATIONS[{each: name for name, each in GATES.items()}[mode]](gate.clone()) * up
        memory(y, (rows, size), (y_pitch, 2), self._dtype).copy_(found)


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gemv:
    """Return kernels of a device that is not there."""
    monkeypatch.setattr(gemv, "Launcher", FakeLauncher)
    monkeypatch.setattr(kernel_cache, "prepare", list)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    found = SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return Gemv(torch.device("cuda", 0), request.param)


def some(kernels: Gemv, *shape: int) -> torch.Tensor:
    """Return numbers in the dtype of kernels."""
    return torch.randn(shape).to(kernels._dtype)


@pytest.mark.parametrize("rows", [1, 2])
def test_words(kernels: Gemv, rows: int) -> None:
    """Products, with a norm, a bias, a sum or a gate, are told to a kernel of so many rows."""
    torch.manual_seed(rows)
    x_RK, weight_NK, bias_N = some(kernels, rows, 80)[:, :72], some(kernels, 26, 72), some(kernels, 26)
    norm = Norm(some(kernels, 72), EPS, 0.5)
    normed_RK = rms_norm(x_RK, norm.weight, EPS, 0.5)

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)

    assert kernels.takes_normed(x_RK, weight_NK, norm, gated=True)
    check(kernels.normed(x_RK, weight_NK, norm, bias_N), functional.linear(normed_RK, weight_NK, bias_N))
    check(kernels.linear(x_RK, weight_NK), functional.linear(x_RK, weight_NK))
    to_RN = some(kernels, rows, 26)
    expected = to_RN.addmm(x_RK, weight_NK.mT)
    kernels.add(to_RN, x_RK, weight_NK)
    check(to_RN, expected)
    for name, act in ACTIVATIONS.items():
        if name in GATES:
            gate, up = functional.linear(normed_RK, weight_NK, bias_N).chunk(2, dim=-1)
            check(kernels.normed_gated(x_RK, weight_NK, name, norm, bias_N), act(gate.clone()) * up)
            gate, up = functional.linear(x_RK, weight_NK, bias_N).chunk(2, dim=-1)
            check(kernels.gated(x_RK, weight_NK, name, bias_N), act(gate.clone()) * up)


def test_what_is_not_taken(kernels: Gemv) -> None:
    """Many rows, other dtypes and strides, and what torch does faster, are left to torch."""
    x_RK, weight_NK, norm_K = some(kernels, 2, 4096), some(kernels, 8, 4096), some(kernels, 8200)
    assert kernels.takes_normed(x_RK, weight_NK, Norm(norm_K[:4096], EPS))
    assert not kernels.takes_normed(some(kernels, 3, 4096), weight_NK, Norm(norm_K[:4096], EPS))
    for odd_K in (norm_K[1:4097], norm_K[:4096].float(), norm_K[:8192:2]):
        assert not kernels.takes_normed(x_RK, weight_NK, Norm(odd_K, EPS))
    assert not kernels.takes(some(kernels, 3, 4096), weight_NK)
    assert kernels.takes(x_RK, weight_NK)
    assert not kernels.takes(x_RK[:0], weight_NK)
    assert not kernels.takes(x_RK.float(), weight_NK)
    assert not kernels.takes(x_RK, weight_NK.float())
    assert not kernels.takes(x_RK, weight_NK[:3])
    assert not kernels.takes(x_RK, weight_NK[:7], gated=True)
    assert not kernels.takes(x_RK[:, :12], weight_NK[:, :12])
    assert not kernels.takes(x_RK[:, 1:9], weight_NK[:, :8])
    assert not kernels.takes(x_RK[:, :2048], weight_NK[:, ::2])
    wide = some(kernels, 2, 8200)
    assert not kernels.takes_normed(wide, some(kernels, 4, 8200), Norm(norm_K, EPS))
    assert kernels.takes(wide, some(kernels, 4, 8200))
