"""Context and expert parallelism through Composer's Trainer, compared with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.context_runs import (
    KINDS,
    LENGTH,
    POLICY,
    VOCABULARY,
    Run,
    Trained,
    build,
    softmax_in_float64,
    train,
)
from support.examples import IS_THOROUGH
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.synchronisations import Synchronisations
from support.trainers import largest_difference
from support.training import FULL, assert_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import ShardingConfig, UnsupportedError, plan_sharding, prepare_fully_shard
from composer_fsdp2._torch.tensor_tree import tensors_in

pytestmark = pytest.mark.composer


BY_TOKENS = ("qwen2", "mpt-alibi")
RESUMED = ("mpt",)


def run_of(kind: str, **options: Any) -> Run:
    return Run(kind=kind, by_tokens=kind in BY_TOKENS, **options)


def check_run(kind: str, theirs: Trained, folder: str) -> None:
    """With degree 2, and the second batch with degree 4 from a checkpoint."""
    saved = f"{folder}/{kind}" if kind in RESUMED else None
    with FSDP2():
        assert_alike(train(run_of(kind, degree=2, save_folder=saved)), theirs)
        if saved is not None:
            resumed = train(run_of(kind, degree=4, load_path=f"{saved}/ep0-ba1-rank0.pt"))
            assert largest_difference(resumed.losses, theirs.losses[1:]) <= 1e-12, (resumed.losses, theirs.losses)
            assert_same_parameters(resumed, theirs)


def assert_alike(ours: Trained, theirs: Trained) -> None:
    assert largest_difference(ours.losses, theirs.losses) <= 1e-12, (ours.losses, theirs.losses)
    assert_same_parameters(ours, theirs)
    # Each count synchronizes with the device; a microbatch used one too many.
    assert ours.num_counts == theirs.num_counts
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-6, nan_ok=True)


def assert_same_parameters(ours: Trained, theirs: Trained) -> None:
    for name, each in theirs.parameters.items():
        difference = float((ours.parameters[name] - each).abs().max())
        assert difference <= 1e-12, f"{name}: {difference}"


FAST = ("llama", "mpt-alibi")
SLOW = tuple(kind for kind in KINDS if kind not in FAST)


@pytest.mark.parametrize("kinds", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=" ".join)
def test_a_run_that_divides_sequences_is_that_of_one_process(kinds: tuple[str, ...], tmp_path: Path):
    """Wrong positions, weights or labels would train a different model with plausible losses."""
    [alone] = run_ranks(for_each, 1, train, {kind: (run_of(kind, degree=0),) for kind in kinds})
    run_ranks(for_each, 4, check_run, {kind: (kind, theirs, str(tmp_path)) for kind, theirs in alone.items()})


# --- padding


class LargestTensor(TorchDispatchMode):
    """The largest number of elements that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_elements = max([self.num_elements, *(each.numel() for each in tensors_in(result))])
        return result


def padded_batch(padding: str, length: int) -> dict[str, torch.Tensor]:
    """One of two rows is padded."""
    tokens = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(2))
    mask, labels = torch.ones_like(tokens), tokens.clone()
    place = {"right": slice(length - 3, None), "left": slice(3), "between": slice(3, 6)}[padding.split(", ")[0]]
    mask[1, place] = 0
    if "counted" not in padding:
        labels[:, 1:][mask[:, :-1] == 0] = labels[mask == 0] = -100  # labels predicted from padding, and its own
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def check_padding(attention: str, padding: str) -> None:
    def loss_of(model: Any, length: int = LENGTH) -> torch.Tensor:
        with mock.patch.object(F, "softmax", softmax_in_float64):
            loss = model(padded_batch(padding, length))["loss"]
            loss.backward()
        return loss.detach()

    torch.set_default_dtype(torch.float64)
    model = build("qwen2")
    model.model.config._attn_implementation = attention
    reference = copy.deepcopy(model)
    config = FULL | POLICY | {"context_parallel_degree": 2, "activation_checkpointing": True}
    prepare_fully_shard(model, None, config, device="cpu")
    total, expected = loss_of(model), loss_of(reference)
    dist.all_reduce(total)
    torch.testing.assert_close(total / 2, expected, rtol=0, atol=1e-12)
    assert_gradients(model, reference)
    with Synchronisations() as waits, LargestTensor() as largest:
        loss_of(model, length=512)
    assert len(waits.of_packages("composer_fsdp2")) == 1, waits.of_packages("composer_fsdp2")
    if attention == "sdpa":
        assert (largest.num_elements >= 512**2) == ("counted" in padding), largest.num_elements


