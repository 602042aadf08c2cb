"""Runs with context or expert parallelism, and in one process, through Composer's Trainer in float64: ``train(run)``.

Imports Composer, Foundry and transformers only when called, to keep test collection fast.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.comparing import full_parameters

VOCABULARY, LENGTH, ROWS, HEADS = 29, 13, 24, 4
BATCH, MICROBATCH = 8, 4  # rows, of all ranks together


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Args:
        kind: The model, by its name in ``build``.
        degree: The context parallel degree; 0 is one process without it.
        by_tokens: Whether microbatches are weighted by tokens instead of rows.
        config: Additional keys of the section.
    """

    kind: str
    degree: int
    by_tokens: bool = False
    save_folder: str | None = None
    load_path: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of a run, equal on all ranks."""

    losses: list[float]
    metrics: dict[str, float]
    parameters: dict[str, torch.Tensor]
    num_counts: int  # the number of token counts


def train(run: Run) -> Trained:
    """Train for two batches, with clipping; each ends with a checkpoint and an evaluation. Called on all ranks."""
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from composer.core import DataSpec, Evaluator
    from support.scripts.train_with_trainer import Record

    torch.set_default_dtype(torch.float64)
    record, model = Record(), build(run.kind)
    blocks = 1 if run.degree == 0 else dist.get_world_size() // run.degree
    config = {
        "context_parallel_degree": run.degree,
        "mixed_precision": "FULL",
        "activation_checkpointing": True,
        "activation_checkpointing_reentrant": False,
        **(POLICY if run.kind == "qwen2" else {}),  # the others have hooks
        **run.config,
    }
    count = mock.Mock(side_effect=_num_tokens)
    rows = _rows(ROWS, is_even=run.kind in EXPERTS)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        train_dataloader=DataSpec(_loader(rows, BATCH, blocks, run.degree), get_num_tokens_in_batch=count),
        eval_dataloader=Evaluator(
            label="eval", dataloader=_loader(rows[:BATCH], BATCH, blocks, run.degree), metric_names=METRICS
        ),
        eval_interval="1ba",
        max_duration="2ba",
        device="cpu",
        precision="fp32",
        device_train_microbatch_size=MICROBATCH // blocks,
        accumulate_train_batch_on_tokens=run.by_tokens,
        parallelism_config={"fsdp": config} if run.degree else None,
        algorithms=[GradientClipping("norm", 0.5)],
        callbacks=[record],
        save_folder=run.save_folder,
        save_interval="1ba",
        load_path=run.load_path,
        progress_bar=False,
        log_to_console=False,
        seed=17,
    )
    with mock.patch.object(F, "softmax", softmax_in_float64):
        trainer.fit()
    metrics = {
        f"{label}/{name}": float(metric.compute())
        for label, found in {"train": trainer.state.train_metrics, **trainer.state.eval_metrics}.items()
        for name, metric in found.items()
    }
    parameters = full_parameters(trainer.state.model)
    trained = Trained(losses=record.losses, metrics=metrics, parameters=parameters, num_counts=count.call_count)
    trainer.close()
    return trained


POLICY = {"wrap_policy": {"transformer_layer_cls_to_wrap": "auto"}, "activation_checkpointing_policy": "auto"}
METRICS = ["LanguageCrossEntropy", "LanguagePerplexity", "TokenAccuracy"]
EXPERTS = ("mpt-glu", "mpt-mlp")  # two layers of four experts, two for each token: LLM Foundry's torch_dmoe
KINDS = ("llama", "qwen2", "mpt", "mpt-alibi", "mpt-rope", "mpt-gqa")


def build(kind: str) -> Any:
    torch.manual_seed(5)
    return _hugging_face(kind) if kind in ("llama", "qwen2") else _mpt(kind)


def _hugging_face(kind: str) -> Any:
    """LLM Foundry's ComposerHFCausalLM for Llama, Composer's own class for Qwen2."""
    import transformers
    from composer.models import HuggingFaceModel

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "max_position_embeddings": 32, "tie_word_embeddings": kind == "qwen2",
        "num_key_value_heads": 2 if kind == "llama" else 1,
    }  # fmt: skip
    if kind == "llama":
        made = _by_foundry(transformers.LlamaConfig(**sizes))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, attn_implementation="sdpa"))
        made = HuggingFaceModel(model, use_logits=True, metrics=_metrics(), eval_metrics=_metrics())
    made.model.loss_function = loss_in_float64
    _normalize_in_float64(made)
    return made


def _by_foundry(config: Any) -> Any:
    """With random weights and eager attention, LLM Foundry's default."""
    from llmfoundry.models.hf.hf_causal_lm import ComposerHFCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        made = ComposerHFCausalLM(tokenizer=None, pretrained_model_name_or_path=folder, pretrained=False)  # type: ignore[arg-type]
    return made.double()


