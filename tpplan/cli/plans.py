"""What several commands do: they read models and plans, show them, and tell what is missing.

What is needed for that is imported when it is done, as in :mod:`tpplan.cli.commands`.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.cli import console
from tpplan.errors import TpplanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.core.plan import Reserve, SplitPlan
    from tpplan.core.speed import LinkSpeed
    from tpplan.planner.options import Options
    from tpplan.reports.check import PlanCheck, StaleReason
    from tpplan.reports.export import ExportReport
    from tpplan.reports.manifest import Inputs

#: How strategies cut.
_CUTS = {"latency": "which cuts by bandwidth", "balanced": "which cuts by memory"}
_GIB = 2**30
#: Devices that a note names.
_NAMED = 3


def read_model(path: str) -> ModelSpec:
    """Read a model, and say on standard error what is to know of it."""
    from tpplan.models.reader import read_model as read  # noqa: PLC0415

    with console.busy(f"reading {path}"):
        found = read(path)
    for text in found.notes:
        note(text)
    return found


def read_plan(path: str, *, allow_newer: bool = False) -> SplitPlan:
    """Read a plan, from standard input too, and warn where it is newer than this tpplan."""
    from tpplan.core.versions import is_newer  # noqa: PLC0415
    from tpplan.planfile.codec import loads  # noqa: PLC0415

    name = console.shown(path)
    found = loads(console.read(path), name, allow_newer=allow_newer)
    if is_newer(found.format_version):
        text = f"{name} has format {found.format_version}, newer than this tpplan: what only it knows is not shown"
        console.say("warning", text, "warn")
    return found


def read_draft(model: str, draft: str, output: str, *, mtp: bool) -> ModelSpec | None:
    """Read a draft model, or the model's prediction layers, if either is asked for.

    Args:
        model: path or name of the model.
        draft: path or name of the draft model, or empty.
        output: where the plan of a draft model will be written, or empty.
        mtp: whether the prediction layers are asked for.

    Raises:
        UsageError: both are, there is an output and no draft model, or the output is no file.
    """
    if output == console.STREAM:
        raise UsageError("--draft-output is standard output, where the plan goes", "name a file for the draft's plan")
    if output and not draft:
        raise UsageError("--draft-output writes the plan of a draft model", "name that model: --draft MODEL")
    if mtp and draft:
        raise UsageError("--mtp does not go with --draft", "a model drafts by one of both: leave out the other")
    if mtp:
        from tpplan.models.reader import read_prediction_layers  # noqa: PLC0415

        return read_prediction_layers(model)
    return read_model(draft) if draft else None


def note_draft(inputs: Inputs, plan: SplitPlan, of: str = "") -> None:
    """Say how much room a plan leaves to a draft model on each device, and where that has other tokens.

    Args:
        inputs: what the plan is made of.
        plan: the plan.
        of: which plan it is, where there are several.
    """
    from tpplan.core.plan import rooms_told  # noqa: PLC0415
    from tpplan.models.families.drafts import DRAFTS, states_of  # noqa: PLC0415

    draft, model, room = inputs.draft, inputs.model, plan.request.draft
    if draft is None or room is None:
        return
    note(f"room for {room.name}: {rooms_told(room.room_bytes)[0]}", of)
    if not plan.request.mtp:  # whose layers are of the same model
        _note_of_draft(draft, plan.request.sequence_tokens, of)
    width = states_of(draft)
    if width not in {None, model.hidden_size}:
        text = f"{draft.name} reads hidden states of {width} elements, {model.name} has {model.hidden_size}"
        note(f"{text}: it may be for another model", of)
    if draft.vocab_size != model.vocab_size and draft.model_type not in DRAFTS:
        text = f"{draft.name} has {draft.vocab_size} tokens, {model.name} {model.vocab_size}: their tokens may differ"
        note(text, of)


def _note_of_draft(draft: ModelSpec, tokens: int, of: str) -> None:
    """Say what is assumed of a draft model, and whether sequences are longer than those that it was made for."""
    if draft.assumed:
        note(f"assumed of {draft.name}: {draft.assumed}", of)
    if tokens > draft.max_context and any(block.attention for block in draft.blocks):
        text = f"{draft.name} was made for {draft.max_context} tokens per sequence, the plan has {tokens}"
        note(f"{text}: it may propose worse tokens beyond", of)


def note_unread_drafts(plans: Iterable[SplitPlan | TpplanError]) -> None:
    """Say which draft models beside plans' models were not read, as nobody named their paths."""
    asked = [plan.request for plan in plans if not isinstance(plan, TpplanError)]
    for name in dict.fromkeys(each.draft.name for each in asked if each.draft and not each.mtp):
        note(f"the draft model {name} was not checked, only the rest: a manifest with draft = … checks it, too")


