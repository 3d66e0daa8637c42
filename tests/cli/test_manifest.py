"""Commands on many plans: those of a manifest, of folders and patterns, and of a git revision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_cases import LLAMA_8B, conforms, folder, refused  # noqa: F401 (for every test)
from tests.codec_cases import TEXT
from tests.command import command
from tpplan.planfile import codec

MANIFEST = """\
[defaults]
model = "models/llama"
context = 4096

[[plan]]
file = "plans/box.json"
gpus = "machines/box.json"
cache = "q8"

[[plan]]
file = "plans/deep/pair.json"
gpus = "2xRTX4090"
batch = 4
"""
SMALL = """
[[plan]]
file = "plans/small.json"
gpus = "RTX3060"
"""
FILES = ("plans/box.json", "plans/deep/pair.json")


@pytest.fixture(autouse=True)
def _team(folder: Path) -> None:  # noqa: F811 (a fixture)
    """Write a model, a devices file and a manifest of two plans."""
    Path("models/llama").mkdir(parents=True)
    Path("models/llama/config.json").write_bytes((LLAMA_8B / "config.json").read_bytes())
    Path("machines").mkdir()
    machine(24)
    Path("tpplan.toml").write_text(MANIFEST, encoding="utf-8")


def machine(size: int) -> None:
    """Write the devices file, with so many GB on the first GPU."""
    same = {"name": "GPU", "memory_bytes": 2**35, "overhead_bytes": 2**29}
    gpus = [same | {"budget_bytes": n * 10**9} for n in (size, 12)]
    Path("machines/box.json").write_text(json.dumps({"format_version": "1.0", "devices": gpus}), encoding="utf-8")


def replace(old: str, new: str) -> None:
    """Change the manifest."""
    path = Path("tpplan.toml")
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def git(*arguments: str) -> None:
    """Run git as somebody."""
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)  # noqa: S607


def test_every_plan_is_made_as_by_a_command_of_its_own() -> None:
    """The files have the same bytes, folders are made, and what is there already is left alone."""
    done = command("plan", "--all")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("plans/box.json: new\n  llama on 2 devices, ")
    assert done.out.endswith("2 of 2 plans made\n")
    box = ("--gpus", "machines/box.json", "--context", 4096, "--cache", "q8")
    pair = ("--gpus", "2xRTX4090", "--context", 4096, "--batch", 4)
    for options, file in ((box, FILES[0]), (pair, FILES[1])):
        assert command("plan", "models/llama", *options, "-o", "other/parent/one.json").code == 0
        assert Path(file).read_bytes() == Path("other/parent/one.json").read_bytes()
    times = [Path(file).stat().st_mtime_ns for file in FILES]
    again = command("plan", "--manifest", "tpplan.toml", "--json")
    report = conforms(again.out, "manifest-report")
    assert (again.code, [plan["outcome"] for plan in report["plans"]]) == (0, ["unchanged", "unchanged"])
    assert [Path(file).stat().st_mtime_ns for file in FILES] == times


def test_what_cannot_be_made_keeps_no_other_from_it() -> None:
    """A plan that does not fit is the answer no, with lines that make it fit; what is missing is no answer."""
    Path("tpplan.toml").write_text(MANIFEST.replace("[defaults]", "[defaults]#") + SMALL, encoding="utf-8")
    done = command("plan", "--all")
    assert (done.code, [Path(file).exists() for file in (*FILES, "plans/small.json")]) == (1, [True, True, False])
    assert "plans/small.json: does not fit\n  llama does not fit: it needs " in done.out
    hint, *lines = done.err.splitlines()
    assert hint.startswith("hint: ")
    assert "in the [[plan]] of plans/small.json in tpplan.toml makes it fit" in hint
    replace('gpus = "RTX3060"', lines[-1].strip())
    assert command("plan", "--all").code == 0

    replace("batch = 4", 'model = "models/none"')
    Path("plans/box.json").unlink()
    done = command("plan", "--all")
    assert (done.code, Path("plans/box.json").exists()) == (2, True)
    assert "plans/deep/pair.json: not made\n" in done.out
    assert "models/none" in done.out
    assert [p["outcome"] for p in conforms(command("plan", "--all", "--json").out, "manifest-report")["plans"]] == [
        "unchanged",
        "error",
        "unchanged",
    ]


def test_a_plan_is_not_written_over_what_plans_are_made_of() -> None:
    """Not even by another entry."""
    replace('"plans/deep/pair.json"', '"machines/box.json"')
    assert "'machines/box.json' is read or written by the same command" in refused("plan", "--all")


@pytest.mark.parametrize(
    ("old", "new", "reasons", "words"),
    [
        ("batch = 4", "batch = 8", ["options"], "the manifest asks for batch 8 instead of 4"),
        ("batch = 4", "batch = 4\ncache = 'q4'", ["options"], "the manifest asks for cache q4 instead of fp16"),
        ("batch = 4", "batch = 4\ntokens = 8192", ["options"], "tokens 8192 instead of for equal parts"),
        ("batch = 4", "batch = 4\nstrategy = 'exllamav2'", ["options"], "strategy exllamav2 instead of auto"),
        ("batch = 4", "batch = 4\nreserve = '1GiB@0'", ["options"], "reserve 1.00 GiB on device 0 instead of nothing"),
        ("2xRTX4090", "RTX4090,RTX3090", ["devices"], "the plan is for other devices"),
        ("batch = 4", "batch = 4\ncontext = 200_000", ["request"], "are more than the 131072"),
        ("2xRTX4090", "RTX3060", ["devices", "infeasible"], "does not fit"),
        ("deep/pair", "deep/other", ["missing"], "new: not made yet"),
    ],
)
def test_check_tells_what_differs_from_the_manifest(old: str, new: str, reasons: list[str], words: str) -> None:
    """Only the entry that changed is stale, the reason is named, and the command of the hint makes it current."""
    assert command("plan", "--all").code == 0
    assert command("check").code == 0
    replace(old, new)
    done = command("check")
    assert done.code == 1
    assert "plans/box.json: current\n" in done.out
    assert words in " ".join(done.out.split())
    report = conforms(command("check", "--all", "--json").out, "check-report")
    assert [plan["reasons"] for plan in report["plans"]] == [[], reasons]
    assert report.get("unlisted", []) == (["plans/deep/pair.json"] if reasons == ["missing"] else [])
    if {"request", "infeasible"}.isdisjoint(reasons):
        *_, mends = done.err.splitlines()
        assert mends == "  tpplan plan --all"
        assert command(*mends.split()[1:]).code == 0
        assert command("check").code == 0


def test_check_of_some_plans_and_of_what_is_wrong_with_them() -> None:
    """Plan files choose entries, what no entry names is noted, and an invalid plan is no answer."""
    assert command("plan", "--all").code == 0
    Path("plans/old.json").write_bytes(Path("plans/box.json").read_bytes())
    Path("plans/notes.json").write_text('{"of": "somebody"}', encoding="utf-8")
    done = command("check")
    assert (done.code, done.out.splitlines()[2]) == (0, "plans/old.json: not in the manifest")
    assert "notes" not in done.out
    assert command("check", "./plans/deep").out == "plans/deep/pair.json: current\n"
    assert "tpplan.toml has no plan 'plans/old.json'" in refused("check", "plans/old.json")
    machine(20)
    assert command("check", "plans/box.json").out.startswith("plans/box.json: stale (devices)\n")
    Path("plans/box.json").write_text("{", encoding="utf-8")
    assert command("check").code == 2
    Path("tpplan.toml").unlink()
    assert "tpplan check needs --model" in refused("check", "plans/old.json")


def test_auto_by_the_manifest_is_not_the_strategy_of_a_plan() -> None:
    """A plan by a strategy that was named is stale under auto, and one by auto under a name."""
    for first, second in (("latency", "auto"), ("auto", "balanced")):
        Path("tpplan.toml").write_text(MANIFEST + f"strategy = '{first}'\n", encoding="utf-8")
        assert command("plan", "--all").code == 0
        assert command("check").code == 0
        replace(f"'{first}'", f"'{second}'")
        assert f"strategy {second} instead of {first}" in " ".join(command("check").out.split())


def test_folders_and_patterns() -> None:
    """They stand for the plans in them, other documents are left out and named, and what is broken is not."""
    assert command("plan", "--all").code == 0
    Path("plans/machine.json").write_bytes(Path("machines/box.json").read_bytes())
    done = command("validate", "plans")
    assert (done.code, done.out.splitlines()[-1]) == (0, "2 of 2 plans valid")
    assert done.err == "note: plans: 2 plan files\nnote: no plans, so left out: plans/machine.json\n"
    done = command("check", "plans/**/p*.json", "--model", "models/llama")
    assert (done.code, done.out) == (0, "plans/deep/pair.json: current\n")
    Path("plans/broken.json").write_text("<<<<<<< HEAD\n", encoding="utf-8")
    assert command("validate", "plans").code == 1
    for nothing in ("models", "plans/*.jsn", "plan/*.json"):
        assert "no plan file is " in refused("validate", nothing)


def test_plans_are_compared_with_a_revision() -> None:
    """Those that changed, are new or gone are told, and everything else is the same."""
    git("init", "-q")
    assert command("plan", "--all").code == 0
    git("add", ".")
    git("commit", "-qm", "plans")
    done = command("diff", "--against", "HEAD")
    assert (done.code, done.out) == (0, "2 plans since HEAD: 2 same\n")

    old = codec.load("plans/box.json")
    machine(20)
    replace("deep/pair", "other")
    assert command("plan", "--all").code == 0
    Path("plans/deep/pair.json").unlink()
    report = conforms(command("diff", "--against", "HEAD", "--json").out, "revision-diff")
    assert {plan["path"]: plan["change"] for plan in report["plans"]} == {
        "plans/box.json": "changed",
        "plans/other.json": "new",
        "plans/deep/pair.json": "deleted",
    }
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout  # noqa: S607
    assert report["commit"] == head.strip()
    codec.save(old, "before.json")
    assert report["plans"][0]["diff"] == json.loads(command("diff", "before.json", "plans/box.json", "--json").out)
    for asked in (["plans"], ["plans/**/*.json"], ["plans/box.json", "plans/*/pair.json", "plans/o*"]):
        done = command("diff", "--against", "HEAD", *asked)
        assert (done.code, done.out.splitlines()[-1]) == (1, "3 plans since HEAD: 1 changed, 1 new, 1 deleted")
    assert command("diff", "plans/box.json", "--against", "HEAD").out.endswith("\n1 plan since HEAD: 1 changed\n")

    Path("plans/box.json").write_text(TEXT.replace('"batch": 2', '"batch": 0'), encoding="utf-8")
    done = command("diff", "--against", "HEAD", "plans")
    assert done.code == 2
    assert "TP008 at request.batch" in done.out
    assert "plans/other.json: new\n" in done.out


def test_whole_repositories_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is told once, however its folder is named, from wherever, and whatever patterns git is told to take."""
    git("init", "-q")
    assert command("plan", "--all").code == 0
    git("add", ".")
    git("commit", "-qm", "plans")
    monkeypatch.setenv("GIT_GLOB_PATHSPECS", "1")
    for here, asked in (
        (".", "."),
        (".", "**/*.json"),
        (".", str(Path.cwd())),
        ("models", ".."),
        ("models", "../plans/*"),
    ):
        with monkeypatch.context() as inside:
            inside.chdir(here)
            done = command("diff", "--against", "HEAD", asked)
        assert (done.code, "new" in done.out) == (0, False), (here, asked, done.err)


