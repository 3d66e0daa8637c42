"""What a GGUF file says of texts: its tokenizer, its chat template and the tokens that end a text."""

from __future__ import annotations

import hashlib
import logging
import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from tpplan.core.missing import needing
from tpplan.errors import ModelError, TpplanError
from tpplan.files.text import cache_folder, save_bytes
from tpplan.models.gguf.header import LONGEST_TEXT, MAX_HEADER_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.models.gguf.header import Gguf

_LOG = logging.getLogger(__name__)

_TEMPLATE: Final = "tokenizer.chat_template"
#: Keys of the tokens that end a text, or a turn of a chat.
_END: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def tokenizer_in(file: Gguf) -> tuple[bytes, Path]:
    """Return the tokenizer.json that a file's vocabulary stands for, as transformers converts it, and its origin.

    It is kept on disk, for the same header and versions: converting takes longer than everything else at a start.

    Returns:
        Its bytes, and the path of where they are kept or of the file that they were converted from.

    Raises:
        MissingError: transformers or the package gguf is not installed.
        ModelError: transformers cannot convert it.
    """
    with needing("the tokenizer of a GGUF file", "gguf"):
        versions = [version(name) for name in ("gguf", "tokenizers", "transformers")]
    try:
        kept = cache_folder() / "tokenizers" / f"{_digest(file, versions)}.json"
        if kept.exists():
            return kept.read_bytes(), kept
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory is unknown
        _LOG.info("converting the tokenizer of %s, at every start: %s", file.path.name, error)
        return _converted(file.path), file.path
    _LOG.info("converting the tokenizer of %s, which is kept for the next start", file.path.name)
    found = _converted(file.path)
    try:
        save_bytes(found, kept)
    except TpplanError as error:
        _LOG.info("the tokenizer is not kept: %s", error.message)
    return found, file.path


def _digest(file: Gguf, versions: list[str]) -> str:
    """Return a hash of the header of a model's first file, which has the vocabulary, and of who converts it."""
    starts = [tensor.start for tensor in file.tensors.values() if tensor.file == file.path.name]
    with file.path.open("rb") as opened:
        header = opened.read(min([*starts, MAX_HEADER_BYTES]))
    return hashlib.sha256(b" ".join([*(each.encode() for each in versions), header])).hexdigest()


def _converted(path: Path) -> bytes:
    with needing("the tokenizer of a GGUF file", "gguf"):
        import gguf  # noqa: F401, PLC0415 - an extra
        from transformers import AutoTokenizer  # noqa: PLC0415
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        return bytes(found.backend_tokenizer.to_str(), "utf-8")
    except Exception as error:  # transformers raises nothing narrower
        what = f"transformers does not read the tokenizer of {path.name}: {error!s:.300}"
        raise ModelError(what, "put the model's tokenizer.json beside the file, or give --token-ids") from error


def template_in(file: Gguf) -> str | None:
    """Return a file's chat template; None if it has none.

    Raises:
        ModelError: the template is too long.
    """
    found = file.metadata.get(_TEMPLATE)
    if not isinstance(found, str):
        return None
    if len(found.encode()) >= LONGEST_TEXT:
        what = f"{file.path.name} has a chat template of more than {LONGEST_TEXT} bytes"
        raise ModelError(what, "put the model's chat_template.jinja beside the file, or leave out --chat")
    return found


def special_in(file: Gguf) -> dict[str, int]:
    """Return the numbers of a file's special tokens by the names that chat templates use."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: token for name, token in found.items() if isinstance(token, int)}


def ends_in(file: Gguf) -> frozenset[int]:
    """Return the tokens that end a text."""
    return frozenset(token for key in _END if isinstance(token := file.metadata.get(key), int))
