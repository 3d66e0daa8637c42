"""Kernels compile for every generation of GPUs without one, and become the machine code that they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from tests import machine_code
from tests.machine_code import CAPABILITIES, check_code, in_order, registers
from tpplan.core.missing import install_command
from tpplan.errors import ExecutionError
from tpplan.exec.cuda.blocks import DIRECT_BLOCKS, FRAME_BLOCKS, SLOT_BLOCKS
from tpplan.exec.protocol import direct, frames, slots
from tpplan.exec.protocol.frames import VECTORS
from tpplan.exec.toolchain import bindings, kernel_cache

if TYPE_CHECKING:
    from pathlib import Path

SUMS = ("sum_bf16", "sum_f16", "sum_f32")
#: Of a multiprocessor, whose blocks wait for those of other devices.
REGISTERS = 2**16


def _compiled(name: str) -> dict[tuple[int, int], str]:
    """Return a kernel's PTX by capability."""
    return {capability: machine_code.ptx(name, capability) for capability in CAPABILITIES}


def _check_early(text: str, capability: tuple[int, int]) -> None:
    """Make sure that a kernel touches nothing before what is before it has ended, and may let the next begin or not."""
    wait, let = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
    if capability < kernel_cache.OVERLAPS:
        assert "griddepcontrol" not in text
        return
    (waited,) = (at.start() for at in re.finditer(wait, text))
    touched = re.search(r"\b(ld|st|atom|red)\.[\w.]*global", text)
    assert touched
    assert waited < touched.start()
    branches = [*re.finditer(rf"@%p\d+ bra\s+(\S+);[^:]*?{let}", text)]  # no label is between
    assert len(branches) == text.count(let) == 1
    assert all(waited < each.start() and text.index(f"\n{each[1]}:") > each.end() for each in branches)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_sums_read_vectors_and_spill_nothing(name: str, capability: tuple[int, int]) -> None:
    """Loads and stores are of 16 bytes and coherent, adding is in float32, and everything stays in registers."""
    text = machine_code.ptx(name, capability)
    assert f".visible .entry {name}(" in text
    assert "ld.global.v4.u32" in text
    assert "st.global.v4.u32" in text
    assert "add.f32" in text
    assert "ld.global.nc" not in text  # which may miss what a peer has written
    check_code(text, capability)


@pytest.mark.parametrize("what", ["move", "sum_bf16", "sum_f16", "sum_f32"])
@pytest.mark.parametrize("way", ["slot", "packet"])
def test_exchanges_poll_what_others_write(way: str, what: str) -> None:
    """Packets are stored and polled whole, by accesses that the compiler keeps in their loops; nothing spills."""
    name = f"{way}_{what}"
    for capability, text in _compiled(name).items():
        assert "st.volatile.global.v4.u32" in text
        first = text.index("ld.volatile.global.v4.u32")
        assert "ld.volatile.global.v4.u32" in text[first + 1 :]  # once before the loop, and again in it
        assert "ld.volatile.global.u32" in text
        assert f".visible .entry {name}(\n\t.param .align 8 .b8 tpplan_words[" in text  # its one parameter
        assert "ld.global.nc" not in text
        _check_early(text, capability)
        assert registers(check_code(text, capability)) * slots.THREADS * SLOT_BLOCKS <= REGISTERS


@pytest.mark.parametrize("name", ["frame_move", "frame_sum_bf16", "frame_sum_f16", "frame_sum_f32"])
def test_frames_are_told_behind_a_fence(name: str) -> None:
    """Vectors are asked for before the first is needed; a flag follows them; nothing spills. Totals go as parts do."""
    times = 1 if name == "frame_move" else 2
    for capability, text in _compiled(name).items():
        steps = in_order(text)
        posts, polls, fences, waits = (
            [at.start() for at in re.finditer(re.escape(what), steps)]
            for what in (
                "st.volatile.global.v4.u32",
                "ld.volatile.global.v4.u32",
                "fence.acq_rel.sys;",
                "ld.acquire.sys.global.u32",
            )
        )
        assert [len(posts), len(polls), len(fences), len(waits)] == [VECTORS * times, VECTORS * times, times, 2 * times]
        for i in range(times):
            last, first = posts[VECTORS * (i + 1) - 1], polls[VECTORS * i]
            told = steps.index("st.volatile.global.u32", fences[i])
            assert last < steps.index("bar.sync", last) < fences[i] < told
            assert "st.global.v4.u32" not in steps[first : polls[VECTORS * (i + 1) - 1]]
            assert waits[2 * i + 1] < steps.index("bar.sync", waits[2 * i + 1]) < first  # once before a loop, and in it
        assert "ld.global.nc" not in text
        _check_early(text, capability)
        assert registers(check_code(text, capability)) * frames.THREADS * FRAME_BLOCKS <= REGISTERS


