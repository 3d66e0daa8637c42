"""What was measured of a whole model: rows, that processes tell each other as lines and people as a table."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from attrs import asdict, evolve, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: What a line with a row starts with, among whatever libraries print.
_MARK = "row: "


@frozen(kw_only=True)
class Row:
    """One figure.

    Attributes:
        gpus: how many.
        cut: ``even``, ``uneven`` or ``gather``; of others than tpplan, ``even``.
        who: ``tpplan``, ``NCCL``, ``transformers`` or ``torch``, which may say how it sums.
        what: is measured.
        value: None if it failed.
        unit: unit of the value.
        limit: what it cannot go beyond, or was planned; None if there is no such figure.
        note: how it came about, or why it failed.
        tokens: tokens that were generated for the first sequence, if any.
    """

    gpus: int
    cut: str
    who: str
    what: str
    value: float | None
    unit: str = ""
    limit: float | None = None
    note: str = ""
    tokens: tuple[int, ...] = ()

    @property
    def share(self) -> float | None:
        """The value as a share of the limit."""
        return self.value / self.limit if self.limit and self.value is not None else None

    def line(self) -> str:
        """Return a line of it, for :meth:`parse`."""
        return _MARK + json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Self | None:
        """Return the row that a line is, or None."""
        if not line.startswith(_MARK):
            return None
        data = json.loads(line.removeprefix(_MARK))
        return cls(**{**data, "tokens": tuple(data["tokens"])})


HEAD = "| GPUs | cut | who | what | value | unit | limit | share | note |\n|---|---|---|---|---|---|---|---|---|"


def cells(row: Row) -> str:
    """Return a row as one of a table."""
    value = "failed" if row.value is None else _number(row.value)
    limit = "" if row.limit is None else _number(row.limit)
    share = "" if row.share is None else f"{row.share:.0%}"
    return (
        f"| {row.gpus} | {row.cut} | {row.who} | {row.what} | {value} | {row.unit} | {limit} | {share} | {row.note} |"
    )


def compared(row: Row, first: Sequence[Row]) -> Row:
    """Say in a row's note how many tokens are those of the first row of the same kind, where both have some."""
    other = next((each for each in first if each.what == row.what and each.tokens), None)
    if not row.tokens or other is None:
        return row
    pairs = zip(row.tokens, other.tokens, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(row.tokens), len(other.tokens)))
    note = f"first {same} of {len(row.tokens)} tokens as {other.who} on {other.gpus}"
    return evolve(row, note=f"{row.note}; {note}" if row.note else note)


class Part:
    """Measures the parts of a run one by one; a part that fails becomes a row that says so, and the others go on."""

    def __init__(self, tell: Callable[[Row], None], *, gpus: int, cut: str, who: str) -> None:
        """Name the run.

        Args:
            tell: called with each row that the run has measured.
            gpus: number of GPUs.
            cut: how the model is cut.
            who: name of the program that runs.
        """
        self._tell = tell
        self._like = Row(gpus=gpus, cut=cut, who=who, what="", value=None)

    def row(
        self,
        what: str,
        value: float | None,
        unit: str = "",
        *,
        limit: float | None = None,
        note: str = "",
        tokens: Sequence[int] = (),
    ) -> None:
        """Tell a row of the run."""
        like, generated = self._like, tuple(tokens)
        self._tell(evolve(like, what=what, value=value, unit=unit, limit=limit, note=note, tokens=generated))

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Tell a row if what follows fails."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (of whatever library)
            self.row(what, None, note=f"failed: {reason(f'{type(error).__name__}: {error}')}")


def reason(text: str, length: int = 300) -> str:
    """Return a text as it fits into a cell of a table: on one line, the end of it if it is long."""
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= length else f"… {flat[-length:]}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # noqa: PLR2004
