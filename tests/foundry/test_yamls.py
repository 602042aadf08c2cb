"""The pairs of ``yamls/``: what migrate makes of the FSDP1 side, what Foundry makes of both, and each model's plan.

Widths are made small and weights stay on the meta device; the number of layers is the real one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.cases import for_each
from support.commands import run_forked
from support.foundry_runs import (
    Foundry,
    as_foundry_reads,
    assert_alike,
    build_without_weights,
    train,
)
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from torch import nn

from composer_fsdp2 import ShardingPlan, plan_sharding, translate
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.sharding.dtypes import torch_dtype

pytestmark = pytest.mark.foundry

FOLDER = Path(__file__).resolve().parents[2] / "yamls"
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What is known of a run without looking at its FSDP section's new form.

    Args:
        num_ranks: That it is meant for.
        blocks: Where the blocks lie, and how many there are.
        others: The other units that hold parameters.
        reshard: Whether a block's parameters are freed after forward.
        mesh: Replicas and shards; None: every rank holds a shard.
        dtypes: Of parameters in forward, of gradients while they are reduced, and of buffers.
        recomputed: How many modules are.
        keys: How the recomputation goes on, and what is gathered ahead.
        split_experts: The units of experts over 8 ranks, each of them sharded over the others.
    """

    num_ranks: int
    blocks: Mapping[str, int]
    others: tuple[str, ...]
    reshard: bool = True
    mesh: tuple[int, int] | None = None
    dtypes: tuple[torch.dtype | None, ...] = (BF16, BF16, BF16)
    recomputed: int = 0
    reentrant: bool = False
    offloads: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int | None = None
    split_experts: tuple[str, ...] = ()


def mpt(num_ranks: int, num_layers: int, *others: str, **known: Any) -> Pair:
    units = (*(f"model.transformer.{name}" for name in ("wte", *others, "norm_f") if name != "lm_head"),)
    head = ("model.lm_head",) if "lm_head" in others else ()
    blocks = {"model.transformer.blocks": num_layers}
    return Pair(num_ranks=num_ranks, blocks=blocks, others=(*units, *head), **known)


def llama(num_ranks: int, num_layers: int, **known: Any) -> Pair:
    blocks = {"model.model.layers": num_layers}
    return Pair(num_ranks=num_ranks, blocks=blocks, others=("model",), recomputed=num_layers, **known)


