"""Reads of tensors by a model, when the tensors have no values."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from composer_fsdp2.estimate._torch.fake import fake_tensors, lists_of_zeros
from composer_fsdp2.estimate._torch.live import LiveStorages


def test_tokens_go_to_all_experts_alike():
    """Otherwise an expert would receive no tokens or all: the activations of a mixture of experts depend on each
    expert's share."""
    with fake_tensors(), lists_of_zeros(), LiveStorages(num_experts=4):
        chosen = torch.ones(64, 2, dtype=torch.long)  # two of four experts for each of 64 tokens
        assert torch.where(chosen == 3)[0].shape == (32,)
        encoded = torch.nn.functional.one_hot(chosen, num_classes=8).permute(2, 1, 0)
        assert torch.nonzero(encoded[5]).shape == (16, 2)
        assert torch.where(encoded[5])[1].tolist() == [0] * 16
        assert not chosen.sum() and chosen.sum().item() == 0 and chosen.float().sum().item() == 0.0


def test_what_is_recomputed_is_answered_as_well():
    """A block that is recomputed in backward reads tensors again, and must read the same."""

    def block(inputs: torch.Tensor) -> torch.Tensor:
        (chosen,) = torch.where(inputs.sum(1) > 0)
        return inputs[chosen].square()

    with fake_tensors(), LiveStorages(num_experts=2):
        inputs = torch.ones(8, 4, requires_grad=True)
        torch.autograd.backward(checkpoint(block, inputs, use_reentrant=False).sum())
        assert inputs.grad is not None and inputs.grad.shape == (8, 4)


def test_values_that_are_there_are_their_own():
    """A model that reads tensors with real values reads these values."""
    with LiveStorages(num_experts=4):
        assert torch.tensor(3).item() == 3 and bool(torch.tensor(True))
        assert torch.where(torch.tensor([0, 1, 1]))[0].tolist() == [1, 2]
