"""The commands: what each one reads, does and prints, and its exit code.

What a command needs is imported when it runs: showing a plan must not pay for planning one.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from tpplan import __version__
from tpplan.cli import console
from tpplan.cli import plans as on_plans
from tpplan.cli.arguments import whole
from tpplan.core.missing import needing
from tpplan.errors import RequestError, UsageError

OK, NO, FAILED = 0, 1, 2

app = App(
    name="tpplan",
    version=f"tpplan {__version__}",
    help="Plan how a large language model is split over uneven GPUs; save the plan, review it, check it, and test it.",
    help_format="plaintext",
    default_parameter=Parameter(negative=(), show_default=False),
)

_Output = Annotated[str, Parameter(name=["--output", "-o"])]
Whole = Annotated[int, Parameter(converter=whole)]


def _survey(*, json: bool) -> int:
    from tpplan.render.survey import survey as view  # noqa: PLC0415

    with needing("testing links"):
        from tpplan.exec.tools.survey.survey import survey as examine  # noqa: PLC0415
    console.show_log()
    console.answer(examine(console.busy), view, json=json)
    return OK


@app.command(sort_key=1)
def inspect(model: str, /, *, json: bool = False) -> int:
    """Show a model's shapes, parameters, weight bytes and cache bytes per token.

    Args:
        model: a directory with a config.json and perhaps safetensors files, or a config.json.
        json: print one JSON document.
    """
    from tpplan.render.inspection import inspection as view  # noqa: PLC0415
    from tpplan.reports.inspect import inspect as look  # noqa: PLC0415

    console.answer(look(on_plans.read_model(model)), view, json=json)
    return OK


@app.command(sort_key=2)
def devices(*, output: _Output = "", measure: bool = False, links: bool = False, json: bool = False) -> int:
    """Show the GPUs of this machine: memory, bandwidth, links, and who else uses them.

    Args:
        output: write a devices file for --gpus; - is standard output.
        measure: also measure bandwidths, products and links, for predictions of speed; needs torch and idle GPUs.
        links: instead, test links and keep which way is fastest; needs torch, idle GPUs, and some hundred MiB on each.
        json: print one JSON document.
    """
    if links:
        if output or measure:
            other = "-o" if output else "--measure"
            raise UsageError(f"--links does not go with {other}", f"leave out --links, or {other}")
        return _survey(json=json)
    from tpplan.hardware import probe  # noqa: PLC0415
    from tpplan.hardware.file import dumps  # noqa: PLC0415
    from tpplan.render.devices import devices as view  # noqa: PLC0415

    report = probe.probe()
    if measure:
        with needing("measuring GPUs"):
            from tpplan.exec.tools.survey.speeds import measure as examine  # noqa: PLC0415
        console.show_log()
        report = probe.with_speeds(report, examine(console.busy))
    if output:
        console.save(dumps(probe.devices_file(report)), output)
    if output != console.STREAM:
        console.answer(report, view, json=json)
    else:
        for note in report.notes:
            on_plans.note(note)
    return OK


@app.command(sort_key=3)
def plan(
    model: str,
    /,
    *,
    gpus: str,
    output: _Output = "",
    context: Whole | None = None,
    batch: Whole = 1,
    cache: str = "fp16",
    layout: str = "",
    strategy: str = "auto",
    max_rows: Whole = 2048,
    kv: str = "idle",
    tokens: Whole | None = None,
    full_window: bool = False,
    beyond: bool = False,
    reserve: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Split a model over GPUs, and show the plan or write it; exit 1 if it does not fit.

    Args:
        model: a directory with a config.json and perhaps safetensors files, or a config.json.
        gpus: a list such as 2x24GiB,12GiB or 4xRTX4090,RTX3060 or H100:72GiB, a devices file, or auto.
        output: write the plan to this file; - is standard output.
        context: tokens per sequence; the longest that the model was made for by default.
        batch: sequences that share the cache; 1 by default.
        cache: its kind: fp16 (by default), fp8, q8, q6 or q4.
        layout: reduce or gather; reduce by default, gather where the weights' rows cannot be cut.
        strategy: balanced (by memory), latency (by bandwidth), exllamav2, or auto (by default): the faster of two.
        max_rows: tokens in the largest forward pass; 2048 by default.
        kv: idle (by default) or replicate, for devices beyond the KV heads.
        tokens: in the cache, a pool that the sequences share, none of them longer than the context.
        full_window: cache all tokens in layers with a sliding window, too, for servers that do.
        beyond: accept a context longer than the model was made for, at your own risk.
        reserve: memory to leave to something else on every device, such as 2GiB, or on one, as 2GiB@0; repeatable.
        json: print the plan as JSON.
    """
    from tpplan.cli.arguments import parse_reserve  # noqa: PLC0415
    from tpplan.core.plan import Cache  # noqa: PLC0415
    from tpplan.files.codec import dumps  # noqa: PLC0415
    from tpplan.hardware.spec import links_of, parse_devices  # noqa: PLC0415
    from tpplan.planner.plan import plan as make  # noqa: PLC0415

    for option, value, usual in (("--context", context, "for the longest"), ("--tokens", tokens, "for equal parts")):
        if value is not None and value < 1:
            raise RequestError(f"{option} is {value}, expected 1 or more tokens", f"leave it out {usual}")
    on_plans.apart(output, reading=(model, gpus))
    reserves = tuple(map(parse_reserve, reserve))
    spec, gpu_list, links = on_plans.read_model(model), parse_devices(gpus, on_plans.note), links_of(gpus)
    with console.busy("planning"):
        found = make(
            spec,
            gpu_list,
            cache=Cache(cache, tokens or 0),
            layout=layout,
            strategy=strategy,
            batch=batch,
            max_rows=max_rows,
            kv=kv,
            context=context or min(tokens or 0, spec.max_context),
            full_window=full_window,
            beyond=beyond,
            reserve=reserves,
            links=links,
        )
    if found.request.layout != (layout or "reduce"):
        on_plans.note(f"layout gather, because rows cannot be cut: {spec.gather_only}")
    if full_window and not found.request.full_window:
        on_plans.note("no layer has a sliding window shorter than a sequence, so --full-window changes nothing")
    if found.request.beyond:
        length = found.request.sequence_tokens
        on_plans.note(f"{length} tokens per sequence are more than the {spec.max_context} that the model was made for")
    on_plans.note_idle(found, spec)
    on_plans.note_faster(found, spec, links)
    on_plans.note_fewer(found, spec)
    if output:
        console.save(dumps(found), output)
        on_plans.tell(found)
    on_plans.note_uncounted(found, on_screen=not json and not output)
    if json and output != console.STREAM:
        console.emit(dumps(found))
    elif not output:
        on_plans.show(found)
        console.say("hint", "this plan is not saved; -o FILE writes it", "hint")
    return OK


