"""Checkpoints of real FSDP1 through Composer's Trainer, on the CPU, with the state and the next losses of the saving
run.

Imports Composer only when called, so that collecting the tests stays cheap. ``write`` and ``compare`` run on the ranks.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.comparing import assert_same, full_parameters, own_name
from support.oracle import FSDP2, FSDP1_saving
from support.trainers import build_model, largest_difference, make_trainer, optimizer_state
from torch import nn

SAVED_AT, NEXT_STEPS = 3, 2
VOCABULARY, SEQUENCE = 13, 5  # of both models


class Layout(enum.Enum):
    """The layout of a saved run."""

    FULL = "full"  # Composer's Trainer
    SHARDED = "sharded"  # Composer's Trainer, a DCP directory
    RANK_FILES = "sharded, one file per rank"  # as in Composer 0.13 to 0.15
    LOCAL = "local, a DCP directory"  # as in Composer 0.16 to 0.18
    LOCAL_RANK_FILES = "local, one file per rank"  # as in Composer 0.13 to 0.15


@dataclass(frozen=True, kw_only=True)
class Run:
    """One FSDP1 run that saves.

    Args:
        model: ``small`` (that of ``trainers.py``) or ``mpt`` (LLM Foundry's); both tie their embeddings.
        parameters: ``orig`` and ``flat`` are ``use_orig_params``; ``groups`` is ``orig`` with two param_groups; FSDP1's
            flat parameters allow only one.
        mesh: A device mesh, so DTensors; else a process group, so ShardedTensors.
    """

    world_size: int
    model: str
    parameters: str
    mesh: bool
    optimizer: str

    def __str__(self) -> str:
        mesh = "mesh" if self.mesh else "group"
        return f"{self.model}-{self.parameters}-{mesh}-{self.optimizer}-{self.world_size}"

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that such a run can save: only ShardedTensors were pickled, and only flat parameters make
        ``local``."""
        layouts = [Layout.FULL, Layout.SHARDED]
        if not self.mesh:
            layouts.append(Layout.RANK_FILES)
            if self.parameters == "flat" and self.world_size > 1:  # one rank does not shard, and has no flat weights
                layouts += [Layout.LOCAL, Layout.LOCAL_RANK_FILES]
        return tuple(layouts)

    def make(self) -> tuple[Any, torch.optim.Optimizer]:
        """The model and the optimizer before sharding. Called on all ranks."""
        model = build_model() if self.model == "small" else _mpt()
        return model, _make_optimizer(self.optimizer, self.parameters == "groups", model)


# ---------------------------------------------------------------------------------------------------------------------
# Model, optimizer, data


def _mpt() -> Any:
    from llmfoundry.models.mpt.modeling_mpt import MPTConfig, MPTForCausalLM
    from support.scripts.train_with_trainer import Model

    class WithMask(Model):
        def forward(self, batch: Any) -> torch.Tensor:
            tokens = batch[0]
            return self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens, dtype=torch.bool)).logits

    model = WithMask()
    torch.manual_seed(9)
    config = MPTConfig(
        d_model=8, n_heads=2, n_layers=2, expansion_ratio=2, max_seq_len=8, vocab_size=VOCABULARY,
        tie_word_embeddings=True, attn_config={"attn_impl": "torch"},
    )  # fmt: skip
    model.model = MPTForCausalLM(config)
    return model


