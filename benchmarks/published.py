"""Published runs on GPUs, compared with ``composer-fsdp2 plan``: whether they fitted, and their memory.

    python benchmarks/published.py                       # the table on the screen
    python benchmarks/published.py --write               # migration_docs/published-runs.md

Each row of ``published.csv`` is a published run with its model, GPUs, rows of a microbatch, precision and strategy, and
with its memory or the fact that it fitted. It is planned on FSDP2 from a file, as a user plans it; most of these runs
used FSDP1. Requires LLM Foundry, no GPU and no network. Exit code 0, or 1 if the plan refuses a run that fitted.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from report import markdown
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from composer_fsdp2.estimate.planned_step import Memory, PlannedStep
from composer_fsdp2.estimate.step import Kind
from composer_fsdp2.preflight.planned import StepOptions, plan_step
from composer_fsdp2.preflight.read_run import read_run
from composer_fsdp2.preflight.selective import recompute_by_operator, recompute_every

DATA, TEMPLATE = (Path(__file__).with_name(f"published.{end}") for end in ("csv", "md"))
PAGE = Path(__file__).resolve().parents[1] / "migration_docs" / "published-runs.md"
GIB = 2**30

# MPT: width, heads, blocks. Llama: width, feed-forward width, blocks, heads, key and value heads, vocabulary.
MPT = {
    "125M": (768, 12, 12),
    "350M": (1024, 16, 24),
    "760M": (1536, 12, 24),
    "1B": (2048, 16, 24),
    "3B": (2560, 20, 32),
    "7B": (4096, 32, 32),
    "13B": (5120, 40, 40),
    "30B": (7168, 56, 48),
    "70B": (8192, 64, 80),
}
LLAMA = {
    "2 7B": (4096, 11008, 32, 32, 32, 32000),
    "2 13B": (5120, 13824, 40, 40, 40, 32000),
    "2 34B": (8192, 22016, 48, 64, 8, 32000),
    "2 70B": (8192, 28672, 80, 64, 8, 32000),
    "3 8B": (4096, 14336, 32, 32, 8, 128256),
    "3 70B": (8192, 28672, 80, 64, 8, 128256),
}
SOURCES = {
    "foundry": "LLM Foundry, [MPT Training Benchmarks](https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/"
    "benchmarking)",
    "ibm": "PyTorch at IBM and Meta, [Maximizing training throughput using PyTorch FSDP](https://pytorch.org/blog/"
    "maximizing-training/)",
    "titan-a100": "TorchTitan, `docs/performance.md` of 2024-06 to 2024-11",
    "titan-h100": "TorchTitan, [benchmarks of 2024-12](https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3_h100_202412_torchtitan.md)",
    "hf": "Hugging Face, [Fine-tuning Llama 2 70B using PyTorch FSDP](https://huggingface.co/blog/ram-efficient-pytorch-fsdp)",
}
OUT_OF_MEMORY = "out of memory"
# ``norm_type = "fused_rmsnorm"`` in TorchTitan's llama2_13b.toml of spring 2024 (its pull request 181). transformers'
# norm keeps its input in fp32.
HAS_FUSED_NORMS = ("titan-a100", "Llama 2 13B")
# torch's foreach step allocates all square roots at once, 16 GiB. With them the optimizer state alone exceeds the
# card's memory, on FSDP1 as well.
STEPS_ONE_BY_ONE = ("hf",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One run.

    Args:
        gib: A GPU's memory.
        checkpointing: Activation checkpointing of ``all`` blocks, every ``2`` blocks, ``op`` (TorchTitan's selection of
            operators), or ``none``.
        precision: Composer's; ``bf16`` is bf16 parameters without autocast.
        policy: Composer's ``mixed_precision``: ``DEFAULT`` reduces in fp32, ``PURE`` in bf16.
        reported: "fits", "out of memory", or PyTorch's peak reserved memory in GiB.
    """

    source: str
    model: str
    tokens: int
    gpus: int
    gpu: str
    gib: int
    microbatch: int
    microbatches: int
    checkpointing: str
    precision: str
    policy: str
    reported: str

    def fsdp_config(self) -> dict[str, Any]:
        return {
            "sharding_strategy": "FULL_SHARD",
            "mixed_precision": {
                "param_dtype": "bf16",
                "reduce_dtype": "bf16" if self.policy == "PURE" else "fp32",
                "buffer_dtype": "bf16",
            },
            "activation_checkpointing": self.checkpointing in ("all", "2"),
            "activation_checkpointing_reentrant": False,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run and its plan.

    Args:
        pooled_gib: The peak if streams could not reuse each other's memory: see the page.
    """

    run: Published
    parameters: int
    peak_gib: float
    pooled_gib: float
    fits: bool


def published() -> list[Published]:
    with DATA.open() as file:
        rows = list(csv.DictReader(file))
    numbers = ("tokens", "gpus", "gib", "microbatch", "microbatches")
    return [Published(**(row | {name: int(row[name]) for name in numbers})) for row in rows]  # type: ignore[arg-type]


def plan(run: Published, folder: Path) -> Row:
    """Plan a run from a configuration file."""
    family, _, size = run.model.partition(" ")
    planned = (plan_mpt if family == "MPT" else _plan_llama)(run, size, folder)
    return Row(
        run=run,
        parameters=planned.num_parameters,
        peak_gib=planned.estimate.peak_bytes / GIB,
        pooled_gib=_pooled_bytes(planned) / GIB,
        fits=bool(planned.fits),
    )


def plan_mpt(run: Published, size: str, folder: Path, *, loss_fn: str = "fused_crossentropy") -> PlannedStep:
    width, heads, blocks = MPT[size]
    sequence = {"max_seq_len": run.tokens}
    file = {
        "model": {
            "name": "mpt_causal_lm", "init_device": "meta", "d_model": width, "n_heads": heads, "n_layers": blocks,
            "expansion_ratio": 4, "vocab_size": 50368, "norm_type": "low_precision_layernorm",
            "attn_config": {"attn_impl": "flash"}, "loss_fn": loss_fn, **sequence,
        },
        "tokenizer": {"name": "EleutherAI/gpt-neox-20b"},
        "train_loader": {"name": "text", "dataset": sequence},
        "optimizer": {"name": "decoupled_adamw"},
        "scheduler": {"name": "constant"},
        "max_duration": "1ba",
        "eval_interval": 0,
        "global_train_batch_size": run.gpus * run.microbatch * run.microbatches,
        "device_train_microbatch_size": run.microbatch,
        "precision": run.precision,
        "fsdp_config": run.fsdp_config(),
        **sequence,
    }  # fmt: skip
    return _planned(run, file, folder)


def _plan_llama(run: Published, size: str, folder: Path) -> PlannedStep:
    width, hidden, blocks, heads, kv_heads, vocabulary = LLAMA[size]
    config = LlamaConfig(
        hidden_size=width, intermediate_size=hidden, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=run.tokens,
    )  # fmt: skip
    is_titan = run.source.startswith("titan")  # embeddings and output layer are units of their own
    wrap_policy = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "wrap_embeddings": is_titan,
        "wrap_lm_output": is_titan,
    }
    layers = {"activation_checkpointing_policy": ["LlamaDecoderLayer"]} if run.checkpointing in ("all", "2") else {}
    file = {
        "precision": "fp32" if run.precision == "bf16" else run.precision,  # autocast
        "optimizer": {"name": "adamw"} | ({"foreach": False} if run.source in STEPS_ONE_BY_ONE else {}),
        "fsdp_config": run.fsdp_config() | layers | {"wrap_policy": wrap_policy},
    }
    return _planned(run, file, folder, model=partial(_llama, config, run))


def _planned(run: Published, file: dict[str, Any], folder: Path, **model: Any) -> PlannedStep:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(file))
    sizes: dict[str, Any] = {"microbatch": run.microbatch, "sequence": run.tokens} if model else {}
    found = read_run(path, world_size=run.gpus, **model, **sizes)
    return plan_step(found, run.model, StepOptions(memory=Memory(given_bytes=run.gib * GIB)))


def _llama(config: LlamaConfig, run: Published) -> nn.Module:
    """transformers' model, with flash attention's memory use."""
    config._attn_implementation, config.use_cache = "sdpa", False
    model = AutoModelForCausalLM.from_config(config)
    if run.checkpointing == "op":
        recompute_by_operator(model.model.layers)
    elif run.checkpointing == "2":
        recompute_every(2, model.model.layers)
    if (run.source, run.model) == HAS_FUSED_NORMS:
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = partial(_FusedNorm.apply, module.weight)
    return model


class _FusedNorm(torch.autograd.Function):
    """The memory of a fused kernel: it saves its input, and a number for each token."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, hidden, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(ctx.saved_tensors[0]), torch.empty_like(gradient)


def _pooled_bytes(step: PlannedStep) -> int:
    """The sum of the peaks of the three streams.

    CUDA's caching allocator reuses a block only on the stream that allocated it. ``fully_shard`` allocates buffers for
    all-gathers and reductions on separate streams.
    """
    of_streams = (Kind.COMMUNICATION,), (Kind.GRADIENTS,)
    own = {kind for kinds in of_streams for kind in kinds}
    return step.most_of(*(kind for kind in Kind if kind not in own)) + sum(step.most_of(*kinds) for kinds in of_streams)


def all_rows(runs: Iterable[Published]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        return [plan(run, Path(folder)) for run in runs]


def refused(rows: Iterable[Row]) -> list[Row]:
    """Runs that fitted, and do not fit according to the plan."""
    return [row for row in rows if row.run.reported != OUT_OF_MEMORY and not row.fits]


HEADER = ("model", "tokens", "GPUs", "rows", "recomputed", "policy", "planned", "of", "plan", "published")


def _cells(row: Row) -> tuple[str, ...]:
    run = row.run
    rows = f"{run.microbatch}" + (f" × {run.microbatches}" if run.microbatches > 1 else "")
    return (
        run.model,
        f"{run.tokens:,}",
        f"{run.gpus} {run.gpu}",
        rows,
        {"2": "every 2nd", "op": "by operator"}.get(run.checkpointing, run.checkpointing),
        run.policy.lower() + (", fp8" if run.precision == "amp_fp8" else ""),
        f"{row.peak_gib:.1f}",
        f"{run.gib}",
        "fits" if row.fits else "does not fit",
        run.reported,
    )


def tables(rows: Sequence[Row]) -> Iterator[str]:
    for source, title in SOURCES.items():
        yield f"## {title}\n"
        yield markdown(HEADER, [_cells(row) for row in rows if row.run.source == source])
        yield ""


def page(rows: Sequence[Row]) -> str:
    fitted = [row for row in rows if row.run.reported != OUT_OF_MEMORY]
    failed = [row for row in rows if row.run.reported == OUT_OF_MEMORY]
    tightest = max(fitted, key=lambda row: row.peak_gib / row.run.gib)
    measured = [row for row in rows if row.run.reported.replace(".", "").isdigit()]
    gaps = [
        (
            f"{row.run.model}, {row.run.gpus} GPUs, {row.run.tokens:,} tokens",
            f"{row.peak_gib:.1f}",
            f"{row.pooled_gib:.1f}",
            row.run.reported,
            f"{row.peak_gib / float(row.run.reported) - 1:+.0%}",
            f"{row.pooled_gib / float(row.run.reported) - 1:+.0%}",
        )
        for row in measured
    ]
    return TEMPLATE.read_text().format(
        num_fitted=len(fitted),
        num_refused=len(refused(rows)),
        num_failed=len(failed),
        num_failed_fit=sum(row.fits for row in failed),
        tightest=f"{tightest.run.model} on {tightest.run.gpus} {tightest.run.gpu}",
        tightest_gib=f"{tightest.peak_gib:.1f} of {tightest.run.gib} GiB",
        gaps=markdown(("run", "planned", "a pool a stream", "reserved", "planned", "pools"), gaps),
        tables="\n".join(tables(rows)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.parent.name}/{PAGE.name}")
    given = parser.parse_args()
    rows = all_rows(published())
    if given.write:
        PAGE.write_text(page(rows))
    else:
        print("\n".join(tables(rows)))
    wrong = refused(rows)
    for row in wrong:
        print(f"refused: {' '.join(_cells(row))}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
