"""Bad files on the command line, plans above all: one clear error with numbers or names, a hint, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import pytest

from tests.cli_cases import LLAMA_8B, ROOT, folder, refused  # noqa: F401 (for every test here)
from tests.codec_cases import TEXT
from tests.command import command
from tests.planfile.test_verify import VALID, VIOLATIONS, edited
from tpplan.core.versions import is_newer
from tpplan.files.codec import dumps
from tpplan.files.text import nearest

HOLE = 2**30


@pytest.mark.parametrize(("rule", "edits", "words"), VIOLATIONS)
def test_edited_plans(rule: str, edits: dict[str, Any], words: str) -> None:
    """A plan edited into a violation of any rule is refused by every command with that rule and its numbers."""
    plan = VALID
    for path, value in edits.items():
        plan = edited(plan, path, value)
    Path("edited.json").write_text(dumps(plan), encoding="utf-8")
    if not is_newer(plan.format_version):  # which is compared as far as it is known
        err = refused("diff", "edited.json", "edited.json")
        assert words in err
        assert rule in err
    done = command("check", "edited.json", "--model", LLAMA_8B)
    assert done.code == 2
    assert "edited.json: not checked" in done.out
    assert "".join(words.split()) in "".join(done.out.split())  # it is wrapped
    assert rule in done.out
    assert "hint: " in done.err
    done = command("validate", "edited.json")
    assert done.code == 1
    assert "".join(words.split()) in "".join(done.out.split())
    assert rule in done.out
    assert "hint: " in done.err


def test_problems_are_wrapped_alike() -> None:
    """Below a file's name ``validate`` and ``check`` put the same lines: rules, and what is wrong in a column."""
    plan = edited(edited(VALID, "request.batch", 0), "devices[0].budget_bytes", 24 * 2**30 + 5)
    Path("bad.json").write_text(dumps(plan), encoding="utf-8")
    checked = command("check", "bad.json", "--model", LLAMA_8B).out.splitlines()
    validated = command("validate", "bad.json").out.splitlines()
    assert (checked[0], validated[0]) == ("bad.json: not checked, 2 problems", "bad.json: 2 problems")
    assert checked[1:] == validated[1:]
    first, second, more = checked[1:]
    assert first == "  TP008 at request.batch: is 0, expected 1 or more"
    assert second.startswith("  TP020 at memory[0]: adds up to ")
    assert more == " " * len("  TP020 ") + more.strip()
    assert max(map(len, checked)) <= 100


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT.replace('"1.0"', '"2.0"'), "'2.0', this tpplan reads 1.x"),
        ("[" * 200_000, "deep"),
        ("", "is empty"),
        ("{}", "$schema"),
        ("[]", "expected an object"),
        ("\ufeff" + TEXT, "byte order mark"),
        (TEXT.replace("2048", "2048.0"), "2048.0"),
        (TEXT.replace('"batch": 2', '"batch": true'), "request.batch"),
        (TEXT.replace('"batch": 2', '"batch": "2"'), "request.batch"),
        (TEXT.replace('"batch": 2', '"batch": 2, "batch": 2'), "twice"),
        (TEXT.replace('"batch": 2', '"batch": NaN'), "NaN"),
        (TEXT.replace('"batch": 2', f'"batch": {"9" * 5000}'), "5000 digits"),
        (TEXT.replace('"batch": 2', '"batch": 2, "extra": 1'), "extra"),
        (TEXT[: len(TEXT) // 2], "line"),
        (TEXT[: TEXT.index("$schema")], "line 2, column 3: ends before its JSON does\n"),
    ],
    ids=[
        "2.0",
        "deep",
        "empty",
        "object",
        "array",
        "bom",
        "float",
        "bool",
        "text",
        "twice",
        "nan",
        "long",
        "key",
        "cut",
        "cut in a key",
    ],
)
def test_plan_files(text: str, words: str) -> None:
    """Plans of another version and files that are no plans: the first thing wrong is named."""
    Path("bad.json").write_bytes(text.encode())
    err = refused("show", "bad.json")
    assert "bad.json" in err
    assert words in err
    assert "standard input" in refused("show", "-", stdin=text.encode())
    assert words in command("validate", "bad.json").out


