"""Which ranks share a host, and with it a disk and host memory."""

import socket
import uuid
from pathlib import Path

import torch.distributed as dist

from composer_fsdp2.sharding.agree import gather


def this_host() -> str:
    """Differs between hosts, also where two of them have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else uuid.getnode()}"


def first_ranks_of_hosts() -> list[int]:
    """For each rank, the first one on its host. Called on all ranks; gathers their hosts' names."""
    hosts = gather(this_host())
    return [hosts.index(host) for host in hosts]


def ranks_of_host() -> list[int]:
    """The ranks on this host, in order. Called on all ranks; gathers their hosts' names."""
    firsts = first_ranks_of_hosts()
    own = firsts[dist.get_rank() if dist.is_initialized() else 0]
    return [rank for rank, first in enumerate(firsts) if first == own]