PAIRS = {
    "mpt/mpt-125m": mpt(8, 12, "wpe", reshard=False, mesh=(8, 1), dtypes=(BF16, FP32, BF16)),
    "mpt/mpt-350m": mpt(8, 24, "wpe", reshard=False, dtypes=(BF16, FP32, BF16), recomputed=24, reentrant=True),
    "mpt/mpt-760m": mpt(8, 24, forward_prefetch=1),
    "mpt/mpt-1b": mpt(64, 24, "wpe", recomputed=24),
    "mpt/mpt-3b": mpt(64, 32, "wpe", recomputed=32, forward_prefetch=2, backward_prefetch=2),
    "mpt/mpt-7b": mpt(32, 32, mesh=(4, 8), dtypes=(BF16, FP32, BF16), recomputed=32),
    # Split over 2 ranks; the units' mesh without them.
    "mpt/mpt-7b-tp": mpt(16, 32, recomputed=32),
    "mpt/mpt-13b": mpt(64, 40, "wpe", recomputed=40, offloads=True, backward_prefetch=0),
    "mpt/mpt-30b": mpt(256, 48, "wpe", "lm_head", recomputed=32),
    "mpt/mpt-70b": mpt(512, 80, "lm_head", reshard=False, mesh=(8, 64), recomputed=80),
    "dbrx/dbrx-like-torch": mpt(512, 40, "lm_head", reshard=False, mesh=(8, 64), recomputed=40),
    "dbrx/dbrx-like-experts": mpt(
        64,
        40,
        "lm_head",
        recomputed=40,
        split_experts=tuple(f"model.transformer.blocks.{number}.ffn.experts" for number in range(40)),
    ),
    "dbrx/dbrx-like-megablocks": mpt(128, 40, "lm_head", dtypes=(BF16, FP32, BF16), recomputed=40),
    "dbrx/dbrx-instruct": Pair(
        num_ranks=64, blocks={"model.transformer.blocks": 40}, others=("model",), recomputed=40, offloads=True
    ),
    "llama/llama2-7b-full": llama(8, 32),
    "llama/llama2-70b-full": llama(64, 80, dtypes=(BF16, FP32, None)),
    "llama/llama3-8b-lora": Pair(
        num_ranks=8,
        blocks={"model.base_model.model.model.layers": 32},
        others=(
            "model",
            *(
                f"model.base_model.model.model.layers.{block}.{linear}.lora_{matrix}.default"
                for block in range(32)
                for linear in (
                    *(f"self_attn.{name}_proj" for name in "qkvo"),
                    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
                )
                for matrix in "AB"
            ),
        ),
        dtypes=(None, None, None),  # Foundry: the weights are in bf16 themselves
        recomputed=32,
    ),
    "t5/t5-base": Pair(
        num_ranks=8,
        blocks={"model.encoder.block": 12, "model.decoder.block": 12},
        others=("model",),
        reshard=False,
        dtypes=(None, None, None),
    ),
    "t5/flan-t5-xl": Pair(
        num_ranks=8,
        blocks={"model.encoder.block": 24, "model.decoder.block": 24},
        others=("model",),
        dtypes=(BF16, FP32, BF16),
        recomputed=48,
        reentrant=True,
    ),
}


def left(name: str) -> Path:
    return FOLDER / f"{name}-fsdp1.yaml"


def right(name: str) -> Path:
    return FOLDER / f"{name}-fsdp2.yaml"


def text_of(path: Path) -> str:
    return path.read_bytes().decode()


# --- the files


def test_every_pair_is_tested():
    """A pair that is in the folder and not in the table here can go wrong unseen."""
    families = {name.split("/")[0] for name in PAIRS}
    files = {str(path.relative_to(FOLDER)) for family in families for path in (FOLDER / family).iterdir()}
    assert files == {f"{name}-fsdp{version}.yaml" for name in PAIRS for version in (1, 2)}


@pytest.mark.parametrize("name", PAIRS)
def test_left_side_becomes_the_right_side(name: str):
    """What the command makes of a run that people have is what someone who knows both FSDPs writes."""
    migration = migrate_text(text_of(left(name)), f"{name}-fsdp1.yaml")
    assert migration.exit_code == 0, str(migration)
    assert migration.after == text_of(right(name)), migration.diff()


@pytest.mark.parametrize("name", PAIRS)
def test_right_side_stays(name: str):
    """A second run of the command, or one over a folder that holds migrated files, changes nothing."""
    migration = migrate_text(text_of(right(name)), f"{name}-fsdp2.yaml")
    assert migration.exit_code == 0, str(migration)
    assert not migration.is_changed, migration.diff()


def comments(text: str) -> list[str]:
    return re.findall(r"(?:^|\s)(#.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", PAIRS)
def test_comments_are_kept(name: str):
    """Why a number is what it is stands in a comment, also in one behind a key that is gone."""
    assert comments(text_of(left(name))), "a file without comments shows nothing"
    assert comments(text_of(right(name))) == comments(text_of(left(name)))


def test_command_migrates_the_folders(tmp_path: Path):
    """The command on folders, as one would move a repository's runs: both sides of a pair come out as its right."""
    families = sorted({name.split("/")[0] for name in PAIRS})
    commands = {family: ["migrate", FOLDER / family, "-o", tmp_path / family] for family in families}
    for done in run_forked(commands, tmp_path).values():
        assert done.code == 0, done.out + done.err
    for name in PAIRS:
        assert (tmp_path / f"{name}-fsdp1.yaml").read_bytes() == right(name).read_bytes(), name
        assert (tmp_path / f"{name}-fsdp2.yaml").read_bytes() == right(name).read_bytes(), name


