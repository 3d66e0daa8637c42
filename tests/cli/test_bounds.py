"""Any file gives success or one error within 5 seconds of CPU time and 512 MiB."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from functools import cache
from math import ceil
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.checkpoints import LLAMA, llama_layers, llama_outside, write_checkpoint
from tests.cli_cases import LLAMA_8B, folder  # noqa: F401 (for every test here)
from tests.codec_cases import TEXT
from tpplan.models.checkpoint import MAX_HEADER_BYTES, MAX_TENSORS

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS: Final = 5
#: CPU seconds that a million rounds of a loop take on a machine of 2020.
USUAL: Final = 0.07
#: What a process may take: 512 MiB, and the address space that it has when it starts.
ADDRESS_BYTES: Final = (512 + 128) * 2**20
#: Bytes of a file that are not there: nobody reads 700 MB to see that.
HUGE: Final = 700 * 10**6

CONFIG: dict[str, Any] = json.loads((LLAMA_8B / "config.json").read_text(encoding="utf-8"))
LIMIT: Final = 16 * 2**20


def _ran(*arguments: str) -> str:
    """Run a command within the limits, and return what it says."""
    return _said(_started(*arguments))


def _started(*arguments: str) -> subprocess.Popen[str]:
    """Start a command within the limits."""
    _seconds()  # here, not in the process that is limited
    words, pipe = [sys.executable, "-m", "tpplan", *arguments], subprocess.PIPE
    return subprocess.Popen(words, text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, preexec_fn=_limit)  # noqa: PLW1509 (no thread)


def _said(process: subprocess.Popen[str]) -> str:
    """Return what a command says until it ends."""
    try:
        out, err = process.communicate(timeout=90)  # a hang
    finally:
        process.kill()
    assert process.returncode in {0, 1, 2}, (process.returncode, err[-500:])  # -24 is too much CPU time
    said = out + err
    assert "has a bug" not in said, said[-500:]
    assert "Traceback" not in said, said[-500:]
    assert len(said.splitlines()) < 250
    assert len(said) < 30_000
    return said


@cache
def _seconds() -> int:
    """Return the seconds that a process may take: more on a machine that is slow now, as shared ones may be."""
    start, total = process_time(), 0
    for i in range(10**6):
        total += i
    return ceil(SECONDS * max(1.0, (process_time() - start) / USUAL))


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_seconds(), _seconds()))


def _filled(start: str, piece: str, end: str, most: int = LIMIT) -> bytes:
    """Return a text of as many different pieces as fit; ``#`` in a piece is its number."""
    count, length, marks = 0, len(start) + len(end), piece.count("#")
    for digits in range(1, 9):
        each = len(piece) + 1 + marks * (digits - 1)
        room = max(0, -(-(most - length - len(piece) - 9) // each))
        found = min(room, 16**digits - count)
        count, length = count + found, length + found * each
        if found == room:
            break
    parts = piece.split("#")
    pieces = (f"{i:x}".join(parts) for i in range(count)) if marks else [piece] * count
    return (start + ",".join(pieces) + end).encode()


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE)


def _plan_with(key: str, value: Any) -> bytes:
    data = json.loads(TEXT)
    *parents, last = key.split(".")
    inner = data
    for each in parents:
        inner = inner[int(each)] if each.isdecimal() else inner[each]
    inner[int(last) if last.isdecimal() else last] = value
    return json.dumps(data).encode()


#: What is in a file that stands for a plan, a devices file and a config.json in turn.
DOCUMENTS: Final[dict[str, Callable[[], bytes]]] = {
    "empty arrays": lambda: _filled("[", "[]", "]"),
    "empty objects": lambda: _filled('{"a":[', "{}", "]}"),
    "small objects": lambda: _filled("[", '{"#":0}', "]"),
    "different keys": lambda: _filled("{", '"#":0', "}"),
    "one key": lambda: _filled("{", '"a":0', "}"),
    "keys twice": lambda: b'{"a":' + _filled("{", '"#":0,"#":0', "}", 6 * 2**20) + b"}",
    "numbers": lambda: _filled("[", "1.5", "]"),
    "half the most values": lambda: _filled("[", '{"#":[]}', "]", 3 * 2**20),
    "long numbers": lambda: b"[" + b"9" * (LIMIT - 2) + b"]",
    "opening brackets": lambda: b"[" * LIMIT,
    "deep": lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "one text": lambda: b'{"model_type": "' + b"a" * (LIMIT - 20) + b'"}',
    "escapes": lambda: b'{"model_type": "' + b"\\ud800" * 2_000_000 + b'"}',
    "lines": lambda: b"\n" * LIMIT,
    "plan of many splits": lambda: _plan_with("splits", json.loads(TEXT)["splits"] * 3000),
    "plan of bad splits": lambda: _plan_with("splits", [{}] * 200_000),
    "plan of many devices": lambda: _plan_with("devices", json.loads(TEXT)["devices"] * 20_000),
    "plan of many bounds": lambda: _plan_with("splits.0.bounds", list(range(700_000))),
    "plan of bad bounds": lambda: _plan_with("splits", [{"bounds": ["x"] * 300}] * 300),
    "plan of many layers": lambda: _plan_with("splits.0.layers", ",".join(map(str, range(500_000)))),
    "plan of all layers": lambda: _plan_with("splits.0.layers", f"0-{10**18}"),
    "plan of unknown keys": lambda: _plan_with("model", {f"k{i}": 0 for i in range(300_000)}),
    "plan of a long name": lambda: _plan_with("model.name", "a" * 15_000_000),
    "devices": lambda: _filled(
        '{"format_version":"1.0","devices":[', '{"name":"#","memory_bytes":9,"budget_bytes":9}', "]}"
    ),
    "links": lambda: _filled(
        '{"format_version":"1.0","devices":[{"name":"a","memory_bytes":9,"budget_bytes":9}],"links":[',
        '{"first":0,"second":1,"kind":"pcie"}',
        "]}",
    ),
    "layers of all kinds": lambda: json.dumps(CONFIG | {"layer_types": ["full_attention"] * 900_000}).encode(),
    "many layers": lambda: json.dumps(CONFIG | {"num_hidden_layers": 2**31 - 1}).encode(),
    "large sizes": lambda: json.dumps(CONFIG | dict.fromkeys(("hidden_size", "vocab_size"), 2**31 - 1)).encode(),
    "architectures": lambda: json.dumps(CONFIG | {"architectures": ["a" * 9] * 900_000}).encode(),
    "an unknown type": lambda: json.dumps(CONFIG | {"model_type": "llama" * 10**6}).encode(),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_documents(case: str) -> None:
    """A text of 16 MiB or less, whatever is in it."""
    Path("it.json").write_bytes(DOCUMENTS[case]())
    wanted = ("plan ", "devices", "links"), ("layers", "large", "arch", "an ", "many ")
    if not case.startswith(wanted[0] + wanted[1]):
        _ran("validate", "it.json")
    if case.startswith("plan "):
        _ran("validate", "it.json")
    elif case.startswith(wanted[0]):
        _ran("plan", str(LLAMA_8B), "--gpus", "it.json", "--context", "4096")
    else:
        _ran("plan", "it.json", "--gpus", "2x80GiB", "--context", "16")


def _header(count: int, entry: str = "") -> bytes:
    """Return a header of tensors of one byte each, as the safetensors library writes it, or in any other form."""
    entry = entry or '"model.layers.0.mlp.experts.#.down_proj.weight":{"dtype":"U8","shape":[1],"data_offsets":[@,$]}'
    pieces = (entry.replace("#", str(i)).replace("@", str(i)).replace("$", str(i + 1)) for i in range(count))
    return ("{" + ",".join(pieces) + "}").encode()


def _weights(header: bytes, size: int = 0) -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, size or 8 + len(header) + MAX_TENSORS)


def _shards() -> None:
    names = [f"model-{i:05}.safetensors" for i in range(9000)]
    for i, name in enumerate(names):
        header = json.dumps({f"a{i}": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        Path("model", name).write_bytes(len(header).to_bytes(8, "little") + header + b"a")
    index = {"weight_map": {f"a{i}": name for i, name in enumerate(names)}}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    Path("model/model.safetensors").unlink()


def _index(data: bytes) -> None:
    Path("model/model.safetensors.index.json").write_bytes(data)


def _replace(path: str, make: Callable[[str], object]) -> None:
    Path(path).unlink()
    make(path)


SPACED: Final = '"#": { "data_offsets":[@,$],"dtype":"U8","shape":[1]}'

#: Changes of a small model's directory.
DIRECTORIES: Final[dict[str, Callable[[], object]]] = {
    "most tensors": lambda: _weights(_header(MAX_TENSORS), 8 + len(_header(MAX_TENSORS)) + MAX_TENSORS),
    "more tensors": lambda: _weights(_header(MAX_TENSORS + 1)),
    "tensors in another form": lambda: _weights(_header(180_000, SPACED), 8 + len(_header(180_000, SPACED)) + 180_000),
    "many tensors in another form": lambda: _weights(_header(MAX_TENSORS, SPACED)),
    "the largest header": lambda: _weights(_filled("{", '"#":[[],[]]', "}", MAX_HEADER_BYTES)),
    "a header of blanks": lambda: _weights(b"{}".ljust(MAX_HEADER_BYTES)),
    "a header of one name": lambda: _weights(b'{"' + b"a" * (MAX_HEADER_BYTES - 4) + b'"'),
    "a header of escapes": lambda: _weights(b'{"' + b"\\\\" * (MAX_HEADER_BYTES // 2 - 4) + b'"'),
    "a header of metadata": lambda: _weights(_filled('{"__metadata__":{', '"#":"a"', "}}", MAX_HEADER_BYTES)),
    "a header of 93 MB": lambda: _weights(_filled("{", '"#":{"dtype":"U8"}', "}", 93 * 10**6)),
    "a shape of many": lambda: _weights(
        b'{"a":{"dtype":"U8","shape":[' + b"9223372036854775807," * 400_000 + b'1],"data_offsets":[0,1]}}'
    ),
    "a huge file": lambda: _sparse(Path("model/model.safetensors")),
    "many files": _shards,
    "a huge index": lambda: _sparse(Path("model/model.safetensors.index.json")),
    "the largest index": lambda: _index(_filled('{"weight_map":{', '"#":"model.safetensors"', "}}", MAX_HEADER_BYTES)),
    "an index of objects": lambda: _index(_filled('{"weight_map":{', '"#":{}', "}}", MAX_HEADER_BYTES)),
    "a huge config": lambda: _sparse(Path("model/config.json")),
    "config is a pipe": lambda: _replace("model/config.json", os.mkfifo),
    "weights are a pipe": lambda: _replace("model/model.safetensors", os.mkfifo),
    "index is a pipe": lambda: os.mkfifo("model/model.safetensors.index.json"),
    "config is endless": lambda: _replace("model/config.json", lambda path: Path(path).symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_directories(case: str) -> None:
    """A model's directory, whatever its files are."""
    layers = llama_layers(lambda rows, columns, _: {".weight": ("F16", (columns, rows))})
    write_checkpoint(Path("model"), LLAMA, llama_outside() | layers)
    DIRECTORIES[case]()
    command = ("plan", "model", "--gpus", "24GiB") if case != "most tensors" else ("inspect", "model")
    assert _ran(*command).startswith("error: ")


def test_special_files() -> None:
    """Pipes that nobody writes to, endless devices and holes in place of a document."""
    os.mkfifo("pipe.json")
    _sparse(Path("huge.json"))
    Path("zero.json").symlink_to("/dev/zero")
    expected = {"pipe": "is a pipe", "huge": f"{HUGE} bytes", "zero": "is a character device"}
    commands = ("validate",), ("plan", str(LLAMA_8B), "--gpus"), ("inspect",)
    # side by side, as a command waits four seconds for a pipe
    started = [(name, _started(*command, f"{name}.json")) for name in expected for command in commands]
    for name, process in started:
        assert expected[name] in _said(process)
