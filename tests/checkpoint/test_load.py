"""Loading into sharded and unsharded models: matches, refusals, and that a refusal changes nothing."""

from __future__ import annotations

import collections
import copy
import gzip
import itertools
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.checkpoints.corruptions import flip, record_at
from support.checkpoints.samples import bytes_of, write_safetensors
from support.comparing import assert_same, full, own_name
from support.examples import IS_THOROUGH
from support.models import VOCABULARY, WIDTH, Chain, Model, tied_model, tokens
from support.on_ranks import on_ranks
from support.ranks import impatient, run_ranks
from support.training import assert_close
from torch import nn
from torch.distributed.checkpoint import save as save_directory
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from composer_fsdp2 import CheckpointError, PlanError, UnsupportedError, load_checkpoint, prepare_fully_shard
from composer_fsdp2.checkpoint import open as opening
from composer_fsdp2.checkpoint.load.staging import Staging

Make = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One optimizer step with gradients that depend on the seed alone, not on how the parameters are sharded."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
            )  # every rank has the full gradient, so nothing is sent
        parameter.grad = gradient
    optimizer.step()


def trained(make: Make = Model, make_optimizer: MakeOptimizer = adamw) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and optimizer of an unsharded run after two steps; the same on every rank."""
    torch.manual_seed(0)
    model = make()
    optimizer = make_optimizer(model)
    for seed in range(2):
        step(model, optimizer, seed)
    return model, optimizer


def composer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, by_id: bool = False
) -> dict[str, Any]:
    """An unsharded model's state as Composer saves it. Optimizer state is keyed by name as under FSDP, or by position
    as without FSDP."""
    state: dict[str, Any] = {"model": dict(model.state_dict())}
    if optimizer is not None:
        saved = copy.deepcopy(optimizer.state_dict())
        if not by_id:
            names = {parameter: name for name, parameter in model.named_parameters()}
            order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
            saved = {
                "state": {order[number]: entries for number, entries in saved["state"].items()},
                "param_groups": [
                    {**group, "params": [order[number] for number in group["params"]]}
                    for group in saved["param_groups"]
                ],
            }
        state["optimizers"] = {type(optimizer).__qualname__: saved}
    return {"state": state, "rng": []}


def saved(root: Any, path: str | Path) -> Path:
    """Rank 0 saves; a barrier follows. Called on all ranks (alone without a process group)."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(root, path)
    if dist.is_initialized():
        dist.barrier()
    return Path(path)


