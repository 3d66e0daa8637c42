"""The views on the screen: readable, whole, and no wider than it is."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec_cases import FIXTURE, PLAN
from tests.examples import examples
from tests.render_cases import data, plain
from tests.strategies import plans
from tpplan.core.axes import bounds_of, format_layers
from tpplan.core.device import Device
from tpplan.core.plan import Cache, DeviceMemory, SplitPlan
from tpplan.files.codec import unstructure
from tpplan.planfile import codec
from tpplan.render.blocks import lines_of
from tpplan.render.diff import diff as diff_view
from tpplan.render.show import show
from tpplan.render.svg import picture
from tpplan.render.text import (
    PLAIN_COLUMNS,
    abridged,
    amount,
    bar,
    elided,
    line_width,
    percent,
    shorten,
    shorten_layers,
    shorten_name,
    width,
)
from tpplan.reports.diff import diff

if TYPE_CHECKING:
    from collections.abc import Callable

NEWER = codec.load(FIXTURE.with_name("plan-1.1.json"))

SHOWN = """\
Fixture-MoE on 4 devices
  Qwen2MoeForCausalLM, 6 layers, bfloat16, sha256:0123456789ab…
  layout reduce, strategy balanced, cache q8 for 32768 tokens (2 sequences), up to 2048 rows, KV
  heads replicated

Memory, GiB
                    weights  cache  workspace  overhead   free  budget
0  RTX 4090            9.00   0.50      <0.01      0.61  13.89   24.00  ████████············  42.1 %
1  RTX 4080            5.00   0.25      <0.01      0.50  10.25   16.00  ██████▓·············  35.9 %
2  RTX 3060 (Büro)     3.00   0.25      <0.01      0.50   7.75   11.50  █████▓░·············  32.6 %
3  RTX A2000              0      0          0         0   6.00    6.00  ····················   0.0 %
   together           17.00   1.00       0.01      1.61  37.89   57.50
    █ weights  ▓ cache  ▒ workspace  ░ overhead  · free
"""


def many(count: int) -> SplitPlan:
    """Return a plan for very many devices."""
    devices = tuple(Device(name=f"GPU {i}", budget_bytes=2**30, overhead_bytes=1) for i in range(count))
    splits = tuple(
        attrs.evolve(s, unit=1, size=count * 16, replicas=1, bounds=bounds_of([16] * count, 1, count * 16))
        for s in PLAN.splits
        if not s.layers
    )
    memory = tuple(DeviceMemory(i, i, 0, 0, 1, 2**30 - i - 1) for i in range(count))
    return attrs.evolve(PLAN, devices=devices, splits=splits, memory=memory)


def test_show_memory() -> None:
    """Off a terminal a plan's memory is this text, with a bar of each device's budget."""
    assert plain(show(data(PLAN))).startswith(SHOWN)


NARROW = """\
   together           17.00   1.00       0.01      1.61  37.89   57.50

0  RTX 4090         █████████████████░░·························  42.1 %
1  RTX 4080         ██████████████░░····························  35.9 %
2  RTX 3060 (Büro)  ███████████▓░░······························  32.6 %
3  RTX A2000        ············································   0.0 %
    █ weights  ▓ cache  ▒ workspace  ░ overhead  · free
"""


NEWER_SHOWN = """\
Fixture-MoE on 4 devices
  not planned: vision tower, 1.07 GiB; audio tower, of unknown size
  assumed: weights in BF16: pytorch_model.bin is not read
"""
NEWER_MEMORY = """\
                    weights  cache  workspace  overhead  reserved   free  budget
0  RTX 4090            9.00   0.50      <0.01      0.61      1.00  12.89   24.00  █████▓········  46.3 %
1  RTX 4080            5.00   0.25      <0.01      0.50      2.00   8.25   16.00  ████▓::·······  48.4 %
"""


def test_show_what_is_not_planned_and_what_is_reserved() -> None:
    """The model's name is never without what the plan leaves out of it, and only what it counts is called exact."""
    text = plain(show(data(NEWER)), columns=104)
    assert text.startswith(NEWER_SHOWN)
    assert NEWER_MEMORY in text
    assert ": reserved" in text
    assert "all bytes used or reserved\n" in text
    assert text.endswith(
        " of all budgets used or reserved, at most 48.4 % (device 1 RTX 4080)\n"
        "cache and workspace of what is planned are exact; weights and overhead are estimates\n"
    )
    without = attrs.evolve(NEWER, model=attrs.evolve(NEWER.model, not_planned=(), assumed=""))
    assert plain(show(data(without))).endswith("\nweights, cache and workspace are exact; overhead is an estimate\n")


