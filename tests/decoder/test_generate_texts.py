"""Stop strings, the sampling of a checkpoint, and several prompts of ``tpplan generate``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decoder.generate_cases import PROMPT, TIME, generate, write_checkpoint
from tests.decoder_cases import LENGTH
from tests.later import transformers
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.speed import Pass, Speed
from tpplan.decoder.generation.timing import Startup, Timing
from tpplan.decoder.text.continuation import Continuation
from tpplan.planfile.codec import load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORDS = ["The quick", "fox, The", "The", "quick brown fox", "señor"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint with a plan for two texts at a time."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", batch=2)


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint, to be changed."""
    return shutil.copytree(checkpoint, tmp_path / "tiny")


def document(directory: Path, *arguments: object) -> dict[str, Any]:
    """Return the document that the command prints."""
    found: dict[str, Any] = json.loads(generate(directory, *arguments, "--json").out)
    return found


class _Letters:
    """A tokenizer whose tokens are pieces of a text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def decode(self, tokens: list[int]) -> str:
        """Return the pieces that these tokens are."""
        return "".join(self._pieces[token] for token in tokens)


@given(text=st.text("abc", max_size=20), cuts=st.sets(st.integers(0, 20)), stops=st.lists(st.text("abc", min_size=1)))
def test_a_text_ends_before_a_stop_string(text: str, cuts: set[int], stops: list[str]) -> None:
    """Whichever is complete first, wherever tokens divide it; no part of it is told, and all of the text before it."""
    ends = sorted({0, len(text)} | {cut for cut in cuts if cut < len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    continuation = Continuation(_Letters(pieces), [], stops)  # type: ignore[arg-type]
    told = []
    for token in range(len(pieces)):
        told.append(continuation.add(token))
        if continuation.stop:
            break
    told.append(continuation.rest())
    seen = "".join(pieces[: len(told) - 1])
    found = [seen.index(stop) for stop in stops if stop in seen]
    assert "".join(told) == (seen[: min(found)] if found else text)
    assert bool(continuation.stop) == bool(found)
    before = "".join(pieces[: len(told) - 2])
    assert not any(stop in before for stop in stops)


def test_stop_strings(checkpoint: Path) -> None:
    """Text before the first of them is printed and nothing after, also where several tokens make it up."""
    asked = ("--prompt", PROMPT, "--max-new-tokens", 60, "--temperature", 9)
    whole = document(checkpoint, *asked)
    text = whole["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 6]  # longer than any token
    assert 0 < text.index(stop) < len(text) - len(stop)
    done = generate(checkpoint, *asked, "--stop", "not in it", "--stop", stop)
    assert done.out == text[: text.index(stop)] + "\n"
    found = document(checkpoint, *asked, "--stop", stop)
    assert (found["stop"], found["ended"], found["text"] + "\n") == (stop, True, done.out)
    assert found["new_tokens"] == whole["new_tokens"][: len(found["new_tokens"])] != whole["new_tokens"]
    assert "stop" not in whole


def test_sampling_of_the_checkpoint(copied: Path) -> None:
    """It is used and told, an option overrides it, and temperature 0 all that draws."""
    path = copied / "generation_config.json"
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    asked = ("--prompt", PROMPT, "--max-new-tokens", 12)
    penalty = "--repetition-penalty", 1.2
    path.unlink()
    drawn = generate(copied, *asked, "--temperature", 0.6, "--top-p", 0.9, "--top-k", 20, *penalty)
    hotter = generate(copied, *asked, "--temperature", 2, "--top-p", 0.9, *penalty)
    greedy = generate(copied, *asked, *penalty)
    assert len({drawn.out, hotter.out, greedy.out}) == 3
    path.write_text(json.dumps(config), encoding="utf-8")
    for options, expected, told in (
        ((), drawn, "temperature 0.6, top-k 20, top-p 0.9"),
        (("--temperature", 2, "--top-k", 0), hotter, "top-p 0.9"),
        (("--temperature", 0), greedy, ""),
    ):
        done = generate(copied, *asked, *options)
        assert done.out == expected.out
        note = done.err.splitlines()[0]
        assert note == f"note: {told}{told and ', '}repetition-penalty 1.2 from generation_config.json"
    path.write_text(json.dumps(config | {"do_sample": False}), encoding="utf-8")
    assert generate(copied, *asked).out == greedy.out


def test_a_file_that_only_says_to_sample(copied: Path) -> None:
    """The temperature is 1, as in transformers."""
    (copied / "generation_config.json").write_text('{"do_sample": true}', encoding="utf-8")
    done = generate(copied, "--prompt", PROMPT, "--max-new-tokens", 4)
    assert done.err.startswith("note: temperature 1 from generation_config.json\n")
    assert transformers.GenerationConfig.from_pretrained(copied).temperature in {1.0, None}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"do_sample": True, "temperature": "hot"}, "temperature is hot, expected a number"),
        ({"do_sample": True, "top_k": 1.5}, "top_k is 1.5, expected a whole number"),
        ({"do_sample": True, "top_p": 7}, "top-p is 7"),
        ({"repetition_penalty": 0}, "the repetition penalty is 0"),
    ],
)
def test_sampling_of_the_checkpoint_that_is_refused(config: dict[str, Any], problem: str, copied: Path) -> None:
    """The file is named, with the setting and its value."""
    (copied / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    done = generate(copied, "--prompt", PROMPT)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err.replace("\n", " ")
    assert "generation_config.json: " in done.err.replace("\n", " ")


@pytest.mark.parametrize("options", [(), ("--temperature", 0.8, "--seed", 5)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("form", ["lines", "json"])
def test_a_file_of_prompts(form: str, options: tuple[object, ...], checkpoint: Path, tmp_path: Path) -> None:
    """Texts are those of each prompt alone, in order, whatever is generated beside it; number n has the seed plus n."""
    path = tmp_path / "prompts"
    lines = [json.dumps({"prompt": word}) for word in WORDS] if form == "json" else [*WORDS[:2], "", *WORDS[2:]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    asked = ("--max-new-tokens", 6, *options[:2])
    done = generate(checkpoint, "--prompts", path, "--max-new-tokens", 6, *options, "--json")
    found = [json.loads(line) for line in done.out.splitlines()]
    for number, (word, each) in enumerate(zip(WORDS, found, strict=True)):
        seed = ("--seed", 5 + number) if options else ()
        alone = document(checkpoint, "--prompt", word, *asked, *seed)
        assert sum(part["time_ns"] for part in alone.pop("start")) == alone.pop("start_ns")
        assert bool(each.pop("start", ())) == bool(each.pop("start_ns", 0)) == (number == 0)  # others waited for none
        assert alone.pop("times")["new_token_count"] == 6
        times = each.pop("times")
        assert each == alone
    tokens = sum(len(each["prompt_tokens"]) for each in found)
    assert re.fullmatch(TIME.format(prompt=tokens, new=6 * len(WORDS)), done.err)
    counts = [times[f"{which}_token_count"] for which in ("prompt", "new", "later")]
    assert counts == [tokens, 30, 25]  # as the screen has
    rates = re.findall(r"\(([\d.]+) tokens/s", done.err)
    counted = [1e9 * times[f"{kind}_token_count"] / times[f"{kind}_ns"] for kind in ("prompt", "later")]
    assert [float(rate) for rate in rates] == pytest.approx(counted, rel=0.02)
    shown = generate(checkpoint, "--prompts", path, "--max-new-tokens", 6, *options).out
    assert shown == "".join(f"==> {number} <==\n{each['text']}\n" for number, each in enumerate(found, 1))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("\n \n", "has no prompts"),
        ('{"prompt": "a"}\nb', "line 2 of "),
        ('{"prompt": 5}', "expected an object with a text as its prompt"),
        ('{"prompt": "a", "n": 1}', "has the keys n, prompt, expected"),
        ('{"prompt": ""}', "has an empty prompt"),
        ("x\n" + "o" * LENGTH, f"prompt 2: {LENGTH} tokens"),
    ],
)
def test_files_of_prompts_that_are_refused(content: str, problem: str, checkpoint: Path, tmp_path: Path) -> None:
    """The line or the prompt is named before anything is loaded."""
    path = tmp_path / "prompts"
    path.write_text(content, encoding="utf-8")
    with patch("tpplan.decoder.generation.command.load_weights", side_effect=AssertionError("too late")):
        done = generate(checkpoint, "--prompts", path)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err.replace("\n", " ")


def test_times_are_those_of_a_clock() -> None:
    """Prompts are timed until their first tokens, new tokens after those, and texts that have ended count no more."""
    now = [0.0]

    def steps() -> Iterator[tuple[int | None, ...]]:
        for seconds, tokens in ((2.0, (1, 2)), (0.5, (3, 4)), (0.5, (None, 5))):
            now[0] += seconds
            yield tokens

    timing = Timing()
    with patch("tpplan.decoder.generation.timing.perf_counter", lambda: now[0]):
        assert len(list(timing.of(500, steps()))) == 3
    assert str(timing) == "500 prompt tokens (250 tokens/s), 5 new tokens (3.0 tokens/s)"
    assert str(Timing()) == "0 prompt tokens, 0 new tokens"


@pytest.mark.parametrize(("before", "first"), [(1.25, "Python and torch 1.25, "), (0.0, "")])
def test_what_the_first_token_waits_for(before: float, first: str) -> None:
    """Parts that follow each other, until the first token; that of Python only if its length is known."""
    now = [5 * 10**9]
    with patch("tpplan.decoder.generation.timing.perf_counter_ns", lambda: now[0]):
        startup = Startup(before)
        for what, seconds, size in (("plan", 0.5, 0), ("weights", 2, 3 * 10**10)):
            now[0] += int(seconds * 1e9)
            startup.mark(what, size)
        for _ in range(2):  # tokens
            now[0] += 10**9
            startup.end()
    parts = f"{first}plan 0.50, weights 2.00 (30 GB at 15 GB/s), first token 1.00"
    assert str(startup) == f"first token after {3.5 + before:.2f} s: {parts}"
    assert [part.size_bytes for part in startup.parts if part.size_bytes] == [3 * 10**10]


def test_a_start_is_that_of_the_process() -> None:
    """In a process of its own, all parts are as long as others see it run, to the hundredths that the system tells."""
    script = (
        "import time\nfrom tpplan.decoder import Startup\ntime.sleep(0.2)\nstartup = Startup()\ntime.sleep(0.1)\n"
        "startup.end()\nprint(*(part.time_ns for part in startup.parts), time.time_ns())"
    )
    started = time_ns()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    python, first_token, ended = map(int, done.stdout.split())
    assert python >= 2 * 10**8
    assert first_token >= 10**8
    assert 0 <= ended - started - python - first_token + 2 * 10**7 < 10**9  # which others may take to start it


def test_the_parts_of_a_start_are_told(checkpoint: Path) -> None:
    """By the command, all of them: none is negative, and together they are no longer than it ran."""
    began = perf_counter()
    parts = document(checkpoint, "--prompt", PROMPT)["start"]
    took = perf_counter() - began
    whats = [part["what"] for part in parts]
    assert whats[1:] == ["plan", "torch", "compile", "weights", "decoder", "first token"]
    assert all(part["time_ns"] >= 0 for part in parts)
    assert sum(part["time_ns"] for part in parts[1:]) / 1e9 <= took
    plan = load(checkpoint / "plan.json")
    sizes = {part["what"]: part["size_bytes"] for part in parts if "size_bytes" in part}
    assert sizes == {"weights": sum(memory.weights_bytes for memory in plan.memory)}


def test_times_beside_what_the_plan_says() -> None:
    """Of steps of as many texts as the plan predicts; where some texts ended early, nothing is compared."""
    speed = Speed(tuple(Pass(rows, (), rows * 10**8, 10**9) for rows in (1, 2)))  # 10 tokens a second
    now = [0.0]

    def steps(*last: int | None) -> Iterator[tuple[int | None, ...]]:
        for tokens in ((1, 2), (3, 4), last):
            now[0] += 0.25
            yield tokens

    with patch("tpplan.decoder.generation.timing.perf_counter", lambda: now[0]):
        for last, words in (((5, 6), "6 new tokens (8.0 tokens/s, the plan says 10)"), ((None, 5), "(6.0 tokens/s)")):
            timing = Timing(speed)
            assert len(list(timing.of(10, steps(*last)))) == 3
            assert str(timing).endswith(words)
