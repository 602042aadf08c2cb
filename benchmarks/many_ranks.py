"""What grows with the number of ranks where all of them compare something: simulated, on one process.

    python benchmarks/many_ranks.py
    python benchmarks/many_ranks.py --ranks 512 --against REVISION    # one since the rooms of today, too

The CRC32s of a load, of which every rank has read some; and the process groups of single modules. Each function is
given what the other ranks would have sent, so what is measured is what one rank sends, receives and computes. Exit code
0, or 1 if a bar does not hold.
"""

import pickle
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import report
import torch.distributed as dist
from counting import Collectives
from report import Bar, machine, markdown
from revision import checked_out, imported_from
from setup import one_rank_of

RECORDS, UNITS = 2160, 80  # of 720 tensors with Adam's moments; of a model of 80 layers
RECORD_BYTES = 1 << 20
MOST = {
    "CRC32s: bytes of the others' on a rank": 16 << 20,
    "CRC32s: seconds of a rank": 1.0,
    "groups: bytes that a rank sends": 1024,
    "groups: seconds of a rank": 1.0,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=report.count, default=1024)
    report.add_revision(parser)
    given = parser.parse_args(arguments)
    result = {"ours": measure(given.ranks)}
    if given.against:
        with checked_out(given.against) as folder, imported_from(folder):
            try:
                result["revision"] = measure(given.ranks)
            except ModuleNotFoundError as error:
                parser.error(f"--against {given.against}: {error}; it had other modules, which its own benchmark knows")
    bars = [
        Bar(f"{name}: at most {most:,}", _formatted(name, result["ours"][name]), result["ours"][name] <= most)
        for name, most in MOST.items()
    ]
    return report.conclude(given, bars, summary=result, text=_text(given.ranks, result))


def measure(num_ranks: int) -> dict[str, float]:
    """By what it is; seconds are of processor time."""
    received, crc_seconds = _crc32s(num_ranks)
    sent, group_seconds = _groups(num_ranks)
    return {
        "CRC32s: bytes of the others' on a rank": received,
        "CRC32s: seconds of a rank": crc_seconds,
        "groups: bytes that a rank sends": sent,
        "groups: seconds of a rank": group_seconds,
    }


def _crc32s(num_ranks: int) -> tuple[int, float]:
    """What a rank has of the others' at once, and what it takes to receive all of it and to judge its part."""
    from composer_fsdp2.checkpoint.load import content

    own = _read_by(0, num_ranks)
    # Each of the others has read what this rank has: the fake group's gathers repeat what was sent.
    with one_rank_of(num_ranks):
        seconds, _ = _timed(lambda: content._judged(content._regrouped(own)))
        with Collectives() as seen:
            content._regrouped(own)
    gathers = seen.counts["_allgather_base_"]
    return gathers["bytes"] // gathers["calls"], seconds


def _read_by(rank: int, num_ranks: int) -> Any:
    from composer_fsdp2.checkpoint.archive.torch_archive import Blob
    from composer_fsdp2.checkpoint.load import content
    from composer_fsdp2.checkpoint.records import ReadRange

    length = RECORD_BYTES // num_ranks
    start, crc32 = rank * length, zlib.crc32(bytes(length))
    parts = [
        ReadRange(
            blob=Blob(path=Path("folder/file.pt"), offset=number * RECORD_BYTES, num_bytes=RECORD_BYTES, crc32=number),
            start=start,
            end=start + length,
            crc32=crc32,
        )
        for number in range(RECORDS)
    ]
    return content._collected(parts, Path("folder/file.pt"))


def _groups(num_ranks: int) -> tuple[int, float]:
    """What a rank sends of its units' groups, and what it takes to look at all ranks'."""
    from composer_fsdp2.config.mesh import GroupRule, MeshSpec, RankGroups
    from composer_fsdp2.sharding import meshes

    consecutive, strided = (RankGroups(rule=rule, number=8) for rule in (GroupRule.CONSECUTIVE, GroupRule.STRIDED))
    spec = MeshSpec.of_groups(consecutive, strided)

    def tables(rank: int, gather: Callable[[Any], list[Any]]) -> Any:
        with (
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(dist, "get_world_size", return_value=num_ranks),
            mock.patch.object(meshes, "gather", gather),
        ):
            return meshes._group_tables([spec] * UNITS)

    def sent_by(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            raise _Sent(value)

        try:
            tables(rank, gather)
        except _Sent as sent:
            return sent.value

    of_ranks = [sent_by(rank) for rank in range(num_ranks)]
    seconds, _ = _timed(lambda: tables(0, lambda value: of_ranks))
    return max(len(pickle.dumps(sent)) for sent in of_ranks), seconds


class _Sent(Exception):
    """Ends a function where it would communicate."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def _text(num_ranks: int, result: dict[str, dict[str, float]]) -> str:
    names = list(result["ours"])
    rows = [[name, *(_formatted(name, each[name]) for each in result.values())] for name in names]
    titles = {"ours": "ours", "revision": "the revision's"}
    head = [f"{num_ranks} ranks, simulated; {RECORDS} records, {UNITS} units", *(titles[name] for name in result)]
    return f"{machine()}\n\n{markdown(head, rows)}"


def _formatted(name: str, value: float) -> str:
    return f"{value:.3f} s" if "seconds" in name else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
