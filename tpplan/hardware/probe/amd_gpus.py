"""AMD's GPUs: what its two programs tell alike, and which of them is asked."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from tpplan.core.sizes import format_bytes
from tpplan.errors import DeviceError
from tpplan.hardware.file import Link
from tpplan.hardware.probe import program
from tpplan.hardware.probe.report import DeviceReport, GpuProcess, NoDriverError, SeenGpu, plain_name, seen
from tpplan.hardware.probe.visible import select

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tpplan.hardware.file import LinkKind
    from tpplan.hardware.probe.system_memory import SystemMemory

_LONGEST = 4 * 2**20

#: Nothing to plan for.
_SMALLEST = 2**30

#: Graphics inside processors, by the instruction set that they compute with, and by name where it is not told.
_INTEGRATED = frozenset(
    {
        *("gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037"),
        *("gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    }
)
_INTEGRATED_NAME = re.compile(
    r"radeon(\(tm\))? graphics|\b[0-9]{3}m\b|\b80[0-9]0s\b|raven|picasso|renoir|cezanne|rembrandt|raphael|phoenix|strix"
    r"|granite ridge|krackan|mendocino",
    re.IGNORECASE,
)


@frozen(kw_only=True)
class Card:
    """What a program tells of a GPU; sizes are 0 and texts empty where it does not.

    Attributes:
        key: how the program names it, such as ``card0``.
        number: its number there.
        node: its number in the kernel's topology, by which HIP numbers GPUs.
        name: of the product.
        unique: unique number, as ``0x`` and hexadecimal digits.
        bus: PCI address.
        target: instruction set, such as ``gfx1100``.
        vram: bytes of its own, or set aside for it.
        vram_used: of those.
        gtt: bytes of the system's memory that it may take.
        gtt_used: of those.
    """

    key: str
    number: int
    node: int
    name: str
    unique: str
    bus: str
    target: str
    vram: int
    vram_used: int
    gtt: int = 0
    gtt_used: int = 0

    @property
    def integrated(self) -> bool:
        """Whether it is part of a processor and shares the system's memory."""
        return self.target.partition(":")[0] in _INTEGRATED or bool(
            not self.target and _INTEGRATED_NAME.search(self.name)
        )

    @property
    def told(self) -> str:
        """How notes name it."""
        return f"{self.key} ({plain_name(self.name)})"


def run(path: str, name: str, arguments: Sequence[str], until: float) -> str:
    """Return the JSON that a program writes.

    Args:
        path: of the program.
        name: its name, for errors.
        arguments: of the command.
        until: see :func:`tpplan.hardware.probe.program.deadline`.

    Raises:
        DeviceError: it does not run or answer.
        NoDriverError: it writes no JSON.
    """
    answer = program.run(path, name, arguments, until)
    if not re.search(r"[{[]", answer.text):  # without an amdgpu driver both complain and may still exit with 0
        raise NoDriverError(f"AMD: {name} shows no GPU (exit {answer.code}): {answer.last_line}")
    return answer.text


def parse(text: str, name: str) -> Any:
    """Return the JSON that a program wrote; lines of warnings may precede it.

    Raises:
        DeviceError: it is too long, or no JSON.
    """
    hint = f"see what {name} itself says"
    if len(text) > _LONGEST:
        raise DeviceError(f"{name} wrote {len(text)} characters, expected at most {_LONGEST}", hint)
    start = re.search(r"^\s*[{[]", text, re.MULTILINE)
    try:
        return json.loads(text[start.start() if start else 0 :])
    except (ValueError, RecursionError) as error:
        raise DeviceError(f"{name} wrote no JSON: {text.strip()[:80]!r}", hint) from error


