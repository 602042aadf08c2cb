"""The entry points, with FSDP1's signatures: translate the configuration, plan, compare across ranks, apply."""

import logging
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2._torch.private_names import FSDP1Wrapper, parent_mesh
from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.config.sharding import ActivationCheckpointing, ShardingConfig
from composer_fsdp2.errors import PlanError, UnsupportedError
from composer_fsdp2.fsdp1.attributes import add_fsdp1_attributes
from composer_fsdp2.fsdp1.checkpointed import CheckFn, select_checkpointed
from composer_fsdp2.fsdp1.hooks import initializers, read_hooks
from composer_fsdp2.fsdp1.module_settings import read_overrides
from composer_fsdp2.fsdp1.read import UserConfig
from composer_fsdp2.fsdp1.tensor_parallel import TensorParallel
from composer_fsdp2.fsdp1.translate import Translation, translate
from composer_fsdp2.parallel.experts import paths_of_experts, plan_experts, with_experts
from composer_fsdp2.parallel.idle_experts import refuse_experts_of_batches
from composer_fsdp2.parallel.idle_towers import refuse_towers
from composer_fsdp2.parallel.order import execute_plan, refuse_illegal
from composer_fsdp2.parallel.sequences import plan_context
from composer_fsdp2.parallel.tensor import (
    LayerPlan,
    TensorPlan,
    parallelized_along,
    plan_parallelize,
    read_parallelized,
)
from composer_fsdp2.parallel.tiled_mlp import choose_tiled
from composer_fsdp2.sharding.activations import (
    caching_modules,
    require_checkpointing,
    turn_off_caches,
    wrap_activations,
)
from composer_fsdp2.sharding.agree import agree, require_process_group
from composer_fsdp2.sharding.apply import check_plan
from composer_fsdp2.sharding.decide import decide_sharding, refuse_cast_gradients, refuse_sharded
from composer_fsdp2.sharding.large_units import notes_on_large_units
from composer_fsdp2.sharding.optimizer import Optimizers, check_optimizers, rebinding, refuse_frozen, the_optimizer
from composer_fsdp2.sharding.plan import ShardingPlan

log = logging.getLogger(__name__)


def prepare_fully_shard(
    model: nn.Module,
    optimizers: Optimizers,
    fsdp_config: Any,
    precision: Any = None,
    device: Any = None,
    auto_microbatching: bool = False,
    te_rng_seed: int = 1234,
    *,
    tensor_parallel: Any = None,
) -> tuple[list[Any], dict[str, nn.Module]]:
    """Shard ``model`` with ``fully_shard``, as Composer's ``prepare_fsdp_module`` sharded it with FSDP1.

    Args:
        model: Any module; its direct children are the root units. Modified in place.
        optimizers: One optimizer (or a list of one) over some or all of the model's parameters, or None. It keeps its
            parameter groups, their options and its state, and references the sharded parameters afterwards.
        fsdp_config: Composer's FSDPConfig or FSDP2Config, or a mapping with keys of FSDP1, FSDP2 or both.
        precision: Composer's Precision or its string. None means ``amp_fp16`` on CUDA and ``fp32`` on the CPU.
        device: Composer's Device, a torch.device or a string. None means CUDA if available.
        auto_microbatching: Composer's ``device_train_microbatch_size='auto'``. Has no effect here: under the shim, the
            Trainer's own loop votes and repeats the batch.
        te_rng_seed: Seed of Transformer Engine's checkpointing (``te_checkpoint_wrapper`` under ``amp_fp8``).
        tensor_parallel: Composer's TPConfig, or a mapping with its keys ``tensor_parallel_degree`` and ``layer_plan``.
            Layers are TP-sharded over consecutive ranks before the model is sharded over the other ranks.
            ``layer_plan`` maps module paths to torch's styles, or is "auto" for the plan of a known model. The ranks of
            a tensor-parallel group train on the same batch. A model that the script has already parallelized with
            torch's ``parallelize_module`` is accepted if its mesh is a slice of one mesh with the tensor axis last.
    Returns:
        ``(hook_handles, fsdp_modules)``, both empty. FSDP1's automatic microbatching used them.
    Raises:
        ConfigError: an unknown key, a wrong value, a contradiction, or no process group.
        UnsupportedError: a setting that cannot be carried over (yet); names the key. Also a NotImplementedError.
        PlanError: the model or the optimizer does not fit; names the module.

    Called on all ranks. Errors are raised on all ranks, before the model or the optimizer is modified. Compares the
    plan across ranks, creates the process groups of the meshes, and broadcasts parameters and buffers if
    ``sync_module_states`` is set.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> config = {"sharding_strategy": "FULL_SHARD"}
        >>> _ = prepare_fully_shard(model, optimizer, config, precision="fp32", device="cpu")
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
    """
    require_process_group("prepare_fully_shard")
    world_size = dist.get_world_size()

    def decide() -> tuple[Translation, ShardingPlan, tuple[DeviceMesh, ...]]:
        decided = _decide(model, optimizers, fsdp_config, precision, device, te_rng_seed, tensor_parallel, world_size)
        _refuse_blocking(decided[0])
        require_checkpointing(decided[1].config.activation_checkpointing)  # not needed for a plan without ranks
        return decided

    translation, plan, existing_meshes = agree(decide, lambda decided: decided[1].fingerprint)
    _report(translation, plan)
    optimizer = the_optimizer(optimizers)
    follow = None if optimizer is None else rebinding(model, optimizer)
    run = execute_plan(model, plan, initializers(model), existing_meshes=existing_meshes)
    run.report, run.findings = translation.explain(), translation.findings
    add_fsdp1_attributes(model)
    if follow is not None:
        follow()
    return [], {}


