"""Tensor and sequence parallelism, compared with one process: every loss, norm and parameter of two steps."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.clips import assert_same_gradients
from support.language import HEAD, MLP, WIDTH, Attention, Language, Layer, batch, layer_plan, loss_of, sequence_plan
from support.legality import TENSOR, Carried, check_carried, check_clips, check_start, split_by_script, with_plan
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL
from support.translations import config_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from composer_fsdp2 import PlanError, apply_plan, begin_microbatch, plan_sharding, prepare_fully_shard
from composer_fsdp2.estimate._torch.counting import Collectives

ATOL = 1e-12


def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Parameter groups in another order than the model's; Composer refuses them with tensor parallelism."""
    of_all = list(parameters)
    groups = [{"params": of_all[1::2][::-1], "weight_decay": 0.1}, {"params": of_all[::2], "lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def partly_frozen() -> Language:
    model = Language()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in ("layers.0.mlp", "embedding")))
    return model


def shorter(num_tokens: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """The loss of sequences shortened by so many tokens."""
    return lambda model, tokens: loss_of(model, tokens[:, :-num_tokens])


class ByNames(Layer):
    """Passes keyword arguments, as transformers calls its attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x=self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


def by_names() -> Language:
    model = Language(num_layers=1)
    model.model.layers[0].__class__ = ByNames
    return model


def named_sequence_plan(*, by_output: bool) -> dict[str, ParallelStyle]:
    """The sequence is sharded after an embedding with a replicated output, and gathered before the last norm, or before
    the head."""
    whole, part = Replicate(), Shard(1)
    gathered = {"input_kwarg_layouts": {"x": part}, "desired_input_kwarg_layouts": {"x": whole}}
    plan = sequence_plan() | {"model.layers.*.attention": PrepareModuleInput(**gathered)}
    if by_output:
        del plan["model.norm"]
        return plan | {
            "model.embedding": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=part),
            "model.layers.0": PrepareModuleOutput(output_layouts=part, desired_output_layouts=whole),
            "model.head": ColwiseParallel(output_layouts=whole),
        }
    return plan | {
        "model.embedding": RowwiseParallel(input_layouts=whole),
        "model.layers.0": PrepareModuleInput(input_layouts=whole, desired_input_layouts=part, use_local_output=True),
        "model.norm": SequenceParallel(use_local_output=True),
    }


split = partial(Carried, plan=layer_plan, num_shared=TENSOR)
tied = partial(Language, tied=True, num_layers=1)
RECOMPUTED = {"activation_checkpointing": True}
KEPT = {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing_reentrant": False}
REPLICAS = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
# Each setting once, and pairs of independent settings; order/ has others.
TRAINED: dict[str, Carried] = {
    "two layers, recomputed, several groups": split(config=RECOMPUTED, optimizer=grouped, build=Language),
    "sequence, recomputed, not reentrant, kept gathered": split(config=RECOMPUTED | KEPT, plan=sequence_plan),
    "replicas, tied, state from before": split(config=REPLICAS, build=tied, steps_before=2),
    "tied, neither planned, offloaded": split(
        config={"cpu_offload": True}, build=tied, plan=lambda: layer_plan(ends=False)
    ),
    "frozen, microbatches": split(build=partly_frozen, num_microbatches=2),
    "sequence, microbatches, reduced in the last": split(
        config={"gradient_sync": "last"}, plan=sequence_plan, num_microbatches=2
    ),
    "a sequence that the ranks do not divide": split(config=RECOMPUTED, plan=sequence_plan, loss=shorter(3)),
    "fewer tokens than ranks, divided by inputs": split(
        plan=partial(named_sequence_plan, by_output=False), loss=shorter(5), degree=4, num_shared=4, build=by_names
    ),
    "fewer tokens than ranks, divided by outputs": split(
        plan=partial(named_sequence_plan, by_output=True), loss=shorter(5), degree=4, num_shared=4, build=by_names
    ),
    "split by the script, sequence": Carried(
        prepare=split_by_script("tp", "dp", "tp", plan=sequence_plan), num_shared=TENSOR
    ),
}
THREE_AXES = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
ON_EIGHT: dict[str, Carried] = {
    "layers": split(config=THREE_AXES),
    "sequence": split(config=THREE_AXES, plan=sequence_plan),
    "tied": split(config=THREE_AXES, build=tied),
}


def check_all_trainings() -> None:
    rows = TRAINED if dist.get_world_size() == 4 else ON_EIGHT
    for_each(check_carried, {name: (row,) for name, row in rows.items()})


def test_training_is_that_of_one_process():
    """A TP-sharded model trains like one process: same clipping norm, same ties, same frozen parameters."""
    run_ranks(check_all_trainings, 4)


@pytest.mark.slow
def test_training_with_replicas_shards_and_split_layers_on_eight_ranks():
    """Three axes, each with more than one rank."""
    run_ranks(check_all_trainings, 8)


# --- initial values


class DrawnLayers(nn.Sequential):
    """Layers with one initializer for all their parameters, which draws its own random numbers."""

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def param_init_fn(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.uniform_(module.bias)


def drawn() -> nn.Module:
    return nn.Sequential(OrderedDict(model=DrawnLayers(*(nn.Linear(16, 16) for _ in range(4)))))


def drawn_plan() -> dict[str, ParallelStyle]:
    return {"model.0": ColwiseParallel(), "model.1": RowwiseParallel()}


@on_ranks(4)
def test_split_weights_start_with_the_values_of_an_unsplit_model(folder: str) -> None:
    """From the meta device, the TP ranks of a weight would all draw the same numbers for their shards, which no single
    process would. Parts of different weights would be added up."""
    by_plan, by_script = Carried(plan=drawn_plan), Carried(prepare=split_by_script("tp", "dp", "tp", plan=drawn_plan))

    def check(start: str, row: Carried) -> None:
        unsplit, split = check_start(row, drawn, start, num_copies=TENSOR)
        # Rank 0 of each group would send every TP-sharded weight to ranks that have just drawn or received it.
        assert row is by_script or start == "unlike" or split == unsplit, (split, unsplit)

    cases = {start: (start, by_plan) for start in ("meta", "mixed", "unlike", "alike")}
    for_each(check, cases | {f"{start}, by the script": (start, by_script) for start in ("meta", "unlike")})
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = drawn()
    # Rank 0 alone has an empty shard. torch alone would send, and wait forever.
    split_by_script("tp", "dp", "tp", plan=drawn_plan, src_data_rank=None)(model)
    with pytest.raises(PlanError, match="rank 0, the only one with values"):
        prepare_fully_shard(model, None, FULL | {"sync_module_states": True}, device="cpu")
    # Without sync_module_states: each rank has its own seed.
    torch.manual_seed(dist.get_rank())
    model = drawn()
    Carried(config={"sync_module_states": False}, plan=drawn_plan).shard(model)
    bias = model.model[1].bias.to_local()  # RowwiseParallel: replicated
    biases = [torch.empty_like(bias) for _ in range(dist.get_world_size())]
    dist.all_gather(biases, bias)
    assert torch.equal(biases[0], biases[1]) and torch.equal(biases[2], biases[3]), biases


# --- gradients and full parameters


@on_ranks(4)
def test_gradients_are_clipped_and_full_parameters_seen_as_in_one_process(folder: str) -> None:
    """Sharded and replicated parameters have different numbers of copies, and clipping by any norm counts each once.
    Within summon_full_params a TP-sharded weight is full, and writes to it are kept."""
    check_clips(split(plan=sequence_plan))
    check_clips(split(build=tied), "by another order")


# --- random numbers


class Dropping(MLP):
    """Applies dropout to a replicated tensor, after TP-sharded layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


def check_masks_of_two_dtypes() -> list[str]:
    errors = []
    mesh = init_device_mesh("cpu", (TENSOR,))
    for dtype in (torch.float32, torch.float64):
        model = nn.Sequential(nn.Embedding(8, 4, dtype=dtype))
        parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
        try:
            model(torch.arange(6).view(2, 3))
        except AssertionError as error:
            errors.append(f"{dtype}: {type(error).__name__}")
    return errors


@pytest.mark.others  # torch 2.7's: 2.13 has corrected it
def test_torch_mixes_up_the_masks_of_split_embeddings():
    """The lookup of the second of two TP-sharded embeddings that differ only in dtype raises, because torch's
    redistribution cache confuses their placements. Tests of TP-sharded models therefore compute in float64."""
    assert run_ranks(check_masks_of_two_dtypes, TENSOR, fresh=True) == [["torch.float64: AssertionError"]] * TENSOR


@on_ranks(TENSOR)
def test_a_dropout_drops_the_same_on_the_ranks_that_split_a_layer(folder: str) -> None:
    """Otherwise replicated parameters get a different gradient on each rank, and the copies silently diverge."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Language()
    for each in model.model.layers:
        each.mlp.__class__ = Dropping
    reference = copy.deepcopy(model)
    torch.manual_seed(dist.get_rank())  # as Composer seeds ranks
    split().shard(model)
    state, tokens = torch.get_rng_state(), batch(0, 2)
    loss = loss_of(model, tokens)
    loss.backward()
    torch.set_rng_state(state)
    expected = loss_of(reference, tokens)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=ATOL)
    assert_same_gradients(model, reference, atol=ATOL)


# --- replicated parameters between TP-sharded layers


class Tempered(Attention):
    """Norms over each head's queries, as in Qwen3 and Gemma3, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.query_norm, self.temperature = nn.LayerNorm(HEAD), nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each(x).unflatten(-1, (-1, HEAD)) for each in (self.query, self.key, self.value))
        heads = [self.query_norm(query) * self.temperature, key, value]  # B, T, heads, HEAD
        mixed = nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def tempered(*, trained: tuple[str, ...] = ("query_norm", "temperature"), gain: float = 1.0) -> Language:
    """``gain`` scales the weights after the attention; with 0, no parameter inside it gets a gradient in the first
    step."""
    model = Language(num_layers=1)
    model.model.layers[0].attention = Tempered()
    for name, parameter in model.named_parameters():
        if "query_norm" in name or "temperature" in name:
            parameter.requires_grad_(any(each in name for each in trained))
    nn.init.constant_(model.model.layers[0].attention.out.bias, 0.5)
    model.model.layers[0].attention.out.weight.data *= gain
    return model


def without(plan: dict[str, ParallelStyle], path: str) -> dict[str, ParallelStyle]:
    return {key: style for key, style in plan.items() if key != path}


NORM = "model.layers.0.attention.query_norm"
OF_NORM = "model.layers.*.attention.query_norm"
SUMMED = f"{OF_NORM!r}: SequenceParallel(use_local_output=True)"
only_norm = partial(tempered, trained=("query_norm",))
DIVERGING: dict[str, tuple[Carried, int, tuple[str, ...]]] = {
    "a norm of heads": (split(build=only_norm), 0, (f"{NORM}.weight, {NORM}.bias:", SUMMED, "layer_plan: auto")),
    "a norm of heads, recomputed, in microbatches, with replicas": (
        split(build=only_norm, config=RECOMPUTED | REPLICAS | {"gradient_sync": "last"}, num_microbatches=2),
        0,
        (f"{NORM}.weight", SUMMED),
    ),
    "a temperature": (
        split(build=partial(tempered, trained=("temperature",))),
        0,
        ("model.layers.0.attention.temperature:", "in a module of its own"),
    ),
    "a norm left out of sequence parallelism": (
        split(plan=lambda: without(sequence_plan(), "model.norm") | {"model.norm": local_output()}),
        0,
        ("model.norm.weight, model.norm.bias:", "'model.norm': SequenceParallel(use_local_output=True)"),
    ),
    "a gradient that begins in the second step": (split(build=partial(only_norm, gain=0.0)), 1, (SUMMED,)),
}


def local_output() -> ParallelStyle:
    """The local part of a norm's sequence-sharded input."""
    return PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True)