def test_show_on_a_narrow_terminal() -> None:
    """Where bars find no room beside the numbers they have lines of their own; nothing is wider than the screen."""
    text = plain(show(data(PLAN)), columns=72)
    assert NARROW in text
    assert max(map(width, text.splitlines())) <= 72


SHOWN_SPLITS = """\
Splits, start:end; shares of all budgets and of all bytes used
                    requested  achieved  kv_heads  q_heads  intermediate        vocab   residual
   layers                                     0-5      0-5           0-1
   size                                         4       16          2880        50257       2048
   unit                                         1        1            64           32         32
   replicas                                     2        1             1            1          1
0  RTX 4090            41.7 %    51.5 %       0:2      0:8        0:1280      0:25600     0:1024
1  RTX 4080            27.8 %    29.3 %       2:3     8:12     1280:2176  25600:38400  1024:1536
2  RTX 3060 (Büro)     20.0 %    19.1 %       3:4    12:16     2176:2880  38400:50257  1536:2048
3  RTX A2000           10.4 %     0.0 %         -        -             -            -          -

                    expert_intermediate  expert_intermediate  shared_intermediate
"""


def test_show_splits() -> None:
    """Below it, what each device was to get and got, and its slice of every split; many splits take two tables."""
    text = plain(show(data(PLAN)))
    assert SHOWN_SPLITS in text
    assert text.endswith(
        "34.1 % of all budgets used, at most 42.1 % (device 0 RTX 4090)\n"
        "weights, cache and workspace are exact; overhead is an estimate\n"
    )


def test_diff() -> None:
    """A diff says which inputs and devices differ, what each device holds before and after, and the bytes that move."""
    devices = (attrs.evolve(PLAN.devices[0], name="RTX 5090", budget_bytes=32 * 2**30), *PLAN.devices[1:])
    residual = attrs.evolve(PLAN.splits[4], bounds=(0, 1280, 1536, 2048, 2048))
    memory = attrs.evolve(PLAN.memory[0], weights_bytes=PLAN.memory[0].weights_bytes + 2**30, free_bytes=22 * 2**30)
    other = attrs.evolve(
        PLAN,
        devices=devices,
        splits=(*PLAN.splits[:4], residual, *PLAN.splits[5:]),
        memory=(memory, *PLAN.memory[1:]),
    )
    text = plain(diff_view(unstructure(diff(PLAN, other))))
    assert re.search(r"~ +0 +RTX 5090 +name +RTX 4090 +→ +RTX 5090\n +budget_bytes +24.00 GiB +→ +32.00 GiB\n", text)
    assert re.search(r"0 +RTX 5090 +1024 → 1280\n1 +RTX 4080 +512 → 256\n2 +RTX 3060 \(Büro\) +512\n", text)
    assert re.search(r"0 +RTX 5090 +\+1.00 +0 +0 +0 +\+8.11\n", text)
    assert "device 0 RTX 5090 gains 1.00 GiB of weights" in text


