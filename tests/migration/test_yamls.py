"""The runs of other systems in ``yamls/``: what each section asks for, what is left to decide, and Composer's words.

Expectations are those of the systems: transformers 4.51.3 and accelerate 1.8.1, which are asked, ROLL's FSDP2 guide and
sources, TorchTitan's TOML of v0.2.2.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from composer_fsdp2 import plan_sharding, translate
from composer_fsdp2.config.findings import Origin
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.run import RunConfig, WrapKind
from tests.migration.huggingface_oracle import ask

FOLDER = Path(__file__).resolve().parents[2] / "yamls"
FAMILIES = {"huggingface": "huggingface", "accelerate": "huggingface", "roll": "roll", "torchtitan": "torchtitan"}

BF16, FP32 = "bfloat16", "float32"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a section asks for.

    Args:
        mesh: Replicas and shards as written, -1 for what the number of ranks leaves; None: a shard on every rank.
        wrap: Which modules become units: the kind, and the classes.
        blocking: The keys that a user must decide on.
    """

    mesh: tuple[int, int] | None = None
    reshard: bool = True
    dtypes: tuple[str, str] = (BF16, FP32)
    wrap: tuple[WrapKind, tuple[str, ...]] = (WrapKind.CLASSES, ())
    recomputed: bool = False
    offload: bool = False
    state_dict_type: str = "sharded"
    others: Mapping[str, Any] = field(default_factory=dict)
    blocking: frozenset[str] = frozenset()


LLAMA = (WrapKind.CLASSES, ("LlamaDecoderLayer",))
BLOCKS = (WrapKind.CLASSES, ("TransformerBlock",))
TRAIN, REFERENCE = (f"{worker}.strategy_args.strategy_config" for worker in ("actor_train", "reference"))

FILES: dict[str, dict[str, Asked]] = {
    "huggingface/qwen3-moe-distillation-fsdp1.yaml": {
        # None of the prefixed keys was read: one unit, as large as the model.
        "training": Asked(
            dtypes=(BF16, BF16),
            wrap=(WrapKind.ROOT, ()),
            recomputed=True,
            state_dict_type="full",
            blocking=frozenset(
                f"fsdp_config.fsdp_{name}"
                for name in (
                    "transformer_layer_cls_to_wrap",
                    "auto_wrap_policy",
                    "min_num_params",
                    "backward_prefetch",
                )
            ),
        )
    },
    "huggingface/llama-sft-fsdp1.yaml": {
        "": Asked(dtypes=(BF16, BF16), wrap=LLAMA, recomputed=True, state_dict_type="full")
    },
    "accelerate/llama-full-fsdp1.yaml": {
        "": Asked(
            dtypes=(BF16, BF16),
            wrap=LLAMA,
            state_dict_type="full",
            blocking=frozenset(["fsdp_config.fsdp_backward_prefetch_policy"]),
        )
    },
    "accelerate/llama-hybrid-fsdp1.yaml": {
        "": Asked(mesh=(-1, 8), dtypes=(BF16, BF16), wrap=LLAMA, recomputed=True),
    },
    "roll/text-qwen3-8b-roll.yaml": {
        TRAIN: Asked(
            wrap=(WrapKind.CLASSES, ("Qwen3DecoderLayer",)),
            recomputed=True,
            others={"async_save": True, "max_grad_norm": 1.0},
        ),
        REFERENCE: Asked(mesh=(-1, 4)),
    },
    "roll/vision-language-qwen2.5-vl-7b-roll.yaml": {
        TRAIN: Asked(
            mesh=(-1, 4),
            recomputed=True,
            others={"async_save": True, "context_parallel": 2, "mlp_chunks": 4},
        ),
        REFERENCE: Asked(offload=True, others={"context_parallel": 2}),
    },
    "roll/moe-qwen3-30b-a3b-roll.yaml": {
        TRAIN: Asked(
            wrap=(WrapKind.CLASSES, ("Qwen3MoeDecoderLayer",)),
            recomputed=True,
            others={"async_save": True, "max_grad_norm": 1.0},
        ),
        REFERENCE: Asked(),
    },
    "torchtitan/llama3-8b-torchtitan.toml": {
        "parallelism": Asked(
            mesh=(4, -1), wrap=BLOCKS, recomputed=True, others={"async_save": False, "max_grad_norm": 1.0}
        )
    },
    "torchtitan/llama3-70b-torchtitan.toml": {
        "parallelism": Asked(
            wrap=BLOCKS,
            recomputed=True,
            others={"async_save": True, "max_grad_norm": 1.0, "tensor_parallel": 8, "compile": True},
            blocking=frozenset(["tensor_parallel_degree"]),
        )
    },
}
SECTIONS = [(name, place) for name, sections in FILES.items() for place in sections]


