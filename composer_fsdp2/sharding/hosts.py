"""Determine which ranks share a host, and thus its disk and memory."""

import socket
import uuid
from pathlib import Path

from composer_fsdp2.sharding.agree import all_gather_object


def this_host() -> str:
    """An identifier of this host that is unique even if host names are not."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else uuid.getnode()}"


def first_ranks_of_hosts() -> list[int]:
    """For each rank, the first rank on its host. Called on all ranks; all-gathers their hosts' identifiers."""
    hosts = all_gather_object(this_host())
    return [hosts.index(host) for host in hosts]
