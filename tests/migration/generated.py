"""Random configuration files of each dialect, with the surroundings found in users' files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

UNSET = "${oc.env:COMPOSER_FSDP2_NOBODY}"  # set in nearly no environment
# Values of a section, chosen independently of their outcomes; some combinations contradict each other, as users' do.
COMPOSER: Mapping[str, list[Any]] = {
    "sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"],
    "data_parallel_shard_degree": [-1, 2, 4],
    "data_parallel_replicate_degree": [None, 1, 2],
    "mixed_precision": ["PURE", "DEFAULT", "FULL", {"param_dtype": "bf16", "reduce_dtype": "fp32"}],
    "cpu_offload": [True, False],
    "backward_prefetch": ["BACKWARD_POST", "BACKWARD_PRE", "NONE"],
    "backward_prefetch_limit": [1, 2],
    "forward_prefetch": [True, False],
    "forward_prefetch_limit": [1, 3],
    "limit_all_gathers": [True, False],
    "use_orig_params": [True],
    "sync_module_states": [True, False],
    "keep_low_precision_grads": [False, True],
    "activation_checkpointing": [True, False],
    "activation_checkpointing_reentrant": [True, False],
    "activation_cpu_offload": [True, False],
    "te_checkpoint_wrapper": [False, True],
    "state_dict_type": ["full", "sharded"],
    "load_monolith_rank0_only": [True, False],
    "sharded_ckpt_prefix_dir": ["ep{epoch}", UNSET],
    "load_planner": [None, UNSET],
    "verbose": [True, False],
    "auto_wrap": [True, False],
    "min_params": ["1e8", 100],
    "flatten_parameters": [True],
    "load_fsdp_monolith_rank0_only": [True],
    "reshard_after_forward": [True, False, 2, 8],
    "gradient_sync": ["every", "last", "defer_replica"],
    "reshard_after_backward": [True, False],
    "collective_guard": [None, 30],
    "async_save": [True, False],
    "process_group": ["set2", "mod2", "node", ["set2", "mod2"], None],
    "wrap_policy": [
        {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "wrap_embeddings": True},
        {"transformer_layer_cls_to_wrap": "auto"},
        {"min_num_params": "1e8"},
        {"wrap_embeddings": True},
        None,
    ],
    "activation_checkpointing_policy": [["LlamaDecoderLayer", "B"], "auto", None],
    "freeze": [["model.visual"], "model.embed."],
    "idle_experts": ["in_order", None],
    "idle_towers": ["auto", ["model.visual"], None],
    "context_parallel_degree": [1, 2],
    "expert_parallel_degree": [1, 2],
    "check_data": [True, False, None],
    "broadcast_batch": [False, "first", "gather", None, "all"],
    "tiled_mlp": [None, {"classes": ["LlamaMLP"], "chunks": 4}],
    "sharding_stratgy": ["FULL_SHARD"],
    "made_up": [1, "text"],
}
ACCELERATE: Mapping[str, list[Any]] = {
    "fsdp_sharding_strategy": [
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "HYBRID_SHARD_ZERO2",
        1,
        2,
        3,
    ],
    "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "A,B"],
    "fsdp_min_num_params": [0, 1000000],
    "fsdp_backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
    "fsdp_forward_prefetch": [True, False],
    "fsdp_offload_params": [True, False],
    "fsdp_state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"],
    "fsdp_cpu_ram_efficient_loading": [True, False],
    "fsdp_sync_module_states": [True, False],
    "fsdp_use_orig_params": [True, False],
    "fsdp_activation_checkpointing": [True, False],
    "fsdp_version": [1, 2],
    "fsdp_reshard_after_forward": [True, False],
    "fsdp_made_up": [1],
}
TRAINER: Mapping[str, list[Any]] = {
    "transformer_layer_cls_to_wrap": [["LlamaDecoderLayer"]],
    "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "min_num_params": [0, 2000],
    "backward_prefetch": ["backward_pre", "backward_post"],
    "forward_prefetch": [True, False],
    "limit_all_gathers": [True],
    "use_orig_params": [True],
    "sync_module_states": [True, False],
    "cpu_ram_efficient_loading": [True, False],
    "activation_checkpointing": [True, False],
    "version": [1, 2],
    "xla": [False, True],
    "made_up": ["x"],
}
DEEPSPEED: Mapping[str, list[Any]] = {
    "zero_stage": [0, 1, 2, 3, "3", 4],
    "offload_optimizer_device": ["none", "cpu", "nvme", "disk"],
    "offload_param_device": ["none", "cpu"],
    "zero3_init_flag": [True, False],
    "zero3_save_16bit_model": [True, False],
    "gradient_accumulation_steps": [1, 4, "auto"],
    "gradient_clipping": [1.0, 0.5, 0, "auto", "none"],
    "deepspeed_multinode_launcher": ["standard"],
    "deepspeed_config_file": ["zero3.json"],
    "zero_stag": [3],
    "made_up": [1],
}
AXOLOTL: Mapping[str, list[Any]] = {
    **{
        name: values
        for name, values in ACCELERATE.items()
        if name not in ("fsdp_version", "fsdp_activation_checkpointing")
    },
    "activation_checkpointing": [True, False],
    "cpu_offload_pin_memory": [True, False],
    "final_state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
    "offload_params": [True],
    "made_up": [1],
}
AXOLOTL_AROUND: Mapping[str, list[Any]] = {
    "fsdp": [["full_shard", "auto_wrap"], ["shard_grad_op"], "full_shard", ["hybrid_shard"], None],
    "fsdp_version": [1, 2, None],
    "bf16": ["auto", True, "full", None],
    "fp8": [True, False],
    "tiled_mlp": [True, False],
    "tiled_mlp_num_shards": [2, None],
    "accelerator_config": [{"gradient_accumulation_kwargs": {"sync_each_batch": True}}, {}],
    "gradient_checkpointing": [True, False, "offload", None],
    "gradient_checkpointing_kwargs": [{"use_reentrant": True}],
    "activation_offloading": [True, False, "legacy"],
    "dp_shard_size": [2, None],
    "dp_replicate_size": [2, 1],
    "tensor_parallel_size": [1, 2],
    "context_parallel_size": [2, None],
    "expert_parallel_size": [2],
}
TRAINER_WORDS = [
    "full_shard",
    "full_shard auto_wrap",
    "shard_grad_op auto_wrap offload",
    "no_shard",
    "hybrid_shard auto_wrap",
    "hybrid_shard_zero2 auto_wrap",
    "not_a_word",
]
ROLL: Mapping[str, list[Any]] = {
    "fsdp_size": [1, 2, 4, 3],
    "param_dtype": ["bf16", "fp32", "fp16", "nope"],
    "reduce_dtype": ["fp32", "bf16"],
    "reshard_after_forward": [True, False, 2],
    "offload_policy": [True, False, "false"],
    "wrap_policy": [
        {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
        {"moe_experts": ["Qwen3MoeMLP"], "wrap_embeddings": True},
        {"transformer_layer_cls_to_wrap": "Qwen3DecoderLayer", "wrap_lm_output": True},
    ],
    "apply_expert_patch": [True, False],
    "apply_tiled_mlp": [True, False],
    "tiled_num_shards": [4],
    "async_save_ckpt": [True, False],
    "ep_size": [1, 2],
    "save_only_model": [True, False],
    "reduce_scatter_during_grad_accumulation": [True, False],
    "moe_use_grouped_mm": [True, False],
    "init_tokenizer_processor": [True, UNSET],
    "enable_mix_precision": [True, UNSET],
    "fsdp_sise": [4],
    "made_up": [None],
}
TORCHTITAN: Mapping[str, list[Any]] = {
    "parallelism.data_parallel_replicate_degree": [1, 2],
    "parallelism.data_parallel_shard_degree": [-1, 1, 4],
    "parallelism.fsdp_reshard_after_forward": ["default", "always", "never"],
    "parallelism.tensor_parallel_degree": [1, 2],
    "parallelism.context_parallel_degree": [1, 2],
    "parallelism.pipeline_parallel_degree": [1, 2],
    "parallelism.expert_parallel_degree": [1, 4],
    "parallelism.enable_async_tensor_parallel": [True, False],
    "parallelism.enable_fsdp_symm_mem": [True],
    "parallelism.made_up": [1],
    "training.mixed_precision_param": ["bfloat16", "float32"],
    "training.mixed_precision_reduce": ["float32"],
    "training.enable_cpu_offload": [True, False],
    "training.max_norm": [1.0, 0.5],
    "training.local_batch_size": [8],
    "activation_checkpoint.mode": ["none", "full", "selective", "memory_budget"],
    "activation_checkpoint.selective_ac_option": ["2", "op"],
    "checkpoint.enable": [True],
    "checkpoint.async_mode": ["async", "disabled"],
    "checkpoint.last_save_model_weights_only": [True, False],
    "compile.enable": [True, False],
    "model.name": ["llama3", "flux", "transformers_modeling_backend"],
    "model.converters": ["float8", "my_own"],
    "float8.enable_fsdp_float8_all_gather": [True, False],
}


@dataclass(frozen=True)
class File:
    """A file in three parts; only the middle one may change.

    Args:
        keys: The section's keys, as written in the file.
        comments: In the section.
    """

    before: str
    section: str
    after: str
    keys: tuple[str, ...]
    comments: tuple[str, ...]
    suffix: str = ".yaml"

    @property
    def text(self) -> str:
        return self.before + self.section + self.after


TENSOR = "tp_config: {tensor_parallel_degree: 2, strategy: ffn}\n"
CLIPPING = [
    f"algorithms: {{gradient_clipping: {{clipping_type: {kind}, clipping_threshold: {threshold}}}}}\n"
    for kind, threshold in (("norm", 0.5), ("value", 0.5), ("adaptive", 0.1), ("norm", -1), ("norm", "{a: null}"))
]
AROUND = [
    "# a comment\n",
    "\n",
    "name:   'quoted'   # twice spaced\n",
    'text: "a # is no comment"\n',
    "block: |\n  fsdp_config:\n    sharding_strategy: in a text\n\n  more\n",
    "folded: >-\n  one\n  two\n",
    "base: &base {lr: 1.0e-5, betas: [0.9, 0.95]}\n",
    "list:\n- a\n-   b: 1\n    c: [1,\n        2]\n",
    "empty:\n",
    "nothing: ~\n",
    "yes_or_no: yes\n",
    "number: 1e8\n",
    "umlaut: 'für'\n",
    "late: ${oc.env:NOBODY_SETS_THIS}\n",
    "windows: C:\\temp\n",
    "template: ${{ matrix.os }}\n",
    "unterminated: ${run\nopen: '${'\n",
    "day: 2024-01-02\n2024-01-03: key\n~: nothing\n",
    "? explicit\n: key\n? alone\n",
    "flow: {'a': 1, ? b : c, \"d\":2}\n",
    "tagged: !!str 1\n",
]
# The last one has no line end.
BEHIND = ["tail: 1\n", "# the end\n", "last: &z\n  p: 1\nagain: *z\n", "end: [1, 2] # x"]


def plain(value: Any) -> str:
    """A value as users write it; independent of our own code."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {plain(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(plain, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and "{" in value:
        return f'"{value}"'
    return "null" if value is None else str(value)


@st.composite
def written(draw: st.DrawFn, keys: Mapping[str, list[Any]], sane: bool) -> dict[str, Any]:
    names = [key for key in keys if not (sane and key in ("sharding_stratgy", "made_up", "fsdp_made_up"))]
    chosen = draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=8))
    return {key: draw(st.sampled_from(keys[key])) for key in chosen}


