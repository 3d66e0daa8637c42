"""Models by their name on the hub: the layout of the cache is written by huggingface_hub itself."""

from __future__ import annotations

import os
from pathlib import Path
from shutil import copyfile

import pytest
from huggingface_hub import file_download

from tests.command import command
from tpplan.errors import ModelError
from tpplan.models.hub import cache, local
from tpplan.models.reader import read_model

CONFIG = Path(__file__).parents[2] / "examples/models/Llama-3.1-8B/config.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"


def cached(home: Path, commit: str, *refs: str, name: str = "meta-llama/Llama-3.1-8B", config: bool = True) -> Path:
    """Put a config into a hub's cache as huggingface_hub does: a blob, a link to it, and refs."""
    folder = home / "hub" / file_download.repo_folder_name(repo_id=name, repo_type="model")
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for ref in refs:
        file_download._cache_commit_hash_for_specific_revision(str(folder), ref, commit)
    if config:
        copyfile(CONFIG, folder / "blobs" / commit)
        file_download._create_symlink(str(folder / "blobs" / commit), str(snapshot / "config.json"))
    return snapshot


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the hub's home be an empty directory, and work in another."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def test_names_branches_and_commits(home: Path) -> None:
    """The main branch by default, else what is behind the @: a branch, also of a pull request, or a commit's start."""
    first, second = cached(home, COMMIT, "main"), cached(home, OTHER, "refs/pr/3", "v2")
    assert local("meta-llama/Llama-3.1-8B") == first
    for revision in ("v2", "refs/pr/3", OTHER, OTHER[:7]):
        assert local(f"meta-llama/Llama-3.1-8B@{revision}") == second
    model = read_model("meta-llama/Llama-3.1-8B")
    assert (model.name, model.parameter_count) == ("Llama-3.1-8B", 8_030_261_248)
    assert command("inspect", "meta-llama/Llama-3.1-8B").code == 0


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_CACHE wins over HF_HOME, that over XDG_CACHE_HOME, that over the home directory."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "a"))
    assert cache() == tmp_path / "a"
    monkeypatch.delenv("HF_HUB_CACHE")
    assert cache() == tmp_path / "home" / "hub"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache() == tmp_path / "x" / "huggingface" / "hub"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache() == tmp_path / ".cache" / "huggingface" / "hub"


def test_a_path_wins(home: Path) -> None:
    """A directory of that name is read, whatever the cache has; and so is one beside it that is missing."""
    cached(home, COMMIT, "main")
    Path("meta-llama/Llama-3.1-8B").mkdir(parents=True)
    assert local("meta-llama/Llama-3.1-8B") == Path("meta-llama/Llama-3.1-8B")
    assert local("meta-llama/other") == Path("meta-llama/other")
    assert local(CONFIG) == CONFIG


@pytest.mark.parametrize(
    ("name", "words", "hint"),
    [
        ("a/b", "a/b does not exist", "hf download a/b config.json fetches"),
        ("a/b@v1", "does not exist", "hf download a/b config.json --revision v1 fetches"),
        ("meta-llama/Llama-3.1-8B@v9", "no revision v9 of meta-llama/Llama-3.1-8B, which has main", "--revision v9"),
        ("meta-llama/empty", "has meta-llama/empty without config.json", "hf download meta-llama/empty config.json"),
    ],
)
def test_what_is_not_there(home: Path, name: str, words: str, hint: str) -> None:
    """The error says what is missing, and which command fetches it."""
    cached(home, COMMIT, "main")
    cached(home, COMMIT, "main", name="meta-llama/empty", config=False)
    done = command("inspect", name)
    assert done.code == 2
    assert words in done.err
    assert hint in " ".join(done.err.split())


def test_names_lead_nowhere_else(home: Path) -> None:
    """No name leaves the cache, and a damaged one is an error or not there."""
    folder = cached(home, COMMIT, "main").parents[1]
    (folder / "refs" / "bad").write_bytes(b"\xff\xfe")
    (folder / "refs" / "out").write_text("../../..", encoding="utf-8")
    for revision in ("bad", "out", "../main", "out/../main"):
        with pytest.raises(ModelError):
            read_model(f"meta-llama/Llama-3.1-8B@{revision}")


@pytest.mark.parametrize("revision", ["/etc", "../../x", "a/../b", "a//b", "./a", "a/"])
def test_a_revision_stays_in_its_directory(home: Path, tmp_path: Path, revision: str) -> None:
    """Absolute paths and dots are refused, whether or not there is a file that holds a commit."""
    cached(home, COMMIT, "main")
    (tmp_path / "outside").write_text(COMMIT)
    for each in (revision, f"/{tmp_path}/outside"):
        with pytest.raises(ModelError, match=r"is no revision of meta-llama/Llama-3\.1-8B"):
            local(f"meta-llama/Llama-3.1-8B@{each}")


def test_a_pipe_is_no_reference(home: Path) -> None:
    """Nobody writes into it, so reading it would take for ever."""
    snapshot = cached(home, COMMIT, "main")
    os.mkfifo(snapshot.parents[1] / "refs" / "pipe")
    with pytest.raises(ModelError, match="has no revision pipe"):
        local("meta-llama/Llama-3.1-8B@pipe")


def test_a_long_reference_is_not_read_whole(home: Path) -> None:
    """Of a file of 64 GiB, which takes no room, the commit is read and no more."""
    snapshot = cached(home, COMMIT, "main")
    reference = snapshot.parents[1] / "refs" / "main"
    os.truncate(reference, 2**36)
    assert local("meta-llama/Llama-3.1-8B") == snapshot
