"""Every error text in ``migration_docs/troubleshooting.md``, raised for real on two gloo ranks.

``OURS`` and ``OTHERS`` map names to functions that raise: in composer_fsdp2, or in torch, Composer, FSDP1 and
accelerate alone. ``check_errors`` returns the ends of their tracebacks. They run in a page's folder (``START`` in
test_migration_docs.py), in the order of the tables, and all without a GPU; errors of GPU runs have the same text.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.experts import Experts as StackedExperts
from support.memory import run_out_of_memory
from support.models import Chain, tie
from support.oracle import FSDP1, FSDP2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composer_fsdp2 import (
    clip_grad_norm_,
    convert_checkpoint,
    load_checkpoint,
    prepare_fully_shard,
    summon_full_params,
    translate,
)
from composer_fsdp2.parallel.idle_experts import run_idle_experts
from composer_fsdp2.training import control
from composer_fsdp2.training.out_of_memory import OutOfMemoryVote

INPUT = torch.ones(1, 4)
FIRST = {"blocks.0": ColwiseParallel()}
FULL, SHARDED = "full/ep0-ba3-rank0.pt", "sharded/ep0-ba3"


def check_errors(is_ours: bool) -> dict[str, str]:
    """The last lines of each error's traceback. Called on all ranks; each raises on all of them."""
    sys.path.insert(0, os.getcwd())  # net.py
    return {name: text_of(function) for name, function in (OURS if is_ours else OTHERS).items()}


def text_of(function: Callable[[], object]) -> str:
    try:
        function()
    except BaseException as raised:  # torch's CheckpointException is not an Exception
        if isinstance(raised, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception_only(raised))
    return "(nothing was raised)"


# --- models


class Stack(nn.Module):
    """Two linear blocks below a root."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)


class Experts(nn.Module):
    """Runs its experts from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](self.experts[1](x))


def composer_model() -> Any:
    return importlib.import_module("net").build_model()


def hooked(fsdp_wrap_fn: Callable[[nn.Module], Any]) -> Any:
    model = composer_model()
    model.model.fsdp_wrap_fn = fsdp_wrap_fn
    return model


def built(device: str, build: Callable[[], Any] = composer_model) -> Any:
    with torch.device(device):
        return build()


def changed(change: Callable[[Stack], object]) -> Stack:
    model = Stack()
    change(model)
    return model


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(model: Any, **options: Any) -> Any:
    return fully_shard(model, mesh=mesh(2), **options)


def sharded_stack() -> Any:
    model = Stack()
    for block in model.blocks:
        sharded(block)
    return sharded(model)


def fsdp1(model: nn.Module, *, use_orig_params: bool = True) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


# --- torch, Composer, FSDP1 and accelerate alone


def trainer(parallelism: dict[str, Any], model: Any = None, **options: Any) -> Any:
    from composer import Trainer

    return Trainer(
        model=composer_model() if model is None else model,
        parallelism_config=parallelism,
        device="cpu",
        progress_bar=False,
        log_to_console=False,
        **options,
    )


def fsdp1_trainer(section: dict[str, Any], model: Any = None, **options: Any) -> Any:
    with FSDP1():
        return trainer({"fsdp": section}, model, **options)


def fsdp2_trainer(model: Any = None, section: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Composer's own FSDP2."""
    from composer.utils import FSDP2Config

    return trainer({"fsdp": FSDP2Config(**section or {})}, model, **options)


def sgd_of_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)


def plugin(**settings: Any) -> Any:
    return importlib.import_module("accelerate").FullyShardedDataParallelPlugin(**settings)


def split_then_sharded(model: nn.Module, tensor: DeviceMesh, data: DeviceMesh) -> None:
    parallelize_module(model, tensor, FIRST)
    fully_shard(model, mesh=data)


def split_embeddings() -> None:
    for rows in (6, 8):
        model = nn.Sequential(nn.Embedding(rows, 4))
        parallelize_module(model, mesh(2), {"0": ColwiseParallel(output_layouts=Replicate())})
        model(torch.arange(5)).sum().backward()


def fsdp2_trainer_of_a_block_twice() -> None:
    model = built("meta" if dist.get_rank() else "cpu")
    model.model.blocks[1] = model.model.blocks[0]
    fsdp2_trainer(model)


def tied_under_fsdp1() -> None:
    model = Chain(wte=nn.Embedding(5, 4), head=nn.Linear(4, 5, bias=False))
    tie(model.wte, model.head)
    model.head = fsdp1(model.head)
    fsdp1(model)(torch.tensor([[1]]))


