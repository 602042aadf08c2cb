"""Every error text on ``migration_docs/troubleshooting.md``, raised for real on two gloo ranks.

``ERRORS`` has the function of each by its name; ``check_errors`` gives what a traceback would end with. They run in a
page's folder (``START`` in test_migration_docs.py), in the order of this file, and all without a GPU: torch, Composer
and FSDP1 say the same there.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.models import Chain, tie
from support.oracle import FSDP1, FSDP2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

Raises = Callable[[], object]
ERRORS: dict[str, Raises] = {}


def error(name: str) -> Callable[[Raises], Raises]:
    def register(function: Raises) -> Raises:
        assert name not in ERRORS, name
        ERRORS[name] = function
        return function

    return register


def check_errors() -> dict[str, str]:
    """The last lines of each error's traceback. Called on all ranks; each raises on all of them."""
    sys.path.insert(0, os.getcwd())  # net.py
    return {name: text_of(function) for name, function in ERRORS.items()}


def text_of(function: Raises) -> str:
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


def composer_model() -> Any:
    from net import build_model

    return build_model()


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded_stack(**options: Any) -> Stack:
    model = Stack()
    for block in model.blocks:
        fully_shard(block, mesh=mesh(2), **options)
    return fully_shard(model, mesh=mesh(2), **options)


# --- torch as it comes, before composer_fsdp2 repairs it in this process


@error("gloo-average")
def _() -> None:
    model = fully_shard(Stack(), mesh=mesh(2, 1, names=("replicate", "shard")))
    model(torch.ones(1, 4)).sum().backward()


# --- the configuration: ours


def translated(world_size: int | None = 8, **config: Any) -> Any:
    from composer_fsdp2 import translate

    return translate(config, world_size=world_size)


@error("unknown-key")
def _() -> None:
    translated(sharding_stratgy="FULL_SHARD")


@error("world-size")
def _() -> None:
    translated(data_parallel_shard_degree=8, world_size=12)


@error("no-shard-with-degrees")
def _() -> None:
    translated(sharding_strategy="NO_SHARD", data_parallel_shard_degree=4, data_parallel_replicate_degree=2)


@error("strategy-or-reshard")
def _() -> None:
    translated(sharding_strategy="FULL_SHARD", reshard_after_forward=False)


@error("state-dict-type-local")
def _() -> None:
    translated(state_dict_type="local")


@error("low-precision-grads")
def _() -> None:
    from composer_fsdp2 import prepare_fully_shard

    config = {"keep_low_precision_grads": True, "mixed_precision": "PURE"}
    prepare_fully_shard(Stack(), None, config, precision="amp_bf16", device="cpu")


@error("node-group")
def _() -> None:
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        translated(process_group="node")


@error("mask-of-a-part")
def _() -> None:
    scores, mask = torch.zeros(1, 2, 8, 8), torch.zeros(1, 1, 4, 4)
    _ = scores + mask[:, :, :, :8]  # as eager attention of transformers does


@error("unknown-attention")
def _() -> None:
    import composer_fsdp2.compat.context  # knows MPT, as under install()
    from composer_fsdp2 import prepare_fully_shard

    del composer_fsdp2
    prepare_fully_shard(Stack(), None, {"context_parallel_degree": 2}, device="cpu")


@error("tensor-parallel-plan")
def _() -> None:
    with FSDP2():
        trainer({"fsdp": {}, "tp": {"tensor_parallel_degree": 2}})


def split_stack(model: nn.Module, plan: dict[str, Any]) -> None:
    from composer_fsdp2 import prepare_fully_shard

    split = {"tensor_parallel_degree": 2, "layer_plan": plan}
    prepare_fully_shard(model, None, {}, device="cpu", tensor_parallel=split)


@error("tensor-parallel-path")
def _() -> None:
    split_stack(Stack(), {"block.0": ColwiseParallel()})


@error("tensor-parallel-tie")
def _() -> None:
    model = Stack()
    model.blocks[1].weight = model.blocks[0].weight
    split_stack(model, {"blocks.0": ColwiseParallel()})


