"""What ``tpplan export`` tells: what to type into an engine, and what it does differently from the plan."""

from __future__ import annotations

from attrs import frozen

from tpplan.files.codec import document


@frozen
class Variable:
    """An environment variable.

    Attributes:
        name: its name.
        value: its value.
    """

    name: str
    value: str


@frozen
class TextFile:
    """A file to write.

    Attributes:
        name: of the file, as ``argv`` names it.
        text: what is in it.
    """

    name: str
    text: str


@document("export-report")
@frozen(kw_only=True)
class ExportReport:
    """A plan as an engine's command, or why the engine cannot run by it.

    Attributes:
        engine: its name, as ``--for`` takes it.
        version: the version of the engine whose documentation and source name these flags.
        model: name of the model in the plan.
        possible: whether the engine can run the plan.
        reasons: why it cannot; left out if it can.
        works_with: devices, as ``--gpus`` takes them, of a plan that the engine can run; left out if it can run this
            one, or if none is known.
        engines: the others that can run this plan; left out if it can.
        environment: variables of the command; left out if it cannot.
        argv: the command; ``MODEL`` stands for the path of the model. Left out if it cannot.
        files: files that the command reads; left out if it reads none.
        differences: what the engine does differently from the plan, a sentence each; left out if it cannot.
    """

    engine: str
    version: str
    model: str
    possible: bool
    reasons: tuple[str, ...] = ()
    works_with: str = ""
    engines: tuple[str, ...] = ()
    environment: tuple[Variable, ...] = ()
    argv: tuple[str, ...] = ()
    files: tuple[TextFile, ...] = ()
    differences: tuple[str, ...] = ()
