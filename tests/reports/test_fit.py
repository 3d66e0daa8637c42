"""What fits: every cell against planning itself, and bits per weight by arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

import tpplan
from tests.planning_cases import spec
from tpplan.core.device import Device
from tpplan.core.plan import Cache
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.plan import plan
from tpplan.reports.fit import QUANTISATIONS, FitReport, fit

MODELS = Path(__file__).parents[2] / "examples" / "models"
GIB = 2**30


@pytest.fixture(scope="module")
def report() -> FitReport:
    """Llama-3.1-8B with four sequences on a card of 24 and one of 12 GiB."""
    return fit(tpplan.read_model(MODELS / "Llama-3.1-8B"), tpplan.parse_devices("RTX3090,RTX3060"), batch=4)


def test_every_cell_is_what_planning_says(report: FitReport) -> None:
    """A plan exists where a cell says so, by ``auto``, whose effort is larger, about as fast, and nowhere else."""
    model, devices = tpplan.read_model(MODELS / "Llama-3.1-8B"), tpplan.parse_devices("RTX3090,RTX3060")
    assert [row.context for row in report.rows] == [4096, 8192, 16384, 32768, 65536, 131072]
    for row in report.rows:
        for cell in row.cells:
            cache = Cache(cell.cache, 4 * row.context)
            if not cell.fits:
                with pytest.raises(InfeasibleError):
                    plan(model, devices, cache=cache, batch=4)
                assert cell.tokens_per_second == 0
                continue
            speed = plan(model, devices, cache=cache, batch=4, strategy="auto").speed
            assert speed
            assert cell.tokens_per_second == pytest.approx(speed.decode[-1].full_tokens_per_second, rel=0.08)


def test_the_longest_context_fits_and_the_next_does_not(report: FitReport) -> None:
    """In steps of 256, up to the model's maximum."""
    model, devices = tpplan.read_model(MODELS / "Llama-3.1-8B"), tpplan.parse_devices("RTX3090,RTX3060")
    for one in report.longest:
        plan(model, devices, cache=Cache(one.cache, 4 * one.context), batch=4)
        if one.context < model.max_context:
            with pytest.raises(InfeasibleError):
                plan(model, devices, cache=Cache(one.cache, 4 * (one.context + 256)), batch=4)


def test_a_wish_that_does_not_fit_gets_changes(report: FitReport) -> None:
    """They are those of the error that planning raises."""
    assert not report.fits
    model, devices = tpplan.read_model(MODELS / "Llama-3.1-8B"), tpplan.parse_devices("RTX3090,RTX3060")
    with pytest.raises(InfeasibleError) as caught:
        plan(model, devices, batch=4)
    assert [one.message for one in report.suggestions] == [one.message for one in caught.value.suggestions]
    assert report.suggestions[0].option == "--cache q4"
    assert fit(model, devices, batch=4, context=8192).suggestions == ()
    assert fit(model, devices, batch=4, context=8192).fits


def test_bits_by_arithmetic() -> None:
    """On one device: what its budget leaves beside overhead, cache and workspace, divided by the parameters."""
    model = tpplan.read_model(MODELS / "Llama-3.1-70B")
    device = Device(name="x", budget_bytes=48 * GIB, overhead_bytes=GIB)
    (row,) = [row for row in fit(model, [device], context=8192).rows if row.context == 8192]
    alone = plan(model, [evolve(device, budget_bytes=2**40)], cache=Cache(tokens=8192)).memory[0]
    left = 48 * GIB - GIB - alone.cache_bytes - alone.workspace_bytes
    assert row.most_bits_tenths == left * 80 // 70_553_706_496
    assert alone.cache_bytes == 8192 * 327680
    outside = 2 * 128256 * 8192
    bits = dict(QUANTISATIONS)[row.quantisation] / 100
    assert (bits * (70_553_706_496 - outside) + 16 * outside) / 70_553_706_496 <= row.most_bits_tenths / 10


def test_bits_of_common_quantisations() -> None:
    """Bytes of a block of codes with its scales, as the formats define them."""
    bits = {name: hundredths / 100 for name, hundredths in QUANTISATIONS}
    assert bits["Q8_0"] == (32 + 2) * 8 / 32
    assert bits["Q4_0"] == (16 + 2) * 8 / 32
    assert bits["Q6_K"] == pytest.approx((128 + 64 + 16 + 2) * 8 / 256, abs=0.01)
    assert bits["NVFP4"] == 4 + 8 / 16
    assert bits["AWQ, GPTQ 4-bit g128"] == pytest.approx(4 + (16 + 4) / 128, abs=0.01)


def test_nothing_fits() -> None:
    """No cell, no context, no bits; and without bandwidths no speed."""
    model = spec(num_hidden_layers=8)
    report = fit(model, [Device(name="x", budget_bytes=GIB, overhead_bytes=GIB - 1)])
    assert not report.fits
    assert not any(cell.fits for row in report.rows for cell in row.cells)
    assert {row.most_bits_tenths for row in report.rows} == {0}
    assert {row.quantisation for row in report.rows} == {""}
    assert {one.context for one in report.longest} == {0}
    roomy = fit(model, [Device(name="x", budget_bytes=20 * GIB)])
    assert roomy.fits
    assert all(cell.fits and not cell.tokens_per_second for row in roomy.rows for cell in row.cells)
