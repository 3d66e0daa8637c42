"""Prompts, and cutting them into passes with rows of one or more sequences, each as large as the plan allows."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import product
from operator import index
from typing import TYPE_CHECKING, Final, Self, TypeVar

from attrs import evolve, frozen

from tpplan.core.axes import Axis
from tpplan.core.sizes import counted
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from tpplan.core.plan import Request, SplitPlan

_Value = TypeVar("_Value")

#: Numbers of a padding row at the end of a pass, see :func:`tpplan.decoder.forward.numbers_of`.
NOBODY: Final = 0, 0, -1, 2**31 - 1, 0

#: Stands for the next token where the largest logit is NaN or infinite: devices go on, and the host raises an error.
NO_TOKEN: Final = -1

#: Maximum characters of an invalid token or prompt in an error.
_SHOWN: Final = 60
#: Characters of a hash of tokens.
_HASH: Final = 12


@frozen
class Prompt:
    """The next tokens of a sequence.

    Attributes:
        tokens: one or more tokens.
        sequence: index of the sequence.
        start: number of tokens already in its cache.
    """

    tokens: Sequence[int]
    sequence: int = 0
    start: int = 0


@frozen
class PromptSlice:
    """Rows of a pass that are successive tokens of a sequence, or equally many of each of several sequences.

    Attributes:
        first: index of the first row.
        size: rows per sequence.
        start: number of tokens that each sequence has before these rows.
        sequence: index of the first sequence.
        count: number of sequences, which have consecutive indices and consecutive rows.
        is_last: whether their prompts end with these rows.
        is_full: whether rows of a single sequence fill the pass.
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
        """All rows of the slice."""
        return slice(self.first, self.first + self.count * self.size)

    @property
    def ends(self) -> slice:
        """The last row of each prompt; none if the prompts go on."""
        return slice(self.first + self.size - 1, self.rows.stop if self.is_last else 0, self.size)


@frozen
class PassShape:
    """Upper bounds on the sizes of a prefill pass, on which the shapes of its tensors depend.

    Attributes:
        count: number of sequences with rows in the pass.
        longest: most rows of a sequence.
        most: most tokens of a sequence, its rows and all before them.
        rows: rows of the pass.
        goes_on: whether the sequence has tokens before these rows, if they are sure to be of one; else None.
    """

    count: int
    longest: int
    most: int
    rows: int
    goes_on: bool | None = None

    @classmethod
    def of(cls, prompt_slices: Sequence[PromptSlice]) -> Self:
        """Return the shape of a pass of these prompt slices."""
        longest, most = max(each.size for each in prompt_slices), max(each.start + each.size for each in prompt_slices)
        return cls(sum(each.count for each in prompt_slices), longest, most, prompt_slices[-1].rows.stop)

    @classmethod
    def of_any(cls, rows: int, batch: int, length: int) -> Self:
        """Return the shape of any pass of ``rows`` rows, of ``batch`` sequences of at most ``length`` tokens."""
        return cls(batch, min(rows, length), length, rows)

    @classmethod
    def of_one(cls, rows: int, length: int, *, goes_on: bool) -> Self:
        """Return the shape of any pass of one sequence, of at most ``length`` tokens; see :attr:`goes_on`."""
        longest = min(rows, length)
        return cls(1, longest, length if goes_on else longest, rows, goes_on)

    def beside(self, length: int) -> int:
        """Return the number of rows with ``length`` earlier tokens of each sequence beside them."""
        return self.count * length + self.rows


def length_of(request: Request) -> int:
    """Return the maximum tokens of a sequence of a request: the cache's tokens divided by the batch.

    Raises:
        RequestError: the request is for a cache of another kind than the decoder's: a pool that sequences share, or
            whole contexts in layers with a sliding window.
    """
    each = request.cache.tokens // request.batch
    if request.context:
        what = f"the plan shares {request.cache.tokens} tokens between {request.batch} sequences of up to"
        hint = f"plan without --tokens, with --context {each} for a cache of this size"
        raise RequestError(f"{what} {request.context}; the decoder gives each an equal part", hint)
    if request.full_window:
        what = "the plan keeps all tokens in layers with a sliding window; the decoder keeps those of the window"
        raise RequestError(what, "plan without --full-window")
    return each


