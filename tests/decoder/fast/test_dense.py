"""Rows of quantised matrices: the kernels' machine code, and what their source does lane by lane as it is told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from tests import machine_code
from tests.decoder.fast.dense_cases import check, floats, ints, small_floats
from tests.decoder.fast.overlap import check_overlap
from tests.machine_code import CAPABILITIES, check_code, in_order
from tpplan.decoder.fast.launches import dense
from tpplan.decoder.fast.launches.dense import KINDS, Dequantiser, names_of
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.exec.toolchain import kernel_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.decoder.weights.quantised import Quantised

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PLACE = torch.device("cuda", 0)
#: Results are what they are, also without an end or a number.
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
MATRICES: dict[str, Callable[[], Quantised]] = {
    "of nibbles": lambda: ints(4, (9, 256), 128, F16),
    "with zeros in nibbles": lambda: ints(4, (5, 360), 40, BF16, "nibbles", plus=1),
    "with zeros in bytes": lambda: ints(4, (3, 24), 8, F32, "bytes"),
    "of one group": lambda: ints(4, (6, 264), 512, BF16, "nibbles"),
    "of several blocks of threads": lambda: ints(4, (2, 2080), 32, F32, "nibbles"),
    "of bytes": lambda: ints(8, (4, 64), 32, F32),
    "of bytes with zeros": lambda: ints(8, (7, 136), 24, F16, "bytes", plus=1),
    "of floats with one scale": lambda: floats("e4m3", (9, 64), (9, 64)),
    "of floats with a scale for each row": lambda: floats("e4m3", (6, 264), (1, 264), BF16),
    "of floats with blocks": lambda: floats("e4m3", (13, 136), (3, 56)),
    "of floats with a long exponent": lambda: floats("e5m2", (5, 256), (2, 128), F16),
    "of floats of 4 bits": lambda: small_floats(9, 256),
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_ask_for_all_before_they_store_vectors(kind: str) -> None:
    """Loads are before the wait, stores of 16 bytes behind it; nothing is contracted, in 64 bits or in memory."""
    for capability, dtype in zip(CAPABILITIES, (F16, BF16, BF16), strict=False):
        (name,) = names_of(dtype, [kind])
        text = machine_code.ptx(name, capability)
        assert f".visible .entry {name}(" in text
        check_overlap(name, text, capability)
        assert text.count("st.global.v4.u32") == text.count("st.") == 4
        assert text.count(f"ld.global.{'u32' if kind in {'4', 'e2m1'} else 'v2.u32'}") >= 4
        if capability >= kernel_cache.OVERLAPS:
            steps = in_order(text)
            assert steps.rindex("ld.global") < steps.index("griddepcontrol.wait") < steps.index("st.global")
        assert "fma." not in text
        check_code(text, capability)


class Told:
    """Runs a kernel's source lane by lane, on what a test allows.

    Attributes:
        allowed: that.
    """

    allowed: tuple[torch.Tensor, ...] = ()

    def __init__(self, name: str, place: torch.device) -> None:
        """Find it."""
        assert place == PLACE
        self._kernel = getattr(pytest.importorskip("tpplan.decoder.fast.kernels.dense"), name.upper())

    def __call__(self, blocks: tuple[int, int, int], threads: int, *words: int) -> None:
        """Run it."""
        x, y, z = blocks
        assert z == 1
        assert not threads % 32
        assert threads <= 256
        pytest.importorskip("tests.lanes").run(self._kernel, (x, y), threads, words, self.allowed)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Return what makes rows as kernels do, in the middle of longer ones, which stay as they are."""
    monkeypatch.setattr(dense, "Launcher", Told)

    def rows(matrix: Quantised, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        kernels, width = Dequantiser(PLACE, dtype, [dense.kind_of(matrix)]), matrix.shape[1]
        assert kernels.takes(matrix)
        out = torch.full((end - start + 2, width + 16), 9, dtype=dtype)
        kept = (matrix.codes, matrix.scales, getattr(matrix, "zeros", None), out)
        monkeypatch.setattr(Told, "allowed", [each for each in kept if each is not None])
        found = out[1:-1, 8:-8]
        kernels(matrix, start, end, found)
        made, found = found.clone(), found.fill_(9)
        assert (out == 9).all()
        return made

    return rows


@quiet
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_lanes_make_the_matrix(make: Callable[..., torch.Tensor], name: str, dtype: torch.dtype) -> None:
    """All rows and some of them are what the matrix itself says, to the bit, and nothing else is read or written."""
    torch.manual_seed(len(name))
    matrix = MATRICES[name]()
    for start, end in ((0, len(matrix)), (1, 2), (len(matrix) // 2, len(matrix))):
        check(make(matrix, start, end, dtype), matrix.dense(start, end, dtype))


@quiet
def test_every_float_and_every_zero(make: Callable[..., torch.Tensor]) -> None:
    """All bytes that floats are made of, and all differences of codes and zeros."""
    every = torch.arange(256).to(torch.uint8)
    for kind, codes in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        matrix = evolve(floats(kind, (2, 256), (1, 256), F32), codes=every.expand(2, -1).contiguous().view(codes))
        for dtype in DTYPES:
            check(make(matrix, 0, 2, dtype), matrix.dense(0, 2, dtype))
    zeros = torch.stack((every, every.roll(1), every.roll(100)))
    matrix8 = evolve(ints(8, (3, 2048), 8, F16, "bytes", plus=1), zeros=zeros)
    check(make(matrix8, 0, 3, BF16), matrix8.dense(0, 3, BF16))


@pytest.mark.parametrize(
    ("block", "count"), [(1, 2**20), (3, 1000), (128, 2**24), (7, 2**28), (4736, 2**18), (30000, 70000), (9, 9), (9, 8)]
)
def test_fractions(block: int, count: int) -> None:
    """Numbers are multiplied by them, rather than divided by the size of a block."""
    assert dense.has_quotients(block, count)
    fraction = dense.fraction_of(block, count)
    assert fraction < 2**32
    for near in range(0, count, max(1, count // 50)):
        for number in (near, near // block * block, near // block * block - 1, count - 1):
            assert max(number, 0) * fraction >> 31 == max(number, 0) // block


def test_what_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds that are not loaded, and columns that are not in eights, or grouped in another way, are left to torch."""
    monkeypatch.setattr(dense, "Launcher", Told)
    matrix, every = ints(4, (4, 64), 32, F16), Dequantiser(PLACE, BF16)
    assert every.takes(matrix)
    assert not Dequantiser(PLACE, BF16, ["8", "e4m3"]).takes(matrix)
    assert not every.takes(evolve(matrix, bits=2))
    assert not every.takes(evolve(matrix, scales=matrix.scales.double()))
    assert not every.takes(ints(4, (4, 64), 12, F16))
    assert every.takes(ints(8, (4, 64), 100, F16))
    assert not every.takes(ints(8, (4, 60), 100, F16))
    assert not every.takes(evolve(ints(8, (4, 64), 32, F16), codes=torch.zeros(257, dtype=torch.uint8)[1:].view(4, 64)))
    assert not every.takes(floats("e4m3", (4, 64), (2, 4)))
    assert every.takes(small_floats(4, 64))
    assert not Dequantiser(PLACE, BF16, ["4"]).takes(small_floats(4, 64))
    small = evolve(small_floats(4, 64), codes=torch.zeros(4, 33, dtype=torch.uint8)[:, :32])
    assert not every.takes(small)
    assert every.takes(floats("e4m3", (4, 64), (2, 16)))
    with torch.device("meta"):
        assert not every.takes(floats("e5m2", (2**18, 2**16), (2**14, 2**16)))
        assert every.takes(floats("e5m2", (2**18, 2**16), (2**18, 2**16)))
