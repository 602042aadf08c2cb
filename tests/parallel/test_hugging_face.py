"""Hugging Face's models under context parallelism, compared with one process: transformers 4.51 or 5, without
Composer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import known_models
from support.cases import for_each
from support.examples import IS_THOROUGH
from support.legality import Carried, Distances, check_carried
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from torch import nn
from torch.nn import functional as F

from composer_fsdp2 import UnsupportedError, plan_sharding, prepare_fully_shard, translate

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[engine-test]")

from support.transformers_models import (
    CONFIGS,
    IN_RELEASE_4,
    Holder,
    build,
    in_float64,
    is_release_4,
    pretrained,
)

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}
REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_reentrant": True}


# --- batches, equal on the ranks of a group


def batch_of(tokens: torch.Tensor, padding: str = "", length: int = 9) -> dict[str, torch.Tensor]:
    """Rows; a third of them padded by one or two positions with token 0, which occurs nowhere else."""
    tokens = tokens[:, :length].clamp(min=1)
    number, places = tokens[:, :1] % 3, torch.arange(length)
    if not padding:
        return {"input_ids": tokens}
    is_text = places >= number if padding == "left" else places < length - number
    return {"input_ids": tokens * is_text, "attention_mask": is_text.long()}


def learned(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Labels of a causal model: tokens that follow a real token."""
    tokens, mask = batch["input_ids"], batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    follows = F.pad(mask[:, :-1], (1, 0))
    return torch.where((mask * follows > 0) & (tokens % 5 > 0), tokens, -100)


def causal(model: Any, tokens: torch.Tensor, padding: str = "", length: int = 9, **options: Any) -> torch.Tensor:
    batch = batch_of(tokens, padding, length)
    return model.model(**batch, labels=learned(batch), **options).loss


def counted(model: Any, tokens: torch.Tensor, padding: str) -> torch.Tensor:
    """The labels of padded positions count."""
    batch = batch_of(tokens, padding)
    return model.model(**batch, labels=tokens[:, :9]).loss


def packed(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """Two concatenated texts. transformers 5 separates them if it has no cache, which checkpointing turns off."""
    batch = batch_of(tokens)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]).expand_as(batch["input_ids"])
    return model.model(**batch, labels=learned(batch), position_ids=positions, **options).loss


def packed_by_mask(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Two concatenated texts, separated by a 4-D mask, which models use unchanged."""
    batch, text = batch_of(tokens), torch.tensor([0] * 5 + [1] * 4)
    mask = ((text[:, None] == text) & torch.ones(9, 9).tril().bool()).expand(len(tokens), 1, 9, 9)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]).expand_as(batch["input_ids"])
    return model.model(**batch, labels=learned(batch), attention_mask=mask, position_ids=positions).loss


def masked(model: Any, tokens: torch.Tensor, padding: str = "", length: int = 9) -> torch.Tensor:
    """An equal number of labels in each row; the mean over ranks then equals that of all rows."""
    batch = batch_of(tokens, padding, length)
    is_learned = torch.isin(torch.arange(length), torch.tensor([1, 4, 6]))
    return model.model(**batch, labels=torch.where(is_learned, tokens[:, :length], -100)).loss


def classified(model: Any, tokens: torch.Tensor, padding: str = "", of_tokens: bool = False) -> torch.Tensor:
    batch = batch_of(tokens, padding)
    return model.model(**batch, labels=tokens[:, :9] % 2 if of_tokens else tokens[:, 1] % 2).loss


def pooled(model: Any, tokens: torch.Tensor, padding: str = "", length: int = 9) -> torch.Tensor:
    """An embedding model: the mean over a row's positions, compared with another row's."""
    batch = batch_of(tokens, padding, length)
    states = model.model(**batch).last_hidden_state
    weights = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[..., None]
    rows = (states * weights).sum(1) / weights.sum(1)
    return (rows * torch.linspace(-1, 1, rows.shape[-1])).sum(1).sin().mean()


def translated(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """From a sequence to a shorter one, with an equal number of labels in each row."""
    return model.model(**batch_of(tokens, "right"), labels=tokens[:, :5].contiguous()).loss


class WithHead(nn.Module):
    """A language model as a submodule, as in trl's value heads, reward models and chunked losses."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__()
        self.language = pretrained(name, "Model" if how == "reward" else "ForCausalLM")
        self.head = nn.Linear(16, 1) if how != "chunked" else None
        self.how = how

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.how)(batch)

    def reward(self, batch: Any) -> torch.Tensor:
        """Of the last position."""
        return self.head(self.language(**batch).last_hidden_state)[:, -1].sin().mean()

    def values(self, batch: Any) -> torch.Tensor:
        """Like trl: values of all positions, beside the logits."""
        output = self.language(**batch, output_hidden_states=True)
        values = self.head(output.hidden_states[-1]) + output.hidden_states[1].sin().mean(-1, keepdim=True)
        best = output.logits.log_softmax(-1).gather(2, batch["input_ids"][..., None])
        return (values * best.roll(1, 1)).mean()

    def chunked(self, batch: Any) -> torch.Tensor:
        """The loss of a few positions at a time."""
        states = self.language.model(**batch).last_hidden_state
        labels = batch["input_ids"][:, 1:]
        chunks = zip(states[:, :-1].split(3, 1), labels.split(3, 1), strict=True)
        losses = [
            F.cross_entropy(self.language.lm_head(x).flatten(0, 1), y.flatten(), reduction="sum") for x, y in chunks
        ]
        return sum(losses) / labels.numel()


