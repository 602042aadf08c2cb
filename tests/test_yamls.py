"""The pairs of ``yamls/``: open decisions, and both sides as ``plan`` reads them, at their real widths and without
weights.

Network access is refused. ``make docs`` writes the right sides from the left ones, and ``make check`` compares them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import run_here
from support.known_runs import FOLDER, PAIRS, configs
from support.network import network_refused

from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.paths import value_at
from composer_fsdp2.preflight.planned import StepOptions, plan_step
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.read_run import read_run

pytestmark = pytest.mark.foundry

Pair = tuple[str, str]


def parametrized(pairs: Iterable[Pair], *, is_planned: bool) -> Any:
    """Parametrizes by pair; pairs that differ from another one in sizes only are planned by `make test-all`."""
    marks = {pair: [pytest.mark.slow] if is_planned and not PAIRS[pair].is_quick else [] for pair in pairs}
    return pytest.mark.parametrize("pair", [pytest.param(pair, id=pair[0], marks=marks[pair]) for pair in pairs])


each_pair, each_planned = (parametrized(PAIRS, is_planned=each) for each in (False, True))


def test_every_file_is_tested():
    """A file in the folder that is missing from these tables would not be tested."""
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix in (".yaml", ".toml")}
    assert files == {name for pair in PAIRS for name in pair} | {"mpt-tiny-fsdp1.yaml"}


# --- output of migrate


@each_pair
def test_only_the_left_side_leaves_something_to_decide(pair: Pair):
    """No silent loss and no needless question; a second run has nothing to change."""
    left, right = ((FOLDER / name).read_text() for name in pair)
    migration, again = (migrate_text(text, name, to="composer") for text, name in zip((left, right), pair, strict=True))
    assert {each.key for each in migration.blocking} == PAIRS[pair].decisions
    assert migration.exit_code == int(bool(PAIRS[pair].decisions))
    assert (again.exit_code, again.is_changed) == (0, False), again.diff()
    if pair[0].endswith(".yaml"):  # a TOML file becomes a new file, without its comments
        comments = [re.findall(r"(?:^|\s)(#.*)$", text, re.MULTILINE) for text in (left, right)]
        assert comments[0] == comments[1]


FULL_PRECISION_SUMS = {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}
LAYERS = {"activation_checkpointing_policy": "auto"}
BLOCK = {
    "wrap_policy": {
        "transformer_layer_cls_to_wrap": ["TransformerBlock"],
        "wrap_embeddings": True,
        "wrap_lm_output": True,
    },
    "activation_checkpointing_policy": ["TransformerBlock"],
}


def units(*classes: str, **others: Any) -> dict[str, Any]:
    return {"wrap_policy": {"transformer_layer_cls_to_wrap": list(classes) or "auto", **others}}


KEPT = {"reshard_after_forward": True, "state_dict_type": "sharded", "sync_module_states": True}
HALVES_OF_SEQUENCES = {"context_parallel_degree": 2}
HALVES_OF_EIGHT = {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": -1}

# By file of another system and place: the right side's fsdp_config and the precision beside it.
WORDS: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "huggingface/qwen3-moe-distillation-fsdp1.yaml": {
        "training": (
            KEPT
            | {
                "state_dict_type": "full",
                "mixed_precision": "PURE",
                "activation_checkpointing": True,
                "backward_prefetch": "NONE",
                "gradient_sync": "last",
                "wrap_policy": {"transformer_layer_cls_to_wrap": []},
            }
            | LAYERS,
            "amp_bf16",
        )
    },
    "huggingface/llama-sft-fsdp1.yaml": {
        "": (
            KEPT
            | RECOMPUTED
            | {"activation_checkpointing_policy": ["LlamaDecoderLayer"]}
            | units("LlamaDecoderLayer")
            | {"state_dict_type": "full", "mixed_precision": "PURE", "gradient_sync": "last"},
            "amp_bf16",
        )
    },
    "accelerate/llama-full-fsdp1.yaml": {
        "": (
            KEPT
            | units("LlamaDecoderLayer")
            | {"state_dict_type": "full", "mixed_precision": "PURE", "backward_prefetch": "NONE"},
            "amp_bf16",
        )
    },
    "accelerate/llama-hybrid-fsdp1.yaml": {
        "": (
            KEPT
            | RECOMPUTED
            | {"activation_checkpointing_policy": ["LlamaDecoderLayer"]}
            | units("LlamaDecoderLayer")
            | {"data_parallel_shard_degree": 8, "data_parallel_replicate_degree": -1, "mixed_precision": "PURE"},
            "amp_bf16",
        )
    },
    "roll/text-qwen3-8b-roll.yaml": {
        "actor_train": (
            KEPT
            | FULL_PRECISION_SUMS
            | RECOMPUTED
            | LAYERS
            | units("Qwen3DecoderLayer", wrap_embeddings=True)
            | {"async_save": True},
            "amp_bf16",
        ),
        "reference": (KEPT | FULL_PRECISION_SUMS | HALVES_OF_EIGHT | units(wrap_embeddings=True), "amp_bf16"),
    },
    "roll/vision-language-qwen2.5-vl-7b-roll.yaml": {
        "actor_train": (
            KEPT
            | FULL_PRECISION_SUMS
            | RECOMPUTED
            | LAYERS
            | HALVES_OF_EIGHT
            | units(wrap_embeddings=True)
            | {"async_save": True, "freeze": ["visual"], "tiled_mlp": {"classes": ["Qwen2MLP"], "chunks": 4}}
            | HALVES_OF_SEQUENCES,
            "amp_bf16",
        ),
        "reference": (
            KEPT | FULL_PRECISION_SUMS | units(wrap_embeddings=True) | {"cpu_offload": True} | HALVES_OF_SEQUENCES,
            "amp_bf16",
        ),
    },
    "roll/moe-qwen3-30b-a3b-roll.yaml": {
        # Reentrant, as ROLL chooses for mixtures of experts, and as Composer's FSDP1 did by default.
        "actor_train": (
            KEPT
            | FULL_PRECISION_SUMS
            | LAYERS
            | units("Qwen3MoeDecoderLayer", wrap_embeddings=True, moe_experts=["Qwen3MoeMLP"])
            | {"activation_checkpointing": True, "async_save": True, "idle_experts": "in_order"},
            "amp_bf16",
        ),
        "reference": (KEPT | FULL_PRECISION_SUMS | units(wrap_embeddings=True), "amp_bf16"),
    },
    "torchtitan/llama3-8b-torchtitan.toml": {
        "": (
            FULL_PRECISION_SUMS
            | RECOMPUTED
            | BLOCK
            | {"reshard_after_forward": True, "state_dict_type": "sharded", "data_parallel_replicate_degree": 4},
            "fp32",
        )
    },
    "torchtitan/llama3-70b-torchtitan.toml": {
        "": (
            FULL_PRECISION_SUMS
            | RECOMPUTED
            | BLOCK
            | {"reshard_after_forward": True, "state_dict_type": "sharded", "async_save": True},
            "fp32",
        )
    },
}


@pytest.mark.parametrize(("name", "place"), [(name, place) for name, places in WORDS.items() for place in places])
def test_right_side_says(name: str, place: str):
    """The right side has exactly the keys and values that an expert in both systems would write."""
    (right,) = [right for left, right in PAIRS if left == name]
    beside = value_at(yaml.safe_load((FOLDER / right).read_text()), place.split(".") if place else ())
    assert (beside["fsdp_config"], beside["precision"]) == WORDS[name][place]


# --- plans of both sides


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Both sides of a pair, read once, without network access and without files downloaded earlier."""
    folder = tmp_path_factory.mktemp("configs")
    for name, config in configs().items():
        config.save_pretrained(folder / name)

    @cache
    def of(pair: Pair) -> tuple[PreflightRun, PreflightRun]:
        run = PAIRS[pair]
        config = folder / run.config if run.config else None
        with network_refused():
            left, right = (
                read_run(FOLDER / name, world_size=run.ranks, model_config=config, overrides=overrides)
                for name, overrides in zip(pair, ((), run.right), strict=True)
            )
        return left, right

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "an empty cache"))
        yield of


