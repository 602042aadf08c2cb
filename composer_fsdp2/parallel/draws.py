"""Ranks that split layers draw the same random numbers.

[Note: same draws] What a layer plan leaves whole, each rank of a group along the tensor axis computes whole. A dropout
there must drop the same elements on all of them: else split layers add up parts of different inputs, and what each rank
holds whole gets a gradient of its own and drifts apart, with finite losses and without an error. Composer seeds each
rank with a number of its own. So the ranks of a group go on from the random states of their first one: torch's, numpy's
(of which Composer's GyroDropout draws) and Python's. Inside of what is split, each drops its own features by the same
pattern.
"""

import torch.distributed as dist

from composer_fsdp2.sharding.agree import gather
from composer_fsdp2.sharding.random_states import random_states, set_random_states
from composer_fsdp2.training.run import BatchGroup


def draw_alike(block: BatchGroup) -> None:
    """Give the ranks that split layers the random states of the first of them: of all generators in use.

    Called on all ranks of the block: after sharding, and before batches that are shared. Sends 15 kB a rank.
    """
    if block.tensor_degree == 1:
        return
    index = block.ranks.index(dist.get_rank())
    set_random_states(gather(random_states(), block.group)[index - index % block.tensor_degree])