def untrained(
    make: Make = Model, make_optimizer: MakeOptimizer = adamw, config: dict[str, Any] | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with other values and its optimizer, sharded if ``config`` is not None."""
    torch.manual_seed(1)
    model = make()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    optimizer = make_optimizer(model)
    if config is not None:
        prepare_fully_shard(model, optimizer, dict(config), precision="fp32")
    return model, optimizer


def canonical(name: str) -> str:
    return own_name(name).removeprefix("module.")


def contents(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a model and its optimizer, unsharded. Called on all ranks."""
    state = model.state_dict()
    found = {
        f"model {canonical(name)}": full(value).clone()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                of_key = full(value) if isinstance(value, torch.Tensor) else torch.tensor([*str(value).encode()])
                found[f"{key} of {canonical(name)}"] = of_key.clone()
    return found


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def refused(
    what: str,
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    says: Sequence[str],
    **options: bool,
) -> None:
    """Check that every rank raises a CheckpointError with these texts and that nothing changed. Called on all ranks."""
    before = contents(model, optimizer), hyperparameters(optimizer) if optimizer else []
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path, model, optimizer, **options)
    missing = [text for text in says if not re.search(text, str(raised.value))]
    assert not missing, f"{what}: {raised.value}\ndoes not say {missing}"
    assert_same(contents(model, optimizer), before[0], what, in_bits=True)
    assert (hyperparameters(optimizer) if optimizer else []) == before[1], what


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers


class Fp32Moments(torch.optim.SGD):
    """Keeps its state in fp32 whatever the parameter's dtype, and counts its steps in int64."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", torch.tensor(0)) + 1
            state["mean"] = parameter.grad.float() + state.get("mean", 0.0)
            state["note"] = "from the first step"
            parameter.sub_((0.01 * state["mean"]).to(parameter.dtype))


def make_bf16() -> nn.Module:
    return Model().to(torch.bfloat16)


def of_class(cls: type[torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: cls(model.parameters(), **options)


# test_optimizer_plan.py covers all of torch's optimizers; these differ in the layout of their state.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": of_class(torch.optim.SGD, lr=0.1),
    "AdamW": adamw,
    "a tensor as lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True),
    "Adagrad": of_class(torch.optim.Adagrad, lr=0.01),  # has state from the start
    "RMSprop": of_class(torch.optim.RMSprop, momentum=0.9, centered=True),
    "moments in fp32": of_class(Fp32Moments, lr=0.01),
    "Adafactor": of_class(torch.optim.Adafactor, lr=0.01),  # (n, 1) and (1, m) for a matrix
}
# torch cannot step Adafactor with sharded parameters: on the CPU, or at all in one of the versions.
WITHOUT_STEP = ("Adafactor",)


@on_ranks(2)
def test_every_optimizer_goes_on(folder: str) -> None:
    """After a load, the next optimizer step equals the step without the load, for state of any dtype and shape.

    In FSDP1's files the parameters of a unit share one step count; after the load each parameter has its own.
    """

    def check(name: str, by_id: bool, config: dict[str, Any] | None) -> None:
        make, make_optimizer = make_bf16 if name == "moments in fp32" else Model, OPTIMIZERS[name]
        model, optimizer = trained(make, make_optimizer)
        root = composer_state(model, optimizer, by_id=by_id)
        if by_id:  # one step tensor for the parameters of a unit, as in FSDP1's flat parameters
            shared = torch.tensor(2.0)
            for entries in root["state"]["optimizers"]["AdamW"]["state"].values():
                entries["step"] = shared
        path = saved(root, f"{folder}/{name}-{by_id}.pt")
        ours, own = untrained(make, make_optimizer, config)
        for group in own.param_groups:
            group["lr"] = 123.0
        report = load_checkpoint(path, ours, own)
        assert (report.left_out, report.kept, report.cast) == ((), (), ()), str(report)
        assert report.unchecked_bytes == 0, str(report)
        assert_same(contents(ours, own), contents(model, optimizer), in_bits=True)
        assert hyperparameters(own) == hyperparameters(optimizer)
        if name not in WITHOUT_STEP or config is None:
            step(model, optimizer, 2)
            step(ours, own, 2)
            expected = contents(model, optimizer)
            for key, value in contents(ours, own).items():
                assert_close(key, value, expected[key], rtol=1e-5, atol=1e-6)

    # State is matched to parameters before its contents are checked, so one optimizer by position covers all of them.
    cases = [(name, name == "AdamW", {}) for name in OPTIMIZERS] + [("AdamW", True, None)]
    cases += [(name, False, None) for name in OPTIMIZERS if IS_THOROUGH or name in WITHOUT_STEP]
    for_each(check, {f"{case}": case for case in cases})


# ---------------------------------------------------------------------------------------------------------------------
# param_groups


def grouped(*groups: tuple[str, dict[str, Any]], cls: Any = torch.optim.AdamW) -> MakeOptimizer:
    """Parameter groups by regular expressions; a parameter is in the first group whose expression matches its name."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        left, made = dict(model.named_parameters()), []
        for pattern, options in groups:
            chosen = [name for name in left if re.search(pattern, name)]
            made.append({"params": [left.pop(name) for name in chosen], **options})
        return cls(made, lr=0.01)

    return make


MATRICES = r"(embed|head|fc_in|fc_out)\.weight"
ONE = grouped(("", {}))
TWO = grouped((MATRICES, {"weight_decay": 0.1}), ("", {"weight_decay": 0.0}))
TWO_REVERSED = grouped((r"bias|norm", {"weight_decay": 0.0}), ("", {"weight_decay": 0.1}))
TWO_EQUAL = grouped((MATRICES, {}), ("", {}))
THREE = grouped((MATRICES, {"weight_decay": 0.1}), (r"bias", {"weight_decay": 0.0}), ("", {"weight_decay": 0.0}))
WITH_EMPTY = grouped((MATRICES, {"weight_decay": 0.1}), ("", {"weight_decay": 0.0}), ("no such name", {"lr": 5.0}))
WITHOUT_HEAD = grouped((r"embed|fc_in|fc_out|norm", {}))

# The file's groups, the optimizer's groups, and the expected weight decay of each group or the expected error.
GROUPINGS: dict[str, tuple[MakeOptimizer, MakeOptimizer, list[float] | str]] = {
    "the same": (TWO, TWO, [0.1, 0.0]),
    "in another order": (TWO, TWO_REVERSED, [0.0, 0.1]),
    "one became two that are equal": (ONE, TWO_EQUAL, [0.01, 0.01]),
    "one became two that differ": (ONE, TWO, r"groups 0 and 1 take .* group 0: .* weight_decay 0\.1 and 0\.0"),
    "two equal ones became one": (TWO_EQUAL, ONE, [0.01]),
    "two that differ became one": (TWO, ONE, r"file's groups 0 and 1, which differ in weight_decay"),
    "two became three": (TWO, THREE, [0.1, 0.0, 0.0]),
    "one more without parameters": (TWO, WITH_EMPTY, [0.1, 0.0, 0.01]),
    "some of the parameters": (WITHOUT_HEAD, WITHOUT_HEAD, [0.01]),
    "parameters that the file lacks": (WITHOUT_HEAD, ONE, r"missing: .*the state of decoder\.head\.weight"),
    "parameters that the file has": (ONE, WITHOUT_HEAD, r"surplus: .*the state of decoder\.head\.weight"),
}


@pytest.mark.any_torch
@on_ranks(2)
def test_groups_are_matched_by_parameter(folder: str) -> None:
    """torch applied the last group's hyperparameters to every parameter; here they follow the parameter, or nothing is
    loaded. Fine-tuning runs train some parameters; the load compares which ones have state instead of assuming it."""

    def check(name: str, by_id: bool) -> None:
        saving, loading, expected = GROUPINGS[name]
        what = f"{name}, by {'id' if by_id else 'name'}"
        model, optimizer = trained(make_optimizer=saving)
        for group in optimizer.param_groups:
            group["eps"] = 1e-4  # no default
        root = composer_state(model, optimizer, by_id=by_id)
        if by_id:  # from 5 on, in the order of the groups, which differs from the model's
            by_position = root["state"]["optimizers"]["AdamW"]
            by_position["state"] = {number + 5: entries for number, entries in by_position["state"].items()}
            for group in by_position["param_groups"]:
                group["params"] = [number + 5 for number in group["params"]]
        path = saved(root, f"{folder}/{name}-{by_id}.pt")
        ours, own = untrained(make_optimizer=loading, config={})
        if by_id and saving is not loading:
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            refused(what, path, ours, own, [re.escape(f"sizes: found {sizes}")])
        elif isinstance(expected, str):
            refused(what, path, ours, own, [expected])
        else:
            load_checkpoint(path, ours, own)
            assert_same(contents(ours, own), contents(model, optimizer), what, in_bits=True)
            assert [group["weight_decay"] for group in own.param_groups] == expected, f"{what}: {own}"
            assert {g["eps"] for g in own.param_groups if g["params"]} == {1e-4}, f"{what}: {own}"

    by_position = ("the same", "two became three")
    cases = [(name, False) for name in GROUPINGS] + [(name, True) for name in by_position]
    for_each(check, {f"{case}": case for case in cases})


def freeze_blocks() -> nn.Module:
    model = Model()
    model.decoder.blocks.requires_grad_(False)
    return model


@on_ranks(2)
def test_frozen_parameters_need_no_state(folder: str) -> None:
    """A frozen layer has no optimizer state, which is no damage. A layer unfrozen after the save starts with new
    state."""
    model, optimizer = trained(freeze_blocks)  # all parameters are in its groups, some have state
    path = saved(composer_state(model, optimizer), f"{folder}/frozen.pt")
    ours, own = untrained(freeze_blocks, config={})
    report = load_checkpoint(path, ours, own)
    assert (report.left_out, report.kept) == ((), ()), str(report)
    assert_same(contents(ours, own), contents(model, optimizer), "frozen", in_bits=True)
    # Unfrozen after the save: the file lists these parameters in its groups but has no state for them.
    ours, own = untrained(config={})
    step(ours, own, 2)  # the load discards this state, as torch.optim's load_state_dict does
    report = load_checkpoint(path, ours, own)
    assert sum("the state of decoder.blocks" in kept for kept in report.kept) == 8, str(report)
    assert_same(contents(ours, own), contents(model, optimizer), "thawed", in_bits=True)
    step(ours, own, 2)
    counts = [own.state[parameter]["step"].item() for parameter in ours.decoder.blocks.parameters()]
    assert set(counts) == {1.0} and own.state[ours.decoder.head.weight]["step"].item() == 3.0


@on_ranks(2)
def test_optimizer_of_another_model_or_class(folder: str) -> None:
    """A load refuses state of another optimizer class, and an optimizer built before the model was changed."""
    path = saved(composer_state(*trained()), f"{folder}/a.pt")
    ours, _ = untrained(config={})
    stranger = adamw(Model())
    with pytest.raises(PlanError, match="same model"):
        load_checkpoint(path, ours, stranger)
    with pytest.raises(UnsupportedError, match="one optimizer"):
        load_checkpoint(path, ours, [adamw(ours), adamw(ours)])
    own = momentum(ours)
    refused("another class", path, ours, own, [r"optimizers: found AdamW, expected SGD"])


# ---------------------------------------------------------------------------------------------------------------------
# Ties


EMBED, HEAD = "decoder.embed.weight", "decoder.head.weight"


@pytest.mark.any_torch
@on_ranks(2)
def test_tied_parameters_under_one_name_or_both(folder: str) -> None:
    """Files store a tied weight under one name or two. Equal copies load as one; two different values are an error."""
    model, optimizer = trained(tied_model)
    whole = composer_state(model, optimizer)
    expected = contents(model, optimizer)

    def variant(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> dict[str, Any]:
        root = copy.deepcopy(whole)
        change(root["state"]["model"], root["state"]["optimizers"]["AdamW"]["state"])
        return root

    def part_of_a_storage(weights: dict[str, Any], state: dict[str, Any], change: float = 0.0) -> None:
        weights[HEAD] = torch.cat([weights[EMBED], torch.zeros(1, WIDTH)])[:-1]  # its CRC32 covers more bytes
        weights[HEAD][-1, -1] += change  # only on the last rank

    def moments_differ(weights: dict[str, Any], state: dict[str, Any]) -> None:
        state[HEAD] = copy.deepcopy(state[EMBED])
        state[HEAD]["exp_avg"][0, 0] += 1

    good = {
        "as one storage": lambda *_: None,
        "as two": lambda weights, state: weights.update({HEAD: weights[EMBED].clone()}),
        "as a part of a storage": part_of_a_storage,
        "under the first name": lambda weights, state: weights.pop(HEAD),
        "under the second name": lambda weights, state: weights.pop(EMBED),
        "state under the other name": lambda weights, state: state.update({HEAD: state.pop(EMBED)}),
        "state under both": lambda weights, state: state.update({HEAD: copy.deepcopy(state[EMBED])}),
    }

    def check(name: str, config: dict[str, Any] | None) -> None:
        path = saved(variant(good[name]), f"{folder}/{name}.pt")
        ours, own = untrained(tied_model, config=config)
        report = load_checkpoint(path, ours, own)
        assert (report.left_out, report.kept) == ((), ()), str(report)
        assert ours.decoder.embed.weight is ours.decoder.head.weight
        assert_same(contents(ours, own), expected, in_bits=True)

    configs: tuple[dict[str, Any] | None, ...] = ({}, {"sharding_strategy": "NO_SHARD"}, None)
    cases = [(name, config) for name in good for config in configs[: 1 + (name == "as a part of a storage")]]
    for_each(check, {f"{case}": case for case in cases})
    bad = {
        "weights differ": (
            lambda weights, state: weights.update({HEAD: weights[EMBED] + 1e-6}),
            rf"{EMBED} = .*{HEAD}: found different values",
        ),
        "a part of a storage differs": (lambda *parts: part_of_a_storage(*parts, 1e-6), rf"{EMBED} = .*{HEAD}"),
        "moments differ": (moments_differ, rf"exp_avg of {EMBED} = {HEAD}"),
    }

    def check_bad(name: str, config: dict[str, Any] | None, strict: bool) -> None:
        change, says = bad[name]
        path = saved(variant(change), f"{folder}/{name}.pt")
        refused(name, path, *untrained(tied_model, config=config), [says], strict=strict)

    # Each with one of the configurations; strict=False checks the same.
    chosen = [(name, configs[at], bool(at)) for at, name in enumerate(bad)]
    for_each(check_bad, {f"{case}": case for case in chosen})


# ---------------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.any_torch
@on_ranks(2)
def test_names_with_prefixes(folder: str) -> None:
    """Names with wrappers' prefixes load without renaming the file by hand; the same rule covers weights and
    moments."""
    model, optimizer = trained()
    whole = composer_state(model, optimizer)
    expected = contents(model, optimizer)

    def renamed(rename: Callable[[str], str]) -> dict[str, Any]:
        saved_state = whole["state"]["optimizers"]["AdamW"]
        groups = [{**g, "params": [rename(name) for name in g["params"]]} for g in saved_state["param_groups"]]
        state = {rename(name): entries for name, entries in saved_state["state"].items()}
        model_state = {rename(name): value for name, value in whole["state"]["model"].items()}
        optimizers = {"AdamW": {"state": state, "param_groups": groups}}
        return {"state": {"model": model_state, "optimizers": optimizers}, "rng": []}

    ways: dict[str, tuple[Callable[[str], str], bool]] = {
        "FSDP1's": (lambda name: name.replace("decoder.", "decoder._fsdp_wrapped_module."), False),
        "of both wrappers": (
            lambda name: re.sub(r"(blocks\.\d\.)", r"\1_fsdp_wrapped_module._checkpoint_wrapped_module.", name), False
        ),
        "torch.compile's": (lambda name: f"_orig_mod.{name}", False),
        "DDP's": (lambda name: f"module.{name}", True),
        "DDP's and an attribute's": (lambda name: f"module.model.{name}", True),
    }  # fmt: skip

    def check(name: str, config: dict[str, Any]) -> None:
        rename, is_renamed = ways[name]
        path = saved(renamed(rename), f"{folder}/{name}.pt")
        ours, own = untrained(config=config)
        report = load_checkpoint(path, ours, own)
        assert (report.left_out, report.kept) == ((), ()), str(report)
        assert bool(report.renamed) == is_renamed, report.renamed
        assert_same(contents(ours, own), expected, in_bits=True)

    of_model = {"of both wrappers": {"activation_checkpointing": True}}  # a wrapper in the model's names
    for_each(check, {name: (name, of_model.get(name, {})) for name in ways})


@on_ranks(2)
def test_safetensors_folder(folder: str) -> None:
    """A Hugging Face folder loads: its names lack the prefix of the attribute with the model, and it has no checksums
    for comparing tied weights."""
    model, _ = trained(tied_model)
    weights = {name.removeprefix("decoder."): value for name, value in model.state_dict().items()}

    def check(name: str, change: dict[str, Any]) -> None:
        path = Path(folder) / name
        if dist.get_rank() == 0:
            path.mkdir()
            chosen = {key: value for key, value in weights.items() if change.get(key, value) is not None}
            write_safetensors(path / "model.safetensors", chosen)
        dist.barrier()
        ours = Chain(model=tied_model().decoder)
        fully_shard(ours)
        report = load_checkpoint(path, ours)
        assert report.left_out == () and len(report.renamed) == len(weights) - len(change), str(report)
        assert report.unchecked_bytes > 0, str(report)
        theirs = {key.replace("decoder.", "model."): value for key, value in contents(model).items()}
        assert_same(contents(ours), theirs, name, in_bits=True)
        optimizer = adamw(ours)
        refused("no optimizer there", path, ours, optimizer, ["optimizers: found none"])
        load_checkpoint(path, ours, optimizer, weights_only=True)

    for_each(check, {"tied once": ("once", {"head.weight": None}), "tied twice": ("twice", {})})
    path, ours = Path(folder) / "twice", Chain(model=tied_model().decoder)
    fully_shard(ours)
    weights["head.weight"] = weights["head.weight"] + 1
    if dist.get_rank() == 0:
        write_safetensors(path / "model.safetensors", weights)
    dist.barrier()
    refused("tied, and differ", path, ours, None, [r"embed\.weight = head\.weight"])


# ---------------------------------------------------------------------------------------------------------------------
# Mismatches


@pytest.mark.any_torch
@on_ranks(2)
def test_everything_that_does_not_fit_is_named_at_once(folder: str) -> None:
    """Fourteen mistakes are one error, not fourteen starts of a job. torch's load ignores half of them."""
    model, optimizer = trained()
    root = composer_state(model, optimizer)
    weights, state = root["state"]["model"], root["state"]["optimizers"]["AdamW"]["state"]
    del weights["decoder.norm.bias"]
    weights["decoder.new"] = torch.zeros(3)
    weights["decoder.head.weight"] = torch.zeros(VOCABULARY + 1, WIDTH)
    weights["decoder.norm.weight"] = weights["decoder.norm.weight"].double()
    weights["decoder.blocks.0.scale"] = "no tensor"
    weights["decoder.blocks.1.scale"] = torch.ones(1, dtype=torch.int64)
    state["decoder.new"] = state.pop("decoder.norm.bias")
    state["decoder.head.weight"]["exp_avg"] = torch.zeros(3)
    state["decoder.norm.weight"]["exp_avg_sq"] = state["decoder.norm.weight"]["exp_avg_sq"].bfloat16()
    state["decoder.embed.weight"]["max_exp_avg_sq"] = torch.zeros(VOCABULARY, WIDTH)
    del state["decoder.blocks.0.fc_in.weight"]["exp_avg"]
    state["decoder.blocks.0.fc_in.bias"]["step"] = "two"
    root["state"]["optimizers"]["AdamW"]["param_groups"][0]["lr"] = "fast"
    path = saved(root, f"{folder}/wrong.pt")
    says = [
        r"missing: decoder\.norm\.bias: found nothing",
        r"surplus: decoder\.new",
        r"shape: decoder\.head\.weight: found \(12, 6\), expected \(11, 6\)",
        r"dtype: decoder\.norm\.weight: found torch\.float64, expected torch\.float32",
        r"type: decoder\.blocks\.0\.scale: found no tensor",
        r"type: decoder\.blocks\.1\.scale: found torch\.int64, expected torch\.float32",
        r"missing: optimizer AdamW: the state of decoder\.norm\.bias",
        r"surplus: optimizer AdamW: the state of decoder\.new",
        r"shape: optimizer AdamW: exp_avg of decoder\.head\.weight: found \(3,\), expected \(11, 6\)",
        r"dtype: optimizer AdamW: exp_avg_sq of decoder\.norm\.weight: found torch\.bfloat16",
        r"surplus: optimizer AdamW: max_exp_avg_sq of decoder\.embed\.weight",
        r"missing: optimizer AdamW: exp_avg of decoder\.blocks\.0\.fc_in\.weight",
        r"type: optimizer AdamW: step of decoder\.blocks\.0\.fc_in\.bias: found no tensor",
        r"type: optimizer AdamW: group 0: lr: found 'fast'",
    ]
    fatal = [text for text in says if re.match("shape|type", text)]
    for config, has_state in (({}, False), ({}, True), (None, False)):
        ours, own = untrained(config=config)
        if has_state:  # the error then names the expected shape and dtype
            step(ours, own, 0)
        refused("strict", path, ours, own, ["nothing was changed", *says])
        refused("not strict", path, ours, own, fatal, strict=False)


@on_ranks(2)
def test_not_strict_loads_the_rest_and_says_what(folder: str) -> None:
    """The report lists everything skipped, unchanged and cast. An optimizer cannot step with part of a parameter's
    state."""
    model, optimizer = trained()
    root = composer_state(model, optimizer)
    weights, saved_state = root["state"]["model"], root["state"]["optimizers"]["AdamW"]
    del weights["decoder.norm.bias"]
    weights["decoder.new"] = torch.zeros(3)
    weights["decoder.norm.weight"] = weights["decoder.norm.weight"].bfloat16()
    state = saved_state["state"]
    state["decoder.new"] = state.pop("decoder.norm.bias")
    state["decoder.norm.weight"]["exp_avg"] = state["decoder.norm.weight"]["exp_avg"].bfloat16()
    state["decoder.embed.weight"]["max_exp_avg_sq"] = torch.zeros(VOCABULARY, WIDTH)
    del state["decoder.head.weight"]["exp_avg"]
    del saved_state["param_groups"][0]["amsgrad"]
    saved_state["param_groups"][0]["initial_lr"] = 0.5
    path = saved(root, f"{folder}/odd.pt")

    def check(config: dict[str, Any] | None) -> None:
        ours, own = untrained(config=config)
        step(ours, own, 5)
        before, expected = contents(ours, own), contents(model, optimizer)
        report = load_checkpoint(path, ours, own, strict=False)
        assert report.cast == ("decoder.norm.weight",), str(report)
        assert set(report.left_out) == {
            "decoder.new",
            "optimizer AdamW: the state of decoder.new",
            "optimizer AdamW: max_exp_avg_sq of decoder.embed.weight",
        }, str(report)
        assert set(report.kept) == {
            "decoder.norm.bias",
            "optimizer AdamW: the state of decoder.norm.bias",
            "optimizer AdamW: exp_avg of decoder.head.weight",
            "group 0: amsgrad=False",
        }, str(report)
        kept = [name for name in before if name.endswith(("decoder.norm.bias", "of decoder.head.weight"))]
        expected |= {name: before[name] for name in kept}
        for name in ("model decoder.norm.weight", "exp_avg of decoder.norm.weight"):
            expected[name] = expected[name].bfloat16().float()
        assert_same(contents(ours, own), expected, "not strict", in_bits=True)
        assert own.param_groups[0]["initial_lr"] == 0.5 and own.param_groups[0]["amsgrad"] is False
        step(ours, own, 2)

    for_each(check, {"sharded": ({},), "whole": (None,)})


# ---------------------------------------------------------------------------------------------------------------------
# Models


def test_without_a_process_group(tmp_path: Path):
    """Evaluation on a laptop: a sharded run's file, or its weights alone, loads bit for bit into an unsharded model."""
    assert not dist.is_initialized()
    model, optimizer = trained(tied_model)
    for root in (composer_state(model, optimizer), model.state_dict()):
        ours, own = untrained(tied_model)
        report = load_checkpoint(saved(root, tmp_path / "a.pt"), ours, own if "state" in root else None)
        expected = contents(model, optimizer if "state" in root else None)
        assert_same(contents(ours, own if "state" in root else None), expected, in_bits=True)
        assert report.unchecked_bytes == 0
    for root in ({"state": {"optimizers": {}}, "rng": []}, optimizer.state_dict()):
        refused("without weights", saved(root, tmp_path / "none.pt"), ours, adamw(ours), ["no model weights"])


@on_ranks(2)
def test_ddp(folder: str) -> None:
    """Runs move between DDP and FSDP2 in both directions, including optimizer state by position."""
    model, optimizer = trained()
    path = saved(composer_state(model, optimizer), f"{folder}/a.pt")
    plain, _ = untrained()
    ours = DistributedDataParallel(plain)
    own = adamw(ours)
    report = load_checkpoint(path, ours, own)
    assert_same(contents(ours, own), contents(model, optimizer), "DDP", in_bits=True)
    read = torch.tensor(report.num_bytes)
    dist.all_reduce(read)
    assert read.item() < 1.2 * path.stat().st_size, "each rank of a replicated model read the whole file"
    # And DDP's file into a sharded model.
    path = saved(composer_state(ours, own, by_id=True), f"{folder}/ddp.pt")
    sharded, its_own = untrained(config={})
    load_checkpoint(path, sharded, its_own)
    assert_same(contents(sharded, its_own), contents(model, optimizer), "from DDP", in_bits=True)


class Stateful(nn.Module):
    """Its extra state is any value that the test sets."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.ones(3)), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class WithExtraState(Stateful):
    """Extra state in the root and in a child, and persistent and non-persistent buffers."""

    def __init__(self) -> None:
        super().__init__({"seen": torch.zeros(2), "name": "new"})
        self.child = Stateful(torch.zeros(4))
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("cache", torch.full((2,), 5.0), persistent=False)


def extra_states(number: int) -> dict[str, Any]:
    """Containers that DCP's flattening loses: empty ones, integer keys, tuples."""
    return {
        "a_dict": {1: {2: number}, "5": number, "empty": {}, "list": [[{}, {}], {"a": number}, {}]},
        "classes": {True: collections.Counter({3: number}), "ordered": collections.OrderedDict(a=number)},
        "a_list": [number, {}, {"0": 1}],
        "far": [*({} for _ in range(1500)), {"a": number}],
        "a_tuple": (number, {3: {}}),
        "empty": {},
        "without_leaves": {"a": {}, "b": [{}]},
    }


class WithLoadingOverride(nn.ModuleDict):
    """Has a ``load_state_dict`` override, which the load must call."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def described(value: Any) -> Any:
    """A nested value's classes, keys and leaves, independent of their order."""
    if isinstance(value, dict):
        return type(value), sorted((repr(key), repr(described(part))) for key, part in value.items())
    return (type(value), *map(described, value)) if isinstance(value, list | tuple) else repr(value)


@on_ranks(2)
def test_extra_state_of_a_sharded_checkpoint_keeps_its_containers(folder: str) -> None:
    """A module's integer keys came back as text or the reverse, and an empty extra state was "missing"."""

    def model(number: int, kind: type[nn.ModuleDict] = nn.ModuleDict) -> nn.ModuleDict:
        return kind({name: Stateful(state) for name, state in extra_states(number).items()})

    directory = f"{folder}/directory"
    save_directory(composer_state(model(5)), checkpoint_id=directory)
    paths = {"sharded": directory, "full": saved(composer_state(model(5)), f"{folder}/full.pt")}

    def check(path: str | Path, kind: type[nn.ModuleDict]) -> None:
        ours = model(0, kind)
        before = {name: child.state for name, child in ours.items()}
        report = load_checkpoint(path, ours)
        assert (report.left_out, report.kept) == ((), ()), report
        for name, state in extra_states(5).items():
            assert described(ours[name].state) == described(state), name
            assert ours[name].state is not before[name], "what the module has may change"

    cases = itertools.product(paths.values(), (nn.ModuleDict, WithLoadingOverride))
    for_each(check, {f"{case}": case for case in cases})


class Picky(WithExtraState):
    """Raises on one rank, after its child has loaded its values."""

    def set_extra_state(self, state: Any) -> None:
        if state["name"] == "old" and dist.get_rank() == 1:
            raise KeyError("recipe")
        super().set_extra_state(state)


class Scaled(nn.Module):
    """Stores its weight divided by a scale, and the scale, as quantized layers do."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 4), 7.0))  # 5 rows: ranks differ
        self.scale, self.seen = 1.0, seen
        self.register_state_dict_post_hook(_divide)
        self.register_load_state_dict_pre_hook(_multiply)
        self.register_load_state_dict_post_hook(lambda module, keys: seen.append("post-hook"))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.seen.append("_load_from_state_dict")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _divide(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] / module.scale
    state[f"{prefix}weight.scale"] = torch.tensor(module.scale)
    state[f"{prefix}weight.kind"] = "scaled"


def _multiply(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert state.pop(f"{prefix}weight.kind") == "scaled"
    module.scale = float(state.pop(f"{prefix}weight.scale"))
    state[f"{prefix}weight"] = state[f"{prefix}weight"] * module.scale


class WithLoadingCode(nn.Module):
    """Its ``load_state_dict`` runs code of each supported kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.layer = nn.Linear(4, 4)
        self.scaled = Scaled(self.seen)
        self.register_buffer("table", torch.zeros(3))
        self.child = Stateful(torch.zeros(4))
        self.refuses = False

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen.append("load_state_dict")
        result = super().load_state_dict(state_dict, strict, assign)
        refuse(self.refuses)
        return result


def with_entries() -> nn.Module:
    """Adds a state dict hook whose entries no module loads."""
    model = Chain(layer=nn.Linear(4, 4))
    model.layer.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update(
            {f"{prefix}norm": module.weight.detach().norm(), f"{prefix}kind": "linear"}
        )
    )
    return model


def full_contents(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(value.detach()).clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


@on_ranks(2)
def test_modules_with_loading_code_of_their_own(folder: str) -> None:
    """After a load, a quantized layer trained with a wrongly scaled weight: its load hooks never ran and its
    scale was lost. The hooks run on shards, or the load names the entry."""
    torch.manual_seed(0)
    model = WithLoadingCode()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.table):
            tensor.normal_()
    model.scaled.scale, model.child.state = 4.0, torch.arange(4.0)
    state = composer_state(model)
    monolithic, directory = saved(state, f"{folder}/a.pt"), f"{folder}/directory"
    save_directory(state, checkpoint_id=directory)
    stock = WithLoadingCode()
    stock.load_state_dict(torch.load(monolithic)["state"]["model"])
    assert torch.equal(stock.scaled.weight, model.scaled.weight)

    def check(path: str | Path, configuration: str) -> None:
        ours: Any = untrained(WithLoadingCode, config=CONFIGURATIONS[configuration])[0]
        load_checkpoint(path, ours)
        assert_same(full_contents(ours), full_contents(stock), f"{path}, {configuration}", in_bits=True)
        assert (ours.scaled.scale, ours.seen) == (4.0, stock.seen)
        assert torch.equal(ours.child.state, model.child.state)
        ours.refuses = True
        with torch.no_grad():
            for tensor in (*ours.parameters(), *ours.buffers()):
                tensor.fill_(3)
        refused("refuses", path, ours, None, [r"RuntimeError: not this one; nothing was changed|rank 1"])

    cases = [*itertools.product([monolithic], CONFIGURATIONS), (directory, "sharded")]
    with mock.patch("composer_fsdp2.checkpoint.load.staging._SMALL_BYTES", 0):  # replicas share every read
        for_each(check, {f"{case}": case for case in cases})
    left = composer_state(model)
    left["state"]["model"]["scaled.more"] = torch.ones(1)
    ours: Any = untrained(WithLoadingCode, config={})[0]
    refused("more", saved(left, f"{folder}/more.pt"), ours, None, [r"scaled\.more", r"scaled \(.*_multiply", "load_st"])
    assert ours.seen == []

    path = saved(composer_state(with_entries()), f"{folder}/entry.pt")
    for is_sharded in (True, False):
        other = with_entries()
        if is_sharded:
            fully_shard(other)
        refused("entry", path, other, None, [r"surplus: layer\.norm: .*no loading hook", r"surplus: layer\.kind"])
        report = load_checkpoint(path, other, strict=False)
        assert set(report.left_out) == {"layer.norm", "layer.kind"}, str(report)


def refuse(on_rank_1: bool) -> None:
    if on_rank_1 and dist.get_rank() == 1:
        raise RuntimeError("not this one")


class Subclass(torch.optim.AdamW):
    """Changes its state after a load, and then raises on one rank."""

    refuses = False

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.param_groups[0]["lr"] = 5.0
        refuse(self.refuses)


Subclass.__qualname__ = "AdamW"  # the class name in the file


def hooked(kind: str, seen: list[float], *, refuses: bool = False) -> MakeOptimizer:
    """An optimizer with a pre- or post-hook of load_state_dict that receives the file's state and may raise on one
    rank."""

    def before(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        seen.append(float(full(state["state"][0]["exp_avg"]).abs().sum()))
        refuse(refuses)

    def after(optimizer: torch.optim.Optimizer) -> None:
        seen.append(sum(float(full(own["exp_avg"]).abs().sum()) for own in optimizer.state.values()))
        refuse(refuses)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = (Subclass if kind == "subclass" else torch.optim.AdamW)(model.parameters(), lr=0.02)
        optimizer.refuses = refuses
        if kind == "pre-hook":
            optimizer.register_load_state_dict_pre_hook(before)
        elif kind == "post-hook":
            optimizer.register_load_state_dict_post_hook(after)
        return optimizer

    return make


CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "sharded": {},
    "replicated": {"sharding_strategy": "NO_SHARD"},
    "whole": None,
}


@pytest.mark.any_torch
@on_ranks(2)
def test_an_optimizer_with_code_of_its_users(folder: str) -> None:
    """A hook that raised on one rank left the others with half of a checkpoint. A hook that succeeds sees the file's
    state, and the loaded values are the same as without it."""
    path = saved(composer_state(*trained(make_optimizer=adamw)), f"{folder}/a.pt")

    def check(kind: str, configuration: str) -> None:
        seen: list[float] = []
        model, optimizer = untrained(make_optimizer=hooked(kind, seen), config=CONFIGURATIONS[configuration])
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        load_checkpoint(path, model, optimizer)
        ours, other = untrained(config=CONFIGURATIONS[configuration])
        load_checkpoint(path, ours, other)
        assert_same(contents(model, optimizer), contents(ours, other), kind)
        moments = [float(full(own["exp_avg"]).abs().sum()) for own in other.state.values()]
        expected = {"pre-hook": [moments[0]], "post-hook": [sum(moments)], "subclass": []}[kind]
        assert seen == pytest.approx(expected), f"{kind}: {seen}, the file has {expected}"
        assert optimizer.param_groups[0]["lr"] == (5.0 if kind == "subclass" else 0.01)

    def check_refusal(kind: str, configuration: str) -> None:
        make_optimizer = hooked(kind, [], refuses=True)
        model, optimizer = untrained(make_optimizer=make_optimizer, config=CONFIGURATIONS[configuration])
        step(model, optimizer, 5)
        held = {id(value) for own in optimizer.state.values() for value in own.values()}
        refused(kind, path, model, optimizer, [r"or a hook of it, raised RuntimeError: not this one; nothing|rank 1"])
        assert held == {id(value) for own in optimizer.state.values() for value in own.values()}
        step(model, optimizer, 6)

    kinds = ("pre-hook", "post-hook", "subclass")
    with mock.patch("composer_fsdp2.checkpoint.load.staging._SMALL_BYTES", 0):  # replicas share every read
        for action, places in (
            (check, ("whole", "replicated", "sharded")),
            (check_refusal, ("sharded", "whole", "replicated")),
        ):
            for_each(action, {kind: (kind, where) for kind, where in zip(kinds, places, strict=True)})


@on_ranks(2)
def test_extra_state_and_buffers(folder: str) -> None:
    """fp8 recipes keep their scales in extra state. DCP flattens such a dict; the module receives it in its original
    form.

    If a module's own code raises, weights and the extra state of other modules and ranks are unchanged.
    """
    model = WithExtraState()
    model.state = {"seen": torch.tensor([1.0, 2.0]), "name": "old"}
    model.child.state = torch.arange(4.0)
    model.table.add_(10)
    model.cache.fill_(9.0)
    monolithic = saved(composer_state(model), f"{folder}/a.pt")
    directory = f"{folder}/directory"
    save_directory(composer_state(model), checkpoint_id=directory)

    def check(path: str, is_sharded: bool) -> None:
        ours = WithExtraState()
        if is_sharded:
            fully_shard(ours)
        report = load_checkpoint(path, ours)
        what = f"{path}: {report}"
        assert (report.left_out, report.kept) == ((), ()), what
        found, expected = (
            {"root": each.state, "child": each.child.state, "table": each.table} for each in (ours, model)
        )
        assert_same(found, expected, what)
        assert ours.cache.tolist() == [5.0, 5.0], f"{what}: a buffer that no state dict has"

    for_each(check, {f"{case}": case for case in itertools.product((monolithic, directory), (True, False))})
    root = composer_state(model)
    del root["state"]["model"]["child._extra_state"]
    path = saved(root, f"{folder}/less.pt")
    ours = WithExtraState()
    refused("less", path, ours, None, [r"missing: child\._extra_state"])
    assert ours.state["name"] == "new"
    for wrap in (fully_shard, lambda module: module):
        picky = Picky()
        wrap(picky)
        says = [r"_extra_state: .*Picky refused its extra state \(KeyError: 'recipe'\)|rank 1"]
        refused("picky", monolithic, picky, None, says)
        assert picky.state["name"] == "new" and not picky.child.state.any(), picky.state


PLANS: dict[str, dict[str, Any]] = {
    "kept after forward": {"sharding_strategy": "SHARD_GRAD_OP"},
    "offloaded": {"cpu_offload": True},
    "checkpointed": {"activation_checkpointing": True},
    "in bf16 with buffers": {"mixed_precision": {"param_dtype": "bf16", "buffer_dtype": "bf16"}},
}


@on_ranks(2)
def test_any_plan(folder: str) -> None:
    """A checkpoint loads with any sharding, dtype and activation checkpointing, also right after an evaluation."""
    model, optimizer = trained(tied_model)
    model.decoder.blocks[0].scale.fill_(0.75)
    path = saved(composer_state(model, optimizer), f"{folder}/a.pt")
    expected = contents(model, optimizer)

    def check(name: str) -> None:
        ours, own = untrained(tied_model, config=PLANS[name])
        report = load_checkpoint(path, ours, own, weights_only=True)
        assert report.left_out == ("optimizer AdamW",) and not own.state, f"{name}: {report}"
        assert_same(contents(ours), contents(model), name, in_bits=True)
        assert ours.decoder.blocks[0].scale.item() == 0.75, f"{name}: what the state dict shows was a copy"
        # After a forward without gradients, as in an evaluation, parameters are unsharded.
        with torch.no_grad():
            ours(tokens(0))
        load_checkpoint(path, ours, own)
        assert_same(contents(ours, own), expected, name, in_bits=True)

    for_each(check, {name: (name,) for name in PLANS})


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


def large() -> nn.Module:
    return Chain(body=nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))))


