"""Compiling: checking a plan against the machine, for callers and, with a fallback to virtual devices, for commands."""

from __future__ import annotations

from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from tpplan.core.model import ModelSpec
from tpplan.core.plan import SplitPlan
from tpplan.errors import ExecutionError, RequestError
from tpplan.exec.backends.cpu import VirtualDevices
from tpplan.exec.build import advice, build, mismatches
from tpplan.exec.checks import seconds
from tpplan.exec.cuda.tuning_cache import stored
from tpplan.exec.machine.look import differences, listed, look_at, places_for
from tpplan.exec.machine.transports import Choice, choose
from tpplan.exec.options import BACKENDS, TRANSPORTS_OR_AUTO, check_choice
from tpplan.exec.tuning import Tuning
from tpplan.planfile.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from tpplan.exec.context import TPContext
    from tpplan.exec.machine.look import FoundDevice


#: The default transport of virtual devices: it makes the fewest copies.
_PLAINEST = "events"
#: How long kernels of one process wait for each other by default, in seconds.
_TIMEOUT = 10.0
#: For arguments of :func:`compile`: their types, and the wording of errors about them.
_KINDS: dict[str, tuple[tuple[type, ...], str, str]] = {
    "devices": ((list, tuple, range), "a list with one for each of the plan's", 'a list such as ["cuda:0", "cuda:1"]'),
    "model": ((ModelSpec, str, PathLike), "a model or its directory", "what tpplan.read_model takes or returns"),
    "dtype": ((torch.dtype,), "a torch.dtype", "one such as torch.float16"),
    "tuning": ((Tuning,), "a Tuning", "what tpplan.exec.Tuning makes"),
    "scratch": ((bool,), "True or False", "one of them"),
    "weights_loaded": ((bool,), "True or False", "one of them"),
    "own": ((list, tuple, range), "a list of devices of the plan", "their indices, such as [0, 1]"),
}


def compile(  # noqa: A001 (what it does, and the name that the field uses)
    plan: SplitPlan,
    *,
    backend: str = "auto",
    devices: Sequence[torch.device | str | int] | None = None,
    model: ModelSpec | str | Path | None = None,
    max_rows: int | None = None,
    dtype: torch.dtype | None = None,
    transport: str = "auto",
    tuning: Tuning | None = None,
    scratch: bool = True,
    weights_loaded: bool = False,
    group: ProcessGroup | None = None,
    own: Sequence[int] | None = None,
    timeout: float | timedelta | None = None,
) -> TPContext:
    """Check a plan against the machine and allocate everything that its operations need.

    With ``group`` or ``own``, the plan's devices belong to several processes, each of which makes this call.

    Args:
        plan: the plan to run.
        backend: ``cuda``, ``cpu`` (virtual devices, all in host memory), or ``auto``: CUDA if the machine has the
            devices.
        devices: torch devices, one for each device of the plan, or for each that this process owns; by default
            ``cuda:0``, ``cuda:1``, …, or the current CUDA device if the process owns a single one.
        model: the model to run, or its directory, to check what it decides in the plan, and the plan's ledger. Without
            it, only the workspace is checked.
        max_rows: maximum rows of an operand; by default the plan's ``max_rows``, which it may not exceed.
        dtype: dtype of the activations: float16, bfloat16 or float32, no wider than the plan's, which is the default.
        transport: ``peer``, ``host``, ``events``, or ``auto``: on CUDA devices the first of ``peer``, ``events`` and
            ``host`` that is not ruled out by unverified links or by the environment.
        tuning: thresholds; by default those that ``tpplan devices --links`` has measured on these GPUs, or built-in
            ones.
        scratch: whether to allocate the plan's scratch. Pass False if you compute with tensors from torch's allocator,
            which then uses that part of the budget.
        weights_loaded: whether the weights are on the devices already: only what this call allocates has to be free
            then, else everything that the plan counts.
        group: processes of torch.distributed; by default all processes, if ``own`` is given.
        own: indices of the plan's devices that this process owns; by default, the devices in use are dealt out in
            order, equally many to each process of ``group``.
        timeout: how long a kernel waits for another device before the context fails, and :meth:`TPContext.close` for
            other processes, in seconds or as a timedelta: a millisecond to a day. By default 10 seconds; in several
            processes the time-out of ``group``, at most a minute.

    Returns:
        A context; closing it frees everything.

    Raises:
        PlanError: the plan breaks a rule.
        ExecutionError: the plan does not fit the machine or the arguments; the message lists every difference.
        ModelError: the model cannot be read.
        RequestError: an argument is invalid.
    """
    if type(plan) is not SplitPlan:
        raise RequestError(f"compile takes a plan, this is {type(plan).__name__}", "read its file with tpplan.load")
    _check_kinds({"own": own})
    given: dict[str, object] = {"devices": devices, "model": model, "dtype": dtype, "tuning": tuning}
    given |= {"scratch": scratch, "weights_loaded": weights_loaded}
    check = partial(_check_arguments, plan, backend, transport, given, timeout)
    has_others = own is not None or (group is not None and _has_several(group))
    if not has_others:
        check()
    planned: Any = getattr(torch, plan.model.dtype, None)
    dtype = planned if dtype is None else dtype
    max_rows = plan.request.max_rows if max_rows is None else max_rows
    if has_others:
        from tpplan.exec.processes.compiler import compile_together  # noqa: PLC0415 (which imports this module)

        return compile_together(
            plan,
            group,
            own,
            backend=backend,
            devices=devices,
            model=model,
            max_rows=max_rows,
            dtype=dtype,
            transport=transport,
            tuning=tuning,
            scratch=scratch,
            weights_loaded=weights_loaded,
            timeout=timeout,
            check=check,
        )
    places, problems = places_for(plan, backend, devices)
    problems += mismatches(plan, model, max_rows, dtype)
    used = [i for i, memory in enumerate(plan.memory) if memory.used_bytes and places]
    choice = Choice(transport)
    found: list[FoundDevice | None] = []
    if backend != "cpu":
        found = [look_at(place) if i in used else None for i, place in enumerate(places)]
        problems += differences(plan, found, scratch=scratch, weights_loaded=weights_loaded)
        choice, unfit = choose([places[i] for i in used], transport)
        problems += unfit
    if problems:
        hint = advice(backend)
        if not weights_loaded and any(here and here.held_bytes for here in found):
            hint = f"if this process holds the plan's weights, pass weights_loaded=True; {hint}"
        raise ExecutionError(f"the plan for {plan.model.name} cannot run here:{listed(problems)}", hint)
    made = partial(build, plan, places, max_rows=max_rows, dtype=dtype, scratch=scratch)
    if backend == "cpu":
        chosen = _PLAINEST if transport == "auto" else transport
        return made(VirtualDevices, transport=chosen, tuning=tuning)
    from tpplan.exec.cuda.backend import CudaDevices  # noqa: PLC0415 (needs a driver)

    patience = _TIMEOUT if timeout is None else seconds("timeout", timeout)
    start = partial(CudaDevices, places={i: places[i] for i in used}, transport=choice.transport, timeout=patience)
    tuning, origin = (tuning, "as given") if tuning else stored(len(used), choice.transport)
    has_thresholds = len(used) > 1 and choice.transport != "events"
    notes = (*choice.notes, f"thresholds {origin}") if has_thresholds else choice.notes
    return made(start, transport=choice.transport, direct=choice.direct, waits=choice.waits, tuning=tuning, notes=notes)