def values_of(name: str) -> dict[str, Any]:
    text = (FOLDER / name).read_text()
    values: dict[str, Any] = tomllib.loads(text) if name.endswith(".toml") else yaml.safe_load(text)
    return values


def section_at(values: dict[str, Any], place: str) -> dict[str, Any]:
    for key in place.split(".") if place else ():
        values = values[key]
    return values


def run_of(name: str, place: str) -> RunConfig:
    values = values_of(name)
    section = Section(path=tuple(place.split(".")) if place else (), given=section_at(values, place), around=values)
    run = DIALECTS[FAMILIES[name.split("/")[0]]].read(section).run
    assert run is not None
    return run


def right_of(name: str) -> str:
    """The same run for composer_fsdp2."""
    for left, right in (("-fsdp1.yaml", "-fsdp2.yaml"), ("-roll.yaml", "-composer.yaml")):
        name = name.replace(left, right)
    return name.replace("-torchtitan.toml", "-composer.yaml")


def test_every_file_is_tested():
    """A file that is in the folder and not in the table here can go wrong unseen."""
    files = {str(path.relative_to(FOLDER)) for family in FAMILIES for path in (FOLDER / family).iterdir()}
    assert files == set(FILES) | set(map(right_of, FILES))


@pytest.mark.parametrize("name", FILES)
def test_dialect_and_places_are_found(name: str):
    """A section that is not found is not migrated, and trains as it did or not at all."""
    migration = migrate_text((FOLDER / name).read_text(), name)
    assert {section.dialect for section in migration.sections} == {FAMILIES[name.split("/")[0]]}
    assert [section.place for section in migration.sections] == list(FILES[name])


@pytest.mark.parametrize(("name", "place"), SECTIONS)
def test_section_asks_for(name: str, place: str):
    """Mesh, dtypes, units and recomputation are what the system did, whatever its file seems to say."""
    asked, run = FILES[name][place], run_of(name, place)
    mesh = run.config.mesh
    assert mesh.shape == (asked.mesh or (-1,))
    assert run.config.reshard_after_forward is asked.reshard
    policy = run.config.mixed_precision
    assert (policy.param_dtype, policy.reduce_dtype) == asked.dtypes
    assert (run.wrap.kind, run.wrap.classes) == asked.wrap
    assert run.config.activation_checkpointing.checkpoint is asked.recomputed
    assert run.config.cpu_offload is asked.offload
    assert run.state_dict_type == asked.state_dict_type
    assert {name: getattr(run, name) for name in asked.others} == asked.others


@pytest.mark.parametrize("name", FILES)
def test_what_is_left_to_decide(name: str):
    """Neither a loss that nobody hears of, nor a question about what is clear; the exit code says whether there is."""
    migration = migrate_text((FOLDER / name).read_text(), name)
    for section in migration.sections:
        keys = {finding.key for finding in section.blocking if finding.origin is Origin.KEY}
        assert keys == FILES[name][section.place].blocking, section.place
    assert migration.exit_code == int(any(asked.blocking for asked in FILES[name].values()))


# --- in Composer's words

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

# By file and place: the fsdp_config, and the precision beside it.
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
        # Reentrant, since ROLL chooses that for mixtures of experts, and since FSDP1 under Composer did by default.
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
RIGHT_PLACES = [(name, place) for name, places in WORDS.items() for place in places]


def right_section(name: str, place: str) -> tuple[dict[str, Any], str]:
    beside = section_at(values_of(right_of(name)), place)
    return beside["fsdp_config"], beside["precision"]


@pytest.mark.parametrize(("name", "place"), RIGHT_PLACES)
def test_right_side_says(name: str, place: str):
    """Each word of the right side is what someone would write who knows both systems, and there is no other."""
    assert right_section(name, place) == WORDS[name][place]


