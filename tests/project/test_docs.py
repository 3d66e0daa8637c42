"""What the README and the pages of docs/ say is so."""

from __future__ import annotations

import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import tpplan
from tests.command import command
from tpplan.core.device import DEFAULT_OVERHEAD_BYTES, UNMEASURED_OVERHEAD_BYTES
from tpplan.exec import TPContext
from tpplan.exec import compile as compile_plan
from tpplan.hardware import catalogue
from tpplan.hardware import file as devices_file
from tpplan.models.families import supported
from tpplan.models.families.drafts import DRAFTS, KINDS
from tpplan.models.families.predictions import PREDICTIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file of this repository names one that exists."""
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nobody_is_sent_to_an_index_for_tpplan(page: Path) -> None:
    """No page says to install a package of this name, which may be anybody's, but only a clone or a URL."""
    assert not re.findall(r"pip install [^`\n]*\btpplan\b|tpplan\[[a-z]", page.read_text(encoding="utf-8"))


def test_the_python_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines run, and what their comments say is what they give."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    code, execution = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 (our own)
    assert capsys.readouterr().out == "the plans are equal\n"
    exec(execution, {})  # noqa: S102 (our own; it stands alone)
    assert capsys.readouterr().out.startswith("Llama-3.1-8B, transport events, 1 to 2048 rows of bfloat16\n")
    promised = re.findall(r"^(plan\..+?)  # (.+)$", code, re.MULTILINE)
    assert len(promised) == 2
    for call, value in promised:
        assert repr(eval(call, names)) == value  # noqa: S307 (our own)


def test_the_screen_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines below the command are those of its screen, in their order; what is between them is left out."""
    monkeypatch.chdir(ROOT)
    arguments, shown = re.findall(r"```text\n\$ tpplan (.*?)\n(.*?)```", README, re.DOTALL)[0]
    screen = command(*arguments.split()).out.splitlines()
    places = [screen.index(line) for line in shown.splitlines()]
    assert places == sorted(places)


def test_the_readme_names_the_models() -> None:
    """The list of models is the list of the tables."""
    text = README.partition("## Models")[2].partition("Their names")[0]
    for start in ("Dense:", "With experts:", "And the text part of"):
        assert start in text
        text = text.replace(start, "")
    assert set(re.findall("[A-Za-z0-9_-]+", text)) - {"and"} == set(supported())


def rows(page: str, title: str) -> list[list[str]]:
    """Return the rows of the first table below a title of a page, or the table that starts so."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(title)[2]
    table = re.findall(r"^\| .*\|$", text.partition("\n|---")[2].partition("\n\n")[0], re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]


def test_the_page_of_plans_names_prediction_layers() -> None:
    """The list of families is that of the tables."""
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    named = text.partition("### Prediction layers")[2].partition("Others are refused")[0].replace("`model_type`", "")
    assert re.findall("`([a-z0-9_]+)`", named) == sorted(PREDICTIONS)


def test_the_pages_name_heads() -> None:
    """The lists of heads, of their classes and of engines' methods are those of the tables."""
    names = [re.sub("^an? | head$", "", kind.name) for kind in KINDS.values()]
    heads = rows("planning.md", "### Heads")
    assert [name for name, *_ in heads] == names
    for (_, known, _), kind in zip(heads, KINDS, strict=True):
        others = {name for other in KINDS if other != kind for name in DRAFTS[other].architectures}
        assert set(DRAFTS[kind].architectures) - others <= set(re.findall("`(.+?)`", known))
    assert rows("engines.md", "| head | vLLM") == [
        [name, *(f"`{method}`" if method else "" for method in (kind.vllm, kind.sglang, kind.llamacpp))]
        for name, kind in zip(names, KINDS.values(), strict=True)
    ]