@pytest.mark.parametrize("name", ["direct_move", "direct_sum_bf16", "direct_sum_f16", "direct_sum_f32"])
def test_direct_kernels_wait_for_flags_and_move_vectors(name: str) -> None:
    """Flags are polled with acquire and raised with release behind a fence; 16 bytes move at a time; nothing spills."""
    for capability, text in _compiled(name).items():
        label = text.rindex("\n$L", 0, text.rindex("ld.acquire.sys.global.u32"))
        assert f"bra \t{text[label + 1 : text.index(':', label)]};" in text  # the poll is in a loop
        fence = text.index("fence.acq_rel.sys;")
        assert "st.volatile.global.u32" in text[fence:]  # the flag
        assert "ld.volatile.global.v4.u32" in text  # what others may have written, past all caches
        assert "st.global.v4.u32" in text
        assert "ld.global.nc" not in text
        assert registers(check_code(text, capability)) * direct.THREADS * DIRECT_BLOCKS <= REGISTERS


@pytest.mark.parametrize("what", ["sum_bf16", "sum_f16", "sum_f32"])
def test_sums_in_one_shot_stay_in_registers(what: str) -> None:
    """All that is read is asked of memory; that it was read is stored, and waited for, before any flag says so."""
    for capability, text in _compiled(f"one_shot_{what}").items():
        seen = text.index("st.volatile.shared.u32")
        assert text.rindex("ld.volatile.global.v4.u32") < seen < text.index("bar.sync", seen)
        assert text.index("bar.sync", seen) < text.index("st.volatile.global.u32", seen)
        assert text.count("st.global.v4.u32") == direct.HELD
        assert "ld.global.v4.u32" not in text
        touched = re.search(r"\b(ld|st)\.[\w.]*global", text)
        assert touched
        if capability >= kernel_cache.OVERLAPS:
            assert text.index("griddepcontrol.wait;") < touched.start()
            assert text.count("griddepcontrol.launch_dependents;") == 1
        assert registers(check_code(text, capability)) * direct.THREADS * DIRECT_BLOCKS <= REGISTERS


