"""Which kernels a context has to load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from tests.exec.program_cases import ITEM_BYTES, LIMITS, operations
from tpplan.exec.cuda.exchanges import kernels_for
from tpplan.exec.cuda.host_writes import writes_host_memory
from tpplan.exec.options import TRANSPORTS
from tpplan.exec.programs.lower import Mode, lower, route
from tpplan.exec.programs.program import Exchange

if TYPE_CHECKING:
    from tpplan.exec.programs.operation import Operation


@given(operation=operations(devices=1), transport=st.sampled_from(TRANSPORTS), rows=st.integers(1, 70))
def test_one_device_has_no_other_kernel_than_the_landing(operation: Operation, transport: str, rows: int) -> None:
    """Whatever it does, in a graph or not, it exchanges nothing, so that no other kernel is compiled and loaded."""
    assert kernels_for(1, transport) == ("landing_move",)
    for captured in (False, True):
        program = lower(operation, route(operation, transport, rows, ITEM_BYTES, LIMITS, mode=Mode(captured)))
        assert writes_host_memory(program) or not any(isinstance(command, Exchange) for command in program.commands)


@pytest.mark.parametrize(
    ("transport", "ways"), [("peer", ("slot", "direct")), ("host", ("slot", "frame")), ("events", ())]
)
def test_several_devices_have_the_kernels_of_their_transport(transport: str, ways: tuple[str, ...]) -> None:
    """Each way of exchanging moves, and adds up every dtype; by events only gathers have a kernel."""
    kernels = {f"{way}_{what}" for way in ways for what in ("move", "sum_bf16", "sum_f16", "sum_f32")}
    assert set(kernels_for(2, transport)) == {*kernels, "landing_move"}