def check(prompts: Sequence[Prompt], plan: SplitPlan) -> None:
    """Check that prompts have sequences and tokens of the plan's model, and fit its cache.

    Raises:
        RequestError: they do not, there are no prompts, one has no tokens, or two have the same sequence.
    """
    batch, length = plan.request.batch, length_of(plan.request)
    for i, prompt in enumerate(_listed("prompts", prompts)):
        if not isinstance(prompt, Prompt):
            raise RequestError(f"prompts[{i}] is {shown(prompt)}, which is no Prompt", "write Prompt(tokens, sequence)")
        count = len(check_tokens(prompt.tokens, plan))
        sequence, start = whole("a sequence", prompt.sequence), whole("the start of a prompt", prompt.start)
        if not 0 <= sequence < batch:
            raise RequestError(f"sequence {sequence}, the plan has room for {batch}", "plan with a larger --batch")
        if not count:
            raise RequestError(f"the prompt of sequence {sequence} has no tokens", "give one or more")
        if start < 0 or start + count > length:
            what = f"{counted(count, 'token')} from position {start}, the plan caches {length} of a sequence"
            raise RequestError(what, "plan with a larger --context")
        if any(before.sequence == sequence for before in prompts[:i]):
            raise RequestError(f"sequence {sequence} has two prompts", "join them")


def check_sequences(sequences: int, plan: SplitPlan) -> None:
    """Check that a plan has room for so many sequences that decode together.

    Raises:
        RequestError: it has not, or they are no positive whole number.
    """
    if not 1 <= whole("the number of sequences", sequences) <= plan.request.batch:
        what = f"steps of {counted(sequences, 'sequence')}, the plan has room for {plan.request.batch} at a time"
        raise RequestError(what, "plan with a larger --batch" if sequences > 0 else "take one or more")


def prompts_of(prompts: Sequence[Sequence[int]], plan: SplitPlan) -> list[list[int]]:
    """Return the tokens of each of several prompts, of which each has one at least.

    Raises:
        RequestError: they are no lists of tokens of the model, there are none, or one is empty.
    """
    found = [check_tokens(prompt, plan) for prompt in _listed("prompts", prompts)]
    if not all(found):
        raise RequestError("a prompt has no tokens", "a text continues one token at least")
    return found


def check_tokens(tokens: Sequence[int], plan: SplitPlan) -> list[int]:
    """Return a list of tokens, all in the vocabulary of a plan's model.

    Raises:
        RequestError: they are not, such as a string or numbers out of range.
    """
    size, hint = plan.split(Axis.VOCAB).size, "give the numbers that the model's own tokenizer makes of a text"
    try:
        listed = list(tokens[:])
    except (TypeError, LookupError):  # such as from a number or an iterator
        raise RequestError(f"a prompt is {shown(tokens)}, which is no list of tokens", hint) from None
    if {*map(type, listed)} <= {int} and 0 <= min(listed, default=0) <= max(listed, default=0) < size:
        return listed  # the usual case, in a fifth of the time
    for i, token in enumerate(listed):
        try:
            listed[i] = number = whole("a token", token)
        except RequestError:
            raise RequestError(f"a prompt has {shown(token)}, which is no token", hint) from None
        if not 0 <= number < size:
            raise RequestError(f"token {number}, the model's are 0 to {size - 1}", "use the model's own tokenizer")
    return listed


def whole(what: str, value: object) -> int:
    """Return an argument that is a whole number, also one of a library such as numpy.

    Args:
        what: name of the argument in the error.
        value: its value.

    Raises:
        RequestError: it is none, such as 2.0 or True.
    """
    try:
        if type(value) is not bool:
            return index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestError(f"{what} is {shown(value)}, expected a whole number", "give an int")