def note_undrafted(plan: SplitPlan) -> None:
    """Say where a plan that is run has what drafts beside it, or is that of what drafts."""
    if draft := plan.request.draft:
        note(f"the plan has room for {draft.name}, which generate does not use")
    if model := plan.request.drafts_for:
        note(f"this plan is for a draft model of {model}, and continues a text by that alone")


def plan_or_error(path: str) -> SplitPlan | TpplanError:
    """Read a plan, or return why it cannot be read, for who judges others too."""
    try:
        return read_plan(path)
    except TpplanError as error:
        return error


def advise(hints: Iterable[str]) -> None:
    """Say on standard error what to do about errors, what helps against several once."""
    for hint in dict.fromkeys(filter(None, hints)):
        console.say("hint", hint, "hint")


def show(plan: SplitPlan, form: str = "text", *, plain: bool = False) -> None:
    """Show a plan on one screen, or in another form: as a document with the notes, too."""
    from attrs import evolve  # noqa: PLC0415

    from tpplan.render.show import show as view  # noqa: PLC0415
    from tpplan.reports.show import show_report  # noqa: PLC0415

    console.present(evolve(show_report(plan), notes=console.noted()), view, form, plain=plain)


def tell(plan: SplitPlan) -> None:
    """Say on standard error in one line what a plan that is not on the screen comes to."""
    from tpplan.files.codec import unstructure  # noqa: PLC0415
    from tpplan.render.show import count, speed_lines, summary, unpredicted_lines  # noqa: PLC0415
    from tpplan.reports.show import show_report  # noqa: PLC0415

    report = unstructure(show_report(plan))
    speed = [*speed_lines(report)[:1], *unpredicted_lines(report)]
    console.say(f"{plan.model.name} on {count(report['plan'])}", "; ".join([summary(report), *speed]))


def draw(plan: SplitPlan, svg: str, html: str) -> None:
    """Draw a plan into the files that are named."""
    from tpplan.files.codec import unstructure  # noqa: PLC0415
    from tpplan.render.html import page  # noqa: PLC0415
    from tpplan.render.svg import picture  # noqa: PLC0415
    from tpplan.reports.show import show_report  # noqa: PLC0415

    data = unstructure(show_report(plan))
    for draw, path in ((picture, svg), (page, html)):
        if path:
            console.save(draw(data), path)


def hand_over(plan: SplitPlan, report: ExportReport, output: str, *, json: bool) -> bool:
    """Write a plan as an engine takes it, or show it, and say where the engine cannot run it what it could.

    Returns:
        Whether the engine can run it.
    """
    from tpplan.files.codec import unstructure  # noqa: PLC0415
    from tpplan.models.families.drafts import is_head  # noqa: PLC0415
    from tpplan.render.export import differences, text  # noqa: PLC0415
    from tpplan.render.export import export as view  # noqa: PLC0415

    data = unstructure(report)
    if report.possible and output:
        console.save(text(data), output)
        view = differences
    if json or output != console.STREAM or not report.possible:
        console.answer(report, view, json=json)
    else:
        for sentence in report.differences:
            console.say("differs", sentence)
    if report.works_with:
        command = remake(plan, "even.json", "MODEL", report.works_with)
        sentence = f"it can run a plan for {report.works_with}, which this command makes{without_room(plan)}"
        console.say("hint", sentence, "hint", [command])
    if plan.request.drafts_for or is_head(plan.model.architecture):
        hint("export the plan of the model that it drafts for, which says how the engine is told of what drafts")
    if report.engines:
        *others, last = report.engines
        names = f"{', '.join(others)} or {last}" if others else last
        console.say("hint", f"this plan can be run by --for {names}", "hint")
    return report.possible


