"""Prompts, cut into passes of as many rows as a plan allows. The rows of a pass may belong to several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Final, Self

from attrs import evolve, frozen

from tpplan.axes import Axis
from tpplan.decoder.heads import length_of
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from tpplan.plan import SplitPlan

#: The numbers of a row that is nobody's, behind all others of a pass: its token, and what :func:`numbers_of` says.
NOBODY: Final = 0, 0, -1, 2**31 - 1

#: Characters of what is no token or no prompt.
_SHOWN: Final = 60


@frozen
class Prompt:
    """The next tokens of a sequence.

    Attributes:
        tokens: one or more.
        sequence: its number.
        start: tokens that it has already.
    """

    tokens: Sequence[int]
    sequence: int = 0
    start: int = 0


@frozen
class Stretch:
    """Rows of a pass that are successive tokens of a sequence, or as many of each of several sequences.

    Attributes:
        first: of the rows.
        size: rows of a sequence.
        start: tokens that it has before them.
        sequence: the number of the first sequence.
        count: of sequences; their numbers follow each other, and so do their rows.
        is_last: whether prompts end with them.
        is_full: whether they are of one sequence, and there is no room for more rows in a pass.
    """

    first: int
    size: int
    start: int
    sequence: int
    count: int
    is_last: bool
    is_full: bool

    @property
    def rows(self) -> slice:
        """All of them."""
        return slice(self.first, self.first + self.count * self.size)

    @property
    def ends(self) -> slice:
        """The rows with which prompts end."""
        return slice(self.first + self.size - 1, self.rows.stop if self.is_last else 0, self.size)


@frozen
class Extent:
    """How much a pass has at most.

    Attributes:
        count: of sequences with rows in it.
        longest: rows of a sequence.
        most: tokens of a sequence: its rows and all before them.
    """

    count: int
    longest: int
    most: int

    @classmethod
    def of(cls, stretches: Sequence[Stretch]) -> Self:
        """Return that of the stretches of a pass."""
        ends = [each.start + each.size for each in stretches]
        return cls(sum(each.count for each in stretches), max(each.size for each in stretches), max(ends))


def check(prompts: Sequence[Prompt], plan: SplitPlan) -> None:
    """Make sure that a plan has such sequences, room for the prompts, and their tokens.

    Raises:
        RequestError: it has not, there is no prompt or no token, or a sequence comes twice.
    """
    batch, length = plan.request.batch, length_of(plan.request)
    if not prompts:
        raise RequestError("there are no prompts", "give one or more")
    for i, prompt in enumerate(prompts):
        check_tokens(prompt.tokens, plan)
        count, sequence, start = len(prompt.tokens), prompt.sequence, prompt.start
        if not 0 <= sequence < batch:
            raise RequestError(f"sequence {sequence}, the plan has room for {batch}", "plan with a larger --batch")
        if not count:
            raise RequestError(f"the prompt of sequence {sequence} has no tokens", "give one or more")
        if start < 0 or start + count > length:
            what = f"{count} tokens from position {start}, the plan caches {length} of a sequence"
            raise RequestError(what, "plan with a larger --context")
        if any(before.sequence == sequence for before in prompts[:i]):
            raise RequestError(f"sequence {sequence} has two prompts", "join them")


def check_tokens(tokens: Sequence[int], plan: SplitPlan) -> None:
    """Make sure that these are tokens, and that the model of a plan has them.

    Raises:
        RequestError: they are a text or other numbers, for instance.
    """
    size, hint = plan.split(Axis.VC).size, "give the numbers that the model's own tokenizer makes of a text"
    try:
        listed = list(tokens[:])
    except (TypeError, LookupError):  # of a number or an iterator
        raise RequestError(f"a prompt is {_shown(tokens)}, which is no list of tokens", hint) from None
    for token in listed:
        try:
            number = index(token)
        except TypeError:
            raise RequestError(f"a prompt has {_shown(token)}, which is no token", hint) from None
        if not 0 <= number < size:
            raise RequestError(f"token {number}, the model's are 0 to {size - 1}", "use the model's own tokenizer")


def _shown(given: object) -> str:
    """Return how something is written, but for what is too long."""
    return " ".join(repr(given).split())[:_SHOWN]


def check_step(tokens: Sequence[Tensor], positions: Sequence[Tensor], devices: int, plan: SplitPlan) -> None:
    """Make sure that every device has a token and a position for each of some sequences, and that a plan has as many.

    Raises:
        RequestError: it has not, or there is no sequence.
    """
    if len(tokens) != devices or len(positions) != devices:
        what = f"devices: {devices} in use, {len(tokens)} with tokens, {len(positions)} with positions"
        raise RequestError(what, "give one tensor of each for each device in use")
    count, batch = len(tokens[0]) if tokens[0].dim() else 0, plan.request.batch
    if odd := [list(each.shape) for each in (*tokens, *positions) if each.shape != (count,)]:
        raise RequestError(
            f"tokens or positions of shape {odd[0]}", "give one of each sequence, the same on all devices"
        )
    if not 1 <= count <= batch:
        what = f"tokens of {count} sequences, the plan has room for {batch} at a time"
        raise RequestError(what, "plan with a larger --batch" if count else "give one of each sequence")


def cut(prompts: Sequence[Prompt], most: int) -> Iterator[tuple[list[int], list[Stretch]]]:
    """Yield the tokens of each pass, and whose they are: prompts follow each other, and break where a pass is full.

    Args:
        prompts: of different sequences.
        most: rows of a pass.
    """
    tokens: list[int] = []
    stretches: list[Stretch] = []
    for prompt in prompts:
        read = 0
        while read < len(prompt.tokens):
            first, start = len(tokens), prompt.start + read
            tokens += prompt.tokens[read : read + most - first]
            size = len(tokens) - first
            read += size
            is_last = read == len(prompt.tokens)
            new = Stretch(first, size, start, prompt.sequence, 1, is_last=is_last, is_full=size == most)
            stretches[-1:] = _joined(stretches[-1:], new)
            if len(tokens) == most:
                yield tokens, stretches
                tokens, stretches = [], []
    if tokens:
        yield tokens, stretches


def numbers_of(stretches: Iterable[Stretch]) -> tuple[list[int], list[int], list[int]]:
    """Return of each row its position, the number of its sequence, and how many sequences have rows before it."""
    positions: list[int] = []
    sequences: list[int] = []
    before: list[int] = []
    for each in stretches:
        positions += [*range(each.start, each.start + each.size)] * each.count
        for sequence in range(each.sequence, each.sequence + each.count):
            before += [before[-1] + 1 if before else 0] * each.size
            sequences += [sequence] * each.size
    return positions, sequences, before


def _joined(before: list[Stretch], new: Stretch) -> list[Stretch]:
    """Return one stretch for the latest and a new one if they are alike, so that they are computed at once.

    Only what begins is: what sequences have already may take much memory, of many of them.
    """
    for old in before:
        if new.start == 0 and new == evolve(old, first=old.rows.stop, sequence=old.sequence + old.count, count=1):
            return [evolve(old, count=old.count + 1)]
    return [*before, new]