def check_bytes(folder: str, config: dict[str, Any]) -> int:
    model, optimizer = trained(large)
    path = saved(composer_state(model, optimizer), f"{folder}/a.pt")
    ours, own = untrained(large, config=config)
    report = load_checkpoint(path, ours, own)
    assert_same(contents(ours, own), contents(model, optimizer), str(config), in_bits=True)
    assert report.unchecked_bytes == 0
    return report.num_bytes


HSDP = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}


@pytest.mark.parametrize(
    ("world_size", "config"), [(2, None), (2, {"sharding_strategy": "NO_SHARD"}), (4, HSDP)], ids=str
)
def test_each_byte_is_read_once(tmp_path: Path, world_size: int, config: dict[str, Any] | None):
    """A rank reads its shard and replicas share the reading, so 100 ranks do not read a file 100 times."""
    read = run_ranks(check_bytes, world_size, str(tmp_path), config)
    num_bytes = 3 * 4 * sum(parameter.numel() for parameter in large().parameters())  # weights and two moments, fp32
    # Each rank that needs a step count or a tensor below 1 KiB reads it.
    assert num_bytes <= sum(read) <= 1.02 * num_bytes
    assert read == pytest.approx([num_bytes / world_size] * world_size, rel=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Failures


@pytest.mark.any_torch
@on_ranks(2, timeout_s=120)
def test_damage_that_one_rank_reads(folder: str) -> None:
    """If one rank reads damaged bytes, all ranks raise, also those with a sound copy; none waits for the others."""
    model, optimizer = trained(large)
    monolithic = saved(composer_state(model, optimizer), f"{folder}/a.pt")
    weight = bytes_of(model.body[3].weight)
    for of_rank in (0, 1):
        part = weight[: len(weight) // 2] if of_rank == 0 else weight[len(weight) // 2 :]
        damaged = Path(f"{folder}/damaged-{of_rank}.pt")
        if dist.get_rank() == 0:
            shutil.copy(monolithic, damaged)
            flip(damaged, damaged.read_bytes().index(part) + 100)
        dist.barrier()
        for config in ({}, {"sharding_strategy": "NO_SHARD"}, None):
            ours, own = untrained(large, config=config)
            refused(f"{of_rank}, {config}", damaged, ours, own, [r"damaged-\d\.pt.*(.|\n)*CRC32"])
    copies = [Path(f"{folder}/{rank}/a.pt") for rank in range(2)]
    if dist.get_rank() == 0:
        for path in copies:
            path.parent.mkdir()
            shutil.copy(monolithic, path)
    dist.barrier()
    mine = copies[dist.get_rank()]
    ours, own = untrained(large, config={})
    assert load_checkpoint(mine, ours, own).unchecked_bytes == 0  # each node has its own copy
    assert_same(contents(ours, own), contents(model, optimizer), "own copies", in_bits=True)
    ours, own = untrained(large, config={})
    other, other_optimizer = trained(large)
    step(other, other_optimizer, 9)
    damages: dict[str, Callable[[], Any]] = {
        "bits": lambda: flip(mine, mine.read_bytes().index(weight[len(weight) // 2 :]) + 100),
        "length": lambda: mine.write_bytes(mine.read_bytes()[:-1000]),
        "missing": mine.unlink,
        "other": lambda: torch.save(composer_state(other, other_optimizer), mine),
    }
    for name, damage in damages.items():
        if dist.get_rank() == 1:
            shutil.copy(monolithic, mine)
            damage()
        dist.barrier()
        refused(name, mine, ours, own, [r"a\.pt|decided differently"])


@pytest.mark.any_torch
@on_ranks(2)
def test_a_slow_disk(folder: str) -> None:
    """A rank that unpacked or read for minutes made the others fail at Composer's dist_timeout of 300 s. A rank without
    disk space left them waiting."""
    # Rank 0 unpacks and rank 1 reads for longer than the collectives' timeout.
    path, model = Path(folder, "packed.pt.gz"), tied_model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save({"state": {"model": expected}}, path.with_suffix(""))
        path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    dist.barrier()
    read, unpack = Staging.read, opening.unpack

    def slow_read(self: Staging, reader: Any) -> None:
        time.sleep(1.5 * dist.get_rank())
        read(self, reader)

    prepare_fully_shard(model, None, {}, precision="fp32")
    with (
        impatient(1.0),
        mock.patch.object(opening, "unpack", lambda *args: time.sleep(1.5) or unpack(*args)),
        mock.patch.object(Staging, "read", slow_read),
    ):
        torch.nn.init.zeros_(next(model.parameters()).to_local())
        load_checkpoint(path, model)
    assert_same({name: full(value) for name, value in model.state_dict().items()}, expected)
    with mock.patch("tempfile.mkdtemp", side_effect=OSError(28, "No space left on device", "/tmp")):
        refused("no folder", path, model, None, ["No space left on device"])


@pytest.mark.any_torch
@on_ranks(2)
def test_directories_of_which_one_rank_reads_something_else(folder: str) -> None:
    """If one path has checkpoints of two runs on two nodes, all ranks refuse them instead of training on half of each.
    A file that one rank cannot read is an error on all ranks."""
    paths = [f"{folder}/{name}/ep0-ba3" for name in ("one", "two")]
    for value, path in enumerate(paths):
        model, _ = untrained(large, config={})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        # Sharded: each rank reads complete records of its own files, so no CRC32 shows the difference.
        save_directory({"state": {"model": model.state_dict()}}, checkpoint_id=path)
    ours, _ = untrained(large, config={})
    load_checkpoint(paths[0], ours)
    refused("another save's", paths[dist.get_rank()], ours, None, ["decided differently"])
    damaged = Path(paths[0], "__1_0.distcp")  # only rank 1 reads it
    if dist.get_rank() == 0:
        flip(damaged, record_at(damaged, "data/0")[0] + 36)
    dist.barrier()
    refused("a header", paths[0], ours, None, ["__1_0.distcp.* that record is not there"])
