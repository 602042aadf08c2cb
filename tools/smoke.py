"""A step on two ranks from an installed wheel, compared with one process: `torchrun --standalone --nproc-per-node
2`."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import composer_fsdp2


def main() -> None:
    assert Path(composer_fsdp2.__file__).parts[-3] == "site-packages", composer_fsdp2.__file__
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))  # nested in a child, as in Composer
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for block in model[0]:
        block._fsdp_wrap = True
    composer_fsdp2.prepare_fully_shard(model, optimizer, {"mixed_precision": "FULL"}, device="cpu")
    expected = torch.optim.AdamW(reference.parameters())
    x = torch.randn(4, 6)
    for each, of in ((model, optimizer), (reference, expected)):
        each(x).square().mean().backward()
        of.step()
    for (name, shard), full in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(shard.full_tensor(), full.detach(), msg=name)  # type: ignore[attr-defined]
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(f"composer_fsdp2 {composer_fsdp2.__version__}: a step on 2 ranks is the step of one process")


if __name__ == "__main__":
    main()