def clip_ignored() -> None:
    model = Stack()
    sharded(model, ignored_params=set(model.blocks[1].parameters()))
    model(INPUT).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_on_two_meshes() -> None:
    model = Stack()
    fully_shard(model.blocks[0], mesh=mesh(2, names=("a",)))
    fully_shard(model, mesh=mesh(1, 2, names=("replicate", "shard")))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def step_after_an_error() -> None:
    model = sharded_stack()

    def fail(module: nn.Module, gradients: object) -> None:
        run_out_of_memory("cpu")

    hook = model.blocks[0].register_full_backward_pre_hook(fail)
    with contextlib.suppress(torch.OutOfMemoryError):
        model(INPUT).sum().backward()
    hook.remove()
    model.zero_grad()
    model(INPUT).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def one_rank_fewer() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)
    time.sleep(2)  # rank 1 does not run this batch


def load_truncated() -> None:
    places = dcp.FileSystemReader(SHARDED).read_metadata().storage_data.items()
    [place] = [p for i, p in places if i.fqn.endswith("model.wte.weight") and p.relative_path == "__0_0.distcp"]
    path = damaged(SHARDED, "truncated", lambda data: data[: place.offset + place.length // 2])
    dcp.load({"state": {"model": {"model.wte.weight": torch.zeros(11, 6)}}}, checkpoint_id=path)


def load_old_optimizer() -> None:
    model = composer_model()
    optimizer = importlib.import_module("net").build_optimizer(model)
    fsdp2_trainer(model, {"state_dict_type": "sharded"}, optimizers=optimizer, load_path=SHARDED)


def load_optimizer_by_number() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    plain = Stack()
    old = torch.optim.AdamW(plain.parameters())
    plain(INPUT).sum().backward()
    old.step()
    model = sharded_stack()
    new = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, new, old.state_dict(), options=StateDictOptions(full_state_dict=True))


def damaged(source: str, name: str, change: Callable[[bytes], bytes]) -> str:
    """A copy with its last tensor file changed; written by rank 0, visible to all."""
    if dist.get_rank() == 0:
        if Path(source).is_dir():
            shutil.copytree(source, name)
            file = Path(name) / "__0_0.distcp"
        else:
            file = Path(shutil.copy(source, name))
        file.write_bytes(change(file.read_bytes()))
    dist.barrier()
    return name


OTHERS: dict[str, Callable[[], object]] = {
    # torch before composer_fsdp2 patches it in this process.
    "gloo-average": lambda: (
        fully_shard(Stack(), mesh=mesh(2, 1, names=("replicate", "shard")))(INPUT).sum().backward()
    ),
    # Like transformers' eager attention.
    "mask-of-a-part": lambda: torch.zeros(1, 2, 8, 8) + torch.zeros(1, 1, 4, 4)[:, :, :, :8],
    # Configurations of Composer's.
    "composer-device-mesh": lambda: trainer({"fsdp": {"device_mesh": [2]}}),
    "composer-cpu-offload": lambda: fsdp1_trainer({"cpu_offload": True}),
    # It first checks for a GPU.
    "composer-auto-microbatching": mock.patch("composer.trainer.trainer._is_auto_microbatching", return_value=True)(
        lambda _: fsdp2_trainer(
            train_dataloader=importlib.import_module("net").batches(2),
            max_duration="1ba",
            device_train_microbatch_size="auto",
        )
    ),
    "composer-state-dict-type-local": lambda: fsdp1_trainer({"state_dict_type": "local"}),
    "composer-wrap-keys": lambda: fsdp2_trainer(hooked(lambda module: {"sharding_strategy": "SHARD_GRAD_OP"})),
    "composer-wrap-argument": lambda: fsdp2_trainer(
        hooked(lambda module: {"activation_checkpointing": True} if isinstance(module, nn.LayerNorm) else False)
    ),
    "composer-groups-without-orig-params": lambda: fsdp1_trainer(
        {"use_orig_params": False}, model := composer_model(), optimizers=sgd_of_two_groups(model)
    ),
    "composer-monolith-sync": lambda: fsdp1_trainer({"load_monolith_rank0_only": True}, load_path=FULL),
    # Configurations of accelerate's.
    "accelerate-reshard": lambda: plugin(fsdp_version=2, reshard_after_forward="FULL_SHARD"),
    "accelerate-local": lambda: plugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT"),
    "accelerate-forward-prefetch": lambda: plugin(fsdp_version=2, forward_prefetch=True),
    "accelerate-min-num-params": mock.patch.dict(os.environ, FSDP_MIN_NUM_PARAMS="1e8")(
        lambda: plugin(auto_wrap_policy="SIZE_BASED_WRAP").set_auto_wrap_policy(Stack())
    ),
    # fully_shard's arguments.
    "fully-shard-mixed-precision": lambda: fully_shard(Stack(), mixed_precision=MixedPrecisionPolicy()),
    "fully-shard-cpu-offload": lambda: fully_shard(Stack(), cpu_offload=True),
    "reshard-none": lambda: sharded(Stack(), reshard_after_forward=None),
    "reshard-not-a-factor": lambda: sharded(Stack(), reshard_after_forward=3),
    "mesh-unnamed": lambda: fully_shard(Stack(), mesh=mesh(1, 2)),
    "mesh-3d": lambda: fully_shard(Stack(), mesh=mesh(1, 1, 2, names=("pp", "replicate", "shard"))),
    # Modules and parameters.
    "twice": lambda: sharded(sharded(Stack())),
    "module-list": lambda: sharded(Stack().blocks),
    "root-first": lambda: sharded(sharded(Stack()).blocks[0]),
    "scalar": lambda: sharded(nn.ParameterDict({"temperature": nn.Parameter(torch.tensor(1.0))})),
    "not-contiguous": lambda: sharded(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)),
    "uneven-dim": lambda: sharded(nn.Linear(3, 4), shard_placement_fn=lambda p: Shard(p.ndim - 1)),
    "deepcopy": lambda: copy.deepcopy(sharded_stack()),
    # With tensor parallelism.
    "fsdp-then-tp": lambda: parallelize_module(
        fully_shard(Stack(), mesh=(both := mesh(1, 2, names=("dp", "tp")))["dp"]), both["tp"], FIRST
    ),
    "other-meshes": lambda: split_then_sharded(Stack(), mesh(2, names=("tp",)), mesh(2, names=("dp",))),
    "tp-not-innermost": lambda: split_then_sharded(
        Stack(), (both := mesh(2, 1, names=("tp", "dp")))["tp"], both["dp"]
    ),
    "tp-uneven": lambda: split_then_sharded(
        Stack(width=3), (both := mesh(1, 2, names=("dp", "tp")))["tp"], both["dp"]
    ),
    "tp-embeddings": split_embeddings,
    # Composer's sharding.
    "composer-tied-siblings": lambda: fsdp2_trainer(
        hooked(lambda module: isinstance(module, nn.Embedding | nn.Linear))
    ),
    "composer-tied-outside": lambda: fsdp2_trainer(hooked(lambda module: isinstance(module, nn.Embedding))),
    "composer-duplicate-modules": fsdp2_trainer_of_a_block_twice,
    "composer-other-model-fsdp1": lambda: fsdp1_trainer({}, optimizers=sgd_of_two_groups(composer_model())),
    "composer-other-model": lambda: fsdp2_trainer(
        optimizers=torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    ),
    "composer-mixed-init-fsdp1": lambda: fsdp1_trainer({}, built("meta" if dist.get_rank() else "cpu")),
    "composer-mixed-init": lambda: fsdp2_trainer(built("cpu" if dist.get_rank() else "meta")),
    "composer-no-init": lambda: fsdp1_trainer({}, built("meta")),
    # The first steps.
    "two-dtypes": lambda: sharded(changed(lambda model: model.blocks[0].to(torch.bfloat16)))(INPUT),
    "fsdp1-two-dtypes": lambda: fsdp1(changed(lambda model: model.blocks[0].to(torch.bfloat16))),
    "fsdp1-requires-grad": lambda: fsdp1(
        changed(lambda model: model.blocks[0].requires_grad_(False)), use_orig_params=False
    ),
    "fsdp1-tied": tied_under_fsdp1,
    "on-meta": lambda: sharded(built("meta", Stack))(INPUT),
    "outside-forward": lambda: sharded(Stack()).blocks[0](INPUT),
    "child-before-root": lambda: ((model := sharded_stack()).blocks[0](INPUT), model(INPUT)),
    "clip-ignored": clip_ignored,
    "clip-two-meshes": clip_on_two_meshes,
    "clip-method": lambda: sharded_stack().clip_grad_norm_(1.0),
    "no-sync": lambda: sharded_stack().no_sync(),
    "after-an-error": step_after_an_error,
    "copy-of-tensor": torch.no_grad()(lambda: sharded_stack().blocks[0].weight.copy_(torch.ones(4, 4))),
    "composer-adaptive-clipping": lambda: importlib.import_module(
        "composer.algorithms.gradient_clipping"
    ).apply_gradient_clipping(fsdp1(Stack()), "adaptive", 0.1, fsdp_enabled=True),
    "gloo-timeout": one_rank_fewer,
    # Checkpoints.
    "dcp-missing-key": lambda: dcp.load(
        {"state": {"model": {"model.new.weight": torch.zeros(2)}}}, checkpoint_id=SHARDED
    ),
    "dcp-truncated": load_truncated,
    "composer-directory": lambda: fsdp2_trainer(section={"state_dict_type": "sharded"}, load_path=FULL),
    "composer-is-a-directory": lambda: fsdp2_trainer(section={"state_dict_type": "full"}, load_path=SHARDED),
    "composer-old-optimizer": load_old_optimizer,
    "composer-local": lambda: fsdp2_trainer(
        section={"state_dict_type": "sharded"}, load_path="local/ep0-ba3", load_weights_only=True
    ),
    "torch-weights-only": lambda: torch.load(FULL),
    "optimizer-by-number": load_optimizer_by_number,
    "torch-per-rank": mock.patch.object(dist.distributed_c10d, "is_initialized", return_value=False)(  # as in a shell
        lambda _: torch.load("per-rank/sharded-rank0.pt", weights_only=False)
    ),
}  # fmt: skip


