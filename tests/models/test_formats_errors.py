"""Quantised checkpoints that contradict their config, and configs of quantisation that say nothing useful."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import LLAMA, Tensors, llama_layers, llama_outside, write_checkpoint
from tests.format_cases import CHANNEL, awq, gptq, gptq_config, stored
from tests.later import transformers
from tpplan.errors import ModelError
from tpplan.models.config import Config
from tpplan.models.formats.tools import read_scheme
from tpplan.models.reader import read_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Matrix = Callable[[int, int, int], Tensors]


@pytest.mark.parametrize("method", ["hqq", "gguf", "aqlm", "", "x" * 1000])
def test_unknown_method_is_refused(tmp_path: Path, method: str) -> None:
    """A method that tpplan does not know is never taken for plain weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ModelError, match="do not follow from the config alone"):
        read_model(tmp_path)


CONTRADICTIONS: dict[str, tuple[dict[str, Any] | None, Matrix, tuple[str, ...]]] = {
    "transposed": (
        gptq_config(),
        lambda i, o, layer: gptq()(o, i, layer),
        ("q_proj.qweight of I32 [48, 256]", "no format that tpplan knows", "'gptq'", "[384, 256]"),
    ),
    "half of a known format": (
        {"quant_method": "hqq"},
        lambda i, o, _layer: {".W_q": ("U8", (o, i // 2)), ".meta": ("F32", (3,))},
        ("q_proj.W_q of U8 [384, 128]", "no format that tpplan knows", "'hqq'", "[384, 256]"),
    ),
    "unknown format": (
        {"quant_method": "new"},
        lambda i, o, _layer: {".weight_foo": ("U8", (o, i // 2)), ".meta": ("F32", (3,))},
        ("down_proj.weight_foo of U8 [256, 256]", "no format that tpplan knows", "'new'", "mlp.down_proj.weight"),
    ),
    "unknown format, no config": (
        None,
        lambda i, o, _layer: {".weight_foo": ("U8", (o, i // 2))},
        ("down_proj.weight_foo of U8 [256, 256]", "no format that tpplan knows stores a matrix so, and"),
    ),
    "empty": (
        None,
        lambda i, o, _layer: gptq()(i, o, 0) | {".scales": ("F16", (0, o))},
        ("q_proj.scales of F16 [0, 384]", "no format that tpplan knows"),
    ),
    "integers without scales": (
        {"quant_method": "x"},
        lambda i, o, _layer: {".weight": ("I8", (o, i))},
        ("q_proj.weight of I8 [384, 256]", "no format that tpplan knows", "'x'"),
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_tensors_of_unknown_formats_are_refused_and_nobody_accused(tmp_path: Path, case: str) -> None:
    """The error names the tensors, what is stored, what the config calls it, and what it asks for."""
    quantization, matrix, words = CONTRADICTIONS[case]
    config = LLAMA | ({"quantization_config": quantization} if quantization else {})
    with pytest.raises(ModelError) as caught:
        read_model(write_checkpoint(tmp_path / "m", config, llama_outside() | llama_layers(matrix)))
    for word in words:
        assert word in caught.value.message
    assert "edited" not in str(caught.value) + caught.value.hint
    assert "NVFP4" in caught.value.hint


@pytest.mark.parametrize(
    ("told", "matrix", "text"),
    [
        (gptq_config(), gptq(bits=8), "GPTQ 8-bit g128"),
        (gptq_config(group_size=64), gptq(), "GPTQ 4-bit g128"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, awq, "AWQ 4-bit g64"),
    ],
)
def test_headers_decide_over_the_config(tmp_path: Path, told: dict[str, Any], matrix: Matrix, text: str) -> None:
    """What the files hold is planned, to the byte, and the difference is told."""
    tensors = llama_outside() | llama_layers(matrix)
    spec = read_model(write_checkpoint(tmp_path / "m", LLAMA | {"quantization_config": told}, tensors))
    assert stored(spec) == tensors
    assert spec.weight_format == text
    (note,) = spec.notes
    assert f"the files have {text}, which is planned" in note


BAD_QUANTIZATION: list[tuple[Any, str]] = [
    ("gptq", "expected an object"),
    ({"quant_method": 4}, "expected a string"),
    (gptq_config(bits=5), "bits is 5"),
    (gptq_config(bits="4"), "bits"),
    (gptq_config(bits=True), "bits"),
    (gptq_config(group_size=-2), "group_size"),
    (gptq_config(group_size=1.5), "group_size"),
    (gptq_config(desc_act="no"), "desc_act"),
    (gptq_config(modules_in_block_to_quantize=[["a", 3]]), "modules_in_block_to_quantize"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    ({"quant_method": "awq", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    (CHANNEL | {"ignore": [r"re:(a)\1"]}, r"uses .*1, so it is not followed"),
    (CHANNEL | {"ignore": ["re:.*(?<=x)y"]}, "uses .*, so it is not followed"),
    (CHANNEL | {"ignore": ["re:" + "(.*" * 15 + "x" + ")" * 15 + "|(a{1000}){1000}"]}, "is too long"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}}, "expected an object"),
    (
        CHANNEL
        | {
            "config_groups": {
                "a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": [{}]}},
            }
        },
        "expected a string",
    ),
    ({"quant_method": "awq", "version": "gemv"}, "do not follow"),
    (gptq_config(dynamic={"+:.*": {"bits": 5}}), "dynamic: .*: bits is 5"),
]


@pytest.mark.parametrize(("quantization", "message"), BAD_QUANTIZATION)
def test_bad_quantization_config_is_refused(tmp_path: Path, quantization: Any, message: str) -> None:
    """A quantization_config that cannot be followed is an error that names the key."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=message):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("key", "slip"),
    [("quant_method", "quant_methd"), ("bits", "bit"), ("bits", "bist"), ("bits", "bitss"), ("bits", "w_bit")],
)
def test_a_missing_key_of_a_quantization_config_that_is_nearly_there_is_named(
    tmp_path: Path, key: str, slip: str
) -> None:
    """In the hint, which works when followed."""
    usual = gptq_config()
    told = {name: value for name, value in usual.items() if name != key} | {slip: usual[key]}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": told}))
    with pytest.raises(ModelError, match=f"quantization_config: {key} is missing") as caught:
        read_model(tmp_path)
    assert caught.value.hint == f"is {slip} meant as {key}?"


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("slip", ["groupsize", "group_sizes"])
def test_keys_of_a_quantization_config_that_are_nearly_known_are_told(tmp_path: Path, method: str, slip: str) -> None:
    """A default would be taken silently else: another number of scales."""
    told = {"quant_method": method, "bits": 4, slip: 64}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": told}))
    (note,) = read_model(tmp_path).notes
    assert f"config.json: quantization_config has {slip}, which is not read, and no group_size, whose" in note
    assert note.endswith(f"is {slip} meant as group_size?")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": told | {"group_size": 64}}))
    assert read_model(tmp_path).notes == ()


def _groups(key: str = "", slip: str = "") -> dict[str, Any]:
    """Return two groups of compressed-tensors with the same key misspelt in both."""

    def changed(data: dict[str, Any]) -> dict[str, Any]:
        return {slip if name == key else name: value for name, value in data.items()}

    numbers = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    inputs = changed({"num_bits": 8, "dynamic": False, "symmetric": True})
    group = changed({"weights": changed(numbers), "input_activations": inputs, "targets": ["Linear"]})
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group, "group_1": group | {"targets": ["Embedding"]}},
    }


@pytest.mark.parametrize(
    ("where", "key", "slip"),
    [
        (": weights", "symmetric", "symetric"),
        (": weights", "strategy", "strategi"),
        (": weights", "num_bits", "num_bit"),
        (": input_activations", "dynamic", "dynamics"),
        ("", "input_activations", "input_activation"),
    ],
)
def test_slips_within_groups_of_compressed_tensors_are_told(tmp_path: Path, where: str, key: str, slip: str) -> None:
    """Once for all groups; other zero points or numbers of bits would be taken silently else."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": _groups(key, slip)}))
    (note,) = read_model(tmp_path).notes
    group = f"{tmp_path}/config.json: quantization_config: config_groups: group_0{where}"
    told = f"{group} has {slip}, which is not read, and no {key}, whose default is taken: is {slip} meant as {key}?"
    assert note == told
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": _groups()}))
    assert read_model(tmp_path).notes == ()


def test_slips_are_looked_for_in_some_of_many_modules(tmp_path: Path) -> None:
    """So that no file takes long: each of its modules may have a slip of its own."""
    modules = {f"+:m.{i}": {"bits": 8, f"group_size{chr(0x4E00 + i)}": 64} for i in range(200)}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": gptq_config(dynamic=modules)}))
    assert 10 < len(read_model(tmp_path).notes) < 100


def test_a_slip_that_leaves_nothing_of_a_quantisation_is_the_hint(tmp_path: Path) -> None:
    """Where no group tells of weights, what was probably meant to do so."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": _groups("weights", "weight")}))
    with pytest.raises(ModelError, match="config_groups tells nothing of weights") as caught:
        read_model(tmp_path)
    assert caught.value.hint == "is weight meant as weights?"


@pytest.mark.parametrize(
    ("key", "word", "meant"),
    [
        ("quant_method", "compressed_tensors", "compressed-tensors"),
        ("quant_method", "gptqq", "gptq"),
        ("format", "pack-quantised", "pack-quantized"),
        ("format", "mxfp6-pack-quantized", ""),
    ],
)
def test_words_that_are_nearly_known_are_hinted_at(tmp_path: Path, key: str, word: str, meant: str) -> None:
    """The method, and the format of compressed-tensors; one with another number of bits is another one."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": _groups() | {key: word}}))
    with pytest.raises(ModelError, match="do not follow from the config alone") as caught:
        read_model(tmp_path)
    start = f"is {word} meant as {meant}? if not, point to" if meant else "point to"
    assert caught.value.hint.startswith(f"{start} the directory")


def test_a_quantisation_under_another_name_is_told(tmp_path: Path) -> None:
    """The weights would be counted as those of a model that is not quantised."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quant_config": gptq_config()}))
    (note,) = read_model(tmp_path).notes
    assert note.endswith(": is quant_config meant as quantization_config?")


@pytest.mark.parametrize("slip", ["formt", "formats", "fromat"])
@pytest.mark.parametrize("in_groups", [False, True])
def test_a_slip_by_which_sizes_do_not_follow_is_hinted_at(tmp_path: Path, slip: str, *, in_groups: bool) -> None:
    """Of the format, without which nobody knows how weights are stored: at the top, or in each group."""
    told = _groups()
    for each in told["config_groups"].values() if in_groups else (told,):
        each[slip] = told["format"]
    del told["format"]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": told}))
    with pytest.raises(ModelError, match="do not follow from the config alone") as caught:
        read_model(tmp_path)
    assert caught.value.hint.startswith(f"is {slip} meant as format? if not, point to the directory")
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA | {"quantization_config": told | {"format": "pack-quantized"}})
    )
    assert read_model(tmp_path).weight_format == "INT4 g32"


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("GPTQConfig", {"bits": 4}),
        ("AwqConfig", {"bits": 4}),
        ("FineGrainedFP8Config", {}),
        ("FbgemmFp8Config", {}),
        ("Mxfp4Config", {}),
        ("AutoRoundConfig", {"bits": 4}),
    ],
)
def test_no_key_that_transformers_saves_of_a_quantisation_is_taken_for_a_slip(kind: str, given: dict[str, int]) -> None:
    """Whether all keys are in it or those that differ from the class."""
    config = getattr(transformers, kind)(**given)
    for told in (config.to_dict(), config.to_diff_dict()):
        data = json.loads(json.dumps(told, default=str))
        scheme = read_scheme(Config(LLAMA | {"quantization_config": data}, "config.json"))
        assert not scheme.slips
        assert scheme.problem is None or "meant as" not in scheme.problem.hint


def test_sizes_that_do_not_pack_are_refused(tmp_path: Path) -> None:
    """By formula, a matrix whose rows do not fill whole words is an error, not a rounded size."""
    config = LLAMA | {"intermediate_size": 500, "quantization_config": gptq_config()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="do not follow"):
        read_model(tmp_path)
