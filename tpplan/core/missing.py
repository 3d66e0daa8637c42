"""What to install where a part of tpplan lacks something."""

from __future__ import annotations

import gc
import json
import re
import sys
import warnings
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class MissingError(ExecutionError, ImportError):
    """A part of tpplan that lacks a library; also what Python raises where an import fails."""


def install_command(extra: str) -> str:
    """Return what installs an extra of tpplan for the Python that runs.

    That is the extra of the directory that tpplan came from, if it is still there. Otherwise it is what the extra
    consists of: the name tpplan on an index may be anybody's.

    Args:
        extra: of tpplan.
    """
    python = sys.executable or "python"  # where Python is a part of another program, it has no name
    name = Path(python).name
    if which(name) == python:
        python = name
    if " " in python:
        python = f'"{python}"'
    clone = _clone()
    wanted = [f"{clone}[{extra}]"] if clone else _requirements(extra) or [f".[{extra}]"]
    quoted = " ".join(f'"{each}"' for each in wanted)
    command = f"{python} -m pip install {quoted}"
    return command if wanted[0][0] != "." else f"in a clone of tpplan, {command}"


def _clone() -> str:
    """Return the directory that tpplan was installed from (PEP 610), or is imported from; empty if there is none."""
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415 (takes longer than most commands)
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415

    try:
        text = distribution("tpplan").read_text("direct_url.json")
    except PackageNotFoundError:
        here = Path(__file__).resolve().parents[2]
        return str(here) if (here / "pyproject.toml").is_file() else ""
    url = urlsplit(json.loads(text)["url"] if text else "")
    path = unquote(url.path)
    return path if url.scheme == "file" and Path(path).is_dir() else ""


def _requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, in which no other extra of tpplan is left; empty if they are not known."""
    from importlib.metadata import PackageNotFoundError, requires  # noqa: PLC0415

    try:
        lines = requires("tpplan") or []
    except PackageNotFoundError:
        return []
    matches = (re.fullmatch(rf"(.+?) *; *extra *== *['\"]{extra}['\"]", line) for line in lines)
    return [match[1] for match in matches if match]


@contextmanager
def needing(what: str, extra: str = "exec") -> Iterator[None]:
    """Say what to install where the half that runs plans lacks something, and nothing of numpy, which it does not need.

    No cyclic garbage is collected meanwhile: imports leave none, and to look for it takes a tenth of torch's.

    Args:
        what: needs it.
        extra: of tpplan, with which it comes.

    Raises:
        MissingError: it does.
    """
    # Torch warns once, when it is imported. The filter stays: to restore them would undo those that torch itself sets.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tpplan"):
            raise  # a part of tpplan itself: nothing to install mends that
        message = f"{what} needs {error.name}, which is not installed"
        raise MissingError(message, install_command(extra)) from error
    finally:
        if collects:
            gc.enable()


def on_first_use(package: str, modules: Mapping[str, str], extra: str = "exec") -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package that imports each of its public names when it is first used.

    That raises a MissingError if a library is not installed.

    Args:
        package: name of the package.
        modules: the module of each public name, relative to the package.
        extra: of tpplan, with which the libraries come.
    """

    def find(name: str) -> object:
        if name not in modules:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message)
        with needing(f"{package}.{name}", extra):
            return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