@on_ranks(2)
def test_padding_needs_no_mask():
    """One padded token in a batch of long rows required a mask of 32 GiB and more, and disabled flash attention.
    Without the mask, tokens must have the same outputs and gradients as in one process."""
    paddings = ("right", "left", "between, counted", *(("right, counted", "left, counted") if IS_THOROUGH else ()))
    cases = {padding: ("sdpa", padding) for padding in paddings}
    for_each(check_padding, cases | {"eager": ("eager", "between")})


@on_ranks(1)
def test_padding_is_read_in_host_memory():
    """Otherwise the host would synchronize with the device in each microbatch. A meta device, which cannot be read,
    stands for a GPU."""
    from composer.devices import DeviceCPU

    from composer_fsdp2.parallel.padding import Padding

    class Meta(DeviceCPU):
        def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("meta")

    for padding, expected in (
        ("right", Padding(is_right=True, counts=False)),
        ("left, counted", Padding(is_right=False, counts=True)),
    ):
        with FSDP2():
            moved = Meta().batch_to_device(padded_batch(padding, 8))
        assert Padding.of(moved["attention_mask"], moved["labels"]) == expected
        moved["labels"].fill_(1)
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):  # the change invalidates the host copy
            Padding.of(moved["attention_mask"], moved["labels"])


# --- MPT below its MPTForCausalLM


class Reward(nn.Module):
    """A head on the transformer, and the mean of its logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.language = build(kind).model
        self.head = nn.Linear(16, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rewards = self.head(self.language.transformer(input_ids=tokens).last_hidden_state)[:, -1]
        return rewards.sin().mean() + self.language(input_ids=tokens).logits[:, -1].sin().mean()


def check_reward(kind: str, degree: int) -> None:
    import composer_fsdp2.compat.context_parallel  # registers the MPT adapter, as install() does

    del composer_fsdp2
    torch.set_default_dtype(torch.float64)
    model, reference = (nn.ModuleDict({"model": Reward(kind)}) for _ in range(2))  # from one seed
    prepare_fully_shard(model, None, FULL | {"context_parallel_degree": degree}, device="cpu")
    tokens = torch.randint(VOCABULARY, (8 // degree, 9), generator=torch.Generator().manual_seed(2))
    loss = model["model"](tokens.chunk(4 // degree)[dist.get_rank() // degree])
    loss.backward()
    reference["model"](tokens).backward()
    assert_gradients(model, reference)
    if degree == 4:
        with pytest.raises(UnsupportedError, match=r"a layer of MPTForCausalLM.transformer.blocks runs outside"):
            model["model"].language.transformer.blocks[1](torch.zeros(1, 8, 16))


@on_ranks(4)
def test_a_head_on_mpt_sees_whole_rows():
    """The head used the last position of this rank's chunk instead of the row's."""
    for_each(
        check_reward, {f"{kind}, {degree}": (kind, degree) for kind, degree in (("mpt-alibi", 2), ("mpt-rope", 4))}
    )


# --- refusals


def plan_of(model: nn.Module, degree: int = 2) -> Any:
    import composer_fsdp2.compat.context_parallel  # registers the MPT adapter, as install() does

    del composer_fsdp2
    holder = nn.Module()
    holder.model = model
    return plan_sharding(holder, ShardingConfig(context_parallel_degree=degree))


def llama(kind: str = "LlamaForCausalLM", **changes: Any) -> Any:
    import transformers

    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **changes)
    return getattr(transformers, kind)(config)


def changed(model: Any, name: str, value: Any, where: Callable[[Any], Any] = lambda model: model) -> Any:
    setattr(where(model), name, value)
    return model


class Averaging(nn.Module):
    """Like a ComposerModel that computes its loss from the logits."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs.logits, batch["labels"])