def report(
    cards: Sequence[Card],
    name: str,
    environ: Mapping[str, str],
    system: SystemMemory | None,
    *,
    driver: str,
    links: Mapping[tuple[int, int], LinkKind],
    processes: Sequence[GpuProcess],
) -> DeviceReport:
    """Return the GPUs that HIP would show to a program.

    Args:
        cards: all that the program shows.
        name: of the program.
        environ: of the process, for ``ROCR_VISIBLE_DEVICES``, ``HIP_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES``.
        system: memory of the machine, where it is known.
        driver: its version.
        links: kinds of connections, by the numbers of two cards.
        processes: other programs that use the GPUs, with the numbers of cards.

    Raises:
        DeviceError: the variables leave no GPU.
        NoDriverError: there is none to plan for.
    """
    notes: list[str] = []
    in_order = sorted(cards, key=lambda card: (card.node, card.number))  # as HIP numbers them
    found = [(card, gpu) for card in in_order if (gpu := _device(card, system, notes))]
    if not found:
        raise NoDriverError(f"AMD: {'; '.join([f'{name} shows no GPU to plan for', *notes])}")
    chosen = _visible(found, environ, notes)
    for card, gpu in chosen:
        if card.integrated:
            left = f"{format_bytes(gpu.budget_bytes)} of {format_bytes(gpu.memory_bytes)}"
            notes.append(f"{card.told} shares the system's memory, and may take {left} now")
    index = {card.number: i for i, (card, _) in enumerate(chosen)}
    joined = {tuple(sorted((index.get(a, -1), index.get(b, -1)))): kind for (a, b), kind in links.items()}
    return DeviceReport(
        driver=f"AMD {driver}".strip(),
        devices=tuple(gpu for _, gpu in chosen),
        links=tuple(Link(first=a, second=b, kind=kind) for (a, b), kind in sorted(joined.items()) if -1 < a < b),
        processes=tuple(
            sorted(
                (evolve(p, device=index.get(p.device, -1)) for p in processes if p.device < 0 or p.device in index),
                key=lambda p: (-p.used_bytes, p.pid),
            )
        ),
        notes=tuple(notes),
    )


def _device(card: Card, system: SystemMemory | None, notes: list[str]) -> SeenGpu | None:
    """Return one card's part of the report, unless nobody can plan with it.

    HIP gives a program the memory of one kind: a card's own, or, for graphics inside a processor, what is set aside for
    it or the system's memory that it may take (GTT), whichever is more (Linux 6.10 and later).
    """
    memory, used = card.vram, card.vram_used
    if card.integrated and card.gtt > card.vram:
        memory, used = card.gtt, card.gtt_used
        if system:
            used = max(used, memory - system.usable_bytes)
    if memory < _SMALLEST:
        tells = f"has {format_bytes(memory)} of its own" if memory else "does not tell its memory"
        notes.append(f"{card.told} is left out: it {tells}")
        return None
    return seen(
        name=card.name,
        uuid=f"GPU-{card.unique[2:]}" if card.unique.startswith("0x") else "",
        bus=card.bus,
        memory=memory,
        used=used,
    )


def _visible(
    gpus: list[tuple[Card, SeenGpu]], environ: Mapping[str, str], notes: list[str]
) -> list[tuple[Card, SeenGpu]]:
    """Return the cards that the variables show: ROCm's runtime chooses, then HIP of what is left.

    Without any variable, graphics inside a processor is left out beside a card: it would slow the others down.
    """
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
    variables = [variable for variable in ("ROCR_VISIBLE_DEVICES", hip) if variable in environ]
    for variable in variables:
        value = environ[variable]
        named = {gpu.uuid: (card, gpu) for card, gpu in gpus if gpu.uuid}
        chosen, ended = select(value, gpus, named, mixed=True)
        if not chosen:
            reason = f", which ends at {ended}" if value.strip() else ""
            hint = "unset it, or write ordinals such as 0,1"
            raise DeviceError(f"{variable} is {value[:60]!r}{reason}: it hides all {len(gpus)} GPUs", hint)
        if ended:
            notes.append(f"{variable} is {value[:60]!r}: everything from {ended} on is ignored")
        gpus = chosen
    cards = [str(i) for i, (card, _) in enumerate(gpus) if not card.integrated]
    if variables or not cards or len(cards) == len(gpus):
        return gpus
    every = ",".join(map(str, range(len(gpus))))
    notes += [
        f"{card.told}, with {format_bytes(gpu.memory_bytes)}, is left out: it is part of the processor; "
        f"HIP_VISIBLE_DEVICES={every} takes it in, HIP_VISIBLE_DEVICES={','.join(cards)} hides it from programs too"
        for card, gpu in gpus
        if card.integrated
    ]
    return [(card, gpu) for card, gpu in gpus if not card.integrated]
