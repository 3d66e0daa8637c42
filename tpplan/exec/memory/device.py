"""One device of a context, with its memory, stream and RoPE tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.core.sizes import format_apart
from tpplan.core.workspace import align
from tpplan.errors import ExecutionError
from tpplan.exec.checks import check_dtype, check_type, whole
from tpplan.exec.memory.arena import Arena
from tpplan.exec.rope.tables import Rope

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.core.workspace import Areas


class DeviceContext:
    """The memory and stream of a context on one of the plan's devices.

    Attributes:
        index: index of the device in the plan.
        name: name of the device in the plan.
        device: the torch device.
        arena: the device's whole workspace in one block, with the size in the plan's ledger.
        control: the part of the workspace with flags and slots.
        exchange: the part of the workspace that buffers large exchanges.
    """

    def __init__(self, index: int, name: str, device: torch.device, areas: Areas) -> None:
        """Allocate the device's workspace.

        Raises:
            ExecutionError: there is not enough memory.
        """
        self.index = index
        self.name = name
        self.device = device
        self.arena = Arena(areas.total_bytes, device, f"device {index} ({name})")
        self.control = self.arena.keep(areas.control_bytes)
        self.exchange = self.arena.keep(areas.exchange_bytes)
        self._rope_area = self.arena.keep(areas.rope_bytes)
        self._closed = False
        self._tables: dict[tuple[Rope, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return f"<DeviceContext {self.index} ({self.name}) on {self.device}>"

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that the next operation uses: the current stream of a CUDA device, None on a virtual one."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def begin_scratch(self) -> None:
        """Free all scratch; see :class:`tpplan.exec.memory.arena.Arena`."""
        self.arena.begin()

    def scratch(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised scratch tensor ``[rows, columns]``, valid until :meth:`begin_scratch`.

        Raises:
            ExecutionError: see :meth:`check_scratch`.
        """
        self.check_scratch(rows, columns, dtype)
        return self.arena.slice(rows, columns, dtype)

    def check_scratch(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Check that :meth:`scratch` will succeed.

        Raises:
            ExecutionError: a size is not a non-negative integer, ``dtype`` is not a dtype, or there is too little room;
                the message says how much.
        """
        whole("scratch: rows", rows)
        whole("scratch: columns", columns)
        check_dtype("scratch: dtype", dtype)
        if align(rows * columns * dtype.itemsize) > self.arena.free_bytes:
            self.arena.slice(rows, columns, dtype)  # which raises the error

    def reserve_scratch(self, size_bytes: int) -> None:
        """Check that the device has this many bytes of scratch after a :meth:`begin_scratch`.

        Raises:
            ExecutionError: there is less scratch, or the size is not a non-negative integer.
        """
        whole(f"reserve_scratch: sizes[{self.index}]", size_bytes, hint="name bytes for each device")
        self.arena.reserve(size_bytes)

    def check_rope_tables(self, rope: Rope, positions: int, dtype: torch.dtype) -> None:
        """Check that :meth:`rope_tables` will succeed.

        Raises:
            ExecutionError: ``rope`` is not a Rope, ``positions`` or ``dtype`` is invalid, the plan left too little room
                for the tables, or the context is closed.
        """
        check_type("rope_tables: rope", rope, Rope, "make one with Rope.from_config")
        whole("rope_tables: positions", positions, 1)
        check_dtype("rope_tables: dtype", dtype)
        if self._closed:
            raise ExecutionError(f"device {self.index} ({self.name}): the context is closed", "compile the plan again")
        size = 2 * align(positions * rope.width * dtype.itemsize)
        free = len(self._rope_area) - self._rope_used()
        if size > free and (rope, positions, dtype) not in self._tables:
            takes, left = format_apart(size, free)
            raise ExecutionError(
                f"device {self.index} ({self.name}): the RoPE tables of {positions} positions take {takes}, but the "
                f"plan left {left} for them",
                "ask for fewer positions; devices without KV heads have no tables",
            )

    def rope_tables(self, rope: Rope, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the sine and the cosine table, ``[positions, rope.width]`` each, computed once and cached.

        Raises:
            ExecutionError: see :meth:`check_rope_tables`.
        """
        self.check_rope_tables(rope, positions, dtype)
        key = (rope, positions, dtype)
        if key not in self._tables:
            size = positions * rope.width * dtype.itemsize
            start = self._rope_used()
            sin, cos = (
                self._rope_area[at : at + size].view(dtype).view(positions, rope.width)
                for at in (start, start + align(size))
            )
            rope.fill(sin, cos)
            self._tables[key] = sin, cos
        return self._tables[key]

    def _rope_used(self) -> int:
        """Return the bytes that all tables take."""
        return sum(align(table.nbytes) for tables in self._tables.values() for table in tables)

    def close(self) -> None:
        """Release the device's memory."""
        self._closed = True
        self.control = self.exchange = self._rope_area = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._tables.clear()
        self.arena.close()
