"""``composer-fsdp2 plan FILE --world-size N``: what a step takes of memory and sends, before there is a machine."""

from __future__ import annotations

import contextlib
import datetime
import enum
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
    """Say what one training step takes of a rank's memory and what it sends, before there is a machine.

    Needs no GPU, no network, no weights and one process. State and collectives are those of real steps to the byte;
    what is modelled, and what nobody knows, is said.

    Exit code:

    0: the step fits, or no --memory was given.

    1: it does not fit, or a finding asks for a decision.

    2: the file cannot be used, or an option is wrong; nothing is written then.
    """

    file: Annotated[str, typer.Argument(metavar="FILE", help="A training file of LLM Foundry, or of another system.")]
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Values in place of the file's.")
    ] = None
    world_size: Annotated[
        int | None, typer.Option("--world-size", help="The number of ranks; by default accelerate's num_processes.")
    ] = None
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", help="How many of them share a node.")] = 8
    microbatch: Annotated[int | None, typer.Option("--microbatch", help="Rows of a microbatch of one rank.")] = None
    sequence: Annotated[int | None, typer.Option("--sequence", help="Tokens of a row.")] = None
    model_config: Annotated[
        str | None,
        typer.Option("--model-config", metavar="PATH", help="A model's config.json, or a folder that has one."),
    ] = None
    model: Annotated[str | None, typer.Option("--model", metavar="MODULE:FUNCTION", help=MODEL_HELP)] = None
    device: Annotated[Device, typer.Option("--device", help="The device that the run is for.")] = Device["cuda"]
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="80GiB", help="Of each device; does the step fit?")
    ] = None
    reserve: Annotated[
        str | None,
        typer.Option(
            "--reserve", metavar="5%+2GiB", help="What of it stays free for what is not modelled; default: 5%+2GiB."
        ),
    ] = None
    gpu: Annotated[
        Gpu | None,
        typer.Option("--gpu", case_sensitive=False, help="Whose peak numbers bound the step's time."),
    ] = None
    intra: Annotated[
        str | None, typer.Option("--intra-gbps", metavar="450GB/s", help="From a rank to others of its node.")
    ] = None
    inter: Annotated[
        str | None, typer.Option("--inter-gbps", metavar="400Gb/s", help="From a rank to other nodes.")
    ] = None
    flops: Annotated[
        str | None, typer.Option("--flops", metavar="989TFLOPS", help="The most that a device computes.")
    ] = None
    no_activations: Annotated[bool, typer.Option("--no-activations", help="Leave out what the model computes.")] = False
    suggest: Annotated[bool, typer.Option("--suggest", help="The fastest settings that fit, as diffs of the file.")] = (
        False
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    json_schema: Annotated[bool, schema_option("composer_fsdp2.estimate.planned_step")] = False
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page to look at, which needs no network.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace that ui.perfetto.dev opens.")
    ] = None

    def __call__(self) -> None:
        try:
            with interruptible(), quietly():
                text, exit_code = _answer(self)
        except ComposerFSDP2Error as error:
            _refuse(str(error))
        except OSError as error:
            _refuse(f"{error.filename or self.file}: {error.strerror or error}")
        except KeyboardInterrupt:
            refuse("interrupted; nothing was written")
        print(text, flush=True)
        sys.exit(exit_code)

    def machine(self) -> Machine | None:
        """What is given of speeds; a number of one's own takes the place of the table's."""
        of_gpu = GPUS[self.gpu.value] if self.gpu else Machine()
        machine = replace(
            of_gpu,
            flops=of_gpu.flops if self.flops is None else parse_flops(self.flops, "--flops"),
            fp8_flops=of_gpu.fp8_flops if self.flops is None else None,
            intra_bytes_per_s=of_gpu.intra_bytes_per_s
            if self.intra is None
            else parse_bandwidth(self.intra, "--intra-gbps"),
            inter_bytes_per_s=of_gpu.inter_bytes_per_s
            if self.inter is None
            else parse_bandwidth(self.inter, "--inter-gbps"),
        )
        return machine if machine.has_any_speed else None

    def reading(self) -> dict[str, Any]:
        """How the file is read, as ``read_run`` takes it."""
        return {
            "world_size": self.world_size,
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


def _answer(options: Plan) -> tuple[str, int]:
    """What is printed, and the exit code; the files that were asked for are there by then, all or none."""
    memory = parse_bytes(options.memory, "--memory") if options.memory is not None else None
    if options.reserve is not None and memory is None:
        raise ConfigError("--reserve is a part of the memory; give that as well, as in --memory 80GiB")
    reserve = parse_reserve(options.reserve, "--reserve") if options.reserve is not None else Reserve()
    if options.reserve is not None and memory is not None and reserve.of(memory) >= memory:
        raise ConfigError(f"--reserve {options.reserve} reserves all of --memory {options.memory}; write 5%+2GiB")
    if options.suggest and memory is None:
        raise ConfigError("--suggest needs --memory: for which memory is a run to fit?")
    if options.suggest and options.no_activations:
        raise ConfigError("--suggest cannot choose without activations; leave out --no-activations")
    machine = options.machine()
    _keep_what_is_read(options)
    with contextlib.ExitStack() as files:  # that they can be written is seen before any work is done
        html, trace = (path and files.enter_context(_file(path)) for path in (options.html, options.trace))
        # Here and not above: a wrong option is answered before torch is there.
        from composer_fsdp2.estimate.plan_text import plan_text
        from composer_fsdp2.estimate.planned_step import Memory
        from composer_fsdp2.preflight.planned import Questions, plan_step
        from composer_fsdp2.preflight.read_run import read_run

        how = options.reading()
        run = read_run(options.file, **how)
        questions = Questions(
            memory=Memory(given_bytes=memory, reserve=reserve) if memory is not None else None,
            machine=machine,
            counts_activations=not options.no_activations,
        )
        step = plan_step(run, options.file, questions)
        edits = (
            _suggested(run, step, step.memory, options.file, how, machine) if options.suggest and step.memory else None
        )
        said = edits.explain() if edits is not None else ""
        if html is not None:
            from composer_fsdp2.estimate.html import plan_page

            html.write_text(plan_page(step, said, _made_by()), encoding="utf-8")
        if trace is not None:
            from composer_fsdp2.estimate.chrome_trace import chrome_trace

            trace.write_text(json.dumps(chrome_trace(step)), encoding="utf-8")
        answer = step.to_json() | {"suggestions": edits and edits.to_json()}
        text = json.dumps(answer, indent=2) if options.as_json else "\n".join(filter(None, (plan_text(step), said)))
    return text, step.exit_code


def _made_by() -> str:
    """The command, with its overrides, for who reads the page a month later."""
    command = shlex.join(["composer-fsdp2", *sys.argv[1:]])
    return f"{command} (composer-fsdp2 {composer_fsdp2.__version__}, {datetime.date.today()})"


def _suggested(
    run: PreflightRun, step: PlannedStep, memory: Memory, file: str, how: Mapping[str, Any], machine: Machine | None
) -> SuggestedEdits:
    from rich.console import Console

    from composer_fsdp2.preflight.suggested_edits import replanning, suggest_edits

    status = Console(stderr=True).status("looking for the fastest settings that fit")  # on a terminal alone
    with status, replanning(file, **how) as replan:
        return suggest_edits(
            run,
            step,
            Path(file).read_bytes().decode(),  # the ends of its lines as they are
            file,
            replan=replan,
            memory_bytes=memory.usable_bytes,
            machine=with_assumed_speeds(machine, memory.given_bytes),
            decided={"microbatch_size": "--microbatch gives them"} if how["microbatch"] else None,
        )


def _keep_what_is_read(options: Plan) -> None:
    """Refuse to write over a file that is read, or the page and the trace to one name."""
    config = options.model_config
    read = (options.file, *((config, f"{config}/config.json") if config else ()))
    taken = {os.path.realpath(path): path for path in read}
    for path in (options.html, options.trace):
        if path is None:
            continue
        if (real := os.path.realpath(path)) in taken:
            raise ConfigError(f"{path} cannot be written, because it is {taken[real]} as well; give another name")
        taken[real] = str(path)


@contextlib.contextmanager
def _file(path: Path) -> Iterator[Path]:
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path} is a device or a pipe; give the name of a file, which is written when it is complete"
        )
    with replacing(path) as beside:
        try:
            beside.touch()
            beside.unlink()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        yield beside
