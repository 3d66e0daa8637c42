"""The issue of programs on CUDA devices: something fails between two of them, or a thread waits for its turn."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda.core: pip install 'tpplan[cu13]'")

from tpplan.errors import ExecutionError
from tpplan.exec.cuda import CudaDevices, _Ready
from tpplan.exec.fence import own
from tpplan.exec.issuing import ISSUING, Issuing
from tpplan.exec.program import INPUT, Buffer, Exchange, Program


def test_a_launch_that_fails_after_another_is_the_last() -> None:
    """Device 0 has its part of the program and device 1 has not: they count differently from then on."""
    exchanges = (Exchange(own(0), ()), Exchange(own(1), ()))
    program = Program("p", exchanges)
    launches: Any = (Mock(), Mock())
    launches[1].issue.side_effect = ExecutionError("a kernel of device 1 was not launched")
    devices: Any = object.__new__(CudaDevices)
    devices._exchanges = Mock()
    devices._issuing = Issuing(devices._exchanges)
    devices._current = {0: 1, 1: 1}
    devices._handle = lambda _: 1
    devices._ready = {(id(program), torch.float32): _Ready(program, exchanges, (0, 1), launches, on_host=False)}
    with pytest.raises(ExecutionError, match="not launched"):
        devices.run(program, {Buffer(INPUT, 0): torch.zeros(1, 4)})
    launches[0].issue.assert_called_once()
    devices._exchanges.interrupt.assert_called_once()


def test_who_waited_for_his_turn_is_refused_after_a_close() -> None:
    """A replay in another thread does not go to memory that was given back meanwhile, and keeps nobody out."""
    issuing, refused = Issuing(Mock()), []

    def enter() -> None:
        try:
            with issuing:
                pass
        except ExecutionError as error:
            refused.append(error.message)

    with ISSUING:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        issuing.closed = True
    thread.join()
    assert refused == ["the context is closed"]
    assert ISSUING.acquire(blocking=False)
    ISSUING.release()
