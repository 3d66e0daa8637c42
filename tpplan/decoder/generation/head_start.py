"""What GPUs and disks can do while Python imports torch, which takes seconds."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from ctypes import CDLL, byref, c_int, c_void_p
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tpplan.decoder.generation.arguments import Task

#: Bytes to read of a file before looking whether reading ahead is still of use.
_STEP: Final = 2**26
#: The driver, and what a torch that uses it has.
_DRIVER, _CUDA_OF_TORCH = "libcuda.so.1", "lib/libtorch_cuda.so"


@contextmanager
def head_start(task: Task) -> Iterator[None]:
    """Within a ``with`` block that imports torch, begin what needs none; nothing where a task asks for virtual devices.

    The driver makes the primary contexts of the GPUs that the plan uses, which torch finds later, and the system reads
    the checkpoint's files into its page cache until the block ends. Nothing here raises or reports an error: who needs
    what failed here tries it again.
    """
    if task.order.backend == "cpu":
        yield
        return
    done, plan, source = Event(), task.plan, task.source
    if _is_for_cuda():
        # Drivers before CUDA 12.2 load all kernels at once otherwise, and to ask them for this later is too late.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        for ordinal, memory in enumerate(plan.memory):
            if memory.used_bytes:  # not a daemon: the process must not end, and the driver with it, in the middle
                _start(partial(_retain, ordinal, len(plan.devices)), daemon=False)
    files = sorted({tensor.file for tensor in source.headers.tensors.values()})
    _start(partial(_read, [source.directory / file for file in files], done), daemon=True)
    try:
        yield
    finally:
        done.set()


def _start(work: Callable[[], None], *, daemon: bool) -> None:
    with suppress(RuntimeError):  # no further thread
        Thread(target=work, daemon=daemon).start()


def _is_for_cuda() -> bool:
    """Return whether torch, which is not imported for that, uses NVIDIA's GPUs."""
    with suppress(ImportError, ValueError):  # a broken installation
        if spec := find_spec("torch"):
            return any(Path(place, _CUDA_OF_TORCH).exists() for place in spec.submodule_search_locations or ())
    return False


def _retain(ordinal: int, wanted: int) -> None:
    """Make the primary context of a GPU, and keep it until the process ends; nothing if there are fewer than wanted."""
    count, device, context = c_int(), c_int(), c_void_p()
    with suppress(OSError, AttributeError):  # no driver
        driver = CDLL(_DRIVER)
        if driver.cuInit(0) or driver.cuDeviceGetCount(byref(count)) or count.value < wanted:
            return
        if not driver.cuDeviceGet(byref(device), ordinal):
            driver.cuDevicePrimaryCtxRetain(byref(context), device)


def _read(files: Sequence[Path], done: Event) -> None:
    """Read files into the page cache until done.

    They are sent to nowhere, which copies nothing, and which only Linux does; to advise it of what will be needed
    (``posix_fadvise``) reads only a few MiB.
    """
    with suppress(OSError, AttributeError), Path(os.devnull).open("wb") as nowhere:
        for path in files:
            with path.open("rb") as file:
                at = 0
                while not done.is_set() and (sent := os.sendfile(nowhere.fileno(), file.fileno(), at, _STEP)):
                    at += sent
