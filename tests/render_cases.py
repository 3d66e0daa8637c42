"""Views of plans as tests read them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from tpplan.files.codec import unstructure
from tpplan.render.screen import write
from tpplan.reports.show import show_report

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan


def data(plan: SplitPlan) -> dict[str, Any]:
    """Return what the views of a plan read."""
    return unstructure(show_report(plan))


def plain(lines: list[Any], encoding: str = "utf-8") -> str:
    """Return lines as they are written off a terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="", write_through=True)
    write(lines, stream)
    return stream.buffer.getvalue().decode(encoding)
