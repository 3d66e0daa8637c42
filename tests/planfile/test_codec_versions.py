"""Plan files of other versions: another major is refused, a newer minor is only shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import pytest

from tests.codec_cases import FIXTURE, PLAN, TEXT, changed
from tpplan.core.model import NotPlanned
from tpplan.core.plan import Draft, least_version
from tpplan.core.speed import DeviceTime, LinkSpeed
from tpplan.errors import PlanError
from tpplan.files.codec import dumps
from tpplan.planfile import codec
from tpplan.planfile.verify import problems

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("version", ["2.0", "3.7"])
@pytest.mark.parametrize("allow_newer", [False, True])
def test_unknown_major(version: str, allow_newer: bool) -> None:
    """Another major version is refused before anything else is said about it, also for showing."""
    with pytest.raises(PlanError) as caught:
        codec.loads(changed(format_version=version, model=None), allow_newer=allow_newer)
    assert caught.value.message == (
        f"the plan has a problem:\n  TP001 at format_version: is '{version}', this tpplan reads 1.x"
    )
    assert "upgrade" in caught.value.hint


def test_newer_minor(tmp_path: Path) -> None:
    """A newer minor version loads only for showing: unknown keys pass, and nothing executes or saves the plan."""
    text = changed(format_version="1.5", topology={"links": []}, request=json.loads(TEXT)["request"] | {"new": 1})
    with pytest.raises(PlanError, match=r"TP001 at format_version: is 1.5, newer than 1.4, the latest that"):
        codec.loads(text)
    plan = codec.loads(text, allow_newer=True)
    assert plan == attrs.evolve(PLAN, format_version="1.5")
    assert [problem.rule for problem in problems(plan)] == ["TP001"]
    with pytest.raises(PlanError, match="TP001"):
        codec.save(plan, tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_newer_minor_still_obeys_the_rules() -> None:
    """Showing a newer plan is no way around the rules, or the types of the keys that are known."""
    data = json.loads(TEXT) | {"format_version": "1.5"}
    data["request"]["batch"] = 0
    with pytest.raises(PlanError, match=r"TP008 at request.batch") as caught:
        codec.loads(json.dumps(data), allow_newer=True)
    assert [problem.rule for problem in caught.value.problems] == ["TP008"]
    data["request"]["batch"] = "0"
    with pytest.raises(PlanError, match=r"TP000 at request.batch"):
        codec.loads(json.dumps(data), allow_newer=True)


NEWER = FIXTURE.with_name("plan-1.1.json").read_text(encoding="utf-8")
WITH_SPEED = FIXTURE.with_name("plan-1.2.json").read_text(encoding="utf-8")


def test_minor_4() -> None:
    """A frozen plan beside a draft model loads, is written again byte for byte, and says 1.4 only for it."""
    text = FIXTURE.with_name("plan-1.4.json").read_text(encoding="utf-8")
    plan = codec.loads(text)
    assert dumps(plan) == text
    room = (534773760, 401080320, 133693440, 133693440)
    assert (plan.request.draft, plan.request.mtp) == (Draft("Fixture-Head", room, split=True), False)
    assert [entry.reserved_bytes for entry in plan.memory] == [268435456, 0, 0, 0]
    assert [entry.draft_bytes for entry in plan.memory] == [*room[:3], room[3] + 536870912]  # where only the draft is
    alone = attrs.evolve(plan.request, draft=None)
    assert least_version(attrs.evolve(plan, request=alone)) == "1.1"
    assert least_version(attrs.evolve(plan, request=attrs.evolve(alone, mtp=True))) == "1.4"


def test_minor_4_of_a_draft_model() -> None:
    """A frozen plan of a draft model leaves the overhead to the plan of its model, and is else as any."""
    text = FIXTURE.with_name("plan-1.4-draft.json").read_text(encoding="utf-8")
    plan = codec.loads(text)
    assert dumps(plan) == text
    assert plan.request.drafts_for == "Fixture-72B"
    for entry, alone in zip(plan.memory, PLAN.memory, strict=True):
        free = entry.free_bytes - alone.overhead_bytes
        assert attrs.evolve(entry, overhead_bytes=alone.overhead_bytes, free_bytes=free) == alone
    assert least_version(attrs.evolve(plan, request=PLAN.request)) == "1.0"


def test_minor_3() -> None:
    """A frozen plan of a GGUF file loads, is written again byte for byte, and says 1.3 only for what that tells."""
    text = FIXTURE.with_name("plan-1.3.json").read_text(encoding="utf-8")
    plan = codec.loads(text)
    assert dumps(plan) == text
    assert plan.model.weight_format == "GGUF Q4_K"
    assert attrs.evolve(plan, format_version="1.0", model=attrs.evolve(plan.model, weight_format="")) == PLAN


def test_minor_2() -> None:
    """A frozen plan that uses every key of 1.2 loads, is written again byte for byte, and says 1.2 only for them."""
    plan = codec.loads(WITH_SPEED)
    assert dumps(plan) == WITH_SPEED
    assert plan.speed
    assert plan.speed.links == (LinkSpeed(first=0, second=1, latency_ns=5210, bytes_per_second=21000000000),)
    assert plan.speed.decode[0].devices[1] == DeviceTime(1, 4000001, 50000, 310000, 420000)
    assert plan.speed.prefill[0].full_tokens_per_second == 2048 * 10**9 // (36000002 + 450000 + 310000 + 420000)
    device = plan.devices[0]
    assert (device.read_bytes_per_second, device.boundary_ns) == (931000000000, 1310)
    without = attrs.evolve(plan, speed=None, devices=PLAN.devices)
    assert least_version(without) == "1.0"


def test_minor_1() -> None:
    """A frozen plan that uses every key of 1.1 loads, is written again byte for byte, and says 1.1 only for them."""
    plan = codec.loads(NEWER)
    assert dumps(plan) == NEWER
    assert (plan.model.not_planned, plan.model.assumed) == (
        (NotPlanned("vision tower", 1152776672), NotPlanned("audio tower")),
        "weights in BF16: pytorch_model.bin is not read",
    )
    assert (plan.request.context, plan.request.full_window, plan.request.beyond) == (20480, True, True)
    assert [plan.request.reserved(i) for i in range(4)] == [1073741824, 2147483648, 1073741824, 1073741824]
    assert least_version(plan) == "1.1"
    assert least_version(PLAN) == "1.0"
