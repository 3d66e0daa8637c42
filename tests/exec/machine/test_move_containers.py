"""Moving containers of tensors: their structure is kept, or they are refused."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, Self

import pytest
import torch

from tests.exec.machine.move_cases import CPU, GPU, Machine, Placed, X, same_tensors
from tpplan.errors import ExecutionError
from tpplan.exec.machine.move import Mover, safe_move_tensor


class Weights(NamedTuple):
    """A named tuple."""

    up: Any
    down: Any


@pytest.mark.parametrize("non_blocking", [False, True])
def test_containers_keep_their_structure_and_the_flag(non_blocking: bool) -> None:
    """Tensors in tuples, named tuples, lists and dicts of any depth move, all by the same flag; all else stays."""
    machine = Machine()
    on = {device: machine.put(X, device) for device in (CPU, *GPU)}
    default: defaultdict[str, Any] = defaultdict(list, {"k": on[CPU]})
    tree = (on[CPU], [Weights(on[GPU[0]], None), "text", default], OrderedDict(b=(on[CPU],), a=[]), on[GPU[1]], 7)
    moved: Any = Mover(machine).move(tree, 1, non_blocking=non_blocking)

    assert [type(item) for item in moved] == [Placed, list, OrderedDict, Placed, int]
    (x, (weights, text, defaults), ordered, there, seven) = moved
    assert (type(weights), weights.down, text, seven) == (Weights, None, "text", 7)
    assert (defaults["new"], list(ordered), ordered["a"]) == ([], ["b", "a"], [])
    assert there is on[GPU[1]]
    leaves = [x, weights.up, defaults["k"], ordered["b"][0]]
    assert all(leaf.device == GPU[1] and same_tensors(leaf, X) for leaf in leaves)
    copies = [(origin, "cuda:1", non_blocking) for origin in ("cpu", "cuda:0", "cpu", "cpu")]
    assert machine.log == [*copies, ("cuda:1", "wait", False)]
    assert default["k"] is on[CPU]
    assert "new" not in default


class Named(list[Any]):
    """A list that is made from anything but its items."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Pair(tuple[Any, ...]):
    """A tuple that is made from anything but its items."""

    __slots__ = ()

    def __new__(cls, a: object, b: object = None) -> Self:
        """Make it of two items."""
        return super().__new__(cls, (a, b))


class Fields(OrderedDict[str, Any]):
    """A dict that is not to be updated, as the outputs of models."""

    def update(self, *_: object) -> None:  # type: ignore[override]
        """Refuse."""
        raise TypeError("not so")


class Unlike(list[Any]):
    """A list that cannot be copied."""

    def __new__(cls, _items: list[Any]) -> Self:
        """Make it of items, which there must be."""
        return super().__new__(cls)


def _named(x: object) -> Named:
    named = Named("weights")
    named.append(x)
    return named


CONTAINERS: dict[str, tuple[Callable[[Any], Any], type]] = {
    "UserDict": (lambda x: UserDict(k=x), UserDict),
    "UserList": (lambda x: UserList([x]), UserList),
    "deque": (lambda x: deque([x], maxlen=1), deque),
    "list of its own": (_named, Named),
    "tuple of its own": (Pair, Pair),
    "dict of its own": (lambda x: Fields(k=x), Fields),
    "ChainMap": (lambda x: ChainMap({"k": x}, {"k": None}), dict),
    "read-only": (lambda x: MappingProxyType({"k": x}), dict),
    "torch's": (lambda x: torch.return_types.max((x, x)), torch.return_types.max),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("make", "kind"), CONTAINERS.values(), ids=CONTAINERS)
def test_other_containers_are_not_returned_unmoved(make: Callable[[Any], Any], kind: Any, inside: bool) -> None:
    """Whatever is a sequence or mapping by its class is moved, inside others too, and the original is left alone."""
    machine = Machine()
    tree: Any = make(machine.put(X, CPU))
    moved: Any = Mover(machine).move([tree] if inside else tree, 1, non_blocking=False)
    moved = moved[0] if inside else moved
    first = "k" if isinstance(tree, Mapping) else 0
    assert type(moved) is kind
    assert len(moved) == len(tree)
    assert (moved[first].device, tree[first].device) == (GPU[1], CPU)
    assert same_tensors(moved[first], X)
    assert getattr(moved, "name", None) == getattr(tree, "name", None)
    assert getattr(moved, "maxlen", None) == getattr(tree, "maxlen", None)


@pytest.mark.parametrize("tree", [None, "text", 7, {X}, SimpleNamespace(x=X), iter([X])])
def test_what_holds_no_tensors_is_refused(tree: Any) -> None:
    """What is neither a tensor nor a known container is an error, and not returned as if it were moved."""
    with pytest.raises(ExecutionError, match=f"{type(tree).__name__} is neither a tensor nor a container of tensors"):
        safe_move_tensor(tree, "cpu")


def test_a_container_that_cannot_be_copied_is_refused() -> None:
    """A class that makes objects in a way of its own is an error with its name, and the original is left alone."""
    tree = Unlike([X])
    with pytest.raises(ExecutionError, match=r"Unlike cannot be copied: .*items"):
        safe_move_tensor([tree], "meta")
    assert tree[0] is X