def test_a_flag_follows_what_has_landed() -> None:
    """It is raised behind a fence, by the last block, which the others tell behind theirs; 16 bytes move at a time."""
    for capability, text in _compiled("landing_move").items():
        whole, told = text.rindex("st.global.v4.u32"), text.index("atom.global.inc.u32")
        first, second = (at.start() for at in re.finditer(r"fence\.acq_rel\.sys;", text))
        assert whole < text.index("bar.sync") < first < told < second < text.index("st.volatile.global.u32")
        assert "ld.global.v4.u32" in text
        assert "ld.global.nc" not in text
        check_code(text, capability)


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cu12"), ("13.0", "cu13"), (None, "cu13")])
def test_what_is_missing_is_named_for_torchs_cuda(
    cuda: str | None, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that installs it."""
    assert not kernel_cache.lacks()
    monkeypatch.setattr(kernel_cache, "_is_installed", lambda name: name != "numba_cuda")
    monkeypatch.setattr("torch.version.cuda", cuda)
    assert kernel_cache.lacks() == f"numba_cuda not installed: {install_command(extra)}"


def test_what_a_kernel_calls_is_the_same_for_all_generations() -> None:
    """Functions that were compiled with a kernel for one generation are used for others, and by tests all of it is."""
    script = "from tpplan.exec.toolchain.kernel_cache import ptx; print(ptx('sum_f32', (9, 0)))"
    alone = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout
    machine_code.made_ptx("sum_f32", (8, 0))
    for ptx in (machine_code.made_ptx, kernel_cache.ptx):
        assert _without_numbers(ptx("sum_f32", (9, 0))) == _without_numbers(alone)


def _without_numbers(text: str) -> str:
    """Return PTX without names that tell how often numba has compiled something."""
    return re.sub(r"\b_(ZN|cudapy_smem_)\w+", "", text[text.index(".entry") : text.rindex("}")])


def test_compiling_leaves_numba_as_it_was() -> None:
    """Its own kernels are compiled for the GPU that is there."""
    from numba.cuda import api, dispatcher  # noqa: PLC0415 (which takes long)

    kernel_cache.ptx("sum_f32", (9, 0))
    assert dispatcher.get_current_device is api.get_current_device


def test_a_kernel_on_disk_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process loads the same machine code without importing what compiles, which takes long."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = kernel_cache.machine_code("sum_f32", (9, 0))
    script = """if True:
        import sys
        from types import SimpleNamespace
        from tpplan.exec.toolchain import bindings, kernel_cache
        results = bindings.driver.CUresult
        bindings.driver = SimpleNamespace(
            CUresult=results,
            cuLibraryLoadData=lambda data, *_: (results.CUDA_SUCCESS, sys.stdout.buffer.write(data)),
            cuLibraryGetKernel=lambda *_: (results.CUDA_SUCCESS, 7),
        )
        assert kernel_cache.load("sum_f32", (9, 0)) == 7
        sys.exit("numba" in sys.modules or "cuda.core" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, code), done.stderr.decode()
    assert [path.suffix for path in (tmp_path / "tpplan" / "kernels").iterdir()] == [".cubin"]


def test_a_kernel_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each compute capability, by its name, from its machine code; what the driver refuses is told."""
    driver = Mock(CUresult=bindings.driver.CUresult)
    result = bindings.driver.CUresult.CUDA_SUCCESS
    driver.cuLibraryLoadData.side_effect = lambda code, *_: (result, f"library of {code.decode()}")
    driver.cuLibraryGetKernel.side_effect = lambda library, name: (result, f"{name.decode()} in {library}")
    monkeypatch.setattr(bindings, "driver", driver)
    monkeypatch.setattr(kernel_cache, "machine_code", lambda name, capability: f"{name} {capability}".encode())
    kernel_cache.load.cache_clear()
    try:
        for capability in ((8, 0), (9, 0), (9, 0)):
            assert kernel_cache.load("sum_f32", capability) == f"sum_f32 in library of sum_f32 {capability}"
        assert driver.cuLibraryLoadData.call_count == driver.cuLibraryGetKernel.call_count == 2
        result = bindings.driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
        for _ in range(2):
            message = r"sum_f16 for sm_90 was not loaded: CUDA_ERROR_NO_BINARY_FOR_GPU"
            with pytest.raises(ExecutionError, match=message) as raised:
                kernel_cache.load("sum_f16", (9, 0))
            assert "$XDG_CACHE_HOME" in str(raised.value.hint)  # where kernels are if it is set
    finally:
        kernel_cache.load.cache_clear()


def test_several_kernels_are_compiled_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that leave them on disk, where they are found; a single one is not worth a process.

    There are as many as CPUs, which compile one after the other. One that fails costs no other.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    kernel_cache.prepare([("sum_f32", (9, 0))])
    assert not (tmp_path / "tpplan").exists()
    kernel_cache.prepare([("sum_f32", (9, 0)), ("sum_f64", (9, 0)), ("sum_f16", (8, 0)), ("sum_bf16", (9, 0))])
    found = {path.name.rpartition("-")[0]: path.read_bytes() for path in (tmp_path / "tpplan" / "kernels").iterdir()}
    assert found.keys() == {"sum_f32-sm_90", "sum_f16-sm_80", "sum_bf16-sm_90"}
    assert all(code[:4] == b"\x7fELF" for code in found.values())
    assert kernel_cache.machine_code("sum_f32", (9, 0)) == found["sum_f32-sm_90"]


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, a kernel is compiled each time."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernel_cache.machine_code("sum_f32", (9, 0))[:4] == b"\x7fELF"


def test_each_source_and_capability_has_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled for one GPU is not run on another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache.machine_code("sum_f32", (8, 0)) != kernel_cache.machine_code("sum_f32", (9, 0))
    assert len(list((tmp_path / "tpplan" / "kernels").iterdir())) == 2
