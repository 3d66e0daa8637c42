"""A process of ``tpplan bench --processes``, with a device of the plan; the first one prints what all measure."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import evolve
from torch import distributed

from tpplan.exec.compiler import compile as compile_plan
from tpplan.exec.tools.bench.between.case import OPERATIONS
from tpplan.exec.tools.bench.between.children import NO_MULTICAST
from tpplan.exec.tools.bench.between.turns import Turns, all_of
from tpplan.exec.tools.bench.run import head
from tpplan.files.codec import unstructure
from tpplan.planfile.codec import load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.exec.context import TPContext

#: Seconds after which a process that is at an operation of one size says where and ends.
_SECONDS = 120
#: What a table says of virtual devices.
_WITHOUT_GPUS = "gloo stands in for NCCL, its windows and torch's symmetric memory, which need GPUs"
#: And after which processes that wait for each other give up.
_PATIENCE = timedelta(seconds=60)


def measure(ctx: TPContext, place: torch.device, counts: Sequence[int], rounds: int) -> None:
    """Measure as one of the processes; the first prints the report, line by line, as it grows."""
    turns = Turns(ctx, place, counts[-1], rounds)
    cases, is_cuda = turns.cases, place.type == "cuda"
    own = head(cases, None, rounds, (), [*cases.explanation.notes, NO_MULTICAST if is_cuda else _WITHOUT_GPUS])
    names = tuple(name for names in all_of(own.devices) for name in names)
    report = evolve(own, devices=names, slice_columns=turns.widths)
    for operation in OPERATIONS:
        for rows in counts:
            faulthandler.dump_traceback_later(_SECONDS, exit=True)
            report = evolve(report, measured=(*report.measured, turns.measured(operation, rows)))
        sys.stdout.write(json.dumps(unstructure(report)) + "\n")
        sys.stdout.flush()
    turns.close()


def main(plan: str, asked: str) -> None:
    """Run in a process that its environment says which one it is, as torch.distributed has it.

    Args:
        plan: path of the plan's file.
        asked: JSON of ``backend``, ``transport``, ``rows`` and ``rounds``.
    """
    options = json.loads(asked)
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    place = torch.device(options["backend"])
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    torch.set_num_threads(1)
    distributed.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=_PATIENCE)
    compiled: Callable[..., TPContext] = partial(compile_plan, load(plan), group=distributed.group.WORLD, scratch=False)
    with compiled(backend=place.type, transport=options["transport"]) as ctx:
        measure(ctx, place, options["rows"], options["rounds"])
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