# --- composer_fsdp2


def translated(world_size: int | None = 8, **section: Any) -> Any:
    return translate(section, world_size=world_size)


def prepared(model: nn.Module, section: Mapping[str, Any] | None = None, **options: Any) -> Any:
    return prepare_fully_shard(model, None, section or {}, device="cpu", **options)


def our_trainer(model: Any = None, parallelism: Mapping[str, Any] | None = None, **options: Any) -> Any:
    with FSDP2():
        return trainer({"fsdp": {}, **(parallelism or {})}, model, **options)


def group_of_an_unknown_node() -> None:
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        prepared(Stack(), {"process_group": "node"})


def divided_sequences_of_unknown_attention() -> None:
    importlib.import_module("composer_fsdp2.compat.context_parallel")  # registers MPT, as under install()
    prepared(Stack(), {"context_parallel_degree": 2})


def split(model: nn.Module, plan: dict[str, Any]) -> None:
    prepared(model, tensor_parallel={"tensor_parallel_degree": 2, "layer_plan": plan})


def split_experts(layer: nn.Module, **section: Any) -> None:
    prepared(nn.ModuleDict({"experts": layer}), {"expert_parallel_degree": 2} | section)


def experts_on_a_mesh_of_their_own() -> None:
    along = mesh(1, 2, names=("weight_parallel", "expert_parallel"))["expert_parallel"]
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), along, [Shard(0)]))
    split_experts(layer)


