"""``composer-fsdp2 plan FILE --world-size N``: predict memory and communication of a step without a GPU."""

from __future__ import annotations

import contextlib
import datetime
import enum
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import composer_fsdp2
from composer_fsdp2.atomic import replacing
from composer_fsdp2.cli.models import MODEL_HELP, function_from
from composer_fsdp2.cli.options import Command, schema_option
from composer_fsdp2.cli.others_code import interruptible, quietly
from composer_fsdp2.cli.printing import refuse
from composer_fsdp2.config.sizes import Reserve, parse_bandwidth, parse_bytes, parse_flops, parse_reserve
from composer_fsdp2.config.text import printable
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.estimate.bounds import GPUS, Machine, with_assumed_speeds

if TYPE_CHECKING:
    from composer_fsdp2.estimate.planned_step import Memory, PlannedStep
    from composer_fsdp2.preflight.preflight_run import PreflightRun
    from composer_fsdp2.preflight.suggestion import SuggestedEdits

# typer shows an enum's values as the choices; its older releases take defaults that are strings.
Gpu = enum.StrEnum("Gpu", {name: name for name in GPUS})  # type: ignore[misc]
Device = enum.StrEnum("Device", {name: name for name in ("cuda", "cpu")})  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Command):
    """Predict memory and communication of one training step of a rank, without a GPU.

    Needs one process, and no GPU, network or weights. Sharded state and collectives equal those of real steps to the
    byte; the output marks modelled and unknown figures.

    Exit code:

    0: the step fits, or no --memory was given. With several world sizes: it fits at least one of them.

    1: it does not fit, or a finding needs a decision. With several world sizes: for all of them; with --against: for
    FILE.

    2: the file cannot be used, or an option is wrong; nothing is written.
    """

    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A training configuration of any system that migrate reads.")
    ]
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Override keys of the file.")
    ] = None
    world_size: Annotated[
        str | None,
        typer.Option(
            "--world-size",
            metavar="N[,N...]",
            help="Number of ranks; default: num_processes of the file. 64,128,256 prints a row for each.",
        ),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="OTHER",
            help="Compare with the plan of this file; KEY=VALUE applies to FILE only.",
        ),
    ] = None
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", help="Number of ranks of a node.")] = 8
    microbatch: Annotated[int | None, typer.Option("--microbatch", help="Rows of a rank's microbatch.")] = None
    sequence: Annotated[int | None, typer.Option("--sequence", help="Tokens per row.")] = None
    model_config: Annotated[
        str | None,
        typer.Option("--model-config", metavar="PATH", help="The model's config.json, or its folder."),
    ] = None
    model: Annotated[str | None, typer.Option("--model", metavar="MODULE:FUNCTION", help=MODEL_HELP)] = None
    device: Annotated[Device, typer.Option("--device", help="Device of the run.")] = Device["cuda"]
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="80GiB", help="Memory of each device, to compare with the peak.")
    ] = None
    reserve: Annotated[
        str | None,
        typer.Option(
            "--reserve", metavar="5%+2GiB", help="Part of --memory for unmodelled allocations; default: 5%+2GiB."
        ),
    ] = None
    gpu: Annotated[
        Gpu | None,
        typer.Option("--gpu", case_sensitive=False, help="GPU whose peak rates bound the step's time."),
    ] = None
    intra: Annotated[
        str | None, typer.Option("--intra-gbps", metavar="450GB/s", help="Bandwidth from a rank to others of its node.")
    ] = None
    inter: Annotated[
        str | None, typer.Option("--inter-gbps", metavar="400Gb/s", help="Bandwidth from a rank to other nodes.")
    ] = None
    flops: Annotated[
        str | None, typer.Option("--flops", metavar="989TFLOPS", help="Peak compute rate of a device.")
    ] = None
    no_activations: Annotated[
        bool,
        typer.Option("--no-activations", help="Leave out activations and FLOPs, for a model that cannot be traced."),
    ] = False
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Print the fastest settings that fit, as diffs of the file.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    json_schema: Annotated[bool, schema_option("composer_fsdp2.estimate.planned_step")] = False
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained HTML page.")] = (
        None
    )
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace for ui.perfetto.dev.")
    ] = None

    def __call__(self) -> None:
        try:
            with interruptible(), quietly():
                text, exit_code = _answer(self)
            answer = text()  # wrapped for standard output, which is redirected above
        except ComposerFSDP2Error as error:
            _refuse(str(error))
        except OSError as error:
            _refuse(f"{error.filename or self.file}: {error.strerror or error}")
        except KeyboardInterrupt:
            refuse("interrupted; nothing was written")
        print(answer, flush=True)
        sys.exit(exit_code)

    def machine(self) -> Machine | None:
        """Return the speeds of the GPU in --gpu, overridden by other options; None without any of these options."""
        gpu_speeds = GPUS[self.gpu.value] if self.gpu else Machine()
        machine = replace(
            gpu_speeds,
            flops=gpu_speeds.flops if self.flops is None else parse_flops(self.flops, "--flops"),
            fp8_flops=gpu_speeds.fp8_flops if self.flops is None else None,
            intra_bytes_per_s=gpu_speeds.intra_bytes_per_s
            if self.intra is None
            else parse_bandwidth(self.intra, "--intra-gbps"),
            inter_bytes_per_s=gpu_speeds.inter_bytes_per_s
            if self.inter is None
            else parse_bandwidth(self.inter, "--inter-gbps"),
        )
        options = {"--flops": self.flops, "--intra-gbps": self.intra, "--inter-gbps": self.inter}
        given = ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)
        if given:
            machine = replace(machine, sources=(*machine.sources, f"but {given}" if machine.sources else given))
        return machine if machine.has_any_speed else None

    def world_sizes(self) -> tuple[int | None, ...]:
        if self.world_size is None:
            return (None,)
        try:
            return tuple(dict.fromkeys(int(each) for each in self.world_size.split(",")))
        except ValueError as error:
            raise ConfigError(
                f"--world-size {self.world_size}: give the number of ranks, or several, as in 64,128,256"
            ) from error

    def reading(self) -> dict[str, Any]:
        """Return the arguments of ``read_run``, except the world size."""
        return {
            "gpus_per_node": self.gpus_per_node,
            "model_config": self.model_config,
            "model": function_from(self.model) if self.model is not None else None,
            "microbatch": self.microbatch,
            "sequence": self.sequence,
            "device": self.device.value,
            "overrides": tuple(self.overrides or ()),
        }


