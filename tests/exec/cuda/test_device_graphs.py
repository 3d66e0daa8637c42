"""Which nodes of a captured graph each device has."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings", reason="needs CUDA's bindings", exc_type=ImportError)

from tpplan.exec.cuda.device_graphs import shares_of

#: Two chains, of which the second has a branch that is joined.
_EDGES = [(1, 2), (2, 3), (4, 5), (4, 6), (5, 7), (6, 7)]


def test_each_device_has_what_its_last_work_depends_on() -> None:
    """Also one that has no work at all, and one whose stream depends on several nodes."""
    assert shares_of(range(1, 8), _EDGES, [[3], [7]]) == [{1, 2, 3}, {4, 5, 6, 7}]
    assert shares_of(range(1, 8), _EDGES[:4], [[3], [], [5, 6, 7]]) == [{1, 2, 3}, set(), {4, 5, 6, 7}]


@pytest.mark.parametrize(
    ("edges", "ends"),
    [
        pytest.param([*_EDGES, (2, 5)], [[3], [7]], id="one waits for another"),
        pytest.param(_EDGES, [[3, 7], [7]], id="a stream waits for another's"),
        pytest.param(_EDGES, [[3], [6]], id="nobody waits for some"),
        pytest.param([*_EDGES, (4, 1)], [[3], [7]], id="both go on from one"),
    ],
)
def test_work_that_is_not_one_devices_keeps_the_graph_whole(
    edges: list[tuple[int, int]], ends: list[list[int]]
) -> None:
    """Else it would be done twice, too early or never."""
    assert not shares_of(range(1, 8), edges, ends)
