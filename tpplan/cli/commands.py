"""The commands: what each one reads, does and prints, and its exit code.

What a command needs is imported when it runs: showing a plan must not pay for planning one.
"""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from tpplan import __version__
from tpplan.cli import console
from tpplan.cli import plans as on_plans
from tpplan.cli.arguments import (
    COMPLETION,
    Backend,
    CacheKind,
    Engine,
    File,
    KvMode,
    Layout,
    Shell,
    Strategy,
    Transport,
    TransportOrAuto,
    Verdict,
    View,
    form_of,
    lacking,
    whole,
)
from tpplan.core.missing import needing
from tpplan.errors import RequestError, TpplanError, UsageError

OK, NO, FAILED = 0, 1, 2

app = App(
    name="tpplan",
    version=f"tpplan {__version__}",
    help="Plan how a large language model is split over uneven GPUs; save the plan, review it, check it, and test it.",
    help_format="plaintext",
    default_parameter=Parameter(negative=(), show_default=False),
)

_All = Annotated[bool, Parameter(name="--all")]
_Output = Annotated[File, Parameter(name=["--output", "-o"])]
Whole = Annotated[int, Parameter(converter=whole)]
_MODEL = (
    "a model's directory or its config.json, a GGUF file, or a name on the Hugging Face Hub such as org/name@revision,"
    " if the hub's cache has it."
)
_Model = Annotated[File, Parameter(help=_MODEL)]


def _survey(*, json: bool) -> int:
    from tpplan.render.survey import survey as view  # noqa: PLC0415

    with needing("testing links"):
        from tpplan.exec.tools.survey.survey import survey as examine  # noqa: PLC0415
    console.show_log()
    console.answer(examine(console.busy), view, json=json)
    return OK