@st.composite
def block(draw: st.DrawFn, values: Mapping[str, Any], indent: str, comments: list[str]) -> str:
    """Entries on lines, with comments between and after them."""

    def comment() -> str:
        comments.append(f"# c{len(comments)}")
        return comments[-1]

    lines = ""
    for key, value in values.items():
        if draw(st.integers(0, 5)) == 0:
            lines += f"{indent}{comment()}\n"
        if draw(st.integers(0, 8)) == 0:
            lines += "\n"
        if isinstance(value, dict) and draw(st.booleans()):
            lines += f"{indent}{key}:\n" + draw(block(value, indent + "  ", comments))
            continue
        text = plain(value)
        if isinstance(value, str) and draw(st.booleans()):
            text = f"'{text}'"
        behind = f"  {comment()}" if draw(st.integers(0, 3)) == 0 else ""
        lines += f"{indent}{key}: {text}{behind}\n"
    return lines


@st.composite
def around(draw: st.DrawFn) -> tuple[str, str]:
    before = "".join(draw(st.lists(st.sampled_from(AROUND), unique=True, max_size=4)))
    after = "".join(sorted(draw(st.lists(st.sampled_from(BEHIND), unique=True, max_size=2)), key=BEHIND.index))
    return before, after


@st.composite
def composer_files(draw: st.DrawFn, sane: bool = False) -> File:
    values = draw(written(COMPOSER, sane))
    before, after = draw(around())
    if draw(st.booleans()):
        before += f"precision: {draw(st.sampled_from(['amp_bf16', 'amp_fp16', 'fp32', 'amp_fp8']))}\n"
    if draw(st.integers(0, 3)) == 0:
        before += TENSOR
    if draw(st.integers(0, 3)) == 0:
        before += draw(st.sampled_from(CLIPPING))
    comments: list[str] = []
    heads = draw(st.sampled_from([("fsdp_config",), ("trainer", "fsdp_config"), ("parallelism_config", "fsdp")]))
    indent = draw(st.sampled_from(["  ", "    "]))
    head = "".join(f"{indent * depth}{name}:\n" for depth, name in enumerate(heads))
    if draw(st.integers(0, 4)) == 0:
        flow = head[:-1] + " " + plain(values) + "\n"
        return File(before, flow, after, tuple(values), ())
    return File(
        before, head + draw(block(values, indent * len(heads), comments)), after, tuple(values), tuple(comments)
    )