@each_planned
def test_a_run_is_read_at_its_real_widths(pair: Pair, read: Any):
    """For a smaller model than the run's, or one with untied weights, every number is wrong."""
    for run in read(pair):
        tensors = [*run.model.parameters(), *run.model.buffers()]
        assert sum(parameter.numel() for parameter in run.model.parameters()) == PAIRS[pair].parameters
        assert sum(unit.numel for unit in run.plan.units) == PAIRS[pair].parameters
        assert {parameter.device.type for parameter in run.model.parameters()} == {"meta"}
        # Rotary frequencies, which transformers computes when it builds the model.
        assert sum(tensor.nbytes for tensor in tensors if not tensor.is_meta) <= 1024


@each_planned
def test_both_sides_are_one_run(pair: Pair, read: Any):
    """The digest covers the whole configuration, and keys outside the section are read as before the migration."""
    left, right = read(pair)
    assert left.plan.digest == right.plan.digest
    assert math.prod(left.plan.mesh.shape) == PAIRS[pair].ranks
    if pair[0].split("/")[0] not in (
        "accelerate",
        "torchtitan",
    ):  # no batch sizes, on one side or on both
        for field in ("microbatch_size", "num_microbatches", "sequence_length"):
            assert getattr(left, field) == getattr(right, field), field


