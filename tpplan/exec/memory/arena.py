"""A memory arena on one device, allocated once and handed out in slices."""

from __future__ import annotations

import torch

from tpplan.core.workspace import ALIGNMENT, align
from tpplan.errors import ExecutionError
from tpplan.exec.memory.pinning import refused


class Arena:
    """One block of memory on a device: permanent areas at the front, scratch behind them.

    All tensors start at a multiple of 64 bytes and are uninitialised. A permanent area is never handed out again. A
    scratch slice is valid until :meth:`begin`: later slices may alias it, and a caller that still uses it has to order
    the two. Not thread-safe.

    The block is a single allocation of exactly ``size_bytes``, made by the constructor. It is freed by :meth:`close`,
    or with the last tensor that was handed out, if that is later.

    Attributes:
        size_bytes: size of the block.
        name: name of the device in errors.
    """

    def __init__(self, size_bytes: int, device: torch.device | str, name: str, *, pinned: bool = False) -> None:
        """Allocate the block.

        Args:
            size_bytes: a multiple of 64, as every workspace of a ledger is.
            device: device to allocate on.
            name: name of the device in errors.
            pinned: whether to page-lock the memory, on the CPU only; needs a driver.

        Raises:
            ExecutionError: the size is not a multiple of 64, or the allocation fails.
        """
        if size_bytes % ALIGNMENT:
            raise ExecutionError(
                f"{name}: an arena of {size_bytes} bytes is no multiple of {ALIGNMENT}", f"use {align(size_bytes)}"
            )
        try:
            with torch.inference_mode(mode=False):  # else slices could not be written outside inference mode
                block = torch.empty(size_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        except (RuntimeError, AssertionError) as error:  # AssertionError if torch is built without the device's backend
            if pinned:
                what = f"{name}: cannot allocate {size_bytes} pinned bytes on {device}"
                raise refused(what, size_bytes, error, "plan with a smaller --max-rows") from error
            reason = str(error).partition("\n")[0]
            raise ExecutionError(
                f"{name}: cannot allocate {size_bytes} bytes on {device}: {reason}",
                "free memory there, or plan with a smaller budget",
            ) from error
        self.size_bytes = size_bytes
        self.name = name
        self._block: torch.Tensor | None = block
        self._kept = self._used = 0  # both multiples of the alignment

    @property
    def free_bytes(self) -> int:
        """Bytes left until the next :meth:`begin`; 0 if closed."""
        return 0 if self._block is None else self.size_bytes - self._used

    def keep(self, size_bytes: int) -> torch.Tensor:
        """Return a permanent area: a uint8 tensor of ``size_bytes`` that no later slice aliases.

        Raises:
            ExecutionError: scratch is in use, there is too little room, or the arena is closed.
        """
        if self._used > self._kept:
            in_use = self._used - self._kept
            raise ExecutionError(
                f"{self.name}: {size_bytes} bytes to keep, but {in_use} bytes behind the kept ones are sliced already",
                "keep areas before the first slice, or call begin()",
            )
        area = self._take(size_bytes)
        self._kept = self._used
        return area

    def begin(self) -> None:
        """Free all scratch, even if slices of it are still held.

        Raises:
            ExecutionError: the arena is closed.
        """
        self._open()
        self._used = self._kept

    def slice(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor ``[rows, columns]`` of scratch, valid until the next :meth:`begin`.

        Raises:
            ExecutionError: a size is negative, there is too little room, or the arena is closed.
        """
        if min(rows, columns) < 0:
            raise ExecutionError(f"{self.name}: a slice cannot have {rows} rows of {columns}", "sizes are 0 or more")
        return self._take(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)

    def reserve(self, size_bytes: int) -> None:
        """Check that slices of ``size_bytes`` in total, each rounded up to 64 bytes, fit after a :meth:`begin`.

        Raises:
            ExecutionError: the total scratch is smaller, or the arena is closed.
        """
        self._open()
        if size_bytes > self.size_bytes - self._kept:
            raise self._exhausted(size_bytes, self.size_bytes - self._kept)

    def close(self) -> None:
        """Release the block; may be called more than once."""
        self._block = None

    def _open(self) -> torch.Tensor:
        if self._block is None:
            raise ExecutionError(f"{self.name}: the arena is closed", "compile the plan again")
        return self._block

    def _take(self, size_bytes: int) -> torch.Tensor:
        block, start = self._open(), self._used
        if align(size_bytes) > self.free_bytes:
            raise self._exhausted(size_bytes, self.free_bytes)
        self._used += align(size_bytes)
        return block[start : start + size_bytes]

    def _exhausted(self, asked: int, free: int) -> ExecutionError:
        """Return the error for too little room; it suggests begin() only if the total scratch is large enough."""
        scratch, hint = self.size_bytes - self._kept, "plan with more --max-rows"
        if not scratch:  # compiled with scratch=False: every plan has scratch
            hint = "leave out scratch=False when the plan is compiled"
        elif align(asked) <= scratch:
            hint = f"call begin() before slices that may take the place of older ones, or {hint}"
        return ExecutionError(f"{self.name}: {asked} bytes asked for, {free} free of {scratch} of scratch", hint)
