"""Lists of modules in quantisation configs: names, parts of names, wildcards and regular expressions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from tpplan.models.formats.expressions import Automaton, States, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
