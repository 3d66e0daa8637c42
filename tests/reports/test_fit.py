"""What fits: every cell against planning itself, and bits per weight by arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve
from gguf import GGMLQuantizationType

import tpplan
from tests.cli_cases import LLAMA_8B
from tests.command import command
from tests.models.gguf.test_gguf import write
from tests.planning_cases import spec
from tests.render_cases import plain
from tpplan.core.device import Device
from tpplan.core.plan import Cache, Request, Reserve
from tpplan.core.sizes import format_bytes
from tpplan.files.codec import unstructure
from tpplan.planner.draft import reserve_for_draft
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.kinds import KINDS
from tpplan.planner.options import Options
from tpplan.planner.plan import plan, plan_request
from tpplan.render.fit import fit as view
from tpplan.reports.fit import QUANTISATIONS, FitReport, _whole_bits, fit

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
                assert cell.tokens_per_second is None
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
    (row,) = [row for row in report.rows if row.context == 131072]
    assert (row.quantisation, row.quantisation_tokens_per_second) == ("", None)  # so no quantisation is advised
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


def test_speed_of_a_quantisation_by_arithmetic() -> None:
    """On one device: the layers' matrices in its bits and the output matrix in 16, over bandwidth, as of AWQ."""
    model = tpplan.read_model(MODELS / "Llama-3.1-8B")
    device = evolve(tpplan.parse_devices("RTX4060")[0], read_bytes_per_second=250 * 10**9)
    row = fit(model, [device], context=4096).rows[0]
    assert row.context == 4096
    layers, head = 8_030_261_248 - 2 * 128256 * 4096, 128256 * 4096
    bits = dict(QUANTISATIONS)[row.quantisation] / 100
    assert 4 < bits < 6
    read = layers * bits / 8 * KINDS["codes4"].slower[0] / 1000 + 2 * head * KINDS["dense"].slower[0] / 1000
    step = (read + 4096 * 131072) / 250e9 + 32 * KINDS["codes4"].layer_ns[0] / 1e9 + 60e-6
    assert row.quantisation_tokens_per_second == pytest.approx(1 / step, abs=1)


def test_a_quantised_checkpoint_is_as_fast_in_another_quantisation(tmp_path: Path) -> None:
    """However the file that is named stores its weights: the same model in 16 bits and in AWQ."""
    config = json.loads((MODELS / "Llama-3.1-8B" / "config.json").read_text())
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": awq}))
    folders = (MODELS / "Llama-3.1-8B", tmp_path)
    dense, codes = (fit(tpplan.read_model(each), tpplan.parse_devices("RTX4060"), context=16384) for each in folders)
    for one, other in zip(dense.rows[:3], codes.rows, strict=False):
        assert one.quantisation == other.quantisation != ""
        assert one.quantisation_tokens_per_second == pytest.approx(other.quantisation_tokens_per_second, rel=0.005)


def test_the_weights_as_they_are_are_as_fast(report: FitReport) -> None:
    """Where 16 bits fit, the speed of 16 bits is that of the model, by another way."""
    for row in (row for row in report.rows if row.quantisation == "16 bits"):
        assert row.quantisation_tokens_per_second == pytest.approx(row.cells[0].tokens_per_second, rel=0.001)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16"])
def test_bits_of_a_file_in_gguf_count_weights(kind: str, tmp_path: Path) -> None:
    """However its matrices are stored, the same model has as many weights outside its layers."""
    write(tmp_path / "tiny.gguf", "llama", kinds=(getattr(GGMLQuantizationType, kind),))
    model = tpplan.read_model(tmp_path / "tiny.gguf")
    outside = 2 * 640 * 512
    inside = model.parameter_count - outside
    for name, tenths in _whole_bits(model):
        bits = (inside * dict(QUANTISATIONS)[name] / 100 + 16 * outside) / (inside + outside)
        assert 10 * bits <= tenths < 10 * bits + 1


def test_another_quantisation_is_advised_before_other_cards() -> None:
    """The largest that fits, which planning such weights confirms; and it is on the screen in this order."""
    model, devices = tpplan.read_model(MODELS / "Llama-3.1-70B"), tpplan.parse_devices("2xRTX4090")
    found = fit(model, devices, context=8192, gpus="2xRTX4090")
    assert [one.kind for one in found.suggestions] == ["quantisation", "devices", "memory"]
    assert found.suggestions[0].value == next(row.quantisation for row in found.rows if row.context == 8192)
    text = plain(view(unstructure(found)))
    assert text.index("other weights") < text.index("6xRTX4090") < text.index("take a GPU with 112.65 GiB instead of")
    assert "tokens/s with a full cache, estimated" in text
    unknown = fit(model, [*devices, Device(name="mine", budget_bytes=GIB)], context=8192)
    assert unknown.without_bandwidth == (2,)
    text = " ".join(plain(view(unstructure(unknown))).split())
    assert (
        "no tokens/s, because the bandwidth of device 2 (mine) is unknown: name GPUs of the catalogue in --gpus" in text
    )


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
    assert all(cell.fits and cell.tokens_per_second is None for row in roomy.rows for cell in row.cells)
    assert "tokens_per_second" not in f"{unstructure(roomy)}{unstructure(report)}"


