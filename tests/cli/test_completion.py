"""Completion in shells: what is installed, and what bash completes with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli_cases import folder  # noqa: F401 (for every test here)
from tests.command import command


@pytest.mark.parametrize(
    ("shell", "file", "start"),
    [
        ("bash", ".local/share/bash-completion/completions/tpplan", ".bashrc"),
        ("zsh", ".zsh/completions/_cyclopts_tpplan", ".zshrc"),
        ("fish", ".config/fish/completions/tpplan.fish", ""),
    ],
)
def test_scripts(shell: str, file: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shell gets its script where it looks for it, and the line that loads it once."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZSH", raising=False)
    monkeypatch.delenv("ZSH_CUSTOM", raising=False)
    for _ in range(2):
        done = command("--install-completion", "--shell", shell)
        assert (done.code, done.out) == (0, "")
        assert f"wrote: {tmp_path / file}\n" in done.err
    script = (tmp_path / file).read_text(encoding="utf-8")
    for word in ("validate", "strategy", "latency", "exllamav3", "github"):
        assert word in script
    assert (tmp_path / start).read_text(encoding="utf-8").count(str((tmp_path / file).parent)) in {1, 2} if start else 1


def test_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bash completes commands, options, choices, and the paths of files."""
    bash = shutil.which("bash")
    if not bash:
        pytest.skip("there is no bash")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command("--install-completion", "--shell", "bash").code == 0
    Path("plans").mkdir()
    Path("plans/llama.json").touch()

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in ("tpplan", *words))
        code = f'. ~/.bashrc; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _tpplan; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("va") == ["validate"]
    assert completed("plan", "m", "--strategy", "la") == ["latency"]
    assert completed("export", "p", "--for", "llama") == ["llama.cpp", "llama.cpp-layer"]
    assert completed("check", "p", "--for") == ["--format"]
    assert completed("show", "plans/ll") == ["plans/llama.json"]


def test_unwritable_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that cannot be written is an error, and not a traceback."""
    monkeypatch.setenv("HOME", "/dev/null")
    done = command("--install-completion", "--shell", "bash")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: cannot write '/dev/null")