@app.command(sort_key=1)
def inspect(model: _Model, /, *, json: bool = False) -> int:
    """Show a model's shapes, parameters, weight bytes and cache bytes per token.

    Args:
        model: its path or name.
        json: print one JSON document.
    """
    from tpplan.render.inspection import inspection as view  # noqa: PLC0415
    from tpplan.reports.inspect import inspect as look  # noqa: PLC0415

    spec = on_plans.read_model(model)
    found = look(spec)
    for text in found.notes[len(spec.notes) :]:
        on_plans.note(text)
    console.answer(found, view, json=json)
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
    model: _Model = "",
    /,
    *,
    gpus: str = "",
    all_: _All = False,
    manifest: str = "",
    output: _Output = "",
    context: Whole | None = None,
    batch: Whole | None = None,
    cache: CacheKind | None = None,
    layout: Layout | None = None,
    strategy: Strategy | None = None,
    max_rows: Whole | None = None,
    kv: KvMode | None = None,
    tokens: Whole | None = None,
    full_window: bool = False,
    beyond: bool = False,
    reserve: tuple[str, ...] = (),
    draft: File = "",
    draft_output: File = "",
    mtp: bool = False,
    json: bool = False,
) -> int:
    """Split a model over GPUs, and show the plan or write it; exit 1 if it does not fit.

    Args:
        model: its path or name.
        gpus: a list such as 2x24GiB,12GiB or 4xRTX4090,RTX3060 or H100:72GiB, a devices file, or auto.
        all_: instead, write every plan that the manifest tpplan.toml names.
        manifest: the same with another manifest than that.
        output: write the plan to this file; - is standard output.
        context: tokens per sequence; the longest that the model was made for by default.
        batch: sequences that share the cache; 1 by default.
        cache: its kind; fp16 by default.
        layout: reduce by default, gather where the weights' rows cannot be cut.
        strategy: balanced by memory, latency by bandwidth; auto, the default, takes the faster of these two.
        max_rows: tokens in the largest forward pass; 2048 by default.
        kv: what devices beyond the KV heads do; idle by default.
        tokens: in the cache, a pool that the sequences share, none of them longer than the context.
        full_window: cache all tokens in layers with a sliding window, too, for servers that do.
        beyond: accept a context longer than the model was made for, at your own risk.
        reserve: memory to leave to something else on every device, such as 2GiB, or on one, as 2GiB@0; repeatable.
        draft: a draft model, by path or name: leave room for all of it and its cache on every device.
        draft_output: split the draft model over the devices instead, and write that plan to this file.
        mtp: leave room for the model's own prediction layers, split like the model.
        json: print one JSON document, with the plan in it.
    """
    from tpplan.files.codec import dumps  # noqa: PLC0415
    from tpplan.hardware.spec import links_of, parse_devices  # noqa: PLC0415
    from tpplan.planner.options import Options  # noqa: PLC0415
    from tpplan.reports.manifest import Inputs  # noqa: PLC0415

    choices = {"cache": cache, "layout": layout, "strategy": strategy, "kv": kv}
    numbers = {"context": context, "batch": batch, "max_rows": max_rows, "tokens": tokens}
    flags = {"full_window": full_window, "beyond": beyond, "reserve": reserve, "mtp": mtp}
    asked: dict[str, Any] = {name: value for name, value in {**choices, **numbers}.items() if value is not None}
    asked |= {name: value for name, value in flags.items() if value}
    if all_ or manifest:
        from tpplan.cli import manifest as on_manifest  # noqa: PLC0415

        given = {"MODEL": model, "--gpus": gpus, "-o": output, "--draft": draft, "--draft-output": draft_output}
        given |= {f"--{name.replace('_', '-')}": "given" for name in asked}
        report = on_manifest.plan(manifest, given, json=json)
        return OK if report.ok else NO if report.only_infeasible else FAILED
    for name, value in (("MODEL", model), ("--gpus", gpus)):
        if not value:
            raise lacking("plan", name)
    on_plans.apart(output, draft_output, reading=(model, gpus, draft))
    options = Options(**asked)
    spec, gpu_list, links = on_plans.read_model(model), parse_devices(gpus, on_plans.note), links_of(gpus)
    drafting = on_plans.read_draft(model, draft, draft_output, mtp=mtp)
    inputs = Inputs(spec, gpu_list, links, drafting, is_split=mtp or bool(draft_output))
    with console.busy("planning"):
        found = inputs.plan(options)
        beside = inputs.with_room(options.request(spec), gpu_list)[1] if draft_output else None
    on_plans.note_draft(inputs, found)
    if beside:
        on_plans.note_idle_draft(beside)
    on_plans.note_all(found, spec, options, links)
    for each, path in ((beside, draft_output), (found, output)):
        if each and path:
            console.save(dumps(each), path)
            on_plans.tell(each)
    on_plans.note_uncounted(found, on_screen=not json and not output)
    if json and output != console.STREAM:
        on_plans.show(found, "json")
    elif not output:
        on_plans.show(found)
        console.say("hint", "this plan is not saved; -o FILE writes it", "hint")
    return OK


@app.command(sort_key=4)
def fit(
    model: _Model,
    /,
    *,
    gpus: str,
    context: Whole | None = None,
    cache: CacheKind = "fp16",
    batch: Whole = 1,
    max_rows: Whole = 2048,
    layout: Layout | None = None,
    reserve: tuple[str, ...] = (),
    draft: File = "",
    mtp: bool = False,
    form: View | None = None,
    json: bool = False,
) -> int:
    """Show which contexts, cache kinds and quantisations of a model fit, and how fast; exit 1 if the wish does not fit.

    Args:
        model: its path or name.
        gpus: a list such as 2x24GiB,12GiB or 4xRTX4090,RTX3060 or H100:72GiB, a devices file, or auto.
        context: tokens per sequence that are wished for; the longest that the model was made for by default.
        cache: kind that is wished for; fp16 by default.
        batch: sequences that decode together; 1 by default.
        max_rows: tokens in the largest forward pass; 2048 by default.
        layout: reduce by default, gather where the weights' rows cannot be cut.
        reserve: memory to leave to something else on every device, such as 2GiB, or on one, as 2GiB@0; repeatable.
        draft: a draft model, by path or name: leave room for all of it and its cache on every device.
        mtp: leave room for the model's own prediction layers, split like the model.
        form: markdown prints tables for a pull request; text by default.
        json: print one JSON document.
    """
    from attrs import evolve  # noqa: PLC0415

    from tpplan.hardware.spec import links_of, parse_devices  # noqa: PLC0415
    from tpplan.planner.options import parse_reserve  # noqa: PLC0415
    from tpplan.render.fit import fit as view  # noqa: PLC0415
    from tpplan.reports.fit import fit as look  # noqa: PLC0415
    from tpplan.reports.manifest import Inputs  # noqa: PLC0415

    chosen = form_of(form, json=json)
    if context is not None and context < 1:
        raise RequestError(f"--context is {context}, expected 1 or more tokens", "leave it out for the longest")
    reserves = tuple(map(parse_reserve, reserve))
    spec, gpu_list = on_plans.read_model(model), parse_devices(gpus, on_plans.note)
    drafting = on_plans.read_draft(model, draft, "", mtp=mtp)
    room = Inputs(spec, gpu_list, draft=drafting, is_split=mtp).room("balanced")
    with console.busy("planning"):
        report = look(
            spec,
            gpu_list,
            context=context or 0,
            cache=cache,
            batch=batch,
            max_rows=max_rows,
            layout=layout or "",
            links=links_of(gpus),
            gpus=gpus,
            reserve=reserves,
            room=room,
            draft=drafting.name if drafting else "",
            mtp=mtp,
        )
    console.present(evolve(report, notes=console.noted()), view, chosen)
    return OK if report.fits else NO