# --- what LLM Foundry makes of them


@pytest.mark.parametrize("name", PAIRS)
def test_foundry_reads_both_sides(name: str):
    """Foundry refuses keys that it does not know; a right side that it refuses cannot train."""
    before, after = (as_foundry_reads(side(name), PAIRS[name].num_ranks) for side in (left, right))
    assert before.precision == after.precision
    assert OmegaConf.create(before.model) == OmegaConf.create(after.model)
    assert before.tensor == after.tensor and bool(before.tensor) == name.endswith("-tp")


@pytest.mark.parametrize("name", PAIRS)
def test_both_sides_ask_for_the_same(name: str):
    """Also after Foundry's own changes to the section: rank 0's weights for all, or gradients in bf16."""
    before, after = (as_foundry_reads(side(name), PAIRS[name].num_ranks) for side in (left, right))
    configs = [
        translate(side.fsdp, precision=side.precision, device="cpu", world_size=PAIRS[name].num_ranks).config
        for side in (before, after)
    ]
    assert configs[0] is not None
    assert configs[0] == configs[1]
    assert before.fsdp.get("state_dict_type") == after.fsdp.get("state_dict_type")


# --- the plan of each model


SMALL = {"vocab_size": 128, "max_seq_len": 64}


def small_mpt(model: dict[str, Any]) -> dict[str, Any]:
    """Narrow, with attention and loss in plain torch; megablocks' experts as Foundry's own, of the same number."""
    attention = model["attn_config"] | {"attn_impl": "torch"}
    if "kv_n_heads" in attention:
        attention["kv_n_heads"] = 2
    changes = SMALL | {"d_model": 32, "n_heads": 4, "loss_fn": "torch_crossentropy", "attn_config": attention}
    if (ffn := model.get("ffn_config")) is not None:
        changes["ffn_config"] = ffn | {"ffn_hidden_size": 64}
        if ffn["ffn_type"] == "mb_dmoe":
            own = ("ffn_act_fn", "mlp_type", "moe_num_experts", "moe_top_k", "moe_jitter_eps")
            own += ("moe_normalize_expert_weights", "uniform_expert_assignment")
            kept = {key: ffn[key] for key in own}
            changes["ffn_config"] = {"ffn_type": "torch_dmoe", "ffn_hidden_size": 64, **kept}
    return model | changes


def hugging_face_config(base: str) -> Any:
    """What the ``config.json`` of these models says, but for the widths."""
    from transformers import DbrxConfig, LlamaConfig, T5Config

    narrow = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    grouped = narrow | {"num_key_value_heads": 2}
    t5 = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    return {
        "meta-llama/Llama-2-7b-hf": lambda: LlamaConfig(num_hidden_layers=32, **narrow),
        "meta-llama/Llama-2-70b-hf": lambda: LlamaConfig(num_hidden_layers=80, **grouped),
        "meta-llama/Meta-Llama-3-8B": lambda: LlamaConfig(num_hidden_layers=32, **grouped),
        "databricks/dbrx-base": lambda: DbrxConfig(
            d_model=32,
            n_heads=4,
            n_layers=40,
            vocab_size=128,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 5e5},
            ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 16, "moe_top_k": 4},
        ),
        "t5-base": lambda: T5Config(num_layers=12, **t5),
        "google/flan-t5-xl": lambda: T5Config(
            num_layers=24, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **t5
        ),
    }[base]()