def _refuse(why: str) -> NoReturn:
    refuse(printable(" ".join(why.split())))


# A file and the arguments of read_run -> the run and its planned step.
PlanFile = Callable[[str, Mapping[str, Any]], "tuple[PreflightRun, PlannedStep]"]


def _answer(options: Plan) -> tuple[Callable[[], str], int]:
    """Plan, and return a function that formats the output, and the exit code.

    On an error, no output file is written.
    """
    memory = parse_bytes(options.memory, "--memory") if options.memory is not None else None
    if options.reserve is not None and memory is None:
        raise ConfigError("--reserve is a part of --memory; give --memory 80GiB too")
    reserve = parse_reserve(options.reserve, "--reserve") if options.reserve is not None else Reserve()
    if options.reserve is not None and memory is not None and reserve.of(memory) >= memory:
        raise ConfigError(f"--reserve {options.reserve} reserves all of --memory {options.memory}; write 5%+2GiB")
    if options.suggest and memory is None:
        raise ConfigError("--suggest needs --memory, the memory that the run must fit")
    if options.suggest and options.no_activations:
        raise ConfigError("--suggest needs activations; leave out --no-activations")
    world_sizes = options.world_sizes()
    _refuse_several(options, len(world_sizes))
    machine = options.machine()
    _refuse_overwrites(options)
    arguments = options.reading()

    def plan(file: str, arguments: Mapping[str, Any]) -> tuple[PreflightRun, PlannedStep]:
        # Imported here: wrong options are refused before torch is imported.
        from composer_fsdp2.estimate.planned_step import Memory
        from composer_fsdp2.preflight.planned import StepOptions, plan_step
        from composer_fsdp2.preflight.read_run import read_run

        run = read_run(file, **arguments)
        step_options = StepOptions(
            memory=Memory(given_bytes=memory, reserve=reserve) if memory is not None else None,
            machine=machine,
            counts_activations=not options.no_activations,
        )
        return run, plan_step(run, file, step_options)

    if len(world_sizes) > 1:
        return _plan_several(
            options, plan, {size: arguments | {"world_size": size} for size in world_sizes if size is not None}
        )
    return _plan_one(options, plan, arguments | {"world_size": world_sizes[0]}, machine)


def _refuse_several(options: Plan, num_world_sizes: int) -> None:
    """Raise ConfigError for options that require a single plan (--html, --trace, --suggest) if several are planned.

    Also raises for an override that is a file, and for --against with several world sizes.
    """
    if files := [each for each in options.overrides or () if "=" not in each and Path(each).is_file()]:
        raise ConfigError(f"{files[0]} is a file; --against {files[0]} plans it beside {options.file}")
    if num_world_sizes > 1 and options.against is not None:
        raise ConfigError("--against compares two plans; give one --world-size")
    single_plan_options = {"--html": options.html, "--trace": options.trace, "--suggest": options.suggest}
    given = [name for name, value in single_plan_options.items() if value]
    if given and (num_world_sizes > 1 or options.against is not None):
        raise ConfigError(f"{given[0]} takes one plan; give one --world-size, and no --against")