def test_a_link_leads_out_of_the_folder() -> None:
    """A plan would be written where a manifest may not write."""
    Path("team").mkdir()
    Path("out").mkdir()
    Path("team/plans").symlink_to(Path("out").resolve(), target_is_directory=True)
    text = MANIFEST.replace('"models/', '"../models/').replace('"machines/', '"../machines/')
    Path("team/tpplan.toml").write_text(text, encoding="utf-8")
    assert "file leads by a link to" in refused("plan", "--manifest", "team/tpplan.toml")
    assert not [*Path("out").iterdir()]


def test_what_git_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """No repository, no such revision, no such plan, a plan outside, and no git are told in words."""
    assert command("plan", "--all").code == 0
    assert "is in no git repository" in refused("diff", "--against", "HEAD")
    git("init", "-q")
    for name in ("--all", "a b", "HEAD:tpplan.toml"):
        assert f"there is no revision {name!r}" in refused("diff", f"--against={name}")
    git("add", ".")
    git("commit", "-qm", "plans")
    assert "'plan/box.json' is no plan file, neither here nor in HEAD" in refused(
        "diff", "plan/box.json", "--against", "HEAD"
    )
    assert "is outside of the repository" in refused("diff", "../a.json", "--against", "HEAD")
    monkeypatch.setenv("PATH", "nowhere")
    assert "git is not installed" in refused("diff", "--against", "HEAD")