@app.command(sort_key=5)
def show(
    plan: File, /, *, svg: File = "", html: File = "", plain: bool = False, form: View | None = None, json: bool = False
) -> int:
    """Show a plan on one screen: memory per device, splits, shares.

    Args:
        plan: a plan file; - is standard input.
        svg: draw it into this file instead; - is standard output.
        html: write it as a page into this file instead; - is standard output.
        plain: no colour and 100 columns, also on a terminal.
        form: markdown prints tables for a pull request; text by default.
        json: print one JSON document.
    """
    chosen, to_stream = form_of(form, json=json), bool(form or json) or not (svg or html)
    if [svg == console.STREAM, html == console.STREAM, to_stream].count(True) > 1:
        raise UsageError("standard output would be several documents", "write all but one of them into files")
    on_plans.apart(svg, html, reading=(plan,))
    found = on_plans.read_plan(plan, allow_newer=True)
    if svg or html:
        on_plans.draw(found, svg, html)
    if to_stream:
        on_plans.show(found, chosen, plain=plain)
    return OK


@app.command(
    sort_key=6, usage="Usage: tpplan diff [OPTIONS] BEFORE AFTER\n       tpplan diff --against REV [OPTIONS] [PLANS...]"
)
def diff(*plans: File, against: str = "", manifest: File = "", form: Verdict | None = None, json: bool = False) -> int:
    """Show what moves between devices from one plan to another, or since a git revision; exit 1 if plans differ.

    Args:
        plans: two plan files; - is standard input. With --against plan files, folders and patterns.
        against: compare with this git revision instead; without PLANS every plan of the manifest tpplan.toml.
        manifest: another manifest than that.
        form: markdown prints tables for a pull request, github annotations in a workflow; text by default.
        json: print one JSON document.
    """
    from tpplan.render import github  # noqa: PLC0415
    from tpplan.render.diff import diff as view  # noqa: PLC0415
    from tpplan.reports.diff import diff as compare  # noqa: PLC0415

    chosen = form_of(form, json=json)
    if against or manifest:
        from tpplan.cli import against as on_revision  # noqa: PLC0415

        report = on_revision.diff(plans, against, manifest, chosen)
        return FAILED if any(one.error for one in report.plans) else OK if report.same else NO
    if len(plans) != len(("before", "after")):
        hint = "name one before and one after; --against REVISION compares any number with those of a git revision"
        raise UsageError(f"tpplan diff compares two plans, and {len(plans)} are named", hint)
    found = compare(*(on_plans.read_plan(path, allow_newer=True) for path in on_plans.some(plans)))
    console.present(found, view, chosen, annotate=lambda data: github.diff(data, console.in_repository(plans[1])))
    return NO if found else OK


