"""What processes tell each other: plain data, of which nothing is run, and one error in all for everything else."""

from __future__ import annotations

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tpplan
from tests.contexts import UNEVEN, context
from tests.exec.processes.threads import ThreadMeeting
from tpplan.errors import ExecutionError
from tpplan.exec.group.telling import MOST_BYTES, NotPlainError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable


ONLY = "processes tell each other plain data only: "


class Pair(NamedTuple):
    """A tuple that would arrive as another type."""

    first: int
    second: int


class Text(str):
    """A text that would arrive as another type."""

    __slots__ = ()


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40) + 1, 10**40 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
)
KEYS = LEAVES | st.tuples(LEAVES, LEAVES)
PLAIN = st.recursive(
    LEAVES,
    lambda inside: st.lists(inside) | st.lists(inside).map(tuple) | st.dictionaries(KEYS, inside),
    max_leaves=20,
)


def kinds(value: Any) -> Any:
    """Return the types of a value and of all values within it."""
    inside = [*value.items()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return type(value), [kinds(each) for each in inside]


@given(PLAIN)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    """Values and types are the same, those of keys too."""
    found = decode(encode(value))
    assert found == value
    assert kinds(found) == kinds(value)


def test_not_a_number_arrives() -> None:
    """It is no JSON, and a float."""
    assert math.isnan(decode(encode(math.nan)))


@given(st.binary() | PLAIN.map(encode).flatmap(lambda data: st.integers(0, len(data)).map(lambda end: data[:end])))
def test_any_bytes_are_plain_data_or_refused(data: bytes) -> None:
    """Nothing else is raised, whatever a peer sends."""
    with suppress(NotPlainError):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(print),
        b'{"tuple": 1}',
        b'{"list": []}',
        b'{"dict": [[[], 1]]}',
        b'{"dict": [1]}',
        b'{"bytes": "%"}',
        b'{"bytes": []}',
        b'{"tuple": [], "bytes": ""}',
        b"{}",
        b"[" * 100_000,
        b"[" * 40 + b"]" * 40,
        b"1" * 100,
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    """A pickle among them."""
    with pytest.raises(NotPlainError):
        decode(data)


def cyclic() -> list[Any]:
    """Return a list that has itself."""
    found: list[Any] = []
    found.append(found)
    return found


#: What is no plain data, and what all processes are told of it.
REFUSED: dict[str, tuple[Any, str]] = {
    "tensor": ([torch.zeros(1)], "has an object of type torch.Tensor"),
    "set": ({1}, "has an object of type builtins.set"),
    "named tuple": (Pair(1, 2), f"has an object of type {__name__}.Pair"),
    "subclass": ({"a": Text("b")}, f"has an object of type {__name__}.Text"),
    "function": (print, "has an object of type builtins.builtin_function_or_method"),
    "number": (10**40, "has a whole number of more than 40 digits"),
    "cycle": (cyclic(), "has more than 32 levels"),
    "size": ("a" * MOST_BYTES, f"has {MOST_BYTES + 2} bytes, the most is {MOST_BYTES}"),
}


def told(call: Callable[[ThreadMeeting], object], count: int = 3) -> list[object]:
    """Return what each of several processes gets, or its error."""
    barrier, board = Barrier(count, timeout=20), dict[int, bytes]()

    def guarded(process: int) -> object:
        try:
            return call(ThreadMeeting(process, count, barrier, board))
        except ExecutionError as error:
            return str(error)

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(guarded, range(count))]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_data_is_one_error_in_all(name: str) -> None:
    """It names the process and the type; a single process is refused the same."""
    value, problem = REFUSED[name]
    first, *others = told(lambda meeting: meeting.tell(value if meeting.process == 1 else 1))
    assert str(first).startswith(
        f"processes tell each other plain data only: process 1 tells what {problem}\nhint: plain"
    )
    assert others == [first, first]
    with context(UNEVEN, "events") as ctx, pytest.raises(ExecutionError, match="process 0 tells what has"):
        ctx.tell(value)


@pytest.mark.parametrize("size", [0, 900, 961, 5000, 10**6])
def test_data_of_any_size_arrives(size: int) -> None:
    """In one message or two, and of another size in each process."""
    found = told(lambda meeting: meeting.tell(bytes([meeting.process]) * size * meeting.process))
    assert found == [[bytes([i]) * size * i for i in range(3)]] * 3


def test_other_versions_are_one_error_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything that another version may say otherwise."""
    version = tpplan.__version__

    class Fake(ThreadMeeting):
        def _exchanged(self, mine: bytes) -> list[bytes]:
            if self.process == 2:
                mine = mine[:8] + b"9.9".ljust(48, b"\0") + mine[56:]
            return super()._exchanged(mine)

    monkeypatch.setitem(globals(), "ThreadMeeting", Fake)
    found = told(lambda meeting: meeting.tell(1))
    what = f"the processes have different versions of tpplan: 9.9 in process 2, {version} in all others"
    assert found == [f"{what}\nhint: install the same one"] * 3


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (pickle.dumps(print).ljust(64, b"\0"), "has bytes of another program"),
        (b"", "has bytes of another program"),
        ("size", f"has {2**40} bytes, the most is {MOST_BYTES}"),
        ("none", f"has 0 bytes, the most is {MOST_BYTES}"),
        ("noise", "has bytes that are no plain data"),
    ],
)
def test_other_bytes_are_one_error_in_all(data: bytes | str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a process sends in place of a message."""

    class Fake(ThreadMeeting):
        def _exchanged(self, mine: bytes) -> list[bytes]:
            if self.process == 0:
                if isinstance(data, bytes):
                    mine = data.ljust(len(mine), b"\0")
                else:
                    size = {"size": 2**40, "none": 0, "noise": 9}[data]
                    mine = mine[:56] + size.to_bytes(8, "little", signed=True) + b"\xff" * (len(mine) - 64)
            return super()._exchanged(mine)

    monkeypatch.setitem(globals(), "ThreadMeeting", Fake)
    found = told(lambda meeting: meeting.tell(1))
    assert str(found[0]).startswith(
        f"processes tell each other plain data only: process 0 tells what {problem}\nhint: let"
    )
    assert found[1:] == [found[0]] * 2


def test_plain_data_of_another_shape_is_one_error_in_all() -> None:
    """As from a process that is in another call."""
    found = told(lambda meeting: meeting.tell_and_read([1] if meeting.process else {}, lambda each: each[0] + 1))
    assert str(found[0]).startswith(f"{ONLY}process 0 tells what is not what this call exchanges\nhint: ")
    assert found[1:] == [found[0]] * 2
