"""A small checkpoint with a tokenizer, and the command ``tpplan generate`` on it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

import tokenizers

from tests.command import Done, command
from tests.decoder.chat_cases import CHATML, write_template, write_tokenizer
from tests.decoder_cases import VOCAB, model_of, plan_of, request_of

if TYPE_CHECKING:
    from pathlib import Path

PROMPT: Final = "The quick brown fox, señor Ω"
#: The last lines of standard error, of so many tokens.
TIME: Final = (
    r"start: first token after [0-9.]+ s: (Python|Python and torch) [0-9.]+, plan [0-9.]+, torch [0-9.]+, "
    r"(compile [0-9.]+, weights [0-9.]+ \([0-9.e-]+ GB at [0-9.e-]+ GB/s\), decoder [0-9.]+|model [0-9.]+), "
    r"first token [0-9.]+\n"
    r"time: {prompt} prompt tokens \([0-9.]+ tokens/s\), {new} new tokens \([0-9.]+ tokens/s\)\n"
)


def write_checkpoint(directory: Path, batch: int = 1) -> Path:
    """Write a small checkpoint, with a tokenizer whose tokens are the bytes of UTF-8 and some pairs of them."""
    shutil.copytree(model_of("mistral").directory, directory)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(set(bytes_of(PROMPT)))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([PROMPT] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    plan_of(directory, 3, request_of(batch=batch), {}, seed=4).save(directory / "plan.json")
    return directory


def write_chat_checkpoint(directory: Path, batch: int = 1) -> Path:
    """Write a small checkpoint with a chat template, whose tokens are printable characters and special ones."""
    shutil.copytree(model_of("llama").directory, directory)
    write_tokenizer(directory, bytes_of("".join(map(chr, range(32, 127))) + "\n"))
    write_template(directory, CHATML, "text")
    plan_of(directory, 3, request_of(batch=batch), {}, seed=4).save(directory / "plan.json")
    return directory


def bytes_of(text: str) -> list[str]:
    """Return the characters that stand for the bytes of a text in a tokenizer of bytes."""
    found = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [char for word, _ in found for char in word]


def generate(checkpoint: Path, *arguments: object, stdin: bytes = b"") -> Done:
    """Run the command on the small checkpoint and its plan."""
    plan = checkpoint / "plan.json"
    return command("generate", plan, "--model", checkpoint, "--backend", "cpu", *arguments, stdin=stdin)
