"""Draw docs/images/all-reduce.svg again: a program, its streams as lanes, and who waits for whom.

Run it as ``python examples/draw_program.py``; a test tells when the committed picture is no longer what it draws.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tpplan.exec.programs.lower import Route, lower
from tpplan.exec.programs.operation import all_reduce
from tpplan.exec.programs.program import (
    CALLER,
    INPUT,
    OUTPUT,
    RESIDUAL,
    SLOT,
    Await,
    Copy,
    Exchange,
    Record,
    Signal,
    Stream,
    Sum,
    Wait,
    flat,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.exec.programs.program import Event, Program, Step, View

PICTURE = Path(__file__).parents[1] / "docs/images/all-reduce.svg"

_EDGE, _TOP, _ROW, _BOX = 24, 132, 38, 26
_GAP = 44
_WIDE = {CALLER: 118}
_WIDEST = 254

_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",Arial,sans-serif;font-size:12px;fill:#1f2328}
.title{font-size:18px;font-weight:600}.head{font-size:13px;font-weight:600}.dim{fill:#59636e}.mid{text-anchor:middle}
.card{fill:#ffffff;stroke:#d1d9e0}.lane{stroke:#d1d9e0}.kernel{fill:#f1eefa;stroke:#b3a6e0}
.data{fill:#6f5bb5}.inked{fill:#ffffff}.sync{fill:#ffffff;stroke:#59636e}
.event{stroke:#59636e;fill:none}.flag{stroke:#b3510b;fill:none;stroke-width:1.6}
.tip-event{fill:#59636e}.tip-flag{fill:#b3510b}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9aa4ae}.card{fill:#0d1117;stroke:#3d444d}
.lane{stroke:#3d444d}.kernel{fill:#1b1730;stroke:#6f5bb5}.inked{fill:#ffffff}.sync{fill:#0d1117;stroke:#9aa4ae}
.event{stroke:#9aa4ae}.flag{stroke:#ff9b52}.tip-event{fill:#9aa4ae}.tip-flag{fill:#ff9b52}}
"""


class Box(NamedTuple):
    """A command, placed.

    Attributes:
        step: the command.
        row: counted from 0; later than everything that it waits for.
    """

    step: Step | Record | Wait
    row: int


class Arrow(NamedTuple):
    """A command that waits for another.

    Attributes:
        first: which, by its position.
        then: that waits.
        kind: ``event`` or ``flag``.
    """

    first: int
    then: int
    kind: str


def placed(program: Program) -> tuple[list[Box], list[Arrow]]:
    """Return every command as low as what it waits for demands, and what that is."""
    steps = list(flat(program))
    records: dict[Event, int] = {}
    raised = {step.flag: i for i, step in enumerate(steps) if isinstance(step, Signal)}
    arrows = []
    for i, step in enumerate(steps):
        if isinstance(step, Record):
            records[step.event] = i
        elif isinstance(step, Wait):
            arrows.append(Arrow(records[step.event], i, "event"))
        elif isinstance(step, Await) and not step.behind:  # credit was given by earlier programs
            arrows.append(Arrow(raised[step.flag], i, "flag"))
    rows = [0] * len(steps)
    for _ in steps:  # longest paths
        last: dict[Stream, int] = {}
        for i, step in enumerate(steps):
            rows[i] = max(rows[i], last.get(step.stream, -1) + 1)
            last[step.stream] = rows[i]
        for first, then, _kind in arrows:
            rows[then] = max(rows[then], rows[first] + 1)
    return [Box(step, row) for step, row in zip(steps, rows, strict=True)], arrows


def label(step: Step | Record | Wait) -> str:
    """Return a command in few words."""
    if isinstance(step, Copy):
        return f"{_name(step.target)} = {_name(step.source)}"
    if isinstance(step, Sum):
        return f"{_name(step.target)} = {' + '.join(map(_name, step.sources))}"
    if isinstance(step, Signal):
        return f"signal {step.flag}"
    if isinstance(step, Await):
        return f"await {step.flag}, {step.behind} messages ago" if step.behind else f"await {step.flag}"
    return f"{'record' if isinstance(step, Record) else 'wait'} {step.event.name}"


def _name(view: View) -> str:
    buffer = view.buffer
    if buffer.role == SLOT and buffer.queue:
        return f"slot {buffer.queue.sender}→{buffer.queue.place}"
    return {INPUT: "input", OUTPUT: "output", RESIDUAL: "residual"}[buffer.role]


