"""Measuring a whole model: the same logic as on GPUs, with a tiny one on virtual devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

import tpplan
from benchmarks import bench_decode, decode_memory, decode_run, random_checkpoint, transformers_run
from benchmarks.decode_memory import Buckets
from benchmarks.decode_order import CUTS, WARM, Order, prompts
from benchmarks.decode_rows import Part, Row, cells, compared
from benchmarks.nccl_context import NcclContext
from tests.checkpoints import saved_values
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.axes import Axis
from tpplan.decoder import Decoder, generate
from tpplan.exec import compile as compile_plan
from tpplan.exec.program import HOST
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.plan import SplitPlan


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 203,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
TOKENS = 5


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Order:
    """Return what to measure of a tiny model on two virtual devices."""
    directory = tmp_path_factory.mktemp("model")
    random_checkpoint.write(directory, CONFIG)
    return Order(directory=str(directory), gpus=2, backend="cpu", batches=(1, 3), tokens=TOKENS, prefill=40)


def _generated(order: Order, plan: SplitPlan) -> list[int]:
    """Return the tokens that the first prompt leads to, as everybody else would have them made."""
    with compile_plan(plan, backend="cpu") as context:
        decoder = Decoder(context, order.directory, load_weights(plan, order.directory, context))
        return [token or 0 for (token,) in generate(decoder, prompts(1, 203), 1 + WARM + order.tokens)]


def _different(matrix: torch.Tensor) -> int:
    """Return how many different rows there are."""
    return len({tuple(row) for row in matrix.tolist()})


def test_a_checkpoint_has_what_its_config_says(order: Order) -> None:
    """Matrices are normal with deviation 0.02, norms are ones, and no two tokens have the same row."""
    values = saved_values(Path(order.directory))
    model = tpplan.read_model(order.directory)  # which holds the headers against the config
    assert random_checkpoint.size_of(CONFIG) == sum(value.nbytes for value in values.values())
    assert model.layer_count == 2
    for name, value in values.items():
        if value.ndim == 1:
            assert (value == 1).all(), name
        else:
            assert (value.std() / 0.02 - 1).abs() < 0.1, name
    assert _different(values["lm_head.weight"]) == 203


def test_a_checkpoint_larger_than_the_block_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of an odd length is repeated without a gap, and rows differ all the same."""
    monkeypatch.setattr(random_checkpoint, "_BLOCK", 1001)
    random_checkpoint.write(tmp_path, CONFIG)
    head = saved_values(tmp_path)["lm_head.weight"]
    flat = head.flatten()
    assert torch.equal(flat[:1001], flat[1001:2002])
    assert _different(head) == len(head)


@pytest.mark.parametrize("cut", CUTS)
def test_a_run_measures_all_parts_and_makes_the_right_tokens(order: Order, cut: str) -> None:
    """Every part has a figure, and the tokens are those that the decoder makes of the same plan."""
    order = evolve(order, cut=cut)
    rows: list[Row] = []
    decode_run.measure(order, rows.append)
    found = {row.what: row for row in rows}
    plan = order.plan()
    assert len(found) == len(rows)
    assert list(found) == [
        "plan and compile",
        "first token, after loading",
        "first token, after the process started",
        "load",
        *(f"device {memory.device}, memory bandwidth" for memory in plan.memory if memory.used_bytes),
        "decode, batch 1",
        "decode, batch 3",
        "prefill of 40 tokens",
        "prefill of 3 prompts of 32 tokens",
    ]
    assert all(row.value is not None and row.value > 0 for row in rows)
    assert {row.what for row in rows if row.limit} == {"load", "decode, batch 1", "decode, batch 3"}
    expected = _generated(order, plan)
    assert list(found["decode, batch 1"].tokens) == list(found["decode, batch 3"].tokens) == expected