def test_diff_colours_what_is_better_and_worse() -> None:
    """More memory in use, less free, fewer tokens, slower and smaller are bad, the contrary good; moves are neither."""
    asked = attrs.evolve(PLAN.request, cache=Cache("q6", 16384), max_rows=64)
    residual = attrs.evolve(PLAN.splits[4], bounds=(0, 1280, 1536, 2048, 2048))
    more, less = (attrs.evolve(PLAN.memory[i], weights_bytes=PLAN.memory[i].weights_bytes + delta,
                               free_bytes=PLAN.memory[i].free_bytes - delta)
                  for i, delta in ((0, 2**30), (1, -3 * 2**29)))  # fmt: skip
    larger = attrs.evolve(PLAN.devices[0], budget_bytes=25 * 2**30, overhead_bytes=2**30)
    other = attrs.evolve(
        PLAN,
        request=asked,
        devices=(larger, *PLAN.devices[1:]),
        splits=(*PLAN.splits[:4], residual, *PLAN.splits[5:]),
        memory=(more, less, *PLAN.memory[2:]),
    )
    changes = unstructure(diff(PLAN, other))
    changes["speed"] = [
        {"prefill": False, "rows": 1, "before_tokens_per_second": 100, "after_tokens_per_second": 80},
        {"prefill": True, "rows": 512, "before_tokens_per_second": 100, "after_tokens_per_second": 150},
    ]
    styles = {text: style for one in lines_of(diff_view(changes), 100) for text, style in one}
    bad, good = (sorted(text for text in styles if styles[text] == style) for style in ("bad", "good"))
    assert bad == ["+1.00", "-1.00", "-20 %", "1.00 GiB", "16384", "80"]
    assert good == ["+0.50", "+1.50", "+50 %", "-0.50", "-1.50", "150", "25.00 GiB"]
    assert styles["q6"] == styles["64"] == styles["1024 → 1280"] == styles["512 → 256"] == ""


@settings(max_examples=examples(60))
@given(plans(), plans())
def test_columns(a: SplitPlan, b: SplitPlan) -> None:
    """Nothing off a terminal is wider than a pull request shows, and no line ends in blanks."""
    for lines in (show(data(a)), diff_view(unstructure(diff(a, b)))):
        for text in plain(lines).splitlines():
            assert width(text) <= PLAIN_COLUMNS
            assert text == text.rstrip()


@settings(max_examples=examples(60))
@given(plans())
def test_everything_is_shown(plan: SplitPlan) -> None:
    """Every slice of every split is on the screen, and every device by name."""
    text = plain(show(data(plan)))
    for split in plan.splits:
        for start, end in pairwise(split.bounds):
            assert start == end or f"{start}:{end}" in text
    assert all(shorten_name(device.name, 22) in text for device in plan.devices)


def test_very_many_devices() -> None:
    """Of 1,024 devices the first and the last are shown, and how many are left out."""
    text = plain(show(data(many(1024))))
    assert len(text.splitlines()) < 90
    assert text.count("… 992 more devices, see --json …") == 2
    assert "GPU 23 " in text
    assert "GPU 24 " not in text
    assert "GPU 1023 " in text
    drawing = picture(data(many(1024)))
    ET.fromstring(drawing)  # noqa: S314 (our own)
    assert "… 976 more devices …" in drawing


def test_ascii() -> None:
    """A stream that has no block characters gets plain ones, and names in escapes rather than an error."""
    text = plain(show(data(PLAN)), "ascii")
    assert "0  RTX 4090" in text
    assert "########" in text
    assert "RTX 3060 (B\\xfcro)" in text


def test_control_characters_do_not_reach_the_terminal() -> None:
    """What a terminal would obey is written out, wherever it came from."""
    assert plain([(("\x1b[2Jgone\u202e\nnext", "bad"),)]) == "\\u001b[2Jgone\\u202e\\nnext\n"


@pytest.mark.parametrize(
    ("size", "scale", "words"),
    [(0, 2**30, "0"), (1, 2**30, "<0.01"), (-1, 2**30, "-<0.01"), (3 * 2**29, 2**30, "1.50"), (7, 1, "7")],
)
def test_amount(size: int, scale: int, words: str) -> None:
    """Nothing and next to nothing are told apart."""
    assert amount(size, scale) == words


@given(
    st.text(max_size=60) | st.text("RTX 40", max_size=60), st.integers(3, 40), st.sampled_from([shorten, shorten_name])
)
def test_shorten(text: str, columns: int, cut: Callable[[str, int], str]) -> None:
    """A shortened text or name fits, keeps both ends, and one that fits is left alone."""
    short = cut(text, columns)
    if width(text) <= columns:
        assert short == text
    else:
        assert width(short) <= columns
        head, _, tail = short.partition("…")
        assert text.startswith(head)
        assert text.endswith(tail)