@app.command(sort_key=4)
def fit(
    model: str,
    /,
    *,
    gpus: str,
    context: Whole | None = None,
    cache: str = "fp16",
    batch: Whole = 1,
    max_rows: Whole = 2048,
    layout: str = "",
    json: bool = False,
) -> int:
    """Show which contexts, cache kinds and quantisations of a model fit, and how fast; exit 1 if the wish does not fit.

    Args:
        model: a directory with a config.json and perhaps safetensors files, or a config.json.
        gpus: a list such as 2x24GiB,12GiB or 4xRTX4090,RTX3060 or H100:72GiB, a devices file, or auto.
        context: tokens per sequence that are wished for; the longest that the model was made for by default.
        cache: kind that is wished for: fp16 (by default), fp8, q8, q6 or q4.
        batch: sequences that decode together; 1 by default.
        max_rows: tokens in the largest forward pass; 2048 by default.
        layout: reduce or gather; reduce by default, gather where the weights' rows cannot be cut.
        json: print one JSON document.
    """
    from tpplan.hardware.spec import links_of, parse_devices  # noqa: PLC0415
    from tpplan.render.fit import fit as view  # noqa: PLC0415
    from tpplan.reports.fit import fit as look  # noqa: PLC0415

    if context is not None and context < 1:
        raise RequestError(f"--context is {context}, expected 1 or more tokens", "leave it out for the longest")
    spec, gpu_list = on_plans.read_model(model), parse_devices(gpus, on_plans.note)
    with console.busy("planning"):
        report = look(
            spec,
            gpu_list,
            context=context or 0,
            cache=cache,
            batch=batch,
            max_rows=max_rows,
            layout=layout,
            links=links_of(gpus),
            gpus=gpus,
        )
    console.answer(report, view, json=json)
    return OK if report.fits else NO


