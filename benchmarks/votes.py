"""What it takes all ranks to compare a number in the midst of a step: votes of automatic microbatching, and the guard.

    python benchmarks/votes.py
    python benchmarks/votes.py --ranks 2 8 --json

Two ways in the same processes, in turn: ours (local sockets within a node, rounds over gloo between the nodes' first
ranks) with all ranks on one node and as if there were four of them, and gloo's all-reduce, which goes around a ring of
all ranks. Beside the times, how many messages follow one another, at any number of ranks. Exit code 0, or 1 if a bar
does not hold.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import report
import torch
import torch.distributed as dist
from launch import on_ranks
from report import Bar, machine, markdown

from composer_fsdp2.training.control import Question, connect

RANKS = (2, 4, 8, 16, 32)
MANY_RANKS = (64, 512, 1024)
NUM_NODES = 4
GPUS_A_NODE = 8


@dataclass(frozen=True, slots=True)
class Options:
    """What one start of the ranks measures."""

    votes: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=report.count, nargs="+", default=RANKS)
    parser.add_argument("--votes", type=report.count, default=200, help="of each way")
    given = parser.parse_args(arguments)
    # Forked from this process, which has imported everything: 32 ranks would import torch for minutes.
    seconds = {
        num_ranks: on_ranks(measure, num_ranks, "cpu", Options(given.votes), start_method="fork")
        for num_ranks in given.ranks
    }
    in_sequence = {num_ranks: messages_in_sequence(num_ranks) for num_ranks in (*given.ranks, *MANY_RANKS)}
    bars = [
        Bar(f"{num_ranks} ranks on one node: at most the ring's time", f"{ratio:.2f}", ratio <= 1)
        for num_ranks, each in seconds.items()
        for ratio in [each["one node"] / each["ring"]]
    ]
    summary = {"seconds": seconds, "messages": in_sequence}
    return report.conclude(given, bars, summary=summary, text=_text(seconds, in_sequence))


def measure(options: Options) -> dict[str, float]:
    """Median seconds of each way, on rank 0. Called on all ranks."""
    ways = {"one node": _ours(1), "four nodes": _ours(NUM_NODES), "ring": _ring()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(10 + options.votes):
        for name, vote in ways.items():
            dist.barrier()
            start = time.perf_counter()
            vote()
            if number >= 10:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _ours(num_nodes: int) -> Callable[[], Any]:
    ranks_a_node = -(-dist.get_world_size() // num_nodes)
    connected = connect(f"host {dist.get_rank() // ranks_a_node}")
    question = Question("the benchmark", "")
    return lambda: connected.largest(question, "a vote", [0])


def _ring() -> Callable[[], Any]:
    group, number = dist.new_group(backend="gloo"), torch.zeros(1, dtype=torch.int64)
    return lambda: dist.all_reduce(number, dist.ReduceOp.MAX, group)


def messages_in_sequence(num_ranks: int) -> dict[str, int]:
    """How many follow one another, on nodes of 8: counted while simulated ranks tell each other what they heard."""
    to_first_and_back = 2 if num_ranks > 1 else 0
    between_nodes = _rounds_until_all_know(-(-num_ranks // GPUS_A_NODE))
    return {"ours": to_first_and_back + between_nodes, "ring": _hops_until_all_know(num_ranks)}


def _rounds_until_all_know(num_nodes: int) -> int:
    """Between the nodes' first ranks: in each round every one tells another, twice as far off each time."""
    heard = [{place} for place in range(num_nodes)]
    rounds = 0
    while any(len(each) < num_nodes for each in heard):
        heard = [heard[place] | heard[(place - (1 << rounds)) % num_nodes] for place in range(num_nodes)]
        rounds += 1
    return rounds


def _hops_until_all_know(num_ranks: int) -> int:
    """Around a ring: each adds its own to what it got and passes it on; then the whole goes around once more."""
    heard = [{place} for place in range(num_ranks)]
    hops = 0
    while any(len(each) < num_ranks for each in heard):
        place = hops % num_ranks
        heard[(place + 1) % num_ranks] |= heard[place]
        hops += 1
    return hops


def _text(seconds: dict[int, dict[str, float]], in_sequence: dict[int, dict[str, int]]) -> str:
    measured = markdown(
        ["ranks", "ours, one node", "ours, four nodes", "gloo's ring", "one node / ring", "four nodes / ring"],
        [
            [
                str(num_ranks),
                *(f"{1e3 * of_way:.2f} ms" for of_way in each.values()),
                *(f"{each[name] / each['ring']:.2f}" for name in ("one node", "four nodes")),
            ]
            for num_ranks, each in seconds.items()
        ],
    )
    counted = markdown(
        [f"ranks, {GPUS_A_NODE} a node", "messages one after the other", "around a ring"],
        [[str(num_ranks), str(each["ours"]), str(each["ring"])] for num_ranks, each in in_sequence.items()],
    )
    return f"{machine()}\n\n{measured}\n\n{counted}"


if __name__ == "__main__":
    sys.exit(main())
