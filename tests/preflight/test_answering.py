"""Questions that models ask of tensors, where these have no values."""

from __future__ import annotations

import torch
from composer_fsdp2.preflight.answering import without_values
from torch.utils.checkpoint import checkpoint

from composer_fsdp2.estimate._torch.fake import fake_tensors


def test_tokens_go_to_all_experts_alike():
    """Each expert would get none, or all: the activations of a mixture of experts are those of its tokens' shares."""
    with fake_tensors(), without_values(num_experts=4):
        mask = torch.ones(2, 64, dtype=torch.long)  # of one expert: two choices of each of 64 tokens
        rows, tokens = torch.where(mask)
        assert rows.shape == tokens.shape == (32,)
        assert torch.nonzero(mask).shape == (32, 2)
        assert tokens.tolist() == [0] * 32
        assert not mask.sum() and mask.sum().item() == 0


def test_what_is_recomputed_is_answered_as_well():
    """A block that runs again in backward asks again, and nobody else is there to answer."""

    def block(inputs: torch.Tensor) -> torch.Tensor:
        (chosen,) = torch.where(inputs.sum(1) > 0)
        return inputs[chosen].square()

    with fake_tensors(), without_values(num_experts=2):
        inputs = torch.ones(8, 4, requires_grad=True)
        checkpoint(block, inputs, use_reentrant=False).sum().backward()
        assert inputs.grad is not None and inputs.grad.shape == (8, 4)


def test_values_that_are_there_are_their_own():
    """A model that counts something real goes on counting."""
    with without_values(num_experts=4):
        assert torch.tensor(3).item() == 3 and bool(torch.tensor(True))
        assert torch.where(torch.tensor([0, 1, 1]))[0].tolist() == [1, 2]
