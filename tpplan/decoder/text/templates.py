"""Chat templates, rendered by jinja2 in its sandbox, in a process that :mod:`tpplan.decoder.text.chat` starts.

The sandbox keeps templates from Python's internals, but not from endless loops and endless texts; the process does. It
imports nothing of tpplan, to start quickly.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.parser import Parser

#: Maximum characters of a prompt, and of a template's message in an error.
_LONGEST: Final = 16 * 2**20
_MOST_SHOWN: Final = 200
#: Limits of the process, where the system has them: CPU time with Python's own start, and address space.
_CPU_SECONDS: Final = 4
_ADDRESS_BYTES: Final = 384 * 2**20


def outcome(request: dict[str, Any]) -> dict[str, str]:
    """Render a template.

    Args:
        request: the ``template``, its ``variables``, and ``now``, the local date and time in ISO format.

    Returns:
        The ``text``; or as ``refused`` the template's own message, by ``raise_exception``; or as ``failed`` any other
        error.
    """
    try:
        environment = _environment(datetime.fromisoformat(request["now"]))
        text = environment.from_string(request["template"]).render(request["variables"])
    except _RefusedError as error:
        return {"refused": _first_line(error)}
    except MemoryError:
        return {"failed": f"it needs more than {_ADDRESS_BYTES // 2**20} MiB"}
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        return {"failed": f"{type(error).__name__}: {_first_line(error)}"}
    return {"text": text} if len(text) <= _LONGEST else {"failed": f"its text has more than {_LONGEST} characters"}


class _RefusedError(Exception):
    """The error of a template that refuses its messages by ``raise_exception``."""


class _Generation(Extension):
    """The tag ``{% generation %}``, by which transformers finds the assistant's text; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content between the tags."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """Return the environment of templates, with the same options, filters and functions as in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=now.strftime)
    return environment


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may pass them by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write JSON without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:_MOST_SHOWN]


def _limit(address_bytes: int = _ADDRESS_BYTES) -> None:
    """Limit what this process may use, where the system lets it."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415 - not on Windows

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))


def main() -> None:
    """Say on standard output that this has started, read a request from standard input, and write its outcome."""
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    request = json.loads(sys.stdin.buffer.read())
    _limit()
    sys.stdout.buffer.write(json.dumps(outcome(request)).encode())


if __name__ == "__main__":
    main()