def plan_run(
    model: nn.Module,
    fsdp_config: Any,
    *,
    world_size: int,
    precision: Any = None,
    device: Any = None,
    tensor_parallel: Any = None,
) -> tuple[Translation, ShardingPlan]:
    """Plan as ``prepare_fully_shard`` would plan on each of ``world_size`` ranks, without a process group.

    The digest of the plan equals the one that those ranks would compare. A blocking finding is a key for which
    ``prepare_fully_shard`` would raise; here the plan follows the other keys.

    Args:
        model: May be on the meta device.
    Returns:
        The translation of the configuration, with its findings, and the plan.
    Raises:
        As ``prepare_fully_shard``, except for blocking findings.

    Does not communicate.
    """
    return _decide(model, None, fsdp_config, precision, device, 1234, tensor_parallel, world_size)[:2]


def plan_sharding(
    model: nn.Module,
    config: ShardingConfig,
    *,
    optimizers: Optimizers = None,
    precision: str | None = None,
    tensor_parallel: LayerPlan | None = None,
) -> ShardingPlan:
    """Choose the FSDP units of ``model`` without modifying it.

    Args:
        model: Any module tree; parameters may be on the meta device. Its direct children are the root units. The
            units below are selected as Composer's FSDP1 did, by the children's ``fsdp_wrap_fn`` and
            ``activation_checkpointing_fn`` and the modules' ``_fsdp_wrap`` and ``_activation_checkpointing``.
        config: The ``config`` of a ``Translation``, or a ``ShardingConfig``.
        optimizers: Checked against the model, if not None.
        precision: Composer's precision (``translate(...).precision``), for wrap functions whose settings are DEFAULT or
            PURE.
        tensor_parallel: The style of each TP-sharded module by its path, for the tensor axis of ``config.mesh``; "auto"
            for the plan of a known model. None without such an axis, or if the script has already parallelized the
            model.
    Returns:
        The plan, for ``apply_plan``. ``print(plan)`` explains it.
    Raises:
        PlanError: the model is already sharded, a wrap function failed, the optimizer belongs to another model or has
            no trainable parameters, a parameter cannot be sharded, or there is nothing to shard.
        ConfigError: a wrap function's dict has an unknown key or a wrong value.
        UnsupportedError: ``keep_low_precision_grads`` where gradients cannot keep the reduction's dtype, or context
            parallelism with an attention module that it cannot divide.

    Call this on all ranks with the same model. Does not communicate, and needs no process group.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> plan = plan_sharding(model, translate({}, device="cpu").config)
        >>> [unit.name for unit in plan.units]
        ['0', '1']
    """
    refuse_sharded(model)
    check_optimizers(model, optimizers)
    of_experts = paths_of_experts(model) if config.expert_parallel_degree > 1 else frozenset[str]()
    split = _plan_parallelize(model, config.mesh, tensor_parallel, of_experts)
    choices = read_hooks(model, config, precision=precision)
    experts = plan_experts(model, config, choices, partial(read_overrides, config=config, precision=precision))
    placements = {**split.placements, **experts.placements}
    plan = decide_sharding(model, config, experts.choices, split=split.modules, placements=placements)
    plan = with_experts(plan, experts.layers) if experts.layers else plan
    plan = plan_context(model, plan)
    plan = replace(plan, tiled=choose_tiled(model, config.tiled_mlp))
    refuse_illegal(plan)
    refuse_frozen(model, optimizers, plan.frozen)
    refuse_experts_of_batches(model, plan.expert_blocks)
    recomputed = plan.checkpointed if config.activation_checkpointing.checkpoint else ()
    refuse_towers(model, plan.tower_models, recomputed)
    refuse_cast_gradients(model, plan)
    return plan


