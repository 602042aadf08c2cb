"""``composer-fsdp2 plan FILE --world-size N``: what a step takes of memory and sends, before there is a machine."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from composer_fsdp2.atomic import replacing
from composer_fsdp2.cli.models import MODEL_HELP, function_from
from composer_fsdp2.cli.others_code import interruptible, quietly
from composer_fsdp2.config.sizes import Reserve, parse_bandwidth, parse_bytes, parse_flops, parse_reserve
from composer_fsdp2.config.text import printable
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError
from composer_fsdp2.estimate.bounds import GPUS, Machine

if TYPE_CHECKING:
    from composer_fsdp2.estimate.planned_step import Memory, PlannedStep
    from composer_fsdp2.preflight.preflight_run import PreflightRun
    from composer_fsdp2.preflight.suggestion import SuggestedEdits

# typer shows an enum's values as the choices.
Gpu = enum.Enum("Gpu", {name: name for name in GPUS})  # type: ignore[misc]
Device = enum.Enum("Device", {name: name for name in ("cuda", "cpu")})  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one run of the verb, as they were typed."""

    world_size: int
    gpus_per_node: int
    microbatch: int | None
    sequence: int | None
    model_config: str | None
    model: str | None
    device: str
    memory: str | None
    reserve: str | None
    gpu: str | None
    intra: str | None
    inter: str | None
    flops: str | None
    no_activations: bool
    against_fsdp1: bool
    suggest: bool
    host_memory: str | None
    as_json: bool
    html: Path | None
    trace: Path | None

    def machine(self) -> Machine | None:
        """What is given of speeds; a number of one's own takes the place of the table's."""
        given = Machine(
            flops=parse_flops(self.flops, "--flops") if self.flops is not None else None,
            intra_bytes_per_s=parse_bandwidth(self.intra, "--intra-gbps") if self.intra is not None else None,
            inter_bytes_per_s=parse_bandwidth(self.inter, "--inter-gbps") if self.inter is not None else None,
        )
        of_gpu = GPUS[self.gpu] if self.gpu else Machine()
        machine = replace(
            of_gpu,
            flops=given.flops or of_gpu.flops,
            fp8_flops=None if given.flops else of_gpu.fp8_flops,
            intra_bytes_per_s=given.intra_bytes_per_s or of_gpu.intra_bytes_per_s,
            inter_bytes_per_s=given.inter_bytes_per_s or of_gpu.inter_bytes_per_s,
        )
        return machine if machine.says_anything else None

    def host_bytes(self) -> int | None:
        """What a search may take of the host's memory. Raises ConfigError where an option needs another one."""
        if self.suggest and self.memory is None:
            raise ConfigError("--suggest needs --memory: for which memory is a run to fit?")
        if self.suggest and self.no_activations:
            raise ConfigError("--suggest cannot choose without activations; leave out --no-activations")
        if self.host_memory is None:
            return None
        if not self.suggest:
            raise ConfigError("--host-memory is for --suggest")
        return parse_bytes(self.host_memory, "--host-memory", may_be_none=True)

    def reading(self, overrides: Sequence[str]) -> dict[str, Any]:
        """How the file is read, as ``read_run`` takes it."""
        return {
            "world_size": self.world_size,
            "gpus_per_node": self.gpus_per_node,
            "model_config": self.model_config,
            "model": function_from(self.model) if self.model is not None else None,
            "microbatch": self.microbatch,
            "sequence": self.sequence,
            "device": self.device,
            "overrides": overrides,
        }


def _print_schema(is_asked: bool) -> None:
    if is_asked:
        from composer_fsdp2.estimate.planned_step import SCHEMA

        print(SCHEMA.read_text(), end="")
        raise typer.Exit


def plan(
    context: typer.Context,
    file: str = typer.Argument(metavar="FILE", help="A training file of LLM Foundry, or of another system."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE ...]", help="Values in place of the file's."),
    world_size: int = typer.Option(..., "--world-size", help="The number of ranks."),
    gpus_per_node: int = typer.Option(8, "--gpus-per-node", help="How many of them share a node."),
    microbatch: int = typer.Option(None, "--microbatch", help="Rows of a microbatch of one rank."),
    sequence: int = typer.Option(None, "--sequence", help="Tokens of a row."),
    model_config: str = typer.Option(
        None, "--model-config", metavar="PATH", help="A model's config.json, or a folder that has one."
    ),
    model: str = typer.Option(None, "--model", metavar="MODULE:FUNCTION", help=MODEL_HELP),
    device: Device = typer.Option("cuda", "--device", help="The device that the run is for."),
    memory: str = typer.Option(None, "--memory", metavar="80GiB", help="Of each device; does the step fit?"),
    reserve: str = typer.Option(
        None, "--reserve", metavar="6%+2GiB", help="What of it stays free for what is not modelled; default: 6%+2GiB."
    ),
    gpu: Gpu = typer.Option(None, "--gpu", help="Whose peak numbers bound the step's time."),
    intra: str = typer.Option(None, "--intra-gbps", metavar="450GB/s", help="From a rank to others of its node."),
    inter: str = typer.Option(None, "--inter-gbps", metavar="400Gb/s", help="From a rank to other nodes."),
    flops: str = typer.Option(None, "--flops", metavar="989TFLOPS", help="The most that a device computes."),
    no_activations: bool = typer.Option(False, "--no-activations", help="Leave out what the model computes."),
    against_fsdp1: bool = typer.Option(False, "--against-fsdp1", help="Say what changes against FSDP1, by a model."),
    suggest: bool = typer.Option(False, "--suggest", help="The cheapest settings that fit, as diffs of the file."),
    host_memory: str = typer.Option(
        None,
        "--host-memory",
        metavar="256GiB",
        help="Of the host, for each rank: what --suggest may offload; 0: nothing.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    json_schema: bool = typer.Option(
        False, "--json-schema", callback=_print_schema, is_eager=True, help="Print the JSON schema of that object."
    ),
    html: Path = typer.Option(None, "--html", metavar="FILE", help="Write a page to look at, which needs no network."),
    trace: Path = typer.Option(None, "--trace", metavar="FILE", help="Write a trace that ui.perfetto.dev opens."),
) -> None:
    """Say what one training step takes of a rank's memory and what it sends, before there is a machine.

    Needs no GPU, no network, no weights and one process. State and collectives are those of real steps to the byte;
    what is modelled, and what nobody knows, is said.

    Exit code:

    0: the step fits, or no --memory was given.

    1: it does not fit, or a finding asks for a decision.

    2: the file cannot be used, or an option is wrong; nothing is written then.
    """
    options = Options(
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        microbatch=microbatch,
        sequence=sequence,
        model_config=model_config,
        model=model,
        device=device.value,
        memory=memory,
        reserve=reserve,
        gpu=gpu.value if gpu else None,
        intra=intra,
        inter=inter,
        flops=flops,
        no_activations=no_activations,
        against_fsdp1=against_fsdp1,
        suggest=suggest,
        host_memory=host_memory,
        as_json=as_json,
        html=html,
        trace=trace,
    )
    context.obj.append(partial(_plan, file, tuple(overrides or ()), options))


