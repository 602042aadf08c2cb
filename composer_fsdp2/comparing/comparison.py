"""A comparison from its beginning to its report: three runs in turn, the verdict, and a folder that says it."""

import contextlib
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from composer_fsdp2.comparing.drawing import draw
from composer_fsdp2.comparing.job import RECORD_NAME, Engine, Job, is_yaml
from composer_fsdp2.comparing.judging import Verdict, judge
from composer_fsdp2.comparing.launching import Interruptions, RunFailedError, run_ranks
from composer_fsdp2.comparing.outcome import Outcome
from composer_fsdp2.comparing.provenance import checkpoint_hash, hashes, versions
from composer_fsdp2.comparing.run_record import RunRecord
from composer_fsdp2.errors import ConfigError

# Called with a run's title and how many of its batches are done.
Show = Callable[[str, int], None]
_OWN = {"report.md", "report.json", "report.png", "logs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is asked for.

    Args:
        repeat: How often FSDP1 is run again for the noise floor.
        output: The folder to write; None keeps nothing but the outcome itself.
    """

    file: str
    arguments: tuple[str, ...]
    num_ranks: int
    batches: int
    repeat: int
    seed: int
    tolerance: float
    load_path: str
    is_deterministic: bool
    output: Path | None


def titles(options: Options) -> list[str]:
    """Of the runs, in their order."""
    again = ["FSDP1 again" if number == 0 else f"FSDP1 again ({number + 1})" for number in range(options.repeat)]
    return ["FSDP1", "FSDP2", *again]


def compare(options: Options, show: Show) -> Outcome:
    """Run the file three times, judge, and write the folder that was asked for; nothing else is left.

    Raises:
        ConfigError: the options cannot be used; nothing was started.
    """
    _check(options)
    with Interruptions() as interruptions, _work_folder(options.output) as work:
        runs: list[RunRecord] = []
        verdict, error = Verdict.UNUSABLE, ""
        try:
            for title in titles(options):
                runs.append(_run(options, title, work, show, interruptions))
            verdict = Verdict.SAME
        except RunFailedError as problem:
            error = str(problem).replace(str(work), str(options.output or work))
        except KeyboardInterrupt:
            verdict = Verdict.INTERRUPTED
        is_hashed = options.load_path and verdict is Verdict.SAME
        found = {"checkpoint": checkpoint_hash(options.load_path)} if is_hashed else {}
        interruptions.hold()
        outcome = _outcome(options, runs, verdict, error, found)
        if verdict is Verdict.SAME:
            try:
                outcome = _judged(outcome, options, work)
            except Exception:  # a fault of ours: the report with the records of hours of runs is written all the same
                error = f"the runs ended, but comparing them failed; report.json has them\n{traceback.format_exc()}"
                outcome = replace(outcome, verdict=Verdict.UNUSABLE, error=error)
        _write(outcome, work)
        shutil.rmtree(work / "tensors", ignore_errors=True)
    return outcome


def _outcome(
    options: Options, runs: list[RunRecord], verdict: Verdict, error: str, found: Mapping[str, str]
) -> Outcome:
    return Outcome(
        file=options.file,
        arguments=options.arguments,
        num_ranks=options.num_ranks,
        batches=options.batches,
        seed=options.seed,
        load_path=options.load_path,
        tolerance=options.tolerance,
        verdict=verdict,
        error=error,
        runs=tuple(runs),
        versions=versions(),
        hashes={**hashes(options.file, runs), **found},
    )


def _judged(outcome: Outcome, options: Options, work: Path) -> Outcome:
    runs = outcome.runs
    judgement = judge(runs[0], runs[1], runs[2:], tolerance=options.tolerance)
    picture = draw(work / "report.png", runs) if options.output is not None else ""
    return replace(outcome, verdict=judgement.verdict, judgement=judgement, picture=picture)


def _run(options: Options, title: str, work: Path, show: Show, interruptions: Interruptions) -> RunRecord:
    name = title.lower().replace(" ", "-")
    (work / "tensors").mkdir(exist_ok=True)
    job = Job(
        title=title,
        engine=Engine.FSDP2 if title == "FSDP2" else Engine.FSDP1,
        file=options.file,
        arguments=options.arguments,
        batches=options.batches,
        seed=options.seed,
        load_path=options.load_path,
        is_deterministic=options.is_deterministic,
        folder=str(work / "logs" / name),
        reference=str(work / "tensors" / "first"),
    )
    return run_ranks(job, options.num_ranks, partial(show, title), interruptions)


def _write(outcome: Outcome, work: Path) -> None:
    (work / "report.json").write_text(json.dumps(outcome.to_json(), indent=2) + "\n", encoding="utf-8")
    (work / "report.md").write_text(outcome.markdown(), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Before and around the runs


def _check(options: Options) -> None:
    problems = []
    if is_yaml(options.file):
        problems += [f"{each}: a YAML takes key=value" for each in options.arguments if "=" not in each]
    if options.load_path and "://" not in options.load_path and not Path(options.load_path).exists():
        problems.append(f"--load-path {options.load_path}: no such file or folder")
    if options.output is not None:
        problems += _problems_of(options.output)
    if problems:
        raise ConfigError("\n".join(problems))


def _problems_of(output: Path) -> Iterator[str]:
    if not output.absolute().parent.is_dir():
        yield f"-o {output}: {output.absolute().parent} is no folder"
    elif not os.access(output.absolute().parent, os.W_OK):
        yield f"-o {output}: {output.absolute().parent} cannot be written"
    elif output.exists() and not _is_report(output):
        yield f"-o {output} exists, and is no report of an earlier comparison; give another name"


def _is_report(folder: Path) -> bool:
    """Whether there is nothing in it but what a comparison writes, so that it may be replaced."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else {"a file"}
    return names <= _OWN


@contextlib.contextmanager
def _work_folder(output: Path | None) -> Iterator[Path]:
    """A folder that replaces ``output`` when the block ends well; after an error only the records of runs are left."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="composer-fsdp2-") as folder:
            yield Path(folder)
        return
    output = output.absolute()
    work, old = (output.with_name(f".{output.name}.{ending}") for ending in ("partial", "old"))
    if old.exists() and not output.exists():  # a process was killed between the two renames
        old.rename(output)
    for left in (work, old):
        shutil.rmtree(left, ignore_errors=True)
    work.mkdir()
    try:
        yield work
        _replace(output, work, old)
    except BaseException as error:
        if not any(work.glob(f"logs/*/{RECORD_NAME}")):
            shutil.rmtree(work, ignore_errors=True)
        elif isinstance(error, OSError):
            raise RunFailedError(
                f"the report was not written: {error}; the records of the runs are in {work}"
            ) from error
        raise


def _replace(output: Path, work: Path, old: Path) -> None:
    """Rename ``work`` to ``output``; the earlier report is removed after that, and restored if it fails."""
    if output.exists():
        output.rename(old)
    try:
        work.rename(output)
    except OSError:
        if old.exists():
            old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)
