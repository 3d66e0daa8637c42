"""Launches that begin before the kernel before them ends: where there are any, and what the driver is told."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

pytest.importorskip("cuda.bindings", reason="needs cuda.core: pip install '.[cu13]'")

from cuda.bindings import driver

from tpplan.errors import ExecutionError
from tpplan.exec.cuda import backend, programmatic_launch
from tpplan.exec.cuda.launch import Ready

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS = driver.CUresult


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """Let no test know another's driver."""
    programmatic_launch.is_possible.cache_clear()
    yield
    programmatic_launch.is_possible.cache_clear()


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [((9, 0), 12030, True), ((12, 0), 13000, True), ((8, 9), 13000, False), ((9, 0), 12020, False), ((9, 0), 0, False)],
)
def test_old_gpus_and_drivers_have_none(
    capability: tuple[int, int],
    version: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU has to be of the generation of Hopper, and a driver of CUDA 12.3; without one there are none."""
    answer = (RESULTS.CUDA_SUCCESS, version) if version else (RESULTS.CUDA_ERROR_NOT_INITIALIZED, 99999)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: answer)
    assert programmatic_launch.is_possible(capability) == expected


def _ready(*, may_be_programmatic: bool = True) -> Ready:
    """Return a kernel of 3 blocks with 64 threads."""
    return Ready(
        "a kernel", driver.CUfunction(7), (3, 64), (ctypes.c_uint64 * 1)(5), 1, programmatic=may_be_programmatic
    )


def test_the_driver_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs alone, and only of kernels that wait for what is before them."""
    told: list[Any] = []

    def start(config: Any, function: Any, parameters: int, _: int) -> tuple[Any]:
        (attribute,) = config.attrs
        told.append((int(function), int(config.hStream), parameters, attribute.id))
        assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (3, 1, 1, 64)
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        return (RESULTS.CUDA_SUCCESS,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", start)
    ready = _ready()
    backend._in_a_graph(ready)(9)
    serialized = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert told == [(7, 9, ready.parameters, serialized)]
    for other in (_ready(may_be_programmatic=False), Mock()):
        assert backend._in_a_graph(other) is other


def test_what_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the kernel, and what the driver says."""
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *_: (RESULTS.CUDA_ERROR_INVALID_VALUE,))
    with pytest.raises(ExecutionError, match="a kernel was not launched: CUDA_ERROR_INVALID_VALUE"):
        programmatic_launch.programmatic(_ready())(9)


@pytest.mark.parametrize("name", ["NONE", "ACTIVE", "INVALIDATED"])
def test_only_a_stream_that_is_captured_makes_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is not, nor one whose capture has failed; and only as long as this is allowed."""
    status = getattr(driver.CUstreamCaptureStatus, f"CU_STREAM_CAPTURE_STATUS_{name}")
    monkeypatch.setattr(driver, "cuStreamIsCapturing", lambda _: (RESULTS.CUDA_SUCCESS, status))
    assert not programmatic_launch.is_captured(9)
    with programmatic_launch.allowed(programmatic=True):
        assert programmatic_launch.is_captured(9) == (name == "ACTIVE")
        with programmatic_launch.allowed(programmatic=False):
            assert not programmatic_launch.is_captured(9)
        assert programmatic_launch.is_captured(9) == (name == "ACTIVE")
    assert not programmatic_launch.is_captured(9)
