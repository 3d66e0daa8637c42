"""A process for each device, which torch.distributed brings together."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.transformers.cases import model_of
from tpplan.exec.tools.bench.between import children
from tpplan.transformers.trial import uneven_plan
from tpplan.weights.source import Source

ROOT = Path(__file__).parents[2]
#: Attention that is linear in some layers, and latent attention, both with experts: what differs between processes.
MODELS = ("qwen3_next", "deepseek_v3")
#: The example in three processes, with other ports and arguments in turn; they are forks, so that only one imports.
REPEATED = """
import json, os, runpy, sys
main = runpy.run_path("examples/generate_together.py")["main"]
from transformers import DeepseekV3ForCausalLM, Qwen3NextForCausalLM
from tpplan import transformers
os.environ["WORLD_SIZE"] = "3"
children = []
for rank in "1", "2":
    if child := os.fork():
        children.append(child)
    else:
        os.environ["RANK"] = rank
        children.clear()
        break
for os.environ["MASTER_PORT"], *sys.argv[1:] in json.loads(sys.argv[1]):
    main()
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def free_ports(count: int) -> list[str]:
    """Return as many different ports."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(server.getsockname()[1]) for server in servers]


def test_tokens_are_those_of_one_device(tmp_path: Path) -> None:
    """Three processes, of which the second has no heads, make the tokens of one, by transformers' generate in each."""
    runs, wanted = [], {}
    for model_type, port in zip(MODELS, free_ports(len(MODELS)), strict=True):
        model, path = model_of(model_type), tmp_path / f"{model_type}.json"
        uneven_plan(Source.read(model.directory), "reduce", "idle").save(path)
        tokens = model.whole.generate(torch.tensor([[5, 17, 99]]), max_new_tokens=12, do_sample=False)
        wanted[model_type] = tokens[0, 3:].tolist()
        words = [str(path), str(model.directory), "5,17,99", "cpu", "--new", "12", "--engine", "transformers"]
        runs.append([port, *words])
    lines: list[str] = []
    assert not children.run([sys.executable, "-c", REPEATED, json.dumps(runs)], 1, 240, lines.append, ROOT)
    assert {each: [int(lines.pop(0)) for _ in wanted[each]] for each in MODELS} == wanted
    assert not lines
