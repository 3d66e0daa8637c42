"""Where the time of a step goes: the same logic as on GPUs, with traces by hand and a tiny model on virtual devices."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import bench_decode
from benchmarks.common import random_checkpoint
from benchmarks.decode import checkpoint, profile_run
from benchmarks.decode.order import Order, prompts
from benchmarks.decode.profile_run import KINDS, OWN, REST, Work, busy, tables, works_of
from tests.bench_decode_cases import CONFIG, order, run_command
from tests.weight_plans import fine_units
from tpplan.decoder import Decoder, Sampling
from tpplan.exec import compile as compile_plan
from tpplan.exec.kernels import direct, frame, packet, slot, sums
from tpplan.exec.kernels.kernel import Kernel
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fine_units", "order"]  # fixtures

#: Large enough for two devices to have a part of it.
_WIDER = {**CONFIG, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "torch_dtype": "bfloat16"}

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "matrices"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)", "matrices"),
        ("std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>", "matrices"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matrices"),
        ("skinny_bf16_8", "matrices"),
        ("packed_joint_bf16_e4m3_8", "matrices"),
        ("wide_f16_4_48", "matrices"),
        ("coded_product_bf16_8", "matrices"),
        ("dense_bf16_e4m3", "matrices"),
        ("experts_choose_bf16", REST),
        ("aten.addmm_", "matrices"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void pytorch_flash::flash_fwd_splitkv_combine_kernel<pytorch_flash::Flash_fwd_kernel_traits>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("aten.scaled_dot_product_attention", "attention"),
        ("Memcpy PtoP (Device -> Device)", "copies and fills"),
        ("Memset (Device)", "copies and fills"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>>",
            "copies and fills",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>>", "copies and fills"),
        ("aten.new_zeros", "copies and fills"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, true>", REST),
        ("void at::native::index_elementwise_kernel<128, 4, index_put_kernel_impl<OpaqueType<2>>>", REST),
        ("void at::native::vectorized_elementwise_kernel<4, silu_kernel(at::TensorIteratorBase&)>", REST),
        ("aten.mul_", REST),
        ("tpplan.all_reduce", OWN),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    """By the names that libraries give them on GPUs, and operators that stand for them elsewhere."""
    assert Work(name, 0).kind == kind


def test_all_kernels_of_tpplan_are_known() -> None:
    """Whichever module they are in."""
    modules = (frame, packet, slot, direct, sums)
    names = {each.name for module in modules for each in vars(module).values() if isinstance(each, Kernel)}
    assert len(names) > 12
    assert {Work(name, 0).kind for name in names} == {OWN}


def test_what_overlaps_is_busy_once() -> None:
    """In any order, one inside another too."""
    works = [Work("c", 0, 30, 40), Work("a", 0, 0, 10), Work("b", 0, 5, 20), Work("inside", 0, 6, 8)]
    assert busy(works) == 30
    assert busy([]) == 0


def _event(name: str, device: int, start: float, micros: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": micros, "args": {"device": device}}


def test_tables_of_a_trace() -> None:
    """Kinds of each device, beside what any device was there for; what the host did is not in them."""
    ends = {"fromDevice": 1, "inDevice": 1, "toDevice": 0}
    trace = {
        "traceEvents": [
            _event("nvjet_a", 0, 1000.0, 40),
            _event("nvjet_b", 0, 1020.0, 40),
            _event("slot_sum_bf16", 0, 1060.0, 20),
            _event("nvjet_b", 1, 1000.0, 5),
            {**_event("Memcpy PtoP (Device -> Device)", 1, 1005.0, 5, "gpu_memcpy"), "args": ends},
            _event("Memcpy DtoH (Device -> Pinned)", 1, 1190.0, 10, "gpu_memcpy"),
            _event("cudaGraphLaunch", 0, 0.0, 5000, "cuda_runtime"),
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        ]
    }
    first, second = "\n".join(tables(works_of(trace), "a step", times=2, layers=4)).split("\nDevice 1, a step, of 2:")
    for row in (
        f"| {OWN} | 0.5 | 0.12 | 10.0 | 10.0% |",
        "| attention | 0.0 | 0.00 | – | 0.0% |",
        "| matrices | 1.0 | 0.25 | 30.0 | 30.0% |",
        "| all | 1.5 | 0.38 | 40.0 | 40.0% |",
        "| gaps, in which the device has nothing | | | 60.0 | 60.0% |",
        "| from the first to the last of any device | | | 100.0 | |",
        "| `nvjet_a` | 0.5 | 40.0 | 20.0 |",
    ):
        assert row in first.splitlines()
    for row in (
        "| matrices | 0.5 | 0.12 | 2.5 | 2.5% |",
        "| copies and fills | 1.0 | 0.25 | 7.5 | 7.5% |",
        "| gaps, in which the device has nothing | | | 90.0 | 90.0% |",
    ):
        assert row in second.splitlines()


def test_the_longest_kernels_come_first() -> None:
    """Ten of them, with names that fit into a table."""
    works = [Work(f"kernel {'x' * 200} {i}|", 0, 100 * i, 100 * i + i) for i in range(20)]
    works += [Work("many short ones", 0, 5000 + i, 5000.5 + i) for i in range(100)]
    lines = [line for line in tables(works, "a step", times=1, layers=1) if line.startswith("| `")]
    assert lines[0] == "| `many short ones` | 100.0 | 0.5 | 50.0 |"
    assert [line.split(" | ")[-1] for line in lines[1:]] == [f"{19 - i}.0 |" for i in range(9)]
    assert max(map(len, lines)) < 130


def test_a_profiler_that_sees_nothing_is_told() -> None:
    """As where it must not look at the GPUs."""
    assert list(tables([], "a step", 1, 1)) == ["a step: the profiler has seen no work of any device"]


def _kernels(folder: Path, devices: int, layers: int) -> Counter[str]:
    """Return what a step of three sequences calls, of a model in 16 bits."""
    folder.mkdir()
    random_checkpoint.write(folder, {**CONFIG, "num_hidden_layers": layers, "torch_dtype": "bfloat16"})
    plan = Order(directory=str(folder), gpus=devices, backend="cpu", batches=(3,), tokens=5, prefill=40).plan()
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        noting = profile_run.Noting(context)
        decoder = Decoder(noting, folder, load_weights(plan, folder, context))  # type: ignore[arg-type]
        steps = decoder.steps(3)
        steps.start(prompts(3, 203), Sampling())
        with noting.noted() as works:
            steps.step()
    return Counter(work.name for work in works)


@pytest.mark.parametrize("devices", [1, 2])
def test_kernels_of_a_layer(tmp_path: Path, fine_units: None, devices: int) -> None:
    """All that a decoding step by torch takes for a layer of Llama, on each device; a single one adds as it multiplies.

    As many come before and behind the layers as the page tells.
    """
    one = _kernels(tmp_path / "1", devices, 1)
    found = _kernels(tmp_path / "2", devices, 2) - one
    assert (one - found).total() == 32 * devices + 1  # which takes the tokens to the host
    alone = {"aten.linear": 2, "aten.addmm_": 2}
    common = {
        "aten.rms_norm": 2,
        "aten.mul": 1,
        "aten.add": 1,
        "aten.index_put_": 1,
        "aten.scaled_dot_product_attention": 1,
        "aten.silu_": 1,
        "aten.mul_": 1,
    }
    each = {**common, **(alone if devices == 1 else {"aten.linear": 4, "tpplan.all_reduce": 2})}
    assert found == {name: count * devices for name, count in each.items()}


def _command(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> int:
    """Run the command for a tiny model, and return how it exits."""
    sizes = ["--batch", "1,3", "--steps", "2", "--prefill", "40", "--layers", "1", "--gpus", "1,2"]
    return run_command(bench_decode.main, monkeypatch, folder, _WIDER, "--profile", *sizes, *more)


def test_the_command_prints_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every number of devices, of steps of every batch and of a prompt."""
    assert _command(monkeypatch, tmp_path) == 0
    said = capsys.readouterr().out
    heads = [line for line in said.splitlines() if line.startswith("Device ")]
    whats = ["a step of batch 1, of 2:", "a step of batch 3, of 2:", "a prompt of 40 tokens, of 3:"]
    assert heads == [f"Device 0, all of {n} virtual devices, {what}" for n in (1, 2) for what in whats]
    assert [said.count(f"| {kind} |") for kind in KINDS] == [6] * len(KINDS)
    assert said.count("| `tpplan.all_reduce` | 8.0 | – | – |") == 2  # of tokens, a layer and logits, on two devices


