"""One device of a context: its memory, its stream, its RoPE tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.errors import ExecutionError
from tpplan.exec.arena import Arena
from tpplan.exec.arguments import check_dtype, check_type, whole
from tpplan.exec.rope.tables import Rope
from tpplan.sizes import format_bytes
from tpplan.workspace import align

if TYPE_CHECKING:
    from torch import Tensor

    from tpplan.workspace import Areas


class DeviceContext:
    """What a context has on one of the plan's devices.

    Attributes:
        index: into the plan's devices.
        name: of the device in the plan.
        device: torch's.
        arena: all of the device's workspace: the bytes of the plan's ledger, in one block.
        control: of it, flags and slots.
        exchange: of it, the buffer of large exchanges.
    """

    def __init__(self, index: int, name: str, device: torch.device, areas: Areas) -> None:
        """Allocate the device's workspace.

        Raises:
            ExecutionError: there is no room.
        """
        self.index = index
        self.name = name
        self.device = device
        self.arena = Arena(areas.total_bytes, device, f"device {index} ({name})")
        self.control = self.arena.keep(areas.control_bytes)
        self.exchange = self.arena.keep(areas.exchange_bytes)
        self._rope_area = self.arena.keep(areas.rope_bytes)
        self._rope_used = 0
        self._closed = False
        self._tables: dict[tuple[Rope, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return f"<DeviceContext {self.index} ({self.name}) on {self.device}>"

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """What the next operation uses: the current stream of a CUDA device; None on a virtual one."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def begin_scratch(self) -> None:
        """Make all scratch free again; see :class:`tpplan.exec.arena.Arena`."""
        self.arena.begin()

    def scratch(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised ``[rows, columns]`` that is the caller's until :meth:`begin_scratch`.

        Raises:
            ExecutionError: see :meth:`check_scratch`.
        """
        self.check_scratch(rows, columns, dtype)
        return self.arena.slice(rows, columns, dtype)

    def check_scratch(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Make sure that :meth:`scratch` will succeed.

        Raises:
            ExecutionError: an argument is no whole number from 0 or no dtype, or there is too little room, with the
                numbers.
        """
        whole("scratch: rows", rows)
        whole("scratch: columns", columns)
        check_dtype("scratch: dtype", dtype)
        if align(rows * columns * dtype.itemsize) > self.arena.free_bytes:
            self.arena.slice(rows, columns, dtype)  # which says so

    def reserve_scratch(self, size_bytes: int) -> None:
        """Make sure that slices of this size together can follow a :meth:`begin_scratch`.

        Raises:
            ExecutionError: there is less scratch than that, or it is no whole number from 0.
        """
        whole(f"reserve_scratch: sizes[{self.index}]", size_bytes, hint="name bytes for each device")
        self.arena.reserve(size_bytes)

    def check_rope_tables(self, rope: Rope, positions: int, dtype: torch.dtype) -> None:
        """Make sure that :meth:`rope_tables` will succeed.

        Raises:
            ExecutionError: this is no Rope or no number of positions, the plan left too little room for the tables, or
                the context is closed.
        """
        check_type("rope_tables: rope", rope, Rope, "make one with Rope.from_config")
        whole("rope_tables: positions", positions, 1)
        check_dtype("rope_tables: dtype", dtype)
        if self._closed:
            raise ExecutionError(f"device {self.index} ({self.name}): the context is closed", "compile the plan again")
        size = 2 * align(positions * rope.width * dtype.itemsize)
        free = len(self._rope_area) - self._rope_used
        if size > free and (rope, positions, dtype) not in self._tables:
            raise ExecutionError(
                f"device {self.index} ({self.name}): the RoPE tables of {positions} positions take "
                f"{format_bytes(size)}, but the plan left {format_bytes(free)} for them",
                "ask for fewer positions; devices without KV heads have no tables",
            )

    def rope_tables(self, rope: Rope, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the sine and the cosine table, ``[positions, rope.width]`` each, made once and kept.

        Raises:
            ExecutionError: see :meth:`check_rope_tables`.
        """
        self.check_rope_tables(rope, positions, dtype)
        key = (rope, positions, dtype)
        if key not in self._tables:
            size = positions * rope.width * dtype.itemsize
            start = self._rope_used
            sin, cos = (
                self._rope_area[at : at + size].view(dtype).view(positions, rope.width)
                for at in (start, start + align(size))
            )
            rope.fill(sin, cos)
            self._rope_used += 2 * align(size)
            self._tables[key] = sin, cos
        return self._tables[key]

    def close(self) -> None:
        """Let go of the device's memory."""
        self._closed = True
        self.control = self.exchange = self._rope_area = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._tables.clear()
        self.arena.close()