def peer_out_of_memory() -> None:
    model = sharded_stack()
    vote = OutOfMemoryVote(model)
    vote.start()
    if dist.get_rank() == 1:
        vote.report()
        vote.stop()
        raise torch.OutOfMemoryError("CUDA out of memory.")
    model(INPUT)


def batches(function: str, *arguments: Any, **options: Any) -> None:
    getattr(importlib.import_module("composer_fsdp2.parallel.batches"), function)(*arguments, **options)


def ranks_diverged() -> None:
    model = Stack()
    prepared(model, {"collective_guard": 60, "mixed_precision": "FULL"})
    model(INPUT).sum().backward()
    if dist.get_rank() == 0:
        model(INPUT)  # rank 1 has one batch less
    else:
        clip_grad_norm_(model, 1.0)


def experts_in_another_order() -> None:
    block = Experts()
    run_idle_experts(block, block.experts)
    block(INPUT)


def no_network() -> None:
    # Pretends that each rank is a node that gloo cannot reach; there is only one machine.
    raised = RuntimeError("Gloo connectFullMesh failed with [...]")
    with mock.patch.object(dist, "new_group", side_effect=raised):
        control.connect(f"host {dist.get_rank()}")


def summon_in_forward() -> None:
    model = Stack()
    prepared(model, {"mixed_precision": "FULL"})

    def hook(*_: object) -> None:
        with summon_full_params(model):
            pass

    model.blocks[1].register_forward_pre_hook(hook)
    model(INPUT)


def export() -> None:
    with FSDP2():
        from composer.utils import export_for_inference

        export_for_inference(sharded_stack(), "torchscript", "model.pt")


def load(path: str, build: Callable[[], nn.Module] = composer_model) -> Any:
    return load_checkpoint(path, build())


