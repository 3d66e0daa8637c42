"""Moving tensors: the right bytes, in the right strides, by a way that is verified, whatever the links do."""

from __future__ import annotations

import inspect
import logging
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Mapping
from itertools import permutations
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest
import torch
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from tpplan.errors import DeviceError, ExecutionError
from tpplan.exec import move
from tpplan.exec.link_report import Link, LinkReport, Mechanism, Verdict, routes
from tpplan.exec.move import Mover, gpu_peer_copy, safe_move_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU, *GPU = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1", "cuda:2"))


@define
class Machine:
    """Three GPUs in the CPU's memory. Peer copies between them do what the machine is made to do."""

    verified: frozenset[tuple[int, int]] = frozenset(permutations(range(3), 2))
    peer: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
    log: list[tuple[str, str, bool]] = field(factory=list)
    probes: int = 0

    def count(self) -> int:
        """Return 3."""
        return 3

    def current(self) -> int:
        """Return 1."""
        return 1

    def links(self) -> LinkReport:
        """Return that copies work between those that are verified, and kernels nowhere."""
        self.probes += 1
        every = [Link(*route, self._verdict(*route), "") for route in routes(3)]
        return LinkReport(("a", "b", "c"), tuple(every))

    def _verdict(self, mechanism: Mechanism, source: int, target: int) -> Verdict:
        works = mechanism == Mechanism.COPY and (source, target) in self.verified
        return Verdict.WORKS if works else Verdict.BROKEN

    def put(self, data: torch.Tensor, device: torch.device) -> Placed:
        """Return a tensor on a device of this machine, with the same strides."""
        placed = data.as_subclass(Placed)
        placed.machine, placed.place = self, device
        return placed

    def transfer(self, source: Placed, target: torch.device, *, non_blocking: bool) -> Placed:
        """Copy as torch does, noting it."""
        if source.place == target:
            return source
        self.log.append((str(source.place), str(target), non_blocking))
        data = source.as_subclass(torch.Tensor)
        if CPU in (source.place, target):
            return self.put(data.clone(), target)
        if data.stride() != data.clone().stride() or _is_lazy(data):  # a kernel stores them, which does not work here
            return self.put(torch.zeros_like(data), target)
        return self.put(self.peer(data), target)

    def ways(self) -> list[tuple[str, str]]:
        """Return the noted copies without their flags, and forget them."""
        ways = [(source, target) for source, target, _ in self.log]
        self.log.clear()
        return ways


class Placed(torch.Tensor):
    """A tensor that says that it is on some device of a machine."""

    machine: Machine
    place: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return where it is."""
        return self.place

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Placed:  # type: ignore[override]
        """Copy it elsewhere."""
        return self.machine.transfer(self, device, non_blocking=non_blocking)

    def copy_(self, source: Placed) -> Placed:  # type: ignore[override]
        """Write its bytes."""
        is_plain = self.is_contiguous() and not _is_lazy(self)
        if not is_plain and CPU not in (self.place, source.place) and self.place != source.place:
            pytest.fail("a peer copy into a target that is not contiguous, or lazy, is a kernel's")
        data = self.machine.transfer(source, self.place, non_blocking=False)
        self.as_subclass(torch.Tensor).copy_(data.as_subclass(torch.Tensor))
        return self

    def clone(self) -> Placed:  # type: ignore[override]
        """Copy it on its device."""
        return self.machine.put(self.as_subclass(torch.Tensor).clone(), self.place)

    def contiguous(self) -> Placed:  # type: ignore[override]
        """Copy it on its device if it is not contiguous."""
        return self.machine.put(self.as_subclass(torch.Tensor).contiguous(), self.place)

    def resolve_conj(self) -> Placed:
        """Copy it on its device if its values are to be conjugated."""
        return self.machine.put(self.as_subclass(torch.Tensor).resolve_conj(), self.place)

    def resolve_neg(self) -> Placed:
        """Copy it on its device if its values are to be negated."""
        return self.machine.put(self.as_subclass(torch.Tensor).resolve_neg(), self.place)


def _is_lazy(data: torch.Tensor) -> bool:
    """Tell whether who reads it has to conjugate or negate."""
    return data.is_conj() or data.is_neg()


def _fails(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("CUDA error: peer access is not supported")


def _full(_: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("no room")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor)) and a.dtype == b.dtype


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values, in the order of its indices."""
    plain = x.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.contiguous().flatten().view(torch.uint8)


X = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)

