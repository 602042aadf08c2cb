"""The result of a comparison as ``report.json`` for programs, ``report.md`` for people, and text for a terminal."""

import json
import math
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from composer_fsdp2.comparing.job import TOLERANCE, Options
from composer_fsdp2.comparing.judging import BATCHES_OF_TOLERANCE, Quantity, Verdict
from composer_fsdp2.comparing.run_record import BUFFER, PARAMETER, Prediction, RunRecord
from composer_fsdp2.config.text import and_more, human_bytes, text_width
from composer_fsdp2.config.value import Value, json_text, plain

# The version of the format of report.json, which SCHEMA describes. It changes if programs must be changed.
VERSION = 2
SCHEMA = Path(__file__).with_name("compare.schema.json")
_WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Value):
    """The contents of the reports.

    Args:
        error: The last lines of a failed run, and the path of its log; "" if none failed.
        runs: FSDP1, FSDP2, FSDP1 again; only those that completed.
        quantities: Empty without a verdict.
        picture: The reason for a missing plot; "" otherwise.
    """

    options: Options
    verdict: Verdict
    error: str = ""
    runs: tuple[RunRecord, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    causes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    picture: str = ""

    @property
    def headline(self) -> str:
        if not self.quantities:
            done = ", ".join(run.title for run in self.runs) or "none"
            is_interrupted = self.verdict is Verdict.INTERRUPTED
            return f"{self.verdict.value}: no verdict" + (f"; completed runs: {done}" if is_interrupted else "")
        wrong = ", ".join(each.name for each in self.quantities if not each.is_same)
        first, fsdp2 = self.runs[:2]
        of_what = f"{len(fsdp2.batches)} batches on {self.options.num_ranks} ranks, {first.device}, {first.precision}"
        return f"{self.verdict.value}: {wrong or 'FSDP2 trains as FSDP1 does'} ({of_what})"

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON. Infinity and NaN, which JSON does not have, are null."""
        fields = json.loads(json_text(self), parse_constant=lambda name: None)
        quantities = [
            {**each, "same": quantity.is_same}
            for each, quantity in zip(fields["quantities"], self.quantities, strict=True)
        ]
        return {
            "version": VERSION,
            "exit_code": self.verdict.exit_code,
            "headline": self.headline,
            **fields.pop("options"),
            **fields,
            "quantities": quantities,
            "throughput": [{"title": run.title, **plain(run.throughput)} for run in self.runs],
        }

    def summary(self) -> str:
        """A few lines; on a terminal, as wide as that."""
        width = text_width(sys.maxsize)
        paragraphs = [self.headline, *(f"  {each}" for each in self.causes)]
        lines = [line for each in paragraphs for line in _wrapped(each, width, indent=4)]
        tables = (self._quantity_rows(), self._throughput_rows())
        return "\n".join([*lines, *(line for rows in tables for line in ("", *_aligned(rows, width)))])

    def markdown(self) -> str:
        return "\n\n".join(filter(None, self._paragraphs())) + "\n"

    def _paragraphs(self) -> Iterator[str]:
        yield f"# {Path(self.options.file).name} on FSDP1 and on FSDP2"
        yield f"**{self.headline}**"
        yield self.error
        if self.quantities:
            yield _list(self.causes)
            yield _HOW
            yield _table(self._quantity_rows())
            yield self.picture or "![Losses, gradient norms and their differences](report.png)"
        if self.runs:
            yield from self._run_paragraphs()
        yield "## What was compared"
        yield (
            f"`{self._command_line}`: {self.options.batches} batches from "
            f"{f'the checkpoint {self.options.load_path}' if self.options.load_path else 'its own start'}, seed "
            f"{self.options.seed}, tolerance {self.options.tolerance:g}."
        )
        hashes = ([f"SHA-256 of the {name}", f"`{value}`"] for name, value in self.hashes.items())
        yield _table([["", ""], *hashes, *([name, value] for name, value in self.versions.items())])
        yield "## Signed"
        yield _list([f"{who}: ______________________  date: ____________" for who in ("compared by", "accepted by")])

    def _run_paragraphs(self) -> Iterator[str]:
        yield "## Batches"
        yield _table(self._batch_rows())
        if len(self.runs) > 1:
            yield "## Tensors that are furthest apart"
            rows = [["run", "tensor", "distance", "largest difference"], *self._tensor_rows()]
            yield _table(rows) if len(rows) > 1 else "None is apart."
            if not_judged := [_not_judged(run) for run in self.runs[1:] if any(each.num_rounding for each in run.end)]:
                yield "Not judged, because rounding alone decides where they move:"
                yield _list(not_judged)
                yield _ROUNDING
        yield "## Time, memory and collectives"
        yield _table(self._throughput_rows())
        yield f"Memory of a rank is {self.runs[0].memory_is}. {_TIMED}"
        yield from self._prediction_paragraphs()
        yield "## Settings that the comparison replaced"
        overrides = (f"`{o.name}`: {o.used}, given {o.given}: {o.why}" for run in self.runs for o in run.overrides)
        notes = (f"{run.title}: {note}" for run in self.runs for note in run.notes)
        yield _list([*dict.fromkeys(overrides), *_ALWAYS, *notes])
        if translation := next((run.translation for run in self.runs if run.translation), ""):
            yield "## The outcome of each key"
            yield f"```text\n{translation}\n```"

    def _quantity_rows(self) -> Iterator[list[str]]:
        yield ["quantity", "FSDP2 from FSDP1", "FSDP1 from itself", "limit", "verdict", "furthest apart"]
        for each in self.quantities:
            numbers = map(_number, (each.distance, each.floor, each.limit))
            yield [each.name, *numbers, "same" if each.is_same else "DIFFERENT", each.worst]

    def _batch_rows(self) -> Iterator[list[str]]:
        columns = (f"{what}, {run.title}" for what in ("loss", "gradient norm") for run in self.runs)
        yield ["batch", "data", *columns]
        for batches in zip_longest(*(run.batches for run in self.runs)):
            present = [batch for batch in batches if batch]
            is_same = len(present) == len(batches) and len({batch.digests for batch in present}) == 1
            losses = [f"{batch.loss:.7f}" if batch else "" for batch in batches]
            norms = [f"{batch.gradient_norm:.7g}" if batch else "" for batch in batches]
            yield [str(present[0].batch), "same" if is_same else "DIFFERENT", *losses, *norms]

    def _tensor_rows(self) -> Iterator[list[str]]:
        """The parameters, buffers and optimizer state with the largest distances, for each run."""
        for run in self.runs[1:]:
            differing = sorted((each for each in run.end if each.distance), key=lambda each: -each.distance)
            parts = [[each for each in differing if each.kind == kind] for kind in (PARAMETER, BUFFER)]
            parts.append([each for each in differing if each.kind not in (PARAMETER, BUFFER)])
            for each in (each for part in parts for each in part[:_WORST]):
                yield [run.title, f"`{each.title}`", _number(each.distance), _number(each.largest)]

    def _throughput_rows(self) -> Iterator[list[str]]:
        yield ["run", "modules that gather", "a batch", "95 % interval", "samples/s", "peak memory of a rank"]
        for run in self.runs:
            timed = run.throughput
            memory = human_bytes(max(batch.memory_bytes for batch in run.batches))
            interval = f"{timed.low:.4g} to {timed.high:.4g} s" if timed.batches > 1 else "-"
            seconds = f"{timed.median_s:.4g} s"
            yield [run.title, str(run.num_units), seconds, interval, f"{timed.samples_per_s:.4g}", memory]

    def _prediction_paragraphs(self) -> Iterator[str]:
        """Collectives and memory beside their prediction."""
        fsdp2 = next((run for run in self.runs if run.engine == "FSDP2"), None)
        predicted = fsdp2.prediction if fsdp2 else Prediction()
        columns = {run.title: _counts(run) for run in self.runs[:2]} | {"predicted": _counts(predicted)}
        columns = {title: column for title, column in columns.items() if column}
        names = dict.fromkeys(name for column in columns.values() for name in column)
        rows = ([name, *(column.get(name, "") for column in columns.values())] for name in names)
        yield _table([["one batch on rank 0", *columns], *rows])
        if predicted.reason:
            yield f"No prediction stands beside them: {predicted.reason}."
        elif fsdp2:
            basis = f"it rests on {predicted.rests_on}" if predicted.rests_on else "in the plan's own order of units"
            yield f"{_COUNTED}; {basis}."
            yield "" if fsdp2.state_bytes else _NOT_COUNTED
            yield _list(predicted.notes)

    @property
    def _command_line(self) -> str:
        options = self.options
        arguments = ["composer-fsdp2", "compare", options.file]
        arguments += ["-n", str(options.num_ranks), "--batches", str(options.batches)]
        arguments += ["--load-path", options.load_path] if options.load_path else []
        arguments += ["--tolerance", f"{options.tolerance:g}"] if options.tolerance != TOLERANCE else []
        return shlex.join(
            [*arguments, *(["--"] if options.arguments and not options.is_yaml else []), *options.arguments]
        )


_HOW = (
    "FSDP1, FSDP2 and FSDP1 again trained the same file. A distance is relative: of tensors the 2-norm of the "
    "difference over that of FSDP1's. The limit of a tensor is the larger of the tolerance and twice the distance of "
    "the same tensor between the runs on FSDP1; that of a batch counts the largest such distance up to that batch. "
    f"Rounding builds up, so from batch {BATCHES_OF_TOLERANCE} on the tolerance grows with the batches "
    f"that were trained: after {2 * BATCHES_OF_TOLERANCE} it is twice as large. Of all batches or tensors the one is "
    "shown that is furthest beyond its limit, or nearest to it."
)
_TIMED = "The first two batches, and the one whose collectives were counted, are not among the timed."
_ALWAYS = (
    "the runs end after the last compared batch; what the file does after its first fit is left out, and so are "
    "further Trainers. Learning rates follow the file's own max_duration",
    "random numbers are seeded before the file is run, and before the first batch, by the seed and the rank",
    "FSDP_VERSION is removed from the environment",
)
_ROUNDING = (
    "Their gradients are below a millionth of the model's largest, and an optimizer such as Adam makes full steps of "
    "them: of attention's key bias, for example, to which softmax is invariant. None of them is further off than such "
    "steps in the other direction explain; what is, and what has no gradient at all, is judged with the others."
)
_COUNTED = (
    "Counted in one batch, up to its last microbatch's gradients, on rank 0, with Composer's own collectives. "
    "Predicted is what a replay of the plan sends for parameters and gradients"
)
_NOT_COUNTED = (
    "Bytes were not counted: a first batch has no optimizer state yet, and with offloaded parameters host and device "
    "are not told apart."
)


def _not_judged(run: RunRecord) -> str:
    """See [Note: rounding alone] in reference.py."""
    touched = sorted((each for each in run.end if each.num_rounding), key=lambda each: -each.num_rounding / each.size)
    where = and_more([f"{each.num_rounding} of {each.size} in `{each.title}`" for each in touched])
    largest = _number(max(each.largest_rounding for each in touched))
    number, size = sum(each.num_rounding for each in touched), sum(each.size for each in run.end)
    return f"{run.title}: {number} of {size} elements, off by up to {largest}: {where}"


def _counts(counted: RunRecord | Prediction) -> dict[str, str]:
    """Format memory in exact bytes, because measured and predicted bytes should be equal."""
    memory = {
        "peak of parameters, gradients, optimizer state, buffers and collectives, bytes": counted.state_bytes,
        "peak of the same and activations, bytes": counted.peak_bytes,
    }
    calls = {f"{each.op}, {each.dtype}": each for each in counted.collectives}
    shown = {name: f"{each.calls} calls, {human_bytes(each.num_bytes)}" for name, each in calls.items()}
    return shown | {name: f"{size:,}" for name, size in memory.items() if size}


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else "infinite"


def _list(items: Sequence[str]) -> str:
    return "\n".join(f"- {each}" for each in items)


def _table(rows: Iterator[list[str]] | Sequence[list[str]]) -> str:
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _aligned(rows: Iterator[list[str]], width: int) -> list[str]:
    """Aligned columns; if they are too wide together, headers are wrapped first, then the cells of the widest."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    unwrapped = [max(map(len, (*head.split(), *body))) for head, *body in zip(*cells, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > max(width, len(widths) * 3):
        spare = [size - least for size, least in zip(widths, unwrapped, strict=True)]
        widths[spare.index(max(spare)) if max(spare) > 0 else widths.index(max(widths))] -= 1
    lines = []
    for row in cells:
        wrapped = (_wrapped(cell, size) for cell, size in zip(row, widths, strict=True))
        for line in zip_longest(*wrapped, fillvalue=""):
            lines.append("  ".join(map(str.ljust, line, widths)).rstrip())
    return lines


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    return [text] if len(text) <= width else textwrap.wrap(text, width, subsequent_indent=" " * indent)
