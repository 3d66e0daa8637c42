"""Weights with NaN or infinity: one error with the names of the tensors, instead of tokens that mean nothing."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import saved_values
from tests.command import command
from tests.contexts import UNEVEN, context, little_room  # noqa: F401
from tests.decoder.quantised_checkpoints import stored
from tests.decoder_cases import model_of, plan_of, request_of
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, Prompt, Sampling, generate
from tpplan.decoder.decoding.steps import greedy
from tpplan.decoder.layer.steps import Plain
from tpplan.decoder.prompts import NO_TOKEN
from tpplan.errors import ExecutionError
from tpplan.exec import compile as compile_plan
from tpplan.exec.options import TRANSPORTS
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

LAYER = "model.layers.1."


def spoiled(source: Path, directory: Path, name: str, value: float) -> Path:
    """Copy a checkpoint, with one element of a tensor replaced."""
    shutil.copytree(source, directory)
    tensors = saved_values(directory)
    tensor = tensors[name]
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).view(-1)[7] = 0x7F  # NaN of F8_E4M3
    else:
        tensor.view(-1)[7 % tensor.numel()] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def refusal(directory: Path, sampling: Sampling, devices: int) -> ExecutionError:
    """Return the error that generating ends in."""
    plan = plan_of(directory, devices, request_of(), {}, seed=3)
    with compile_plan(plan, backend="cpu", model=directory, scratch=False) as ctx:
        decoder = Decoder(ctx, directory, load_weights(plan, directory, ctx))
        with pytest.raises(ExecutionError, match=r"the logits of .* are not finite") as error:
            list(generate(decoder, [[1, 2, 3], [4, 5]], 8, sampling=sampling))
    return error.value


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", f"{LAYER}self_attn.k_proj.weight", f"{LAYER}mlp.down_proj.weight"]
)
def test_weights_that_are_not_finite(name: str, value: float, temperature: float, devices: int, tmp_path: Path) -> None:
    """Whether tokens are chosen or drawn, and wherever the tensor is, the error names it."""
    directory = spoiled(model_of("mistral").directory, tmp_path / "tiny", name, value)
    error = refusal(directory, Sampling(temperature), devices)
    assert f"because these weights are not: {name} on device " in error.message
    assert error.hint


@pytest.mark.parametrize(
    ("form", "suffix"),
    [
        ("gptq 4 g128", ".scales"),
        ("awq g64", ".scales"),
        ("fp8 compressed channel", ".weight"),
        ("fp8 block", ".weight_scale_inv"),
    ],
)
def test_quantised_weights_that_are_not_finite(form: str, suffix: str, tmp_path: Path) -> None:
    """Scales, and codes that are floats, may be NaN too."""
    name = f"{LAYER.replace('1', '0')}mlp.down_proj"
    directory = spoiled(stored("llama", form, 1)[0], tmp_path / "tiny", name + suffix, math.nan)
    assert f"because these weights are not: {name}.weight on device " in refusal(directory, Sampling(), 2).message


def test_numbers_that_overflow(tmp_path: Path) -> None:
    """Where all weights are finite, the error says so, and which dtypes hold larger numbers."""
    directory = shutil.copytree(model_of("mistral").directory, tmp_path / "tiny")
    tensors = {name: tensor.half() for name, tensor in saved_values(directory).items()}
    tensors["model.embed_tokens.weight"] *= 1e4
    for name in tensors:
        if name.endswith(("up_proj.weight", "gate_proj.weight", "down_proj.weight")):
            tensors[name] *= 100
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float16"}), encoding="utf-8")
    error = refusal(directory, Sampling(), 2)
    assert "although its weights are: its activations overflow in float16" in error.message
    assert error.hint == "convert the checkpoint to bfloat16 or float32, which holds larger numbers"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_step_is_named(temperature: float) -> None:
    """The first text whose logits are not finite, and its new tokens: only what it reads next is spoiled."""
    directory = model_of("mistral").directory
    plan = plan_of(directory, 2, request_of(), {}, seed=3)
    with compile_plan(plan, backend="cpu", model=directory, scratch=False) as ctx:
        decoder = Decoder(ctx, directory, load_weights(plan, directory, ctx), cache="fp32")
        texts = generate(decoder, [[1, 2, 3], [4, 5]], 8, sampling=Sampling(temperature))
        next(texts)
        first, second = next(texts)
        assert first != second
        assert second is not None
        for part in ctx.split(Axis.VOCAB):
            if part.start <= second < part.end:
                decoder.weights[part.device]["model.embed_tokens.weight"][second - part.start] = math.nan
        with pytest.raises(ExecutionError, match=r"\) behind the 2 tokens of prompt 1 and 2 new ones, because .*embed"):
            next(texts)


def overflowing(family: str, directory: Path) -> tuple[Path, int]:
    """Make a model in 16 bits, and return a token that makes infinite numbers of those that follow it."""
    directory, over = shutil.copytree(model_of(family).directory, directory / "tiny"), 7
    tensors = saved_values(directory)
    tensors["model.embed_tokens.weight"][over] = 65000 * (-1.0) ** torch.arange(48)
    for name in tensors:  # the first layer of the token makes what is infinite for the caches and states of others
        if name.startswith("model.layers.0.") and name.endswith(("o_proj.weight", "out_proj.weight")):
            tensors[name] *= 800
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float16"}), encoding="utf-8")
    return directory, over


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next"])
def test_later_texts_are_as_before(family: str, devices: int, kind: str, tmp_path: Path) -> None:
    """A text that overflows leaves nothing in caches and states that later ones could meet, or take for their own."""
    directory, over = overflowing(family, tmp_path)
    plan = plan_of(directory, devices, request_of(kind=kind), {}, seed=3)
    with compile_plan(plan, backend="cpu", model=directory, scratch=False) as ctx:
        decoder = Decoder(ctx, directory, load_weights(plan, directory, ctx))
        short, long = [[3, 4, 5], [6, 8]], [[3] * 20 + [over] + [3] * 5, [9] * 4]
        wanted = list(generate(decoder, short, 6))
        for _ in range(2):
            with pytest.raises(ExecutionError, match="not finite"):
                list(generate(decoder, long, 6))
            assert list(generate(decoder, short, 6)) == wanted
        texts = generate(decoder, short, 6)
        next(texts)
        graphs = decoder.steps(2)._graphs
        graphs.set(graphs.tokens, [over, over])
        with pytest.raises(ExecutionError, match="and 1 new ones"):
            next(texts)
        assert list(generate(decoder, short, 6, resume=True)) == wanted


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next"])
def test_later_prompts_are_as_before(family: str, tmp_path: Path) -> None:
    """Nor does a prompt that is read, or a step behind it, whose logits nobody checks."""
    directory, over = overflowing(family, tmp_path)
    plan = plan_of(directory, 2, request_of(), {}, seed=3)
    with compile_plan(plan, backend="cpu", model=directory, scratch=False) as ctx:
        decoder = Decoder(ctx, directory, load_weights(plan, directory, ctx))

        def step(token: int, position: int) -> torch.Tensor:
            tokens, positions = ([torch.full((2,), n) for _ in ctx.devices] for n in (token, position))
            return ctx.gather(decoder.decode(tokens, positions), Axis.VOCAB).tensor.clone()

        def read() -> torch.Tensor:
            decoder.read([Prompt([3, 4, 5], 0), Prompt([6, 8, 9], 1)])
            return step(4, 3)

        wanted = read()
        assert wanted.isfinite().all()
        decoder.read([Prompt([3] * 20 + [over] + [3] * 5, 0), Prompt([9] * 4, 1)])
        assert torch.equal(read(), wanted)
        decoder.read([Prompt([3] * 20, 0), Prompt([9] * 20, 1)])
        assert not step(over, 20).isfinite().all()
        step(3, 21)
        assert torch.equal(read(), wanted)
        decoder.read([Prompt([3] * 20 + [over] + [3] * 5, 0), Prompt([9] * 4, 1)])
        assert len(list(generate(decoder, [[3, 4, 5], [6, 8, 9]], 3))) == 3


def test_caches_are_cleared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step has left is cleared by the next texts that begin, all at once, and not again by those after them.

    A graph may be replayed whenever it pleases: what it may leave is cleared each time.
    """
    directory = model_of("mistral").directory
    plan = plan_of(directory, 2, request_of(batch=3), {}, seed=3)
    with compile_plan(plan, backend="cpu", model=directory, scratch=False) as ctx:
        decoder = Decoder(ctx, directory, load_weights(plan, directory, ctx))
        cleared: list[tuple[slice, slice]] = []
        monkeypatch.setattr(decoder.stack, "clear_caches", lambda *slices: cleared.append(slices))
        tokens, positions = ([torch.full((3,), n) for _ in ctx.devices] for n in (4, 0))

        def read(*sequences: int) -> list[tuple[slice, slice]]:
            cleared.clear()
            list(generate(decoder, [[1, 2, 3]] * 3, 2))  # checks its logits, and is not told below
            cleared.clear()
            decoder.decode(tokens, positions, span=5)
            decoder.read([Prompt([3, 4, 5], sequence) for sequence in sequences])
            return cleared

        assert read(0, 1, 2) == [(slice(0, 3), slice(3, 5))]
        decoder.read([Prompt([3, 4], sequence) for sequence in (0, 2)])
        assert cleared[1:] == [(slice(0, 1), slice(2, 3)), (slice(2, 3), slice(2, 3))]  # of prompts nobody has checked
        assert read(0, 2) == [(slice(0, 1), slice(3, 5)), (slice(2, 3), slice(3, 5))]
        decoder.read([Prompt([3] * (5 - sequence), sequence) for sequence in range(3)])
        cleared.clear()
        decoder.decode(tokens, positions, span=7)
        decoder.read([Prompt([3] * (8 - sequence), sequence) for sequence in range(3)])
        assert cleared == [(slice(2, 3), slice(6, 7))]  # what prompts do not fill
        decoder.decode(tokens, positions, span=9)
        decoder.read([Prompt([3] * (8 - sequence), sequence) for sequence in range(3)])
        assert cleared[1:] == [(slice(0, 3), slice(6, 9))]
        list(generate(decoder, [[1, 2, 3]] * 3, 2))
        monkeypatch.setattr("tpplan.decoder.decoder._is_captured", lambda _: True)
        decoder.decode(tokens, positions, span=7)
        for _ in range(2):
            cleared.clear()
            list(generate(decoder, [[1, 2, 3]] * 3, 2))
            assert cleared == [(slice(0, 3), slice(3, 7))]