@pytest.mark.parametrize(
    ("name", "columns", "short"),
    [
        ("RTX PRO 6000 Blackwell Max-Q", 22, "…6000 Blackwell Max-Q"),
        ("RTX PRO 6000 Blackwell", 17, "…6000 Blackwell"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17, "…4090 Laptop GPU"),
    ],
)
def test_shortened_names_keep_their_numbers(name: str, columns: int, short: str) -> None:
    """What is cut out of a GPU's name are words, and not its number."""
    assert shorten_name(name, columns) == short


@given(st.lists(st.integers(0, 2**40), min_size=6, max_size=6), st.integers(1, 60))
def test_bar_has_its_length(amounts: list[int], columns: int) -> None:
    """The glyphs of a bar add up to its length, each bucket within a column of its part."""
    amounts[-1] += 1
    buckets = ("weights", "cache", "workspace", "overhead", "reserved", "free")
    held = {bucket: size for bucket, size in zip(buckets, amounts, strict=True) if bucket != "reserved" or size}
    spans = bar(held, sum(amounts), columns)
    assert line_width(tuple(spans)) == columns
    for bucket, size in held.items():
        cells = sum(len(text) for text, style in spans if style == bucket)
        assert abs(cells - size * columns / sum(amounts)) <= 1


@given(st.integers(0, 5000), st.integers(4, 64))
def test_elided(count: int, most: int) -> None:
    """No more than asked is shown, and all of it if it fits."""
    first, last = elided(count, most)
    assert len(first) + len(last) == min(count, most)
    assert [*first, *last] == sorted({*first, *last})
    assert not last or last.stop == count


@given(st.sets(st.integers(0, 200), min_size=1, max_size=60), st.integers(10, 40))
def test_layers_are_cut_between_ranges(layers: set[int], columns: int) -> None:
    """What is left of the ranges are the first and the last ones, whole; a few that do not fit are counted."""
    whole = format_layers(layers)
    short = shorten_layers(whole, columns)
    assert len(short) <= columns
    if short == f"{len(layers)} layers":
        first, *_, last = whole.split(",")
        assert len(f"{first},…,{last}") > columns or whole.count(",") < 1
    elif short != whole:
        first, last = short.split(",…,")
        assert whole.startswith(f"{first},")
        assert whole.endswith(f",{last}")
        assert "," not in last


def test_fingerprints_are_shortened_apart() -> None:
    """Two that differ, wherever, look different; they are shown in full where their starts are equal."""
    first, last, other = f"sha256:{'a' * 64}", f"sha256:{'a' * 63}b", f"sha256:{'b' * 64}"
    assert abridged(f"{first}, not {other}") == f"sha256:{'a' * 12}…, not sha256:{'b' * 12}…"
    assert abridged(f"{first} and {first}") == f"sha256:{'a' * 12}… and sha256:{'a' * 12}…"
    assert abridged(f"{first}, not {last}") == f"{first}, not {last}"


def test_a_percentage_is_whole_only_where_nothing_is_left() -> None:
    """368 KiB of 24 GiB are 15 millionths."""
    assert [percent(ppm) for ppm in (10**6, 999_985, 999_499, 999_400, 12_345, 0)] == [
        "100.0 %",
        "99.9 %",
        "99.9 %",
        "99.9 %",
        "1.2 %",
        "0.0 %",
    ]


def test_what_is_not_known_is_no_zero_in_a_diff() -> None:
    """A bandwidth that no catalogue has; and what was asked for comes before the version that follows from it."""
    devices = tuple(attrs.evolve(device, bandwidth_bytes_per_second=0) for device in PLAN.devices)
    known = tuple(attrs.evolve(device, bandwidth_bytes_per_second=936 * 10**9) for device in PLAN.devices)
    request = attrs.evolve(PLAN.request, batch=PLAN.request.batch + 1)
    plans = (
        attrs.evolve(PLAN, devices=devices),
        attrs.evolve(PLAN, devices=known, request=request, format_version="1.9"),
    )
    changes = unstructure(diff(*plans))
    told = {"path": "bandwidth_bytes_per_second", "after": 936 * 10**9}
    assert [each for device in changes["devices"] for each in device["fields"]] == [told] * len(known)
    text = plain(diff_view(changes))
    assert re.search(r"bandwidth_bytes_per_second +unknown +→ +936 GB/s", text)
    assert text.index("request.batch") < text.index("format_version")