def flip_of_content(data: bytes) -> bytes:
    model = torch.load(FULL, weights_only=False)["state"]["model"]
    at = data.index(model["model.wte.weight"].numpy().tobytes())
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def convert(*arguments: Any, **options: Any) -> None:
    convert_checkpoint(*arguments, **options)


def load_made(path: str, make: Callable[[], object]) -> None:
    """Loads a checkpoint written by rank 0, on all ranks."""
    if dist.get_rank() == 0:
        make()
    dist.barrier()
    load(path)


class Stranger:
    """A user's class in a checkpoint."""


UNITS_OF_EXPERTS = {"wrap_policy": {"transformer_layer_cls_to_wrap": [], "moe_experts": ["Linear"]}}
OURS: dict[str, Callable[[], object]] = {
    "unknown-key": lambda: translated(sharding_stratgy="FULL_SHARD"),
    "world-size": lambda: translated(data_parallel_shard_degree=8, world_size=12),
    "no-shard-with-degrees": lambda: translated(
        sharding_strategy="NO_SHARD", data_parallel_shard_degree=4, data_parallel_replicate_degree=2
    ),
    "strategy-or-reshard": lambda: translated(sharding_strategy="FULL_SHARD", reshard_after_forward=False),
    "state-dict-type-local": lambda: translated(state_dict_type="local"),
    "low-precision-grads": lambda: prepared(
        Stack(), {"keep_low_precision_grads": True, "mixed_precision": "PURE"}, precision="amp_bf16"
    ),
    "node-group": group_of_an_unknown_node,
    "unknown-attention": divided_sequences_of_unknown_attention,
    "tensor-parallel-plan": lambda: our_trainer(parallelism={"tp": {"tensor_parallel_degree": 2}}),
    "tensor-parallel-path": lambda: split(Stack(), {"block.0": ColwiseParallel()}),
    "tensor-parallel-tie": lambda: split(changed(lambda model: tie(model.blocks[0], model.blocks[1])), FIRST),
    "experts-and-replicas": lambda: split_experts(
        StackedExperts(4, 2), sharding_strategy="HYBRID_SHARD", data_parallel_replicate_degree=2
    ),
    "experts-not-stacked": lambda: split_experts(nn.ModuleList(nn.Linear(4, 4) for _ in range(2))),
    "experts-degree": lambda: split_experts(StackedExperts(3, 2)),
    "experts-without-a-mesh": experts_on_a_mesh_of_their_own,
    # Sharding.
    "other-model": lambda: our_trainer(optimizers=torch.optim.SGD(composer_model().parameters(), lr=0.1)),
    "mixed-init": lambda: prepared(
        built("meta" if dist.get_rank() else "cpu", Stack), {"sync_module_states": False}
    ),
    "no-init": lambda: our_trainer(built("meta")),
    "swa": lambda: our_trainer(algorithms=[importlib.import_module("composer.algorithms").SWA()]),
    "sharded-already": lambda: prepared(sharded_stack()),
    "ranks-differ": lambda: prepared(Stack(width=4 + 4 * dist.get_rank())),
    # Training.
    "peer-out-of-memory": peer_out_of_memory,
    "other-batches": lambda: batches(
        "check_batch",
        {"input_ids": torch.arange(6).reshape(2, 3) + dist.get_rank()},
        what="the first batch of fit, or of its epoch",
    ),
    "cannot-gather": lambda: batches(
        "share_batch", {"input_ids": torch.ones(2, 3 + dist.get_rank())}, how="gather"
    ),
    "ranks-diverged": ranks_diverged,
    "expert-units": lambda: prepared(nn.Sequential(Experts()), UNITS_OF_EXPERTS),
    "expert-order": experts_in_another_order,
    "control-group": no_network,
    "summon-in-forward": summon_in_forward,
    "export": export,
    # Checkpoints.
    "does-not-fit": lambda: load("full", Stack),
    "damaged-content": lambda: load(damaged(FULL, "flipped.pt", flip_of_content)),
    "flat-without-model": lambda: convert("local", "new.pt", to="monolithic"),
    "rank-file-missing": lambda: load_made(
        "alone-rank0.pt", lambda: shutil.copy("per-rank/sharded-rank0.pt", "alone-rank0.pt")
    ),
    "no-metadata": lambda: load_made(
        "cut-short",
        lambda: shutil.copytree(SHARDED, "cut-short", ignore=shutil.ignore_patterns(".metadata")),
    ),
    "not-trusted": lambda: load_made(
        "stranger.pt",
        lambda: torch.save({"state": {"model": {}, "callbacks": Stranger()}, "rng": []}, "stranger.pt"),
    ),
}  # fmt: skip
