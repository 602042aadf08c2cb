"""PyTorch's own tests of FSDP1 on CPU ranks, with FSDP1 itself and with our class in its place; writes ``upstream.md``.

The tests are not part of this repository. Debian's source package has them (torch 2.6; they run with later torches):

    apt-get source --download-only pytorch   # with a deb-src line in sources.list
    tar xf pytorch_2.6.0+dfsg.orig.tar.xz --wildcards '*/test/distributed/fsdp/*'
    python tests/fsdp/upstream.py --source pytorch-v2.6.0/test/distributed/fsdp

A temporary copy is adapted by ``ADAPTED`` and by the replacements of ``play_gpus``. Each file runs in its own pytest,
with this file as a plugin.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

AGAINST = ("fsdp1", "ours")
LIMIT_S = 180
TABLE = Path(__file__).with_suffix(".md")
HEAD = """# PyTorch's own tests of FSDP1, under our class

Written by `upstream.py`, which documents how the tests are obtained and adapted: torch 2.6's tests, run on {date}
with torch {torch} on a CPU ({cores} cores, 2 gloo ranks). Texts of errors, and warnings, are not compared.

"""

# Text of the tests for GPUs, and for the CPU.
ADAPTED: list[tuple[str, str]] = [
    (r'torch\.device\("cuda", [^()]*(\(\))?\)', 'torch.device("cpu")'),
    (r"([\"'])cuda\1", '"cpu"'),
    (r"([\"'])nccl\1", '"gloo"'),
    (r"\.cuda\([^()]*\)", '.to("cpu")'),
    (r"\.to\((self\.)?rank\)", '.to("cpu")'),
    (r"torch\.device\((self\.)?rank\)", 'torch.device("cpu")'),
    (r"device_ids=\[[^\]]*\]", "device_ids=None"),
    (r'"device_ids": \[[^\]]*\]', '"device_ids": None'),
    (r'device_id=(self\.rank|0|"cpu")\b', 'device_id=torch.device("cpu")'),
    (r'"device_id": (self\.rank|0)\b', '"device_id": torch.device("cpu")'),
    (r"DummyProcessGroup\([^()]*\)", "upstream.alone()"),
    (r"\A", "import upstream\n"),
    (r"(not TEST_CUDA|not TEST_MULTIGPU|torch\.cuda\.device_count\(\) < \d)", "False"),
    (r"torch\.cuda\.device_count\(\)", "2"),
]


PASSES, DIFFERS, FLAT = "passes with both", "differs as documented", "about flat parameters"
NEEDS_GPU, FAILS, NOT_RUN = "not with FSDP1 itself on a CPU", "fails", "not run"
CLASSES = (PASSES, DIFFERS, FLAT, NEEDS_GPU, FAILS, NOT_RUN)

# Under our class, ranks outside of a process group also call the constructor; here they wait for the others.
WAITS = r"halve_world_size|test_(scatter|shard)_full_optim_state_dict_transformer"

# For a test that FSDP1 passes: text in ``file::test`` or in its error, its class, and the reason.
_HANDLES = "reads a flat parameter, its handle or FSDP1's internal state"
_DTENSORS = "parameters, gradients and sharded state are DTensors: compare `.full_tensor()`, or `.to_local()`"
REASONS: list[tuple[str, str, str]] = [
    ("LOCAL_STATE_DICT", FLAT, "LOCAL_STATE_DICT contains flat parameters; the error names SHARDED_STATE_DICT"),
    (
        "fully_shard has no flat parameters|no attribute '_flat_param'",
        FLAT,
        f"{_HANDLES}; the error names the replacement",
    ),
    (
        "test_(fsdp_comm_hooks|fsdp_exec_order|fsdp_flatten_params|fsdp_fx)::",
        FLAT,
        "communication hooks, execution order, flat parameters or fx",
    ),
    (
        "fsdp_device_id_use_index|unsafe_setattr|backward_reshard_hooks|ignored_modules_transformer|param_data_no_shard",
        FLAT,
        _HANDLES,
    ),
    ("test_fsdp_namedtuple|TestHooks", FLAT, "looks for FSDP1's own hooks"),
    ("test_fsdp_backward_prefetch::", FLAT, "records the order of prefetches by FSDP1's own functions"),
    ("test_fsdp_hybrid_shard_basic_setup", FLAT, "counts collectives by flat parameters"),
    ("test_no_sync_correctness", FLAT, "compares with gradients that are flat within no_sync"),
    (WAITS, DIFFERS, "ranks outside of process_group call the constructor too; not run, since it would wait for them"),
    ("mixed torch.Tensor and DTensor|have a sharding strategy registered|aten.allclose", DIFFERS, _DTENSORS),
    ("'DTensor' object has no attribute '_?local_shards'|sharded_tensor_state_dict_identical", DIFFERS, _DTENSORS),
    (
        "test_hsdp_init_with_device_mesh",
        DIFFERS,
        "a DTensor's mesh has dimension names even if the passed mesh has none",
    ),
    ("before by parallelize_module", DIFFERS, "tensor parallelism first: the error names prepare_fully_shard"),
    ("writeback_between_fwd_and_bwd", DIFFERS, "replacing a parameter between forward and backward raises no error"),
    (
        "test_full_precision_in_eval|test_eval_root_cast",
        DIFFERS,
        "FSDP_USE_FULL_PREC_IN_EVAL has no effect; a warning reports it",
    ),
    (
        "keep_low_precision_grads",
        DIFFERS,
        "keep_low_precision_grads requires parameters of that dtype, and raises otherwise",
    ),
    (
        "test_apply_in_summon_raises|unshard_params_from_backward|(forward|submodule)_raises",
        DIFFERS,
        "no error, or one of another type: `summon_full_params` may be nested, and be entered before a unit's backward",
    ),
    ("raises_manual_wrap_hybrid_shard", DIFFERS, "no error: HYBRID_SHARD by hand shards by node, as with a policy"),
    ("test_hsdp_save_load_state_dict", DIFFERS, "`process_group` is a group of the same ranks, not the passed object"),
    ("test_diff_ignored_modules_across_ranks", DIFFERS, "all ranks must ignore the same modules; otherwise an error"),
    ("test_ignored_states_check", DIFFERS, "no error: ignored_states may contain both modules and parameters"),
    (
        "test_unshard_async",
        DIFFERS,
        "calls the private `_unshard(async_op)`: FSDP2's public one is `unshard(async_op)`",
    ),
    (
        "the wrapped module itself is ignored",
        DIFFERS,
        "ignoring the wrapped module itself is an error instead of a warning",
    ),
    ("test_frozen_params", DIFFERS, "no error: with use_orig_params=False frozen and trainable ones may share a unit"),
    ("test_homogeneous_attributes", DIFFERS, "no error: instances of one model may differ in more arguments"),
    ("test_fsdp_ignored_module_meta", DIFFERS, "an ignored module on the meta device is an error"),
    (
        "test_fsdp_init_with_device_mesh",
        DIFFERS,
        "_use_dtensor, a private field, has no effect: all are DTensors",
    ),
    (
        "unmanaged_params",
        DIFFERS,
        "no error: a new parameter may lack state, because no flat parameter must be complete",
    ),
    ("test_compatible_with_trec", DIFFERS, "torchrec's optimizers key their state by name; the error explains it"),
    ("test_with_grads_core", DIFFERS, "between forward and backward `parameters()` are the unsharded ones"),
]

# ---------------------------------------------------------------------------------------------------------------------
# The plugin


def pytest_configure(config: Any) -> None:
    if importlib.util.find_spec("expecttest") is None:  # torch's helpers import it, and these tests do not use it
        sys.modules["expecttest"] = ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    play_gpus()
    if os.environ["UPSTREAM_AGAINST"] == "ours":
        play_fsdp1()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Under our class, tests that FSDP1 passes, without those that wait forever; with ``--sample`` some parameters of
    each."""
    if os.environ["UPSTREAM_AGAINST"] == "ours":
        fsdp1 = read(Path(os.environ["UPSTREAM_RESULTS"].replace(".ours.", ".fsdp1.")))
        passed = {test for test, found in fsdp1.items() if found["outcome"] == "passed"}
        own = {each: each.nodeid.partition("::")[2] for each in items}
        items[:] = [each for each in items if own[each] in passed and not re.search(WAITS, own[each])]
    if not items or not (num := int(os.environ.get("UPSTREAM_SAMPLE", "0"))):
        return
    by_function: dict[str, list[Any]] = {}
    names = sorted(set(re.findall(r"def (test_\w+)", items[0].path.read_text())), key=len)
    for item in items:
        by_function.setdefault(next(n for n in reversed(names) if item.name.startswith(n)), []).append(item)
    items[:] = [each for of in by_function.values() for each in of[:: -(-len(of) // num)]]


def play_gpus() -> None:
    """Makes torch's helpers start 2 gloo ranks by fork where they require GPUs."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal import common_distributed, common_fsdp

    def lifted(*unused: Any) -> Any:
        return lambda function: function

    common_distributed.skip_if_lt_x_gpu = lifted
    common_distributed.requires_nccl = lambda: lambda function: function
    common_fsdp.DEVICE_COUNT = 2

    def start(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = start

    class OnCPU(DistributedDataParallel):
        def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
            super().__init__(module, **options)

    common_fsdp.DDP = torch.nn.parallel.DistributedDataParallel = OnCPU
    original = FullyShardedDataParallel.__init__

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, device_id: Any = None, **options: Any) -> None:
        # FSDP1 refuses to choose the CPU implicitly.
        original(self, *args, device_id=torch.device("cpu") if device_id is None else device_id, **options)

    FullyShardedDataParallel.__init__ = initialize
    parity = common_fsdp.FSDPTest._test_fsdp_parity

    @functools.wraps(parity)
    def test_parity(self: Any, *args: Any, **options: Any) -> None:
        # Moving an offloaded model to the GPU raises; on the CPU there is no such move.
        parity(self, *args, **options | {"device_init_mode": common_fsdp.DEVICEInitMode.DEVICE_BEFORE})

    common_fsdp.FSDPTest._test_fsdp_parity = test_parity
    # FSDP1 refuses to broadcast from the CPU, also over gloo.
    _init_utils._check_module_states_for_sync_module_states = lambda module: None
    torch.Tensor.pin_memory = lambda self, *unused: self
    torch.cpu.Stream.synchronize = lambda self: None
    torch.cpu.device_count = lambda: 2
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "_sleep"):
        setattr(torch.cuda, name, lambda *unused: None)


def play_fsdp1() -> None:
    from torch.testing._internal.common_utils import TestCase

    import composer_fsdp2
    from composer_fsdp2.fsdp import FullyShardedDataParallel

    composer_fsdp2.install_fsdp()
    # torch's helpers assert this after each run of some steps.
    FullyShardedDataParallel._assert_state = lambda self, state: None
    # Texts of errors are ours, so only the fact that one is raised is compared. Warnings are not.
    raises = TestCase.assertRaisesRegex

    def assert_raises(self: Any, expected_exception: Any, expected_regex: Any, *args: Any, **options: Any) -> Any:
        return raises(self, expected_exception, "", *args, **options)

    def assert_warns(self: Any, *unused: Any, **options: Any) -> Any:
        return contextlib.nullcontext()

    TestCase.assertRaisesRegex = assert_raises
    TestCase.assertWarnsRegex = TestCase.assertWarns = assert_warns


def alone() -> Any:
    """A group of one rank, for tests that make one without ``init_process_group``."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        original = dist.init_process_group

        def init_process_group(*args: Any, **options: Any) -> None:
            """For a test, or its ranks, with groups of their own."""
            dist.destroy_process_group()
            dist.init_process_group = original
            original(*args, **options)

        dist.init_process_group = init_process_group
    return dist.group.WORLD


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        if report.when == "teardown":
            return
        text = str(report.longrepr[2] if report.skipped else report.longrepr or "")
        line = {"id": report.nodeid, "outcome": report.outcome, "text": text, "s": round(report.duration, 1)}
        with Path(os.environ["UPSTREAM_RESULTS"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# The command


def adapted(text: str) -> str:
    for pattern, new in ADAPTED:
        text = re.sub(pattern, new, text)
    return text


def run(file: Path, against: str, results: Path, k: str, sample: int) -> None:
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[2]), str(file.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT_S),
        "UPSTREAM_AGAINST": against,
        "UPSTREAM_SAMPLE": str(sample),
        "UPSTREAM_RESULTS": str(results),
    }
    options = ["-q", "-p", here.stem, "-p", "no:cacheprovider", f"--rootdir={file.parent}", f"--timeout={LIMIT_S + 30}"]
    command = [sys.executable, "-m", "pytest", *options, *(["-k", k] if k else []), str(file)]
    with results.with_suffix(".log").open("w") as log:
        subprocess.run(command, env=environment, cwd=file.parent, stdout=log, stderr=subprocess.STDOUT)


def read(results: Path) -> dict[str, dict[str, Any]]:
    """By test: its outcome and text."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {found["id"].partition("::")[2]: found for found in map(json.loads, lines)}


def judge(file: str, test: str, fsdp1: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, str]:
    """A test's class, and the reason."""
    if fsdp1["outcome"] != "passed":
        return NEEDS_GPU, ""
    if ours.get("outcome") == "passed":
        return PASSES, ""
    text = ours.get("text", "")
    for pattern, kind, why in REASONS:
        if re.search(pattern, f"{file}::{test}\n{text}"):
            return kind, why
    if not ours:
        return NOT_RUN, ""
    errors = re.findall(r"^E +(\w[\w.]*(?:Error|Exception).*)$", text, re.MULTILINE) or [text[-200:]]
    return FAILS, errors[-1].replace("|", "/")[:200]


def table(source: Path, results: Path) -> str:
    """All functions of all files, by class."""
    sections, totals, functions = [], Counter[str](), 0
    for file in sorted(source.glob("test_*.py")):
        fsdp1, ours = (read(results / f"{file.stem}.{against}.jsonl") for against in AGAINST)
        names = re.findall(r"^    def (test_\w+)", file.read_text(), re.MULTILINE)
        of: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
        for test, found in fsdp1.items():
            case = test.rpartition("::")[2]
            name = max((each for each in names if case.startswith(each)), key=len)
            of[name].append(judge(file.stem, test, found, ours.get(test, {})))
        rows = []
        for name, judged in of.items():
            counts = Counter(kind for kind, _ in judged) or Counter({NEEDS_GPU: 1})
            totals.update(counts)
            cells = [f"{counts[kind]} of {counts.total()}" if counts[kind] else "" for kind in CLASSES]
            whys = "; ".join(dict.fromkeys(why for _, why in judged if why))
            rows.append(f"| {name} | {' | '.join(cells)} | {whys} |")
        functions += len(of)
        head = f"| {file.stem} | {' | '.join(CLASSES)} | why |\n|---|{'---|' * len(CLASSES)}---|"
        sections.append("\n".join([head, *rows]))
    said = ", ".join(f"{totals[kind]} {kind}" for kind in CLASSES)
    return f"{functions} functions, {totals.total()} tests: {said}.\n\n" + "\n\n".join(sections) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="torch's folder test/distributed/fsdp")
    parser.add_argument("--against", choices=AGAINST)
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("--files", nargs="*", help="names without .py; all by default")
    parser.add_argument("--sample", type=int, default=0, help="at most so many of a function's parameters")
    parser.add_argument("--results", type=Path, help="a folder for what each test says")
    parser.add_argument("--table-only", action="store_true", help="write the table of an earlier --results")
    options = parser.parse_args()
    results = options.results or Path(tempfile.mkdtemp())
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted(options.source.glob("test_*.py")):
            if options.table_only or (options.files and source.stem not in options.files):
                continue
            file = Path(folder, source.name)
            file.write_text(adapted(source.read_text()))
            for against in [options.against] if options.against else AGAINST:
                to = results / f"{source.stem}.{against}.jsonl"
                to.unlink(missing_ok=True)
                run(file, against, to, options.k, options.sample)
                found = read(to).values()
                print(source.stem, against, dict(Counter(each["outcome"] for each in found)), flush=True)
    if options.table_only or not (options.against or options.k or options.files):
        TABLE.write_text(HEAD.format(**about()) + table(options.source, results))


def about() -> dict[str, str]:
    import torch

    return {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "cores": str(os.cpu_count())}


if __name__ == "__main__":
    main()