class StackedExperts(nn.Module):
    """As LLM Foundry's torch_dmoe holds them."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.mlp = ExpertWeights(num_experts)

    def forward(self, x: Any, scores: Any, expert_weights: Any, top_experts: Any) -> Any: ...


class ExpertWeights(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.moe_num_experts = num_experts
        self.w1 = nn.Parameter(torch.ones(num_experts * 2, 4))

    def forward(self, x: Any, expert_idx: int) -> Any: ...


def split_experts(layer: nn.Module, **section: Any) -> None:
    from composer_fsdp2 import prepare_fully_shard

    model = nn.ModuleDict({"experts": layer})
    prepare_fully_shard(model, None, {"expert_parallel_degree": 2} | section, device="cpu")


@error("experts-and-replicas")
def _() -> None:
    split_experts(StackedExperts(), sharding_strategy="HYBRID_SHARD", data_parallel_replicate_degree=2)


@error("experts-not-stacked")
def _() -> None:
    split_experts(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))


@error("experts-degree")
def _() -> None:
    split_experts(StackedExperts(3))


# --- the configuration: Composer's


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


def fsdp2_trainer(model: Any = None, **options: Any) -> Any:
    """Composer's own FSDP2."""
    from composer.utils import FSDP2Config

    return trainer({"fsdp": FSDP2Config()}, model, **options)


@error("composer-device-mesh")
def _() -> None:
    trainer({"fsdp": {"device_mesh": [2]}})


@error("composer-cpu-offload")
def _() -> None:
    with FSDP1():
        trainer({"fsdp": {"cpu_offload": True}})


@error("composer-auto-microbatching")
def _() -> None:
    from net import batches

    with mock.patch("composer.trainer.trainer._is_auto_microbatching", return_value=True):  # it asks for a GPU first
        fsdp2_trainer(train_dataloader=batches(2), max_duration="1ba", device_train_microbatch_size="auto")


@error("composer-state-dict-type-local")
def _() -> None:
    with FSDP1():
        trainer({"fsdp": {"state_dict_type": "local"}})


@error("composer-wrap-keys")
def _() -> None:
    model = composer_model()
    model.model.fsdp_wrap_fn = lambda module: {"sharding_strategy": "SHARD_GRAD_OP"}
    fsdp2_trainer(model)


@error("composer-wrap-argument")
def _() -> None:
    model = composer_model()
    model.model.fsdp_wrap_fn = lambda module: (
        {"activation_checkpointing": True} if isinstance(module, nn.LayerNorm) else False
    )
    fsdp2_trainer(model)


@error("composer-groups-without-orig-params")
def _() -> None:
    model = composer_model()
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)
    with FSDP1():
        trainer({"fsdp": {"use_orig_params": False}}, model, optimizers=optimizer)


@error("composer-monolith-sync")
def _() -> None:
    with FSDP1():
        trainer({"fsdp": {"load_monolith_rank0_only": True}}, load_path="full/ep0-ba3-rank0.pt")


# --- the configuration: accelerate and transformers


@error("accelerate-reshard")
def _() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward="FULL_SHARD")


@error("accelerate-local")
def _() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")


@error("accelerate-forward-prefetch")
def _() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    FullyShardedDataParallelPlugin(fsdp_version=2, forward_prefetch=True)


@error("accelerate-min-num-params")
def _() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    with mock.patch.dict(os.environ, {"FSDP_MIN_NUM_PARAMS": "1e8"}):
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP")
        plugin.set_auto_wrap_policy(Stack())


# --- sharding: fully_shard's arguments


@error("fully-shard-mixed-precision")
def _() -> None:
    fully_shard(Stack(), mixed_precision=MixedPrecisionPolicy())


@error("fully-shard-cpu-offload")
def _() -> None:
    fully_shard(Stack(), cpu_offload=True)


@error("reshard-none")
def _() -> None:
    fully_shard(Stack(), mesh=mesh(2), reshard_after_forward=None)