@pytest.mark.parametrize("options", [(), ("--temperature", 1)])
def test_the_command(options: tuple[object, ...], tmp_path: Path) -> None:
    """It prints no token, and ends in one error."""
    directory = spoiled(model_of("mistral").directory, tmp_path / "tiny", "model.norm.weight", math.nan)
    plan_of(directory, 3, request_of(batch=1), {}, seed=4).save(directory / "plan.json")
    asked = ("generate", directory / "plan.json", "--model", directory, "--backend", "cpu", "--token-ids", "1,2")
    done = command(*asked, *options)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        "error: the logits of tiny are not finite (NaN or infinity) behind the 2 tokens of prompt 0, because"
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_token_stands_for_logits_that_are_not_finite(transport: str) -> None:
    """On every device, whichever has the NaN or infinity; an element of minus infinity is nothing special."""
    with context(UNEVEN, transport) as ctx:
        whole = torch.randn(5, 101, generator=torch.Generator().manual_seed(1))
        whole[range(5), [0, 40, 100, 50, 7]] = torch.tensor([math.nan, math.inf, math.nan, 9.0, 9.0])
        whole[3, :20] = -math.inf
        whole[4] = -math.inf
        steps = dict.fromkeys(ctx.all_devices, Plain(1e-5, "silu"))
        found = [torch.zeros(len(whole), dtype=torch.int64) for _ in ctx.all_devices]
        greedy(ctx, ctx.scatter(whole, Axis.VOCAB), steps, found)
        assert all(tokens.tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 50, NO_TOKEN] for tokens in found)
    drawn = Sampling(1e-3).draw(whole, torch.Generator().manual_seed(1))
    assert drawn.tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 50, NO_TOKEN]
