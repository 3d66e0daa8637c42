"""The picture and the page: whole, to scale, in one file, and safe with any name."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec_cases import FIXTURE, PLAN
from tests.examples import examples
from tests.render_cases import data
from tests.strategies import plans
from tpplan.planfile import codec
from tpplan.render.html import page
from tpplan.render.svg import picture

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan

ROOT = Path(__file__).parents[2]
NEWER = codec.load(FIXTURE.with_name("plan-1.1.json"))
DRAFTED = codec.load(FIXTURE.with_name("plan-1.4.json"))
SVG = "{http://www.w3.org/2000/svg}"


def named(name: str) -> SplitPlan:
    """Return a plan whose model and devices have this name."""
    devices = tuple(attrs.evolve(device, name=name) for device in PLAN.devices)
    return attrs.evolve(PLAN, devices=devices, model=attrs.evolve(PLAN.model, name=name))


def _svg(plan: SplitPlan, *, narrow: bool = False) -> ET.Element:
    return ET.fromstring(picture(data(plan), narrow=narrow))  # noqa: S314 (our own)


#: Whether a picture is narrow, where its slices begin, and the room for them.
LAYOUTS = [(False, 196, 680), (True, 14, 330)]


@settings(max_examples=examples(40))
@given(plans(), st.sampled_from(LAYOUTS))
def test_svg_is_whole(plan: SplitPlan, layout: tuple[bool, int, int]) -> None:
    """The picture is well-formed, the same every time, and draws each slice where it is and as wide as it is."""
    narrow, start_x, room = layout
    assert picture(data(plan), narrow=narrow) == picture(data(plan), narrow=narrow)
    root = _svg(plan, narrow=narrow)
    drawn = [(r.get("x", ""), r.get("width", "")) for r in root.iter(f"{SVG}rect") if r.get("class") == "gap"]
    slices = [
        (start_x + room * start / split.size, room * (end - start) / split.size)
        for split in plan.splits
        for start, end in pairwise(split.bounds)
        if end > start
    ]
    assert [tuple(map(float, pair)) for pair in drawn] == [pytest.approx(pair, abs=0.01) for pair in slices]


def test_texts_of_a_narrow_picture_have_room() -> None:
    """No text leaves the picture for phones or touches the one beside it, in a wide font (DejaVu Sans)."""
    plan = attrs.evolve(NEWER, model=attrs.evolve(NEWER.model, name="A-Model-With-A-Name-That-Is-Long-Indeed"))
    root = _svg(plan, narrow=True)
    width = float(root.get("width", "0"))
    rows: dict[str, list[tuple[float, float]]] = {}
    for text in root.iter(f"{SVG}text"):
        classes = text.get("class", "").split()
        letter = 12.5 if "title" in classes else 5.6 if "small" in classes else 7.2 if "strong" in classes else 6.7
        x, long = float(text.get("x", "0")), letter * len(text.text or "")
        start = x - long if "end" in classes else x - long / 2 if "mid" in classes else x
        rows.setdefault(text.get("y", ""), []).append((start, start + long))
    for spans in rows.values():
        assert min(start for start, _ in spans) >= 0
        assert max(end for _, end in spans) <= width
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))


def test_svg_shows_exact_numbers_and_buckets() -> None:
    """Each device's bytes are in its tooltip, and each bucket has a column by name, not by colour alone."""
    root = _svg(PLAN)
    texts = [element.text or "" for element in root.iter()]
    exact = "weights 9663676539, cache 536870912, workspace 3146240, overhead 650117120, free 14915992965"
    assert any(exact in text for text in texts)
    assert {"weights", "cache", "workspace", "overhead", "free", "budget", "used"} <= set(texts)
    assert {"9.00", "0.61", "13.89", "24.00", "42.1 %"} <= set(texts)


def test_svg_segments_are_to_scale() -> None:
    """The bar of the largest budget has full length, the others in proportion, and the buckets their part of it."""
    tracks = [r for r in _svg(PLAN).iter(f"{SVG}rect") if r.get("class") == "track" and r.get("height") == "18"]
    widths = [float(track.get("width", "0")) for track in tracks]
    assert widths == pytest.approx([244, 244 * 16 / 24, 244 * 11.5 / 24, 61], abs=0.01)
    weights = [r for r in _svg(PLAN).iter(f"{SVG}rect") if "weights" in r.get("fill", "") and r.get("height") == "18"]
    expected = [m.weights_bytes / (24 * 2**30) * 244 for m in PLAN.memory if m.weights_bytes]
    assert [float(r.get("width", "0")) for r in weights] == pytest.approx(expected, abs=0.01)


