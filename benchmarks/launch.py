"""Start the ranks of one machine: ``on_ranks(function, num_ranks, device_type, argument)``."""

import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn

__all__ = ["on_ranks"]


def on_ranks(function: Callable[[Any], Any], num_ranks: int, device_type: str, argument: Any) -> Any:
    """Run ``function(argument)`` on ``num_ranks`` new processes with a process group; returns rank 0's result.

    Args:
            function: Top-level, because the ranks import it; its result is passed on as JSON.
        device_type: ``cpu`` (gloo, one thread a rank) or ``cuda`` (NCCL, one device a rank).
    Raises:
            SystemExit: a rank failed, with its traceback on stderr; or the machine has fewer devices than ranks.
    """
    if device_type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise SystemExit(f"each rank needs a CUDA device: {num_ranks} asked for, {torch.cuda.device_count()} visible")
    if device_type == "cpu":
        # Before the ranks import torch. More than one thread each would compete for the machine's cores. GPUs are
        # hidden, because Composer and the default mesh of fully_shard would use them.
        os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_rank, (function, num_ranks, device_type, folder, argument), nprocs=num_ranks)
        except ProcessExitedException as error:
            raise SystemExit(f"rank {error.error_index} failed") from None
        return json.loads(Path(folder, "result.json").read_text())


def _rank(
    rank: int, function: Callable[[Any], Any], num_ranks: int, device_type: str, folder: str, argument: Any
) -> None:
    """Never returns: if ranks destroy a gloo group one after the other, the last one may wait forever (torch 2.7)."""
    warnings.simplefilter("ignore")  # Composer's on dropped keys, and torch's on FSDP1.
    _set_rank_variables(rank, num_ranks)
    store: Any = dist.FileStore(str(Path(folder, "store")), num_ranks)  # type: ignore[attr-defined]
    try:
        _start_group(rank, num_ranks, device_type, store)
        result = function(argument)
        if rank == 0:
            Path(folder, "result.json").write_text(json.dumps(result))
        store.set(f"done {rank}", "")
        store.wait([f"done {each}" for each in range(num_ranks)])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _start_group(rank: int, num_ranks: int, device_type: str, store: Any) -> None:
    options: dict[str, Any] = {"store": store, "rank": rank, "world_size": num_ranks, "timeout": timedelta(minutes=10)}
    if device_type == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **options)
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by `timing.deterministic`
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **options)


def _set_rank_variables(rank: int, num_ranks: int) -> None:
    """Like torchrun; Composer reads them."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in own.items()})