@pytest.mark.parametrize("name", WORDS)
def test_left_side_becomes_the_right_side(name: str):
    """What the command writes with --force, where something is left to decide, byte for byte."""
    migration = migrate_text((FOLDER / name).read_bytes().decode(), name.rpartition("/")[2])
    assert migration.after == (FOLDER / right_of(name)).read_bytes().decode(), migration.diff()


@pytest.mark.parametrize("name", WORDS)
def test_right_side_stays(name: str):
    """A second run finds nothing to change, and nothing to decide."""
    migration = migrate_text((FOLDER / right_of(name)).read_bytes().decode(), right_of(name))
    assert migration.exit_code == 0, str(migration)
    assert not migration.is_changed, migration.diff()


@pytest.mark.parametrize("name", [name for name in WORDS if name.endswith(".yaml")])
def test_comments_are_kept(name: str):
    """Also those behind keys that have no counterpart. A TOML becomes a new file, which has none of them."""
    left, right = (
        re.findall(r"(?:^|\s)(#.*)$", (FOLDER / side).read_text(), re.MULTILINE) for side in (name, right_of(name))
    )
    assert right == left


def right_config(name: str, place: str) -> ShardingConfig:
    section, precision = right_section(name, place)
    config = translate(section, precision=precision, device="cpu").config
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("name", "left_place", "right_place"),
    [(name, *places) for name in FILES for places in zip(FILES[name], WORDS[name], strict=True)],
)
def test_both_sides_ask_for_the_same(name: str, left_place: str, right_place: str):
    """All but where inputs are cast, which no key of Composer's says: FSDP1 and composer_fsdp2 cast at roots."""
    left, right = run_of(name, left_place).config, right_config(name, right_place)
    at_roots = {"cast_forward_inputs": False, "cast_root_inputs": True}
    left, right = (replace(each, mixed_precision=replace(each.mixed_precision, **at_roots)) for each in (left, right))
    assert left == right


# --- every key


# The keys beside a section's own that the report must name, by family; all else in the file is not part of sharding.
BESIDE = {
    "huggingface": ("fsdp", "fsdp_config", "bf16", "gradient_checkpointing"),
    "accelerate": ("distributed_type", "fsdp_config", "mixed_precision"),
    "roll": None,
    "torchtitan": None,
}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@pytest.mark.parametrize(("name", "place"), SECTIONS)
def test_every_key_has_its_line(name: str, place: str):
    """A key that the report does not name is one that was lost."""
    beside = BESIDE[name.split("/")[0]]
    written = section_at(values_of(name), place)
    own = leaves({key: value for key, value in written.items() if beside is None or key in beside})
    migration = migrate_text((FOLDER / name).read_text(), name)
    (section,) = [section for section in migration.sections if section.place == place]
    assert set(own) - {finding.key for finding in section.findings} == set()


def test_the_systems_did_the_same():
    """Above all: the keys of the distillation run that a guide has, and that transformers passes over."""
    trainer = ("fsdp", "fsdp_config", "bf16", "gradient_checkpointing")
    names = [name for name in FILES if FAMILIES[name.split("/")[0]] == "huggingface"]
    cases = []
    for name in names:
        (place,) = FILES[name]
        written = section_at(values_of(name), place)
        is_trainer = name.startswith("huggingface")
        cases.append(
            ("trainer", {key: written[key] for key in trainer if key in written})
            if is_trainer
            else ("accelerate", written)
        )
    for name, answer in zip(names, ask(cases), strict=True):
        (place,) = FILES[name]
        asked = FILES[name][place]
        assert "error" not in answer, f"{name}: {answer}"
        assert (answer["wrap"], tuple(answer["classes"])) == (asked.wrap[0].name, asked.wrap[1]), name
        assert answer["dtypes"][:2] == list(asked.dtypes), name
        assert answer["strategy"] == ("HYBRID_SHARD" if asked.mesh else "FULL_SHARD"), name
        assert answer["state_dict_type"] == f"{asked.state_dict_type.upper()}_STATE_DICT", name
        # Not what the section says under another name: a prefetch that nothing asked for.
        is_prefetched = run_of(name, place).config.prefetch.backward is None
        assert (answer["backward_prefetch"] is not None) == is_prefetched, name


# --- the plan of each model


NARROW = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def causal_lm(kind: str, num_layers: int, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=num_layers, **NARROW, **settings)
    return transformers.AutoModelForCausalLM.from_config(config)


