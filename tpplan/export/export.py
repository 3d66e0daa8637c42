"""Exporting a plan: the table of engines, and what each says of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.errors import RequestError
from tpplan.export import accelerate, exllama, llamacpp, sglang, transformers, vllm
from tpplan.export.engine import environment
from tpplan.export.even import obstacles, works_with
from tpplan.export.facts import Facts, listed
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
    aliases = "; ".join(f"{alias} is {engine.name}" for engine in ENGINES.values() for alias in engine.aliases)
    raise RequestError(f"--for is {name[:40]!r}, which is no engine", f"engines are {listed([*ENGINES])}; {aliases}")


def export(plan: SplitPlan, name: str) -> ExportReport:
    """Return a plan as an engine's command, or why the engine cannot run it.

    Args:
        plan: a valid plan.
        name: of the engine.

    Raises:
        RequestError: there is no engine of that name.
    """
    engine, facts = engine_of(name), Facts(plan)
    reasons, devices = tuple(engine.refused(facts)), ""
    if engine.cuts_evenly and not reasons:
        kind = engine.cache(facts).sixteenths
        reasons = tuple(obstacles(facts, kind, repeats_heads=engine.repeats_heads))
        if reasons:
            devices = works_with(facts, kind, repeats_heads=engine.repeats_heads)
    if reasons:
        return ExportReport(
            engine=engine.name,
            version=engine.version,
            model=plan.model.name,
            possible=False,
            reasons=reasons,
            works_with=devices,
        )
    return ExportReport(
        engine=engine.name,
        version=engine.version,
        model=plan.model.name,
        possible=True,
        environment=environment(facts),
        argv=engine.argv(facts),
        files=engine.files(facts),
        differences=engine.differences(facts),
    )
