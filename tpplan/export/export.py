"""Exporting a plan: the table of engines, and what each says of a plan."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from tpplan.core.sizes import listed
from tpplan.errors import RequestError
from tpplan.export import accelerate, exllama, llamacpp, sglang, transformers, vllm
from tpplan.export.even import obstacles as uneven
from tpplan.export.even import works_with
from tpplan.export.facts import Facts
from tpplan.reports.export import ExportReport

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan
    from tpplan.export.engine import Engine

#: All engines, by their names.
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        llamacpp.TENSOR,
        llamacpp.LAYER,
        exllama.V3,
        exllama.V2,
        accelerate.ENGINE,
        transformers.ENGINE,
        vllm.ENGINE,
        sglang.ENGINE,
    )
}


def engine_of(name: str) -> Engine:
    """Return the engine of a name, in any capitals.

    Raises:
        RequestError: there is none; the hint lists them.
    """
    wanted = name.strip().casefold()
    for engine in ENGINES.values():
        if wanted in {engine.name, *engine.aliases}:
            return engine
    aliases = {alias: engine.name for engine in ENGINES.values() for alias in engine.aliases}
    others = "; ".join(f"{alias} is {one}" for alias, one in aliases.items())
    names = [*ENGINES, *aliases]
    near = get_close_matches(wanted, names, 1) or [each for each in names if wanted and each.startswith(wanted)]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise RequestError(
        f"--for is {name[:40]!r}, which is no engine", f"{meant}engines are {listed([*ENGINES])}; {others}"
    )


def export(plan: SplitPlan, name: str) -> ExportReport:
    """Return a plan as an engine's command, or why the engine cannot run it.

    Args:
        plan: a valid plan.
        name: of the engine.

    Raises:
        RequestError: there is no engine of that name.
    """
    engine, facts = engine_of(name), Facts(plan)
    if reasons := obstacles(engine, facts):
        even = engine.cuts_evenly and not any(engine.obstacles(facts))
        return ExportReport(
            engine=engine.name,
            version=engine.version,
            model=plan.model.name,
            possible=False,
            reasons=reasons,
            works_with=_enough(engine, facts) if even else "",
            engines=tuple(name for name, other in ENGINES.items() if not obstacles(other, facts)),
        )
    return ExportReport(
        engine=engine.name,
        version=engine.version,
        model=plan.model.name,
        possible=True,
        environment=engine.environment(facts),
        argv=engine.argv(facts),
        files=engine.files(facts),
        differences=engine.differences(facts),
    )


def obstacles(engine: Engine, facts: Facts) -> tuple[str, ...]:
    """Return why an engine cannot run a plan, a clause each; nothing if it can."""
    reasons = tuple(engine.obstacles(facts))
    if engine.cuts_evenly and not reasons:
        return tuple(uneven(facts, _sixteenths(engine, facts), repeats_heads=engine.repeats_heads))
    return reasons


def _enough(engine: Engine, facts: Facts) -> str:
    """Return devices of a plan that an engine can run that cuts evenly, nothing if none are known."""
    return works_with(facts, _sixteenths(engine, facts), repeats_heads=engine.repeats_heads)


def _sixteenths(engine: Engine, facts: Facts) -> int:
    return engine.cache(facts).sixteenths
