"""``prepare_fully_shard``: FSDP1's signature, and bad input refused on every rank before anything changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.legality import state_of
from support.models import Block, Chain, Model, layer
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import sgd
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from composer_fsdp2 import (
    ComposerFSDP2Error,
    ConfigError,
    PlanError,
    UnsupportedError,
    prepare_fully_shard,
)
from composer_fsdp2.prepare import plan_run

# --- result


def check_result() -> None:
    """Composer calls it with these positional arguments and unpacks a list and a dict."""
    model = Model()
    config = {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": {"param_dtype": "bf16"}}
    printed = repr(config)
    assert prepare_fully_shard(model, [sgd(model)], config, "fp32", "cpu", False, 1234) == ([], {})
    assert repr(config) == printed
    assert all(isinstance(p, DTensor) for p in model.parameters()) and type(model.decoder).__name__ == "Decoder"


def check_blocked() -> None:
    """The error names the key and an alternative, which works on the same model."""
    config = {"te_shard_fp8_weight": True}
    model = Model()
    with pytest.raises(UnsupportedError, match=r"te_shard_fp8_weight.*set it to false"):
        prepare_fully_shard(model, None, config, "amp_fp8", "cpu")
    prepare_fully_shard(model, None, {"te_shard_fp8_weight": False}, "amp_fp8", "cpu")
    assert isinstance(model.decoder, FSDPModule)


@on_ranks(2)
def test_signature_and_result_of_prepare_fsdp_module(folder: str) -> None:
    """The arguments of Composer and of scripts, and the results that they unpack."""
    all_of(check_result, check_blocked)


def check_log(config: dict[str, Any]) -> list[tuple[str, str]]:
    records: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("composer_fsdp2.prepare")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = Model()
        model.own = nn.Parameter(torch.ones(2))
        model.chain = Chain({"kept": {"limit_all_gathers": False}}, kept=layer(), rest=layer())
        prepare_fully_shard(model, None, config, device="cpu")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return records


def test_what_is_logged():
    """Only rank 0 warns of differences (once each), and logs translation and plan when verbose."""
    config = {"backward_prefetch": "BACKWARD_POST", "sharding_strategy": "FULL_SHARD", "min_params": 5, "verbose": True}
    records, others = run_ranks(check_log, 2, config)
    assert others == []
    warnings = [text for level, text in records if level == "WARNING"]
    assert len(warnings) == 3
    assert "backward_prefetch" in warnings[0] and "approximate" in warnings[0]
    assert "in the settings of chain.kept: limit_all_gathers is not needed" in warnings[1]
    assert "1 parameters are in no unit" in warnings[2] and "own" in warnings[2]
    (report,) = [text for level, text in records if level == "INFO"]
    for part in ("min_params", "decoder.blocks.1", "data_parallel_shard 2"):
        assert part in report


def test_a_clean_configuration_is_silent():
    """A run that migrates exactly gets no warning; otherwise users would ignore the others."""
    records, _ = run_ranks(check_log, 2, {"sharding_strategy": "FULL_SHARD"})
    about_the_model = ("own", "chain.kept")
    warnings = [text for level, text in records if level == "WARNING"]
    assert [text for text in warnings if not any(part in text for part in about_the_model)] == []


# --- bad input


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """A model that was changed before sharding."""

    def build() -> nn.Module:
        model = Model()
        change(model)
        return model

    return build


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def wrapping(answer: Any) -> Callable[[], nn.Module]:
    """A model whose wrap function returns this for one module; called on each rank if it is a function."""
    return lambda: Chain(net=Chain({"inner": answer() if callable(answer) else answer}, inner=Block(), rest=layer()))


def is_odd() -> bool:
    return dist.get_rank() == 1


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], dict[str, Any], dict[str, Any], type[Exception], str]

BAD_INPUTS: dict[str, Case] = {
    "unknown key": (Model, sgd, {"sharding_stratgy": "X"}, {}, ConfigError, "did you mean sharding_strategy"),
    "wrong type": (Model, sgd, {"sync_module_states": "no"}, {}, ConfigError, "true or false"),
    "no configuration": (Model, sgd, "FULL_SHARD", {}, ConfigError, "give a mapping"),
    "degrees": (Model, sgd, {"data_parallel_shard_degree": 3}, {}, ConfigError, "world size is 2"),
    "both degrees open": (
        Model,
        sgd,
        {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": -1},
        {},
        ConfigError,
        "both -1",
    ),
    "contradiction": (
        Model,
        sgd,
        {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
        {},
        ConfigError,
        "keep one of the two",
    ),
    "precision": (Model, sgd, {}, {"precision": "bf16"}, ConfigError, "amp_bf16"),
    "device": (Model, sgd, {}, {"device": "tpu"}, ConfigError, "'tpu'"),
    "unsupported key": (
        Model,
        sgd,
        {"te_shard_fp8_weight": True},
        {"precision": "amp_fp8"},
        NotImplementedError,
        "te_shard_fp8_weight",
    ),
    "Transformer Engine": (
        Model,
        sgd,
        {"te_checkpoint_wrapper": True, "activation_checkpointing": True, "activation_checkpointing_reentrant": False},
        {"precision": "amp_fp8"},
        ConfigError,
        "install transformer-engine",
    ),
    "process group": (Model, sgd, {"process_group": "set3"}, {}, ConfigError, "not a multiple of process_group set3"),
    "process group without this rank": (Model, sgd, {"process_group": [0]}, {}, ConfigError, "without the rank itself"),
    "ignored modules": (Model, sgd, {"ignored_modules": ["decoder"]}, {}, ConfigError, "list of modules"),
    "ignored modules of another model": (Model, sgd, {"ignored_modules": [nn.Linear(1, 1)]}, {}, PlanError, "not part"),
    "low precision gradients": (
        Model,
        sgd,
        {"mixed_precision": "PURE", "keep_low_precision_grads": True},
        {"precision": "amp_bf16"},
        NotImplementedError,
        "keep_low_precision_grads",
    ),
    "state_dict_type": (Model, sgd, {"state_dict_type": "local"}, {}, UnsupportedError, "'sharded'"),
    "sharded by FSDP2": (
        changed(lambda model: fully_shard(model.decoder.blocks[0], mesh=mesh_of_all())),
        lambda model: None,
        {},
        {},
        PlanError,
        "'decoder.blocks.0' is sharded already, by FSDP2",
    ),
    "wrapped by FSDP1": (
        changed(
            lambda model: setattr(
                model, "decoder", FullyShardedDataParallel(model.decoder, device_id=torch.device("cpu"))
            )
        ),
        lambda model: None,
        {},
        {},
        PlanError,
        "'decoder' is sharded already, by FSDP1",
    ),
    "wrapped by DDP": (
        changed(lambda model: setattr(model, "decoder", DistributedDataParallel(model.decoder))),
        lambda model: None,
        {},
        {},
        PlanError,
        "DistributedDataParallel",
    ),
    "split along no axis of a mesh": (
        changed(lambda model: parallelize_module(model.decoder.head, mesh_of_all(), ColwiseParallel())),
        lambda model: None,
        {},
        {},
        PlanError,
        "make one mesh of all ranks",
    ),
    "optimizer of another model": (
        Model,
        lambda model: sgd(Model()),
        {},
        {},
        PlanError,
        "The same model must be passed",
    ),
    "optimizer of another model on one rank": (
        Model,
        lambda model: sgd(Model() if is_odd() else model),
        {},
        {},
        PlanError,
        "The same model must be passed",
    ),
    "two optimizers": (
        Model,
        lambda model: [sgd(model), sgd(model)],
        {},
        {},
        NotImplementedError,
        "Only one optimizer",
    ),
    "wrap function returns a string": (wrapping("yes"), sgd, {}, {}, PlanError, "returned 'yes'"),
    "wrap settings": (wrapping({"shard": 1}), sgd, {}, {}, ConfigError, "unknown key 'shard'"),
    "process group of a module": (
        wrapping({"process_group": "nodes"}),
        sgd,
        {},
        {},
        ConfigError,
        "process_group is 'nodes'",
    ),
    "mesh of a module": (wrapping({"device_mesh": 1}), sgd, {}, {}, ConfigError, "device_mesh is 1"),
    "wrap function returns a string on one rank": (
        wrapping(lambda: "yes" if is_odd() else True),
        sgd,
        {},
        {},
        PlanError,
        "returned 'yes'",
    ),
    "other layers on one rank": (
        lambda: Model(num_blocks=3 if is_odd() else 2),
        sgd,
        {},
        {},
        PlanError,
        "ranks 0 and 1 decided differently",
    ),
    "another shape on one rank": (
        lambda: Chain(net=layer(7 if is_odd() else 6)),
        sgd,
        {},
        {},
        PlanError,
        "ranks 0 and 1 decided differently",
    ),
    "two dtypes": (
        changed(lambda model: setattr(model.decoder.norm, "bias", nn.Parameter(model.decoder.norm.bias.bfloat16()))),
        sgd,
        {"mixed_precision": "PURE"},
        {"precision": "amp_fp16"},
        PlanError,
        "computes in",
    ),
    "nothing to shard": (layer, sgd, {}, {}, PlanError, "pass the module that contains"),
}


def check_bad_input(
    build: Callable[[], nn.Module], make: Any, config: Any, options: dict[str, Any], kind: type[Exception], part: str
) -> None:
    model = build()
    optimizers = make(model)
    before = state_of(model, optimizers)
    with pytest.raises(kind) as error:
        prepare_fully_shard(model, optimizers, config, **{"device": "cpu", "precision": "fp32", **options})
    assert part in str(error.value), error.value
    assert isinstance(error.value, ComposerFSDP2Error) and isinstance(error.value, ValueError)
    assert state_of(model, optimizers) == before, "something was changed"


@on_ranks(2)
def test_bad_input_is_refused_and_nothing_is_touched(folder: str) -> None:
    """The caller can correct the input and call again on the same model. Every rank raises the documented error with
    the culprit's name, and no parameter, hook, class or optimizer group changes. If only one rank has bad input, the
    others would otherwise wait for it until NCCL's timeout."""
    for_each(check_bad_input, BAD_INPUTS)