@error("reshard-not-a-factor")
def _() -> None:
    fully_shard(Stack(), mesh=mesh(2), reshard_after_forward=3)


@error("mesh-unnamed")
def _() -> None:
    fully_shard(Stack(), mesh=mesh(1, 2))


@error("mesh-3d")
def _() -> None:
    fully_shard(Stack(), mesh=mesh(1, 1, 2, names=("pp", "replicate", "shard")))


# --- sharding: modules and parameters


@error("twice")
def _() -> None:
    model = fully_shard(Stack(), mesh=mesh(2))
    fully_shard(model, mesh=mesh(2))


@error("module-list")
def _() -> None:
    fully_shard(Stack().blocks, mesh=mesh(2))


@error("root-first")
def _() -> None:
    model = fully_shard(Stack(), mesh=mesh(2))
    fully_shard(model.blocks[0], mesh=mesh(2))


@error("scalar")
def _() -> None:
    model = Stack()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    fully_shard(model, mesh=mesh(2))


@error("not-contiguous")
def _() -> None:
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    fully_shard(model, mesh=mesh(2))


@error("uneven-dim")
def _() -> None:
    fully_shard(nn.Linear(3, 4), mesh=mesh(2), shard_placement_fn=lambda p: Shard(p.ndim - 1))


@error("deepcopy")
def _() -> None:
    copy.deepcopy(sharded_stack())


# --- sharding: with tensor parallelism


@error("fsdp-then-tp")
def _() -> None:
    both = mesh(1, 2, names=("dp", "tp"))
    model = fully_shard(Stack(), mesh=both["dp"])
    parallelize_module(model, both["tp"], {"blocks.0": ColwiseParallel()})


@error("other-meshes")
def _() -> None:
    model = Stack()
    parallelize_module(model, mesh(2, names=("tp",)), {"blocks.0": ColwiseParallel()})
    fully_shard(model, mesh=mesh(2, names=("dp",)))


@error("experts-without-a-mesh")
def _() -> None:
    along = mesh(1, 2, names=("weight_parallel", "expert_parallel"))["expert_parallel"]
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), along, [Shard(0)]))
    split_experts(layer)


@error("tp-not-innermost")
def _() -> None:
    both = mesh(2, 1, names=("tp", "dp"))
    model = Stack()
    parallelize_module(model, both["tp"], {"blocks.0": ColwiseParallel()})
    fully_shard(model, mesh=both["dp"])


@error("tp-uneven")
def _() -> None:
    both = mesh(1, 2, names=("dp", "tp"))
    model = Stack(width=3)
    parallelize_module(model, both["tp"], {"blocks.0": ColwiseParallel()})
    fully_shard(model, mesh=both["dp"])


@error("tp-embeddings")
def _() -> None:
    for rows in (6, 8):
        model = nn.Sequential(nn.Embedding(rows, 4))
        parallelize_module(model, mesh(2), {"0": ColwiseParallel(output_layouts=Replicate())})
        model(torch.arange(5)).sum().backward()


# --- sharding: Composer


@error("composer-tied-siblings")
def _() -> None:
    model = composer_model()
    model.model.fsdp_wrap_fn = lambda module: isinstance(module, nn.Embedding | nn.Linear)
    fsdp2_trainer(model)


@error("composer-tied-outside")
def _() -> None:
    model = composer_model()
    model.model.fsdp_wrap_fn = lambda module: isinstance(module, nn.Embedding)
    fsdp2_trainer(model)


@error("composer-duplicate-modules")
def _() -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = composer_model()
    model.model.blocks[1] = model.model.blocks[0]
    fsdp2_trainer(model)


@error("composer-other-model-fsdp1")
def _() -> None:
    first, *rest = composer_model().parameters()
    with FSDP1():
        trainer({"fsdp": {}}, optimizers=torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1))


@error("composer-other-model")
def _() -> None:
    fsdp2_trainer(optimizers=torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))