def test_links_of_a_revision_are_followed(tmp_path: Path) -> None:
    """A plan that is a link is its file's, as the revision had that; one that leads out of the repository is none."""
    assert command("plan", "--all").code == 0
    Path("links").mkdir()
    Path("links/box.json").symlink_to("../plans/box.json")
    Path("links/again.json").symlink_to("box.json")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    assert command("diff", "--against", "HEAD", "links").code == 0
    plan = Path("plans/box.json")
    plan.write_bytes(plan.read_bytes().replace(b'"batch": 1', b'"batch": 2'))
    done = command("diff", "--against", "HEAD", "links", "--json")
    changes = {one["path"]: one for one in conforms(done.out, "revision-diff")["plans"]}
    assert set(changes) == {"links/box.json", "links/again.json"}
    assert all(one["change"] == "changed" and one["diff"]["reasons"] == ["request"] for one in changes.values())
    outside = tmp_path / "outside.json"
    outside.write_bytes(plan.read_bytes())
    for target in (str(outside), "../../../outside.json", "gone.json", "round.json"):
        Path("links/round.json").unlink(missing_ok=True)
        Path("links/round.json").symlink_to(target)
        git("add", "-A")
        git("commit", "-qm", "two")
        Path("links/round.json").unlink()
        done = command("diff", "--against", "HEAD", "links/round.json", "links/box.json")
        assert done.code == 2
        assert "is a link that leads to no file within the repository" in done.out
        assert done.out.endswith("2 plans since HEAD: 1 deleted, 1 same\n")