@st.composite
def merging_files(draw: st.DrawFn) -> File:
    """A section that takes some or all keys from an anchor elsewhere."""
    values = draw(written(COMPOSER, False))
    before, after = draw(around())
    inherited = {key: value for key, value in values.items() if draw(st.booleans())} or values
    own = {key: value for key, value in values.items() if key not in inherited}
    comments: list[str] = []
    before += "shared: &shared\n" + draw(block(inherited, "  ", [])) + "other:\n  <<: *shared\n"
    if own:
        over = draw(st.sampled_from(sorted(inherited)))  # set in both; the section's own value takes precedence
        own[over] = inherited[over]
        section = "fsdp_config:\n  <<: *shared  # all of it\n" + draw(block(own, "  ", comments))
        return File(before, section, after, tuple(values), tuple(comments))
    return File(before, "fsdp_config: *shared\n", after, tuple(values), ())


def with_windows_lines(file: File) -> File:
    return with_lines(file, "\r\n")


def with_lines(file: File, end: str) -> File:
    parts = [part.replace("\n", end) for part in (file.before, file.section, file.after)]
    return File(*parts, file.keys, file.comments, file.suffix)


def mac_files() -> st.SearchStrategy[File]:
    return st.one_of(composer_files(), accelerate_files()).map(lambda file: with_lines(file, "\r"))


