"""The plan half starts fast because it leaves the heavy packages alone."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tpplan
import tpplan.decoder
import tpplan.exec
import tpplan.exllamav2
import tpplan.weights
from tests.published import EXAMPLES
from tpplan.core.missing import install_command

MODEL = EXAMPLES / "Llama-3.1-8B" / "config.json"
HEAVY = {"jsonschema", "msgspec", "numba", "numpy", "safetensors", "scipy", "torch", "transformers"}

#: Runs the command line like the installed script, and last says which heavy packages it has loaded.
PROBE = f"""
import atexit, sys
atexit.register(lambda: print("loaded:", *sorted({HEAVY} & set(sys.modules)), file=sys.stderr))
from tpplan.__main__ import main
sys.exit(main())
"""

#: Arguments and exit code of each command of the plan half, and of others where they refuse what is asked; a.json and
#: b.json are plans for different GPUs.
COMMANDS = {
    "inspect": (["inspect", "MODEL"], 0),
    "plan": (["plan", "MODEL", "--gpus", "24GiB,12GiB", "--context", "4096", "-o", "c.json"], 0),
    "plan that does not fit": (["plan", "MODEL", "--gpus", "2GiB,1GiB", "--context", "4096", "-o", "c.json"], 1),
    "show": (["show", "a.json"], 0),
    "diff": (["diff", "a.json", "b.json"], 1),
    "validate": (["validate", "a.json", "b.json"], 0),
    "check": (["check", "a.json", "--model", "MODEL"], 0),
    "export": (["export", "a.json", "--for", "llama.cpp"], 0),
    "export to what cuts evenly": (["export", "a.json", "--for", "vllm"], 1),
    "selftest on what there is not": (["selftest", "a.json", "--backend", "gpu"], 2),
    "selftest by what there is not": (["selftest", "a.json", "--transport", "auto"], 2),
    "bench on what there is not": (["bench", "a.json", "--backend", "gpu"], 2),
    "bench by what there is not": (["bench", "a.json", "--transport", "nvlink"], 2),
    "bench of what is no size": (["bench", "a.json", "--sizes", "8"], 2),
    "bench in too many rounds": (["bench", "a.json", "--rounds", "1001"], 2),
    "help": (["--help"], 0),
}

INSTALL = f"hint: {install_command('exec')}"


def _python(code: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the plans a.json and b.json."""
    folder = tmp_path_factory.mktemp("plans")
    for name, gpus in {"a.json": "24GiB,12GiB", "b.json": "24GiB,24GiB"}.items():
        args = ("plan", str(MODEL), "--gpus", gpus, "--context", "4096", "-o", name)
        assert (done := _python(PROBE, *args, cwd=folder)).returncode == 0, done.stderr
    return folder


def test_import_is_light(tmp_path: Path) -> None:
    """``import tpplan`` loads none of the heavy packages, nor those that only the command line needs."""
    unwanted = HEAVY | {"cyclopts", "rich"}
    done = _python(f"import sys, tpplan; print(*sorted({unwanted} & set(sys.modules)))", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.mark.parametrize("module", ["tpplan.decoder.generation.arguments", "tpplan.exec.machine.probe_child"])
def test_what_need_not_wait_for_torch_is_light(module: str, tmp_path: Path) -> None:
    """To be told that a text cannot be generated takes no torch; a child that tests links has what its driver needs."""
    done = _python(f"import sys, {module}; print(*sorted({HEAVY} & set(sys.modules)))", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_public_names_are_no_modules() -> None:
    """Importing a module never hides a public function of the same name, such as ``tpplan.plan``."""
    for package in (tpplan, tpplan.exec, tpplan.decoder, tpplan.exllamav2, tpplan.weights):
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        assert not modules & set(package.__all__), package


def test_public_names_are_there() -> None:
    """Every public name is imported from the module that has it."""
    for package in (tpplan, tpplan.exec, tpplan.decoder, tpplan.exllamav2, tpplan.weights):
        assert all(hasattr(package, name) for name in package.__all__), package


def test_public_names_are_listed(tmp_path: Path) -> None:
    """``dir()``, and so ``help()`` and completion, have every public name before it is used."""
    code = """
import tpplan, tpplan.exec
print([name for package in (tpplan, tpplan.exec) for name in package.__all__ if name not in dir(package)])
"""
    done = _python(code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("help(tpplan.exec); hasattr(tpplan.exec, 'nothing'); import tpplan.exec as compile", ""),
        ("from tpplan.exec import compile", INSTALL),
        ("tpplan.weights.load_weights", INSTALL),
        ("from tpplan.decoder import Decoder", INSTALL),
        ("try: from tpplan.exec import compile\nexcept ImportError as error: print('compile', error)", ""),
        ("assert 'compile' not in dir(tpplan.exec); print('compile', tpplan.weights.iter_slices)", ""),
    ],
)
def test_what_to_install_is_told(code: str, last: str, tmp_path: Path) -> None:
    """Without torch, names that need it end in the extra that has it; listing names, and slices, take none."""
    without = "import sys, tpplan.decoder, tpplan.exec, tpplan.weights\nsys.modules['torch'] = None\n"
    done = _python(without + code, cwd=tmp_path)
    assert (done.stderr.splitlines() or [""])[-1] == last
    assert bool(done.returncode) == bool(last)
    if last:
        assert "needs torch, which is not installed" in done.stderr
    else:
        assert "compile" in done.stdout


@pytest.mark.parametrize(("args", "code"), COMMANDS.values(), ids=COMMANDS)
def test_command_is_light(args: list[str], code: int, plans: Path) -> None:
    """A command of the plan half does its work, and others refuse what cannot be, without any of the heavy packages."""
    done = _python(PROBE, *(str(MODEL) if arg == "MODEL" else arg for arg in args), cwd=plans)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "loaded:"


def test_interrupt_while_the_command_line_is_imported(tmp_path: Path) -> None:
    """Ctrl-C is quiet before there is a command, too; the installed script starts where that is seen to."""
    interrupt = """
import importlib.abc, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "cyclopts":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
"""
    done = _python(interrupt + PROBE, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "loaded:\n")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"tpplan": "tpplan.__main__:main"}