def _check_arguments(
    plan: SplitPlan, backend: str, transport: str, others: Mapping[str, object], timeout: object
) -> None:
    """Check the plan and the arguments of :func:`compile`.

    Raises:
        PlanError: the plan breaks a rule.
        RequestError: an argument is invalid.
    """
    verify(plan)
    check_choice("backend", backend, BACKENDS)
    check_choice("transport", transport, TRANSPORTS_OR_AUTO)
    _check_kinds(others)
    if timeout is not None:
        seconds("timeout", timeout)


def _check_kinds(arguments: Mapping[str, object]) -> None:
    """Check the types of arguments that were given.

    Raises:
        RequestError: one is wrong.
    """
    for name, value in arguments.items():
        kinds, expected, example = _KINDS[name]
        if value is not None and not isinstance(value, kinds):
            raise RequestError(f"{name} is {value!r:.40}, expected {expected}", f"pass {example}")


def _has_several(group: ProcessGroup) -> bool:
    """Return whether a group has several processes, which have to agree.

    Raises:
        ExecutionError: this process is not in it.
    """
    from tpplan.exec.group.meeting import Meeting  # noqa: PLC0415 (not for every plan)

    return Meeting(group).count > 1


def usable(plan: SplitPlan, backend: str, note: Callable[[str], None]) -> str:
    """Return a backend as it is asked for, but ``cpu`` for ``auto`` if there are too few GPUs; see :func:`compiler`."""
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto" and here < len(plan.devices):
        note(f"on virtual devices, because the plan has {len(plan.devices)} and this machine {here} CUDA devices")
        return "cpu"
    return backend


def compiler(
    plan: SplitPlan, backend: str, note: Callable[[str], None], *, scratch: bool = True
) -> Callable[[str], TPContext]:
    """Return a function that compiles a plan for a transport.

    Args:
        plan: the plan to compile.
        backend: ``auto``, ``cpu`` or ``cuda``; ``auto`` uses virtual devices if there are too few GPUs.
        note: called with the reason if the devices are virtual.
        scratch: whether to allocate scratch memory.
    """
    backend = usable(plan, backend, note)

    def make(transport: str) -> TPContext:
        try:
            return compile(plan, backend=backend, transport=transport, scratch=scratch)
        except ExecutionError as error:
            error.hint = error.hint.replace('backend="cpu"', "--backend cpu")  # of a command, not of a call
            raise

    return make