@error("other-model")
def _() -> None:
    with FSDP2():
        trainer({"fsdp": {}}, optimizers=torch.optim.SGD(composer_model().parameters(), lr=0.1))


@error("composer-mixed-init-fsdp1")
def _() -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = composer_model()
    with FSDP1():
        trainer({"fsdp": {}}, model)


@error("composer-mixed-init")
def _() -> None:
    with torch.device("cpu" if dist.get_rank() else "meta"):
        model = composer_model()
    fsdp2_trainer(model)


@error("mixed-init")
def _() -> None:
    from composer_fsdp2 import prepare_fully_shard

    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = Stack()
    prepare_fully_shard(model, None, {"sync_module_states": False}, device="cpu")


@error("composer-no-init")
def _() -> None:
    with torch.device("meta"):
        model = composer_model()
    with FSDP1():
        trainer({"fsdp": {}}, model)


@error("no-init")
def _() -> None:
    with torch.device("meta"):
        model = composer_model()
    with FSDP2():
        trainer({"fsdp": {}}, model)


@error("swa")
def _() -> None:
    from composer.algorithms import SWA

    with FSDP2():
        trainer({"fsdp": {}}, algorithms=[SWA()])


@error("sharded-already")
def _() -> None:
    from composer_fsdp2 import prepare_fully_shard

    prepare_fully_shard(sharded_stack(), None, {}, device="cpu")


@error("ranks-differ")
def _() -> None:
    from composer_fsdp2 import prepare_fully_shard

    prepare_fully_shard(Stack(width=4 + 4 * dist.get_rank()), None, {}, device="cpu")


# --- the first steps


@error("two-dtypes")
def _() -> None:
    model = Stack()
    model.blocks[0].to(torch.bfloat16)
    fully_shard(model, mesh=mesh(2))(torch.ones(1, 4))


@error("fsdp1-two-dtypes")
def _() -> None:
    model = Stack()
    model.blocks[0].to(torch.bfloat16)
    FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@error("fsdp1-requires-grad")
def _() -> None:
    model = Stack()
    model.blocks[0].requires_grad_(False)
    FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False)


@error("fsdp1-tied")
def _() -> None:
    model = Chain(wte=nn.Embedding(5, 4), head=nn.Linear(4, 5, bias=False))
    tie(model.wte, model.head)
    model.head = FullyShardedDataParallel(model.head, device_id=torch.device("cpu"), use_orig_params=True)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.tensor([[1]]))


@error("on-meta")
def _() -> None:
    with torch.device("meta"):
        model = Stack()
    fully_shard(model, mesh=mesh(2))(torch.ones(1, 4))


@error("outside-forward")
def _() -> None:
    model = fully_shard(Stack(), mesh=mesh(2))
    model.blocks[0](torch.ones(1, 4))


@error("child-before-root")
def _() -> None:
    model = sharded_stack()
    model.blocks[0](torch.ones(1, 4))
    model(torch.ones(1, 4))


