"""What to install is told for the Python that runs."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tpplan.core import missing
from tpplan.core.missing import MissingError, install_command, needing

LINES = [
    "attrs>=24.1",
    "cuda-core>=1; extra == 'cu13'",
    "numba-cuda[cu13]>=0.30.4; extra == 'cu13'",
    "torch>=2.6 ; extra=='cu13'",
    "nvidia-ml-py>=12.535; extra == 'probe'",
    "torch>=2.6; extra == 'exec'",
]


def came_from(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let tpplan have been installed from a URL, or from an index if that is empty."""
    text = json.dumps({"url": url, "dir_info": {}}) if url else None
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))


@pytest.fixture(autouse=True)
def from_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tpplan have come from an index."""
    came_from(monkeypatch, "")
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: LINES)


def test_imports_are_not_held_up() -> None:
    """By collections of garbage, which go on behind them as before, however they end."""
    assert gc.isenabled()
    with needing("this"), needing("that"):
        assert not gc.isenabled()
    with pytest.raises(MissingError), needing("this"):
        raise ModuleNotFoundError(name="other")
    assert gc.isenabled()
    gc.disable()
    try:
        with needing("this"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_clone_is_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tpplan came from a directory that is still there; of what came from elsewhere, its requirements are."""
    clone = tmp_path / "a clone"
    clone.mkdir()
    monkeypatch.setattr(sys, "executable", "")
    came_from(monkeypatch, clone.as_uri())
    assert install_command("probe") == f'python -m pip install "{clone}[probe]"'
    for url in ((tmp_path / "gone").as_uri(), "https://example.org/tpplan.whl"):
        came_from(monkeypatch, url)
        assert install_command("probe") == 'python -m pip install "nvidia-ml-py>=12.535"'
    assert install_command("cu13") == 'python -m pip install "cuda-core>=1" "numba-cuda[cu13]>=0.30.4" "torch>=2.6"'


def test_a_clone_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tpplan is imported from its sources, they are what to install; elsewhere a clone is what it takes."""
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(importlib.metadata, "distribution", _missing)
    monkeypatch.setattr(importlib.metadata, "requires", _missing)
    root = Path(missing.__file__).parents[2]
    assert install_command("probe") == f'python -m pip install "{root}[probe]"'
    monkeypatch.setattr(missing, "__file__", str(tmp_path / "tpplan" / "core" / "missing.py"))
    assert install_command("probe") == 'in a clone of tpplan, python -m pip install ".[probe]"'


def test_the_requirements_of_every_extra_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hint names tpplan to an index: the metadata of what is installed have no extra of it in another one."""
    monkeypatch.undo()
    monkeypatch.setattr(missing, "_clone", str)
    for extra in ("probe", "exec", "cu12", "cu13", "generate"):
        assert "tpplan" not in install_command(extra).partition(" -m pip install ")[2]


def _missing(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("name", ["python", "python3.99"])
def test_a_python_on_the_path_is_named_briefly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment that is active."""
    python = tmp_path / name
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert install_command("exec") == f'{name} -m pip install "torch>=2.6"'


def test_another_python_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the shell would find another of that name, or none; and what is told there runs it, blanks or not."""
    for folder in (tmp_path / "plain", tmp_path / "with blanks"):
        python = folder / "python"
        folder.mkdir()
        python.write_text('#!/bin/sh\nprintf "%s|" "$0" "$@"\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        done = subprocess.run(install_command("cu13"), shell=True, capture_output=True, text=True, check=True)  # noqa: S602
        assert done.stdout == f"{python}|-m|pip|install|cuda-core>=1|numba-cuda[cu13]>=0.30.4|torch>=2.6|"


def test_a_python_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python is a part of another program and knows no path, it goes by what it is mostly called."""
    monkeypatch.setattr(sys, "executable", "")
    assert install_command("probe") == 'python -m pip install "nvidia-ml-py>=12.535"'
