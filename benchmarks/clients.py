"""Libraries that train with FSDP1's class, compared on FSDP1 and on ours.

    python benchmarks/clients.py                     # all that is installed
    python benchmarks/clients.py Fabric Lightning    # some
    python benchmarks/clients.py --write             # benchmarks/clients.md, too

Each script of tests/fsdp/clients.py is started on two ranks, unchanged and with ``python -m composer_fsdp2 run``; each
resumes from its own checkpoint, and from that of the other. Releases other than the installed ones are in ``.others``
(``make test-others``). Needs no GPU and no network. Exit code 0, or 1 if a difference exceeds its limit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from report import markdown

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from fsdp.clients import CLIENTS, Client, Trained  # type: ignore[import-not-found] # noqa: E402

PAGE = Path(__file__).with_suffix(".md")
# By release in .others, or None for the installed one: the clients that need it.
RELEASES: dict[str | None, tuple[str, ...]] = {
    None: tuple(name for name in CLIENTS if name != "SFTTrainer"),
    "accelerate-1.15.0": tuple(name for name in CLIENTS if name.startswith(("accelerate", "Trainer"))),
    "trl-0.17.0": ("SFTTrainer",),
}
LIMIT = 1e-6
# Each block of T5's decoder reads the encoder's output. fully_shard sums its gradient by block, FSDP1 sequentially:
# another order, with different rounding in bf16. tests/fsdp/test_clients.py computes both in one order.
LIMITS = {"T5 bf16": 0.05}


TEXT = """# Clients of FSDP1's class

Written by `python benchmarks/clients.py --write`: each script of tests/fsdp/clients.py on two CPU ranks, as it is and
by `python -m composer_fsdp2 run`. The largest relative differences of losses and gradient norms, and of parameters, of
four runs from the same on FSDP1: trained, resumed from its own checkpoint, resumed from FSDP1's, and FSDP1 resumed from
ours.

{table}

torch {torch}, {today}. Of `bf16 before`, parameters are in bf16 before mixed precision, and accelerate upcasts them.
T5 in bf16: each block of the decoder reads the encoder's output; `fully_shard` adds up its gradient by block, FSDP1 in
one sequence, which rounds otherwise; in the same order both are equal. accelerate 1.8.1 resumes without sharded
optimizer state, on FSDP1 too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One client's results on ours, compared with FSDP1.

    Args:
        numbers, parameters: The largest relative difference of a loss or norm, and of a parameter.
    """

    name: str
    client: Client
    versions: dict[str, str]
    numbers: float
    parameters: float

    def holds(self) -> bool:
        return max(self.numbers, self.parameters) <= LIMITS.get(self.name, LIMIT)

    def cells(self) -> list[str]:
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        checkpoint, precision = self.client.checkpoint, self.client.precision
        return [packages, self.client.did, checkpoint, precision, f"{self.numbers:.1e}", f"{self.parameters:.1e}"]


def rows(release: str | None, names: list[str], folder: Path) -> Iterator[Row]:
    """Start the clients of one release. FSDP1 comes first and last, since each needs the other's checkpoints."""
    for own, sources in (("FSDP1", "nothing,FSDP1"), ("ours", "nothing,ours,FSDP1"), ("FSDP1", "ours")):
        (folder / own).mkdir(parents=True, exist_ok=True)
        start(release, own == "ours", [str(folder), own, sources, *names])
    # On ours, and the matching run on FSDP1.
    pairs = (
        ("ours", "nothing", "FSDP1", "nothing"),
        ("ours", "ours", "FSDP1", "FSDP1"),
        ("ours", "FSDP1", "FSDP1", "FSDP1"),
        ("FSDP1", "ours", "FSDP1", "FSDP1"),
    )
    for name in names:
        found = []
        for own, source, other, others_source in pairs:
            for rank in (0, 1):
                one, two = (
                    read(folder / system / f"{name} from {of} {rank}.pt")
                    for system, of in ((own, source), (other, others_source))
                )
                found.append(one["trained"].differences(two["trained"]))
        numbers, parameters = (max(each[part] for each in found) for part in (0, 1))
        yield Row(
            name=name, client=CLIENTS[name], versions=one["versions"], numbers=numbers, parameters=parameters
        )  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    found = torch.load(path, weights_only=True)
    return {**found, "trained": Trained(**found["trained"])}


def start(release: str | None, is_ours: bool, words: list[str]) -> None:
    paths = [ROOT, ROOT / "tests", *([] if release is None else [ROOT / ".others" / release])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["-m", "composer_fsdp2", "run", "-m", "fsdp.clients"] if is_ours else ["-m", "fsdp.clients"]
    done = subprocess.run(
        [*torchrun, *script, *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join([*script, *words])}\n{done.stdout}\n{done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    given = parser.parse_args()
    found: list[Row] = []
    for release, its in RELEASES.items():
        names = [name for name in its if not given.names or name in given.names]
        is_there = release is None or (ROOT / ".others" / release).is_dir()
        if missing := [name for name in names if not is_there or (release is None and CLIENTS[name].missing())]:
            print(f"not installed: {release or 'what these import'}: {', '.join(missing)}", file=sys.stderr)
        if names := [name for name in names if name not in missing]:
            with tempfile.TemporaryDirectory() as folder:
                found += rows(release, names, Path(folder))
    header = ["Packages", "What ran", "Checkpoint", "Precision", "Losses, norms", "Parameters"]
    table = markdown(header, [row.cells() for row in found])
    text = TEXT.format(table=table, torch=torch.__version__.split("+")[0], today=date.today())
    print(text)
    if given.write:
        PAGE.write_text(text)
    return int(not all(row.holds() for row in found))


if __name__ == "__main__":
    sys.exit(main())
