"""Lists of modules in quantisation configs: what they match, and that no list takes long."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tpplan.models.formats.names import Automaton, Names

MODULES = [
    *(
        f"model.layers.{layer}.{part}"
        for layer in (0, 1, 12)
        for part in ("mlp.gate_proj", "mlp.gate", "self_attn.q_proj")
    ),
    *("model.layers.3.mlp.experts.17.down_proj", "lm_head", "model.embed_tokens"),
]

_ATOMS = st.sampled_from(
    [
        *(
            "a",
            "l",
            r"\.",
            ".",
            "[0-9]",
            r"\d",
            r"\w",
            r"\D",
            "[^.]",
            "[a-z_]",
            "[_-]",
            "$",
            "^",
            r"\Z",
            "model",
            "layers",
            "proj",
        ),
        *("(mlp|attn)", r"(?:a|mlp\.(gate|up)|)", "(?P<x>l|lm)_head", "gate_proj", "gate"),
    ]
)
_REPEATS = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{0,1}", "{1,}", "{0}", "*?", "+?"])
EXPRESSIONS = st.lists(st.tuples(_ATOMS, _REPEATS).map("".join), min_size=1, max_size=6).map("".join)


@settings(max_examples=examples(500))
@given(st.lists(EXPRESSIONS, min_size=1, max_size=3), st.sampled_from(MODULES))
@example([r".*mlp\.(gate|up|gate_up|down)_proj.*"], "model.layers.0.mlp.gate_proj")
def test_expressions_match_what_python_matches(expressions: list[str], module: str) -> None:
    """A list of expressions has a module if one of them matches it from its beginning on, as in Python."""
    try:
        expected = any(re.match(expression, module) for expression in expressions)
    except re.error:  # a group's name twice
        return
    assert (module in Names([f"re:{expression}" for expression in expressions])) == expected


@given(st.text("model.layers0123[]!*?", max_size=12).filter(lambda text: "[" not in text), st.sampled_from(MODULES))
@example("model.layers.1*", "model.layers.12.mlp.gate")
@example("*router*", "model.layers.0.mlp.router.x")
@example("*.[!x]ate_proj", "model.layers.0.mlp.gate_proj")
def test_wildcards_match_whole_names(entry: str, module: str) -> None:
    """Wildcards within a part are those of a shell, for the whole name."""
    if any(part != "*" and set(part) & set("*?[") for part in entry.split(".")):
        assert (module in Names([entry])) == fnmatchcase(module, entry)


@pytest.mark.parametrize(
    ("entry", "loose", "exact"),
    [
        ("lm_head", 1, 1),
        ("mlp", 7, 0),
        ("mlp.gate", 3, 0),
        ("model.layers.1", 3, 0),
        ("model.layers.*.mlp.gate", 3, 3),
        ("model.layers.1.mlp.gate", 1, 1),
        ("gate_proj.mlp", 0, 0),
    ],
)
def test_names_are_compared_part_by_part(entry: str, loose: int, exact: int) -> None:
    """Parts are never cut: layer 1 is not layer 12. Where names are exact, a module in a module is not meant."""
    assert sum(module in Names([entry]) for module in MODULES) == loose
    assert sum(module in Names([entry], exact=True) for module in MODULES) == exact


HOSTILE = [
    *(r"(a+)+$", r"(a|a)*b", ".*" * 90 + "x", "(.*.*|.*.*)*" * 8 + "y", "((a?){50}){50}"),
    *("((((((a{9}){9}){9}){9}){9}){9}){9}", "a{1000}" * 30, "(" * 5000, "[" * 5000, "|" * 30_000, "(a|" * 5000),
]


@pytest.mark.parametrize("expression", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_expressions_take_bounded_steps(expression: str) -> None:
    """An expression that takes other engines for ever is followed, or refused by name, in a bounded number of steps."""
    try:
        names = Names([f"re:{expression}"])
        assert len({f"{'a' * 60}.{number}.c" in names for number in range(2000)}) == 1
    except ValueError as error:
        assert str(error).startswith(("'re:", "takes too long"))  # noqa: PT017 (both outcomes are right)


@pytest.mark.parametrize(
    "expression",
    ["(", ")", "[", "a**", "*a", r"(a)\1", "(?=a)", "(?<!a)b", r"\bfoo", "(?i)a", "a{2000}", "a{3,2}", "\\"],
)
def test_what_is_not_followed_is_refused(expression: str) -> None:
    """What is no expression, or needs more than an automaton, is an error that names it."""
    with pytest.raises(ValueError, match=re.escape(repr(f"re:{expression}"))):
        Names([f"re:{expression}"])


def test_an_automaton_without_expressions_matches_nothing() -> None:
    """Lists without expressions have an automaton too."""
    automaton = Automaton()
    assert not automaton.ends(automaton.step(automaton.start(), "lm_head"))
