"""What tests of graphs share: what stands for them, what cannot be in them, and prompts to read by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from tests.decoder_cases import LENGTH
from tests.watching import Watching
from tpplan.decoder import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

#: What makes a host wait for a device, or copies from the host to it.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "is_nonzero", "equal"}


class Calls(Watching):
    """Keeps the names of what torch is told to do.

    Attributes:
        names: without the namespace.
    """

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Keep a name, and do what it says; of what is made of other operations, keep theirs."""
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class FakeGraph:
    """Stands for a graph where there are none: what is captured is done at once, and by each replay but the first."""

    def __init__(self, again: Callable[[], object], beside: Callable[[], FakeGraph]) -> None:
        """Replay by doing the first of these; the second makes another graph that shares its memory."""
        self._again = again
        self.beside = beside
        self._replays = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def replay(self) -> None:
        """Do what was captured, unless that is done already."""
        self._replays += 1
        if self._replays > 1:
            self._again()


def mixtures(random: Random, batch: int, rows: int) -> Iterator[list[Prompt]]:
    """Yield prompts of up to three passes: of some of the sequences, which go on where they were, and begin anew twice.

    Some of them fill a pass.
    """
    for _ in range(3):
        done = [0] * batch
        while sum(done) < batch * LENGTH // 2:
            left, some = random.choice([1, random.randint(1, rows), rows, random.randint(1, 3 * rows)]), []
            for i in random.sample(range(batch), batch):
                size = min(random.choice([0, 1, rows // 2, 2 * rows]), left, LENGTH - done[i])
                if size:
                    some.append(Prompt([random.randrange(200) for _ in range(size)], i, done[i]))
                    done[i], left = done[i] + size, left - size
            if some:
                yield some
