"""Pointwise kernels compile for every generation of GPUs without one, and become the machine code that they should."""

from __future__ import annotations

import pytest

from tests import machine_code
from tests.decoder.fast.overlap import check_overlap
from tests.machine_code import CAPABILITIES, check_code
from tpplan.decoder.fast.launches.launcher import DTYPES
from tpplan.decoder.fast.launches.pointwise import GATES


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("what", ["norm", "best", *GATES.values()])
def test_they_move_vectors_and_spill_nothing(what: str, dtype: str) -> None:
    """Loads and stores are of 16 bytes and coherent, all that is computed is in 32 bits, and stays in registers."""
    name = f"pointwise_{what}_{dtype}"
    for capability in CAPABILITIES:
        text = machine_code.ptx(name, capability)
        assert f".visible .entry {name}(" in text
        check_overlap(name, text, capability)
        assert "ld.global.v4.u32" in text
        assert ("st.global.v4.u32" in text, "st.global.u" in text) == (what != "best", what == "best")
        assert "ld.global.nc" not in text
        assert ".f64" not in text
        assert ".local" not in text
        check_code(text, capability)


@pytest.mark.parametrize(
    ("name", "capabilities"),
    [
        ("turn_bf16", CAPABILITIES),
        ("turn_bf16_q8", CAPABILITIES),
        ("turn_f16_q8", CAPABILITIES[:1]),
        ("turn_f16_fp8", CAPABILITIES),
        ("turn_bf16_fp8", CAPABILITIES[-1:]),
    ],
)
def test_turns_write_caches(name: str, capabilities: tuple[tuple[int, int], ...]) -> None:
    """In 16 bits as they are; in 8 bits 8 elements at a time, and a scale beside 32 of them."""
    for capability in capabilities:
        text = machine_code.ptx(name, capability)
        assert f".visible .entry {name}(" in text
        check_overlap(name, text, capability)
        assert "ld.global.v4.u32" in text
        assert "ld.global.nc" not in text
        for store, is_there in (
            ("st.global.v4.u32", True),
            ("st.global.v2.u32", name.endswith("8")),
            ("st.global.u16", name.endswith("q8")),
            ("bar.sync", name.endswith("q8")),
        ):
            assert (store in text) == is_there
        assert ".f64" not in text
        assert ".local" not in text
        check_code(text, capability)


@pytest.mark.parametrize("name", ["TURN", "TURN_F32", "TURN_BF16_Q4"])
def test_there_are_no_others(name: str) -> None:
    """Kernels are made by their names, but only those that there are."""
    kernels = pytest.importorskip("tpplan.decoder.fast.kernels.turn")
    with pytest.raises(AttributeError, match=name):
        getattr(kernels, name)


def test_each_is_made_once() -> None:
    """Asked for again, for another generation of GPUs, it is the same kernel, whose functions are compiled already."""
    kernels = pytest.importorskip("tpplan.decoder.fast.kernels.turn")
    assert kernels.TURN_BF16_Q8 is kernels.TURN_BF16_Q8
