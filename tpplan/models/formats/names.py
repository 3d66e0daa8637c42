"""Lists of modules in quantisation configs: names, parts of names, wildcards and regular expressions.

Expressions come from untrusted files. They become an automaton that is walked along all its paths at once, as in K.
Thompson's "Regular Expression Search Algorithm" (1968), so that no expression takes exponential time. What an automaton
cannot do (back references, looking around elsewhere than at the beginning, word boundaries) is refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


#: The most states that the expressions of a list may have together, and the most visits to them for a model.
_MOST_STATES: Final = 20_000
_MOST_VISITS: Final = 2_000_000
_MOST_REPEATS: Final = 1000

#: What is part of names of modules; a dot matches only that.
_ALL: Final = frozenset(map(chr, range(32, 127)))
_DIGITS: Final = frozenset("0123456789")
_WORDS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_") | _DIGITS
_SPACES: Final = frozenset(" ")
_CLASSES: Final = {
    "d": _DIGITS, "D": _ALL - _DIGITS, "w": _WORDS, "W": _ALL - _WORDS, "s": _SPACES, "S": _ALL - _SPACES
}  # fmt: skip
_REPEATS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_COUNT: Final = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")

#: What a state needs where it consumes no character: nothing, the beginning of the name, or its end.
_FREE, _START, _END = (frozenset({place}) for place in ("anywhere", "start", "end"))

States = frozenset[int]


class UnsupportedError(ValueError):
    """An expression is not one that an automaton can follow, or too large; the message is the rest of a sentence."""


class Automaton:
    """An automaton of several expressions, which finds whether one of them matches a name from its beginning on.

    Attributes:
        matched: the states of a name that an expression has matched, whatever follows.
    """

    matched: Final[States] = frozenset({0})

    def __init__(self) -> None:
        """Make an automaton without expressions, which matches nothing."""
        self._needs: list[frozenset[str]] = [_FREE]  # of each state; state 0 is reached by a match
        self._next: list[list[int]] = [[]]
        self._starts: list[int] = []
        self._visits = 0

    def add(self, expression: str) -> None:
        """Add an expression, in Python's syntax.

        Raises:
            UnsupportedError: see there.
        """
        start, end = _Parser(expression, self).parsed()
        self._next[end].append(0)
        self._starts.append(start)

    def state(self, needs: frozenset[str] = _FREE) -> int:
        """Return a new state.

        Raises:
            UnsupportedError: there are too many.
        """
        if len(self._needs) >= _MOST_STATES:
            raise UnsupportedError("is too long")
        self._needs.append(needs)
        self._next.append([])
        return len(self._needs) - 1

    def join(self, first: int, then: int) -> None:
        """Let ``then`` follow ``first``."""
        self._next[first].append(then)

    def start(self) -> States:
        """Return the states before the first character."""
        return self._closed(self._starts, _START)

    def step(self, states: States, text: str) -> States:
        """Return the states after some more characters.

        Raises:
            UnsupportedError: this and the calls before it together took too many steps.
        """
        for char in text:
            if not states or states is self.matched:
                break
            self._visits += len(states)
            if self._visits > _MOST_VISITS:
                raise UnsupportedError("takes too long for so many modules")
            after = [then for state in states if char in self._needs[state] for then in self._next[state]]
            states = self._closed(after, _FREE)
        return states

    def ends(self, states: States) -> bool:
        """Return whether an expression matches a name that ends in these states."""
        return states is self.matched or self._closed(states, _END) is self.matched

    def _closed(self, states: States | list[int], place: frozenset[str]) -> States:
        """Return the states that are reached without a further character at a place of the name."""
        found, left = set(states), list(states)
        while left:
            state = left.pop()
            if state == 0:
                return self.matched
            if self._needs[state] is _FREE or self._needs[state] is place:
                new = [then for then in self._next[state] if then not in found]
                found.update(new)
                left += new
        return frozenset(found)


class _Parser:
    """Reads an expression by recursive descent, and builds its states, of each piece from a first to a last one."""

    def __init__(self, text: str, automaton: Automaton) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.automaton = automaton

    def parsed(self) -> tuple[int, int]:
        pair = self.alternatives()
        if self.at < len(self.text):
            raise UnsupportedError("has a closing bracket too many")
        return pair

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        if self.at == len(self.text):
            raise UnsupportedError("ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def alternatives(self) -> tuple[int, int]:
        first, last = self.automaton.state(), self.automaton.state()
        while True:
            start, end = self.sequence()
            self.automaton.join(first, start)
            self.automaton.join(end, last)
            if self.peek() != "|":
                return first, last
            self.at += 1

    def sequence(self) -> tuple[int, int]:
        first = last = self.automaton.state()
        while self.peek() not in {"", "|", ")"}:
            begin = self.at
            start, end = self.atom()
            least, most = self.repeats()
            after = self.at
            for i in range(max(least, 1) if most is None else most):
                if i:  # each repetition has states of its own
                    self.at = begin
                    start, end = self.atom()
                self.automaton.join(last, start)
                if i >= least:  # this one and all later ones may be left out
                    skipped = self.automaton.state()
                    self.automaton.join(last, skipped)
                    self.automaton.join(end, skipped)
                    end = skipped
                last = end
                if most is None and i == max(least, 1) - 1:
                    self.automaton.join(end, start)
            self.at = after
        return first, last

    def repeats(self) -> tuple[int, int | None]:
        """Return the least and most repetitions that a quantifier asks for; None for any number."""
        if count := _COUNT.match(self.text, self.at):
            self.at = count.end()
            least = int(count[1] or 0)
            most: int | None = (int(count[3]) if count[3] else None) if count[2] else least
            if max(least, most or 0) > _MOST_REPEATS or (most is not None and most < least) or count[0] == "{}":
                raise UnsupportedError("repeats too often")
        elif self.peek() in _REPEATS and self.peek():
            least, most = _REPEATS[self.take()]
        else:
            return 1, 1
        if self.peek() == "?":  # lazy: finds the same
            self.at += 1
        if self.peek() in {"+", "*", "?"} and self.peek():
            raise UnsupportedError("repeats a repetition")
        return least, most

    def atom(self) -> tuple[int, int]:
        char = self.take()
        if char == "(":
            return self.group()
        needs = self.set() if char == "[" else self.escape() if char == "\\" else _PLAIN.get(char, frozenset(char))
        if char in "*+?":
            raise UnsupportedError("repeats nothing")
        state, end = self.automaton.state(needs), self.automaton.state()
        self.automaton.join(state, end)
        return state, end

    def group(self) -> tuple[int, int]:
        if self.peek() == "?":
            opening = re.compile(r"\?(?::|P<\w{1,50}>)").match(self.text, self.at)
            if not opening:
                raise UnsupportedError(f"uses ({self.text[self.at : self.at + 2]}")
            self.at = opening.end()
        self.depth += 1
        if self.depth > 20:  # noqa: PLR2004 (real ones have 2)
            raise UnsupportedError("nests too many brackets")
        pair = self.alternatives()
        self.depth -= 1
        self.take()  # the closing bracket, or the end
        return pair

    def escape(self) -> frozenset[str]:
        char = self.take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in "AZz":
            return _START if char == "A" else _END
        if char.isalnum():
            raise UnsupportedError(f"uses \\{char}")
        return frozenset(char)

    def set(self) -> frozenset[str]:
        """Return the characters of a class in square brackets."""
        negated = self.peek() == "^"
        self.at += negated
        chars: set[str] = set()
        while self.peek() != "]" or not chars:
            char = self.take()
            some = self.escape() if char == "\\" else frozenset(char)
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in {"]", ""}:
                self.at += 1
                last = self.take()
                some = frozenset(map(chr, range(ord(char), min(ord(last), 127) + 1)))
            chars |= some
        self.at += 1
        return _ALL - chars if negated else frozenset(chars)


_PLAIN: Final = {".": _ALL, "^": _START, "$": _END}


#: How an entry starts that is a regular expression.
EXPRESSION: Final = "re:"
_WILD: Final = re.compile(r"[*?\[]")
#: The most parts of all names of a list together.
_MOST_NODES: Final = 300_000
_LOOSE, _EXACT = 0, 1  # the roots of names that match anywhere in a module's name, and of those that match all of it


class _State(NamedTuple):
    """What of the entries has matched the parts of a name so far."""

    nodes: frozenset[int]
    states: States
    is_found: bool = False


class Names:
    """A list of modules, which tells of a name whether it is one of them.

    An entry ``re:…`` is a regular expression, which matches names that begin so. Of other entries the parts between
    dots are compared, where a part ``*`` matches any; one with wildcards elsewhere is matched with the whole name. All
    entries are followed at once, part by part, and what is known of the first parts of a name serves all others that
    begin with them: thousands of entries and modules take less than a second.
    """

    def __init__(self, entries: Iterable[str], *, exact: bool = False) -> None:
        """Prepare a list.

        Args:
            entries: the entries.
            exact: whether an entry must be the whole name; if not, the parts of an entry may be anywhere in it, so that
                an entry also names all modules in that module.

        Raises:
            ValueError: an expression is too complicated or too long to be followed in bounded time, or there are too
                many names; the message is a clause that names one.
        """
        self._nodes: list[dict[str, int]] = [{}, {}]
        self._ends: set[int] = set()  # where an entry ends that also names all modules in a module
        self._whole: set[int] = set()  # and one that does not
        self._automaton = Automaton()
        self._after: dict[tuple[_State, str], _State] = {}
        self._apart: dict[tuple[_State, int], bool] = {}
        for entry in dict.fromkeys(entries):
            if entry.startswith(EXPRESSION):
                self._add(entry.removeprefix(EXPRESSION), entry)
            elif not exact and any(part != "*" and _WILD.search(part) for part in entry.split(".")):
                self._add(_wildcard(entry), entry)
            else:
                self._enter(entry.strip(".").split("."), exact=exact)
        self._start = _State(frozenset({_LOOSE, _EXACT}), self._automaton.start())

    def _add(self, expression: str, entry: str) -> None:
        try:
            self._automaton.add(expression)
        except UnsupportedError as error:
            raise ValueError(f"{entry[:60]!r} {error}") from error

    def _enter(self, parts: list[str], *, exact: bool) -> None:
        node = _EXACT if exact else _LOOSE
        if len(self._nodes) + len(parts) > _MOST_NODES:
            raise ValueError(f"{'.'.join(parts)[:60]!r} is one of too many")
        for part in parts:
            if part not in self._nodes[node]:
                self._nodes[node][part] = len(self._nodes)
                self._nodes.append({})
            node = self._nodes[node][part]
        (self._whole if exact else self._ends).add(node)

    def __contains__(self, name: str) -> bool:
        """Return whether an entry matches the name of a module.

        Raises:
            ValueError: the expressions took too many steps for this name and those before it.
        """
        state = self._follow(self._start, name)
        return state.is_found or not self._whole.isdisjoint(state.nodes) or self._automaton.ends(state.states)

    def tells_apart(self, start: str, count: int) -> bool:
        """Return whether names that begin with ``start`` and one of the numbers from 0 may differ in being listed.

        Raises:
            ValueError: as for ``in``.
        """
        state = self._follow(self._start, start)
        if (state, count) not in self._apart:
            after = () if state.is_found else {self._step(state, f".{number}") for number in range(count)}
            self._apart[state, count] = len(after) > 1
        return self._apart[state, count]

    def _follow(self, state: _State, name: str) -> _State:
        """Return the state after a name, or after as much of it as decides."""
        for i, part in enumerate(name.split(".")):
            if state.is_found:
                break
            state = self._step(state, f".{part}" if i else part)
        return state

    def _step(self, state: _State, text: str) -> _State:
        """Return the state after one more part of a name, with the dot before it."""
        key = state, text
        if key not in self._after:
            part = text.removeprefix(".")
            active = [self._nodes[node] for node in state.nodes]
            nodes = {node[word] for node in active for word in (part, "*") if word in node}
            states = self._automaton.step(state.states, text)
            is_found = states is self._automaton.matched or not self._ends.isdisjoint(nodes)
            self._after[key] = _State(frozenset({*nodes, _LOOSE}), states, is_found)
        return self._after[key]


def _wildcard(entry: str) -> str:
    """Return a regular expression for a name with the wildcards of a shell."""
    pieces = re.split(r"(\*|\?|\[[^\]]*\])", entry)
    return "".join(_WILDCARDS.get(piece[:1], re.escape)(piece) for piece in pieces) + "$"


_WILDCARDS: Final[dict[str, Callable[[str], str]]] = {
    "*": lambda _: ".*",
    "?": lambda _: ".",
    "[": lambda piece: piece.replace("[!", "[^", 1),
}
