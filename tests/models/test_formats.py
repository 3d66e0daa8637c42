"""How quantised weights are stored: every byte counted, fused matrices in their parts, and what is left alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import LINEAR, LLAMA, Tensors, llama_layers, llama_outside, tensor_bytes, write_checkpoint
from tests.format_cases import CASES, CHANNEL, awq, exl2, fp8_channel, gptq, gptq_config, make, parameter, stored
from tests.published import sizes
from tpplan.core.axes import Axis
from tpplan.core.model import Segment
from tpplan.errors import ModelError
from tpplan.models.formats import scheme as schemes
from tpplan.models.reader import read_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Matrix = Callable[[int, int, int], Tensors]


@pytest.mark.parametrize("case", CASES)
def test_every_byte_of_a_checkpoint_is_counted(tmp_path: Path, case: str) -> None:
    """The model has the tensors of the file with their dtypes and shapes, so its bytes are the file's."""
    path, tensors = make(tmp_path, case)
    spec = read_model(path)
    assert stored(spec) == tensors
    assert spec.weight_bytes == tensor_bytes(tensors)
    assert spec.weight_format.startswith(CASES[case][2])
    assert spec.layer_count == 3
    assert spec.dtype == "float16"
    assert spec.parameter_count == 2 * 320 * 256 + 256 + 3 * (2 * 256 + sum(i * o for i, o in LINEAR.values()))


#: What the tools themselves wrote for a matrix of 256 outputs and 512 inputs: HQQ 0.2.8 and torchao 0.18, without the
#: scalars of the former; AutoAWQ 0.2.9's and AQLM 1.1.7's modules have these buffers.
WRITTEN: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "hqq 8 bits": {".W_q": ("U8", (2048, 64)), ".scale": ("BF16", (2048, 1)), ".zero": ("BF16", (2048, 1))},
    "hqq 4 bits": {".W_q": ("U8", (1024, 64)), ".scale": ("BF16", (2048, 1)), ".zero": ("BF16", (2048, 1))},
    "hqq 3 bits": {".W_q": ("I32", (205, 64)), ".scale": ("BF16", (2048, 1)), ".zero": ("BF16", (2048, 1))},
    "torchao int8": {
        "._weight_qdata": ("I8", (256, 512)),
        "._weight_scale": ("F32", (256, 1)),
        "._weight_zero_point": ("I8", (256, 1)),
    },
    "torchao unpacked": {
        "._weight_qdata": ("I8", (256, 512)),
        "._weight_scale": ("BF16", (256, 16)),
        "._weight_zero_point": ("I8", (256, 16)),
    },
    "torchao fp8": {"._weight_qdata": ("F8_E4M3", (256, 512)), "._weight_scale": ("F32", (256, 1))},
    "torchao nvfp4": {
        "._weight_qdata": ("U8", (256, 256)),
        "._weight_scale": ("F8_E4M3", (64, 128)),
        "._weight_per_tensor_scale": ("F32", ()),
    },
    "torchao mxfp8": {"._weight_qdata": ("F8_E4M3", (256, 512)), "._weight_scale": ("F8_E8M0", (64, 64))},
    "awq gemv": {".qweight": ("I32", (256, 64)), ".qzeros": ("I32", (256, 1)), ".scales": ("F16", (256, 8))},
    "awq gemv fast": {".qweight": ("I16", (64, 512)), ".qzeros": ("F16", (8, 256)), ".scales": ("F16", (8, 256))},
    "aqlm": {
        ".codes": ("I8", (256, 64, 2)),
        ".codebooks": ("F16", (2, 256, 1, 8)),
        ".scales": ("F16", (256, 1, 1, 1)),
    },
}


@pytest.mark.parametrize("case", WRITTEN)
def test_cases_are_what_tools_write(case: str) -> None:
    """The checkpoints of these tests have the names, dtypes and shapes that the tools gave to theirs."""
    tensors = CASES[case][1](512, 256, 0)
    assert {name: tensors[name] for name in WRITTEN[case]} == WRITTEN[case]


@pytest.mark.parametrize("case", [case for case, (*_, formula) in CASES.items() if formula])
def test_config_alone_gives_the_same_model(tmp_path: Path, case: str) -> None:
    """Where a format's sizes follow from the config, they are those of the checkpoint."""
    path, _ = make(tmp_path, case)
    assert read_model(path / "config.json") == read_model(path)


@pytest.mark.parametrize(
    "case", [case for case, (q, *_, formula) in CASES.items() if q and not formula and q["quant_method"] != "gptq"]
)
def test_config_alone_is_refused_where_it_does_not_suffice(tmp_path: Path, case: str) -> None:
    """Formats whose sizes only the files know are an error that names the method and asks for the headers."""
    path, _ = make(tmp_path, case)
    with pytest.raises(ModelError) as caught:
        read_model(path / "config.json")
    assert CASES[case][0]["quant_method"] in caught.value.message  # type: ignore[index]
    assert "headers" in caught.value.hint


def test_bits_per_weight_of_exllama_formats(tmp_path: Path) -> None:
    """EXL2 and EXL3 say how many bits a weight of the layers takes, as stored."""
    for case in ("exl2", "exl3"):
        path, tensors = make(tmp_path / case, case)
        layers = {name: t for name, t in tensors.items() if "_proj" in name}
        bits = 8 * tensor_bytes(layers) / (3 * sum(i * o for i, o in LINEAR.values()))
        assert read_model(path).weight_format == f"{case.upper()} {bits:.2f} bpw"