def test_cuts_are_what_their_names_say() -> None:
    """An uneven plan has more on its first device, an even one as much on both; and layouts differ."""
    order = Order(directory=str(bench_decode.MODEL.parent), gpus=2, backend="cpu")
    plans = {cut: evolve(order, cut=cut).plan() for cut in CUTS}
    weights = {cut: [memory.weights_bytes for memory in plan.memory] for cut, plan in plans.items()}
    assert weights["even"][0] == pytest.approx(weights["even"][1], rel=0.1)
    assert weights["uneven"][0] == pytest.approx(weights["uneven"][1] * 1.5, rel=0.2)
    assert {cut: plan.request.layout for cut, plan in plans.items()} == {
        "even": "reduce",
        "uneven": "reduce",
        "gather": "gather",
    }


def test_the_limit_is_the_slowest_devices_weights(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the embedding, a step reads single rows: it does not count."""
    monkeypatch.setattr(decode_run, "_bandwidth", lambda _: 1e6)
    rows: list[Row] = []
    order = evolve(order, batches=(3,))
    decode_run.measure(order, rows.append)
    (limit,) = (row.limit for row in rows if row.what == "decode, batch 3")
    plan = order.plan()
    rows_of = {part.device: part.end - part.start for part in plan.slices("vocab")}
    read = [memory.weights_bytes - rows_of[memory.device] * 64 * 4 for memory in plan.memory]
    assert len(read) == 2
    assert limit == pytest.approx(3 * 1e6 / max(read))


def test_a_part_that_fails_leaves_the_others(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the part says why, and has no figure."""

    def broken(_: Path) -> float:
        raise OSError("the disk | is gone")

    monkeypatch.setattr(decode_run, "read_rate", broken)
    rows: list[Row] = []
    decode_run.measure(order, rows.append)
    assert [(row.what, row.note) for row in rows if row.value is None] == [
        ("load", "failed: OSError: the disk / is gone")
    ]
    assert rows[-1].what == "prefill of 3 prompts of 32 tokens"


def test_transformers_makes_the_same_tokens(order: Order) -> None:
    """It measures the same parts from the same prompts, so that figures can be compared."""
    rows: list[Row] = []
    transformers_run.measure(evolve(order, gpus=1), 0, rows.append)
    found = {row.what: row for row in rows}
    assert list(found) == [
        "load",
        "first token, after the process started",
        "decode, batch 1",
        "decode, batch 3",
        "prefill of 40 tokens",
    ]
    expected = _generated(order, order.plan())
    assert list(found["decode, batch 1"].tokens) == list(found["decode, batch 3"].tokens) == expected


def _sum(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    total = torch.stack(list(inputs)).sum(0)
    for output in outputs:
        output.copy_(total)


def _copy(tensors: Sequence[Tensor], root: int) -> None:
    for tensor in tensors:
        tensor.copy_(tensors[root])


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put something in NCCL's place that does the same to tensors in host memory."""
    monkeypatch.setattr("torch.cuda.nccl.all_reduce", _sum)
    monkeypatch.setattr("torch.cuda.nccl.broadcast", _copy)


@pytest.mark.usefixtures("nccl")
def test_the_decoder_over_nccl_makes_the_same_tokens(order: Order) -> None:
    """Only the movement differs, and the rows say whose it was."""
    rows: list[Row] = []
    decode_run.measure(evolve(order, nccl=True, batches=(1,)), rows.append)
    mine, others = ([row for row in rows if row.who == who and row.unit == "tokens/s"] for who in ("tpplan", "NCCL"))
    assert [row.what for row in others] == [row.what for row in mine] == ["decode, batch 1", "prefill of 40 tokens"]
    assert others[0].tokens == mine[0].tokens
    assert len(others[0].tokens) == 1 + WARM + TOKENS


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("source", [HOST, 1])
def test_nccl_operations_give_what_tpplans_give(order: Order, source: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also into tensors that are there, and where a device has no part of an axis."""
    model = tpplan.read_model(order.directory)
    plan = tpplan.plan(model, tpplan.parse_devices("3x8GiB"), cache=tpplan.Cache(tokens=64))
    with compile_plan(plan, backend="cpu") as context:
        other = NcclContext(context)
        x = torch.arange(6.0).view(2, 3)
        outs = [torch.zeros(2, 3) for _ in context.all_devices]
        assert all(torch.equal(copy, x) for copy in other.broadcast(x, source=source, out=outs))
        assert torch.equal(outs[2], x)
        for axis in (Axis.KV, Axis.RS):
            givers = context.devices_of(axis)
            parts = [x + device for device in givers]
            wanted = context.all_reduce(parts, axis=axis)
            assert all(map(torch.equal, other.all_reduce(parts, axis=axis), wanted))
            residual = [x * 10 for _ in context.all_devices]
            wanted = context.all_reduce(parts, residual, axis=axis)
            assert all(map(torch.equal, other.all_reduce(parts, residual, axis=axis), wanted))
            assert all(map(torch.equal, other.all_reduce(parts, residual, axis=axis, out=residual), wanted))
            assert all(map(torch.equal, residual, wanted))
        with pytest.raises(NotImplementedError, match="allgather"):
            other.allgather(parts, Axis.RS)
        monkeypatch.setattr(context, "gather", None)  # it is not tpplan that gathers
        whole = torch.arange(2.0 * 203).view(2, 203)
        logits = context.scatter(whole, Axis.VC)
        assert len({part.shape for part in logits}) > 1
        assert torch.equal(other.gather(logits, Axis.VC).tensor, whole)


def test_memory_is_told_by_bucket(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes between two looks belongs to the bucket that is named; all that is used is one of the ledger's."""
    mib = decode_memory.MIB
    handed_out = iter([5, 15, 45, 115, 160, 190, 128])
    plan = evolve(order, gpus=1).plan()
    monkeypatch.setattr(decode_memory, "requested", lambda *_: next(handed_out) * mib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 200 * mib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (200 * mib, 1000 * mib))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    buckets = Buckets(plan, [torch.device("cuda", 0)])
    for bucket in ("workspace", "weights", "cache"):
        buckets.look(bucket)
    rows: list[Row] = []
    buckets.tell(Part(rows.append, gpus=1, cut="even", who="tpplan"))
    found = {row.what.removeprefix("device 0, "): row for row in rows}
    assert {what: row.value for what, row in found.items()} == {
        "workspace": 10,
        "weights": 30,
        "cache": 70,
        "activations, for which the plan has scratch": 190 - 32 - 110,
        "overhead": 800 - 110 - 48,
        "all that the driver says is used": 800,
    }
    overhead = found.pop("overhead")
    for piece in ("libraries 600.0 MiB", "in torch's memory 32.0 MiB", "beyond the peak 10.0 MiB"):
        assert piece in overhead.note
    assert "18.0 MiB of them stay" in found["activations, for which the plan has scratch"].note
    everything = found.pop("all that the driver says is used").limit
    ledger = plan.memory[0]
    assert overhead.limit == ledger.overhead_bytes / mib
    assert everything == ledger.used_bytes / mib == sum(row.limit or 0 for row in (*found.values(), overhead))


def test_rows_survive_the_way_between_processes() -> None:
    """Whatever else a library prints is not taken for one."""
    row = Row(gpus=2, cut="even", who="NCCL", what="load", value=1.5, unit="s", limit=3.0, note="é", tokens=(4, 5))
    assert Row.parse(row.line()) == row
    assert Row.parse("Loading weights: 100%") is None
    assert cells(row) == "| 2 | even | NCCL | load | 1.5 | s | 3 | 50% | é |"


def test_tokens_are_compared_with_the_first() -> None:
    """A row says how many of its tokens, from the start, the first of the kind has too."""
    first = Row(gpus=1, cut="even", who="tpplan", what="decode", value=1.0, tokens=(1, 2, 3, 4))
    other = evolve(first, gpus=2, who="NCCL", tokens=(1, 2, 5, 4))
    assert compared(first, []) == first
    assert compared(other, [first]).note == "first 2 of 4 tokens as tpplan on 1"
    assert compared(evolve(other, what="prefill"), [first]).note == ""


def test_what_is_run(order: Order) -> None:
    """One GPU has no cuts to choose from, and NCCL has nothing to move there; it knows no layout but reduce."""
    order = evolve(order, backend="cuda")
    found = list(bench_decode.runs(order, (1, 2), ("even", "gather"), ("nccl", "transformers")))
    assert [(who, one.gpus, one.cut, one.nccl) for who, one in found] == [
        ("tpplan", 1, "even", False),
        ("transformers", 1, "even", False),
        ("tpplan", 2, "even", True),
        ("tpplan", 2, "gather", False),
        ("transformers", 2, "even", False),
    ]
    assert [who for who, _ in bench_decode.runs(order, (2,), ("even",), ())] == ["tpplan"]


def _command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *more: str) -> int:
    """Run the command for a tiny model, and return how it exits."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    sizes = ["--batches", "1", "--tokens", "2", "--prefill", "40", "--layers", "1", "--peers", "", "--gpus", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_decode", "--backend", "cpu", "--config", str(config), *sizes, *more])
    with pytest.raises(SystemExit) as end:
        bench_decode.main()
    return int(end.value.code or 0)


def test_the_command_prints_a_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All rows are in it; the checkpoint, of fewer layers, stays in the folder that was named, and is used again."""
    folder = tmp_path / "model"
    assert _command(monkeypatch, tmp_path, "--json", "--folder", str(folder)) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["layers"] == tpplan.read_model(folder).layer_count == 1
    assert [row["what"] for row in document["rows"]][-2:] == ["decode, batch 1", "prefill of 40 tokens"]
    assert said.err.count("| 1 | even | tpplan |") == len(document["rows"])
    before = (folder / "model.safetensors").stat()
    with bench_decode.checkpoint({}, str(folder), asked=False) as directory:
        assert directory == folder
    assert (folder / "model.safetensors").stat() == before


def test_a_checkpoint_of_many_files_is_taken_as_it_is(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written beside it, its own layers are told, and its weights run."""
    values = saved_values(Path(order.directory))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for i, name in enumerate(values):
        save_file({name: values[name]}, folder / f"model-{i}.safetensors")
    before = sorted(folder.iterdir())
    assert _command(monkeypatch, tmp_path, "--json", "--config", "", "--layers", "0", "--folder", str(folder)) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["layers"], sorted(folder.iterdir())) == (2, before)
    (tokens,) = (row["tokens"] for row in document["rows"] if row["what"] == "decode, batch 1")
    assert tokens == _generated(order, order.plan())[: len(tokens)]
    assert len(tokens) == 1 + WARM + 2


@pytest.mark.parametrize(("asked", "is_there"), [(True, True), (True, False), (False, False)])
def test_another_models_folder_is_left_alone(asked: bool, is_there: bool, tmp_path: Path) -> None:
    """A config that is not the one asked for, or has no weights yet, is neither run nor written over."""
    random_checkpoint.write(tmp_path, CONFIG)
    if not is_there:
        (tmp_path / "model.safetensors").unlink()
    other = CONFIG | {"num_hidden_layers": 1}
    with (
        pytest.raises(SystemExit, match="of another model or size\nhint: leave out --config and --layers"),
        bench_decode.checkpoint(other, str(tmp_path), asked=asked),
    ):
        pass
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    assert (tmp_path / "model.safetensors").exists() is is_there


def test_a_checkpoint_that_was_not_finished_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends halfway through leaves nothing that counts as a checkpoint, and is no obstacle to the next time."""

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(random_checkpoint, "_put", full)
        with pytest.raises(OSError, match="is full"), bench_decode.checkpoint(CONFIG, str(tmp_path), asked=True):
            pass
    assert not list(tmp_path.glob("*.safetensors"))
    with bench_decode.checkpoint(CONFIG, str(tmp_path), asked=True):
        assert _different(saved_values(tmp_path)["lm_head.weight"]) == 203
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_the_command_fails_if_a_run_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that takes too long becomes a row, and nothing is left of the checkpoint."""
    monkeypatch.setattr(bench_decode, "room_for", lambda _: tmp_path)
    assert _command(monkeypatch, tmp_path, "--watchdog", "0.1") == 1
    assert "| 1 | even | tpplan | the whole run | failed |" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