#: Machine, and the ways of a move from GPU 0 to GPU 1.
DIRECT, STAGED = [("cuda:0", "cuda:1")], [("cuda:0", "cpu"), ("cpu", "cuda:1")]
MACHINES: dict[str, tuple[Callable[[], Machine], list[tuple[str, str]]]] = {
    "verified": (Machine, DIRECT),
    "broken, and silently so": (lambda: Machine(frozenset(), torch.zeros_like), STAGED),
    "verified the other way only": (lambda: Machine(frozenset({(1, 0)}), torch.zeros_like), STAGED),
    "verified, but it fails": (lambda: Machine(peer=_fails), DIRECT + STAGED),
}
EACH_MACHINE = pytest.mark.parametrize(("make", "ways"), MACHINES.values(), ids=MACHINES)


@EACH_MACHINE
def test_moves_between_gpus_take_a_way_that_works(make: Callable[[], Machine], ways: list[tuple[str, str]]) -> None:
    """A peer copy is used where its direction is verified, the host's memory where it is not or where it fails."""
    machine = make()
    moved = Mover(machine).move(machine.put(X, GPU[0]), 1, non_blocking=False)
    assert (moved.device, _same(moved, X)) == (GPU[1], True)
    assert machine.ways() == ways


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.permute(2, 0, 1),
    "every other column": lambda x: x[:, :, ::2],
    "every other column, transposed": lambda x: x[:, ::2].permute(2, 0, 1),
    "expanded": lambda x: x[:, :1].expand(2, 5, 4),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "one element": lambda x: x[0, 0, 0],
    "no element": lambda x: x[:, :0].transpose(0, 2),
    "bytes": lambda x: x.to(torch.uint8).t() if x.ndim == 2 else x.to(torch.uint8),
    "fp8": lambda x: x.to(torch.float8_e4m3fn),
    "conjugated": lambda x: torch.complex(x, x + 1).conj(),
    "negated": lambda x: torch.complex(x, x + 1).conj().imag,
}


@EACH_MACHINE
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strides_are_those_that_to_gives(
    view: Callable[[torch.Tensor], torch.Tensor], make: Callable[[], Machine], ways: list[tuple[str, str]]
) -> None:
    """By whichever way, a copy has its values and the strides of torch's own copy: dense permuted ones are kept."""
    machine = make()
    data = view(X)
    moved = Mover(machine).move(machine.put(data, GPU[0]), GPU[1], non_blocking=False)
    assert moved.stride() == data.to("meta").stride()
    assert torch.equal(_bytes(moved), _bytes(data))
    assert machine.ways() == ways


@pytest.mark.parametrize(("source", "target"), [(CPU, GPU[2]), (GPU[2], CPU)])
def test_the_cpu_is_reached_without_asking_the_links(source: torch.device, target: torch.device) -> None:
    """Moves from and to the CPU are one copy, and need no probe."""
    machine = Machine(frozenset())
    moved = Mover(machine).move(machine.put(X, source), target, non_blocking=True)
    assert (moved.device, _same(moved, X)) == (target, True)
    assert machine.log == [(str(source), str(target), True)]
    assert machine.probes == 0


@pytest.mark.parametrize("device", [1, "cuda:1", "cuda", torch.device("cuda", 1), torch.device("cuda")])
def test_a_tensor_that_is_there_stays_the_same_object(device: torch.device | str | int) -> None:
    """Nothing is copied to where it is, however the device is named; ``cuda`` is the current one."""
    machine = Machine()
    x = machine.put(X, GPU[1])
    assert Mover(machine).move(x, device, non_blocking=False) is x
    assert (machine.log, machine.probes) == ([], 0)


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
    assert all(leaf.device == GPU[1] and _same(leaf, X) for leaf in leaves)
    assert machine.log == [(origin, "cuda:1", non_blocking) for origin in ("cpu", "cuda:0", "cpu", "cpu")]
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
    assert _same(moved[first], X)
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


def test_the_host_waits_for_the_first_half_of_a_staged_copy() -> None:
    """Through the host's memory only the second half may be non-blocking: it reads what the first half writes."""
    machine = Machine(frozenset())
    Mover(machine).move(machine.put(X, GPU[0]), 1, non_blocking=True)
    assert machine.log == [("cuda:0", "cpu", False), ("cpu", "cuda:1", True)]


def test_a_failure_is_reported_once_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """After a peer copy has raised, moves in that direction use the host's memory; other directions still try."""
    machine = Machine(peer=_fails)
    mover = Mover(machine)
    for _ in range(3):
        assert _same(mover.move(machine.put(X, GPU[0]), 1, non_blocking=False), X)
    assert machine.ways() == DIRECT + STAGED * 3
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "tpplan.exec.move")
    assert record.getMessage() == (
        "peer copy from cuda:0 to cuda:1 failed, from now on by the host's memory: "
        "CUDA error: peer access is not supported"
    )
    mover.move(machine.put(X, GPU[1]), 0, non_blocking=False)
    assert machine.ways() == [("cuda:1", "cuda:0"), ("cuda:1", "cpu"), ("cpu", "cuda:0")]
    assert len(caplog.records) == 2
    assert not mover.are_peers(0, 1)
    assert mover.are_peers(0, 2)