def own_forward(self: Any, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
    """A forward that averages the losses of its labels."""


def refused_models() -> list[tuple[Any, str]]:
    import transformers

    def attention(model: Any) -> Any:
        return model.model.layers[0].self_attn

    def mpt_attention(model: Any) -> Any:
        return model.transformer.blocks[0].attn

    def config(model: Any) -> Any:
        return model.config

    def mpt(name: str, value: Any, where: Callable[[Any], Any] = config) -> Any:
        return changed(build("mpt").model, name, value, where)

    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    gpt2 = {"n_embd": 16, "n_layer": 1, "n_head": 4, "attn_pdrop": 0.0}
    hybrid = llama()
    hybrid.model.layers.append(nn.Linear(16, 16))
    return [
        (llama(attention_dropout=0.25), "model.model.layers.0.self_attn: attention dropout of 0.25"),
        (changed(llama(), "_attn_implementation", "flex_attention", config), "'flex_attention'"),
        (
            transformers.GPTJForCausalLM(transformers.GPTJConfig(n_embd=16, n_layer=1, n_head=4, rotary_dim=2)),
            "in this release",
        ),
        (transformers.BertForMaskedLM(transformers.BertConfig(**sizes, num_attention_heads=4)), "no attention in it"),
        (
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(**gpt2, reorder_and_upcast_attn=True, attn_implementation="eager")
            ),
            "reorder_and_upcast_attn goes past transformers' interface; set it to false",
        ),
        (changed(llama(), "sinks", nn.Parameter(torch.zeros(4)), attention), "likely one for each head"),
        (changed(llama(), "mixer", nn.Conv1d(4, 4, 2), attention), "self_attn.mixer is a convolution over places"),
        (hybrid, "model.layers.1 has no attention, and may mix places in another way"),
        (mpt("attn_dropout_p", 0.5, mpt_attention), "attention dropout of 0.5"),
        (mpt("sliding_window_size", 8, mpt_attention), "its sliding_window_size was not tested"),
        (mpt("reuse_kv_layer_idx", 0, mpt_attention), "its reuse_kv_layer_idx was not tested"),
        (mpt("attn_impl", "other", mpt_attention), "set it to torch or flash"),
        (mpt("use_cache", True), "use_cache keeps keys and values"),
        (mpt("attn_config", {"rope": True, "rope_impl": "dail"}), "attn_config.rope_impl: hf"),
        (mpt("attn_config", {"prefix_lm": True}), "prefix_lm was not tested"),
        (mpt("ffn_config", {"ffn_type": "mb_moe"}), "balances experts"),
        (mpt("use_pad_tok_in_ffn", False), "use_pad_tok_in_ffn: false"),
    ]


@on_ranks(1)
def test_what_attention_cannot_divide_is_refused_by_name():
    """Without an error, training would silently use a wrong mask, other random numbers, or attention within a chunk."""
    for model, text in refused_models():
        with pytest.raises(UnsupportedError) as raised:
            plan_of(model)
        assert text in str(raised.value), raised.value
        assert raised.value.keys == ("context_parallel_degree",)
    with pytest.raises(UnsupportedError, match="its 4 heads cannot be divided over 3 ranks"):
        plan_of(llama(), 3)
    assert plan_of(llama()).exchanging == ("model.model.layers.0.self_attn",)


@on_ranks(1)
def test_a_plan_says_which_losses_are_of_whole_rows():
    """The loss is correct, with logits of the full rows on each rank: more memory than the user may expect."""
    own = llama()
    own.__class__ = type("OwnLossForCausalLM", (type(own),), {"forward": own_forward})
    averaging = Averaging()
    averaging.model = llama()
    for holder, text in (
        (own, "OwnLossForCausalLM.forward is written in "),
        (changed(llama(), "loss_function", nn.functional.cross_entropy), "its loss_function has no parameters"),
        (averaging, "Averaging.loss is written in"),
    ):
        model = holder if holder is averaging else nn.ModuleDict({"model": holder})
        [note] = plan_sharding(model, ShardingConfig(context_parallel_degree=2)).notes
        assert text in note and "of whole rows on each rank" in note, note
    assert plan_of(llama()).notes == plan_of(llama("LlamaModel")).notes == ()