def apart(*outputs: str, reading: tuple[str, ...]) -> None:
    """Refuse to write over what the same command reads, or over what it has written.

    Args:
        outputs: paths, perhaps empty.
        reading: paths; of a model's directory what is read in it.

    Raises:
        UsageError: naming the output.
    """
    taken = {os.path.realpath(file) for path in reading for file in _files(path)}
    for output in outputs:
        if output and output != console.STREAM:
            file = os.path.realpath(output)
            if file in taken:
                raise UsageError(f"{output!r} is read or written by the same command", "choose another file")
            taken.add(file)


def _files(path: str) -> list[str]:
    """Return what is read of a path: itself, or of a model's directory these files."""
    if not os.path.isdir(path):  # noqa: PTH112 (a long list of GPUs is no path at all)
        return [path]
    return [str(file) for name in ("config.json", "*.safetensors*") for file in Path(path).glob(name)]


def note(text: str, of: str = "") -> None:
    """Say on standard error what is worth knowing, and of which plan where there are several."""
    console.say("note", f"{of}: {text}" if of else text, "warn")


def hint(text: str, of: str = "") -> None:
    """Say on standard error what to do about what was noted."""
    console.say("hint", f"{of}: {text}" if of else text, "hint")


def note_all(plan: SplitPlan, model: ModelSpec, options: Options, links: tuple[LinkSpeed, ...], of: str = "") -> None:
    """Say what is worth knowing of a new plan.

    Args:
        plan: the plan.
        model: its model.
        options: that it was made with.
        links: measured links of its devices.
        of: which plan it is, where there are several.
    """
    from tpplan.planner.speed import without_kernels  # noqa: PLC0415

    if plan.request.layout != (options.layout or "reduce"):
        note(f"layout gather, because rows cannot be cut: {model.gather_only}", of)
    if options.full_window and not plan.request.full_window:
        note("no layer has a sliding window shorter than a sequence, so --full-window changes nothing", of)
    if plan.request.beyond:
        length = plan.request.sequence_tokens
        note(f"{length} tokens per sequence are more than the {model.max_context} that the model was made for", of)
    if plan.speed and (text := without_kernels(model)):
        note(text, of)
    note_idle(plan, model, links, of)
    note_exclusive(plan, model, of)
    note_faster(plan, model, links, of)
    note_fewer(plan, model, of)


def note_uncounted(plan: SplitPlan, *, on_screen: bool, of: str = "") -> None:
    """Say what a plan does not count or assumes, unless that is on the screen, and how to keep room for it."""
    from tpplan.core.model import PREDICTION  # noqa: PLC0415
    from tpplan.files.codec import unstructure  # noqa: PLC0415
    from tpplan.models.formats.matching import BUFFERS  # noqa: PLC0415
    from tpplan.render.show import uncounted_lines  # noqa: PLC0415

    if not on_screen:
        for text in uncounted_lines(unstructure(plan)):
            note(text, of)
    beside = [part for part in plan.model.not_planned if part.what != BUFFERS]  # which nobody loads
    if beside and not plan.request.reserve:
        if [part.what for part in beside] == [PREDICTION]:
            if not plan.request.draft:
                hint("--mtp keeps room for prediction layers, if the engine is to draft by them", of)
            return
        known = all(part.bytes for part in beside)
        size = f"{-(-sum(part.bytes for part in beside) // 2**20)}MiB" if known else "SIZE"
        hint(f"--reserve {size}@0 keeps room on device 0 for what is not planned, --reserve {size} on every device", of)


def note_faster(plan: SplitPlan, model: ModelSpec, links: tuple[LinkSpeed, ...], of: str = "") -> None:
    """Say what the other strategy would give, where one of both decodes clearly faster."""
    from tpplan.reports.show import of_other_strategy  # noqa: PLC0415

    if found := of_other_strategy(plan, model, links):
        strategy, rates = found
        note(f"{rates[0]} tokens/s by this plan, {rates[1]} with --strategy {strategy} ({_CUTS[strategy]})", of)


def note_fewer(plan: SplitPlan, model: ModelSpec, of: str = "") -> None:
    """Say where fewer of the devices decode faster, because sums over their links take longer than they save."""
    from tpplan.reports.show import faster_with_fewer  # noqa: PLC0415

    if found := faster_with_fewer(plan, model):
        devices, rates = found
        used = sum(1 for entry in plan.memory if entry.used_bytes)
        note(f"{len(devices)} of {used} devices are faster: {rates[1]} instead of {rates[0]} tokens/s", of)
        named = f"device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
        hint(f"name only {named} in --gpus{_as_list(plan, devices)}", of)


