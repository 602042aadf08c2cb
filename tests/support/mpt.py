"""MPT through LLM Foundry's model and Composer's Trainer, from random weights: ``train_mpt(...)`` on the ranks.

Imports Foundry only when called, to keep test collection fast.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from support.callbacks import callback
from support.oracle import Under
from support.trainers import Outcome, shards
from torch.utils.data import DataLoader


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of an MPT, and of a rank's batch."""

    width: int
    heads: int
    layers: int
    vocabulary: int
    sequence: int
    batch: int


# yamls/mpt/mpt-7b-fsdp1.yaml
MPT_7B = Size(width=4096, heads=32, layers=32, vocabulary=50432, sequence=2048, batch=2)
TINY = Size(width=32, heads=2, layers=2, vocabulary=64, sequence=16, batch=2)


@dataclass(frozen=True)
class TrainedMpt(Outcome):
    """Results of a run on this rank."""

    seconds: list[float]  # of each batch, from its start to its end on the device
    peak_bytes: int  # the allocator's peak; 0 on the CPU


def train_mpt(
    device: str, under: Under, size: Size, *, config: dict[str, Any], attention: str, batches: int, **options: Any
) -> TrainedMpt:
    """Train on random tokens with one microbatch a batch and clipping, as in Foundry's YAML of the 7B model. Called on
    all ranks."""
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from llmfoundry.optim import DecoupledLionW
    from support.scripts.train_with_trainer import Record

    record, begun, ended = Record(), list[float](), list[float]()
    clock = callback(
        batch_start=lambda state: begun.append(time.perf_counter()), batch_end=lambda state: ended.append(_now(device))
    )
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with under():
        model = _model(size, attention)
        trainer = Trainer(
            model=model,
            optimizers=DecoupledLionW(model.parameters(), lr=3e-5, betas=(0.9, 0.95), weight_decay=1e-6),
            train_dataloader=_loader(size),
            max_duration=f"{batches}ba",
            device="gpu" if device == "cuda" else "cpu",
            precision="amp_bf16" if device == "cuda" else "fp32",
            device_train_microbatch_size=size.batch,
            parallelism_config={"fsdp": config},
            algorithms=[GradientClipping("norm", 1.0)],
            callbacks=[clock, record],
            progress_bar=False,
            log_to_console=False,
            seed=17,
            **options,
        )
        trainer.fit()
        who = shards(trainer.state.model)
        trainer.close()
    peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    seconds = [end - begin for begin, end in zip(begun, ended, strict=True)]
    return TrainedMpt(record.losses, who, seconds, peak_bytes)


def _model(size: Size, attention: str) -> Any:
    """On the meta device."""
    from llmfoundry.models.mpt.modeling_mpt import ComposerMPTCausalLM

    torch.manual_seed(9)
    return ComposerMPTCausalLM(
        d_model=size.width, n_heads=size.heads, n_layers=size.layers, expansion_ratio=4,
        max_seq_len=size.sequence, vocab_size=size.vocabulary, no_bias=True, init_device="meta",
        norm_type="low_precision_layernorm", loss_fn="torch_crossentropy",
        attn_config={"attn_impl": attention, "alibi": True, "clip_qkv": 6},
    )  # fmt: skip


def _now(device: str) -> float:
    """The time after the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _loader(size: Size) -> DataLoader[Any]:
    """128 batches of random tokens, equal in each run, divided over the ranks."""
    from composer.utils import dist

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(size.vocabulary, (128 * size.batch, size.sequence), generator=generator)
    sampler = dist.get_sampler(tokens, shuffle=False, drop_last=True)
    return DataLoader(tokens, batch_size=size.batch, sampler=sampler, collate_fn=_batch)


def _batch(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens, dtype=torch.bool)}