@app.command(sort_key=7, usage="Usage: tpplan validate [OPTIONS] PLANS...")
def validate(*plans: File, form: Verdict | None = None, json: bool = False) -> int:
    """Check plan files against every rule and list every problem; exit 1 if one is invalid, 2 if one cannot be read.

    Args:
        plans: plan files, folders with plans, or patterns such as 'plans/*.json'; - is standard input.
        form: markdown prints tables for a pull request, github annotations in a workflow; text by default.
        json: print one JSON document.
    """
    from tpplan.render import github  # noqa: PLC0415
    from tpplan.render.verdicts import validation as view  # noqa: PLC0415
    from tpplan.reports.validate import validate as judge  # noqa: PLC0415

    chosen = form_of(form, json=json)
    found = judge(on_plans.many(plans), console.read)
    console.present(found, view, chosen, annotate=github.validation)
    on_plans.advise(file.hint for file in found.files)
    return FAILED if any(file.error for file in found.files) else OK if found.ok else NO


@app.command(sort_key=8, usage="Usage: tpplan check [OPTIONS] [PLANS...]")
def check(
    *plans: File,
    model: File = "",
    gpus: str = "",
    all_: _All = False,
    manifest: File = "",
    form: Verdict | None = None,
    json: bool = False,
) -> int:
    """Plan again from what each plan was asked, and compare; exit 1 if one is stale, 2 if one is no valid plan.

    Args:
        plans: plan files, folders with plans, or patterns such as 'plans/*.json'; - is standard input.
        model: its path or name; without it, plans are checked by the manifest tpplan.toml.
        gpus: a devices file or a list, which may have changed since; the devices of each plan by default.
        all_: check every plan of the manifest, as without PLANS and --model.
        manifest: another manifest than that.
        form: markdown prints tables for a pull request, github annotations in a workflow; text by default.
        json: print one JSON document.
    """
    from attrs import evolve  # noqa: PLC0415

    from tpplan.hardware.spec import links_of, parse_devices  # noqa: PLC0415
    from tpplan.models.reader import read_prediction_layers  # noqa: PLC0415
    from tpplan.render import github  # noqa: PLC0415
    from tpplan.render.verdicts import check as view  # noqa: PLC0415
    from tpplan.reports.check import check as compare  # noqa: PLC0415

    chosen = form_of(form, json=json)
    if gpus and not (model or all_ or manifest):
        raise lacking("check", "--model")
    if all_ or manifest or not model:
        from tpplan.cli import manifest as on_manifest  # noqa: PLC0415

        given = {"PLANS": all_ and plans, "--model": model, "--gpus": gpus}
        found = on_manifest.check(manifest, plans, given, chosen)
    else:
        stored = {path: on_plans.plan_or_error(path) for path in on_plans.many(plans)}
        devices = parse_devices(gpus, on_plans.note) if gpus else ()
        spec = on_plans.read_model(model)
        links = links_of(gpus) if gpus else ()
        found = compare(stored, spec, devices, lambda: read_prediction_layers(model), links)
        on_plans.note_unread_drafts(stored.values())
        console.present(evolve(found, notes=console.noted()), view, chosen, annotate=github.check)
        on_plans.advise_stale(found.plans, stored, spec, model, gpus)
        on_plans.advise(one.error.hint for one in found.plans if one.error)
    return FAILED if any(one.error for one in found.plans) else OK if found.current else NO


