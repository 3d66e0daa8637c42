"""Regular expressions of untrusted files, matched in a number of steps that is known beforehand.

They become an automaton that is walked along all its paths at once, as in K. Thompson's "Regular Expression Search
Algorithm" (1968), so that no expression takes exponential time. What an automaton cannot do (back references, looking
around elsewhere than at the beginning, word boundaries) is refused.
"""

from __future__ import annotations

import re
from typing import Final

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
