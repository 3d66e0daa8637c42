"""On which NUMA nodes pinned memory is allocated: what the system is asked for, and that nothing is left of it."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.contexts import UNEVEN
from tpplan.exec import build
from tpplan.exec import compile as compile_plan
from tpplan.exec.machine import numa
from tpplan.weights import staging

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

GPUS = [torch.device("cuda", i) for i in range(3)]
#: The nodes of GPUs, the policy of a thread, and what it becomes meanwhile: a mode, and nodes.
CASES: dict[str, tuple[list[Any], int, tuple[int, set[int]] | None]] = {
    "one node": ([1, 1, 1], 0, (1, {1})),
    "two nodes": ([0, 1, 0], 0, (3, {0, 1})),
    "a high node": ([1023, 64, 64], 0, (3, {64, 1023})),
    "one is unknown": ([0, -1, 0], 0, None),
    "numactl": ([1, 1, 1], 2, None),
    "no call is allowed": ([1, 1, 1], -1, None),
    "no number": (["", 1, 1], 0, None),
}


class System:
    """A system with two nodes that keeps a thread's policy; -1 if it does not let it have one."""

    def __init__(self, folder: Path, nodes: list[Any], mode: int) -> None:
        self.mode, self.nodes, self.calls = mode, set[int](), 0
        for i, node in enumerate(nodes):
            (folder / f"bus/pci/devices/0000:{i:02x}:00.0").mkdir(parents=True)
            (folder / f"bus/pci/devices/0000:{i:02x}:00.0/numa_node").write_text(f"{node}\n")
        for i in range(2):
            (folder / f"devices/system/node/node{i}").mkdir(parents=True)

    def syscall(self, number: Any, *given: Any) -> int:
        """Set the policy, or tell it."""
        self.calls += 1
        if self.mode < 0:
            return -1
        if number.value == 239:
            mode, *others = given
            assert [None if each is None else each.value for each in others] == [None, 0, None, 0]
            mode._obj.value = self.mode
            return 0
        assert number.value == 238
        mode, mask, size = given
        bits = int.from_bytes(mask.raw, "little") if mask else 0
        assert size.value == (len(mask.raw) * 8 + 1 if mask else 0)
        self.mode, self.nodes = mode.value, {i for i in range(1024) if bits >> i & 1}
        return 0


def system_of(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    """Pretend the system of a case."""
    nodes, mode, _ = CASES[case]
    system = System(folder, nodes, mode)
    monkeypatch.setattr(numa, "_SYSTEM", folder)
    monkeypatch.setattr(numa, "_address_of", lambda i: f"0000:{i:02x}:00.0")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: system)
    return system


@pytest.mark.parametrize("case", CASES)
def test_memory_is_preferred_near_its_gpus(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On their node, on all of theirs in turn, or where the system or its user wants it; afterwards, as before."""
    _, mode, wanted = CASES[case]
    system = system_of(case, tmp_path, monkeypatch)

    def interrupted() -> None:
        with numa.near([*GPUS, torch.device("cpu")]):
            assert (system.mode, system.nodes) == (wanted or (mode, set()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (system.mode, system.nodes) == (mode, set())


def test_nothing_is_asked_where_nothing_can_be_gained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs, on a machine of one node, and on processors whose calls are unknown."""
    system = system_of("one node", tmp_path, monkeypatch)
    with numa.near([torch.device("cpu")]):
        assert not system.calls
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "s390x")
        with numa.near(GPUS):
            assert not system.calls
    (tmp_path / "devices/system/node/node1").rmdir()
    with numa.near(GPUS):
        assert not system.calls


@pytest.mark.skipif(sys.platform != "linux", reason="is about Linux")
def test_the_system_knows_these_calls() -> None:
    """What is set is what is there until it is set back."""
    if not numa._has_default():
        pytest.skip("this thread has a policy, or may not ask")
    numa._set(numa._PREFERRED, 1)
    changed = not numa._has_default()
    numa._set(numa._DEFAULT, 0)
    assert numa._has_default()
    if not changed:
        pytest.skip("this thread may not have a policy")


def test_host_memory_of_contexts_and_of_loading_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is allocated while the policy is that of the devices that use it."""
    preferred: list[torch.device] = []

    @contextmanager
    def near(places: list[torch.device]) -> Iterator[None]:
        preferred.extend(places)
        yield
        preferred.clear()

    def empty(*size: Any, **options: Any) -> Tensor:
        seen.append([*preferred])
        return make(*size, **options)

    seen: list[list[torch.device]] = []
    make, devices = torch.empty, [torch.device("cpu")] * 3
    monkeypatch.setattr(build, "near", near)
    monkeypatch.setattr(staging, "near", near)
    monkeypatch.setattr(torch, "empty", empty)
    compile_plan(UNEVEN, backend="cpu").close()
    assert devices in seen
    seen.clear()
    staging.Buffer({i: make(8, dtype=torch.uint8) for i in range(3)})
    assert seen == [devices]