def test_the_python_of_the_executor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example runs, its assertions hold, and it prints what its comment says."""
    monkeypatch.chdir(ROOT)
    code, of_channels = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/executor.md").read_text(encoding="utf-8"), re.DOTALL
    )
    exec(code, {})  # noqa: S102 (our own)
    assert capsys.readouterr().out.strip() in code
    launched: list[Any] = []
    context = Mock(spec=TPContext, all_devices=(0, 2))
    context.channel.return_value.run = lambda launches: [launch() for launch in launches]
    names = {"ctx": context, "rows": 2, "columns": 8, "partial": partial, "launch": lambda *told: launched.append(told)}
    exec(of_channels, names)  # noqa: S102
    context.channel.assert_called_once_with(16)
    assert [device for device, _ in launched] == [0, 2]


def test_the_explanation_of_the_executor() -> None:
    """The lines of ``explain()`` that the page shows are among those that it gives for the example that has them."""
    page = (ROOT / "docs/executor.md").read_text(encoding="utf-8")
    heads, *shown = page.partition("```text\n")[2].partition("```")[0].splitlines()
    plan = tpplan.load(ROOT / "examples/plans/Llama-3.1-70B/2xRTX5090+4xRTX4090.json")
    with compile_plan(plan, backend="cpu", transport="peer") as context:
        lines = str(context.explain()).splitlines()
    squeezed = {re.sub(" +", " ", line) for line in lines}
    assert {re.sub(" +", " ", line) for line in (heads, *shown)} <= squeezed


def test_the_picture_of_a_program() -> None:
    """The committed picture is what the script draws from the program; ``python examples/draw_program.py`` does."""
    drawn = runpy.run_path(str(ROOT / "examples/draw_program.py"))
    assert drawn["PICTURE"].read_text(encoding="utf-8") == drawn["picture"]()


def test_the_picture_is_drawn_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script writes the repository's picture whatever the current directory is, and names it from there."""
    written: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "write_text", lambda path, *_, **__: written.append(path))
    runpy.run_path(str(ROOT / "examples/draw_program.py"), run_name="__main__")
    assert written == [ROOT / "docs/images/all-reduce.svg"]
    assert capsys.readouterr().out == "docs/images/all-reduce.svg\n"


def test_the_screens_of_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page on engines shows is what the commands print."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    shown = re.findall(r"```text\n\$ tpplan (.*?)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for arguments, screen in shown:
        done = command(*arguments.split())
        assert done.out + done.err == screen


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the error that the page on planning shows are those that there are."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    (fits, table), (plans, error) = re.findall(r"```\n\$ tpplan (.*?)\n(.*?)```", page, re.DOTALL)[:2]
    assert command(*fits.split()).out == table
    assert command(*plans.split()).err == error


def test_the_devices_file(tmp_path: Path) -> None:
    """The devices file that the page on planning shows is one, with the fewest keys that are safe."""
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "devices.json").write_text(text, encoding="utf-8")
    devices = tpplan.parse_devices(str(tmp_path / "devices.json"))
    assert [(device.name, device.budget_bytes, device.bandwidth_bytes_per_second) for device in devices] == [
        ("RTX 4090", 24 * 10**9, catalogue.find("RTX 4090").bandwidth_bytes_per_second),
        ("RTX 3060", 12 * 10**9, catalogue.find("RTX 3060").bandwidth_bytes_per_second),
    ]
    nameless = devices_file.loads(re.sub(r',\s+"bandwidth_bytes_per_second": [0-9]+', "", text)).to_devices()
    assert {device.bandwidth_bytes_per_second for device in nameless} == {0}  # names are not looked up
    assert {device.overhead_bytes for device in devices} == {890 * 2**20}
    for key in set(re.findall('"([a-z]+_bytes)"', text)) - {"overhead_bytes"}:
        with pytest.raises(tpplan.DeviceError, match="is missing"):
            devices_file.loads(re.sub(f', "{key}": [0-9]+', "", text))


def test_texts_agree_on_the_overhead() -> None:
    """Of a GPU that --gpus names, and of one that a devices file names without it."""
    named, left_out = (f"{size // 2**20} MiB" for size in (UNMEASURED_OVERHEAD_BYTES, DEFAULT_OVERHEAD_BYTES))
    gpus = tpplan.parse_devices("RTX4090,H100,20GiB")
    assert {f"{gpu.overhead_bytes // 2**20} MiB" for gpu in gpus} == {named}
    assert catalogue.overhead("9.0").bytes == UNMEASURED_OVERHEAD_BYTES
    file = '{"format_version": "1.0", "devices": [{"name": "a", "memory_bytes": 9, "budget_bytes": 9}]}'
    assert devices_file.loads(file).devices[0].overhead_bytes == DEFAULT_OVERHEAD_BYTES
    planning = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| overhead \|.*", README, re.MULTILINE)
    (key,) = re.findall(r"^- `overhead_bytes` is .*(?:\n  .*)*", planning, re.MULTILINE)
    (described,) = re.findall(r"driver context.*", (ROOT / "schemas/devices-file.schema.json").read_text("utf-8"))
    for text in (row, key, described):
        assert set(re.findall(r"\d+ MiB", text)) == {named, left_out}
    assert re.findall(r"costs its overhead, (\d+ MiB)\s+for GPUs named in `--gpus`", planning) == [named]