@app.command(sort_key=5)
def show(plan: str, /, *, svg: str = "", html: str = "", plain: bool = False, json: bool = False) -> int:
    """Show a plan on one screen: memory per device, splits, shares.

    Args:
        plan: a plan file; - is standard input.
        svg: draw it into this file instead; - is standard output.
        html: write it as a page into this file instead; - is standard output.
        plain: no colour and 100 columns, also on a terminal.
        json: print one JSON document.
    """
    if [svg == console.STREAM, html == console.STREAM, json].count(True) > 1:
        raise UsageError("standard output would be several documents", "write all but one of them into files")
    on_plans.apart(svg, html, reading=(plan,))
    found = on_plans.read_plan(plan, allow_newer=True)
    if svg or html:
        on_plans.draw(found, svg, html)
    if json or not (svg or html):
        on_plans.show(found, json=json, plain=plain)
    return OK


@app.command(sort_key=6)
def diff(before: str, after: str, /, *, json: bool = False) -> int:
    """Show what moves between devices from one plan to another; exit 1 if they differ.

    Args:
        before: a plan file; - is standard input.
        after: a plan file; - is standard input.
        json: print one JSON document.
    """
    from tpplan.render.diff import diff as view  # noqa: PLC0415
    from tpplan.reports.diff import diff as compare  # noqa: PLC0415

    found = compare(*(on_plans.read_plan(path, allow_newer=True) for path in on_plans.some((before, after))))
    console.answer(found, view, json=json)
    return NO if found else OK


@app.command(sort_key=7, usage="Usage: tpplan validate [OPTIONS] PLANS...")
def validate(*plans: str, json: bool = False) -> int:
    """Check plan files against every rule and list every problem; exit 1 if one is invalid, 2 if one cannot be read.

    Args:
        plans: plan files; - is standard input.
        json: print one JSON document.
    """
    from tpplan.render.verdicts import validation as view  # noqa: PLC0415
    from tpplan.reports.validate import validate as judge  # noqa: PLC0415

    found = judge(on_plans.some(plans), console.read)
    console.answer(found, view, json=json)
    on_plans.advise(file.hint for file in found.files)
    return FAILED if any(file.error for file in found.files) else OK if found.ok else NO


@app.command(sort_key=8, usage="Usage: tpplan check --model STR [OPTIONS] PLANS...")
def check(*plans: str, model: str, gpus: str | None = None, json: bool = False) -> int:
    """Plan again from what each plan was asked, and compare; exit 1 if one is stale, 2 if one is no valid plan.

    Args:
        plans: plan files; - is standard input.
        model: the model's directory or config.json.
        gpus: a devices file or a list, which may have changed since; the devices of each plan by default.
        json: print one JSON document.
    """
    from tpplan.hardware.spec import parse_devices  # noqa: PLC0415
    from tpplan.render.verdicts import check as view  # noqa: PLC0415
    from tpplan.reports.check import check as compare  # noqa: PLC0415

    stored = {path: on_plans.plan_or_error(path) for path in on_plans.some(plans)}
    devices = parse_devices(gpus, on_plans.note) if gpus else ()
    spec = on_plans.read_model(model)
    found = compare(stored, spec, devices)
    console.answer(found, view, json=json)
    on_plans.advise_stale(found.plans, stored, spec, model, gpus or "")
    unread = [one.error for one in found.plans if one.error]
    on_plans.advise(error.hint for error in unread)
    return FAILED if unread else OK if found.current else NO