@pytest.mark.parametrize("case", ["exl2", "exl3"])
def test_layers_at_other_bit_rates_become_blocks_of_their_own(tmp_path: Path, case: str) -> None:
    """Layers are only grouped if a plan can see no difference between them."""
    path, _ = make(tmp_path, case)
    blocks = read_model(path).blocks
    assert [block.layers for block in blocks] == ([(0,), (1, 2)] if case == "exl2" else [(0, 1), (2,)])


PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    **sizes(vocab=320, hidden=256, dense=512, layers=1, q=4, kv=2, context=128),
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}


def test_fused_matrices_keep_their_parts(tmp_path: Path) -> None:
    """Query, key and value in one matrix are cut apart also where they are packed."""
    config = PHI3 | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model(tmp_path / "config.json")
    parts = (Segment(Axis.Q_HEADS, 32), Segment(Axis.KV_HEADS, 16), Segment(Axis.KV_HEADS, 16))
    assert parameter(spec, "qkv_proj.qweight").dims == ((Segment(Axis.RESIDUAL, 256),), parts)
    assert parameter(spec, "gate_up_proj.qzeros").dims == (
        (Segment(Axis.RESIDUAL, 2),),
        (Segment(Axis.INTERMEDIATE, 64), Segment(Axis.INTERMEDIATE, 64)),
    )


def test_fused_matrices_may_be_stored_apart(tmp_path: Path) -> None:
    """ExLlama's converters store the parts of a fused matrix under Llama's names; each is cut by its own axis."""
    tensors = llama_outside()
    start = "model.layers.0."
    tensors |= {f"{start}{n}.weight": ("F16", (256,)) for n in ("input_layernorm", "post_attention_layernorm")}
    attention = {"q_proj": (256, 256), "k_proj": (256, 128), "v_proj": (256, 128), "o_proj": (256, 256)}
    mlp = {"gate_proj": (256, 512), "up_proj": (256, 512), "down_proj": (512, 256)}
    for module, matrices in (("self_attn", attention), ("mlp", mlp)):
        for name, (inputs, outputs) in matrices.items():
            tensors |= {f"{start}{module}.{name}{s}": t for s, t in exl2(inputs, outputs, 0).items()}
    spec = read_model(write_checkpoint(tmp_path / "m", PHI3, tensors))
    assert stored(spec) == tensors
    assert parameter(spec, "v_proj.q_weight").dims[1] == (Segment(Axis.KV_HEADS, 128, block=32),)
    assert parameter(spec, "up_proj.q_weight").dims[1] == (Segment(Axis.INTERMEDIATE, 512, block=32),)


def test_quantised_output_matrix(tmp_path: Path) -> None:
    """GPTQ quantises the output matrix if, and only if, lm_head says so."""
    config = LLAMA | {"quantization_config": gptq_config(lm_head=True)}
    tensors = llama_outside(head=False) | llama_layers(gptq())
    tensors |= {f"lm_head{suffix}": tensor for suffix, tensor in gptq()(256, 320, 0).items()}
    path = write_checkpoint(tmp_path / "m", config, tensors)
    assert stored(read_model(path)) == tensors
    assert read_model(path / "config.json") == read_model(path)


def test_modules_that_are_left_alone(tmp_path: Path) -> None:
    """Lists of modules to quantise, and not to, are followed, down to single layers."""
    only = gptq_config(modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]])
    skip = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "modules_to_not_convert": ["self_attn", "model.layers.1.mlp"],
    }
    ignore = CHANNEL | {"ignore": ["lm_head", "re:.*down_proj$", "model.layers.2.mlp.up_proj"]}
    cases: list[tuple[dict[str, Any], Matrix, Callable[[int, str], bool]]] = [
        (only, gptq(), lambda _layer, name: name in {"self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"}),
        (skip, awq, lambda layer, name: "mlp" in name and layer != 1),
        (ignore, fp8_channel, lambda layer, name: name != "mlp.down_proj" and (layer, name) != (2, "mlp.up_proj")),
    ]
    names = {size: [name for name, s in LINEAR.items() if s == size] for size in LINEAR.values()}
    assert len(names) < len(LINEAR)
    for i, (quantization, matrix, is_quantised) in enumerate(cases):
        tensors = llama_outside() | llama_layers(lambda i, o, _layer: {".weight": ("F16", (o, i))})
        for layer in range(3):
            for name, (inputs, outputs) in LINEAR.items():
                if is_quantised(layer, name):
                    stem = f"model.layers.{layer}.{name}"
                    del tensors[f"{stem}.weight"]
                    tensors |= {stem + suffix: tensor for suffix, tensor in matrix(inputs, outputs, layer).items()}
        path = write_checkpoint(tmp_path / str(i), LLAMA | {"quantization_config": quantization}, tensors)
        assert stored(read_model(path)) == tensors
        assert stored(read_model(path / "config.json")) == tensors


@pytest.mark.parametrize(
    ("own", "start"),
    [
        ("language_model.model", "language_model.model"),
        ("language_model.model", "model.language_model"),
        ("model", "model"),
        ("model", "model.language_model"),
    ],
)
def test_lists_have_either_name_of_a_wrapper(own: str, start: str) -> None:
    """Those that newer tools write name modules otherwise than checkpoints of the hub."""
    skipped = (f"{start}.layers.1.mlp.down_proj", f"re:{start}.layers.2.*")
    rules = (schemes.Rule(form=None, names=skipped), schemes.Rule(form=schemes.Form(format="fp8-channel")))
    choice = schemes.Choice(schemes.Scheme(rules=rules))
    modules = [f"{own}.layers.{layer}.mlp.{name}" for layer in range(3) for name in ("down_proj", "up_proj")]
    assert [module for module in modules if choice.form(module, schemes.LINEAR)] == [*modules[:2], modules[3]]