def _plan_several(
    options: Plan, plan: PlanFile, arguments_by_world_size: Mapping[int, Mapping[str, Any]]
) -> tuple[Callable[[], str], int]:
    """Plan each world size. If the file does not allow a world size, its row in the table is the error."""
    from composer_fsdp2.estimate.side_by_side import several_exit_code, several_json, several_text

    steps: dict[int, PlannedStep | str] = {}
    errors: list[ComposerFSDP2Error] = []
    for world_size, arguments in arguments_by_world_size.items():
        try:
            steps[world_size] = plan(options.file, arguments)[1]
        except ComposerFSDP2Error as error:
            errors.append(error)
            steps[world_size] = " ".join(str(error).split())
    if len(errors) == len(steps):
        raise errors[0]
    text = partial(json.dumps, several_json(steps), indent=2) if options.as_json else partial(several_text, steps)
    return text, several_exit_code(steps)


def _plan_one(
    options: Plan, plan: PlanFile, arguments: Mapping[str, Any], machine: Machine | None
) -> tuple[Callable[[], str], int]:
    with contextlib.ExitStack() as files:  # fails before any planning if they cannot be written
        html, trace = (path and files.enter_context(_file(path)) for path in (options.html, options.trace))
        run, step = plan(options.file, arguments)
        edits = (
            _suggestions(run, step, step.memory, options.file, arguments, machine)
            if options.suggest and step.memory
            else None
        )
        if html is not None:
            from composer_fsdp2.estimate.html import plan_page

            suggestions = edits.explain() if edits is not None else ""
            html.write_text(plan_page(step, suggestions, _provenance()), encoding="utf-8")
        if trace is not None:
            from composer_fsdp2.estimate.chrome_trace import chrome_trace

            trace.write_text(json.dumps(chrome_trace(step)), encoding="utf-8")
    from composer_fsdp2.estimate.plan_text import plan_text
    from composer_fsdp2.estimate.side_by_side import against_json, against_text

    other = plan(options.against, {**arguments, "overrides": ()})[1] if options.against is not None else None
    if options.as_json:
        comparison = {"against": against_json(step, other)} if other is not None else {}
        answer = step.to_json() | {"suggestions": edits and edits.to_json()} | comparison
        return partial(json.dumps, answer, indent=2), step.exit_code
    if other is not None:
        return partial(against_text, step, other), step.exit_code
    return lambda: "\n".join([plan_text(step), *([edits.explain()] if edits else [])]), step.exit_code


def _provenance() -> str:
    """Return the command line, the version and the date, to print on the HTML page."""
    command = shlex.join(["composer-fsdp2", *sys.argv[1:]])
    return f"{command} (composer-fsdp2 {composer_fsdp2.__version__}, {datetime.date.today()})"


def _suggestions(
    run: PreflightRun,
    step: PlannedStep,
    memory: Memory,
    file: str,
    arguments: Mapping[str, Any],
    machine: Machine | None,
) -> SuggestedEdits:
    from rich.console import Console

    from composer_fsdp2.preflight.suggested_edits import replanning, suggest_edits

    status = Console(stderr=True).status("looking for the fastest settings that fit")  # silent without a terminal
    with status, replanning(file, **arguments) as replan:
        return suggest_edits(
            run,
            step,
            Path(file).read_bytes().decode(),  # line ends unchanged
            file,
            replan=replan,
            memory_bytes=memory.usable_bytes,
            machine=with_assumed_speeds(machine, memory.given_bytes),
            decided={"microbatch_size": "--microbatch sets them"} if arguments["microbatch"] else None,
        )


def _refuse_overwrites(options: Plan) -> None:
    """Raise ConfigError if an output would overwrite an input or another output."""
    config = options.model_config
    read = (options.file, *((config, f"{config}/config.json") if config else ()))
    used = set(map(os.path.realpath, read))
    for path in (options.html, options.trace):
        if path is None:
            continue
        if (real_path := os.path.realpath(path)) in used:
            raise ConfigError(f"{path} cannot be written: it is an input or output already; use another name")
        used.add(real_path)


@contextlib.contextmanager
def _file(path: Path) -> Iterator[Path]:
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: no such folder: {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; use a file name")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is a device or a pipe; use a file name (a complete file is renamed to it)")
    with replacing(path) as temporary:
        try:
            temporary.touch()
            temporary.unlink()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        yield temporary
