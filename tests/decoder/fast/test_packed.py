"""Products with matrices of codes: which are taken, who has a part of one, and the words that kernels are told."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.nn import functional

from tests.decoder.fast.test_skinny import acted
from tests.decoder.pointwise_cases import launches, memory, number
from tests.packed_cases import FORMS, WARPS, float_matrix, int_matrix, matrix_of
from tpplan.decoder.fast import fused
from tpplan.decoder.fast.fused import Fused
from tpplan.decoder.fast.launches import dense, packed
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.norms import Norm
from tpplan.decoder.fast.launches.packed import STEPS, QuantisedSkinnyGemm, names_of, shape_of
from tpplan.decoder.math import rms_norm
from tpplan.decoder.model.gates import ACTIVATIONS
from tpplan.decoder.model.settings import FAMILIES
from tpplan.decoder.weights.device import DeviceWeights
from tpplan.decoder.weights.quantised import Float8Matrix, IntMatrix, Quantised
from tpplan.decoder.weights.row_kernels import GATES
from tpplan.decoder.weights.stacked import stack_rows
from tpplan.exec.protocol.channel import CALLERS, MOST_BLOCKS
from tpplan.exec.protocol.words import MOST_WORDS
from tpplan.exec.toolchain import kernel_cache

__all__ = ["launches"]  # a fixture

PROCESSORS = 132
#: Of a block.
MOST_WARPS = 8
#: Steps that a warp has on their way, at most.
DEEP = {8: 4, 16: 2}
#: What channels of tests tell kernels.
HEADER = 77
SIZES = [
    (1536, 4096),
    (4096, 1024),
    (4096, 3584),
    (4096, 14336),
    (6144, 4096),
    (7168, 4096),
    (28672, 4096),
    (1, 128),
    (48, 896),
    (10560, 640),
]


@pytest.mark.parametrize("rows", WARPS)
@pytest.mark.parametrize(("size", "width"), SIZES)
def test_all_of_a_matrix_has_warps_at_once(size: int, width: int, rows: int) -> None:
    """No block waits for another to end, none has nothing to do, and none has a warp without steps."""
    blocks, warps, run = shape_of(size, width // 128, PROCESSORS, rows)
    assert 0 < blocks <= min(-(-size // (2 * rows)), MOST_BLOCKS)
    assert blocks * warps <= PROCESSORS * WARPS[rows]
    assert 0 < warps <= MOST_WARPS
    assert 0 < run <= DEEP[rows]
    assert (warps - 1) * run * 128 < width


@pytest.mark.parametrize(
    ("size", "width", "few", "many"),  # blocks and warps for up to eight rows, and for more
    [
        (6144, 4096, (384, 4), (192, 4)), (4096, 4096, (256, 8), (128, 8)), (28672, 4096, (264, 8), (132, 8)),
        (4096, 14336, (256, 7), (128, 8)), (1536, 4096, (96, 8), (48, 8)), (4096, 1024, (256, 4), (128, 4)),
        (7168, 4096, (264, 8), (224, 4)), (4096, 3584, (256, 7), (128, 7)),
    ],
)  # fmt: skip
def test_blocks_are_as_many_as_were_fastest(size: int, width: int, few: tuple[int, int], many: tuple[int, int]) -> None:
    """On a GPU of so many multiprocessors; none of up to eight rows needs the room of a whole one, as it may wait."""
    assert shape_of(size, width // 128, PROCESSORS, 8)[:2] == few
    assert shape_of(size, width // 128, PROCESSORS, 9)[:2] == many
    assert shape_of(size, width // 128, PROCESSORS, 8, 2)[0] <= 2 * PROCESSORS  # where shared memory is small


class FakeLauncher:
    """Does what a kernel does, by its words, and counts.

    Attributes:
        calls: of all launchers, by kernel.
    """

    calls: Counter[str] = Counter()  # noqa: RUF012 (of all, as said)

    def __init__(self, name: str, place: torch.device, *, is_array: bool = False, most_shared: int = 0) -> None:
        """Take any device."""
        self._name, self._most_shared = name, most_shared
        family, *way, dtype, self._kind, count = name.split("_")
        assert family == "packed"
        assert way == (["joint"] if is_array else ["norm"] if most_shared else [])
        assert place.type == "cuda"
        self._is_joint, self._is_normed = is_array, way == ["norm"]
        self._most = 8 if self._is_normed else int(count)
        self._rows = int(count) if self._is_normed else None
        self._dtype = {text: each for each, text in DTYPES.items()}[dtype]

    def __call__(self, blocks: int, threads: int, *words: int, shared: int = 0) -> None:
        """Do it, of what is joint by a device alone."""
        self.calls[self._name] += 1
        *words, gain, eps, offset = words if self._is_normed else (*words, 0, 0, 0)  # type: ignore[assignment]
        if self._is_normed:
            assert words[14] == self._rows
            assert 2 * words[13] * words[14] == shared <= self._most_shared
        if self._is_joint:
            assert words[0] == HEADER
            assert len(words) == MOST_WORDS
            words = (*words[CALLERS : CALLERS + 17], 0)
        y, y_pitch, x, x_pitch, codes, scales, zeros, groups, bits, form, more, run, size, width, rows = words[:15]
        plus, plus_pitch, mode = words[15:]
        assert self._most - 8 < rows <= self._most
        assert 0 < threads <= 32 * MOST_WARPS
        assert not threads % 32
        assert 0 < run <= DEEP[self._most]
        count = 2 * size if mode else size
        assert 0 < blocks <= -(-count // (2 * self._most))
        dtype = {each: kind for kind, each in FORMS.items()}[form]
        columns, height = min(1 << bits, width), min(1 << more, count) if self._kind == "e4m3" else 1
        shape, item = (-(-count // height), groups), dtype.itemsize
        matrix: Quantised
        of_scales = memory(scales, shape, (item * groups, item), dtype)
        if self._kind == "4":
            of_codes = memory(codes, (count, width // 8), (width // 2, 4), torch.int32)
            of_zeros = memory(zeros, (-(-count * groups // 8),), (4,), torch.int32) if zeros else None
        else:
            of_codes = memory(codes, (count, width), (width, 1), torch.uint8)
            of_zeros = memory(zeros, (count, groups), (groups, 1), torch.uint8) if zeros else None
        if self._kind == "e4m3":
            assert not zeros
            matrix = Float8Matrix(of_codes.view(torch.float8_e4m3fn), of_scales, height, columns)
        else:
            matrix = IntMatrix(of_codes, of_scales, of_zeros, int(number(more)), columns, int(self._kind))
            assert zeros or number(more) == 2 ** (matrix.bits - 1)
        rows_RK = memory(x, (rows, width), (x_pitch, 2), self._dtype)
        if self._is_normed:
            rows_RK = rms_norm(rows_RK, memory(gain, (width,), (2,), self._dtype), number(eps), number(offset))
        found = rows_RK.float() @ matrix.dense(0, count, torch.float32).mT
        if plus:
            found += memory(plus, (rows, count), (plus_pitch, 2), self._dtype)
        found = found.to(self._dtype)
        memory(y, (rows, size), (y_pitch, 2), self._dtype).copy_(acted(found, mode) if mode else found)


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> QuantisedSkinnyGemm:
    """Return kernels of a device that is not there."""
    monkeypatch.setattr(packed, "Launcher", FakeLauncher)
    found = SimpleNamespace(
        multi_processor_count=PROCESSORS, major=9, minor=0, shared_memory_per_multiprocessor=228 * 1024
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return QuantisedSkinnyGemm(torch.device("cuda", 0), request.param, ["e5m2", *STEPS], joint=True)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
def test_words(kernels: QuantisedSkinnyGemm, rows: int) -> None:
    """Products, with a bias, a sum or a gate, are told to a kernel of so many rows, whatever scales and zeros are."""
    torch.manual_seed(rows)
    dtype = kernels._dtype
    header, tail = [HEADER] * CALLERS, [HEADER] * (MOST_WORDS - CALLERS - 17)
    channel: Any = SimpleNamespace(words=lambda device, own: [*header, *own, *tail] if device == 0 else [])
    for kind, scales, plus, group in product(STEPS, FORMS, [None, 0, 1], [128, 384]):
        x_RK, bias_N = torch.randn(rows, 392).to(dtype)[:, :384], torch.randn(26).to(dtype)
        matrix = matrix_of(kind, 26, 384, group, scales, plus)
        dense_NK = matrix.dense(0, 26, torch.float32)

        def check(found: torch.Tensor, expected: torch.Tensor) -> None:
            torch.testing.assert_close(found.float(), expected.float(), atol=0.03, rtol=0.02)

        exact = x_RK.float() @ dense_NK.mT
        check(kernels.linear(x_RK, matrix), exact)
        check(kernels.linear(x_RK, matrix, bias_N), exact + bias_N)
        to_RN = torch.randn(rows, 30).to(dtype)[:, 2:28]
        expected = to_RN.float() + exact
        kernels.add(to_RN, x_RK, matrix)
        check(to_RN, expected)
        if kernels.adds_up(x_RK, matrix):
            expected = to_RN.float() + exact
            kernels.joint(to_RN, x_RK, matrix, channel, 0)
            check(to_RN, expected)
        for name, act in ACTIVATIONS.items():
            if name in GATES:
                gate, up = functional.linear(x_RK.float(), dense_NK, bias_N.float()).chunk(2, dim=-1)
                check(kernels.gated(x_RK, matrix, name, bias_N), act(gate.clone()) * up)
        norm = Norm(torch.randn(384).to(dtype), 1e-5, 0.5)
        assert kernels.takes_normed(x_RK, matrix, norm) == (rows == 1 and kind == "4")
        if rows == 1 and kind == "4":
            normed_RK = rms_norm(x_RK, norm.weight, norm.eps, norm.offset).float()
            check(kernels.normed(x_RK, matrix, norm, bias_N), normed_RK @ dense_NK.mT + bias_N)
            gate, up = functional.linear(normed_RK, dense_NK, bias_N.float()).chunk(2, dim=-1)
            check(kernels.normed_gated(x_RK, matrix, "silu", norm, bias_N), functional.silu(gate) * up)


def test_norms_that_are_not_taken(kernels: QuantisedSkinnyGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more rows, of other weights, of columns in another order, and of more bytes than all blocks have room for."""
    dtype = kernels._dtype
    x_RK, gain_K = torch.randn(3, 4096).to(dtype), torch.randn(4104)
    matrix = int_matrix(24, 4096, 128, torch.float16, 1)
    norm = Norm(gain_K.to(dtype)[:4096], 1e-5)
    assert kernels.takes_normed(x_RK[:2], matrix, norm, gated=True)
    assert not kernels.takes_normed(x_RK, matrix, norm)
    assert not kernels.takes_normed(x_RK[:1], evolve(matrix, columns=torch.zeros(4096, dtype=torch.int32)), norm)
    for odd_K in (gain_K.to(dtype)[1:4097], gain_K[:4096]):
        assert not kernels.takes_normed(x_RK[:1], matrix, Norm(odd_K, 1e-5))
    wide, long = torch.randn(2, 10240).to(dtype), int_matrix(24, 10240, 128, torch.float16, 1)
    assert kernels.takes_normed(wide[:1], long, Norm(wide[0], 1e-5))
    assert not kernels.takes_normed(wide, long, Norm(wide[0], 1e-5))
    small = SimpleNamespace(multi_processor_count=1, major=8, minor=6, shared_memory_per_multiprocessor=100 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    few, short = QuantisedSkinnyGemm(torch.device("cuda", 0), dtype, ["4"]), int_matrix(24, 2048, 128, torch.float16, 1)
    assert few.takes_normed(x_RK[:1, :2048], short, Norm(norm.weight[:2048], 1e-5))
    assert not few.takes_normed(x_RK[:1], matrix, norm)


@pytest.mark.usefixtures("launches")
def test_biases_behind_sums(kernels: QuantisedSkinnyGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer adds them, whatever its codes are; then no kernel adds up what several GPUs have."""
    dtype, names = kernels._dtype, list[str]()
    monkeypatch.setattr(dense, "Launcher", lambda *_: None)
    many = SimpleNamespace(takes=lambda *_, **__: False)
    monkeypatch.setattr(fused, "QuantisedGemm", lambda *_: many)  # which is for more rows
    monkeypatch.setattr(kernel_cache, "prepare", lambda asked: names.extend([name for name, _ in asked]))
    settings: Any = SimpleNamespace(family=FAMILIES["llama"], norm_eps=1e-5, activation="silu", attention_cap=None)
    layer = Fused(torch.device("cuda", 0), dtype, settings, (), "fp16", joint=True, codes=[*STEPS])
    channel: Any = None
    for kind in STEPS:
        x_RK, to_RN, bias_N = torch.randn(3, 256).to(dtype), torch.randn(3, 16).to(dtype), torch.randn(16).to(dtype)
        matrix = matrix_of(kind, 16, 256, 128, dtype, 1)
        held = DeviceWeights({"o.bias": bias_N}, {"o.weight": matrix})
        exact = x_RK.float() @ matrix.dense(0, 16, torch.float32).mT + bias_N
        FakeLauncher.calls.clear()
        torch.testing.assert_close(layer.linear(x_RK, held, "o").float(), exact, atol=0.03, rtol=0.02)
        expected = to_RN.float() + exact
        layer.add_linear(to_RN, x_RK, held, "o")
        torch.testing.assert_close(to_RN.float(), expected, atol=0.03, rtol=0.02)
        its_names = [name for joint in (False, True) for name in names_of(dtype, [kind], joint=joint)]
        assert {*its_names} <= {*names}
        assert FakeLauncher.calls == {its_names[0]: 2}
        assert layer.joint(to_RN, x_RK, held, "o", channel, 0) is None
        assert layer.joint(to_RN, x_RK, DeviceWeights({}, held.quantised), "o", channel, 0)


def test_what_is_not_taken(kernels: QuantisedSkinnyGemm) -> None:
    """Many rows, other matrices and dtypes, small groups and steps that are not whole are left to others."""
    dtype = kernels._dtype
    x_RK, matrix = torch.randn(16, 512).to(dtype), int_matrix(24, 512, 128, torch.float16, 1)
    assert kernels.takes(x_RK, matrix)
    assert kernels.takes(x_RK, matrix, gated=True)
    assert kernels.takes(x_RK, matrix.part(16, 24))
    assert kernels.takes(x_RK, int_matrix(24, 512, 256, torch.float32, None))
    assert kernels.takes(x_RK, int_matrix(24, 512, 512, torch.float32, None))
    assert kernels.takes(x_RK[:, :384], int_matrix(24, 384, 384, torch.float32, None))
    assert not kernels.takes(x_RK[:0], matrix)
    assert not kernels.takes(torch.randn(17, 512).to(dtype), matrix)
    assert not kernels.takes(x_RK.float(), matrix)
    assert not kernels.takes(x_RK[:, ::2], int_matrix(24, 256, 128, torch.float16, 1))
    assert not kernels.takes(x_RK, torch.randn(24, 512).to(dtype))
    assert not kernels.takes(x_RK, int_matrix(25, 512, 128, torch.float16, 1), gated=True)
    assert not kernels.takes(x_RK, int_matrix(24, 512, 64, torch.float16, 1))
    assert not kernels.takes(x_RK, int_matrix(24, 512, 384, torch.float16, 1))
    assert not kernels.takes(x_RK[:, :320], int_matrix(24, 320, 320, torch.float16, 1))
    assert kernels.takes(x_RK, evolve(matrix, columns=torch.zeros(512, dtype=torch.int32)))
    assert not kernels.takes(x_RK[:, :128], int_matrix(24, 128, 128, torch.float16, None).part(1, 24))
    assert kernels.takes(x_RK[:, :128], odd := int_matrix(25, 128, 128, torch.float16, 1))
    assert not kernels.takes(x_RK[:, :128], evolve(odd, scales=odd.scales.clone()))  # read in pairs
    assert kernels.takes(x_RK[:, :128], evolve(odd, scales=odd.scales.float()))
    assert not kernels.takes(x_RK, evolve(matrix, scales=matrix.scales.T.contiguous().T))
    assert not kernels.takes(x_RK, evolve(matrix, zeros=torch.zeros(24, 4, dtype=torch.uint8)))
    assert kernels.adds_up(x_RK[:8], matrix)
    assert not kernels.adds_up(x_RK[:9], matrix)


def test_matrices_of_bytes_are_taken(kernels: QuantisedSkinnyGemm) -> None:
    """Whole numbers, and floats of blocks that powers of two are the size of; steps are of 64 columns."""
    x_RK, f32 = torch.randn(16, 576).to(kernels._dtype), torch.float32
    eight = int_matrix(24, 576, 64, f32, 1, bits=8)
    assert kernels.takes(x_RK, eight)
    assert kernels.takes(x_RK, eight, gated=True)
    assert kernels.takes(x_RK, int_matrix(24, 576, 576, f32, None, bits=8))
    assert not kernels.takes(x_RK, int_matrix(24, 576, 32, f32, None, bits=8))
    assert not kernels.takes(x_RK[:, :544], int_matrix(24, 544, 544, f32, None, bits=8))
    assert kernels.takes(x_RK, eight.part(4, 24))
    assert kernels.takes(x_RK, eight.part(1, 24))
    assert not kernels.takes(x_RK, evolve(eight, zeros=torch.zeros(27, dtype=torch.int32)))
    for block in ((128, 128), (1, 576), (1, 64), (24, 576), (100, 1000), (16, 512)):
        assert kernels.takes(x_RK, float_matrix(24, 576, block, f32))
    for block in ((12, 128), (1, 32), (1, 192), (128, 96)):
        assert not kernels.takes(x_RK, float_matrix(24, 576, block, f32))
    floats = float_matrix(24, 576, (24, 576), torch.bfloat16)
    assert kernels.takes(x_RK, floats)
    assert not kernels.takes(x_RK, evolve(floats, scales=floats.scales.expand(1, 2)))
    assert not kernels.takes(x_RK, evolve(floats, codes=floats.codes.to(torch.float8_e5m2)))
    assert not kernels.takes(x_RK, evolve(floats, scales=floats.scales.double()))
    assert kernels.adds_up(x_RK[:8], floats)
    assert not kernels.adds_up(x_RK[:9], floats)


def test_scales_of_whole_matrices_below_each_other(kernels: QuantisedSkinnyGemm) -> None:
    """Of a gate and what it is for, each with one scale, whatever their rows are."""
    parts = [float_matrix(24, 128, (24, 128), torch.float32) for _ in range(2)]
    found = stack_rows(parts, lambda tensors: torch.cat(list(tensors)))
    assert found is not None
    assert kernels.takes(torch.randn(3, 128).to(kernels._dtype), found, gated=True)
    dense = [part.dense(0, 24, torch.float32) for part in parts]
    assert torch.equal(found.dense(0, 48, torch.float32), torch.cat(dense))


def test_kinds_that_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not compiled, loaded or taken."""
    monkeypatch.setattr(packed, "Launcher", FakeLauncher)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(
            multi_processor_count=1, major=8, minor=9, shared_memory_per_multiprocessor=100 * 1024
        ),
    )
    kernels = QuantisedSkinnyGemm(torch.device("cuda", 0), torch.float16, ["e4m3"])
    x_RK = torch.randn(1, 128).half()
    assert kernels.takes(x_RK, float_matrix(16, 128, (1, 128), torch.float32))
    assert not kernels.takes(x_RK, int_matrix(16, 128, 128, torch.float32, None))
    assert names_of(torch.float16, ["e4m3", "e5m2"]) == ["packed_f16_e4m3_8", "packed_f16_e4m3_16"]
    assert names_of(torch.bfloat16, ["8"], joint=True) == ["packed_joint_bf16_8_8"]
    assert not names_of(torch.bfloat16, ["e5m2"])