def note_idle(plan: SplitPlan, model: ModelSpec, links: tuple[LinkSpeed, ...], of: str = "") -> None:
    """Say which devices got nothing, and what to do about it: whoever named them may not expect that."""
    if idle := _idle(plan):
        note(f"no part of the model is on {_named(plan, idle)}", of)
        them = "it" if len(idle) == 1 else "them"
        budget = _enough_budget(plan, model, links, idle)
        larger = f", or give {them} a budget of {budget}" if budget else ""
        others = [i for i in range(len(plan.devices)) if i not in idle]
        hint(f"leave {them} out of --gpus{_as_list(plan, others)}{larger}", of)


def note_exclusive(plan: SplitPlan, model: ModelSpec, of: str = "") -> None:
    """Say where one device computes a part of every layer alone, which no prediction weighed, and what changes that."""
    from tpplan.core.device import BANDWIDTHS_HINT  # noqa: PLC0415
    from tpplan.reports.exclusive import exclusive_parts, instead  # noqa: PLC0415

    if plan.speed or _idle(plan) or not (found := exclusive_parts(plan)):  # what is told of idle devices comes first
        return
    parts = ", ".join(f"all {part} on {_named(plan, [device])}" for part, device in found.items())
    others = sum(1 for entry in plan.memory if entry.used_bytes) - 1
    wait = "each waits for the other" if len({*found.values()}) > 1 else "the others wait for it"
    note(f"{parts}: {wait if others > 1 or len(found) > 1 else 'the other one waits for it'} in every layer", of)
    advice = instead(plan, model)
    if advice.device is not None:
        hint(f"the model fits on device {advice.device} alone{_as_list(plan, [advice.device])}", of)
    if advice.replicates:
        hint("with --kv replicate more devices share it", of)
    elif advice.may_divide:
        hint(f"with bandwidths more devices may share it: {BANDWIDTHS_HINT}", of)


def note_idle_draft(plan: SplitPlan, of: str = "") -> None:
    """Say which devices got nothing of a draft model that is split."""
    if idle := _idle(plan):
        note(f"no part of the draft model {plan.model.name} is on {_named(plan, idle)}", of)


def _idle(plan: SplitPlan) -> list[int]:
    return [i for i, entry in enumerate(plan.memory) if not entry.used_bytes]


def _as_list(plan: SplitPlan, places: Sequence[int]) -> str:
    """Return, to go on with, how --gpus names some of a plan's devices; nothing where only a file does.

    Reserves of single devices have other numbers then.
    """
    from attrs import evolve  # noqa: PLC0415

    from tpplan.hardware.spec import spec_of  # noqa: PLC0415

    spec, reserves = spec_of([plan.devices[i] for i in places]), plan.request.reserve
    if any(each.device >= 0 for each in reserves):
        numbers = {-1: -1, **{old: new for new, old in enumerate(places)}}
        kept = [evolve(each, device=numbers[each.device]) for each in reserves if each.device in numbers]
        spec = " ".join([spec, *(f"--reserve {each.text}" for each in kept)]) if spec else ""
    return f", as in --gpus {spec}" if spec else ""


def _named(plan: SplitPlan, places: list[int]) -> str:
    names = ", ".join(f"{i} ({plan.devices[i].name})" for i in places[:_NAMED])
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"device {names}{more}"


