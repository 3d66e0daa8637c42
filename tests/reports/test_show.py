"""What ``show`` tells of a plan: shares, how full devices are, and what a token reads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs
from hypothesis import given

import tpplan
from tests.codec_cases import PLAN
from tests.published import EXAMPLES
from tests.render_cases import plain
from tests.strategies import plans
from tpplan.core.plan import DeviceMemory, SplitPlan
from tpplan.files.codec import unstructure
from tpplan.render.html import page
from tpplan.render.show import exactness, show, summary
from tpplan.render.svg import picture
from tpplan.reports.show import PPM, ShareBasis, show_report

if TYPE_CHECKING:
    from collections.abc import Sequence


def _with(
    plan: SplitPlan, strategy: str, budgets: list[int], used: list[int], reads: Sequence[int] = (0, 0, 0, 0)
) -> SplitPlan:
    """Return a plan of these budgets whose devices use these bytes, half of them overhead, and read those per token."""
    devices = tuple(
        attrs.evolve(device, budget_bytes=budget, bandwidth_bytes_per_second=speed * 10**12)
        for device, budget, speed in zip(plan.devices, budgets, (3, 1, 0, 0), strict=True)
    )
    memory = tuple(
        DeviceMemory(i, size - size // 2, 0, 0, size // 2, budget - size, read)
        for i, (size, budget, read) in enumerate(zip(used, budgets, reads, strict=True))
    )
    return attrs.evolve(plan, devices=devices, memory=memory, request=attrs.evolve(plan.request, strategy=strategy))


def test_shares() -> None:
    """Requested shares follow budgets, achieved ones bytes in use, and an idle device is no loss."""
    report = show_report(_with(PLAN, "balanced", [400, 200, 200, 200], [200, 150, 50, 0]))
    assert [d.requested_share_ppm for d in report.devices] == [400_000, 200_000, 200_000, 200_000]
    assert [d.achieved_share_ppm for d in report.devices] == [500_000, 375_000, 125_000, 0]
    assert [d.used_ppm for d in report.devices] == [500_000, 750_000, 250_000, 0]
    assert (report.fullest_device, report.fullest_ppm) == (1, 750_000)
    assert report.together_ppm == 400_000
    assert summary(unstructure(report)).endswith("of all budgets used, at most 75.0 % (device 1 RTX 4080)")
    assert report.share_basis == ShareBasis.BUDGET


def test_reserved_memory_is_taken() -> None:
    """It makes a device as full as what is used, so that even fullness is what a plan with reserves shows."""
    plan = _with(PLAN, "balanced", [400, 200, 200, 200], [200, 50, 50, 0])
    memory = tuple(attrs.evolve(m, reserved_bytes=r) for m, r in zip(plan.memory, (0, 100, 0, 50), strict=True))
    report = show_report(attrs.evolve(plan, memory=memory))
    assert [d.used_ppm for d in report.devices] == [500_000, 750_000, 250_000, 250_000]
    assert [d.used_bytes for d in report.devices] == [200, 50, 50, 0]
    assert report.devices[1].achieved_share_ppm == round(150 * PPM / 450)
    assert (report.fullest_device, report.together_ppm) == (1, 450_000)


def test_what_is_assumed_is_not_exact() -> None:
    """Weights whose size no file proves are an estimate, as overhead is."""
    report = show_report(attrs.evolve(PLAN, model=attrs.evolve(PLAN.model, assumed="weights in BF16")))
    assert (report.exact, report.estimated) == (("cache", "workspace"), ("weights", "overhead"))
    assert show_report(PLAN).exact == ("weights", "cache", "workspace")


def test_overhead_is_an_estimate_where_there_is_any() -> None:
    """Devices without any, and a draft model whose model has it, leave nothing to guess."""
    memory = tuple(attrs.evolve(entry, overhead_bytes=0) for entry in PLAN.memory)
    report = show_report(attrs.evolve(PLAN, memory=memory))
    assert report.estimated == ()
    assert exactness(unstructure(report)) == "weights, cache and workspace are exact"


def test_latency_shares_bandwidth() -> None:
    """For the strategy latency, bandwidth is what was to be shared, and overhead, which no token reads, is no load."""
    report = show_report(_with(PLAN, "latency", [400, 200, 200, 200], [300, 101, 0, 0], [150, 51, 0, 0]))
    assert report.share_basis == ShareBasis.BANDWIDTH
    assert [d.requested_share_ppm for d in report.devices] == [750_000, 250_000, 0, 0]
    assert [d.achieved_share_ppm for d in report.devices] == [746_269, 253_731, 0, 0]
    assert summary(unstructure(report)) == "40.1 % of all budgets used, at most 75.0 % (device 0 RTX 4090)"


def test_latency_counts_the_experts_of_a_token() -> None:
    """Of a mixture of experts whose bandwidths fit, devices get what was asked: not of all bytes, but of those read."""
    model = tpplan.read_model(EXAMPLES / "Mixtral-8x7B")
    gpus = tpplan.parse_devices("H100,RTX4090,RTX3060")
    plan = tpplan.plan(model, gpus, cache=tpplan.Cache("fp16", 4096), strategy="latency")
    for share in show_report(plan).devices:
        assert abs(share.achieved_share_ppm - share.requested_share_ppm) < PPM // 100
    stored = [entry.weights_bytes + entry.cache_bytes for entry in plan.memory]
    assert sum(entry.reads_bytes for entry in plan.memory) < sum(stored) // 2
    edited = attrs.evolve(plan, memory=(attrs.evolve(plan.memory[0], reads_bytes=1), *plan.memory[1:]))
    assert tpplan.diff(plan, edited).reasons == ("planning",)


@given(plans())
def test_shares_add_up(plan: SplitPlan) -> None:
    """Shares add up to the whole but for rounding and no device is over its budget."""
    report = show_report(plan)
    slack = len(plan.devices)
    if report.share_basis is ShareBasis.BUDGET:
        assert abs(sum(d.requested_share_ppm for d in report.devices) - PPM) <= slack
    if any(entry.used_bytes for entry in plan.memory):
        assert abs(sum(d.achieved_share_ppm for d in report.devices) - PPM) <= slack
    assert all(d.used_bytes + d.free_bytes == d.budget_bytes for d in report.devices)
    assert 0 <= report.together_ppm <= report.fullest_ppm <= PPM


def test_why_nothing_is_predicted() -> None:
    """The screen names the devices whose bandwidth is unknown, and the document has their indices."""
    model = tpplan.read_model(EXAMPLES / "Llama-3.1-8B")
    known, unknown = (
        show_report(tpplan.plan(model, tpplan.parse_devices(gpus), strategy="auto"))
        for gpus in ("2xRTX4090", "RTX4090,24GiB,2x16GiB")
    )
    assert (known.without_bandwidth, unknown.without_bandwidth) == ((), (1, 2, 3))
    assert (known.speed is None, unknown.speed is None) == (False, True)
    why = "no tokens/s, because the bandwidth of device 1 (24GiB GPU), 2 (16GiB GPU), 3 (16GiB GPU) is unknown"
    assert why in plain(show(unstructure(unknown)))
    assert "no tokens/s" not in plain(show(unstructure(known)))
    told = why.replace("no", "No", 1) + "."
    assert f"<p>{told}</p>" in page(unstructure(unknown))
    for narrow in (False, True):
        pieces = re.findall("<text[^>]*>([^<]*)</text>", picture(unstructure(unknown), narrow=narrow))
        assert told in " ".join(pieces)
    for text in (page(unstructure(known)), picture(unstructure(known))):
        assert "o tokens/s, because" not in text