def test_no_room_is_no_fault_of_the_link(caplog: pytest.LogCaptureFixture) -> None:
    """A device without room is an error, and the link is used again afterwards."""
    machine = Machine(peer=_full)
    mover = Mover(machine)
    with pytest.raises(torch.OutOfMemoryError):
        mover.move(machine.put(X, GPU[0]), 1, non_blocking=False)
    assert machine.ways() == DIRECT
    machine.peer = torch.Tensor.clone
    assert _same(mover.move(machine.put(X, GPU[0]), 1, non_blocking=False), X)
    assert machine.ways() == DIRECT
    assert not caplog.records


@EACH_MACHINE
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, ::2], lambda x: x.transpose(0, 2)], ids=["", "cut", "t"])
@pytest.mark.parametrize("target_view", [lambda x: x, lambda x: x.transpose(0, 2)], ids=["", "t"])
def test_peer_copies_fill_existing_tensors(
    view: Callable[[torch.Tensor], torch.Tensor],
    target_view: Callable[[torch.Tensor], torch.Tensor],
    make: Callable[[], Machine],
    ways: list[tuple[str, str]],
) -> None:
    """The target gets the source's values in its own strides, by a way that works, and its neighbours keep theirs."""
    machine = make()
    source = view(X)
    backing = torch.full((6, *target_view(source).shape), -1.0)
    target = target_view(backing[2])
    assert target.shape == source.shape
    Mover(machine).copy(machine.put(target, GPU[1]), machine.put(source, GPU[0]))
    assert torch.equal(target, source)
    assert (backing[:2] == -1).all()
    assert (backing[3:] == -1).all()
    assert machine.ways()[: len(ways)] == ways


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "conjugated": torch.conj,
    "negated": torch._neg_view,
    "both": lambda x: torch._neg_view(x.conj()),
}


@EACH_MACHINE
@pytest.mark.parametrize("source_view", LAZY.values(), ids=LAZY)
@pytest.mark.parametrize("target_view", LAZY.values(), ids=LAZY)
def test_peer_copies_of_lazy_views_are_of_plain_bytes(
    source_view: Callable[[torch.Tensor], torch.Tensor],
    target_view: Callable[[torch.Tensor], torch.Tensor],
    make: Callable[[], Machine],
    ways: list[tuple[str, str]],
) -> None:
    """What is conjugated or negated by who reads it arrives by a way that works, in targets of the same kind too."""
    machine = make()
    source = source_view(torch.complex(X, X + 1))
    target = target_view(torch.zeros(2, 3, 4, dtype=torch.complex64))
    Mover(machine).copy(machine.put(target, GPU[1]), machine.put(source, GPU[0]))
    assert torch.equal(target.resolve_conj().resolve_neg(), source.resolve_conj().resolve_neg())
    assert machine.ways()[: len(ways)] == ways


def test_peer_copies_fill_parameters() -> None:
    """A parameter that needs gradients is filled in place, without a record of it."""
    machine = Machine()
    data = torch.zeros_like(X)
    target = machine.put(data, GPU[1]).requires_grad_()
    Mover(machine).copy(target, machine.put(X, GPU[0]))
    assert torch.equal(data, X)
    assert target.grad_fn is None
    assert machine.ways() == DIRECT


@pytest.mark.parametrize("source", [X[0], X.to(torch.float16), X[None]])
def test_peer_copies_of_another_shape_or_dtype_are_refused(source: torch.Tensor) -> None:
    """Nothing is written, broadcast or converted when source and target differ."""
    target = torch.zeros_like(X)
    with pytest.raises(ExecutionError, match=r"cannot copy torch\.float\d\d \(.*\) into torch\.float32 \(2, 3, 4\)"):
        gpu_peer_copy(target, source)
    assert not target.any()


def test_the_round_trip_needs_both_directions() -> None:
    """``test_gpu_peer_copy`` is about both directions, any order, and true of a GPU and itself."""
    mover = Mover(Machine(frozenset({(0, 1), (1, 0), (0, 2)})))
    assert mover.are_peers(0, 1)
    assert mover.are_peers("cuda:1", torch.device("cuda", 0))
    assert not mover.are_peers(0, 2)
    assert not mover.are_peers(2, "cuda:0")
    assert mover.are_peers(2, 2)