def _enough_budget(plan: SplitPlan, model: ModelSpec, links: tuple[LinkSpeed, ...], idle: list[int]) -> str:
    """Return a budget with which idle devices would get a part, in whole GiB the least one; nothing if none is known.

    It is at most that of the largest device in use. GPUs of the catalogue cannot have more memory than they do.
    """
    from attrs import evolve  # noqa: PLC0415

    from tpplan.core.sizes import exact_bytes  # noqa: PLC0415
    from tpplan.hardware.spec import with_budget  # noqa: PLC0415
    from tpplan.planner.attempt import attempt  # noqa: PLC0415
    from tpplan.planner.infeasible import least_that_fits  # noqa: PLC0415
    from tpplan.planner.place import Effort  # noqa: PLC0415
    from tpplan.planner.plan import plan_request  # noqa: PLC0415
    from tpplan.planner.request import asked_strategy  # noqa: PLC0415

    if plan.request.draft and plan.request.draft.split:  # which would be split otherwise
        return ""
    most = max(device.budget_bytes for i, device in enumerate(plan.devices) if i not in idle)
    first = min(plan.devices[i].budget_bytes for i in idle) // _GIB + 1
    budgets = [*range(first * _GIB, most, _GIB), most]

    def larger(budget: int) -> tuple[Device, ...]:
        """Return the devices with this budget for idle ones; none where it is no budget for them."""
        wanted = [max(d.budget_bytes, budget) if i in idle else 0 for i, d in enumerate(plan.devices)]
        found = [with_budget(d, b) if b else d for d, b in zip(plan.devices, wanted, strict=True)]
        devices = tuple(device for device in found if device)
        return devices if len(devices) == len(found) and devices != plan.devices else ()

    def helps(number: int) -> bool:
        """Return whether a quick cut would do, for which this takes a moment only."""
        devices = larger(budgets[number - 1])
        found = attempt(model, devices, plan.request, effort=Effort.QUICK) if devices else None
        return bool(found and not found.lacking and all(entry.used_bytes for entry in found.memory))

    asked = evolve(plan.request, strategy=asked_strategy(plan))
    least = budgets[least_that_fits(helps, len(budgets)) - 1]
    for budget in dict.fromkeys((least, most)):
        try:
            if (devices := larger(budget)) and not _idle(plan_request(model, devices, asked, links, is_advised=False)):
                return exact_bytes(budget)
        except TpplanError:
            continue
    return ""


def some(plans: tuple[str, ...]) -> tuple[str, ...]:
    """Return what was named, which has to be something, and standard input once at most.

    Raises:
        UsageError: it is not.
    """
    if not plans:
        raise UsageError("no plan was named", "name one or more plan files, such as plans/*.json, or their folder")
    if plans.count(console.STREAM) > 1:
        raise UsageError("standard input was named twice, and can be read once", "save one of the two in a file")
    return plans


