"""How long `composer-fsdp2 plan --suggest` takes to compare thousands of settings of a Llama of 8 billion parameters.

    python benchmarks/suggest.py
    python benchmarks/suggest.py --ranks 256 --rows 64 --rounds 5 --json

From a Hugging Face `config.json` that it writes itself. Every setting that may be proposed is compared, for a memory
that only some of them fit; microbatches are traced anew in each round. The table shows the fastest round and the
median. The bar is of processor time, which is all that one thread takes on an idle machine. Exit code 0, or 1 if the
bar does not hold or there were fewer settings than it is about.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
from plan import LLAMA_405B
from report import Bar, machine, markdown

ROOT = Path(__file__).resolve().parents[1]
MAX_SEARCH_S, NUM_CHOICES = 5.0, 5000
RANKS, SEQUENCE, ROWS, MEMORY_BYTES = 64, 8192, 32, 40 * 2**30
LLAMA_8B = LLAMA_405B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=report.count, default=RANKS)
    parser.add_argument("--rows", type=report.count, default=ROWS, help="of a rank's batch")
    parser.add_argument("--rounds", type=report.count, default=3)
    given = parser.parse_args(arguments)
    summary = _searched(given.ranks, given.rows, given.rounds)
    fastest = min(summary["processor_seconds"])
    bars = [
        Bar(f"{NUM_CHOICES:,} settings or more", f"{summary['choices']:,}", summary["choices"] >= NUM_CHOICES),
        Bar(f"traces and search: processor time below {MAX_SEARCH_S:g} s", f"{fastest:.2f} s", fastest < MAX_SEARCH_S),
    ]
    return report.conclude(given, bars, summary=summary, text=_text(given.ranks, given.rows, summary))


def _searched(ranks: int, rows: int, rounds: int) -> dict[str, Any]:
    """In this process, where a first round, which does not count, has imported everything."""
    sys.path.insert(0, str(ROOT))
    from composer_fsdp2.estimate.suggest import suggest_settings
    from composer_fsdp2.preflight.read_run import read_run
    from composer_fsdp2.preflight.suggested_edits import subject_of

    taken: dict[str, Any] = {"seconds": [], "processor_seconds": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(LLAMA_8B))
        run = read_run(file, world_size=ranks, microbatch=rows, sequence=SEQUENCE, overrides=["precision=amp_bf16"])
        for number in range(1 + rounds):
            start, processor_start = time.perf_counter(), time.process_time()
            found = suggest_settings(subject_of(run), MEMORY_BYTES)
            if number:
                taken["seconds"].append(time.perf_counter() - start)
                taken["processor_seconds"].append(time.process_time() - processor_start)
    return {"choices": found.num_points, "proposals": [each.to_json() for each in found.proposals], **taken}


def _text(ranks: int, rows: int, summary: dict[str, Any]) -> str:
    row = [
        f"{summary['choices']:,}",
        *(f"{of(summary[clock]):.2f} s" for clock in ("processor_seconds", "seconds") for of in _OF),
    ]
    header = ["settings", "processor time, least", "its median", "seconds, least", "their median"]
    where = f"{machine()}; 8 billion parameters, {ranks} ranks, {rows} rows of {SEQUENCE} tokens a rank"
    return "\n".join([where, "", markdown(header, [row]), ""])


_OF = (min, statistics.median)


if __name__ == "__main__":
    raise SystemExit(main())
