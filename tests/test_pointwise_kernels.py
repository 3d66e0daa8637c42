"""Pointwise kernels compile for every generation of GPUs without one, and become the machine code that they should."""

from __future__ import annotations

import pytest

from tests.test_kernels import CAPABILITIES
from tpplan.decoder.launcher import DTYPES
from tpplan.decoder.pointwise import GATES
from tpplan.exec import kernel_cache


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("what", ["norm", "turn", "best", *GATES.values()])
def test_they_move_vectors_and_spill_nothing(what: str, dtype: str) -> None:
    """Loads and stores are of 16 bytes and coherent, all that is computed is in 32 bits, and stays in registers."""
    name = f"pointwise_{what}_{dtype}"
    for capability in CAPABILITIES:
        text = kernel_cache.ptx(name, capability)
        assert f".visible .entry {name}(" in text
        assert "ld.global.v4.u32" in text
        assert ("st.global.v4.u32" in text, "st.global.u" in text) == (what != "best", what == "best")
        assert "ld.global.nc" not in text
        assert ".f64" not in text
        assert ".local" not in text
        code, log = kernel_cache.assemble(text, capability)
        assert code[:4] == b"\x7fELF"
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
