"""Buffers compute in a low dtype and are saved in their own dtype."""

from __future__ import annotations

import pytest
import torch
from support.models import Block
from torch import nn

from composer_fsdp2.sharding.buffers import cast_buffers

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("third", torch.tensor([1 / 3]))
        self.register_buffer("fine", torch.tensor([1 / 3], dtype=F64))
        self.register_buffer("low", torch.tensor([1 / 3], dtype=BF16))
        self.register_buffer("count", torch.tensor([3]))
        self.register_buffer("mask", torch.tensor([True]))
        self.register_buffer("hidden", torch.tensor([1 / 3]), persistent=False)
        self.register_buffer("absent", None)


def test_floating_point_buffers_are_cast_in_place():
    """A buffer of a bf16 run is bf16 in forward; counters and masks are not cast, and references stay valid."""
    holder = Holder()
    before = dict(holder.named_buffers())
    cast_buffers({holder: BF16})
    dtypes = {name: buffer.dtype for name, buffer in holder.named_buffers()}
    assert dtypes == {
        "third": BF16,
        "fine": BF16,
        "low": BF16,
        "count": torch.int64,
        "mask": torch.bool,
        "hidden": BF16,
    }
    assert all(buffer is before[name] for name, buffer in holder.named_buffers())
    assert holder.third.item() == torch.tensor(1 / 3).to(BF16).item()


def test_a_state_dict_holds_the_original_dtypes():
    """A checkpoint of a bf16 run loads into the fp32 model, as FSDP1's did; digits lost by the cast stay lost."""
    model = nn.Sequential(nn.Sequential(Holder()), Block())
    keys = list(model.state_dict())
    expected = {key: value.dtype for key, value in model.state_dict().items()}
    cast_buffers(dict.fromkeys(model.modules(), BF16))
    state = model.state_dict(prefix="trainer.")
    assert list(state) == [f"trainer.{key}" for key in keys]
    assert {key.removeprefix("trainer."): value.dtype for key, value in state.items()} == expected
    assert state["trainer.0.0.third"].item() == torch.tensor(1 / 3).to(BF16).item()
    assert model[0][0].third.dtype == BF16, "saving changed the buffer"


def test_loading_keeps_the_dtype_of_computation():
    """A resumed run computes in the dtype of the interrupted run."""
    model, other = Holder(), Holder()
    other.third.fill_(2.0)
    cast_buffers({model: BF16})
    model.load_state_dict(other.state_dict())
    assert model.third.dtype == BF16 and model.third.item() == 2.0


@pytest.mark.parametrize("dtype", [BF16, None])
def test_the_first_module_decides_on_a_shared_buffer(dtype: torch.dtype | None):
    """If units with different dtypes share a table, the innermost one decides, even if it does not cast, like a batch
    norm. The checkpoint is the same."""
    first, second = nn.Module(), nn.Module()
    first.register_buffer("table", torch.ones(2))
    second.register_buffer("table", first.table)
    cast_buffers({first: dtype, second: torch.float16})
    assert second.table is first.table and first.table.dtype == (dtype or F32)
    assert {value.dtype for value in nn.ModuleList([first, second]).state_dict().values()} == {F32}
