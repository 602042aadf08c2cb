"""The differences of a model's last tensors that count: two trainings of one model, with faults in the second."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from composer_fsdp2.comparing.full_tensors import Key
from composer_fsdp2.comparing.reference import Reference, write_reference
from composer_fsdp2.comparing.run_record import TensorDistance

STEPS, LEARNING_RATE = 4, 1e-3
Fault = Callable[["Net", int], None]  # from the model and the number of completed steps


class Net(nn.Module):
    """Attention with a key bias, and an embedding half of whose rows never occur."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(26, 16), nn.Linear(16, 26)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.slope = 0.0  # of the loss along the key bias

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        query, key, value = (
            layer(hidden).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(hidden + attended.transpose(1, 2).flatten(2))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss + self.slope * self.key.bias.sum()


def trained(fault: Fault = lambda net, done: None, *, flipped: bool = False) -> list[tuple[Key, torch.Tensor]]:
    """The model's tensors after a few steps; ``flipped`` sums the same samples in another order."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    data = torch.randint(0, 13, (STEPS, 8, 12), generator=torch.Generator().manual_seed(1))
    for done, batch in enumerate(data):
        fault(net, done)
        optimizer.zero_grad()
        net.loss(batch.flip(0) if flipped else batch).backward()
        optimizer.step()
    return list(tensors_of(net, optimizer))


def tensors_of(net: Net, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Key, torch.Tensor]]:
    for name, parameter in net.named_parameters():
        yield ("parameter", name), parameter.detach().flatten()
        for kind in ("exp_avg", "exp_avg_sq"):
            yield (kind, name), optimizer.state[parameter][kind].flatten()


def distances(folder: Path, fault: Fault = lambda net, done: None) -> dict[Key, TensorDistance]:
    """Distances of a second training, with this fault, from a first one without."""
    write_reference(folder / "first", trained(), is_writing=True)
    found = Reference(folder / "first").distances(trained(fault, flipped=True), learning_rates=STEPS * LEARNING_RATE)
    assert {each.only_in for each in found} == {""}
    return {(each.kind, each.name): each for each in found}


def test_directions_that_rounding_alone_chooses_are_told_and_not_judged(tmp_path: Path):
    """Otherwise a model with a key bias would differ from itself with any other order of sums."""
    found = distances(tmp_path)
    assert max(each.distance for each in found.values()) < 1e-6
    assert {key[1] for key, each in found.items() if each.num_rounding} == {"key.bias"}
    biases = found["parameter", "key.bias"]
    assert biases.num_rounding > 8 and biases.size == 16
    assert LEARNING_RATE / 100 < biases.largest_rounding <= 2 * STEPS * LEARNING_RATE


@torch.no_grad()
def add_to_unseen_row(net: Net, done: int) -> None:
    net.embedding.weight[-1] += 1e-4 * (done == 2)


@torch.no_grad()
def move_the_key_bias(net: Net, done: int) -> None:
    net.key.bias += 0.1 * (done == 2)


def give_the_key_bias_a_gradient(net: Net, done: int) -> None:
    net.slope = 1e-4


FAULTS = {
    add_to_unseen_row: ("parameter", "embedding.weight"),
    move_the_key_bias: ("parameter", "key.bias"),
    give_the_key_bias_a_gradient: ("exp_avg_sq", "key.bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_where_gradients_are_small_is_judged(tmp_path: Path, fault: Fault):
    """Tolerance for an optimizer's amplified rounding must not hide a lost row, or a bias that something else
    changes."""
    found = distances(tmp_path, fault)
    assert found[FAULTS[fault]].distance > 1e-5


def test_a_moment_that_is_infinite_excuses_nothing(tmp_path: Path):
    """With an infinite moment the tolerance was infinite, too, and hid any difference."""
    kept = trained()
    dict(kept)["exp_avg_sq", "head.bias"][0] = torch.inf
    write_reference(tmp_path / "first", kept, is_writing=True)
    other = [(key, tensor + 1.0 if key[0] != "parameter" else tensor) for key, tensor in trained()]
    found = Reference(tmp_path / "first").distances(other, learning_rates=STEPS * LEARNING_RATE)
    apart = {(each.kind, each.name): each.distance for each in found}
    assert all(distance > 0 for (kind, _), distance in apart.items() if kind != "parameter"), apart
    assert apart["exp_avg_sq", "head.bias"] == math.inf


@pytest.mark.parametrize("theirs", [1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ours", [1.0, math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite_equals_nothing(tmp_path: Path, theirs: float, ours: float):
    """Weights of NaN at the start were "the same" as valid weights."""
    key = ("parameter", "w")
    write_reference(tmp_path / "first", [(key, torch.tensor([theirs, 1.0]))], is_writing=True)
    [found] = Reference(tmp_path / "first").distances([(key, torch.tensor([ours, 1.0]))])
    assert found.distance == (0.0 if theirs == ours == 1.0 else math.inf)


def test_tensors_that_one_run_lacks_are_infinitely_apart(tmp_path: Path):
    """Optimizer state that the checkpoint lacks, an additional parameter, one of another size."""
    a, b, c = (("parameter", name) for name in "abc")
    write_reference(tmp_path / "first", [(a, torch.ones(2)), (b, torch.ones(3))], is_writing=True)
    found = Reference(tmp_path / "first").distances([(b, torch.ones(4)), (c, torch.ones(5))])
    assert {(each.name, each.distance, each.size, each.only_in) for each in found} == {
        ("a", math.inf, 2, "first"),
        ("b", math.inf, 3, ""),
        ("c", math.inf, 5, "this"),
    }


def test_an_order_of_elements_is_seen(tmp_path: Path):
    """Rows of a weight that a checkpoint loaded in another order have the same sum and norm."""
    key = ("parameter", "w")
    write_reference(tmp_path / "first", [(key, torch.arange(4.0))], is_writing=True)
    [found] = Reference(tmp_path / "first").distances([(key, torch.arange(4.0).flip(0))])
    assert found.distance == pytest.approx(math.sqrt((9 + 1 + 1 + 9) / (1 + 4 + 9)))
