"""One step on two ranks from an installed wheel, compared with one process, and a checkpoint loaded into the shards.

torchrun --standalone --nproc-per-node 2 smoke.py
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import composer_fsdp2


def small_model() -> nn.Module:
    return nn.Sequential(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))))  # Composer shards below direct children


def main() -> None:
    assert Path(composer_fsdp2.__file__).parts[-3] == "site-packages", composer_fsdp2.__file__
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = small_model()
    reference = copy.deepcopy(model)
    if dist.get_rank() == 0:
        torch.save(reference.state_dict(), "model.pt")
    optimizer = torch.optim.AdamW(model.parameters())
    for block in model[0]:  # type: ignore[index]
        block._fsdp_wrap = True
    composer_fsdp2.prepare_fully_shard(model, optimizer, {"mixed_precision": "FULL"}, device="cpu")
    before = full_tensors(model)
    expected = torch.optim.AdamW(reference.parameters())
    x = torch.randn(4, 6)
    for each, of in ((model, optimizer), (reference, expected)):
        each(x).square().mean().backward()
        of.step()
    torch.testing.assert_close(full_tensors(model), [parameter.detach() for parameter in reference.parameters()])
    composer_fsdp2.load_checkpoint("model.pt", model)
    torch.testing.assert_close(full_tensors(model), before, rtol=0, atol=0)
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(f"composer_fsdp2 {composer_fsdp2.__version__}, torch {torch.__version__}: prepare_fully_shard on 2 ranks")
        print("trains as one process does, and load_checkpoint restores the weights")


def full_tensors(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
