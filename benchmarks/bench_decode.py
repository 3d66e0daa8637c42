"""Measure a whole model on the GPUs of this machine, by plans of several kinds, beside others that run it.

Makes a checkpoint of random weights of the shape of Llama-3.1-8B, and runs it by every plan in a process of its own, so
that memory, first tokens and failures are each one's own. Figures are printed as they come, then as a table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from typing import TYPE_CHECKING

import torch
from attrs import asdict, evolve

import tpplan
from benchmarks.common.rows import ROOT
from benchmarks.decode import profiling
from benchmarks.decode.checkpoint import checkpoint_of
from benchmarks.decode.options import numbers_of, parser_of
from benchmarks.decode.order import CUTS, Order
from benchmarks.decode.rows import HEAD, Row, cells, compared, reason
from tpplan.exec.tools.bench.between import children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PEERS = ("nccl", "transformers", "torch")
#: Peers in processes of their own, a process for each GPU.
MODULES = {"transformers": "transformers_run", "torch": "compiled_run"}
_PROFILE = "--profile"


def runs(order: Order, gpus: Sequence[int], cuts: Sequence[str], peers: Sequence[str]) -> Iterator[tuple[str, Order]]:
    """Yield what to run, each in processes of its own: the program's name, and its order.

    Args:
        order: what is the same in all orders.
        gpus: numbers of GPUs.
        cuts: ways to cut the model, of which a single GPU takes only the first.
        peers: other programs to run, of :data:`PEERS`.
    """
    for count in gpus:
        for cut in cuts if count > 1 else cuts[:1]:
            over_nccl = "nccl" in peers and order.backend == "cuda" and count > 1 and CUTS[cut][1] == "reduce"
            yield "tpplan", evolve(order, gpus=count, cut=cut, nccl=over_nccl)
        for peer in (peer for peer in MODULES if peer in peers):
            yield peer, evolve(order, gpus=count)


def execute(who: str, order: Order, seconds: float, tell: Callable[[Row], None]) -> None:
    """Run a program in processes of its own, and tell its rows; if it fails or hangs, one of them says why.

    Args:
        who: ``tpplan``, or one of :data:`MODULES`.
        order: what to measure.
        seconds: time after which the program is ended.
        tell: called with each row.
    """

    def line(text: str) -> None:
        row = Row.parse(text)
        if row:
            tell(row)

    module, processes = MODULES.get(who, "run"), order.gpus if who in MODULES else 1
    command = [sys.executable, "-m", f"benchmarks.decode.{module}", evolve(order, started=time.time()).dump()]
    failure = children.run(command, processes, seconds, line, ROOT)
    if failure:
        print(f"{who} on {order.gpus}: {failure}", file=sys.stderr, flush=True)
        like = Row(gpus=order.gpus, cut=order.cut, who=who, what="the whole run", value=None)
        tell(evolve(like, note=f"failed: {reason(failure)}"))


def main() -> None:
    """Measure, print figures as they come, and in the end all of them; or profile."""
    words = sys.argv[1:]
    if _PROFILE in words:
        profiling.main([word for word in words if word != _PROFILE])
    wanted = _parse()
    machine = f"{_devices(wanted.backend)}, torch {torch.__version__}, Python {platform.python_version()}"
    notes = sys.stderr if wanted.json else sys.stdout
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(compared(row, rows))
        print(cells(rows[-1]), file=notes, flush=True)

    began = time.perf_counter()
    with checkpoint_of(wanted) as directory:
        made = time.perf_counter() - began
        model = tpplan.read_model(directory)
        ready = f"checkpoint of {model.layer_count} layers, {model.weight_format}, ready after {made:.1f} s"
        print(f"{machine}; {ready}. {children.NO_MULTICAST}\n", file=notes)
        print(HEAD, file=notes, flush=True)
        order = Order(
            directory=str(directory),
            gpus=1,
            backend=wanted.backend,
            transport=wanted.transport,
            batches=wanted.batches,
            tokens=wanted.tokens,
            prefill=wanted.prefill,
            max_rows=wanted.max_rows,
            eager=wanted.eager,
            devices=wanted.devices,
        )
        for who, one in runs(order, wanted.gpus, wanted.cuts, wanted.peers):
            execute(who, one, wanted.watchdog, tell)
    if wanted.json:
        about = {"machine": machine, "layers": model.layer_count, "weights": model.weight_format}
        print(json.dumps({**about, "rows": [*map(asdict, rows)]}))
    sys.exit(any(row.value is None for row in rows))


def _devices(backend: str) -> str:
    """Return the devices of this machine, without taking any memory of them."""
    if backend == "cpu":
        return "virtual devices"
    return f"{torch.cuda.device_count()} CUDA devices"


def _names(*known: str) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(name for name in text.split(",") if name)
        if not set(found) <= set(known):
            message = f"expected some of {', '.join(known)}"
            raise argparse.ArgumentTypeError(message)
        return found

    return names


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--cuts", type=_names(*CUTS), default=tuple(CUTS), help="of the model, of even,uneven,gather (default all)")
    add("--batches", type=numbers_of, default=(1, 8, 64), help="sequences that decode together (default 1,8,64)")
    add("--tokens", type=int, default=64, help="steps that are timed (default 64)")
    add("--prefill", type=int, default=4096, help="tokens of the long prompt (default 4096)")
    add("--peers", type=_names(*PEERS), help=f"others, of {','.join(PEERS)} (default all, nccl if quantised)")
    add("--eager", action="store_true", help="read prompts once more, without graphs where they have some")
    add("--devices", default="", help="a devices file with measured speeds: predictions stand beside what is measured")
    add("--json", action="store_true", help="print one JSON document; the table goes to standard error")
    add(_PROFILE, action="store_true", help=f"tell where the time goes instead; options: {_PROFILE} --help")
    wanted = parser.parse_args()
    if wanted.devices:
        try:
            known = len(tpplan.parse_devices(wanted.devices))
        except tpplan.TpplanError as error:
            parser.error(str(error))
        if known < max(wanted.gpus):
            parser.error(f"{wanted.devices} has {known} devices, fewer than the {max(wanted.gpus)} of --gpus")
    if wanted.peers is None:
        wanted.peers = PEERS[:1] if wanted.quantise else PEERS  # the others need packages for codes, or have no kernels
    return wanted


if __name__ == "__main__":
    children.end_when_asked()
    main()
