"""What processes share: kept as long as one of them may use it, and given back as soon as none does."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import pytest
import torch

from tests.exec.processes.threads import Opened, ThreadMeeting
from tpplan.errors import ExecutionError
from tpplan.exec.processes import shared
from tpplan.exec.processes.shared import Sharing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GPU = torch.device("cuda:0")


class Handle(NamedTuple):
    """What another process opens: the numbers themselves."""

    numbers: bytes

    @classmethod
    def of(cls, area: torch.Tensor) -> Self:
        """Return the handle of an area."""
        return cls(bytes(area.tolist()))


class SharedHostPage:
    """A page that processes leave, of whom some may not."""

    missing: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def leave(self, _: float) -> bool:
        """Return whether nobody is missing."""
        return not self.missing

    def close(self) -> None:
        """Count it."""
        type(self).closed += 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Opened]:
    """Pretend inter-process communication, and return what is opened."""
    found: list[Opened] = []

    def on(_: torch.device, handle: Handle) -> Opened:
        found.append(Opened(torch.tensor([*handle.numbers])))
        return found[-1]

    def create() -> Path:
        (tmp_path / "page").touch()
        return tmp_path / "page"

    ipc = SimpleNamespace(Handle=Handle, Opened=SimpleNamespace(on=on))
    page = SimpleNamespace(create=create, open=lambda *_: SharedHostPage())
    monkeypatch.setitem(sys.modules, "tpplan.exec.processes.ipc", ipc)
    monkeypatch.setattr(shared, "SharedHostPage", page)
    monkeypatch.setattr(SharedHostPage, "missing", 0)
    monkeypatch.setattr(SharedHostPage, "closed", 0)
    monkeypatch.setattr(shared, "_HELD", set())
    return found


def both(call: Callable[[Sharing, int], object], gpu: torch.device | None = GPU) -> list[Any]:
    """Call something in two processes at once."""
    barrier, told = Barrier(2, timeout=20), dict[int, bytes]()
    meetings: list[Any] = [ThreadMeeting(process, 2, barrier, told) for process in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(lambda m: call(Sharing(m, gpu), m.process), meetings)]


def areas(process: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return areas of a process's device."""
    return {process: (torch.full((2,), process), torch.full((3,), process))}


def test_each_gets_the_areas_of_the_other(opened: list[Opened], tmp_path: Path) -> None:
    """When both have left, all is closed, nothing is held, and the page has no name since all had opened it."""

    def call(one: Sharing, process: int) -> bool:
        ((device, (control, exchange)),) = one.share(areas(process)).items()
        assert (device, int(control[0]), len(exchange)) == (1 - process, 1 - process, 3)
        assert one in shared._HELD
        one.fail("too late to say")
        one.forget_name()
        one.leave(1)
        one.leave(1)
        return one in shared._HELD

    assert both(call) == [False, False]
    assert not any(each.is_open for each in opened)
    assert len(opened) == 4
    assert SharedHostPage.closed == 2
    assert not (tmp_path / "page").exists()


def test_what_somebody_may_still_use_is_held(opened: list[Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits in vain closes what is the other's, and keeps what is its own."""
    monkeypatch.setattr(SharedHostPage, "missing", 1)

    def call(one: Sharing, process: int) -> None:
        one.share(areas(process))
        one.leave(0)

    both(call)
    assert len(shared._HELD) == 2
    assert not any(each.is_open for each in opened)
    assert SharedHostPage.closed == 0


def test_a_failure_before_is_told(opened: list[Opened]) -> None:
    """The others do not open anything, and raise an error without words of their own."""

    def call(one: Sharing, process: int) -> str:
        if process:
            one.fail("no memory")
            return "no memory"
        with pytest.raises(ExecutionError) as error:
            one.share(areas(process))
        return error.value.message

    assert both(call) == ["", "no memory"]
    assert not opened
    assert not shared._HELD


def test_a_failure_behind_ends_it_for_all(opened: list[Opened]) -> None:
    """Nobody's memory is given back before all have closed it."""

    def call(one: Sharing, process: int) -> bool:
        one.share(areas(process))
        one.end()
        one.leave(1)  # as a context does that is closed
        return one in shared._HELD

    assert both(call) == [False, False]
    assert not any(each.is_open for each in opened)


def test_a_failure_amid_opening_leaves_nothing_open(opened: list[Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process that fails had opened until then is closed, too."""
    ipc = sys.modules["tpplan.exec.processes.ipc"]
    on: Callable[..., Opened] = ipc.Opened.on

    def failing(gpu: torch.device, handle: Handle) -> Opened:
        if handle == Handle.of(areas(0)[0][1]):
            raise ExecutionError("cannot be opened")
        return on(gpu, handle)

    monkeypatch.setattr(ipc.Opened, "on", failing)

    def call(one: Sharing, process: int) -> bool:
        with pytest.raises(ExecutionError, match="cannot be opened") if process else nullcontext():
            one.share(areas(process))
        one.end()
        return one in shared._HELD

    assert both(call) == [False, False]
    assert len(opened) == 3
    assert not any(each.is_open for each in opened)


def test_a_page_that_gpus_cannot_use_is_not_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was pinned before its address turned out to be another one on a GPU."""
    pinned: set[int] = set()
    runtime = SimpleNamespace(
        cudaError_t=SimpleNamespace(cudaSuccess=SimpleNamespace(name="cudaSuccess")),
        cudaHostRegisterPortable=1,
        cudaHostUnregister=pinned.remove,
    )
    success = runtime.cudaError_t.cudaSuccess

    def register(address: int, *_: int) -> tuple[object]:
        pinned.add(address)
        return (success,)

    runtime.cudaHostRegister = register
    runtime.cudaHostGetDevicePointer = lambda address, _: (success, address + 8)
    monkeypatch.setitem(sys.modules, "tpplan.exec.toolchain.bindings", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    path = shared.SharedHostPage.create()
    try:
        with pytest.raises(ExecutionError, match="GPUs cannot use memory that processes share: its address is an"):
            shared.SharedHostPage.open(path, GPU, 0, 1)
    finally:
        path.unlink()
    assert not pinned


def test_nothing_is_shared_without_kernels(opened: list[Opened]) -> None:
    """Processes still tell each other that they have come so far."""
    assert both(lambda one, process: one.share(areas(process)), None) == [{}, {}]
    assert not opened
    assert not shared._HELD