def holding(how: str) -> Holder:
    return Holder(WithHead("llama", how))


def headed(model: Any, tokens: torch.Tensor, padding: str = "", length: int = 9) -> torch.Tensor:
    return model.model(**batch_of(tokens, padding, length))


def own_forward(self: Any, input_ids: Any, labels: Any = None, **options: Any) -> Any:
    """Averages the losses of its labels."""
    logits = self.lm_head(self.model(input_ids, **options).last_hidden_state)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return type("Output", (), {"loss": loss})


def with_own_forward() -> Holder:
    model = pretrained("llama")
    model.__class__ = type("OwnLoss", (type(model),), {"forward": own_forward})
    return Holder(model)


def with_own_loss() -> Holder:
    model = pretrained("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    return Holder(model)


def even(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model.model(tokens[:, :9], labels=tokens[:, :9]).loss


def build_with_tower(kind: Callable[..., Any]) -> Holder:
    return Holder(kind(device="cpu").model.double())


def pictured(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """An image in each row, across the boundary of two sequence shards."""
    tokens = tokens[:, :9].clamp(min=1)
    is_image = torch.isin(torch.arange(9), torch.tensor([2, 3, 4, 5])).expand_as(tokens)
    draw = torch.Generator().manual_seed(int(tokens.sum()))
    image: dict[str, Any] = {"pixel_values": torch.randn(len(tokens), 3, 28, 28, generator=draw)}
    if "Qwen" in type(model.model).__name__:
        grid = torch.tensor([[1, 2, 8]] * len(tokens))
        patches = torch.randn(16 * len(tokens), 3 * 2 * 14 * 14, generator=draw)
        image = {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": is_image.long()}
    rows = torch.where(is_image, known_models.IMAGE_TOKEN, tokens)
    labels = torch.where(is_image, -100, tokens)
    return model.model(input_ids=rows, attention_mask=torch.ones_like(rows), labels=labels, **image).loss


def checkpointing_itself(kind: str) -> Holder:
    holder = build("llama", kind)
    holder.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return holder.train()


# --- trained models


def row(build: Callable[[], Any], loss: Loss, degree: int = 2, config: Any = None) -> Carried:
    return Carried(
        config={"context_parallel_degree": degree} | (config or {}), build=build, loss=loss, num_shared=degree
    )


def rows_of(name: str) -> dict[str, Carried]:
    """A kind of model: causal ones with padding on both sides, checkpointed, at two degrees; encoders with masks."""
    if name == "bert" or name == "modernbert":
        of_masks, of_rows = partial(build, name, "ForMaskedLM"), partial(build, name, "ForSequenceClassification")
        eager = partial(of_masks, attention="eager")
        return {
            "masked, 2": row(of_masks, masked, 2, RECOMPUTED),
            "masked, padded, 4": row(of_masks, partial(masked, padding="right"), 4),
            "masked, padded, eager": row(eager, partial(masked, padding="left")),
            "masked, 8 places, eager": row(
                partial(of_masks, attention="eager"), partial(masked, length=8), 4, REENTRANT
            ),
            "rows": row(of_rows, partial(classified, padding="right"), 2, RECOMPUTED),
        }
    if name == "t5":
        encoder = partial(build, name, "EncoderModel")
        return {
            "encoder, 2": row(encoder, pooled, 2, RECOMPUTED),
            "encoder, padded, 4": row(encoder, partial(pooled, padding="right"), 4),
            "encoder, eager": row(partial(encoder, attention="eager"), partial(pooled, padding="right", length=8)),
            "translation": row(partial(build, name, "ForConditionalGeneration"), translated, 2, RECOMPUTED),
        }
    of_text, eager = partial(build, name), partial(build, name, attention="eager")
    if name == "qwen3-moe":  # its balancing loss of a batch is not the mean of several batches' losses
        rows = {"sdpa": row(of_text, causal, 4, RECOMPUTED), "eager": row(eager, partial(causal, length=8), 4)}
        padded = {side: row(of_text, partial(causal, padding=side), 4) for side in ("left", "right")}
        return rows | (padded if is_release_4() else {})  # 5 counts tokens in float32 only
    attentions = {"eager": eager} if name == "gemma2" else {"sdpa": of_text, "eager": eager}  # softcap
    first = next(iter(attentions.values()))
    rows = {
        **{f"{kind}, 2": row(each, causal, 2, RECOMPUTED) for kind, each in attentions.items()},
        "right, 4": row(first, partial(causal, padding="right"), 4, RECOMPUTED),
        "left": row(first, partial(causal, padding="left")),
        "left, eager": row(eager, partial(causal, padding="left", length=8)),
        "packed, apart": row(first, partial(packed, use_cache=False), 2, RECOMPUTED),
    }
    more = {
        **{f"{kind}, 4": row(each, partial(causal, length=8), 4) for kind, each in attentions.items()},
        "left, counted": row(first, partial(counted, padding="left")),
        "packed": row(first, packed),
    }
    return rows | (more if IS_THOROUGH else {})


of_tokens = partial(classified, of_tokens=True)
HEADS: dict[str, Carried] = {
    "reward": row(partial(holding, "reward"), headed, 2, RECOMPUTED),
    "reward, 4, padded": row(partial(holding, "reward"), partial(headed, padding="left"), 4, REENTRANT),
    "values": row(partial(holding, "values"), partial(headed, length=8), 2, RECOMPUTED),
    "values, 4": row(partial(holding, "values"), headed, 4),
    "chunked": row(partial(holding, "chunked"), headed, 2, RECOMPUTED),
    "rows": row(partial(build, "llama", "ForSequenceClassification"), partial(classified, padding="right"), 4),
    "tokens": row(
        partial(build, "llama", "ForTokenClassification", classifier_dropout=0.0), partial(classified, of_tokens=True)
    ),
    "embedder": row(partial(build, "qwen2", "Model"), partial(pooled, padding="left"), 2, REENTRANT),
    "transformers' own checkpointing": row(
        partial(checkpointing_itself, "ForCausalLM"), partial(causal, padding="left")
    ),
    "the same, of whole rows": row(partial(checkpointing_itself, "Model"), pooled, 4),
    "a forward of its own": row(with_own_forward, even),
    "a loss of its own": row(with_own_loss, even),
    "a mask of 4 dimensions": row(partial(build, "llama"), packed_by_mask),
    "angles by the length": row(
        partial(build, "llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=6), causal
    ),
}


def with_towers() -> dict[str, Carried]:
    """The adapter of Qwen2.5-VL in release 4 is tested in compat/test_known_models.py."""
    kinds = {"llava": known_models.llava} | ({} if is_release_4() else {"Qwen2.5-VL": known_models.qwen_vl})
    # Without decay: in one process, the unused parameters of LLaVA's tower have no gradient.
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    return {
        name: replace(row(partial(build_with_tower, kind), pictured, 4, RECOMPUTED), **options)
        for name, kind in kinds.items()
    }


def check(carried: Carried) -> Distances:
    with in_float64():
        return check_carried(carried)


class Outside(nn.Module):
    """Runs layers outside the model's forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.language = pretrained("llama", "Model")
        self.how = how

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        language = self.language
        states = language.embed_tokens(tokens)
        angles = language.rotary_emb(states, torch.arange(tokens.shape[1])[None])
        if self.how == "attention":
            return language.layers[0].self_attn(states, position_embeddings=angles, attention_mask=None)
        return language.layers[1](states, position_embeddings=angles, attention_mask=None)


@on_ranks(2)
def test_attention_outside_of_a_divided_forward_raises():
    """It would take each rank's part for a full row, a different one on every rank."""
    for how in ("attention", "a layer"):
        holder = Holder(Outside(how))
        holder.model.fsdp_wrap_fn = lambda module: False
        prepare_fully_shard(holder, None, {"context_parallel_degree": 2}, device="cpu")
        with pytest.raises(UnsupportedError, match=r"a layer of LlamaModel.layers runs outside of the model's"):
            holder.model(torch.ones(2, 8, dtype=torch.long))


def repeating(*order: int) -> Holder:
    """Layers occur in the list more than once."""
    model = pretrained("llama", num_hidden_layers=len(order))
    layers = [*model.model.layers]
    model.model.layers = nn.ModuleList(layers[number] for number in order)
    return Holder(model)


def with_states_by_config() -> Holder:
    return build("llama", "Model", output_hidden_states=True)


@on_ranks(2)
def test_what_would_mix_parts_and_rows_raises_by_name():
    """A part that is sharded again would have other positions and labels; a tuple has hidden states of both."""
    tokens = torch.ones(2, 8, dtype=torch.long)
    cases: dict[str, tuple[Any, ...]] = {
        "one layer": (partial(repeating, 0, 0), {"labels": tokens}, r"layers.0 of .* runs several times in a forward"),
        "the first": (partial(repeating, 0, 0, 1), {}, r"layers.0 of .* runs several times in a forward"),
        "states": (with_states_by_config, {"return_dict": False}, "output_hidden_states needs return_dict=True"),
    }
    for build_case, options, message in cases.values():
        holder = build_case()
        prepare_fully_shard(holder, None, {"context_parallel_degree": 2}, device="cpu")
        for _ in range(2):  # an error leaves no state behind
            with pytest.raises(UnsupportedError, match=message):
                holder.model(tokens, **options)


def counting_places(num_layers: int, *, is_tuned: bool = True) -> Holder:
    """Llama 4: each fourth layer has no rotary embedding and scales queries by their positions."""
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, intermediate_size_mlp=24,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, head_dim=4, pad_token_id=0,
        moe_layers=[], attn_temperature_tuning=is_tuned, floor_scale=2, attn_implementation="sdpa",
    )  # fmt: skip
    return Holder(transformers.Llama4ForCausalLM(config))


@on_ranks(2)
def test_attention_that_counts_places_is_refused():
    """It counted positions within a part: losses were off by a percent, without an error."""
    config = {"context_parallel_degree": 2}
    with pytest.raises(UnsupportedError, match=r"layers.3.self_attn: it scales queries by places that it counts"):
        prepare_fully_shard(counting_places(4), None, config, device="cpu")
    for holder in (counting_places(3), counting_places(4, is_tuned=False)):
        prepare_fully_shard(holder, None, config, device="cpu")


def test_attention_with_an_indexer_is_refused():
    """It compared a part with a mask of full rows: a size error in the first forward."""
    import transformers

    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this release has no attention with an indexer")
    config = transformers.DeepseekV32Config(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=4, moe_intermediate_size=8, first_k_dense_replace=1, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, index_n_heads=4, index_head_dim=8,
        index_topk=3, pad_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    holder = Holder(transformers.DeepseekV32ForCausalLM(config))
    with pytest.raises(UnsupportedError, match=r"layers.0.self_attn: its indexer chooses among the places"):
        plan_sharding(
            holder, translate({"context_parallel_degree": 2}, precision="fp32", device="cpu", world_size=2).config
        )


def check_kind(name: str) -> None:
    for_each(check, {case: (carried,) for case, carried in rows_of(name).items()})


def known(name: str) -> bool:
    return name in IN_RELEASE_4 or not is_release_4()


# Each has a fast relative.
SLOW = ("qwen2", "qwen3", "gpt-neox")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CONFIGS]
)
def test_training_is_that_of_one_process(name: str):
    """A mask, a rotary embedding or a weight of a part, instead of the full row's, silently trains another model."""
    if not known(name):
        pytest.skip(f"attention of {name} does not go through transformers' interface before release 5")
    run_ranks(check_kind, 4, name)


@on_ranks(4)
def test_what_stands_on_a_model_sees_whole_rows():
    """A head that took this rank's part for a row computed another loss on each rank, without an error."""
    for_each(check, {name: (carried,) for name, carried in (HEADS | with_towers()).items()})
