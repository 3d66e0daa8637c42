"""The processes of a plan: who owns what by default, and what is said where they disagree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from tests.exec.processes.threads import shares
from tpplan.exec.group.members import Claim, Gpu, disagreements, owners, share

if TYPE_CHECKING:
    from collections.abc import Sequence

USED = (0, 2, 3)
TERMS = {"plan": "Tiny (0123)", "dtype": "bfloat16"}
#: Claims of three processes that agree; two of them are on one host.
AGREED = (
    Claim((2,), TERMS, gpus=(Gpu(2, "here", "GPU-a", 132),)),
    Claim((0,), TERMS, gpus=(Gpu(0, "there", "GPU-a", 132),)),
    Claim((3,), TERMS, gpus=(Gpu(3, "here", "GPU-b", 132),)),
)


@given(st.sets(st.integers(0, 20), min_size=1), st.integers(1, 9))
def test_devices_are_dealt_out_in_order(devices: set[int], processes: int) -> None:
    """By default each process owns as many as any other, all together own all; where that cannot be, none has any."""
    used = sorted(devices)
    dealt = [share(used, processes, i) for i in range(processes)]
    if len(used) % processes:
        assert dealt == [None] * processes
        return
    own = [each for each in dealt if each is not None]
    assert [device for each in own for device in each] == used
    assert len({len(each) for each in own}) == 1
    assert len(own) == processes


@given(shares(range(8), 8))
def test_everyone_finds_who_owns_a_device(own: tuple[tuple[int, ...], ...]) -> None:
    """Each device has the process that claims it as its owner."""
    found = owners([Claim(devices) for devices in own])
    assert sorted(found) == [*range(8)]
    assert all(device in own[process] for device, process in found.items())


@given(shares(range(6), 6), st.data())
def test_who_agrees_is_not_accused(own: tuple[tuple[int, ...], ...], data: st.DataObject) -> None:
    """However devices in use are divided, also where others are claimed as well, and whatever each process sees.

    GPUs of two hosts may have the same name; processes with virtual devices have none.
    """
    used = data.draw(st.sets(st.integers(0, 5), min_size=1))
    host = data.draw(st.sampled_from((lambda device: f"host {device % 2}", lambda _: "host")))
    has_gpus = data.draw(st.booleans())
    gpus = [[Gpu(d, host(d), f"GPU-{d // 2 if host(0) != host(1) else d}", 132) for d in devices] for devices in own]
    claims = [Claim(d, dict(TERMS), gpus=tuple(g) if has_gpus else ()) for d, g in zip(own, gpus, strict=True)]
    assert disagreements(claims, sorted(used)) == []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        pytest.param({}, [], id="none"),
        pytest.param(
            {1: {"terms": TERMS | {"plan": "Other (4567)"}}},
            ["plan: Other (4567) in process 1, Tiny (0123) in all others"],
            id="another plan",
        ),
        pytest.param(
            {
                0: {"terms": TERMS | {"dtype": "float16"}},
                1: {"terms": {"plan": "Tiny (89ab)"}},
                2: {"terms": {"plan": "Tiny (cdef)", "dtype": "float16"}},
            },
            [
                "plan: Tiny (0123) in process 0, Tiny (89ab) in process 1, Tiny (cdef) in process 2",
                "dtype: nothing in process 1, float16 in all others",
            ],
            id="three plans and two dtypes",
        ),
        pytest.param(
            {0: {"own": (2, 3)}, 1: {"own": (3,)}},
            ["devices[0]: no process owns it, expected one", "devices[3]: processes 0, 1, 2 own it, expected one"],
            id="owned by nobody and by all",
        ),
        pytest.param(
            {2: {"gpus": (Gpu(3, "here", "GPU-a", 132),)}},
            ["devices[2] of process 0 and devices[3] of process 2 are the same GPU"],
            id="one GPU for two devices",
        ),
        pytest.param(
            {0: {"problems": ("max_rows: too many", "dtype: too wide")}, 2: {"problems": ("no room",), "own": ()}},
            ["process 0: max_rows: too many", "process 0: dtype: too wide", "process 2: no room"],
            id="problems, from which others follow",
        ),
        pytest.param(
            {
                0: {"terms": TERMS | {"dtype": "float32"}, "own": (0, 2), "gpus": (Gpu(2, "there", "GPU-a", 132),)},
                2: {"own": ()},
            },
            [
                "dtype: float32 in process 0, bfloat16 in all others",
                "devices[0]: processes 0, 1 own it, expected one",
                "devices[3]: no process owns it, expected one",
                "devices[2] of process 0 and devices[0] of process 1 are the same GPU",
            ],
            id="everything at once",
        ),
    ],
)
def test_disagreements_are_told_with_who_says_what(changed: dict[int, dict[str, Any]], found: Sequence[str]) -> None:
    """The words name the processes, their values and the devices."""
    claims = [evolve(claim, **changed.get(i, {})) for i, claim in enumerate(AGREED)]
    assert disagreements(claims, USED) == found