@error("clip-ignored")
def _() -> None:
    model = Stack()
    fully_shard(model, mesh=mesh(2), ignored_params=set(model.blocks[1].parameters()))
    model(torch.ones(1, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@error("clip-two-meshes")
def _() -> None:
    model = Stack()
    fully_shard(model.blocks[0], mesh=mesh(2, names=("a",)))
    fully_shard(model, mesh=mesh(1, 2, names=("replicate", "shard")))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@error("clip-method")
def _() -> None:
    sharded_stack().clip_grad_norm_(1.0)


@error("no-sync")
def _() -> None:
    sharded_stack().no_sync()


@error("after-an-error")
def _() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model = sharded_stack()
    x = torch.ones(1, 4)
    hook = model.blocks[0].register_forward_hook(lambda module, args, output: Fails.apply(output))
    with contextlib.suppress(torch.OutOfMemoryError):
        model(x).sum().backward()
    hook.remove()
    model.zero_grad()
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@error("copy-of-tensor")
def _() -> None:
    model = sharded_stack()
    with torch.no_grad():
        model.blocks[0].weight.copy_(torch.ones(4, 4))


@error("composer-adaptive-clipping")
def _() -> None:
    from composer.algorithms.gradient_clipping import apply_gradient_clipping

    model = FullyShardedDataParallel(Stack(), device_id=torch.device("cpu"), use_orig_params=True)
    apply_gradient_clipping(model, "adaptive", 0.1, fsdp_enabled=True)


# --- later


@error("peer-out-of-memory")
def _() -> None:
    from composer_fsdp2.training.out_of_memory import OutOfMemoryVote

    model = sharded_stack()
    vote = OutOfMemoryVote(model)
    vote.start()
    if dist.get_rank() == 1:
        vote.report()
        vote.stop()
        raise torch.OutOfMemoryError("CUDA out of memory.")
    model(torch.ones(1, 4))


@error("other-batches")
def _() -> None:
    from composer_fsdp2.parallel.batches import check_batch

    batch = {"input_ids": torch.arange(6).reshape(2, 3) + dist.get_rank()}
    check_batch(batch, what="the first batch of fit, or of its epoch")


@error("cannot-gather")
def _() -> None:
    from composer_fsdp2.parallel.batches import share_batch

    share_batch({"input_ids": torch.ones(2, 3 + dist.get_rank())}, how="gather")


@error("ranks-diverged")
def _() -> None:
    from composer_fsdp2 import prepare_fully_shard

    model = Stack()
    prepare_fully_shard(model, None, {"collective_guard": 60, "mixed_precision": "FULL"}, device="cpu")
    model(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == 0:
        model(torch.ones(1, 4))  # rank 1 has a batch less
    else:
        from composer_fsdp2 import clip_grad_norm_

        clip_grad_norm_(model, 1.0)


class Experts(nn.Module):
    """Goes through its experts from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](self.experts[1](x))


@error("expert-units")
def _() -> None:
    from composer_fsdp2 import prepare_fully_shard

    policy = {"transformer_layer_cls_to_wrap": [], "moe_experts": ["Linear"]}
    prepare_fully_shard(nn.Sequential(Experts()), None, {"wrap_policy": policy}, device="cpu")


@error("expert-order")
def _() -> None:
    from composer_fsdp2.parallel.idle_experts import run_idle_experts

    block = Experts()
    run_idle_experts(block, block.experts)
    block(torch.ones(1, 4))


@error("gloo-timeout")
def _() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)
    time.sleep(2)  # rank 1 runs no such batch


@error("control-group")
def _() -> None:
    from composer_fsdp2.training import control

    # As if each rank were a node, and gloo did not reach the other: there is one machine here.
    no_network = RuntimeError("Gloo connectFullMesh failed with [...]")
    with mock.patch.object(dist, "new_group", side_effect=no_network):
        control.connect(f"host {dist.get_rank()}")


@error("summon-in-forward")
def _() -> None:
    from composer_fsdp2 import prepare_fully_shard, summon_full_params

    model = Stack()
    prepare_fully_shard(model, None, {"mixed_precision": "FULL"}, device="cpu")

    def hook(*_: object) -> None:
        with summon_full_params(model):
            pass

    model.blocks[1].register_forward_pre_hook(hook)
    model(torch.ones(1, 4))


@error("export")
def _() -> None:
    with FSDP2():
        from composer.utils import export_for_inference

        export_for_inference(sharded_stack(), "torchscript", "model.pt")


# --- checkpoints: torch and Composer


@error("dcp-missing-key")
def _() -> None:
    dcp.load({"state": {"model": {"model.new.weight": torch.zeros(2)}}}, checkpoint_id="sharded/ep0-ba3")


@error("dcp-truncated")
def _() -> None:
    places = dcp.FileSystemReader("sharded/ep0-ba3").read_metadata().storage_data.items()
    [place] = [p for i, p in places if i.fqn.endswith("model.wte.weight") and p.relative_path == "__0_0.distcp"]
    path = damaged("sharded/ep0-ba3", "truncated", lambda data: data[: place.offset + place.length // 2])
    dcp.load({"state": {"model": {"model.wte.weight": torch.zeros(11, 6)}}}, checkpoint_id=path)


@error("composer-directory")
def _() -> None:
    from composer.utils import FSDP2Config

    trainer({"fsdp": FSDP2Config(state_dict_type="sharded")}, load_path="full/ep0-ba3-rank0.pt")


@error("composer-is-a-directory")
def _() -> None:
    from composer.utils import FSDP2Config

    trainer({"fsdp": FSDP2Config(state_dict_type="full")}, load_path="sharded/ep0-ba3")


@error("composer-old-optimizer")
def _() -> None:
    from composer.utils import FSDP2Config
    from net import build_model, build_optimizer

    model = build_model()
    config = {"fsdp": FSDP2Config(state_dict_type="sharded")}
    trainer(config, model, optimizers=build_optimizer(model), load_path="sharded/ep0-ba3")


@error("composer-local")
def _() -> None:
    from composer.utils import FSDP2Config

    config = {"fsdp": FSDP2Config(state_dict_type="sharded")}
    trainer(config, load_path="local/ep0-ba3", load_weights_only=True)


@error("torch-weights-only")
def _() -> None:
    torch.load("full/ep0-ba3-rank0.pt")


@error("optimizer-by-number")
def _() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    plain = Stack()
    old = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(1, 4)).sum().backward()
    old.step()
    model = sharded_stack()
    new = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, new, old.state_dict(), options=StateDictOptions(full_state_dict=True))


@error("torch-per-rank")
def _() -> None:
    with mock.patch.object(dist.distributed_c10d, "is_initialized", return_value=False):  # as in a shell
        torch.load("per-rank/sharded-rank0.pt", weights_only=False)


# --- checkpoints: ours


def load(path: str, **options: Any) -> Any:
    from net import build_model

    from composer_fsdp2 import load_checkpoint

    return load_checkpoint(path, build_model(), **options)


def damaged(source: str, name: str, change: Callable[[bytes], bytes]) -> str:
    """A copy with its last tensor file changed; made by rank 0, seen by all."""
    if dist.get_rank() == 0:
        if Path(source).is_dir():
            shutil.copytree(source, name)
            file = Path(name) / "__0_0.distcp"
        else:
            file = Path(shutil.copy(source, name))
        file.write_bytes(change(file.read_bytes()))
    dist.barrier()
    return name


@error("does-not-fit")
def _() -> None:
    from composer_fsdp2 import load_checkpoint

    load_checkpoint("full", Stack())


@error("damaged-content")
def _() -> None:
    def flip(data: bytes) -> bytes:
        at = data.index(
            torch.load("full/ep0-ba3-rank0.pt", weights_only=False)["state"]["model"]["model.wte.weight"]
            .numpy()
            .tobytes()
        )
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    load(damaged("full/ep0-ba3-rank0.pt", "flipped.pt", flip))


@error("flat-without-model")
def _() -> None:
    from composer_fsdp2 import convert_checkpoint

    convert_checkpoint("local", "new.pt", to="monolithic")


@error("rank-file-missing")
def _() -> None:
    if dist.get_rank() == 0:
        shutil.copy("per-rank/sharded-rank0.pt", "alone-rank0.pt")
    dist.barrier()
    load("alone-rank0.pt")


@error("no-metadata")
def _() -> None:
    if dist.get_rank() == 0:
        shutil.copytree("sharded/ep0-ba3", "cut-short", ignore=shutil.ignore_patterns(".metadata"))
    dist.barrier()
    load("cut-short")


class Stranger:
    """A class of the user's, in a checkpoint."""


@error("not-trusted")
def _() -> None:
    if dist.get_rank() == 0:
        torch.save({"state": {"model": {}, "callbacks": Stranger()}, "rng": []}, "stranger.pt")
    dist.barrier()
    load("stranger.pt")