def _plan(file: str, overrides: Sequence[str], options: Options) -> None:
    try:
        with interruptible(), quietly():
            text, exit_code = _answer(file, overrides, options)
    except ComposerFSDP2Error as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename or file}: {error.strerror or error}")
    except KeyboardInterrupt:
        _refuse("interrupted; nothing was written")
    print(text, flush=True)
    sys.exit(exit_code)


def _refuse(why: str) -> None:
    print(f"composer-fsdp2: {printable(' '.join(why.split()))}", file=sys.stderr)
    sys.exit(2)


def _answer(file: str, overrides: Sequence[str], options: Options) -> tuple[str, int]:
    """What is printed, and the exit code; the files that were asked for are there by then, all or none."""
    memory = parse_bytes(options.memory, "--memory") if options.memory is not None else None
    if options.reserve is not None and memory is None:
        raise ConfigError("--reserve is a part of the memory; give that as well, as in --memory 80GiB")
    reserve = parse_reserve(options.reserve, "--reserve") if options.reserve is not None else Reserve()
    machine, host_bytes = options.machine(), options.host_bytes()
    _keep_what_is_read(file, options)
    with _written(options) as write:
        # Here and not above: a wrong option is answered before torch is there.
        from composer_fsdp2.estimate.plan_text import plan_text
        from composer_fsdp2.estimate.planned_step import Memory
        from composer_fsdp2.preflight.planned import Questions, plan_step
        from composer_fsdp2.preflight.read_run import read_run

        how = options.reading(overrides)
        run = read_run(file, **how)
        questions = Questions(
            gpus_per_node=options.gpus_per_node,
            memory=Memory(given_bytes=memory, reserve=reserve) if memory is not None else None,
            machine=machine,
            counts_activations=not options.no_activations,
            against_fsdp1=options.against_fsdp1,
        )
        step = plan_step(run, file, questions)
        edits = _suggested(run, step, step.memory, file, how, host_bytes) if options.suggest and step.memory else None
        said = edits.explain() if edits is not None else ""
        write(step, said)
        answer = step.to_json() | {"suggestions": edits and edits.to_json()}
        text = json.dumps(answer, indent=2) if options.as_json else "\n".join(filter(None, (plan_text(step), said)))
    return text, step.exit_code


def _suggested(
    run: PreflightRun, step: PlannedStep, memory: Memory, file: str, how: Mapping[str, Any], host_bytes: int | None
) -> SuggestedEdits:
    from rich.console import Console

    from composer_fsdp2.preflight.suggested_edits import replanning, suggest_edits

    status = Console(stderr=True).status("looking for the cheapest settings that fit")  # on a terminal alone
    with status, replanning(file, **how) as replan:
        return suggest_edits(
            run,
            step,
            Path(file).read_bytes().decode(),  # the ends of its lines as they are
            file,
            replan=replan,
            memory_bytes=memory.usable_bytes,
            host_bytes=host_bytes,
            decided={"microbatch_size": "--microbatch gives them"} if how["microbatch"] else None,
        )


def _keep_what_is_read(file: str, options: Options) -> None:
    """Refuse to write over a file that is read, or the page and the trace to one name."""
    config = options.model_config
    read = (file, *((config, f"{config}/config.json") if config else ()))
    taken = {os.path.realpath(path): path for path in read}
    for path in (options.html, options.trace):
        if path is None:
            continue
        if (real := os.path.realpath(path)) in taken:
            raise ConfigError(f"{path} cannot be written, because it is {taken[real]} as well; give another name")
        taken[real] = str(path)


@contextlib.contextmanager
def _written(options: Options) -> Iterator[Callable[[PlannedStep, str], None]]:
    """A function that writes the files that were asked for; that they can be is seen before any work is done."""
    with contextlib.ExitStack() as files:
        html, trace = (
            files.enter_context(_file(path)) if path is not None else None for path in (options.html, options.trace)
        )

        def write(step: PlannedStep, suggestions: str) -> None:
            if html is not None:
                from composer_fsdp2.estimate.html import plan_page

                html.write_text(plan_page(step, suggestions), encoding="utf-8")
            if trace is not None:
                from composer_fsdp2.estimate.chrome_trace import chrome_trace

                trace.write_text(json.dumps(chrome_trace(step)), encoding="utf-8")

        yield write


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