def small_hugging_face(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """From a folder with a ``config.json``, instead of a download."""
    hugging_face_config(model["pretrained_model_name_or_path"]).save_pretrained(folder)
    of_gpus = ("use_flash_attention_2", "attn_implementation")
    kept = {key: value for key, value in model.items() if key not in of_gpus}
    return kept | {"pretrained_model_name_or_path": str(folder), "pretrained": False}


def build(read: Foundry, folder: Path) -> nn.Module:
    """Foundry's own model, narrow and without weights."""
    is_mpt = read.model["name"] == "mpt_causal_lm"
    return build_without_weights(small_mpt(read.model) if is_mpt else small_hugging_face(read.model, folder))


@dataclass(frozen=True, kw_only=True)
class Planned:
    model: nn.Module
    plan: ShardingPlan


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each right side's model and plan, made once."""

    @cache
    def of(name: str) -> Planned:
        num_ranks = PAIRS[name].num_ranks
        read = as_foundry_reads(right(name), num_ranks)
        model = build(read, tmp_path_factory.mktemp("model"))
        config = translate(read.fsdp, precision=read.precision, device="cpu").config
        assert config is not None
        return Planned(model=model, plan=plan_sharding(model, config).resolve(num_ranks))

    return of


def block_paths(pair: Pair) -> list[str]:
    return [f"{path}.{number}" for path, count in pair.blocks.items() for number in range(count)]


@pytest.mark.parametrize("name", PAIRS)
def test_each_block_is_a_unit(name: str, planned: Any):
    """A block that is in the root's unit instead is gathered with everything else: memory of the whole model."""
    pair, plan = PAIRS[name], planned(name).plan
    assert {parameter.device.type for parameter in planned(name).model.parameters()} == {"meta"}
    held = [unit.name for unit in plan.units if unit.parameters]
    assert sorted(held) == sorted([*block_paths(pair), *pair.others, *pair.split_experts])


@pytest.mark.parametrize("name", PAIRS)
def test_each_parameter_is_in_one_unit(name: str, planned: Any):
    """In none: unsharded on every rank, and ranks diverge. In two: trained apart from itself."""
    model, plan = planned(name).model, planned(name).plan
    names = [name for unit in plan.units for spec in unit.parameters for name in spec.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    assert not plan.unsharded_names


@pytest.mark.parametrize("name", PAIRS)
def test_units_are_as_configured(name: str, planned: Any):
    """Mesh, reshard, dtypes, recomputation and prefetching reach the units, and did not get lost on the way."""
    pair, plan = PAIRS[name], planned(name).plan
    blocks = [unit for unit in plan.units if unit.name in block_paths(pair)]
    assert {unit.reshard_after_forward for unit in blocks} == {pair.reshard}
    assert {unit.reshard_after_forward for unit in plan.units if unit.is_root} == {False}
    shapes = {unit.mesh.shape for unit in plan.units if unit.name not in pair.split_experts}
    assert shapes == {pair.mesh or (pair.num_ranks,)}
    assert {units.mesh.shape for units in plan.units if units.name in pair.split_experts} <= {(pair.num_ranks // 8, 8)}
    precisions = [unit.mixed_precision for unit in blocks]
    dtypes = {(each.param_dtype, each.reduce_dtype, each.buffer_dtype) for each in precisions}
    assert {tuple(map(torch_dtype, each)) for each in dtypes} == {pair.dtypes}
    assert {unit.cpu_offload for unit in plan.units} == {False}
    assert len(plan.checkpointed) == pair.recomputed
    assert set(plan.checkpointed) <= set(block_paths(pair))
    checkpointing = plan.config.activation_checkpointing
    assert checkpointing.checkpoint == bool(pair.recomputed)
    if pair.recomputed:
        assert checkpointing.reentrant == pair.reentrant
        assert checkpointing.cpu_offload == pair.offloads
    first, last = blocks[0], blocks[-1]
    assert len(first.forward_prefetch) == pair.forward_prefetch
    gathered_ahead = {None: None, 0: (last.name,)}.get(
        pair.backward_prefetch, tuple(unit.name for unit in blocks[-2::-1][: pair.backward_prefetch])
    )
    assert last.backward_prefetch == gathered_ahead


TIED = {
    "t5/t5-base": [["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "model.lm_head"]],
    "t5/flan-t5-xl": [["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"]],
}


@pytest.mark.parametrize("name", PAIRS)
def test_tied_weights_are_one_parameter(name: str, planned: Any):
    """fully_shard on torch 2.7 silently unties what lies in two units; MPT's head is its embedding's own module."""
    groups = [sorted(name.removesuffix(".weight") for name in names) for names in planned(name).plan.tie_groups]
    assert groups == [sorted(names) for names in TIED.get(name, [])]


def test_frozen_weights_are_apart_from_adapters(planned: Any):
    """A unit with frozen and trained parameters reduces gradients that nobody needs: the base's, all of them."""
    of_lora = planned("llama/llama3-8b-lora")
    trained = {name for name, parameter in of_lora.model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 32 * 7 * 2
    for unit in of_lora.plan.units:
        names = {spec.name for spec in unit.parameters}
        assert not names & trained or names <= trained, unit.name
        assert bool(names & trained) == (".lora_" in unit.name), unit.name


@pytest.mark.parametrize("name", [name for name in PAIRS if name.startswith("dbrx/") and not PAIRS[name].split_experts])
def test_experts_are_in_their_blocks(name: str, planned: Any):
    """All experts of a block lie in its unit, stacked: every rank gathers them, whichever its tokens go to."""
    units = {unit.name: unit for unit in planned(name).plan.units}
    for block in block_paths(PAIRS[name]):
        shapes = {spec.name: spec.shape for spec in units[block].parameters if "experts" in spec.name}
        assert shapes == {f"{block}.ffn.experts.mlp.{matrix}": (16 * 64, 32) for matrix in ("w1", "v1", "w2")}


# --- training


# Small, on the CPU, with the data of the demo; what a YAML says of sharding stays.
SMALL_RUN = (
    "max_seq_len=64",
    "seed=17",
    "precision=fp32",
    "model.init_device=cpu",
    "model.d_model=64",
    "model.n_heads=4",
    "model.n_layers=3",
    "model.max_seq_len=64",
    "model.vocab_size=512",
    "model.loss_fn=torch_crossentropy",
    "model.attn_config.attn_impl=torch",
    "tokenizer.kwargs.model_max_length=64",
    "train_loader.dataset={remote: null, split: null, shuffle_seed: 17, max_seq_len: 64, eos_token_id: 0}",
    "train_loader.num_workers=1",
    "scheduler.t_warmup=2ba",
    "global_train_batch_size=16",
    "device_train_microbatch_size=4",
    "log_to_console=false",
    "log_config=false",
    "python_log_level=warning",
    "loggers=null",
    "autoresume=false",
    "save_folder=null",  # FSDP1 saves no whole model on the CPU
)
TRAINED = ("mpt/mpt-350m", "mpt/mpt-3b")


def check_training(folder: str) -> None:
    warnings.simplefilter("ignore")

    def check(name: str) -> None:
        runs = {}
        for under, side in ((FSDP1, left), (FSDP2, right)):
            what = f"{name.replace('/', '-')}-{under.__name__}"
            places = (
                f"tokenizer.name={folder}/data/tokenizer",
                f"train_loader.dataset.local={folder}/data/mds",
                f"callbacks={{record_loss: {{path: {folder}/{what}.jsonl}}}}",
            )
            runs[under] = train(under, side(name), folder, what, *SMALL_RUN, *places)
        assert_alike(runs[FSDP2], runs[FSDP1], name)

    for_each(check, {name: (name,) for name in TRAINED})


def test_right_side_trains_as_the_left_side_did(folder: str):
    """The losses of real FSDP1 on the left side, by real Foundry, from the right side on FSDP2."""
    run_ranks(check_training, 2, folder, timeout_s=500)
