"""Run a comparison: the runs one after another, the verdict, and a folder with the report."""

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_fsdp2.comparing.drawing import draw
from composer_fsdp2.comparing.job import Engine, Job, Options
from composer_fsdp2.comparing.judging import Verdict, judge
from composer_fsdp2.comparing.launching import RunFailedError, interruptions, run_ranks
from composer_fsdp2.comparing.outcome import Outcome
from composer_fsdp2.comparing.provenance import checkpoint_hash, data_hash, hash_of, versions
from composer_fsdp2.comparing.run_record import RunRecord
from composer_fsdp2.errors import ConfigError

# Called with a run's title and the number of completed batches.
Show = Callable[[str, int], None]


def compare(options: Options, output: Path | None, show: Show) -> Outcome:
    """Run the file on FSDP1, on FSDP2 and on FSDP1 again, judge the differences, and write the report.

    Args:
        output: A new or empty folder for the report and the logs; None writes neither.
    Raises:
        ConfigError: the options are invalid, before any run starts; or the report cannot be written.
    """
    _check(options, output)
    with interruptions() as check, _folder(output) as folder:
        runs: list[RunRecord] = []
        found: dict[str, Any] = {"verdict": Verdict.UNUSABLE}
        hashes = {"file": hash_of(Path(options.file))}
        try:
            more = (f"FSDP1 again ({number})" for number in range(2, options.repeat + 1))
            for title in ("FSDP1", "FSDP2", "FSDP1 again", *more):
                job = Job(
                    title=title,
                    engine=Engine.FSDP2 if title == "FSDP2" else Engine.FSDP1,
                    options=options,
                    folder=str(folder / "logs" / title.lower().replace(" ", "-")),
                    reference=str(folder / "tensors"),
                    writes_reference=not runs,
                )
                runs.append(run_ranks(job, partial(show, title), check))
        except RunFailedError as problem:
            found["error"] = str(problem)
        except KeyboardInterrupt:
            found["verdict"] = Verdict.INTERRUPTED
        else:
            if options.load_path:
                hashes["checkpoint"] = checkpoint_hash(options.load_path, check)
            found = _result_fields(runs, options, folder if output else None)
        if runs:
            hashes["data"] = data_hash(runs[0])
        outcome = Outcome(options=options, runs=tuple(runs), versions=versions(), hashes=hashes, **found)
        if output is not None:
            _write(outcome, folder)
    return outcome


def _result_fields(runs: Sequence[RunRecord], options: Options, folder: Path | None) -> dict[str, Any]:
    """The outcome's fields that follow from the runs."""
    try:
        quantities, causes = judge(runs, tolerance=options.tolerance)
        picture = draw(folder / "report.png", runs) if folder else ""
    except Exception:  # a bug of ours: still write the report, which has the records of hours of runs
        error = f"the runs ended, but comparing them failed; report.json has them\n{traceback.format_exc()}"
        return {"verdict": Verdict.UNUSABLE, "error": error}
    verdict = Verdict.SAME if all(each.is_same for each in quantities) else Verdict.DIFFERENT
    return {"verdict": verdict, "quantities": quantities, "causes": causes, "picture": picture}


def _write(outcome: Outcome, folder: Path) -> None:
    try:
        (folder / "report.json").write_text(json.dumps(outcome.to_json(), indent=2) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(outcome.markdown(), encoding="utf-8")
    except OSError as error:
        raise RunFailedError(
            f"the report was not written: {error}; the records of the runs are in {folder / 'logs'}"
        ) from error


def _check(options: Options, output: Path | None) -> None:
    problems = []
    package, extra = ("llmfoundry", "foundry") if options.is_yaml else ("composer", "composer")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # without origin: a folder of that name
        problems.append(f"{options.file}: {package} is not installed: pip install 'composer-fsdp2[{extra}]'")
    if options.is_yaml:
        problems += [f"{each}: a YAML takes key=value" for each in options.arguments if "=" not in each]
    if options.load_path and "://" not in options.load_path and not Path(options.load_path).exists():
        problems.append(f"--load-path {options.load_path}: no such file or folder")
    if output is not None:
        parent, report = output.absolute().parent, output / "report.md"
        if not parent.is_dir():
            problems.append(f"-o {output}: {parent} is no folder")
        elif not os.access(parent, os.W_OK):
            problems.append(f"-o {output}: {parent} cannot be written")
        elif output.exists() and not (output.is_dir() and not any(output.iterdir())):
            # Do not overwrite an earlier report, which may be signed.
            exists = report if report.exists() else output
            problems.append(
                f"-o {output}: {exists} exists and is not overwritten; give another folder, or move it away"
            )
    if problems:
        raise ConfigError("\n".join(problems))


@contextlib.contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    if output is None:
        with tempfile.TemporaryDirectory(prefix="composer-fsdp2-") as folder:
            yield Path(folder)
        return
    output.mkdir(exist_ok=True)
    try:
        yield output.absolute()
    finally:
        shutil.rmtree(output.absolute() / "tensors", ignore_errors=True)