def test_missing_plan_is_no_answer() -> None:
    """A plan that is not there, or is a directory, is neither valid nor invalid."""
    Path("a.json").write_text(TEXT, encoding="utf-8")
    for name in ("missing.json", "."):
        for asked in (("show", name), ("diff", "a.json", name)):
            assert repr(name) in refused(*asked)
    for others in (("validate",), ("check", "--model", LLAMA_8B)):
        done = command(*others, "missing.json")
        assert (done.code, "'missing.json'" in done.out) == (2, True)


@pytest.mark.parametrize("call", ["is_dir", "iterdir"])
def test_nothing_is_proposed_from_directories_that_must_not_be_read(call: str) -> None:
    """A slip in them is a missing file like others."""
    with patch.object(Path, call, side_effect=PermissionError(13, "Permission denied")):
        assert nearest("closed/plan.json") == ""


def test_a_file_that_must_not_be_read() -> None:
    """The error has the system's reason, and the hint is about that."""
    Path("closed.json").touch()
    with patch("os.open", side_effect=PermissionError(13, "Permission denied")):
        done = command("show", "closed.json")
    assert done.err == "error: cannot read 'closed.json': Permission denied\nhint: check its permissions\n"


def test_a_model_in_place_of_a_plan() -> None:
    """The directory of a model holds no plans."""
    assert refused("show", LLAMA_8B).endswith("hint: it is a model's; tpplan plan makes a plan of that\n")


def test_a_plan_in_another_encoding() -> None:
    """What PowerShell writes where standard output goes to a file is named."""
    for encoding in ("utf-16", "utf-16-be"):
        Path("plan.json").write_bytes(
            ("\ufeff" if encoding == "utf-16-be" else "").encode(encoding) + TEXT.encode(encoding)
        )
        assert "is UTF-16 text, expected UTF-8" in refused("show", "plan.json")


def test_a_slip_in_the_name_of_a_plan() -> None:
    """What is there under nearly the same path is proposed, by commands for one plan and for several."""
    Path("plans").mkdir()
    Path("plans/llama.json").write_text(TEXT, encoding="utf-8")
    for name in ("plans/lama.json", "plan/llama.json", "plans/Llama.json"):
        assert refused("show", name).endswith("hint: did you mean plans/llama.json?\n")
        assert command("validate", name).err == "hint: did you mean plans/llama.json?\n"
    assert refused("show", "plans/mixtral.json").endswith("hint: check the path\n")
    Path("plans/gone.json").symlink_to("nowhere")
    assert command("show", "plans/gone.json").err.endswith("hint: check the path\n")


def test_a_gigabyte_is_not_read() -> None:
    """A file of 1 GiB is refused by its size, whether it is a plan, a config, a devices file or a header's index."""
    for name in ("config.json", "big.json"):
        with Path(name).open("wb") as file:
            file.truncate(HOLE)
    for asked in (
        ("show", "big.json"),
        ("inspect", "config.json"),
        ("plan", LLAMA_8B, "--gpus", "big.json", "-o", "x.json"),
    ):
        assert str(HOLE) in refused(*asked)
    done = command("validate", "big.json")
    assert (done.code, str(HOLE) in done.out) == (1, True)


def test_a_gigabyte_of_spaces_through_a_pipe() -> None:
    """Spaces without end are read no further than the largest document."""
    tpplan = f"{sys.executable} -m tpplan show -"
    done = subprocess.run(
        ["bash", "-c", f"head -c {HOLE} /dev/zero | tr '\\0' ' ' | (ulimit -v 2000000; {tpplan})"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert "has more than 16777216 bytes" in done.stderr
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_json_errors_are_documents() -> None:
    """With --json bad input still gives one document, with every problem of a plan one by one."""
    plan = attrs.evolve(VALID, request=attrs.evolve(VALID.request, batch=0, max_rows=0))
    Path("bad.json").write_text(dumps(plan), encoding="utf-8")
    done = command("show", "bad.json", "--json")
    error = json.loads(done.out)["error"]
    assert (done.code, error["kind"]) == (2, "plan")
    assert [p["path"] for p in error["problems"]] == ["request.batch", "request.max_rows"]
    for asked, kind in (
        (("inspect", "nowhere"), "model"),
        (("plan", LLAMA_8B, "--gpus", "20"), "device"),
        (("plan", LLAMA_8B, "--gpus", "24GiB", "--context", 10**6), "request"),
        (("show", "nowhere.json"), "file"),
    ):
        done = command(*asked, "--json")
        assert (done.code, json.loads(done.out)["error"]["kind"]) == (2, kind)
