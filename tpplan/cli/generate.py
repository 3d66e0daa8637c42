"""The command ``tpplan generate``: a plan and a checkpoint in, a text out."""

from __future__ import annotations

import shlex

from tpplan.cli import console, plans
from tpplan.cli.commands import OK, Whole
from tpplan.core.missing import needing
from tpplan.errors import PlanError, RequestError, UsageError

#: Characters of a number; no model has so many tokens.
_LONGEST = 12


def generate(
    plan: str,
    /,
    *,
    model: str,
    prompt: str = "",
    token_ids: str = "",
    chat: bool = False,
    system: str = "",
    max_new_tokens: Whole | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    seed: Whole | None = None,
    backend: str = "auto",
    json: bool = False,
) -> int:
    """Load a checkpoint by a plan and continue a text, token by token.

    Args:
        plan: a plan file; - is standard input.
        model: the checkpoint's directory, with safetensors files and, for --prompt, a tokenizer.json; a GGUF file; or
            org/name.
        prompt: the text to continue; - is standard input.
        token_ids: tokens to continue instead, such as 5,17,99; then tokens are printed, and no tokenizer is needed.
        chat: put the prompt into the checkpoint's chat template, for the model to answer it.
        system: with --chat, what the system says before the prompt.
        max_new_tokens: at most; 128 by default, or as many as the plan's cache has room for.
        temperature: 0 (by default) takes the likeliest token; above, one is drawn.
        top_p: with a temperature, the probability of all the tokens that one is drawn from; 1 by default.
        seed: with a temperature, of what is drawn; 0 by default.
        backend: cuda, cpu (virtual devices), or auto (by default): cuda if the machine has as many GPUs, else cpu.
        json: print one JSON document.
    """
    from tpplan.decoder.decoding.sampling import Sampling  # noqa: PLC0415
    from tpplan.decoder.generation.arguments import Order, checked  # noqa: PLC0415
    from tpplan.files.codec import unstructure  # noqa: PLC0415 (not every command has a document)
    from tpplan.files.jsontext import render  # noqa: PLC0415 (not every command has a document)
    from tpplan.models.hub import local  # noqa: PLC0415

    if bool(prompt) == bool(token_ids):
        hint = "leave out one of them" if prompt else 'add --prompt "…" or --token-ids 5,17,99'
        raise UsageError("generate takes either a prompt or tokens", hint)
    if chat and token_ids:
        raise UsageError("--chat takes a prompt, not tokens", "give the prompt as a text, or leave out --chat")
    if system and not chat:
        raise UsageError("--system is a part of a chat", "add --chat, or leave out --system")
    for option, value in (("--top-p", top_p), ("--seed", seed)):
        if value is not None and not temperature:
            raise UsageError(
                f"{option} takes effect with --temperature above 0", f"add --temperature 0.7, or leave out {option}"
            )
    if max_new_tokens is not None and max_new_tokens < 1:
        raise RequestError(f"--max-new-tokens is {max_new_tokens}, expected 1 or more", "leave it out for 128")
    tokens = token_ids.split(",") if token_ids else []
    if not all(token.strip().isdecimal() and len(token) <= _LONGEST for token in tokens):
        raise UsageError(f"--token-ids is {token_ids[:60]!r}, expected numbers", "write them as in 5,17,99")
    plans.some((plan, prompt))
    found = plans.read_plan(plan)
    order = Order(
        directory=str(local(model)),
        prompt=console.read(prompt) if prompt == console.STREAM else prompt,
        tokens=tuple(map(int, tokens)),
        chat=chat,
        system=system,
        max_new_tokens=max_new_tokens or 0,
        sampling=Sampling(temperature, 1.0 if top_p is None else top_p, seed or 0),
        backend=backend,
    )
    try:
        task = checked(found, order)
    except PlanError as error:
        if plan != console.STREAM:
            again = plans.remake(found, plan, model, "") or "tpplan plan"
            compares = shlex.join(["tpplan", "check", plan, "--model", model])
            error.hint = f"{compares} compares them, {again} makes the plan again"
        raise
    with needing("running a plan", "generate"):
        from tpplan.decoder.generation.command import run  # noqa: PLC0415
    console.show_log()
    report = run(task, plans.note, (lambda _: None) if json else console.emit)
    console.emit(render(unstructure(report)) if json else "\n")
    return OK