def vision_language() -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"depth": 32, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    rotary = {"type": "mrope", "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(num_hidden_layers=28, rope_scaling=rotary, vision_config=vision, **NARROW)
    return Qwen2_5_VLForConditionalGeneration(config)


class TransformerBlock(nn.Module):
    """TorchTitan's class is found by this name; its linear layers stand for the block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(self.attention(x))


class Titan(nn.Module):
    """The names of TorchTitan's Llama: blocks in a ModuleDict, and no weight tied."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(128, 32)
        self.layers = nn.ModuleDict({str(number): TransformerBlock() for number in range(num_layers)})
        self.norm, self.output = nn.RMSNorm(32), nn.Linear(32, 128, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


EXPERTS = {f"model.model.layers.{number}.mlp.experts": 8 for number in range(48)}
EMBEDDED, TITANS = ("model.model.embed_tokens",), ("model.tok_embeddings", "model.output")
# By file its model, with the real number of layers and narrow ones, where its blocks lie, and its further units.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int], tuple[str, ...]]] = {
    # Without wrapping the whole model is one unit.
    "huggingface/qwen3-moe-distillation-fsdp1.yaml": (
        lambda: causal_lm("Qwen3Moe", 48, head_dim=8, num_experts=8, moe_intermediate_size=16),
        {},
        (),
    ),
    "huggingface/llama-sft-fsdp1.yaml": (lambda: causal_lm("Llama", 32), {"model.model.layers": 32}, ()),
    "accelerate/llama-full-fsdp1.yaml": (lambda: causal_lm("Llama", 32), {"model.model.layers": 32}, ()),
    "accelerate/llama-hybrid-fsdp1.yaml": (lambda: causal_lm("Llama", 32), {"model.model.layers": 32}, ()),
    "roll/text-qwen3-8b-roll.yaml": (lambda: causal_lm("Qwen3", 36, head_dim=8), {"model.model.layers": 36}, EMBEDDED),
    "roll/vision-language-qwen2.5-vl-7b-roll.yaml": (
        vision_language,
        {"model.model.layers": 28, "model.visual.blocks": 32},
        EMBEDDED,
    ),
    "roll/moe-qwen3-30b-a3b-roll.yaml": (
        lambda: causal_lm("Qwen3Moe", 48, head_dim=8, num_experts=8, moe_intermediate_size=16),
        {"model.model.layers": 48, **EXPERTS},
        EMBEDDED,
    ),
    "torchtitan/llama3-8b-torchtitan.toml": (lambda: Titan(32), {"model.layers": 32}, TITANS),
    "torchtitan/llama3-70b-torchtitan.toml": (lambda: Titan(80), {"model.layers": 80}, TITANS),
}


@pytest.mark.parametrize(
    ("name", "place", "right_place"),
    [(name, *places) for name in FILES for places in zip(FILES[name], WORDS[name], strict=True)],
)
def test_right_side_plans_on_its_model(name: str, place: str, right_place: str):
    """What a file says becomes the units of the model that it trains, and what is recomputed of it, without any hook.

    Experts are units where idle ones run, too, of the trained model.
    """
    config = right_config(name, right_place)
    build, blocks, ends = MODELS[name]
    with torch.device("meta"):
        inner = build()
    model = nn.Module()
    model.model = inner
    plan = plan_sharding(model, config)
    layers = range(28) if config.context_parallel_degree > 1 else ()
    assert plan.exchanging == tuple(f"model.model.layers.{number}.self_attn" for number in layers)
    tiled = () if config.tiled_mlp is None else tuple(f"model.model.layers.{number}.mlp" for number in range(28))
    assert plan.tiled == tiled
    if config.idle_experts is None:
        blocks = {path: count for path, count in blocks.items() if path not in EXPERTS}
    expected = {f"{path}.{number}" for path, count in blocks.items() for number in range(count)}
    assert {unit.name for unit in plan.units if unit.parameters} == {*expected, *ends, "model"}
    names = [spec.name for unit in plan.units for spec in unit.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert {unit.reshard_after_forward for unit in plan.units if not unit.is_root} <= {FILES[name][place].reshard}
    assert {unit.cpu_offload for unit in plan.units} == {FILES[name][place].offload}
    layers = {name for name in expected if ".experts." not in name}
    recomputed = layers or {f"model.model.layers.{number}" for number in range(48)}  # also in the only unit
    assert set(plan.checkpointed) == (recomputed if FILES[name][place].recomputed else set())