@on_ranks(2)
def test_what_a_forward_cannot_divide_is_refused():
    """Text generated from a chunk of a row would silently be wrong."""
    # On all ranks, so none waits for another.
    tokens = torch.zeros(1, 6, dtype=torch.long)
    model, holder = llama(attn_implementation="sdpa"), nn.Module()
    holder.model = model
    prepare_fully_shard(holder, None, {"context_parallel_degree": 2}, device="cpu")
    for options, text in (
        ({"output_attentions": True}, "output_attentions is not known of whole rows"),
        ({"logits_to_keep": 1, "labels": tokens}, "logits_to_keep is of whole rows"),
        ({"num_items_in_batch": 100, "labels": tokens}, "num_items_in_batch is counted over all ranks"),
        ({"past_key_values": []}, "generate, and evaluate tasks that generate, in a run of their own"),
        ({"use_cache": True}, "a forward with use_cache needs whole sequences"),
        ({"angles": tokens}, "model.layers.0 got angles, and it is not known which part of it"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            model(input_ids=tokens, **options)
    with pytest.raises(UnsupportedError, match="generate needs whole sequences"):
        model.generate(tokens)
    assert model(input_ids=tokens, labels=tokens).logits.shape[1] == 3
    output = model(input_ids=tokens, output_hidden_states=True)
    assert output.logits.shape[1] == 6 and {states.shape[1] for states in output.hidden_states} == {6}
    assert output.past_key_values is None


@on_ranks(2)
def test_tasks_in_context_are_refused_before_training():
    """A task's positions in a row differ from those in a chunk: the first evaluation would fail, or score other
    tokens."""
    from support import context_runs

    tasks = ["InContextLearningLMAccuracy"]
    with FSDP2(), mock.patch.object(context_runs, "METRICS", tasks), pytest.raises(UnsupportedError, match="'eval'"):
        train(Run(kind="mpt", degree=2))


# --- expert parallelism of LLM Foundry's torch_dmoe


def split(degree: int, **config: Any) -> dict[str, Any]:
    return {"expert_parallel_degree": degree, **config}


def runs_of_experts(folder: str) -> dict[str, Trained]:
    def run(kind: str, config: dict[str, Any], options: dict[str, Any]) -> Trained:
        with FSDP2():
            return train(Run(kind=kind, config=config, **{"degree": 1} | options))

    glu, mlp = f"{folder}/glu", f"{folder}/mlp"
    sharded = {"state_dict_type": "sharded"}
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "sequences divided too, sharded, saved": ("mpt-glu", split(2, **sharded), {"degree": 2, "save_folder": glu}),
        "sharded, resumed at 4": ("mpt-glu", split(4, **sharded), {"load_path": f"{glu}/ep0-ba1"}),
        "full, saved": ("mpt-mlp", split(2, activation_checkpointing=False), {"save_folder": mlp}),
    }
    return for_each(run, {name: case for name, case in cases.items() if case[0] in KINDS_OF_EXPERTS})


# parallel/test_split_experts.py loads each form of checkpoint on any ranks.
KINDS_OF_EXPERTS = ("mpt-glu", "mpt-mlp") if IS_THOROUGH else ("mpt-glu",)


def alone(load_path: str | None) -> dict[str, Trained]:
    """One process, under ``FSDP2()`` because of the checkpoint seams."""
    with FSDP2():
        kinds = ("mpt-mlp",) if load_path else KINDS_OF_EXPERTS
        return {kind: train(Run(kind=kind, degree=0, load_path=load_path)) for kind in kinds}


def test_a_trainer_splits_experts_and_trains_as_one_process(tmp_path: Path):
    """The losses, metrics and weights; and from a checkpoint of degree 2, with degree 4 and in one process."""
    [expected] = run_ranks(alone, 1, None)
    runs = run_ranks(runs_of_experts, 4, str(tmp_path))[0]
    if IS_THOROUGH:
        runs["full, resumed alone"] = run_ranks(alone, 1, f"{tmp_path}/mlp/ep0-ba1-rank0.pt")[0]["mpt-mlp"]
    for name, found in runs.items():
        theirs = expected["mpt-mlp" if "full" in name else "mpt-glu"]
        assert largest_difference(found.losses, theirs.losses[-len(found.losses) :]) <= 1e-12, name
        if "resumed" not in name:  # after its evaluation
            assert found.metrics == pytest.approx(theirs.metrics, rel=1e-6, nan_ok=True), name  # fp32 accumulators
        for each, value in theirs.parameters.items():
            difference = float((found.parameters[each] - value).abs().max())
            assert difference <= 1e-10, f"{name}, {each}: {difference}"


@on_ranks(4)
def test_split_experts_get_the_values_of_foundrys_initialization():
    """The same weights as without the key, initialized by MPT's own param_init_fn."""
    replicas = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
    torch.set_default_dtype(torch.float64)
    values = []
    for config in ({}, split(2), split(2, sharding_strategy="HYBRID_SHARD", **replicas)):
        with torch.device("meta"):
            model = build("mpt-glu")
        torch.manual_seed(7)
        prepare_fully_shard(model, None, FULL | config, device="cpu")
        values.append(full_parameters(model))
    assert_same(values[1], values[0])
    assert_same(values[2], values[0])
