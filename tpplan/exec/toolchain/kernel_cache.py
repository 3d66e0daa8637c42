"""The cache of compiled kernels: compiled by numba without a GPU, kept on disk, and loaded on the GPUs that run them.

If a kernel is on disk, numba is not imported.

Child processes compile what is not, one kernel after the other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tpplan.core.missing import install_command
from tpplan.errors import ExecutionError, InternalError, TpplanError
from tpplan.exec.protocol.words import GRID_DEPENDENCY, MOST_WORDS, PARAMETER, PREFETCH
from tpplan.files.text import cache_folder, save_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tpplan.exec.toolchain.bindings import driver


def work_off(tasks: Iterable[str], command: Sequence[str], most: int) -> None:
    """Run tasks in child processes until each is done, or was given up because a process died of it.

    A process reads tasks from its standard input, a line each, answers each with a line, and ends with its input. A
    process that is free gets the next task. A task that a process died of is not repeated; a new process does the rest.

    Args:
        tasks: tasks without line breaks.
        command: arguments of Python, which finds the same modules as this process.
        most: maximum number of processes. If fewer can be started, these do all tasks; without any, none is done.
    """
    left, processes, lock = deque(tasks), list[subprocess.Popen[bytes]](), Lock()
    # the same modules as here, and -P: none from the working directory that are not known here
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments, pipe, quiet = [sys.executable, "-P", *command], subprocess.PIPE, subprocess.DEVNULL

    def start() -> subprocess.Popen[bytes] | None:
        with lock:
            if not left:
                return None
            try:
                process = subprocess.Popen(  # noqa: S603 - ourselves
                    arguments, bufsize=0, stdin=pipe, stdout=pipe, stderr=quiet, env=environ
                )
            except OSError:
                return None
            processes.append(process)
            return process

    def take() -> str | None:
        with lock:
            return left.popleft() if left else None

    def work() -> None:
        while process := start():
            with process:  # which closes its input and waits for its end
                while (task := take()) and _does(process, task):
                    pass

    with ThreadPoolExecutor(most) as pool:
        try:
            for each in [pool.submit(work) for _ in range(min(most, len(left)))]:
                each.result()
        finally:  # of an interrupt too, behind which none is started
            with lock:
                left.clear()
            for process in processes:
                process.kill()


def _does(process: subprocess.Popen[bytes], task: str) -> bool:
    """Give a process a task, and return whether it lived to answer."""
    assert process.stdin  # noqa: S101 - of mypy
    assert process.stdout  # noqa: S101
    try:
        process.stdin.write(f"{task}\n".encode())
    except OSError:  # it has died already
        return False
    return bool(process.stdout.readline())


#: Maximum number of matrices that one launch sums: a part of each of eight devices, and a residual.
MOST_SOURCES = 9

#: Minimum compute capability for programmatic dependent launch.
OVERLAPS = (9, 0)

#: Minimum number of kernels to compile in child processes, each of which imports numba for a second.
_ENOUGH = 2

_LOG = logging.getLogger(__name__)
#: Instructions that only one generation has: kernels with them are for its very architecture (sm_90a).
_WGMMA = "wgmma."
#: Modules of kernels, by the prefix of the kernels' names.
_MODULES = {
    "attention": "tpplan.decoder.fast.kernels.attention",
    "coded": "tpplan.decoder.fast.kernels.coded_experts",
    "delta": "tpplan.decoder.fast.kernels.delta",
    "dense": "tpplan.decoder.fast.kernels.dense",
    "experts": "tpplan.decoder.fast.kernels.experts",
    "frame": "tpplan.exec.kernels.frame",
    "gemv": "tpplan.decoder.fast.kernels.gemv",
    "grouped": "tpplan.decoder.fast.kernels.grouped",
    "grouping": "tpplan.decoder.fast.kernels.grouping",
    "landing": "tpplan.exec.kernels.host_writes",
    "packed": "tpplan.decoder.fast.kernels.packed",
    "packet": "tpplan.exec.kernels.packet",
    "pointwise": "tpplan.decoder.fast.kernels.pointwise",
    "skinny": "tpplan.decoder.fast.kernels.skinny",
    "slot": "tpplan.exec.kernels.slot",
    "direct": "tpplan.exec.kernels.direct",
    "one": "tpplan.exec.kernels.one_shot",
    "sum": "tpplan.exec.kernels.sums",
    "turn": "tpplan.decoder.fast.kernels.turn",
    "wgmma": "tpplan.decoder.fast.kernels.wide",
    "wide": "tpplan.decoder.fast.kernels.wide",
}
_OWN = [module for module in _MODULES.values() if module.startswith("tpplan.exec.")]
#: Imports of a kernel module from the executor and the decoder; the planner has nothing for kernels.
_IMPORTS = re.compile(r"^ *from (tpplan\.(?:exec|decoder)[\w.]*) import (\([^)]*\)|.+)", re.MULTILINE)
_COMPILERS = (
    "numba",
    "llvmlite",
    "numba-cuda",
    "cuda-core",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc-cu12",  # which has libNVVM
    "nvidia-nvjitlink-cu12",
)


def lacks() -> str:
    """Return which packages are missing to compile and launch kernels; empty if none are."""
    missing = [name for name in ("numba_cuda", "cuda.core") if not _is_installed(name)]
    if not missing:
        return ""
    import torch  # noqa: PLC0415 (compiling processes do not need it)

    extra = "cu12" if str(torch.version.cuda).startswith("12.") else "cu13"
    return f"{' and '.join(missing)} not installed: {install_command(extra)}"


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def digest(module: str = "") -> str:
    """Return a hash of the kernels' sources and of the compilers' versions, as 16 hexadecimal digits.

    Args:
        module: a module of kernels; all of the executor's if not given.
    """
    sha = hashlib.sha256()
    for _, text in sorted(_sources([module] if module else _OWN).items()):
        sha.update(text)
    sha.update(repr([(package, _version(package)) for package in _COMPILERS]).encode())
    return sha.hexdigest()[:16]


def _sources(modules: Iterable[str]) -> dict[str, bytes]:
    """Return the source files of these modules, of all that they import, and of this one, by module name."""
    found: dict[str, bytes] = {}
    root, asked = Path(__file__).parents[3], [*modules, "tpplan.exec.toolchain.kernel_cache"]
    while asked:
        name = asked.pop()
        if name not in found and (source := _source(root, name)):
            found[name], imported = source
            asked += imported
    return found


@cache
def _source(root: Path, name: str) -> tuple[bytes, tuple[str, ...]] | None:
    """Return a module's source file, and the names of all that it imports; None of a package or what is no module.

    Cached, for modules of kernels share most of what they import.
    """
    path = root / f"{name.replace('.', '/')}.py"
    if not path.is_file():
        return None
    text = path.read_bytes()
    found = ((package, re.findall(r"\w+", names)) for package, names in _IMPORTS.findall(text.decode()))
    return text, tuple(each for package, names in found for each in (package, *(f"{package}.{name}" for name in names)))


@cache
def load(name: str, capability: tuple[int, int]) -> driver.CUkernel:
    """Return a kernel that runs on every GPU of a compute capability; once loaded, it is there until the process ends.

    The driver is called directly: to import cuda.core takes a third of a second, which only compiling has to wait for.

    Args:
        name: name of the kernel; its first word determines the module.
        capability: compute capability such as ``(9, 0)``.

    Raises:
        ExecutionError: the driver refuses the kernel.
    """
    from tpplan.exec.toolchain.bindings import driver  # noqa: PLC0415 (compiling needs none)

    result, library = driver.cuLibraryLoadData(machine_code(name, capability), [], [], 0, [], [], 0)
    if result == driver.CUresult.CUDA_SUCCESS:
        result, kernel = driver.cuLibraryGetKernel(library, name.encode())
    if result != driver.CUresult.CUDA_SUCCESS:
        message = f"the kernel {name} for {_arch(capability)} was not loaded: {result.name}"
        hint = "delete tpplan/kernels in $XDG_CACHE_HOME, by default ~/.cache, or update the driver"
        raise ExecutionError(message, hint)
    return kernel


def prepare(kernels: Iterable[tuple[str, tuple[int, int]]]) -> None:
    """Compile the kernels that are not on disk yet, in as many processes as there are CPUs.

    Kernels that cannot be compiled or stored are left to :func:`load`.

    Args:
        kernels: names and compute capabilities.
    """
    try:
        missing = [(name, capability) for name, capability in kernels if not _path(name, capability).exists()]
    except (OSError, RuntimeError):
        return
    if len(missing) < _ENOUGH:
        return
    _LOG.info("compiling %d kernels, which are kept for the next start", len(missing))
    tasks = [" ".join((name, *map(str, capability))) for name, capability in missing]
    work_off(tasks, ["-m", __name__], os.cpu_count() or 1)  # numba takes up to half a GiB in each


def machine_code(name: str, capability: tuple[int, int]) -> bytes:
    """Return a kernel's cubin, from disk if it was compiled before; needs no GPU."""
    try:
        path = _path(name, capability)
        return path.read_bytes()
    except FileNotFoundError:
        code, _ = assemble(ptx(name, capability), capability)
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory is unknown
        _LOG.debug("no cached kernel %s: %s", name, error)
        return assemble(ptx(name, capability), capability)[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_bytes(code, path)
    except (OSError, TpplanError) as error:
        _LOG.debug("the kernel %s is not cached: %s", name, error)
    return code


def assemble(text: str, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Assemble PTX; return the cubin, and the assembler's log of registers and spills."""
    from cuda.core import Linker, LinkerOptions, ObjectCode  # noqa: PLC0415 (not needed for kernels on disk)

    options = LinkerOptions(arch=_target(text, capability), ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(text.encode()), options=options)
    code = linker.link("cubin").code
    return bytes(code), str(linker.get_info_log())


def ptx(name: str, capability: tuple[int, int]) -> str:
    """Return a kernel's PTX; its entry has the kernel's name."""
    from tpplan.exec.toolchain.language import cuda  # noqa: PLC0415 (takes a second; not needed for kernels on disk)

    kernel = getattr(import_module(_module(name)), name.upper())
    with _without_gpu(capability):
        text, _ = cuda.compile_ptx(kernel.function, kernel.signature, cc=capability, launch_bounds=kernel.bounds)
    mangled = text.partition(".visible .entry ")[2].partition("(")[0]
    text = str(text.replace(mangled, name))
    if capability < OVERLAPS:
        text = re.sub(rf"({GRID_DEPENDENCY}\.\w+|{re.escape(PREFETCH)}[^;]*);", "", text)
    text = text.replace(f".target {_arch(capability)}", f".target {_target(text, capability)}")
    if kernel.arguments > 1:
        return text
    declared = f".param .u64 {name}_param_0"  # one word, instead of an array for which numba has no type
    if text.count(f"{name}_param_0") != 1 or declared not in text:
        raise InternalError(f"{name}: numba has written {declared} in another way")
    return text.replace(declared, f".param .align 8 .b8 {PARAMETER}[{8 * MOST_WORDS}]")


@contextmanager
def _without_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Let numba compile the functions that a kernel calls without a GPU.

    It asks the current GPU for its compute capability, though what it makes of a function is the same for all of them:
    without a GPU that fails, and elsewhere each compiling process would take memory on it.
    """
    from numba.cuda import dispatcher  # noqa: PLC0415 (a second to import)
    from numba.cuda.core.compiler_lock import global_compiler_lock  # noqa: PLC0415

    with global_compiler_lock:  # nobody else compiles meanwhile
        original = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
        try:
            yield
        finally:
            dispatcher.get_current_device = original


def _path(name: str, capability: tuple[int, int]) -> Path:
    return cache_folder() / "kernels" / f"{name}-{_arch(capability)}-{_digest(_module(name))}.cubin"


@cache
def _digest(module: str) -> str:
    """Return :func:`digest`, cached: it takes milliseconds, and the sources do not change while a process runs."""
    return digest(module)


def _module(name: str) -> str:
    return _MODULES[name.partition("_")[0]]


def _arch(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _target(text: str, capability: tuple[int, int]) -> str:
    """Return what a kernel's PTX is assembled for: a compute capability, or its very architecture."""
    return f"{_arch(capability)}{'a' * (_WGMMA in text)}"


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:  # PackageNotFoundError: installed otherwise, such as by a CUDA toolkit
        return ""


def main() -> None:
    """Run as a child process of :func:`prepare`."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # keep the output of libraries out of the answers
        for line in sys.stdin:
            name, major, minor = line.split()
            machine_code(name, (int(major), int(minor)))
            print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