@st.composite
def explicit_files(draw: st.DrawFn) -> File:
    """A section with explicit keys (question marks), as some tools write long ones."""
    values = draw(written(COMPOSER, False))
    before, after = draw(around())
    comments, section = [], "fsdp_config:\n"
    for number, (key, value) in enumerate(values.items()):
        behind = ""
        if draw(st.booleans()):
            comments.append(f"# c{number}")
            behind = f" {comments[-1]}"
        mark = "? " if draw(st.booleans()) else ""
        section += f"  {mark}{key}{chr(10) + '  ' if mark else ''}: {plain(value)}{behind}\n"
    return File(before, section, after, tuple(values), tuple(comments))


@st.composite
def json_files(draw: st.DrawFn) -> File:
    """A section in JSON, formatted as by one of the tools that write it; also in a file with a YAML suffix."""
    values = draw(written(COMPOSER, False))
    keys = draw(st.permutations(["a", "é", "fsdp_config", "last"]))
    others = {"a": [1, {"b": None}], "é": "${{ x }}", "last": 1e-5, "fsdp_config": values}
    indent = draw(st.sampled_from([None, 2, 4, "\t"]))
    tight = (",", ":") if indent is None and draw(st.booleans()) else None
    text = json.dumps({key: others[key] for key in keys}, indent=indent, separators=tight, ensure_ascii=False)
    start = text.index('"fsdp_config"')
    end = json.JSONDecoder().raw_decode(text, text.index("{", start))[1]
    suffix = draw(st.sampled_from([".json", ".yaml"]))
    return File(text[:start], text[start:end], text[end:], tuple(values), (), suffix)


@st.composite
def accelerate_files(draw: st.DrawFn) -> File:
    values = draw(written(ACCELERATE, False))
    comments: list[str] = []
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n"
    text += f"mixed_precision: {draw(st.sampled_from(['bf16', 'no', 'fp16']))}  # here\nnum_processes: 8\n"
    text += "fsdp_config:\n" + draw(block(values, "  ", comments))
    if draw(st.integers(0, 3)) == 0:
        shards, replicas = draw(st.sampled_from([(8, 1), (4, 2), (2, 2), (3, 2)]))  # for 8 ranks or other numbers
        prefix = draw(st.sampled_from(["parallelism_config_", "parallelism_config_", ""]))  # the last is ignored
        text += f"parallelism_config: {{{prefix}dp_shard_size: {shards}, {prefix}dp_replicate_size: {replicas}}}\n"
    return File("", text, "", tuple(f"fsdp_config.{key}" for key in values), ("# here", *comments))