# A plan with TP requires the script's layer plan.
SPLIT = {"composer/llama-tp-script-fsdp1.yaml": "trainer.parallelism_config.tp"}


@each_planned
def test_what_was_replaced_is_said(pair: Pair, read: Any):
    """A plan with another attention, or without weights, must not look like the run's own; each replacement has its
    line."""
    for run, name in zip(read(pair), pair, strict=True):
        replaced = {each.key: each for each in run.findings if each.key.startswith("model.")}
        assert set(replaced) == PAIRS[pair].replaced
        for finding in replaced.values():
            assert finding.reason and finding.target and str(FOLDER / name) in finding.where
    decisions = {SPLIT[pair[0]]} if pair[0] in SPLIT else PAIRS[pair].decisions
    assert {each.key for each in read(pair)[0].findings if each.outcome.blocks} == decisions


def numbered(paths: Mapping[str, int] | None) -> list[str]:
    return [f"{path}.{number}" for path, count in (paths or {}).items() for number in range(count)]


@each_planned
def test_each_block_is_a_unit(pair: Pair, read: Any):
    """A block in the root's unit is unsharded with all other parameters, and a parameter without a unit diverges
    between ranks."""
    known, run = PAIRS[pair], read(pair)[1]
    held = [unit.name for unit in run.plan.units if unit.parameters]
    expected = [*numbered(known.blocks), *numbered(known.experts), *known.others, *known.split_experts]
    assert sorted(held) == sorted(expected)
    names = [name for unit in run.plan.units for spec in unit.parameters for name in spec.names]
    assert sorted(names) == sorted(name for name, _ in run.model.named_parameters(remove_duplicate=False))
    assert not run.plan.unsharded_names
    tied = [tuple(sorted(name.removesuffix(".weight") for name in names)) for names in run.plan.tie_groups]
    assert tied == ([known.tied] if known.tied else [])


@each_planned
def test_units_are_as_configured(pair: Pair, read: Any):
    """Mesh, reshard, dtypes, checkpointing and prefetch reach the units."""
    known, plan = PAIRS[pair], read(pair)[1].plan
    blocks = [unit for unit in plan.units if unit.name in numbered(known.blocks)]
    assert {unit.reshard_after_forward for unit in blocks} <= {known.reshard}
    assert {unit.reshard_after_forward for unit in plan.units if unit.is_root} == {False}
    shapes = {unit.mesh.shape for unit in plan.units}
    assert shapes == {known.mesh or (known.ranks,)}
    split = [unit for unit in plan.units if unit.name in known.split_experts]
    assert {spec.expert_degree for unit in split for spec in unit.parameters} <= {8}
    precisions = [unit.mixed_precision for unit in blocks]
    assert {(each.param_dtype, each.reduce_dtype, each.buffer_dtype) for each in precisions} <= {known.dtypes}
    assert {unit.cpu_offload for unit in plan.units} == {False}
    checkpointing = plan.config.activation_checkpointing
    assert len(plan.checkpointed) == known.recomputed
    assert not blocks or set(plan.checkpointed) <= set(numbered(known.blocks))
    assert checkpointing.checkpoint == (bool(known.recomputed) or known.has_no_blocks)
    if known.recomputed:
        assert (checkpointing.reentrant, checkpointing.cpu_offload) == (known.reentrant, known.offloads)
    if blocks:
        first, last = blocks[0], blocks[-1]
        assert len(first.forward_prefetch) == known.forward_prefetch
        ahead = tuple(unit.name for unit in blocks[-2::-1][: known.backward_prefetch])
        assert last.backward_prefetch == {None: None, 0: (last.name,)}.get(known.backward_prefetch, ahead)


