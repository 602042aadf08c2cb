"""What a comparison comes to, for a program (``report.json``), for who signs it (``report.md``) and for a terminal."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_fsdp2.comparing.job import is_yaml
from composer_fsdp2.comparing.judging import (
    BATCHES_OF_TOLERANCE,
    DATA,
    TOLERANCE,
    Judgement,
    Quantity,
    Verdict,
    title_of,
)
from composer_fsdp2.comparing.run_record import CollectiveCount, RunRecord
from composer_fsdp2.comparing.throughput import throughput
from composer_fsdp2.config.text import and_more, human_bytes
from composer_fsdp2.config.value import Value, plain

# Of the object in report.json; another one means that a program has to be changed. SCHEMA describes it.
VERSION = 1
SCHEMA = Path(__file__).with_name("compare.schema.json")
_WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Value):
    """Everything that the reports say.

    Args:
        runs: FSDP1, FSDP2, FSDP1 again, as far as they came.
        judgement: None where the runs did not come to their end; ``error`` then says why.
        picture: "" where there is one; else why there is none.
    """

    file: str
    arguments: tuple[str, ...]
    num_ranks: int
    batches: int
    seed: int
    load_path: str
    tolerance: float = TOLERANCE
    verdict: Verdict
    error: str = ""
    runs: tuple[RunRecord, ...] = ()
    judgement: Judgement | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    picture: str = ""

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    @property
    def headline(self) -> str:
        match self.verdict:
            case Verdict.SAME:
                return f"same: FSDP2 trains as FSDP1 does ({self._of_what})"
            case Verdict.DIFFERENT:
                wrong = [each.name for each in self._quantities if not each.is_same]
                return f"different: {', '.join(wrong)} ({self._of_what})"
            case Verdict.INTERRUPTED:
                done = ", ".join(run.title for run in self.runs) or "none"
                return f"interrupted: no verdict; runs that came to their end: {done}"
        return "unusable: no verdict"

    @property
    def _of_what(self) -> str:
        device = self.runs[0].device
        return f"{len(self.runs[1].batches)} batches on {self.num_ranks} ranks, {device}, {self.runs[0].precision}"

    @property
    def _quantities(self) -> tuple[Quantity, ...]:
        return () if self.judgement is None else self.judgement.quantities

    # --- for a program

    def to_json(self) -> dict[str, Any]:
        made = {
            "version": VERSION,
            "exit_code": self.exit_code,
            "headline": self.headline,
            **_finite(Value.to_json(self)),
        }
        judged = made.pop("judgement") or {"quantities": [], "causes": []}
        made["quantities"] = [
            {**each, "same": quantity.is_same}
            for each, quantity in zip(judged["quantities"], self._quantities, strict=True)
        ]
        made["causes"] = judged["causes"]
        made["throughput"] = [{"title": run.title, **plain(throughput(run))} for run in self.runs]
        return made

    # --- for a person

    def summary(self) -> str:
        """A few lines."""
        lines = [self.headline]
        lines += [f"  {each}" for each in ([] if self.judgement is None else self.judgement.causes)]
        if self.judgement is not None:
            lines += ["", *_aligned(self._quantity_rows())]
            lines += ["", *_aligned(self._throughput_rows())]
        return "\n".join(lines)

    def markdown(self) -> str:
        parts = [f"# {Path(self.file).name} on FSDP1 and on FSDP2", f"**{self.headline}**"]
        parts += [self.error] if self.error else []
        if self.judgement is not None:
            parts += ["\n".join(f"- {cause}" for cause in self.judgement.causes)] if self.judgement.causes else []
            parts += [_HOW, _table(self._quantity_rows())]
            parts += [
                "![Losses, gradient norms and their differences](report.png)" if not self.picture else self.picture
            ]
        parts += self._of_runs() if self.runs else []
        parts += ["## What was compared", *self._provenance(), "## Signed", _SIGNED]
        return "\n\n".join(parts) + "\n"

    def _of_runs(self) -> Iterator[str]:
        yield "## Batches"
        yield _table(self._batch_rows())
        if len(self.runs) > 1:
            yield "## Tensors that are furthest apart"
            rows = self._tensor_rows()
            yield _table(rows) if len(rows) > 1 else "None is apart."
            yield from self._of_rounding()
        yield "## Time, memory and collectives"
        yield _table(self._throughput_rows())
        yield f"Memory of a rank is {self.runs[0].memory_is}. {_TIMED}"
        yield _table(self._collective_rows())
        yield from self._of_prediction()
        yield "## What was set in place of what the file says"
        yield self._overrides()
        if translation := next((run.translation for run in self.runs if run.translation), ""):
            yield "## What became of each key"
            yield f"```text\n{translation}\n```"

    def _quantity_rows(self) -> list[list[str]]:
        rows = [["quantity", "FSDP2 from FSDP1", "FSDP1 from itself", "limit", "verdict", "furthest apart"]]
        for each in self._quantities:
            told = "same" if each.is_same else "DIFFERENT"
            if each.name == DATA:
                numbers = ["equal" if not each.distance else _number(each.distance), "equal", "equal"]
                numbers[1] = "equal" if not each.floor else _number(each.floor)
            else:
                numbers = [_number(value) for value in (each.distance, each.floor, each.limit)]
            rows.append([each.name, *numbers, told, each.worst])
        return rows

    def _batch_rows(self) -> list[list[str]]:
        rows = [["batch", "data", *(f"loss, {run.title}" for run in self.runs)]]
        rows[0] += [f"gradient norm, {run.title}" for run in self.runs]
        for number, batch in enumerate(self.runs[0].batches):
            each = [run.batches[number] if number < len(run.batches) else None for run in self.runs]
            is_same = all(other is not None and other.digests == batch.digests for other in each)
            row = [str(batch.batch), "" if len(each) == 1 else "same" if is_same else "DIFFERENT"]
            row += ["" if other is None else f"{other.loss:.7f}" for other in each]
            row += ["" if other is None else f"{other.gradient_norm:.7g}" for other in each]
            rows.append(row)
        return rows

    def _tensor_rows(self) -> list[list[str]]:
        rows = [["run", "tensor", "distance after all batches", "largest difference"]]
        for run in self.runs[1:]:
            for is_parameter in (True, False):
                tensors = [each for each in run.distances if (each.kind == "parameter") == is_parameter]
                apart = [each for each in tensors if each.distance]
                for each in sorted(apart, key=lambda each: -each.distance)[:_WORST]:
                    row = [run.title, f"`{title_of(each)}`", _number(each.distance), _number(each.largest)]
                    rows.append(row)
        return rows

    def _of_rounding(self) -> Iterator[str]:
        """See [Note: rounding alone] in kept_tensors.py."""
        lines = [
            _not_judged(run, is_parameter=is_parameter)
            for run in self.runs[1:]
            for is_parameter in (True, False)
            if any(each.num_rounding and (each.kind == "parameter") == is_parameter for each in run.distances)
        ]
        if lines:
            yield "\n".join(["Not judged, because rounding alone decides where they move:", "", *lines])
            yield _ROUNDING

    def _throughput_rows(self) -> list[list[str]]:
        rows = [["run", "modules that gather", "a batch", "95 % interval", "samples/s", "peak memory of a rank"]]
        for run in self.runs:
            timed = throughput(run)
            memory = human_bytes(max(batch.memory_bytes for batch in run.batches))
            interval = f"{timed.low:.4g} to {timed.high:.4g} s"
            row = [run.title, str(run.num_units), f"{timed.median_s:.4g} s", interval, f"{timed.samples_per_s:.4g}"]
            rows.append([*row, memory])
        return rows

    def _collective_rows(self) -> list[list[str]]:
        predicted = self._predicted()
        counted = {run.title: {(each.op, each.dtype): each for each in run.collectives} for run in self.runs[:2]}
        columns = [*counted.values(), *([{(each.op, each.dtype): each for each in predicted}] if predicted else [])]
        rows = [["collectives of a batch", *counted, *(["predicted"] if predicted else [])]]
        for key in sorted({key for column in columns for key in column}):
            rows.append([f"{key[0]}, {key[1]}", *(_calls(column.get(key)) for column in columns)])
        return rows

    def _predicted(self) -> tuple[CollectiveCount, ...]:
        return next((run.prediction.collectives for run in self.runs if run.prediction.collectives), ())

    def _of_prediction(self) -> Iterator[str]:
        fsdp2 = next((run for run in self.runs if run.engine == "FSDP2"), None)
        if fsdp2 is None:
            return
        predicted = fsdp2.prediction
        if predicted.reason:
            yield f"No prediction stands beside them: {predicted.reason}."
            return
        yield (
            "Counted in one batch, up to its last microbatch's gradients, on rank 0, with what Composer itself sends. "
            "Predicted is what a replay of the plan sends for parameters and gradients"
            + (f"; it rests on {predicted.rests_on}." if predicted.rests_on else ", in the plan's own order of units.")
        )
        yield _table(_memory_rows(fsdp2))
        if not fsdp2.state_bytes:
            yield _NOT_COUNTED
        if predicted.notes:
            yield "\n".join(f"- {note}" for note in predicted.notes)

    def _overrides(self) -> str:
        lines = list(
            dict.fromkeys(
                f"- `{each.name}`: {each.used}, given {each.given}: {each.why}"
                for run in self.runs
                for each in run.overrides
            )
        )
        lines += [f"- {each}" for each in _ALWAYS]
        lines += [f"- {run.title}: {note}" for run in self.runs for note in run.notes]
        return "\n".join(lines)

    @property
    def _command(self) -> str:
        words = ["composer-fsdp2", "compare", self.file, "-n", str(self.num_ranks), "--batches", str(self.batches)]
        words += ["--load-path", self.load_path] if self.load_path else []
        words += ["--tolerance", f"{self.tolerance:g}"] if self.tolerance != TOLERANCE else []
        return shlex.join([*words, *(["--"] if self.arguments and not is_yaml(self.file) else []), *self.arguments])

    def _provenance(self) -> Iterator[str]:
        start = f"the checkpoint {self.load_path}" if self.load_path else "its own start"
        yield f"`{self._command}`: {self.batches} batches from {start}, seed {self.seed}, tolerance {self.tolerance:g}."
        rows = [["", ""], *([f"SHA-256 of the {name}", f"`{value}`"] for name, value in self.hashes.items())]
        yield _table([*rows, *([name, value] for name, value in self.versions.items())])


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
    "random numbers begin anew before the file is run, and before the first batch, by the seed and the rank",
    "FSDP_VERSION is taken from the environment",
)
_SIGNED = "\n".join(f"- {who}: ______________________  date: ____________" for who in ("compared by", "accepted by"))


def _not_judged(run: RunRecord, *, is_parameter: bool) -> str:
    tensors = [each for each in run.distances if (each.kind == "parameter") == is_parameter]
    touched = sorted((each for each in tensors if each.num_rounding), key=lambda each: -each.num_rounding / each.size)
    number, size = sum(each.num_rounding for each in touched), sum(each.size for each in tensors)
    what = "parameters" if is_parameter else "optimizer state"
    where = and_more([f"{each.num_rounding} of {each.size} in `{title_of(each)}`" for each in touched])
    largest = max(each.largest_rounding for each in touched)
    return f"- {run.title}, {what}: {number} of {size} elements, off by up to {_number(largest)}: {where}"


_ROUNDING = (
    "Their gradients are below a millionth of the model's largest, and an optimizer such as Adam makes full steps of "
    "them: of attention's key bias, say, to which softmax is blind. None of them is further off than such steps in the "
    "other direction explain; what is, and what has no gradient at all, is judged with the others."
)


def _memory_rows(run: RunRecord) -> list[list[str]]:
    """Exact bytes: they are to be equal."""
    rows = [["peak of a rank's memory, bytes", "counted on FSDP2", "predicted"]]
    for title, counted, predicted in (
        ("parameters, gradients, optimizer state, buffers, collectives", run.state_bytes, run.prediction.state_bytes),
        ("the same and activations", run.peak_bytes, run.prediction.peak_bytes),
    ):
        if predicted:
            rows.append([title, f"{counted:,}" if counted else "", f"{predicted:,}"])
    return rows


_NOT_COUNTED = (
    "Bytes were not counted: a first batch has no optimizer state yet, and of offloaded parameters it is not told "
    "apart where they lie."
)


def _calls(count: CollectiveCount | None) -> str:
    return "" if count is None else f"{count.calls} calls, {human_bytes(count.num_bytes)}"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else "infinite"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _finite(value: Any) -> Any:
    """As JSON has it, which has no word for an infinite number: null."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
