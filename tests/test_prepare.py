"""The front door: FSDP1's signature, and every bad input refused on every rank before anything is touched."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.models import Block, Chain, Model, layer, tokens
from support.ranks import run_ranks
from support.training import sgd
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_fsdp2 import (
    ComposerFSDP2Error,
    ConfigError,
    PlanError,
    UnsupportedError,
    prepare_fully_shard,
)

# --- what it gives back


def check_result() -> None:
    """Composer calls it with these positions and unpacks a list and a dict."""
    model = Model()
    config = {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": {"param_dtype": "bf16"}}
    printed = repr(config)
    assert prepare_fully_shard(model, [sgd(model)], config, "fp32", "cpu", False, 1234) == ([], {})
    assert repr(config) == printed
    assert all(isinstance(p, DTensor) for p in model.parameters()) and type(model.decoder).__name__ == "Decoder"


def check_config_forms() -> None:
    """A YAML section and a configuration object with the same words shard alike."""
    forms = [
        {"data_parallel_replicate_degree": 2},
        types.SimpleNamespace(data_parallel_replicate_degree=2, sharding_strategy="FULL_SHARD"),
    ]
    shapes = []
    for config in forms:
        model = Model()
        prepare_fully_shard(model, None, config, device=torch.device("cpu"), precision="fp32")
        shapes.append([parameter.to_local().shape for parameter in model.parameters()])
    assert shapes[0] == shapes[1] and shapes[0][0] == (11, 6)  # two replicas of one rank each: full parameters


def check_not_strict() -> None:
    """The error names the key and the way on, and that way works on the same model."""
    config = {"te_shard_fp8_weight": True}
    model = Model()
    with pytest.raises(UnsupportedError, match=r"(?s)te_shard_fp8_weight.*strict: false"):
        prepare_fully_shard(model, None, config, "amp_fp8", "cpu")
    prepare_fully_shard(model, None, config | {"strict": False}, "amp_fp8", "cpu")
    assert isinstance(model.decoder, FSDPModule)


def check_again() -> None:
    """Sharding twice by accident does not break the run."""
    model = Model()
    prepare_fully_shard(model, None, {}, device="cpu")
    model(tokens(0)).sum().backward()
    with pytest.raises(PlanError, match="'decoder' is sharded already, by FSDP2"):
        prepare_fully_shard(model, None, {}, device="cpu")
    model(tokens(0)).sum().backward()


def check_calls() -> None:
    all_of(check_result, check_config_forms, check_not_strict, check_again)


def test_signature_and_result_of_prepare_fsdp_module():
    """What Composer and scripts give it, and what they get back."""
    run_ranks(check_calls, 2)


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
    """Rank 0 alone warns of what is not as it was (each once), and shows translation and plan when verbose."""
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
    """No warning is shown to somebody whose run is carried over exactly, so that the others are read."""
    records, _ = run_ranks(check_log, 2, {"sharding_strategy": "FULL_SHARD"})
    about_the_model = ("own", "chain.kept")
    warnings = [text for level, text in records if level == "WARNING"]
    assert [text for text in warnings if not any(part in text for part in about_the_model)] == []


# --- bad input


def footprint(model: nn.Module, optimizers: Any) -> list[Any]:
    """Everything that a refused call must leave as it was: objects by identity, tensors by value."""
    seen: list[Any] = []
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = [len(value) for name, value in sorted(vars(module).items()) if name.endswith("_hooks")]
        seen.append((path, id(module), type(module), hooks, sorted(vars(module))))
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        value = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        seen.append((name, id(tensor), str(tensor.device), tensor.dtype, value.detach().clone().tolist()))
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        if optimizer is not None:
            seen.append((id(optimizer.param_groups), [id(group) for group in optimizer.param_groups]))
            seen.append([[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups])
            seen.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
            seen.append([(id(parameter), repr(state)) for parameter, state in optimizer.state.items()])
    return seen


class Wrapping(Chain):
    """Its wrap function gives, or raises, what it was told."""

    def __init__(self, answer: Any) -> None:
        super().__init__(inner=Block(), rest=layer())
        self.answer = answer

    def fsdp_wrap_fn(self, module: nn.Module) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def wrapping(answer: Any) -> Callable[[], nn.Module]:
    return lambda: Chain(net=Wrapping(answer))


def cpu_mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded_by_fsdp2() -> nn.Module:
    model = Model()
    fully_shard(model.decoder.blocks[0], mesh=cpu_mesh())
    return model


def wrapped_by_fsdp1() -> nn.Module:
    model = Model()
    model.decoder = FullyShardedDataParallel(model.decoder, device_id=torch.device("cpu"))
    return model


def wrapped_by_ddp() -> nn.Module:
    model = Model()
    model.decoder = DistributedDataParallel(model.decoder)
    return model


def with_a_dtensor() -> nn.Module:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = Model()
    weight = model.decoder.head.weight
    model.decoder.head.weight = nn.Parameter(distribute_tensor(weight.data, cpu_mesh(), [Shard(0)]))
    return model


def two_dtypes() -> nn.Module:
    model = Model()
    model.decoder.norm.bias = nn.Parameter(model.decoder.norm.bias.to(torch.bfloat16))
    return model


def nothing_to_shard() -> nn.Module:
    return layer()


def none(model: nn.Module) -> None:
    return None


def of_another_model(model: nn.Module) -> Any:
    return sgd(Model())


def two_optimizers(model: nn.Module) -> Any:
    return [sgd(model), sgd(model)]


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
    "sharded by FSDP2": (sharded_by_fsdp2, none, {}, {}, PlanError, "'decoder.blocks.0' is sharded already, by FSDP2"),
    "wrapped by FSDP1": (wrapped_by_fsdp1, none, {}, {}, PlanError, "'decoder' is sharded already, by FSDP1"),
    "wrapped by DDP": (wrapped_by_ddp, none, {}, {}, PlanError, "DistributedDataParallel"),
    "split along no axis of a mesh": (with_a_dtensor, none, {}, {}, PlanError, "make one mesh of all ranks"),
    "optimizer of another model": (Model, of_another_model, {}, {}, PlanError, "The same model must be passed"),
    "two optimizers": (Model, two_optimizers, {}, {}, NotImplementedError, "Only one optimizer"),
    "wrap function raises": (wrapping(KeyError("ffn")), sgd, {}, {}, PlanError, "KeyError for module 'net.inner'"),
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
    "two dtypes": (two_dtypes, sgd, {"mixed_precision": "PURE"}, {"precision": "amp_fp16"}, PlanError, "computes in"),
    "nothing to shard": (nothing_to_shard, sgd, {}, {}, PlanError, "pass the module that contains"),
}


def check_bad_input(
    build: Callable[[], nn.Module], make: Any, config: Any, options: dict[str, Any], kind: type[Exception], part: str
) -> None:
    model = build()
    optimizers = make(model)
    before = footprint(model, optimizers)
    with pytest.raises(kind) as error:
        prepare_fully_shard(model, optimizers, config, **{"device": "cpu", "precision": "fp32", **options})
    assert part in str(error.value), error.value
    assert isinstance(error.value, ComposerFSDP2Error) and isinstance(error.value, ValueError)
    assert footprint(model, optimizers) == before, "something was changed"


def check_bad_inputs() -> None:
    for_each(check_bad_input, BAD_INPUTS)


def test_bad_input_is_refused_and_nothing_is_touched():
    """The caller may mend the input and call again on the same model: every rank raised the documented error, which
    names the culprit, and no parameter, hook, class or group of the optimizer is another."""
    run_ranks(check_bad_inputs, 2)


DIFFERENCES: dict[str, list[str]] = {
    "wrap function": ["rank 1 could not go on", "out of luck", "'net.inner'"],
    "optimizer": ["rank 1 could not go on", "The same model must be passed"],
    "layers": ["ranks 0 and 1 decided differently", "rank 0:", "rank 1:", "decoder.blocks.2"],
    "setting": ["ranks 0 and 1 decided differently", "reshard_after_forward"],
    "shape": ["ranks 0 and 1 decided differently", "7"],
}


def check_one_rank_only(what: str, parts: list[str]) -> None:
    """One rank's model or configuration is another; whatever differs, all ranks raise."""
    is_odd = dist.get_rank() == 1
    config: dict[str, Any] = {"reshard_after_forward": not is_odd} if what == "setting" else {}
    model: nn.Module = Model(num_blocks=3 if is_odd and what == "layers" else 2)
    if what == "wrap function":
        model = Chain(net=Wrapping(RuntimeError("out of luck") if is_odd else True))
    elif what == "shape":
        model = Chain(net=layer(7 if is_odd else 6))
    optimizer = sgd(Model() if is_odd and what == "optimizer" else model)
    before = footprint(model, optimizer)
    with pytest.raises(PlanError if not is_odd else ComposerFSDP2Error) as error:
        prepare_fully_shard(model, optimizer, config, device="cpu")
    message = str(error.value)
    if not is_odd or "decided differently" in parts[0]:
        assert [part for part in parts if part not in message] == [], message
    assert footprint(model, optimizer) == before


def check_differences() -> None:
    for_each(check_one_rank_only, {what: (what, parts) for what, parts in DIFFERENCES.items()})


def test_a_difference_between_ranks_is_an_error_on_each():
    """A job whose ranks disagree ends at once with both versions in the message, not after a time-out of NCCL."""
    run_ranks(check_differences, 2)


def test_without_a_process_group():
    """A single-process script reads how to start ranks, and its model is untouched."""
    model = Model()
    optimizer = sgd(model)
    before = footprint(model, optimizer)
    with pytest.raises(
        ConfigError, match=r"prepare_fully_shard needs a process group, also on one rank.*composer -n N"
    ):
        prepare_fully_shard(model, optimizer, {}, device="cpu")
    assert footprint(model, optimizer) == before