def test_the_links_are_asked_once() -> None:
    """However many tensors move, there is one report."""
    machine = Machine()
    mover = Mover(machine)
    mover.move([machine.put(X, GPU[0])] * 5, 1, non_blocking=False)
    mover.copy(machine.put(X.clone(), GPU[2]), machine.put(X, GPU[0]))
    assert mover.are_peers(1, 2)
    assert machine.probes == 1


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu7", "'gpu7' names no device"),
        (-1, "-1 names no device"),
        (None, "None names no device"),
        (1.5, "1.5 names no device"),
        (True, "True names no device"),
        ([0], r"\[0\] names no device"),
        (3, "there is no GPU 3: this process sees 3"),
        ("cuda:9", "there is no GPU 9: this process sees 3"),
    ],
)
def test_unknown_devices_are_refused(device: Any, message: str) -> None:
    """A device that is not there is an error with its name, before anything is copied."""
    machine = Machine()
    with pytest.raises(DeviceError, match=message):
        Mover(machine).move(machine.put(X, GPU[0]), device, non_blocking=False)
    assert machine.log == []


def test_without_gpus_tensors_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions work on a machine without GPUs, and say what is missing where they need one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    moved = safe_move_tensor({"x": X, "y": (None, X)}, "cpu")
    assert moved["x"] is X
    target = torch.zeros_like(X)
    gpu_peer_copy(target, X)
    assert torch.equal(target, X)
    for device in (0, "cuda"):
        with pytest.raises(DeviceError, match="there is no GPU 0: this process sees 0"):
            safe_move_tensor(X, device)
    with pytest.raises(DeviceError, match="'cpu' is no GPU"):
        move.test_gpu_peer_copy("cpu", "cpu")


def test_names_and_arguments_are_the_originals() -> None:
    """Calls that worked with the original work here, and pytest does not take ``test_gpu_peer_copy`` for a test."""
    signatures = {name: list(inspect.signature(getattr(move, name)).parameters) for name in move.__all__}
    assert signatures == {
        "safe_move_tensor": ["tensor", "device", "non_blocking"],
        "test_gpu_peer_copy": ["device_a", "device_b"],
        "gpu_peer_copy": ["target", "source"],
    }
    assert safe_move_tensor(X, "meta", True).is_meta
    assert not getattr(move.test_gpu_peer_copy, "__test__", True)


@st.composite
def _histories(
    draw: st.DrawFn,
) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]], Sequence[tuple[int, int]]]:
    pairs = st.sampled_from(list(permutations(range(3), 2)))
    verified, failing = (draw(st.frozensets(pairs)) for _ in range(2))
    return verified, failing, draw(st.lists(pairs, max_size=12))


@given(_histories())
def test_any_history_of_moves_is_right(
    history: tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]], Sequence[tuple[int, int]]],
) -> None:
    """Whichever links are verified or fail, all moves are right; unverified links are never used, failed ones once."""
    verified, failing, moves = history

    def peer(data: torch.Tensor) -> torch.Tensor:
        pair = tuple(int(place[-1]) for place in machine.log[-1][:2])
        assert pair in verified
        return _fails(data) if pair in failing else data.clone()

    machine = Machine(verified, peer)
    mover = Mover(machine)
    for source, target in moves:
        assert _same(mover.move(machine.put(X, GPU[source]), target, non_blocking=False), X)
    tried = [pair for pair in machine.ways() if "cpu" not in pair]
    for source, target in set(moves):
        times = moves.count((source, target)) if (source, target) not in failing else 1
        assert tried.count((f"cuda:{source}", f"cuda:{target}")) == (times if (source, target) in verified else 0)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_real_gpus_move_and_leave_device_and_streams(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Between real GPUs values and strides arrive, also after work on streams of the caller's, which stay current."""
    streams = [torch.cuda.Stream(gpu) for gpu in GPU[:2]]  # type: ignore[no-untyped-call]
    with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
        for source, target in permutations(GPU[:2], 2):
            torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call] # on the current device
            data = view(X.to(source) + 1)
            moved = safe_move_tensor((data,), target)[0]
            assert (moved.device, moved.stride()) == (target, data.to("meta").stride())
            assert torch.equal(_bytes(moved.cpu()), _bytes(data.cpu()))
            filled = torch.zeros_like(moved)
            gpu_peer_copy(filled, data)
            assert torch.equal(_bytes(filled.cpu()), _bytes(data.cpu()))
        assert [torch.cuda.current_stream(gpu) for gpu in GPU[:2]] == streams
        assert torch.cuda.current_device() == 1