def check_flags(**flags: object) -> None:
    """Check that arguments are bools.

    Raises:
        RequestError: one is none, such as 1 or None.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise RequestError(f"{name} is {shown(value)}, which is neither True nor False", "give one of these")


def shown(value: object) -> str:
    """Return the representation of an object, shortened."""
    return " ".join(repr(value).split())[:_SHOWN]


def _listed(what: str, values: Sequence[_Value]) -> Sequence[_Value]:
    """Return a sequence of one or more values.

    Raises:
        RequestError: it is none, such as None or an iterator, or empty.
    """
    try:
        count = len(values)
        values[:0]
    except (TypeError, LookupError):
        raise RequestError(f"{what} is {shown(values)}, which is no list", "give a list of one or more") from None
    if not count:
        raise RequestError(f"there are no {what}", "give one or more")
    return values


def facts_of(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Return how many prompts there are and what they are, by name, for processes to compare."""
    facts = {"prompts": str(len(prompts))}
    for i, prompt in enumerate(prompts):
        tokens = [*map(index, prompt.tokens)]
        hashed = sha256(str(tokens).encode()).hexdigest()[:_HASH]
        facts[f"prompts[{i}]"] = f"{len(tokens)} tokens ({hashed}) from {prompt.start} of sequence {prompt.sequence}"
    return facts


def check_step(tokens: Sequence[Tensor], positions: Sequence[Tensor], span: int, devices: int, plan: SplitPlan) -> None:
    """Check that every device has a token and a position of each sequence, and that they fit the plan's batch.

    Raises:
        RequestError: they do not, or there are no sequences; or the span is larger than the cache of a sequence.
    """
    for what, each in (("tokens", tokens), ("positions", positions)):
        if not isinstance(each, (list, tuple)) or not all(hasattr(one, "dim") for one in each):
            raise RequestError(
                f"{what} is {shown(each)}, expected a list of tensors", "give one for each device in use"
            )
    length = length_of(plan.request)
    if not 0 <= whole("the span", span) <= length:
        what = f"a span of {span} places, the plan caches {length} of a sequence"
        raise RequestError(what, "give a number above the largest position, or leave it out")
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


def cut(prompts: Sequence[Prompt], most: int) -> Iterator[tuple[list[int], list[PromptSlice]]]:
    """Yield the tokens and prompt slices of each pass; prompts follow each other, and are cut where a pass is full.

    Args:
        prompts: prompts of different sequences.
        most: maximum rows of a pass.
    """
    tokens: list[int] = []
    prompt_slices: list[PromptSlice] = []
    for prompt in prompts:
        read = 0
        while read < len(prompt.tokens):
            first, start = len(tokens), prompt.start + read
            tokens += prompt.tokens[read : read + most - first]
            size = len(tokens) - first
            read += size
            is_last = read == len(prompt.tokens)
            new = PromptSlice(first, size, start, prompt.sequence, 1, is_last=is_last, is_full=size == most)
            prompt_slices[-1:] = _joined(prompt_slices[-1:], new)
            if len(tokens) == most:
                yield tokens, prompt_slices
                tokens, prompt_slices = [], []
    if tokens:
        yield tokens, prompt_slices


def pieces(
    prompt_slices: Iterable[PromptSlice], most: int, whole: Callable[[PromptSlice], bool]
) -> Iterator[PromptSlice]:
    """Yield parts of prompt slices of at most ``most`` rows each, in order; some are to stay whole."""
    for each in prompt_slices:
        if whole(each):
            yield each
        elif each.size <= most:
            step = most // each.size
            for i in range(0, each.count, step):
                first, count = each.first + i * each.size, min(step, each.count - i)
                yield evolve(each, first=first, sequence=each.sequence + i, count=count)
        else:
            for i, at in product(range(each.count), range(0, each.size, most)):
                size, first = min(most, each.size - at), each.first + i * each.size + at
                ends = each.is_last and at + size == each.size
                start, sequence = each.start + at, each.sequence + i
                yield PromptSlice(first, size, start, sequence, 1, is_last=ends, is_full=False)


def _joined(before: list[PromptSlice], new: PromptSlice) -> list[PromptSlice]:
    """Join a new slice to the latest one if they are alike, so that they are computed at once.

    Only slices at the start of sequences are joined: the tokens that many sequences already have may take too much
    memory.
    """
    for old in before:
        if new.start == 0 and new == evolve(old, first=old.rows.stop, sequence=old.sequence + old.count, count=1):
            return [evolve(old, count=old.count + 1)]
    return [*before, new]