def test_a_large_file_ends_no_other_comparison() -> None:
    """More than 16 MiB, in the revision or here, is told of that file; the others are compared."""
    assert command("plan", "--all").code == 0
    for name in ("then", "now"):
        Path(f"plans/{name}.json").write_bytes(b"[" + b" " * 2**24 + b"]" if name == "then" else b"{}")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    Path("plans/then.json").write_bytes(b"{}")
    Path("plans/now.json").write_bytes(b"[" + b" " * 2**24 + b"]")
    done = command("diff", "--against", "HEAD", "plans", "plans/then.json", "plans/now.json", "--json")
    plans = {one["path"]: one for one in conforms(done.out, "revision-diff")["plans"]}
    assert done.code == 2
    assert [plans[file]["change"] for file in FILES] == ["same", "same"]
    assert "HEAD:plans/then.json has a problem" in plans["plans/then.json"]["message"]
    assert "plans/now.json has a problem" in plans["plans/now.json"]["message"]


def test_in_a_hook_of_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """What git tells a hook of its repository misleads nobody, in a folder of a linked work tree and elsewhere."""
    assert command("plan", "--all").code == 0
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    hook = Path(".git/hooks/pre-commit")
    script = f"cd plans && {sys.executable} -m tpplan diff --against HEAD box.json > ../told; echo $? >> ../told"
    hook.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    hook.chmod(0o755)
    git("worktree", "add", "-q", "tree")
    monkeypatch.chdir("tree")
    plan = Path("plans/box.json")
    plan.write_bytes(plan.read_bytes().replace(b'"batch": 1', b'"batch": 2'))
    git("commit", "-qam", "two")
    told = Path("told").read_text(encoding="utf-8").splitlines()
    assert told[0].startswith("box.json: changed")
    assert told[-1] == "1"
    git("init", "-q", "other")
    monkeypatch.chdir("other")
    for name, value in (("GIT_DIR", "../../.git"), ("GIT_INDEX_FILE", "../../.git/index"), ("GIT_WORK_TREE", "..")):
        monkeypatch.setenv(name, value)
    assert "has no commit yet" in refused("diff", "--against", "HEAD", "box.json")
    assert "there is no revision 'main~1'" in refused("diff", "--against", "main~1", "box.json")


def test_plans_of_a_manifest_have_the_notes_of_their_own_command() -> None:
    """Idle devices, a faster strategy and what else plan says are told of each plan, with its name."""
    entry = '\n[[plan]]\nfile = "plans/idle.json"\ngpus = "RTX4090,2xRTX3060,2GiB"\nstrategy = "balanced"\n'
    Path("tpplan.toml").write_text(MANIFEST + entry, encoding="utf-8")
    alone = command(
        *("plan", "models/llama", "--gpus", "RTX4090,2xRTX3060,2GiB", "--strategy", "balanced", "--context", 4096),
        *("-o", "other/idle.json"),
    )
    notes = [line.partition(": ") for line in alone.err.splitlines() if line.startswith(("note: ", "hint: "))]
    assert any("no part of the model is on device 3" in text for _, _, text in notes)
    done = command("plan", "--all")
    assert done.code == 0
    for kind, _, text in notes:
        assert f"{kind}: plans/idle.json: {text}" in done.err.splitlines()


@pytest.mark.parametrize(
    "typed", [("--batch", 1), ("--cache", "fp16"), ("--strategy", "auto"), ("--max-rows", 2048), ("--kv", "idle")]
)
def test_what_is_typed_beside_a_manifest_is_refused(typed: tuple[object, ...]) -> None:
    """An option does not go with a manifest, whether it has its default or not."""
    assert f"{typed[0]} does not go with --all" in refused("plan", "--all", *typed)