def test_without_a_process_group():
    """In a single process the error shows how to start ranks, and the model is unchanged."""
    model = Model()
    optimizer = sgd(model)
    before = state_of(model, optimizer)
    with pytest.raises(
        ConfigError, match=r"prepare_fully_shard needs a process group, also on one rank.*composer -n N"
    ):
        prepare_fully_shard(model, optimizer, {}, device="cpu")
    assert state_of(model, optimizer) == before


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "1 unit on FSDP2 (4 ranks, FULL_SHARD)"),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "1 unit on FSDP2 (4 ranks, SHARD_GRAD_OP)"),
        ({"sharding_strategy": "NO_SHARD"}, "1 unit on FSDP2 (4 ranks, NO_SHARD)"),
        ({"data_parallel_replicate_degree": 2}, "1 unit on FSDP2 (4 ranks, HYBRID_SHARD)"),
        (
            {"data_parallel_replicate_degree": 2, "reshard_after_forward": False},
            "1 unit on FSDP2 (4 ranks, _HYBRID_SHARD_ZERO2)",
        ),
    ],
)
def test_a_plan_in_one_line_has_fsdp1s_word_for_its_strategy(config: dict[str, Any], said: str):
    """Rank 0 prints it; users check there that the run is the intended one."""
    assert plan_run(nn.Sequential(nn.Linear(4, 4)), config, world_size=4)[1].summary == said