def test_what_else_a_plan_says(read: Any):
    """Three mistakes would plan another run: reducing gradients of frozen weights beside adapters, experts outside
    their block, or sequences sharded without a layer to exchange them."""
    lora = read(("llama/llama3-8b-lora-fsdp1.yaml", "llama/llama3-8b-lora-fsdp2.yaml"))[1]
    trained = {name for name, parameter in lora.model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 32 * 7 * 2
    for unit in lora.plan.units:
        assert {spec.name in trained for spec in unit.parameters} <= {".lora_" in unit.name}, unit.name
    dbrx = read(("dbrx/dbrx-like-torch-fsdp1.yaml", "dbrx/dbrx-like-torch-fsdp2.yaml"))[1].plan
    for unit in (unit for unit in dbrx.units if ".blocks." in unit.name):
        shapes = {spec.name: spec.shape for spec in unit.parameters if "experts" in spec.name}
        matrices = [f"{unit.name}.ffn.experts.mlp.{matrix}" for matrix in ("w1", "v1", "w2")]
        assert shapes == dict.fromkeys(matrices, (16 * 10752, 6144))
    vision = "roll/vision-language-qwen2.5-vl-7b"
    plan = read((f"{vision}-roll.yaml", f"{vision}-composer.yaml"))[1].plan
    layers = [f"model.model.layers.{number}" for number in range(28)]
    assert plan.exchanging == tuple(f"{layer}.self_attn" for layer in layers)
    assert plan.tiled == tuple(f"{layer}.mlp" for layer in layers)


@pytest.mark.parametrize("name", ["mpt/mpt-7b", "t5/t5-base"])
def test_a_step_is_planned_with_its_activations(name: str, read: Any):
    """All of ``plan`` for such a file, from a replacement for flash attention to four tied weights."""
    pair = (f"{name}-fsdp1.yaml", f"{name}-fsdp2.yaml")
    with network_refused():
        step = plan_step(read(pair)[1], "run.yaml", StepOptions())
    assert json.loads(json.dumps(step.to_json()))["per_rank"]["activations_bytes"] > 0


# Changes of a small run, and the expected messages.
UNUSABLE = {
    "max_seq_len=none": "LLM Foundry refuses it",
    "max_seq_len=0": "a microbatch of 0 tokens in a row cannot be planned",
    "global_train_batch_size=6": "not a multiple of world size 4; 3 or 6 would do",
    "global_train_batch_size=-16": "device_train_microbatch_size is -4",
    "global_train_batch_size=400000000": "a batch of 25000000 microbatches on each rank cannot be planned",
    "device_train_microbatch_size=.nan": "LLM Foundry refuses it",
    "optimizer=null": "LLM Foundry refuses it",
    "precision=half": "precision is 'half'; expected one of",
    "fsdp_config=null": "it has no fsdp_config",
    "fsdp_config.data_parallel_shard_degree=3": "use 1, 2 or 4",
    "model=null": "this file does not name a model",
    "model.name=nobody": "the model cannot be built: RegistryError",
    "model.d_model=-64": "the model cannot be built: RuntimeError",
    "model.attn_config=3": "no run can be made of it: AttributeError",
    "model={name: hf_causal_lm, pretrained_model_name_or_path: nobody/nothing}": "nothing is downloaded while planning",
    "model={name: hf_causal_lm, pretrained_model_name_or_path: 3}": "no run can be made of it: TypeError",
    "tp_config={strategy: nobody, tensor_parallel_degree: 2}": "no run can be made of it: RegistryError",
    "nobody=3": "LLM Foundry refuses it: ValueError: Unused parameters",
}


FILE = (str(FOLDER / "mpt-tiny-fsdp1.yaml"), f"code_paths=[{FOLDER.parent}/demo/record_loss.py]")


@pytest.mark.parametrize("change", UNUSABLE)
def test_what_foundry_or_a_model_raises_is_one_line(change: str, tmp_path: Path):
    """Errors of Foundry or a model are tracebacks through three packages, with the cause at best in the last line."""
    with network_refused():
        done = run_here(tmp_path, "plan", *FILE, change, "--world-size", 4, "--html", "plan.html")
    assert done.code == 2 and not done.out, done
    assert done.err.count("\n") == 1 and UNUSABLE[change] in done.err, done.err
    assert not list(tmp_path.iterdir())


def test_one_rank_is_not_sharded(tmp_path: Path):
    """On one rank Foundry drops the section, so a plan with it would describe another run."""
    done = run_here(tmp_path, "plan", *FILE, "--world-size", 1)
    assert done.code == 2 and "on one rank Foundry trains without FSDP" in done.err