def _plan_parallelize(
    model: nn.Module, mesh: MeshSpec, layer_plan: LayerPlan | None, of_experts: Collection[str]
) -> TensorPlan:
    """Plan which modules are TP-sharded, by the layer plan or because the script has already TP-sharded them.

    Raises:
        PlanError: both a layer plan and a parallelized model; or a mesh with a tensor axis without a layer plan, or the
            reverse.
    """
    by_script, along = read_parallelized(model)
    if along is not None:
        if layer_plan:
            raise PlanError(
                "the model is split by parallelize_module already, and there is a layer plan as well; pass the model "
                "as it was built, or leave the plan out"
            )
        if mesh.tensor_degree != along.size():
            raise PlanError(
                f"the model is split over {along.size()} ranks already, but the mesh is {mesh.text}; give translate "
                f"tensor_parallel_degree={along.size()}"
            )
        return by_script
    if (mesh.tensor_degree > 1) != bool(layer_plan):
        raise PlanError(
            f"the mesh is {mesh.text}, and the layer plan of tensor parallelism names {len(layer_plan or ())} modules: "
            "give both, a tensor_parallel_degree above 1 and a plan, or neither"
        )
    if not layer_plan:
        return by_script
    num_shards = mesh.shard_degree if mesh.is_resolved else 1
    return plan_parallelize(model, layer_plan, mesh.tensor_degree, num_shards, excluded_paths=of_experts)


def apply_plan(model: nn.Module, plan: ShardingPlan) -> None:
    """Shard ``model`` in place by ``plan``: checkpoint wrappers, initial values, ``fully_shard`` bottom-up, checks.

    Args:
        model: The model that was planned, not yet sharded.
        plan: From ``plan_sharding``. Its device meshes are created here.
    Raises:
        PlanError: the plan belongs to another model, or differs between ranks. The model is unchanged.
        ConfigError: no process group, or a mesh does not fit the world size.

    Called on all ranks. Compares the plan across ranks and creates the process groups of the meshes. With
    ``sync_module_states`` it broadcasts parameters and buffers from the first rank of each unit's mesh, or from rank 0
    if some ranks have no values.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> apply_plan(model, plan_sharding(model, translate({}, device="cpu").config))
        >>> type(model[0].weight.data).__name__
        'DTensor'
    """
    require_process_group("apply_plan")
    agree(partial(_check, model, plan), lambda _: plan.fingerprint)
    execute_plan(model, plan, initializers(model))


def _check(model: nn.Module, plan: ShardingPlan) -> None:
    """Repeat the checks that depend on the world size, and raise if the model was changed since it was planned."""
    check_plan(model, plan)
    require_checkpointing(plan.config.activation_checkpointing)
    refuse_illegal(plan.resolve(dist.get_world_size()))


