"""The targets: functions of bytes that raise nothing, except where something is wrong with tpplan."""

from __future__ import annotations

import json
import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final

from tests.codec_cases import PLAN, TEXT
from tests.decoder.chat_cases import TEMPLATES
from tests.fuzz.choices import Choices
from tpplan.core.model import DTYPE_BITS
from tpplan.decoder.text import chat, templates
from tpplan.errors import TpplanError
from tpplan.files.codec import dumps
from tpplan.hardware import file as devices_file
from tpplan.models.checkpoint import read_headers
from tpplan.models.reader import read_model
from tpplan.planfile import codec

if TYPE_CHECKING:
    from collections.abc import Callable

_ROOT: Final = Path(__file__).parents[2]
_FOLDER: Final = Path(mkdtemp(prefix="tpplan-fuzz-"))
_DEVICES: Final[dict[str, Any]] = {
    "format_version": "1.0",
    "devices": [
        {"name": "RTX 4090", "memory_bytes": 25757220864, "budget_bytes": 24696061952, "capability": "8.9"},
        {
            "name": "RTX 3060",
            "memory_bytes": 12884901888,
            "budget_bytes": 12582912000,
            "overhead_bytes": 536870912,
            "overhead_source": "measured",
            "bandwidth_bytes_per_second": 360000000000,
            "capability": "8.6",
        },
    ],
    "links": [{"first": 0, "second": 1, "kind": "pcie", "path": "host_bridge", "peer_access": "no"}],
}
_CONFIGS: Final = [json.loads(path.read_text()) for path in sorted(_ROOT.glob("examples/models/*/config.json"))]
_QUANTISED: Final[list[dict[str, Any]]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            }
        },
    },
]
#: Pieces that templates are made of.
_PIECES: Final = (
    *(
        "{{ ",
        " }}",
        "{% ",
        " %}",
        "{%- ",
        "-%}",
        "{# ",
        " #}",
        "(",
        ")",
        "[",
        "]",
        "|",
        " ~ ",
        " + ",
        " * ",
        "**",
        ", ",
    ),
    *("for x in ", "endfor", "if ", "else", "endif", "set x = ", "macro m()", "endmacro", "m()", "break", "continue"),
    *(
        "messages",
        "messages[0].content",
        "x",
        "loop",
        "loop.index",
        "'a'",
        "10",
        "9" * 9,
        "namespace(a=1)",
        "range(99)",
    ),
    *("tojson", "join", "length", "list", "map('upper')", "center(9999)", "indent", "batch(3)", "trim", "reverse"),
    *("raise_exception('no')", "strftime_now('%Y')", "generation", "endgeneration", "bos_token", "is defined", "in "),
    *("filter upper", "endfilter", "call m()", "endcall", "include 'a'", "self", "cycler(1)", "lipsum()", "__class__"),
)
_DEADLINE_S: Final = 1.0


def plans(data: bytes) -> None:
    """Read a plan; what is read can be written, and is the same when it is read again."""
    choices = Choices(data)
    text = choices.rest() if not choices.below(4) else choices.text(choices.changed(json.loads(TEXT)))
    with suppress(TpplanError):
        plan = codec.loads(text)
        assert codec.loads(dumps(plan)) == plan
        assert (plan == PLAN) <= (dumps(plan) == TEXT)


def devices(data: bytes) -> None:
    """Read a devices file; what is read can be written, and is the same when it is read again."""
    choices = Choices(data)
    text = choices.rest() if not choices.below(4) else choices.text(choices.changed(_DEVICES))
    with suppress(TpplanError):
        found = devices_file.loads(text)
        assert devices_file.loads(devices_file.dumps(found)) == found


def headers(data: bytes) -> None:
    """Read the headers of a checkpoint; what is read fills the file."""
    choices = Choices(data)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if choices.below(2) else {}
    end = 0
    for i in range(choices.below(5)):
        dtype, shape = choices.pick(sorted(DTYPE_BITS)), [choices.below(5), 8]
        start, end = end, end + shape[0] * DTYPE_BITS[dtype]
        header[f"model.layers.{i}.weight"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    if choices.below(2):
        header = choices.changed(header)
    text = choices.text(header) if choices.below(4) else choices.rest()
    file = len(text).to_bytes(8, "little") + text + bytes(end)
    file = file if choices.below(8) else choices.rest()
    (_FOLDER / "model.safetensors").write_bytes(file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(header, "model.safetensors")}
    path = _FOLDER / "model.safetensors.index.json"
    path.unlink(missing_ok=True)
    if not choices.below(4):
        path.write_bytes(choices.text(choices.changed(index)))
    with suppress(TpplanError):
        found = read_headers(_FOLDER)
        assert found
        assert sum(tensor.nbytes for tensor in found.tensors.values()) <= len(file)


def models(data: bytes) -> None:
    """Read a model of a config.json that differs in some values from a true one."""
    choices = Choices(data)
    config = choices.pick(_CONFIGS)
    if choices.below(2):
        config = config | {"quantization_config": choices.pick(_QUANTISED)}
    if not choices.below(4):
        config = {"model_type": config["model_type"], "text_config": config, "architectures": config["architectures"]}
    path = _FOLDER / "config.json"
    path.write_bytes(choices.text(choices.changed(config)))
    with suppress(TpplanError):
        model = read_model(path)
        assert model.weight_bytes > 0
        assert codec.fingerprint(model)


def chats(data: bytes) -> None:
    """Read a chat template and render it; ends within its limits, whatever it says."""
    choices = Choices(data)
    template = choices.pick(list(TEMPLATES.values())) if not choices.below(3) else ""
    for _ in range(choices.below(40)):
        at = choices.below(len(template) + 1)
        template = template[:at] + choices.pick(_PIECES) + template[at + choices.below(4) :]
    config: dict[str, Any] = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if not choices.below(4):
        config = choices.changed(config)
    (_FOLDER / "tokenizer_config.json").write_bytes(json.dumps(config).encode())
    chat._answered = _answered_here
    with suppress(TpplanError):
        text = chat.ChatTemplate.read(_FOLDER).render("Hi", "Be brief." if choices.below(2) else "")
        assert isinstance(text, str)


def _answered_here(request: dict[str, Any]) -> dict[str, str]:
    """Do what the process that tpplan starts does, in a copy of this process, which takes a hundredth of the time."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            pages = int(Path("/proc/self/statm").read_text().split()[0])  # a fuzzer's own are many
            templates._limit(pages * os.sysconf("SC_PAGE_SIZE") + templates._ADDRESS_BYTES)
            os.write(writing, json.dumps(templates.outcome(json.loads(json.dumps(request)))).encode()[:60_000])
            code = 0
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([pipe], [], [], _DEADLINE_S)[0]:
            os.kill(child, signal.SIGKILL)
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) <= 0, request["template"]
    with suppress(ValueError):
        answer: dict[str, str] = json.loads(output)
        assert answer.keys() < {"text", "refused", "failed"}
        return answer
    return {"failed": "no whole answer"}


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target for target in (plans, devices, headers, models, chats)
}