@st.composite
def deepspeed_files(draw: st.DrawFn) -> File:
    values = draw(written(DEEPSPEED, False))
    comments: list[str] = []
    text = f"distributed_type: DEEPSPEED\nmixed_precision: {draw(st.sampled_from(['bf16', 'no']))}\nnum_processes: 8\n"
    text += "deepspeed_config:\n" + draw(block(values, "  ", comments))
    return File("", text, "", tuple(f"deepspeed_config.{key}" for key in values), tuple(comments))


@st.composite
def axolotl_files(draw: st.DrawFn) -> File:
    settings = draw(written(AXOLOTL, False))
    beside = draw(written(AXOLOTL_AROUND, False))
    before, after = draw(around())
    comments: list[str] = []
    before += draw(st.sampled_from(["", "adapter: qlora\nload_in_4bit: true\n"]))
    before += "base_model: some/model\ndatasets:\n  - path: some/data\n    type: alpaca\nmicro_batch_size: 1\n"
    section = "".join(f"{key}: {plain(value)}\n" for key, value in beside.items())
    section += "fsdp_config:\n" + draw(block(settings, "  ", comments))
    keys = (*(f"fsdp_config.{key}" for key in settings), *beside)
    return File(before, section, after, keys, tuple(comments))


@st.composite
def trainer_files(draw: st.DrawFn) -> File:
    values = draw(written(TRAINER, False))
    before, after = draw(around())
    comments: list[str] = []
    indent = draw(st.sampled_from(["", "  "]))
    head = "training:\n" if indent else ""
    words = draw(st.sampled_from(TRAINER_WORDS))
    section = f"{head}{indent}bf16: true\n{indent}fsdp: {words}\n{indent}fsdp_config:\n"
    section += draw(block(values, indent + "  ", comments))
    return File(before, section, after, tuple(f"fsdp_config.{key}" for key in values), tuple(comments))


@st.composite
def roll_files(draw: st.DrawFn) -> File:
    values = draw(written(ROLL, False))
    before, after = draw(around())
    comments: list[str] = []
    name = draw(st.sampled_from(["fsdp2_train", "fsdp2_infer"]))
    model_args = draw(st.sampled_from(["flash_attn: fa2", "ulysses_size: 2", "freeze_module_prefix: model.visual."]))
    before += f"actor_train:\n  model_args: {{{model_args}}}\n  device_mapping: list(range(0, 8))\n"
    section = f"  strategy_args:\n    strategy_name: {name}\n    strategy_config:\n"
    section += draw(block(values, "      ", comments))
    keys = tuple(values)
    nested = values.get("wrap_policy")
    if isinstance(nested, dict):
        keys = (*(key for key in keys if key != "wrap_policy"), *(f"wrap_policy.{key}" for key in nested))
    return File(before, section, after, keys, tuple(comments))


@st.composite
def torchtitan_files(draw: st.DrawFn) -> File:
    values = draw(written(TORCHTITAN, False))
    values["training.local_batch_size"] = 8
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        text = f'"{value}"' if isinstance(value, str) else plain(value)
        tables.setdefault(table, []).append(f"{name} = {text}  # {name}\n")
    text = "# a run\n[job]\ndump_folder = 'out'\n\n"
    text += "\n".join(f"[{table}]\n{''.join(lines)}" for table, lines in tables.items())
    # Keys that only identify the system and the model are not reported.
    keys = tuple(key for key in values if key not in ("training.local_batch_size", "model.name"))
    return File("", text, "", keys, (), suffix=".toml")


EVERY = {
    "composer": composer_files(),
    "merging": merging_files(),
    "mac": mac_files(),
    "explicit": explicit_files(),
    "json": json_files(),
    "windows": st.one_of(composer_files(), trainer_files(), roll_files()).map(with_windows_lines),
    "accelerate": accelerate_files(),
    "deepspeed": deepspeed_files(),
    "axolotl": axolotl_files(),
    "trainer": trainer_files(),
    "roll": roll_files(),
    "torchtitan": torchtitan_files(),
}
ANY_FILE = st.sampled_from(sorted(EVERY)).flatmap(EVERY.__getitem__)