def _metrics() -> list[Any]:
    from composer.metrics import LanguageCrossEntropy, LanguagePerplexity
    from llmfoundry.metrics.token_acc import TokenAccuracy

    return [LanguageCrossEntropy(), LanguagePerplexity(), TokenAccuracy()]


def _mpt(kind: str) -> Any:
    from llmfoundry.models.mpt.modeling_mpt import ComposerMPTCausalLM

    attentions: dict[str, dict[str, Any]] = {
        "mpt": {"attn_uses_sequence_id": True},
        "mpt-alibi": {"alibi": True},
        "mpt-rope": {"rope": True, "rope_impl": "hf"},
        "mpt-gqa": {"attn_type": "grouped_query_attention", "kv_n_heads": 2},
    }
    experts: dict[str, Any] = {
        "ffn_type": "torch_dmoe", "ffn_hidden_size": 12, "mlp_type": kind.removeprefix("mpt-"), "moe_num_experts": 4,
        "moe_top_k": 2, "moe_normalize_expert_weights": 1, "moe_jitter_eps": None, "uniform_expert_assignment": False,
        "ffn_act_fn": {"name": "gelu"},
    }  # fmt: skip
    model = ComposerMPTCausalLM(
        d_model=16, n_heads=HEADS, n_layers=2, expansion_ratio=2, max_seq_len=16, vocab_size=VOCABULARY,
        learned_pos_emb=kind in ("mpt", "mpt-gqa", *EXPERTS), norm_type="layernorm", loss_fn="torch_crossentropy",
        init_device="cpu", attn_config={"attn_impl": "torch", **attentions.get(kind, {})},
        **({"ffn_config": experts} if kind in EXPERTS else {}),
    )  # fmt: skip
    return model.double()


# A cast to float32 in transformers can turn a difference in a float64's last bit into one of 1e-7 in one element;
# whether it does for these values depends on the machine's kernels.


def _normalize_in_float64(model: torch.nn.Module) -> None:
    """Replaces transformers' RMSNorm by torch's own."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if type(module).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)  # type: ignore[arg-type]
                norm.weight = module.weight  # type: ignore[assignment]
                setattr(parent, name, norm)


_softmax = F.softmax


def softmax_in_float64(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """Whatever dtype eager attention requests."""
    return _softmax(scores, dim=dim)


def loss_in_float64(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """transformers' ForCausalLMLoss without the cast to float32."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
    return losses / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def _rows(number: int, *, is_even: bool) -> list[dict[str, torch.Tensor]]:
    """Rows of different lengths, padded on the right, with two sequences in each; some tokens have no label.

    Even ones are full, and all tokens have labels: the mean over rows equals that over tokens.
    """
    if is_even:
        tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(3))
        return [{"input_ids": row, "labels": row} for row in tokens]
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, LENGTH + 1, (number,), generator=generator)
    rows = []
    for length in lengths.tolist():
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        places = torch.arange(LENGTH)
        is_text = places < length
        labels = torch.where(is_text & (tokens % 5 > 0), tokens, -100)
        sequence = torch.where(is_text, (places >= length // 2).long(), -1)
        rows.append({"input_ids": tokens, "labels": labels, "attention_mask": is_text, "sequence_id": sequence})
    return rows


def _loader(rows: Any, batch: int, blocks: int, degree: int) -> Any:
    """The ranks of a block read the same rows; the rows of all blocks together are those of one process."""
    from composer.utils import dist as composer_dist
    from torch.utils.data import DataLoader

    rank = composer_dist.get_global_rank() // (degree or 1)
    sampler = composer_dist.get_sampler(rows, num_replicas=blocks, rank=rank)
    return DataLoader(rows, batch_size=batch // blocks, sampler=sampler)


def _num_tokens(batch: dict[str, torch.Tensor]) -> dict[str, int]:
    return {"total": batch["input_ids"].numel(), "loss_generating": int((batch["labels"][:, 1:] != -100).sum())}
