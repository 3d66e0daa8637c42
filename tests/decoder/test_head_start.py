"""What ``tpplan generate`` begins before it imports torch: contexts, of a driver that is made up, and reading."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import define, field, frozen

from tests.command import command
from tests.decoder_cases import model_of
from tpplan.decoder.generation import head_start as module
from tpplan.planfile.codec import load

if TYPE_CHECKING:
    import ctypes

    from tests.command import Done

#: Devices of the plan, of which it uses the second only.
DEVICES: Final = 2
#: What the driver answers where all is well.
SUCCESS: Final = 0


@define
class FakeDriver:
    """A driver whose calls answer with an error if they are asked to.

    Attributes:
        count: number of its GPUs.
        failing: name of the call that fails.
        is_ready: whether it was initialised.
        loading: when the environment lets it load kernels.
        retained: ordinals of the GPUs that have a primary context.
    """

    count: int = DEVICES
    failing: str = ""
    is_ready: bool = False
    loading: str = ""
    retained: list[int] = field(factory=list)

    def cuInit(self, flags: int) -> int:  # noqa: N802 (names of the driver)
        """Initialise the driver."""
        assert flags == 0
        self.loading = os.environ["CUDA_MODULE_LOADING"]
        self.is_ready = self.failing != "cuInit"
        return SUCCESS if self.is_ready else 100

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        """Write the number of GPUs."""
        return self._answer("cuDeviceGetCount", count, self.count)

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        """Write the handle of a GPU, which is no ordinal."""
        assert ordinal < self.count
        return self._answer("cuDeviceGet", device, ordinal + 50)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        """Write a context."""
        code = self._answer("cuDevicePrimaryCtxRetain", context, 2**40)
        if code == SUCCESS:
            self.retained.append(device.value - 50)
        return code

    def _answer(self, name: str, pointer: Any, value: int) -> int:
        assert self.is_ready
        if name == self.failing:
            return 2
        pointer._obj.value = value  # of byref
        return SUCCESS


@frozen
class Machine:
    """A checkpoint, its plan, and what the system is asked for.

    Attributes:
        directory: directory of the checkpoint, with a plan.json.
        patch: replaces the driver.
        sent: bytes that were sent, by path.
    """

    directory: Path
    patch: pytest.MonkeyPatch
    sent: dict[str, int]

    def generate(self, *options: str) -> Done:
        """Generate a token, and wait until all that was begun beside has ended."""
        before = {*threading.enumerate()}
        plan = self.directory / "plan.json"
        done = command("generate", plan, "--model", self.directory, "--token-ids", "5,7", *options)
        for thread in {*threading.enumerate()} - before:
            thread.join(20)
        return done

    def use(self, driver: FakeDriver) -> FakeDriver:
        """Make this the driver of the machine."""
        self.patch.setattr(module, "CDLL", {"libcuda.so.1": driver}.__getitem__)
        return driver


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine on which torch looks as if it were for CUDA, but finds no GPU."""
    directory = shutil.copytree(model_of("mistral").directory, tmp_path / "tiny")
    (directory / "notes.safetensors.bak").write_bytes(b"no weights")
    planned = command("plan", directory, "--gpus", "1GiB,2GiB", "--context", 64, "-o", directory / "plan.json")
    assert planned.code == 0
    assert [bool(memory.used_bytes) for memory in load(directory / "plan.json").memory] == [False, True]
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(module, "find_spec", {"torch": spec}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in os.environ if name != "CUDA_MODULE_LOADING"})
    sent: dict[str, int] = {}

    def send(target: int, source: int, offset: int, count: int) -> int:
        assert os.path.samestat(os.fstat(target), Path(os.devnull).stat())
        name = str(Path(f"/proc/self/fd/{source}").readlink())
        assert offset == sent.get(name, 0)
        got = len(os.pread(source, min(count, 10**5), offset))  # less than asked for, which is allowed
        sent[name] = offset + got
        return got

    monkeypatch.setattr(os, "sendfile", send, raising=False)
    return Machine(directory, monkeypatch, sent)


def test_contexts_are_made_on_the_gpus_of_the_plan(machine: Machine) -> None:
    """Only on those that it uses."""
    driver = machine.use(FakeDriver())
    done = machine.generate()
    assert done.code == 0
    assert driver.retained == [1]


@pytest.mark.parametrize("given", ["EAGER", None])
def test_the_driver_loads_kernels_when_they_are_needed(given: str | None, machine: Machine) -> None:
    """Older drivers load all at once by default; what the environment says stays."""
    if given:
        machine.patch.setitem(os.environ, "CUDA_MODULE_LOADING", given)
    driver = machine.use(FakeDriver())
    assert machine.generate().code == 0
    assert driver.loading == (given or "LAZY")


@pytest.mark.parametrize(
    "driver",
    [
        *(
            FakeDriver(failing=f"cu{name}")
            for name in ("Init", "DeviceGetCount", "DeviceGet", "DevicePrimaryCtxRetain")
        ),
        FakeDriver(count=DEVICES - 1),
        OSError("libcuda.so.1: cannot open shared object file"),
        AttributeError("undefined symbol: cuInit"),
    ],
    ids=str,
)
def test_what_fails_is_not_told(driver: FakeDriver | Exception, machine: Machine) -> None:
    """Nor does it change what is computed: virtual devices take over where there are too few GPUs, as ever."""

    def opened(name: str) -> FakeDriver:
        assert name == "libcuda.so.1"
        if isinstance(driver, Exception):
            raise driver
        return driver

    machine.patch.setattr(module, "CDLL", opened)
    machine.patch.setattr(os, "sendfile", lambda *_: Path("/nothing").stat())
    done = machine.generate()
    assert isinstance(driver, Exception) or not driver.retained
    assert done.code == 0
    assert done.out == machine.generate("--backend", "cpu").out
    assert [line.partition(":")[0] for line in done.err.splitlines()] == ["note", "start", "time"]


def test_nothing_is_begun_for_virtual_devices(machine: Machine) -> None:
    """Neither on GPUs nor on files."""
    machine.patch.setattr(module, "Thread", None)
    assert machine.generate("--backend", "cpu").code == 0
    assert not machine.sent


def test_no_contexts_are_made_where_torch_cannot_use_them(machine: Machine) -> None:
    """As torch's build without CUDA cannot."""
    driver = machine.use(FakeDriver())
    for library in machine.directory.parent.rglob("libtorch_cuda.so"):
        library.unlink()
    assert machine.generate().code == 0
    assert not driver.is_ready


def test_files_with_weights_are_read(machine: Machine) -> None:
    """From their start to their end, and no others."""
    ended = Event()
    machine.patch.setattr(module, "Event", lambda: SimpleNamespace(is_set=lambda: False, set=ended.set))
    assert machine.generate().code == 0
    assert ended.is_set()
    [weights] = machine.directory.glob("*.safetensors")
    assert machine.sent == {str(weights): weights.stat().st_size}


def test_reading_ends_with_the_imports(machine: Machine) -> None:
    """For then the loader reads itself."""
    machine.patch.setattr(os, "sendfile", lambda *_: 1)  # a file without an end
    before = {*threading.enumerate()}
    assert machine.generate().code == 0
    assert {*threading.enumerate()} <= before
