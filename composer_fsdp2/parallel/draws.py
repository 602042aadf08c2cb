"""Ranks that split layers draw the same random numbers.

[Note: same draws] What a layer plan leaves whole, each rank of a group along the tensor axis computes whole. A dropout
there must drop the same elements on all of them: else split layers add up parts of different inputs, and what each rank
holds whole gets a gradient of its own and drifts apart, with finite losses and without an error. Composer seeds each
rank with a number of its own. So the ranks of a group go on from the random state of their first one. Inside of what is
split, each drops its own features by the same pattern.
"""

import torch
import torch.distributed as dist

from composer_fsdp2.parallel.batches import DataBlock


def draw_alike(block: DataBlock) -> None:
    """Give the ranks that split layers torch's random state of the first of them, of the host and of the device.

    Called on all ranks of the block: after sharding, and before batches that are shared. Sends 5 kB a rank.
    """
    if block.tensor_degree == 1:
        return
    own = torch.get_rng_state()
    has_device = torch.cuda.is_available() and torch.cuda.is_initialized()
    if has_device:
        own = torch.cat([own, torch.cuda.get_rng_state()])
    states = [torch.empty_like(own) for _ in block.ranks]
    dist.all_gather(states, own, block.group)
    index = block.ranks.index(dist.get_rank())
    first = states[index - index % block.tensor_degree]
    size = len(torch.get_rng_state())
    torch.set_rng_state(first[:size])
    if has_device:
        torch.cuda.set_rng_state(first[size:])
