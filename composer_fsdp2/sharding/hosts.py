"""Which ranks share a host, and with it a disk and host memory."""

import socket
import uuid
from pathlib import Path

from composer_fsdp2.sharding.agree import all_gather_object


def this_host() -> str:
    """Differs between hosts, also where two of them have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else uuid.getnode()}"


def first_ranks_of_hosts() -> list[int]:
    """For each rank, the first one on its host. Called on all ranks; gathers their hosts' names."""
    hosts = all_gather_object(this_host())
    return [hosts.index(host) for host in hosts]