def many(plans: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files that were named, by folders and patterns too, and say how many these have.

    Raises:
        UsageError: as for :func:`some`, or a folder or a pattern has no plans.
    """
    from tpplan.files.places import files_of  # noqa: PLC0415

    found = files_of(some(plans))
    for argument, count in found.counts.items():
        note(f"{argument}: {count} plan file{'s' * (count > 1)}")
    if found.others:
        more = f" and {len(found.others) - _NAMED} more" if len(found.others) > _NAMED else ""
        note(f"no plans, so left out: {', '.join(found.others[:_NAMED])}{more}")
    return found.paths


def advise_stale(
    checks: Iterable[PlanCheck], stored: Mapping[str, SplitPlan | TpplanError], spec: ModelSpec, model: str, gpus: str
) -> None:
    """Say on standard error which commands make stale plans again, or a plan where that makes none.

    Args:
        checks: what was found of each plan.
        stored: the plans by their paths.
        spec: the model that they were held against.
        model: its path.
        gpus: the devices as they were named; each plan's own if empty.
    """
    from tpplan.reports.check import StaleReason  # noqa: PLC0415

    again, others, beside = [], [], ""
    for one in checks:
        plan = stored[one.path]
        if isinstance(plan, TpplanError) or not one.reasons:
            continue
        # With neither, it may be the wrong model that was named, and nothing to write over a plan.
        if StaleReason.MODEL in one.reasons and plan.model.name != spec.name:
            others.append(plan.model.name)
        elif one.refused and not _needs_both(plan, one.reasons):
            options = [advice.option for advice in one.refused.suggestions if advice.option]
            commands = [*filter(None, (remake(plan, one.path, model, gpus, option) for option in options))]
            these = "each of these commands" if len(commands) > 1 else "this command"
            what = f"{these} makes a plan" if commands else one.refused.hint
            text = f"{console.shown(one.path)} cannot be made again as it was asked for; {what}"
            console.say("hint", text + (without_room(plan) if commands else ""), "hint", commands)
        else:
            again.append(remake(plan, one.path, model, gpus))
            beside = beside or without_room(plan)
    hint = f"make it again with tpplan plan, and see with tpplan diff what that changes{beside}"
    if others:
        hint = f"name with --model the model that the plan is for, {', '.join(dict.fromkeys(others))}; or {hint}"
    if again or others:
        console.say("hint", hint, "hint", filter(None, again))


def _needs_both(plan: SplitPlan, reasons: tuple[StaleReason, ...]) -> bool:
    """Return whether what fits instead of a stale plan is only known once a model and its draft model are planned."""
    from tpplan.reports.check import StaleReason  # noqa: PLC0415

    is_for_others = {StaleReason.DEVICES, StaleReason.REQUEST} <= {*reasons}
    return bool(plan.request.drafts_for or (plan.request.draft and is_for_others))


def without_room(plan: SplitPlan) -> str:
    """Return, to go on with, what :func:`remake` leaves to the reader where a draft model is beside a plan's model."""
    if model := plan.request.drafts_for:
        return (
            f" (MODEL stands for the path of {model}, for which it drafts, MODEL_PLAN for the file of that one's plan)"
        )
    named = plan.request.draft and not plan.request.mtp
    return " (DRAFT stands for the path of the draft model)" if named else ""


def remake(plan: SplitPlan, path: str, model: str, gpus: str, change: str = "") -> str:
    """Return the command that makes a plan again.

    Where something drafts beside the model, the command makes room for that anew; the plan of a draft model is made
    with that of its model.

    Args:
        plan: whose request it repeats.
        path: of its file, which is written again.
        model: the path that it is made of.
        gpus: the devices as they were named; the plan's own if empty.
        change: options instead of what was asked, such as ``--cache q8``.

    Returns:
        The command; nothing where no options name the devices.
    """
    from tpplan.hardware.spec import spec_of  # noqa: PLC0415
    from tpplan.planner.options import USUAL  # noqa: PLC0415
    from tpplan.planner.request import asked_strategy  # noqa: PLC0415

    asked = plan.request
    spec = gpus or spec_of(plan.devices)
    if not spec:
        return ""
    context = asked.sequence_tokens
    options: dict[str, str | int] = {
        "--gpus": spec,
        "--context": context,
        "--cache": asked.cache.kind,
        "--batch": asked.batch,
        "--layout": asked.layout,
        "--strategy": asked_strategy(plan),
        "--max-rows": asked.max_rows,
        "--kv": asked.kv,
        **({"--tokens": asked.cache.tokens} if asked.cache.tokens != context * asked.batch else {}),
        "-o": path,
    }
    words = shlex.split(change)
    if not asked.context and {"--context", "--batch"} & {*words}:
        options.pop("--tokens", None)  # equal parts that leave a rest
    options.update(zip(words[::2], words[1::2], strict=True))
    beyond = asked.beyond or asked.drafts_for  # as far as a draft model's plan tells, its model may go beyond, too
    flags = [option for option, given in (("--full-window", asked.full_window), ("--beyond", beyond)) if given]
    if asked.drafts_for:
        del options["--layout"]
        options["-o"] = "MODEL_PLAN"
    usual = {f"--{key}": value for key, value in USUAL.items()} | {"--layout": "reduce", "-o": console.STREAM}
    said = [str(word) for option, value in options.items() if value != usual.get(option) for word in (option, value)]
    beside = [word for reserve in (asked.reserve if gpus else _reserves(plan)) for word in ("--reserve", reserve.text)]
    if asked.mtp:
        beside.append("--mtp")
    elif asked.draft:
        beside += ["--draft", "DRAFT"]
        output = "draft.json" if path == console.STREAM else str(Path(path).with_name(f"{Path(path).stem}-draft.json"))
        beside += ["--draft-output", output] if asked.draft.split else []
    if asked.drafts_for:
        model, beside = "MODEL", [*beside, "--draft", model, "--draft-output", path]
    return shlex.join(["tpplan", "plan", model, *flags, *beside, *said])


def _reserves(plan: SplitPlan) -> tuple[Reserve, ...]:
    """Return what a plan reserves, once if that is the same on every device."""
    from tpplan.core.plan import Reserve  # noqa: PLC0415

    sizes = {plan.request.reserved(device) for device in range(len(plan.devices))}
    return (Reserve(*sizes),) if len(sizes) == 1 and sizes != {0} else plan.request.reserve