def test_bytes_and_cause_are_told(tmp_path: Path) -> None:
    """What is left to a draft model, or why it has no room, and what the wish lacks, as plan says it."""
    config = json.loads((LLAMA_8B / "config.json").read_text()) | {"num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for gpus in ("3x16GiB", "24GiB,1GiB"):
        more = ("--gpus", gpus, "--batch", "8", "--context", "16384", "--draft", tmp_path)
        planned = json.loads(command("plan", LLAMA_8B, *more, "--json").out)["error"]
        report = json.loads(command("fit", LLAMA_8B, *more, "--json").out)
        screen = command("fit", LLAMA_8B, *more)
        assert report["reason"] == planned["message"]
        assert (screen.code, report["reason"] in " ".join(screen.out.split())) == (1, True)
        assert report["draft"] == tmp_path.name
        assert ("draft_bytes" in report) == (gpus == "3x16GiB")
    report = json.loads(command("fit", LLAMA_8B, "--gpus", "3x16GiB", *more[2:], "--json").out)
    room = reserve_for_draft(
        Options(batch=8, context=16384).request(tpplan.read_model(LLAMA_8B)),
        tpplan.read_model(tmp_path),
        tpplan.read_model(LLAMA_8B),
        tpplan.parse_devices("3x48GiB"),
    )
    assert room.draft
    assert report["draft_bytes"] == [*room.draft.room_bytes]
    told = f"with 16,384 tokens: {format_bytes(room.draft.room_bytes[0])} on every device"
    assert told in " ".join(command("fit", LLAMA_8B, "--gpus", "3x16GiB", *more[2:]).out.split())


def test_fit_splits_no_draft_model() -> None:
    """The option of plan is pointed to, as fit writes no plan."""
    done = command("fit", LLAMA_8B, "--gpus", "24GiB", "--draft", LLAMA_8B, "--draft-output", "d.json")
    assert (done.code, "tpplan plan --draft-output FILE splits it" in done.err) == (2, True)


def test_room_is_computed_once_for_each_request_and_devices() -> None:
    """Room for a split draft model takes a plan of its own: only what fits alone is worth it, whatever the strategy.

    Bits per weight are searched with the same room.
    """
    asked: list[tuple[Request, tuple[Device, ...]]] = []

    def room(request: Request, devices: tuple[Device, ...]) -> Request:
        asked.append((request, devices))
        if request.sequence_tokens > 8192:
            raise InfeasibleError("no room", "", (), ())
        return evolve(request, reserve=(Reserve(GIB),))

    model = tpplan.read_model(MODELS / "Llama-3.1-8B")
    report = fit(model, tpplan.parse_devices("RTX3090"), context=4096, room=room)
    assert [any(cell.fits for cell in row.cells) for row in report.rows] == [True, True, False, False, False, False]
    assert len(asked) == len({(evolve(request, strategy=""), devices) for request, devices in asked})
    asked.clear()
    request = Request("", "balanced", Cache(tokens=8 * 4096), 8, 2048, "idle")
    with pytest.raises(InfeasibleError) as caught:
        plan_request(model, tpplan.parse_devices("RTX4060,RTX3060"), request, room=room)
    assert caught.value.suggestions
    _, *others = asked  # the first is what was asked for
    for request, devices in others:
        plan_request(model, devices, request)


def test_what_fits_beside_prediction_layers() -> None:
    """The longest context is the one that plan makes, whichever strategy that takes, and not one step more."""
    more = (MODELS / "Qwen3-Next-80B-A3B", "--gpus", "2xH100", "--mtp")
    report = json.loads(command("fit", *more, "--json").out)
    longest = {one["cache"]: one["context"] for one in report["longest"]}["fp16"]
    assert 0 < longest < 262144
    assert command("plan", *more, "--context", longest).code == 0
    assert command("plan", *more, "--context", longest + 256).code == 1


def test_what_fits_beside_a_draft_model(tmp_path: Path) -> None:
    """The longest context is the one that plan makes with the same reserve and draft model, and not one step more."""
    config = json.loads((LLAMA_8B / "config.json").read_text()) | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    more = ("--gpus", "RTX4090", "--reserve", "256MiB", "--draft", tmp_path)
    report = json.loads(command("fit", LLAMA_8B, *more, "--json").out)
    assert report["reserve"] == "256.00 MiB on every device"
    longest = {one["cache"]: one["context"] for one in report["longest"]}["fp16"]
    planned = command("plan", LLAMA_8B, *more, "--context", longest, "-o", tmp_path / "plan.json")
    assert planned.code == 0
    (room,) = json.loads(command("fit", LLAMA_8B, *more, "--context", longest, "--json").out)["draft_bytes"]
    assert room == tpplan.load(tmp_path / "plan.json").memory[0].draft_bytes
    assert "reason" in report
    assert command("plan", LLAMA_8B, *more, "--context", longest + 256).code == 1
    alone = json.loads(command("fit", LLAMA_8B, *more[:2], "--json").out)
    assert {one["cache"]: one["context"] for one in alone["longest"]}["fp16"] > longest > 0