def apply_activation_checkpointing(
    model: nn.Module,
    *,
    checkpoint: bool = True,
    cpu_offload: bool = False,
    reentrant: bool = False,
    check_fn: CheckFn | None = None,
) -> list[str]:
    """Wrap modules of ``model`` so that their activations are recomputed in backward, or offloaded to host memory.

    Can be used without sharding. With sharding, call it first (``prepare_fully_shard`` does, if
    ``activation_checkpointing`` is set): the unit's all-gather must enclose the recomputation. This is FSDP1's nesting,
    FSDP(AC(block)).

    Args:
        model: Modules are selected below each of its direct children: by their ``_activation_checkpointing`` attribute,
            else by ``check_fn``, else by the ``activation_checkpointing_fn`` of the direct child. Wrapped modules are
            skipped. If layers of a transformers model are recomputed, its ``use_cache`` is turned off in training;
            otherwise they would be added to the cache twice.
        checkpoint: Recompute the activations in backward.
        cpu_offload: Store the tensors that are saved for backward in host memory.
        reentrant: Use torch's reentrant implementation of checkpointing.
        check_fn: Called with a module; returns True to wrap it. Overrides the model's own functions.
    Returns:
        The paths of the wrapped modules, children before parents.
    Raises:
        PlanError: the model is already sharded, or a selection function raised. Nothing is wrapped.

    Does not communicate.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
        ['0']
    """
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule | FSDP1Wrapper):
            raise PlanError(
                f"module {path or '(the model)'!r} is sharded already: wrapping inside it would leave its unit's "
                "hooks on the wrong module; call apply_activation_checkpointing before sharding"
            )
    if not (checkpoint or cpu_offload):
        return []
    paths = select_checkpointed(model, check_fn)
    mode = ActivationCheckpointing(checkpoint=checkpoint, cpu_offload=cpu_offload, reentrant=reentrant)
    modules = dict(model.named_modules(remove_duplicate=False))
    turn_off_caches(model, caching_modules(modules, paths if checkpoint else ()))
    wrap_activations(model, paths, mode)
    return paths


def _decide(
    model: nn.Module,
    optimizers: Optimizers,
    fsdp_config: Any,
    precision: Any,
    device: Any,
    te_rng_seed: int,
    tensor_parallel: Any,
    world_size: int,
) -> tuple[Translation, ShardingPlan, tuple[DeviceMesh, ...]]:
    """Translate the configuration and plan the model. Does not communicate.

    Returns:
        The translation, the plan, and the ``DeviceMesh`` objects in the configuration. The plan has only their degrees.
    """
    given, tensor = UserConfig.read(fsdp_config), TensorParallel.read(tensor_parallel)
    refuse_sharded(model)
    along = parallelized_along(model, world_size)
    degree = tensor.degree if along is None else along.size()
    translation = translate(
        given, precision=precision, device=device, world_size=world_size, tensor_parallel_degree=degree
    )
    config = translation.config
    config.check_data_blocks(world_size)
    checkpointing = replace(config.activation_checkpointing, transformer_engine_seed=te_rng_seed)
    config = replace(config, activation_checkpointing=checkpointing)
    if tensor.gathers_batches and config.broadcast_batch is None:
        config = replace(config, broadcast_batch=BroadcastBatch.GATHER)
    plan = plan_sharding(
        model,
        config,
        optimizers=optimizers,
        precision=translation.precision,
        tensor_parallel=tensor.layer_plan,
    )
    if tensor.is_idle:
        plan = replace(plan, notes=(*plan.notes, "tensor_parallel_degree is 1: no layer is split, as in Composer"))
    plan = plan.resolve(world_size)
    plan = replace(plan, notes=(*plan.notes, *notes_on_large_units(model, plan)))
    slices = (mesh for mesh in (given.mesh, tensor.mesh) if isinstance(mesh, DeviceMesh))
    existing_meshes = tuple(mesh for each in slices for mesh in (each, parent_mesh(each)))
    return translation, plan, existing_meshes


def _refuse_blocking(translation: Translation) -> None:
    if blocking := translation.blocking:
        keys = tuple(finding.key for finding in blocking)
        raise UnsupportedError("\n".join(map(str, blocking)), keys=keys)


def _report(translation: Translation, plan: ShardingPlan) -> None:
    """Log the report on rank 0. Approximations are logged as warnings."""
    if dist.get_rank() != 0:
        return
    level = logging.INFO if translation.verbose else logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "%s\n%s", translation.explain(), plan.explain())
    for finding in translation.findings:
        if finding.outcome is Outcome.APPROXIMATE:
            log.warning("fsdp_config.%s", finding)
    for note in plan.notes:
        log.warning("%s", note)
    for left in plan.left_out:
        log.warning(
            "%d parameters are in no unit (%s; the first is %s): they stay unsharded on every rank and their gradients "
            "are not averaged across ranks, as under FSDP1",
            len(left.names),
            left.reason,
            left.names[0],
        )
