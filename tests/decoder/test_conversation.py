"""``tpplan generate --chat`` as a conversation on a terminal, turn by turn."""

from __future__ import annotations

import io
import signal
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from tests.command import Done
from tests.decoder.generate_cases import write_chat_checkpoint
from tests.decoder_cases import LENGTH
from tests.later import transformers
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.__main__ import main
from tpplan.cli import console
from tpplan.decoder.generation import read_ahead
from tpplan.decoder.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role[0] }}{{ message.content }}{{ ending or '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>a{% endif %}"
)


class _Terminal(io.TextIOWrapper):
    """Standard input that calls itself a terminal."""

    def isatty(self) -> bool:
        """Tell that it is one."""
        return True


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint with a chat template that is short."""
    directory = write_chat_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


def talk(capfd: pytest.CaptureFixture[str], checkpoint: Path, lines: str, *arguments: object) -> Done:
    """Type lines on a terminal, and return what is said."""
    plan = checkpoint / "plan.json"
    given = ("generate", plan, "--model", checkpoint, "--backend", "cpu", "--chat", *arguments)
    with patch.object(sys, "stdin", _Terminal(io.BytesIO(lines.encode()))):
        code = main([str(argument) for argument in given])
    return Done(code, *capfd.readouterr())


def expected(checkpoint: Path, turns: list[str], count: int, **variables: Any) -> tuple[list[str], list[int]]:
    """Return what transformers answers to each turn, and how many tokens each prompt has."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    messages: list[dict[str, str]] = []
    answers, lengths = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
        prompt = theirs(text, add_special_tokens=False)["input_ids"]
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
        answers.append(Tokenizer(checkpoint).decode(whole[0, len(prompt) :].tolist()))
        messages.append({"role": "assistant", "content": answers[-1]})
        lengths.append(len(prompt))
    return answers, lengths


@pytest.mark.parametrize("ending", ["", "<|eot_id|>"])
def test_turns(ending: str, checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each is answered as transformers answers the whole conversation, and read from where the cache ends."""
    turns = ["Who keeps it?", "Why?", "Oh"]
    options = ("--chat-template-kwargs", f'{{"ending": "{ending}"}}') if ending else ()
    done = talk(capfd, checkpoint, "\n".join([*turns[:2], "", *turns[2:], ""]), "--max-new-tokens", 7, *options)
    answers, lengths = expected(checkpoint, turns, 7, **({"ending": ending} if ending else {}))
    assert done.code == 0
    assert done.out.replace("> ", "") == "".join(f"{answer}\n" for answer in answers) + "\n"
    first, *_, time = done.err.replace("> ", "").splitlines()
    assert first == "chat: Ctrl-D ends it, Ctrl-C ends an answer"
    read, new = (int(part.split()[0]) for part in time.removeprefix("time: ").split(", "))
    assert new == 21
    assert read <= lengths[-1] < sum(lengths)  # all together


def test_an_answer_is_interrupted(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends it after a token; the conversation goes on, with what was said of it."""
    write: Callable[[str], None] = console.emit
    pieces: list[str] = []

    def emit(text: str) -> None:
        pieces.append(text)
        write(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(console, "emit", emit)
    before = signal.getsignal(signal.SIGINT)
    done = talk(capfd, checkpoint, "Who keeps it?\nWhy?\n", "--max-new-tokens", 7)
    assert done.code == 0
    assert pieces[3] == "\n"
    assert pieces.count("\n") == 3  # of two answers and the end
    assert signal.getsignal(signal.SIGINT) is before


def test_a_message_that_is_too_long(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is refused with the numbers, and the conversation goes on without it."""
    done = talk(capfd, checkpoint, f"{'a' * LENGTH}\nWhy?\n", "--max-new-tokens", 7)
    (answer,), _ = expected(checkpoint, ["Why?"], 7)
    assert (done.code, done.out.replace("> ", "")) == (0, f"{answer}\n\n")
    assert f"the plan caches {LENGTH} of a sequence" in done.err.replace("\n  ", " ")


def test_no_document_of_a_conversation(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What was asked for cannot be, and is refused."""
    done = talk(capfd, checkpoint, "Why?\n", "--json")
    assert done.code == 2
    assert "a conversation is no JSON document" in done.err


def test_no_conversation_by_transformers(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before torch is imported, which takes seconds."""
    monkeypatch.setattr(read_ahead, "reading_ahead", None)
    done = talk(capfd, checkpoint, "Why?\n", "--engine", "transformers")
    assert (done.code, done.out) == (2, "")
    assert "a conversation is by tpplan's decoder, not by transformers" in done.err