def test_the_command_fails_if_a_run_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says why of each, and leaves nothing behind."""
    monkeypatch.setattr(checkpoint, "room_for", lambda _: tmp_path)
    assert _command(monkeypatch, tmp_path, "--watchdog", "0.1") == 1
    said = capsys.readouterr().err
    assert "1 GPUs: not done after 0 s" in said
    assert "2 GPUs: not done after 0 s" in said
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.gpu
def test_kinds_on_gpus(tmp_path: Path) -> None:
    """Steps of graphs and a prompt have times of matrices and attention on every GPU, and sums if there are several."""
    random_checkpoint.write(tmp_path, _WIDER)
    count = min(GPUS, 2)
    told: list[str] = []
    profile_run.measure(Order(directory=str(tmp_path), gpus=count, batches=(1,), tokens=5, prefill=40), told.append)
    tables_of = dict(text.split(":\n", 1) for text in "\n".join(told).split("\nDevice ")[1:])
    whats = ("a step of batch 1, of 5", "a prompt of 40 tokens, of 3")
    assert set(tables_of) == {f"{device}, {count} GPUs, {what}" for device in range(count) for what in whats}
    for text in tables_of.values():
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        micros = {row[0]: row[3] for row in rows if row[0] in KINDS}
        wanted = {*KINDS} - {"copies and fills"} - ({OWN} if count == 1 else set())
        assert all(float(micros[kind].replace(",", "")) > 0 for kind in wanted), micros