@app.command(sort_key=9)
def selftest(plan: str, /, *, backend: str = "auto", transport: str = "", json: bool = False) -> int:
    """Compile a plan, run every operation on every axis, and compare every byte; exit 1 if one is wrong.

    Args:
        plan: a plan file; - is standard input.
        backend: cuda, cpu (virtual devices), or auto (by default): cuda if the machine has as many GPUs, else cpu.
        transport: peer, host or events; all of them by default.
        json: print one JSON document.
    """
    from tpplan.exec import options  # noqa: PLC0415 (before what needs torch)
    from tpplan.render.selftest import selftest as view  # noqa: PLC0415

    options.check_choice("backend", backend, options.BACKENDS)
    wanted = options.tested_transports(transport)
    found = on_plans.read_plan(plan)
    with needing("running a plan"):
        from tpplan.exec.compiler import compiler  # noqa: PLC0415
        from tpplan.exec.tools.selftest import run as tests  # noqa: PLC0415
    console.show_log()
    report = tests.selftest(found, compiler(found, backend, on_plans.note), wanted, console.busy)
    console.answer(report, view, json=json)
    return OK if report.ok else NO


@app.command(sort_key=11)
def bench(
    plan: str,
    /,
    *,
    backend: str = "auto",
    sizes: str = "",
    rounds: Whole = 7,
    transport: str = "auto",
    json: bool = False,
) -> int:
    """Time every operation of a plan on this machine, beside torch, NCCL, and ways through the host.

    Args:
        plan: a plan file; - is standard input.
        backend: cuda, cpu (virtual devices), or auto (by default): cuda if the machine has as many GPUs, else cpu.
        sizes: that a device holds in the end, rounded up to rows; by default those of 8KiB,64KiB,1MiB,16MiB that fit.
        rounds: in which all take turns; 7 by default.
        transport: peer, host, events, or auto (by default).
        json: print one JSON document.
    """
    from tpplan.exec import options  # noqa: PLC0415 (before what needs torch)
    from tpplan.render.bench import bench as view  # noqa: PLC0415

    options.check_choice("backend", backend, options.BACKENDS)
    options.check_choice("transport", transport, options.TRANSPORTS_OR_AUTO)
    asked, turns = options.payloads(sizes) if sizes else (), options.checked_rounds(rounds)
    found = on_plans.read_plan(plan)
    with needing("running a plan"):
        from tpplan.exec.compiler import compiler  # noqa: PLC0415
        from tpplan.exec.tools.bench import run as times  # noqa: PLC0415
    console.show_log()
    make, told = compiler(found, backend, on_plans.note), (lambda _: None) if json else console.growing(view)
    report = times.bench(make, transport, sizes=asked, rounds=turns, busy=console.busy, told=told)
    if json:
        console.answer(report, view, json=True)
    return OK if any(timed.time for one in report.measured for timed in one.timed) else FAILED


@app.command(sort_key=12)
def export(
    plan: str,
    /,
    *,
    for_: Annotated[str, Parameter(name="--for")],
    output: _Output = "",
    json: bool = False,
) -> int:
    """Show a plan as another engine's flags or settings, and what differs there; exit 1 if the engine cannot run it.

    Args:
        plan: a plan file; - is standard input.
        for_: llama.cpp, llama.cpp-layer, exllamav3, exllamav2, accelerate, transformers, vllm or sglang.
        output: write what is to be copied to this file; - is standard output.
        json: print one JSON document.
    """
    from tpplan.export.export import engine_of  # noqa: PLC0415
    from tpplan.export.export import export as told  # noqa: PLC0415

    if json and output == console.STREAM:
        raise UsageError("standard output would be several documents", "write one of them into a file")
    engine_of(for_)
    on_plans.apart(output, reading=(plan,))
    found = on_plans.read_plan(plan)
    return OK if on_plans.hand_over(found, told(found, for_), output, json=json) else NO


@app.command(sort_key=13)
def schema(name: str = "", /) -> int:
    """Print the JSON Schema of a document, for editors and checkers.

    Args:
        name: which, such as split-plan; without it, all names are listed.
    """
    from tpplan.reports.schemas import names, text  # noqa: PLC0415

    console.emit(text(name) if name else "".join(f"{each}\n" for each in names()))
    return OK