def check_diverging(row: Carried, step_of_error: int, says: tuple[str, ...]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = row.build()
    optimizer = row.optimizer(model.parameters())
    row.shard(model, optimizer=optimizer)
    for step in range(step_of_error + 1):
        for number in range(row.num_microbatches):
            begin_microbatch(model, is_last=number == row.num_microbatches - 1)
            loss = loss_of(model, batch(step, 2))
            if step == step_of_error and number == row.num_microbatches - 1:
                with pytest.raises(PlanError) as caught:
                    loss.backward()
                missing = [text for text in says if text not in str(caught.value)]
                assert not missing, f"{missing} not in: {caught.value}"
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(TENSOR)
def test_sequence_parallelism_of_whole_sequences_is_refused(folder: str) -> None:
    """Otherwise the norm's gradient would be too large by the number of ranks, on all of them."""
    torch.set_default_dtype(torch.float64)
    for name in ("model__layers__0__norm_1", "model__norm"):
        torch.manual_seed(0)
        model = Language(num_layers=1)
        split(plan=with_plan(**{name: SequenceParallel(use_local_output=True)})).shard(model)
        told = rf"{name.replace('__', '.')}: SequenceParallel, .* the whole input, .* 2 times too large; take it out"
        with pytest.raises(PlanError, match=told):
            loss_of(model, batch(0, 2)).backward()


@on_ranks(TENSOR)
def test_equal_parts_of_a_sequence_are_no_whole_ones(folder: str) -> None:
    """For a row of one token, as in a benchmark, all ranks compute the same numbers."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Language(num_layers=1)
    split(plan=sequence_plan).shard(model)
    for tokens in (torch.zeros_like(batch(0, 2)), batch(0, 2), batch(1, 2)):
        loss_of(model, tokens).backward()


SUMMING: dict[str, Carried] = {
    "a norm of heads": split(
        build=only_norm, plan=lambda: layer_plan() | {OF_NORM: SequenceParallel(use_local_output=True)}
    ),
    "frozen": split(build=partial(tempered, trained=())),
}


@on_ranks(4)
def test_what_would_get_a_part_of_its_gradient_is_refused_or_summed(folder: str) -> None:
    """Replicated weights between TP-sharded layers silently diverged: each rank trained its own copy on its own
    heads."""
    for_each(check_diverging, DIVERGING)
    for_each(check_carried, {name: (row,) for name, row in SUMMING.items()})


@on_ranks(TENSOR)
def test_comparing_gradients_sends_nothing_after_the_first_backward(folder: str) -> None:
    """A check in every step would make the host synchronize with the device."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Language(num_layers=1)
    split().shard(model)
    counts = []
    for step in range(3):
        with Collectives() as counted:
            loss_of(model, batch(step, 2)).backward()
        counts.append({name: found["calls"] for name, found in counted.counts.items()})
    assert counts[0] != counts[1] == counts[2], counts


# --- losses of vocab-sharded logits


@on_ranks(4)
def test_a_loss_of_logits_that_ranks_split_is_that_of_one_process(folder: str) -> None:
    """torch's loss_parallel does not gather the logits, one for each token and vocabulary entry."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Language(num_layers=1)
    reference = copy.deepcopy(model)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    split(plan=lambda: layer_plan() | {"model.head": head}).shard(model)
    tokens = batch(0, 4)
    with loss_parallel():
        loss = loss_of(model, tokens.chunk(2)[dist.get_rank() // TENSOR])
        loss.backward()
    total = loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()
    dist.all_reduce(total)
    expected = loss_of(reference, tokens)
    expected.backward()
    torch.testing.assert_close(total / dist.get_world_size(), expected.detach(), rtol=0, atol=ATOL)
    assert_same_gradients(model, reference, atol=ATOL)


# --- the plan


@on_ranks(4)
def test_a_plan_says_where_each_parameter_lies(folder: str) -> None:
    """Its text names the TP-sharded modules and their layout, and the digest detects ranks that plan differently."""
    torch.manual_seed(0)
    model = Language()
    config = config_of(FULL, tensor_parallel_degree=TENSOR)
    plan = plan_sharding(model, config, tensor_parallel=layer_plan())
    same = plan_sharding(copy.deepcopy(model), config, tensor_parallel=layer_plan())
    assert plan == same and plan.digest == same.digest
    other = plan_sharding(model, config, tensor_parallel=layer_plan(ends=False))
    assert plan != other and plan.digest != other.digest
    apply_plan(model, plan)
    text = plan.explain()
    assert "model.layers.*.mlp.up (2 modules): weight Shard(dim=0), bias Shard(dim=0)" in text
    assert "model.layers.*.mlp.down (2 modules): weight Shard(dim=1), bias Replicate()" in text
    assert "tensor_parallel 2" in text
