"""One monolithic checkpoint, and four ways in which ranks load it into the same model: ``load(task)``.

The file is what Composer writes with ``state_dict_type: full``, saved by ``torch.save``.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import Model, Shape
from timing import gather
from torch import nn
from torch.distributed.tensor import DTensor
from usage import Usage, measured

__all__ = ["LOADERS", "LoadTask", "load", "shape_of", "write_checkpoint"]

_PARAMETER_BYTES = 12  # fp32, with the two moments of AdamW
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTask:
    """One load, by one of ``LOADERS``."""

    loader: str
    path: Path
    shape: Shape


def shape_of(num_bytes: int) -> Shape:
    """A decoder of about 24 layers whose checkpoint with AdamW's state has about so many bytes."""
    num_parameters = num_bytes / _PARAMETER_BYTES
    width = max(16, int((num_parameters / 358) ** 0.5) // 16 * 16)
    one, two = (_num_parameters(_shape(width, layers)) for layers in (1, 2))
    return _shape(width, max(1, 1 + round((num_parameters - one) / (two - one))))


def _shape(width: int, layers: int) -> Shape:
    return Shape(width=width, layers=layers, heads=width // 16, vocabulary=32 * width, sequence=16, batch=1)


def _num_parameters(shape: Shape) -> int:
    return sum(parameter.numel() for parameter in _on_meta(shape).parameters())


def _on_meta(shape: Shape) -> Model:
    with torch.device("meta"):
        return Model(shape)


def write_checkpoint(task: LoadTask) -> int:
    """Write random values of the model and of AdamW's state; their digest."""
    torch.manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in _on_meta(task.shape).named_parameters()}
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    state = {
        name: {"step": torch.tensor(7.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        for name, shape in shapes.items()
    }
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": list(shapes)}]
    content = {
        "state": {
            "model": model,
            "optimizers": {"AdamW": {"state": state, "param_groups": groups}},
            "run_name": "benchmark",
            "rank_zero_seed": 0,
        },
        "rng": [],
    }
    with open(task.path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    return _digest(model | {f"{name} {key}": state[name][key] for name in state for key in _MOMENTS})


# On the ranks ---------------------------------------------------------------------------------------------------------


def load(task: LoadTask) -> dict[str, Any]:
    """Load once into a newly built model; what each rank used, its shard's bytes, and the digest of what was loaded.

    Called on all ranks; the same on all.
    """
    _step_once()
    loaded = LOADERS[task.loader](task)
    tensors = _local_tensors(loaded.model, loaded.optimizer)
    of_ranks = gather(
        {
            **asdict(loaded.usage),
            "shard_bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "digest": _digest(tensors),
        }
    )
    digests = [each.pop("digest") for each in of_ranks]
    digest = sum(digests) % (1 << 61)
    if loaded.is_whole:
        (digest,) = set(digests)
    return {"digest": digest, "seconds": max(each["seconds"] for each in of_ranks), "of_ranks": of_ranks}


def _step_once() -> None:
    """Import what an optimizer's first step imports (torch._dynamo: seconds), of which every loader takes one."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    usage: Usage
    is_whole: bool = False  # on every rank


def _ours(task: LoadTask) -> _Loaded:
    from composer_fsdp2 import load_checkpoint

    model, optimizer = _sharded(task.shape)
    _, usage = _measured_together(lambda: load_checkpoint(task.path, model, optimizer))
    return _Loaded(model, optimizer, usage)


def _replicated(task: LoadTask) -> _Loaded:
    """Into NO_SHARD, with an optimizer that has stepped: nothing of the state has to be allocated.

    What the load then takes of host memory is what it takes where the model and the optimizer lie on a GPU.
    """
    from composer_fsdp2 import load_checkpoint, prepare_fully_shard

    model = _emptied(_on_meta(task.shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepare_fully_shard(model, optimizer, {"sharding_strategy": "NO_SHARD"}, precision="fp32", device="cpu")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    _, usage = _measured_together(lambda: load_checkpoint(task.path, model, optimizer))
    return _Loaded(model, optimizer, usage, is_whole=True)


def _torch(task: LoadTask) -> _Loaded:
    """As torch's documentation has it; rank 0 maps the file, instead of reading all of it into its memory."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    model, optimizer = _sharded(task.shape)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def call() -> None:
        weights, state = {}, {}
        if dist.get_rank() == 0:
            saved = torch.load(task.path, mmap=True, map_location="cpu", weights_only=True)["state"]
            weights, state = saved["model"], saved["optimizers"]["AdamW"]
        set_model_state_dict(model, weights, options=options)
        set_optimizer_state_dict(model, optimizer, state, options=options)

    _, usage = _measured_together(call)
    return _Loaded(model, optimizer, usage)


def _composer(task: LoadTask) -> _Loaded:
    """A Trainer with ``load_path``, of which the load alone is measured."""
    from composer import ComposerModel, Trainer
    from composer.utils import FSDP2Config, ParallelismConfig, checkpoint

    class ComposerDecoder(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Model(task.shape).decoder

        def forward(self, batch: Any) -> Any:
            return self.decoder(batch)

        def loss(self, outputs: Any, batch: Any) -> Any:
            raise NotImplementedError  # It is not trained.

    model = ComposerDecoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    usages = []
    load_checkpoint = checkpoint.load_checkpoint

    def measured_load(*args: Any, **kwargs: Any) -> Any:
        result, usage = _measured_together(lambda: load_checkpoint(*args, **kwargs))
        usages.append(usage)
        return result

    with _quiet(), mock.patch.object(checkpoint, "load_checkpoint", measured_load):
        trainer = Trainer(
            model=model,
            optimizers=optimizer,
            device="cpu",
            parallelism_config=ParallelismConfig(fsdp2=FSDP2Config(state_dict_type="full")),
            load_path=str(task.path),
            progress_bar=False,
        )
    return _Loaded(trainer.state.model, optimizer, usages[0])


LOADERS: dict[str, Callable[[LoadTask], _Loaded]] = {
    "ours": _ours,
    "replicated": _replicated,
    "torch": _torch,
    "composer": _composer,
}


def _sharded(shape: Shape) -> tuple[Model, torch.optim.Optimizer]:
    """With real values, so that all of the model is resident before the load; AdamW has no state yet."""
    from torch.distributed.fsdp import fully_shard

    model = _on_meta(shape)
    for block in model.decoder.blocks:
        fully_shard(block)
    fully_shard(model)
    return _emptied(model), torch.optim.AdamW(model.parameters(), lr=1e-3)


def _emptied(model: Model) -> Model:
    model.to_empty(device="cpu")
    model.decoder.reset_parameters()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0)
    return model


def _measured_together(call: Callable[[], Any]) -> tuple[Any, Usage]:
    dist.barrier()
    return measured(call)


def _local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's part of weights and moments, by the names in the file."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = _local(parameter.detach())
        for key in _MOMENTS:
            tensors[f"{name} {key}"] = _local(optimizer.state[parameter][key])
    return tensors


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _digest(tensors: dict[str, torch.Tensor]) -> int:
    """Of names and bits; the digests of shards add up to that of the whole."""
    sums = (zlib.crc32(name.encode()) * int(tensor.view(torch.int32).sum()) for name, tensor in tensors.items())
    return sum(sums) % (1 << 61)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Composer's words on stderr are of no interest here; an error still is."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