@app.command(sort_key=9)
def selftest(
    plan: File, /, *, backend: Backend = "auto", transport: Transport | None = None, json: bool = False
) -> int:
    """Compile a plan, run every operation on every axis, and compare every byte; exit 1 if one is wrong.

    Args:
        plan: a plan file; - is standard input.
        backend: cpu has virtual devices; auto, the default, is cuda if the machine has as many GPUs, else cpu.
        transport: all of them by default.
        json: print one JSON document.
    """
    from tpplan.exec import options  # noqa: PLC0415 (before what needs torch)
    from tpplan.render.selftest import selftest as view  # noqa: PLC0415

    wanted = options.tested_transports(transport or "")
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
    plan: File,
    /,
    *,
    backend: Backend = "auto",
    sizes: str = "",
    rounds: Whole = 7,
    transport: TransportOrAuto = "auto",
    processes: bool = False,
    json: bool = False,
) -> int:
    """Time every operation of a plan on this machine, beside torch, NCCL, and ways through the host.

    Args:
        plan: a plan file; - is standard input.
        backend: cpu has virtual devices; auto, the default, is cuda if the machine has as many GPUs, else cpu.
        sizes: that a device holds in the end, rounded up to rows; by default those of 8KiB,64KiB,1MiB,16MiB that fit.
        rounds: in which all take turns; 7 by default.
        transport: auto by default.
        processes: start one for each device, and measure between them, beside NCCL and torch's symmetric memory.
        json: print one JSON document.
    """
    from tpplan.exec import options  # noqa: PLC0415 (before what needs torch)
    from tpplan.render.bench import bench as view  # noqa: PLC0415

    asked, turns = options.payloads(sizes) if sizes else (), options.checked_rounds(rounds)
    found = on_plans.read_plan(plan)
    with needing("running a plan"):
        from tpplan.exec.compiler import compiler, usable  # noqa: PLC0415
        from tpplan.exec.tools.bench import run as times  # noqa: PLC0415
        from tpplan.exec.tools.bench.between import run as between  # noqa: PLC0415
    console.show_log()
    told = (lambda _: None) if json else console.growing(view)
    if processes:
        where = usable(found, backend, on_plans.note)
        report = between.bench(
            found,
            where,
            transport,
            sizes=asked,
            rounds=turns,
            busy=console.busy,
            told=told,
            note=on_plans.note,
        )
    else:
        make = compiler(found, backend, on_plans.note)
        report = times.bench(make, transport, sizes=asked, rounds=turns, busy=console.busy, told=told)
    if json:
        console.answer(report, view, json=True)
    if report.failed:
        console.fail(between.failed(report.failed), gpus="", form="text")  # a document is there already
        return FAILED
    return OK if any(timed.time for one in report.measured for timed in one.timed) else FAILED


@app.command(sort_key=12)
def export(
    plan: File,
    /,
    *,
    for_: Engine,
    output: _Output = "",
    json: bool = False,
) -> int:
    """Show a plan as another engine's flags or settings, and what differs there; exit 1 if the engine cannot run it.

    Args:
        plan: a plan file; - is standard input.
        for_: the engine.
        output: write what is to be copied to this file; - is standard output.
        json: print one JSON document.
    """
    from tpplan.export.export import export as told  # noqa: PLC0415

    if json and output == console.STREAM:
        raise UsageError("standard output would be several documents", "write one of them into a file")
    on_plans.apart(output, reading=(plan,))
    found = on_plans.read_plan(plan)
    return OK if on_plans.hand_over(found, told(found, for_), output, json=json) else NO


@app.command(sort_key=13)
def schema(name: str = "", /, *, settings: bool = False) -> int:
    """Print the JSON Schema of a document, for editors and checkers.

    Args:
        name: which, such as split-plan or urn:tpplan:split-plan:1; without it, all names are listed.
        settings: print what VS Code needs in its settings.json to know the document, or all of them.
    """
    from tpplan.reports import schemas  # noqa: PLC0415

    if settings:
        console.emit(schemas.settings(name))
    else:
        console.emit(schemas.text(name) if name else "".join(f"{each}\n" for each in schemas.names()))
    return OK


@app.command(name=COMPLETION, sort_key=14)
def install_completion(*, shell: Shell | None = None) -> int:
    """Let a shell complete commands, options, choices and files: write a script, and source it as the shell starts.

    Args:
        shell: the one that runs this command by default.
    """
    from cyclopts.completion.detect import ShellDetectionError  # noqa: PLC0415

    try:
        path = app.install_completion(shell=shell)
    except ShellDetectionError as error:
        raise UsageError("it cannot be told which shell this is", "name it, as in --shell bash") from error
    except OSError as error:
        raise TpplanError(
            f"cannot write {error.filename!r}: {error.strerror}", "check HOME and its permissions"
        ) from error
    console.say("wrote", str(path))
    where = ", if .zshrc calls compinit below the line that was added" if path.name.startswith("_") else ""
    console.say("hint", f"it takes effect in new shells{where}", "hint")
    return OK
