"""How long `composer-fsdp2 plan` takes for a Llama of 405 billion parameters on 1,024 ranks.

    python benchmarks/plan.py
    python benchmarks/plan.py --layers 32 --ranks 64 --rounds 5 --json

From a Hugging Face `config.json` that it writes itself. A round runs the whole command in a process of its own, imports
included, and once more the work alone, in this process, where everything is imported; the table shows the fastest and
the median. The bars are of processor time, which is all that a command of one thread takes on an idle machine, because
other work disturbs it less. Exit code 0, or 1 if a bar does not hold.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
from report import Bar, machine, markdown

ROOT = Path(__file__).resolve().parents[1]
MAX_COMMAND_S, MAX_WORK_S = 10.0, 2.0
# What a model's own file says nothing of.
SECTION = {"precision": "amp_bf16", "fsdp_config.activation_checkpointing": "true"}
NUM_LAYERS, RANKS, SEQUENCE, ROWS = 126, 1024, 8192, 1
# As Meta published it, less what does not change shapes.
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=report.count, default=NUM_LAYERS)
    parser.add_argument("--ranks", type=report.count, default=RANKS)
    parser.add_argument("--rounds", type=report.count, default=3)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps({**LLAMA_405B, "num_hidden_layers": given.layers}))
        planned, command = _commands(file, given.ranks, given.rounds)
        work = _work(file, given.ranks, given.rounds)
    summary = {"plan": planned, "command": command, "work": work}
    bars = [
        _bar("the command, imports included", command, MAX_COMMAND_S),
        _bar("without imports", work, MAX_WORK_S),
    ]
    return report.conclude(given, bars, summary=summary, text=_text(planned, summary))


def _bar(name: str, taken: dict[str, list[float]], limit: float) -> Bar:
    fastest = min(taken["processor_seconds"])
    return Bar(f"{name}: processor time below {limit:g} s", f"{fastest:.2f} s", fastest < limit)


def _commands(file: Path, ranks: int, rounds: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """What the command says, and what it takes."""
    words = [sys.executable, "-m", "composer_fsdp2", "plan", str(file), "--world-size", str(ranks), "--json"]
    words += ["--microbatch", str(ROWS), "--sequence", str(SEQUENCE), "--gpu", "h100", "--memory", "80GiB"]
    words += [f"{key}={value}" for key, value in SECTION.items()]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    taken: dict[str, list[float]] = {"seconds": [], "processor_seconds": []}
    for _ in range(rounds):
        before, start = os.times(), time.perf_counter()
        done = subprocess.run(words, cwd=ROOT, env=one_thread, text=True, capture_output=True)
        taken["seconds"].append(time.perf_counter() - start)
        after = os.times()
        taken["processor_seconds"].append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
        if done.returncode not in (0, 1):
            raise SystemExit(done.stderr)
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned, taken


def _work(file: Path, ranks: int, rounds: int) -> dict[str, list[float]]:
    """The same in this process, where a first one, which does not count, has imported everything."""
    sys.path.insert(0, str(ROOT))
    from composer_fsdp2.preflight.planned import Questions, plan_step
    from composer_fsdp2.preflight.read_run import read_run

    overrides = [f"{key}={value}" for key, value in SECTION.items()]
    taken: dict[str, list[float]] = {"seconds": [], "processor_seconds": []}
    for number in range(1 + rounds):
        start, processor_start = time.perf_counter(), time.process_time()
        run = read_run(file, world_size=ranks, microbatch=ROWS, sequence=SEQUENCE, overrides=overrides)
        json.dumps(plan_step(run, str(file), Questions()).to_json())
        if number:
            taken["seconds"].append(time.perf_counter() - start)
            taken["processor_seconds"].append(time.process_time() - processor_start)
    return taken


def _text(planned: dict[str, Any], summary: dict[str, Any]) -> str:
    run = planned["run"]
    rows = [
        [name, *(f"{of(summary[key][clock]):.2f} s" for clock in _CLOCKS for of in (min, statistics.median))]
        for name, key in (("the command", "command"), ("without imports", "work"))
    ]
    header = ["a plan", "processor time, least", "its median", "seconds, least", "their median"]
    return "\n".join(
        [
            f"{machine()}; {run['parameters'] / 1e9:.1f} billion parameters, {len(planned['units'])} units, "
            f"{run['world_size']} ranks, {run['microbatch_size']} × {run['sequence_length']} tokens",
            "",
            markdown(header, rows),
            "",
        ]
    )


_CLOCKS = ("processor_seconds", "seconds")


if __name__ == "__main__":
    raise SystemExit(main())
