"""Files of prompts: one a line, or JSON lines."""

from __future__ import annotations

from typing import Final

from tpplan.errors import RequestError
from tpplan.files.jsontext import NotJSONError, read_json

_HINT: Final = 'write {"prompt": "…"} in each line, or a text in each, of which the first does not begin with {'


def prompts_of(text: str, name: str) -> tuple[str, ...]:
    """Return the prompts of a file: its lines, without empty ones; or of JSON lines each object's ``prompt``.

    Args:
        text: content of the file; these are JSON lines if the first one begins with ``{``.
        name: name of the file, for errors.

    Raises:
        RequestError: there are no prompts, or a line is no object with a prompt and nothing else.
    """
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    if not lines:
        raise RequestError(f"{name} has no prompts", "write one in each line")
    if not lines[0][1].lstrip().startswith("{"):
        return tuple(line for _, line in lines)
    return tuple(_prompt(line, f"line {number} of {name}") for number, line in lines)


def _prompt(line: str, where: str) -> str:
    try:
        data = read_json(line)
    except NotJSONError as error:
        raise RequestError(f"{where} {error}", _HINT) from error
    if not isinstance(data, dict) or set(data) != {"prompt"} or not isinstance(data["prompt"], str):
        found = (
            f"the keys {', '.join(sorted(data))}" if isinstance(data, dict) and set(data) != {"prompt"} else "others"
        )
        raise RequestError(f"{where} has {found}, expected an object with a text as its prompt", _HINT)
    if not data["prompt"]:
        raise RequestError(f"{where} has an empty prompt", "remove the line")
    return data["prompt"]
