"""Views of plans as tests read them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from tpplan.files.codec import unstructure
from tpplan.render.blocks import lines_of
from tpplan.render.screen import write
from tpplan.render.text import PLAIN_COLUMNS
from tpplan.reports.show import show_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.plan import SplitPlan


def data(plan: SplitPlan) -> dict[str, Any]:
    """Return what the views of a plan read."""
    return unstructure(show_report(plan))


def plain(blocks: Sequence[Any], encoding: str = "utf-8", columns: int = PLAIN_COLUMNS) -> str:
    """Return a view as it is written off a terminal, or on a screen of some columns without colours."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="", write_through=True)
    write(lines_of(blocks, columns), stream)
    return stream.buffer.getvalue().decode(encoding)
