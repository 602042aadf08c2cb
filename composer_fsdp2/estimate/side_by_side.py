"""Compare planned steps in one table: one run at several world sizes, or two runs."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from composer_fsdp2.config.text import human_bytes
from composer_fsdp2.config.value import plain
from composer_fsdp2.estimate.plan_text import (
    Table,
    human_count,
    human_seconds,
    joined,
    shortened,
    table_lines,
    where,
    wrapped,
)
from composer_fsdp2.estimate.planned_step import VERSION, PlannedStep

Shown = Callable[[PlannedStep], str | None]


def _left(step: PlannedStep) -> str | None:
    if step.left_bytes is None:
        return None
    return f"{'-' if step.left_bytes < 0 else ''}{human_bytes(abs(step.left_bytes))}"


def _fits(step: PlannedStep) -> str | None:
    return None if step.fits is None else "yes" if step.fits else "no"


def _figure(name: str, show: Callable[[float], str]) -> Shown:
    """Return a function that formats the number ``name`` of a step or of its bounds; None if the number is unknown."""

    def shown(step: PlannedStep) -> str | None:
        value = getattr(step, name, getattr(step.bounds, name, None))
        return None if value is None else show(value)

    return shown


_EXPOSED, _LOWER = _figure("exposed_s", human_seconds), _figure("lower_s", human_seconds)
_TOKENS, _HOURS = _figure("tokens_per_s", human_count), _figure("gpu_hours_per_billion_tokens", "{:.3g}".format)

# By column; a column without any cell is omitted.
_BY_WORLD_SIZE: Mapping[str, Shown] = {
    "fits": _fits,
    "peak": lambda step: human_bytes(step.estimate.peak_bytes),
    "to spare": _left,
    "exposed ≥": _EXPOSED,
    "step ≥": _LOWER,
    "tokens/s ≤": _TOKENS,
    "GPU h ≥": _HOURS,
}
_OF_TWO: Mapping[str, Shown] = {
    "fits": _fits,
    "findings that need a decision": lambda step: f"{len(step.blocking)}" if step.blocking else None,
    "units": lambda step: f"{len(step.plan.units)}",
    "parameters": lambda step: human_count(step.num_parameters),
    "peak of a rank": lambda step: human_bytes(step.estimate.peak_bytes),
    "of it parameters": lambda step: human_bytes(step.estimate.parameters_bytes),
    "of it optimizer": lambda step: human_bytes(step.estimate.optimizer_bytes),
    "to spare": _left,
    "in the host's memory": lambda step: human_bytes(step.estimate.host_bytes),
    "collectives": lambda step: f"{len(step.estimate.calls)}",
    "sent by a rank": lambda step: human_bytes(sum(each.ring_bytes for each in step.traffic)),
    "of it to other nodes": lambda step: human_bytes(sum(each.node_bytes for each in step.traffic)),
    "computing": _figure("compute_s", human_seconds),
    "exposed communication, at least": _EXPOSED,
    "a step, at least": _LOWER,
    "tokens a second, at most": _TOKENS,
    "GPU hours for 1 B tokens, at least": _HOURS,
}


# ---------------------------------------------------------------------------------------------------------------------
# One run at several world sizes


def several_exit_code(steps: Mapping[int, PlannedStep | str]) -> int:
    """Return 0 if the run fits, and no finding needs a decision, at one world size or more; else 1."""
    return min(step.exit_code if isinstance(step, PlannedStep) else 1 for step in steps.values())


def several_json(steps: Mapping[int, PlannedStep | str]) -> list[dict[str, Any]]:
    """One object per world size: the plan's, or the error."""
    return [
        step.to_json()
        if isinstance(step, PlannedStep)
        else {"version": VERSION, "exit_code": 2, "world_size": world_size, "error": step}
        for world_size, step in steps.items()
    ]


def several_text(steps: Mapping[int, PlannedStep | str]) -> str:
    """Return a table with one row per world size, the errors of world sizes that the file does not allow, and a
    summary.

    Args:
        steps: World size -> the planned step, or the error for this world size. At least one is a step.
    """
    return joined(_several_lines(steps))