def draw(program: Program, title: str, about: str) -> str:
    """Draw a program; equal programs, equal bytes."""
    boxes, arrows = placed(program)
    lanes = _lanes(program)
    right = max(x + wide for x, wide in lanes.values()) + _EDGE
    bottom = _TOP + _ROW * (max(box.row for box in boxes) + 1)
    height = bottom + 62
    size = f'viewBox="0 0 {right} {height}" width="{right}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="program-title program-about">',
        f'<title id="program-title">{escape(title)}</title>',
        f'<desc id="program-about">{escape(about)}</desc>',
        f"<style>{_STYLE}</style>",
        f"<defs>{_tip('event')}{_tip('flag')}</defs>",
        f'<rect class="card" x="0.5" y="0.5" width="{right - 1}" height="{height - 1}" rx="8"/>',
        _text(_EDGE, 38, title, "title"),
        _text(_EDGE, 60, about, "dim"),
        *_heads(lanes, bottom),
        *_kernels(program, boxes, lanes),
        *(_box(box, lanes) for box in boxes),
        *(_arrow(arrow, boxes, lanes) for arrow in arrows),
        *_legend(bottom + 34),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lanes(program: Program) -> dict[Stream, tuple[int, int]]:
    """Return where each stream's lane begins and how wide it is: each device's caller outside, the kernels inside."""
    streams = {step.stream for step in flat(program)}
    devices = sorted({stream.device for stream in streams})
    half = len(devices) // 2
    order = [
        stream
        for i, device in enumerate(devices)
        for stream in sorted((s for s in streams if s.device == device), reverse=i >= half)
    ]
    lanes, x = {}, _EDGE
    for stream in order:
        wide = _WIDE.get(stream.kind, _WIDEST)
        lanes[stream] = (x, wide)
        x += wide + _GAP
    return lanes


def _heads(lanes: dict[Stream, tuple[int, int]], bottom: int) -> Iterator[str]:
    for stream, (x, wide) in lanes.items():
        middle = x + wide // 2
        name = "caller's stream" if stream.kind == CALLER else "tpplan's stream"
        yield _text(middle, _TOP - 40, name, "head mid")
        yield _text(middle, _TOP - 24, f"on device {stream.device}", "dim mid")
        yield f'<path class="lane" d="M{middle} {_TOP - 14}V{bottom}"/>'


def _kernels(program: Program, boxes: list[Box], lanes: dict[Stream, tuple[int, int]]) -> Iterator[str]:
    """Yield a frame around the steps of each kernel."""
    for command in program.commands:
        if isinstance(command, Exchange):
            rows = [box.row for box in boxes if box.step in command.steps]
            x, wide = lanes[command.stream]
            top, high = _TOP + _ROW * min(rows) - 7, _ROW * (max(rows) - min(rows)) + _BOX + 14
            yield f'<rect class="kernel" x="{x - 8}" y="{top}" width="{wide + 16}" height="{high}" rx="6"/>'


def _box(box: Box, lanes: dict[Stream, tuple[int, int]]) -> str:
    x, wide = lanes[box.step.stream]
    y = _TOP + _ROW * box.row
    data = isinstance(box.step, Copy | Sum)
    text = _text(x + wide // 2, y + 17, label(box.step), "mid inked" if data else "mid")
    shape = f'x="{x}" y="{y}" width="{wide}" height="{_BOX}" rx="4"'
    return f'<rect class="{"data" if data else "sync"}" {shape}><title>{escape(str(box.step))}</title></rect>{text}'


def _arrow(arrow: Arrow, boxes: list[Box], lanes: dict[Stream, tuple[int, int]]) -> str:
    """Draw from the side of one box to the side of another."""
    first, then = boxes[arrow.first], boxes[arrow.then]
    (from_x, from_wide), (x, wide) = lanes[first.step.stream], lanes[then.step.stream]
    from_y, y = (_TOP + _ROW * box.row + _BOX // 2 for box in (first, then))
    start, end = (from_x + from_wide, x - 2) if from_x < x else (from_x, x + wide + 2)
    middle = (start + end) // 2
    line = f"M{start} {from_y}C{middle} {from_y} {middle} {y} {end} {y}"
    return f'<path class="{arrow.kind}" d="{line}" marker-end="url(#tip-{arrow.kind})"/>'


def _legend(y: int) -> Iterator[str]:
    yield f'<rect class="kernel" x="{_EDGE}" y="{y - 14}" width="28" height="16" rx="4"/>'
    yield _text(_EDGE + 38, y, "one kernel", "dim")
    events = (152, "event", "event: waits until the other stream is there")
    flags = (468, "flag", "flag: polls memory until the other kernel raises it")
    for x, kind, text in (events, flags):
        yield f'<path class="{kind}" d="M{x} {y - 4}h28" marker-end="url(#tip-{kind})"/>'
        yield _text(x + 38, y, text, "dim")


def _tip(kind: str) -> str:
    """Return the head of an arrow."""
    shape = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
    head = f'<path class="tip-{kind}" d="M0 0 8 4 0 8z"/>'
    return f'<marker id="tip-{kind}" markerUnits="userSpaceOnUse" {shape}>{head}</marker>'


def _text(x: int, y: int, text: str, classes: str) -> str:
    return f'<text x="{x}" y="{y}" class="{classes}">{escape(text)}</text>'


def picture() -> str:
    """Draw the sum of two devices by slots."""
    program = lower(all_reduce(8192, (0, 1), (0, 1), residual=True), Route("peer", small=True))
    about = "Each device writes its part into the other's slot, and adds up both parts in the same order."
    return draw(program, "all_reduce of two devices by slots of peers", about)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE.relative_to(Path(__file__).parents[1]))