def _make_optimizer(name: str, groups: bool, model: nn.Module) -> torch.optim.Optimizer:
    from composer.optim import DecoupledAdamW

    parameters: list[Any] = list(model.parameters())
    if groups:
        rest = [parameter for parameter in parameters if parameter.ndim <= 1]
        parameters = [
            {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
            {"params": rest, "lr": 5e-3, "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]
    match name:
        case "adam":
            return torch.optim.Adam(parameters, lr=1e-2)
        case "decoupled_adamw":
            return DecoupledAdamW(parameters, lr=1e-2, weight_decay=1e-3)
        case "decoupled_lionw":
            from llmfoundry.optim import DecoupledLionW  # slow to import

            return DecoupledLionW(parameters, lr=1e-3, weight_decay=1e-3)
    raise ValueError(f"no optimizer {name!r}")


def next_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train on; all ranks share each batch of four. Returns mean losses over the whole batch."""
    generator = torch.Generator().manual_seed(7)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.train()
    losses = []
    for _ in range(NEXT_STEPS):
        batch = [torch.randint(VOCABULARY, (4, SEQUENCE), generator=generator).chunk(world_size)[rank]]
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return losses


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Make FSDP1 save the same on the CPU as on a GPU, in every layout.

    On a GPU ``.cpu()`` copies. On the CPU it returned the tensor itself: torch freed it (a crash), or reused its memory
    for the next one (``exp_avg_sq`` in place of ``exp_avg``).
    """
    copied = mock.patch.object(torch.Tensor, "cpu", lambda self, *args, **options: self.detach().clone())
    with FSDP1_saving(), copied:
        yield


def write(run: Run, folder: Path) -> None:
    """Train, save under ``path_of`` in every layout of the run, record its state, and train on.

    Called on all ranks.
    """
    with _writing():
        group = {} if run.mesh else {"process_group": "mod1"}
        model, optimizer = run.make()
        config = {"use_orig_params": run.parameters != "flat", **group}
        trainer = make_trainer(config, model=model, optimizer=optimizer, batches=SAVED_AT)
        trainer.fit()
        state = trainer.state
        assert type(state.model.model).__name__ == "FullyShardedDataParallel"
        for layout in run.layouts:
            _save(trainer, layout, path_of(run, layout, folder))
        reference = {
            "parameters": full_parameters(state.model),
            "optimizer": fsdp1_optimizer_state(state.model, state.optimizers[0]),
        }
        reference["losses"] = next_losses(state.model, state.optimizers[0])
        trainer.close()
    if dist.get_rank() == 0:
        torch.save(reference, folder / f"{run}.ref.pt")


def path_of(run: Run, layout: Layout, folder: Path) -> Path:
    """The checkpoint: a file, a directory, or the first rank's file."""
    parent = folder / f"{run}.{layout.name}"
    has_rank = layout not in (Layout.SHARDED, Layout.LOCAL)
    return parent / ("ep0-ba3-rank0.pt" if has_rank else "ep0-ba3")


def _save(trainer: Any, layout: Layout, path: Path) -> None:
    if layout in (Layout.FULL, Layout.SHARDED):
        trainer.state.fsdp_config.state_dict_type = layout.value
        trainer.save_checkpoint(str(path))
        return
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True)
    dist.barrier()
    state = _state_as_old_composer(trainer.state, layout)
    if layout is Layout.LOCAL:
        from torch.distributed.checkpoint import save

        # The optimizer is at the top level, as in torch 2.0 to 2.2.
        optimizers = state["state"].pop("optimizers")
        save({**state, "optimizers": optimizers}, checkpoint_id=path)
    else:
        torch.save(state, path.with_name(f"ep0-ba3-rank{dist.get_rank()}.pt"))


def _state_as_old_composer(state: Any, layout: Layout) -> dict[str, Any]:
    """The result of ``State.state_dict`` in Composer 0.13 to 0.18, through the same torch API."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

    model, optimizer = state.model, state.optimizers[0]
    is_local = layout is not Layout.RANK_FILES
    with FSDP.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    ):
        named = FSDP.optim_state_dict(model, optimizer)
        weights = model.state_dict()
    if is_local:
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            weights = model.state_dict()
    by_position = layout is Layout.LOCAL_RANK_FILES
    return {
        "state": {
            "model": dict(weights),
            "optimizers": {type(optimizer).__qualname__: optimizer.state_dict() if by_position else named},
            "timestamp": {"Timestamp": {"epoch": 0, "batch": SAVED_AT}},
        },
        "rng": [],
    }


def fsdp1_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """FSDP1's own optimizer state by parameter name, gathered from the ranks without FSDP1's functions.

    Each rank's shard is a contiguous part of the flat parameter, in the order of the ranks. Called on all ranks.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    whole: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FSDP) else None
        if handle is None:
            continue
        flat = handle.flat_param
        names = [own_name(f"{path}.{name}") for name in flat._fqns]
        if flat._params is None:  # use_orig_params=False
            vectors = {key: _joined(value, handle) for key, value in optimizer.state[flat].items()}
            starts = [sum(flat._numels[:number]) for number in range(len(names))]
            for name, start, numel, shape in zip(names, starts, flat._numels, flat._shapes, strict=True):
                whole[name] = {
                    key: value[start : start + numel].view(shape).clone() if value.dim() else value.clone()
                    for key, value in vectors.items()
                }
        else:
            for name, parameter, shape in zip(names, flat._params, flat._shapes, strict=True):
                # A rank with an empty shard has no state, or an empty one.
                own = {key: value.detach().clone() for key, value in optimizer.state.get(parameter, {}).items()}
                gathered: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, own)
                holders = [part for part in gathered if part]
                whole[name] = {
                    key: torch.cat([part[key].flatten() for part in holders])[: shape.numel()].view(shape)
                    if value.dim()
                    else value
                    for key, value in max(holders, key=len).items()
                }
    return whole


def _joined(value: torch.Tensor, handle: Any) -> torch.Tensor:
    """A full flat vector from the ranks' shards; step counts are returned unchanged."""
    if value.dim() == 0 or not handle.uses_sharded_strategy:
        return value.clone()
    shards = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, value)
    return torch.cat(shards)


# ---------------------------------------------------------------------------------------------------------------------
# Loading and comparing


def compare(run: Run, layout: Layout, folder: Path, config: dict[str, Any], *, by_trainer: bool = False) -> float:
    """Load into FSDP2 and assert that the state equals that of the saving run.

    Args:
        by_trainer: With the Trainer's ``load_path``, rather than by ``load_checkpoint``.
    Returns:
        The largest relative difference of the next losses. Called on all ranks.
    """
    what = f"{run}, {layout.value}, into {dist.get_world_size()} ranks, {config}{' by the Trainer' * by_trainer}"
    reference = torch.load(folder / f"{run}.ref.pt")
    model, optimizer = run.make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    with FSDP2():
        load = _by_trainer if by_trainer else _by_call
        load(path_of(run, layout, folder), model, optimizer, config, what)
        assert_same(full_parameters(model), reference["parameters"], what)
        assert_same(optimizer_state(model, optimizer), reference["optimizer"], what)
        return largest_difference(next_losses(model, optimizer), reference["losses"])


def _by_call(path: Path, model: Any, optimizer: torch.optim.Optimizer, config: dict[str, Any], what: str) -> None:
    from composer_fsdp2 import load_checkpoint, prepare_fully_shard

    prepare_fully_shard(model, optimizer, dict(config), precision="fp32")
    report = load_checkpoint(path, model, optimizer)
    assert (report.left_out, report.kept, report.cast) == ((), (), ()), f"{what}: {report}"


def _by_trainer(path: Path, model: Any, optimizer: torch.optim.Optimizer, config: dict[str, Any], what: str) -> None:
    trainer = make_trainer(dict(config), model=model, optimizer=optimizer, batches=SAVED_AT, load_path=str(path))
    assert trainer.state.timestamp.batch == SAVED_AT, what
    trainer.close()