def _several_lines(steps: Mapping[int, PlannedStep | str]) -> Iterator[str]:
    planned = {world_size: step for world_size, step in steps.items() if isinstance(step, PlannedStep)}
    first = next(iter(planned.values()))
    yield f"{first.source}: {human_count(first.num_parameters)} parameters, {first.gpus_per_node} ranks a node"
    columns = {name: show for name, show in _BY_WORLD_SIZE.items() if any(map(show, planned.values()))}
    rows = [
        (f"{size}", *(((show(step) or "") if isinstance(step, PlannedStep) else "-") for show in columns.values()))
        for size, step in steps.items()
    ]
    yield from table_lines(Table(("ranks", *columns), tuple(rows)))
    if first.bounds is not None:
        yield from wrapped("≥ and ≤ are bounds, which no step beats; GPU h: GPU hours for 1 B tokens")
    sizes: dict[str, list[str]] = {}
    for world_size, step in steps.items():
        sizes.setdefault(_why_not(step), []).append(f"{world_size}")
    for why, of_sizes in sizes.items():
        if why:
            yield from wrapped(why, begin=f"{', '.join(of_sizes)} ranks: ", max_lines=3)
    yield from wrapped(_verdict(steps, planned), begin="verdict: ")


def _why_not(step: PlannedStep | str) -> str:
    if isinstance(step, str):
        return step
    if step.fits is False:
        return f"does not fit, by {human_bytes(-(step.left_bytes or 0))}, in {where(step.estimate.peak)}"
    return f"needs a decision: {step.blocking[0]}" if step.blocking else ""


def _verdict(steps: Mapping[int, PlannedStep | str], planned: Mapping[int, PlannedStep]) -> str:
    by_answer: dict[str, list[str]] = {}
    for world_size, step in steps.items():
        answer = (
            {True: "fits on", False: "does not fit on", None: "planned without --memory on"}[step.fits]
            if isinstance(step, PlannedStep)
            else "cannot run on"
        )
        by_answer.setdefault(answer, []).append(f"{world_size}")
    verdict = "; ".join(f"{answer} {', '.join(sizes)} ranks" for answer, sizes in by_answer.items())
    return verdict + ("; findings need a decision" if any(step.blocking for step in planned.values()) else "")


# ---------------------------------------------------------------------------------------------------------------------
# Two runs


def figures_table(step: PlannedStep, other: PlannedStep) -> Table:
    """Return a table of the memory and time of two steps. Rows for which neither step has a value are omitted."""
    rows = [
        (name, show(step) or "-", show(other) or "-") for name, show in _OF_TWO.items() if show(step) or show(other)
    ]
    return Table(("figures", *_names(step, other)), tuple(rows))


def settings_table(step: PlannedStep, other: PlannedStep) -> Table:
    """Return a table of the settings in which two steps differ, by field of ``ShardingConfig`` or of the plan's
    ``run``."""
    rows = [
        (shortened(name), *("-" if each is None else _cell(str(each)) for each in values))
        for name, values in _differing(step, other).items()
    ]
    return Table(("settings that differ", *_names(step, other)), tuple(rows))


def against_text(step: PlannedStep, other: PlannedStep) -> str:
    """The figures of two steps, and the settings that differ."""
    settings = settings_table(step, other)
    lines = [*table_lines(figures_table(step, other))]
    lines += table_lines(settings) if settings.rows else ["the settings do not differ"]
    lines += [line for each in step.blocking for line in wrapped(str(each), begin="needs a decision: ")]
    return joined(lines)


def against_json(step: PlannedStep, other: PlannedStep) -> dict[str, Any]:
    """Return the plan of ``other``, and the settings that differ: name -> (value of ``step``, value of ``other``)."""
    return {"plan": other.to_json(), "settings": _differing(step, other)}


def _names(step: PlannedStep, other: PlannedStep) -> tuple[str, str]:
    names = (_cell(step.source), _cell(other.source))
    return names if step.source != other.source else (names[0], "against")


def _cell(text: str) -> str:
    """Shorten a text so a name and two cells fit into 80 columns."""
    return shortened(text, 20)


def _differing(step: PlannedStep, other: PlannedStep) -> dict[str, list[Any]]:
    """By name, the value of each; None if one has none."""
    ours, theirs = _settings(step), _settings(other)
    names = dict.fromkeys((*ours, *theirs))
    return {name: [ours.get(name), theirs.get(name)] for name in names if ours.get(name) != theirs.get(name)}


def _settings(step: PlannedStep) -> dict[str, Any]:
    run = {key: value for key, value in step.to_json()["run"].items() if key not in ("source", "parameters", "digest")}
    config = _flat("", plain(step.plan.config))
    return run | {name: value for name, value in config.items() if name != "mesh.axes"}  # run has the mesh as text


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    parts = (_flat(f"{prefix}.{name}" if prefix else str(name), each) for name, each in value.items())
    return {name: each for part in parts for name, each in part.items()}