def test_what_is_reserved_has_a_place_in_the_picture_and_on_the_page() -> None:
    """As a bucket with its own pattern, only where something is; no columns overlap."""
    root = _svg(NEWER)
    texts = {element.text or "": float(element.get("x", "0")) for element in root.iter(f"{SVG}text")}
    places = [texts[name] for name in ("weights", "cache", "workspace", "overhead", "reserved", "free", "budget")]
    assert all(right - left >= 50 for left, right in pairwise(places))
    drawn = [r for r in root.iter(f"{SVG}rect") if "reserved" in r.get("fill", "") and r.get("height") == "18"]
    expected = [m.reserved_bytes / (24 * 2**30) * 180 for m in NEWER.memory]
    assert [float(r.get("width", "0")) for r in drawn] == pytest.approx(expected, abs=0.01)
    assert "reserved" in page(data(NEWER))
    assert "reserved" not in picture(data(PLAN)) + page(data(PLAN))


def test_room_of_a_draft_model_has_a_place_in_the_picture_and_on_the_page() -> None:
    """As a bucket with its own pattern, beside what is reserved; no columns overlap, nor do they a bar."""
    root = _svg(DRAFTED)
    texts = {element.text or "": float(element.get("x", "0")) for element in root.iter(f"{SVG}text")}
    heads = ("used", "weights", "cache", "workspace", "overhead", "reserved", "draft", "free", "budget")
    assert all(right - left >= 50 for left, right in pairwise(texts[name] for name in heads))
    drawn = [r for r in root.iter(f"{SVG}rect") if "draft" in r.get("fill", "") and r.get("height") == "18"]
    expected = [m.draft_bytes / (24 * 2**30) * 124 for m in DRAFTED.memory]
    assert [float(r.get("width", "0")) for r in drawn] == pytest.approx(expected, abs=0.01)
    tracks = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "track" and r.get("height") == "18"]
    assert max(float(r.get("x", "0")) + float(r.get("width", "0")) for r in tracks) < texts["used"] - 45
    told = "510.00 MiB on device 0, 382.50 MiB on device 1, 127.50 MiB on devices 2 and 3"
    for text in ("<td>room for</td><td>the draft model Fixture-Head, split</td>", f"<td>room</td><td>{told}</td>"):
        assert text in page(data(DRAFTED))
    assert "draft" not in picture(data(NEWER)) + page(data(NEWER))


def test_what_is_not_planned_is_in_the_picture_and_on_the_page() -> None:
    """Beside the model's name, and nothing that follows is moved into it."""
    told = "not planned: vision tower, 1.07 GiB; audio tower, of unknown size"
    texts = {element.text or "": float(element.get("y", "0")) for element in _svg(NEWER).iter(f"{SVG}text")}
    assert texts["Fixture-MoE"] < texts[told] < texts["Memory, GiB"] - 4 * 18
    assert "Not planned: vision tower, 1.07 GiB; audio tower, of unknown size.</strong>" in page(data(NEWER))
    assert "<td>reserve</td><td>1.00 GiB on all others, 2.00 GiB on device 1</td>" in page(data(NEWER))


def test_a_picture_is_as_wide_as_a_narrow_window() -> None:
    """It has a size of its own, which a window of a phone shrinks with its proportions instead of cutting it off."""
    root = _svg(PLAN)
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert ":root{max-width:100%;height:auto}" in (root.findtext(f"{SVG}style") or "")


def test_picture_in_the_readme_is_current() -> None:
    """The README shows what ``tpplan show PLAN --svg docs/images/llama-70b.svg`` draws now."""
    plan = codec.load(ROOT / "examples/plans/Llama-3.1-70B/2xRTX5090+4xRTX4090.json")
    assert (ROOT / "docs/images/llama-70b.svg").read_text(encoding="utf-8") == picture(data(plan))


HOSTILE = "</title><script>alert(1)</script>&amp;\"'\ufffe]]>"


def test_names_cannot_break_out() -> None:
    """A name that looks like markup stays a name, in the picture and on the page."""
    texts = [element.text or "" for element in _svg(named(HOSTILE)).iter()]
    assert not list(_svg(named(HOSTILE)).iter(f"{SVG}script"))
    assert any("<script>alert(1)</script>&amp;" in text for text in texts)
    assert "<script" not in page(data(named(HOSTILE)))


class _Page(HTMLParser):
    """Collects what a page loads, and the text of its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for key, value in attrs if key == "id"]
        self.loads += [value or "" for key, value in attrs if key in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_page_is_one_file() -> None:
    """The page loads nothing, has the picture, and every number of the plan to the byte."""
    reader = _Page()
    reader.feed(page(data(PLAN)))
    assert reader.loads == []
    assert {"svg", "table", "style"} <= reader.tags
    assert len(reader.ids) == len({*reader.ids})  # of the two pictures, of which a screen shows one
    assert "script" not in reader.tags
    for entry in PLAN.memory:
        assert f"{entry.weights_bytes:,}" in reader.cells
    assert {PLAN.model.fingerprint, "25600", "38400", "2 RTX 3060 (Büro)"} <= set(reader.cells)
