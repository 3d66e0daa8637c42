"""How a checkpoint wants its tokens chosen: the sampling of its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from attrs import frozen

from tpplan.decoder.decoding.sampling import Sampling
from tpplan.decoder.text.files import read_object
from tpplan.errors import ModelError, RequestError

_FILE: Final = "generation_config.json"
#: Settings of random sampling, which count only where the file says ``do_sample``.
_RANDOM: Final = ("temperature", "top_k", "top_p", "min_p")
_HINT: Final = "fetch it again, or remove it"


@frozen
class Defaults:
    """Sampling settings of a checkpoint.

    Attributes:
        values: settings of :class:`tpplan.decoder.decoding.sampling.Sampling` by name, without those that change
            nothing.
    """

    values: Mapping[str, float]

    @classmethod
    def read(cls, directory: str | Path) -> Defaults:
        """Read the settings of a checkpoint, none if it has no generation_config.json.

        As in transformers, the file's temperature, top-k, top-p and min-p count only if ``do_sample`` is true, and then
        the temperature is 1 if it is not there.

        Raises:
            ModelError: the file cannot be read, or a setting is no number or out of range.
        """
        path = Path(directory) / _FILE
        config = read_object(path, _HINT)
        names = (*(_RANDOM if config.get("do_sample") is True else ()), "repetition_penalty")
        values = {"temperature": 1.0} if "temperature" in names else {}
        values |= {name: _number(name, config[name], path) for name in names if config.get(name) is not None}
        return cls({name: value for name, value in values.items() if value != getattr(Sampling(), name)})

    def without(self, given: Mapping[str, float]) -> Defaults:
        """Return the settings that hold beside others that were given; without temperature, nothing is drawn."""
        is_greedy = given.get("temperature") == 0
        kept = {
            name: value
            for name, value in self.values.items()
            if name not in given and not (is_greedy and name in _RANDOM)
        }
        return Defaults(kept)

    def sampling(self, given: Mapping[str, float]) -> Sampling:
        """Return how tokens are chosen with the settings that were given, and these for the others.

        Raises:
            RequestError: one that was given is out of range.
        """
        return Sampling(**(dict(self.without(given).values) | dict(given)))  # type: ignore[arg-type]

    def __str__(self) -> str:
        named = [f"{name.replace('_', '-')} {value:g}" for name, value in self.values.items()]
        return f"{', '.join(named)} from {_FILE}" if named else ""


def _number(name: str, value: object, path: Path) -> float:
    """Return a setting of a file, after checking it."""
    if type(value) not in {int, float} or (name == "top_k" and type(value) is not int):
        expected = "a whole number" if name == "top_k" else "a number"
        raise ModelError(f"{path}: {name} is {str(value)[:60]}, expected {expected}", _HINT)
    assert isinstance(value, int | float)  # noqa: S101 - for the type checker
    try:
        Sampling(**{name: value})  # type: ignore[arg-type]
    except RequestError as error:
        raise ModelError(f"{path}: {error.message}", _HINT) from error
    return value
