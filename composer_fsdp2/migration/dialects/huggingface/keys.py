"""Table of the keys of Hugging Face, accelerate and axolotl."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.rows import ANY
from composer_fsdp2.config.sharding import ActivationCheckpointing, GradientSync, MixedPrecision
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialects.huggingface.values import (
    A1,
    A2,
    AD,
    AXOLOTL,
    BESIDE,
    BF16,
    BOOL,
    CLASSES,
    COUNT,
    DEEPSPEED,
    DEGREE,
    DEGREES,
    DEGREES_PREFIX,
    DEVICE,
    DTYPES,
    FLAG,
    FSDP2,
    FSDP_OPTIONS,
    LAUNCHERS,
    NAMES,
    NORM,
    OFFLOADING,
    PIECES,
    POLICY,
    PRECISION,
    PRECISIONS,
    PREFETCH,
    RECOMPUTING,
    RESHARD,
    SETTINGS,
    STAGE,
    STATE_DICT,
    STATE_DICTS,
    STEPS,
    STRATEGY,
    SWITCHES,
    SYNCS,
    T1,
    T2,
    TRAINERS,
    TRANSFORMERS,
    TRUTH,
    VERSION,
    X1,
    X2,
    Reader,
    everywhere,
    means_false,
)
from composer_fsdp2.migration.lens import Lens, as_is, case, cases
from composer_fsdp2.migration.run import Wrap, WrapKind
from composer_fsdp2.migration.training import DEFAULTS, OF_TRAINERS, count, number_of, optimizer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Key(Lens):
    """A key of Hugging Face's files, which several readers (programs and releases) read differently.

    Args:
        defaults: Reader -> default value.
        read_by: The readers for which the key has an effect; by default those of FSDP.
        checked_by: Readers that validate the value and do not use it.
        instead: Reader that ignores the key -> the key that has the same effect there.
        release: The first release of accelerate that reads the key, if it is later than 1.8.1.
    """

    group: str = SETTINGS
    defaults: Mapping[Any, Any] = field(default_factory=dict)
    read_by: Collection[Reader] = (*TRAINERS, A1, A2)
    checked_by: Collection[Any] = ()
    instead: Mapping[Any, str] = field(default_factory=dict)
    release: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenKey:
    """A key that the file sets: its path within the section, its value, and whether the system reads it at that
    place."""

    key: str
    value: Any
    row: Key | None
    is_read: bool = True

    @property
    def is_off(self) -> bool:
        """Whether the value switches the feature off, in quotes or not."""
        return self.row is not None and self.row.takes in SWITCHES and means_false(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveConfig:
    """The effective values of a section, explicit or default, and the errors that prevent the run from starting.

    Args:
        settings: Name in the table -> effective value.
        parsed: Key -> parsed value, also of keys that are not read.
        errors: Key -> why its value is invalid, and which values are valid; also of keys that are not read.
        problems: Key -> why the run does not start.
    """

    reader: Reader
    given: tuple[GivenKey, ...]
    around: Mapping[str, Any]
    settings: dict[str, Any]
    parsed: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def keys_of(self, *names: str) -> list[str]:
        """Return the keys in the file that set one of these names of the table, and that the system reads."""
        return [each.key for each in self.given if each.row is not None and each.is_read and each.row.name in names]

    def key_of(self, *names: str) -> str | None:
        """Return the last key in the file that sets one of these names of the table; None without one."""
        return next(reversed(self.keys_of(*names)), None)

    def value_of(self, key: str) -> Any:
        return next(each.value for each in self.given if each.key == key)

    @property
    def is_on_one_node(self) -> bool:
        """Whether ``num_machines`` of an accelerate file is 1, its default."""
        return self.reader not in TRAINERS and self.around.get("num_machines", 1) in (None, 1, "1")

    def count(self, key: str) -> int | None:
        """Return the integer at a key outside the section, or None. accelerate also accepts it in quotes.

        Raises:
            ConfigError: the value is not a number.
        """
        value = self.around.get(key)
        if value is not None and not str(value).isdecimal():
            raise ConfigError(f"{key}: {value!r}; it takes a number")
        return None if value is None else int(value)


# ---------------------------------------------------------------------------------------------------------------------
# Fields that several keys set


def wrap_of(config: EffectiveConfig) -> Wrap:
    policy, size = config["auto_wrap_policy"], config["min_num_params"]
    if policy == "TRANSFORMER_BASED_WRAP":
        return Wrap(kind=WrapKind.CLASSES, classes=tuple(dict.fromkeys(config["transformer_layer_cls_to_wrap"])))
    if policy == "SIZE_BASED_WRAP" and size > 0:
        return Wrap(kind=WrapKind.SIZE, min_num_params=size)
    return Wrap(kind=WrapKind.ROOT)  # a size of 0 is ignored, too


_POLICY_OF = {WrapKind.ROOT: "NO_WRAP", WrapKind.SIZE: "SIZE_BASED_WRAP"}


def _mixed_precision(name: str, config: EffectiveConfig) -> MixedPrecision:
    """Return the mixed precision policy for a precision, such as bf16.

    FSDP1 casts buffers, and the inputs of the root. accelerate's FSDP2 casts the inputs and outputs of each unit.
    """
    dtype = DTYPES[name]
    if dtype is None:
        return MixedPrecision()
    if config.reader in FSDP2:
        return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype, cast_forward_inputs=True)
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)


def _max_grad_norm(value: Any, config: EffectiveConfig) -> Any:
    """Return the clipping norm. A Trainer clips to 1 by default, and does not clip if the norm is 0."""
    norm = config.around.get("max_grad_norm", 1.0) if config.reader in TRAINERS else value
    is_off = config.reader in TRAINERS and isinstance(norm, int | float) and norm <= 0
    return None if is_off else norm


def _checkpointing(by_model: Any, config: EffectiveConfig) -> ActivationCheckpointing:
    by_accelerate = config["activation_checkpointing"]
    offloads = bool(config["activation_offloading"] or by_model in ("offload", "offload_disk"))
    if not (by_model or by_accelerate or offloads):
        return ActivationCheckpointing()
    kwargs = config["gradient_checkpointing_kwargs"]
    reentrant = {"use_reentrant": config.reader not in AXOLOTL, **(kwargs if isinstance(kwargs, Mapping) else {})}
    return ActivationCheckpointing(
        checkpoint=True,
        classes=wrap_of(config).classes if by_accelerate else (),
        reentrant=bool(reentrant["use_reentrant"]) and not (by_accelerate or offloads),
        cpu_offload=offloads,
    )


def _duration(steps: Any, config: EffectiveConfig) -> str | None:
    """Return the duration; steps take precedence over epochs."""
    epochs = number_of(config["num_train_epochs"])
    return f"{count(steps)}ba" if count(steps) else None if epochs is None else f"{epochs:g}ep"


def _rows(rows: Any, config: EffectiveConfig) -> int | None:
    """Return the rows of a microbatch; None if accelerate divides one batch among all ranks."""
    older = config.around.get("per_gpu_train_batch_size") if config.reader in TRANSFORMERS else None
    return None if _accelerator_config(config).get("split_batches") else count(older or rows)


def _microbatches(rows: Any, config: EffectiveConfig) -> int | None:
    """Return the microbatches per step. axolotl computes them from the batch of a rank (utils/config, 0.12.2)."""
    around, rows = config.around, _rows(rows, config)
    steps = around.get("gradient_accumulation_steps")
    if config.reader not in TRAINERS:
        return None
    if steps is None and config.reader in AXOLOTL and (batch := count(around.get("batch_size"))):
        return None if rows is None else batch // rows
    kwargs = _accelerator_config(config).get("gradient_accumulation_kwargs")
    steps = (kwargs.get("num_steps") if isinstance(kwargs, Mapping) else None) or steps
    return count(rows and 1 if "gradient_accumulation_steps" not in around and steps is None else steps)


def _accelerator_config(config: EffectiveConfig) -> Mapping[str, Any]:
    given = config.around.get("accelerator_config")
    return given if isinstance(given, Mapping) and config.reader in TRANSFORMERS else {}


# Settings beside the optimizer with which it is not AdamW with one learning rate.
_OF_OPTIMIZER = ("adafactor", "embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio", "lr_groups")


def _optimizer(name: str | None, config: EffectiveConfig) -> str | None:
    others = [key for key in _OF_OPTIMIZER if config.around.get(key)]
    return f"{name or DEFAULTS['name']} with {', '.join(others)}" if others else name


def syncs(in_each: bool, config: EffectiveConfig) -> GradientSync:
    """Return in which microbatches gradients are reduced.

    A Trainer reduces in the last microbatch (``no_sync``). With accelerate alone the script decides. Under ZeRO, stages
    with sharded gradients reduce in each microbatch.
    """
    if config.reader is AD:
        defers = config["gradient_accumulation_steps"] > 1 and config["zero_stage"] < 2
    else:
        steps = config.around.get("gradient_accumulation_steps")
        defers = config.reader in TRAINERS and isinstance(steps, int) and steps > 1 and not in_each
    return GradientSync.LAST if defers else GradientSync.EVERY


def mesh_of(shard: int, config: EffectiveConfig) -> MeshSpec:
    """Return the mesh: all ranks shard, unless the file sets degrees, or the strategy is hybrid (sharded within a
    node).

    Raises:
        ConfigError: the sizes are invalid, or a hybrid strategy's number of ranks per node is unknown.
    """
    strategy, replicate = config["sharding_strategy"], config["dp_replicate_size"]
    if strategy is ShardingStrategy.NO_SHARD:
        return MeshSpec().without_shards()
    is_given = config.key_of("dp_replicate_size", "dp_shard_size") is not None
    is_rest = config.reader in AXOLOTL and shard == 1  # axolotl does not pass on 1: the remaining ranks shard
    if is_rest and replicate > 1:
        return MeshSpec.of_degrees(-1, replicate)
    if is_given and not is_rest:
        shard *= config["cp_size"] * config["sp_size"]  # the ranks of a sequence also shard parameters
        if shard == 1:
            raise ConfigError("dp_shard_size is 1, which is no sharding; set the number of ranks of one replica")
        ranks, total = config.count("num_processes"), replicate * shard * config["tp_size"]
        if config.reader in (A1, A2) and ranks not in (None, total):
            raise ConfigError(f"the sizes of parallelism_config make {total} ranks, and num_processes is {ranks}")
        # axolotl fills the remaining ranks with replicas (utils/distributed.py, 0.12.2).
        is_open = config.reader in AXOLOTL and config.key_of("dp_replicate_size") is None
        return MeshSpec.of_degrees(shard, -1 if is_open else replicate if replicate > 1 else None)
    if strategy is None or not strategy.is_hybrid or config.is_on_one_node:
        return MeshSpec()
    processes, machines = config.count("num_processes"), config.count("num_machines")
    if config.reader in TRAINERS or processes is None or machines is None:
        sizes = "{0}dp_shard_size: GPUs of a node, {0}dp_replicate_size: number of nodes"
        keys = sizes.format("") if config.reader in AXOLOTL else f"{DEGREES}: {{{sizes.format(DEGREES_PREFIX)}}}"
        raise ConfigError(
            "FSDP1 sharded within each node, and replicated over nodes, by the number of GPUs that it found; set it, "
            f"as {keys}"
        )
    if machines < 1 or processes % machines:
        raise ConfigError(f"num_processes {processes} is not a multiple of num_machines {machines}")
    return MeshSpec.of_degrees(processes // machines, -1)


# ---------------------------------------------------------------------------------------------------------------------
# Findings by value

_APPROXIMATE, _UNNEEDED, _NEEDS_DECISION = Outcome.APPROXIMATE, Outcome.UNNEEDED, Outcome.NEEDS_DECISION
_OFF: dict[str, Any] = {"target": "", "reason": "off, as by default", "asks": False}


def off(finding: Finding) -> Finding:
    outcome = Outcome.UNNEEDED if finding.outcome is Outcome.UNSUPPORTED else finding.outcome
    return replace(finding, outcome=outcome, **_OFF)


def _switch(name: str) -> Callable[[Finding, EffectiveConfig], Finding]:
    """Return a ``decide`` function for a key that has an effect only if the setting ``name`` is on."""
    return cases(case(lambda value, config: not config[name], **_OFF))


def _is_2d(config: EffectiveConfig) -> bool:
    return config["sharding_strategy"].is_hybrid and not config.is_on_one_node


def _where(config: EffectiveConfig) -> str:
    """Return over which ranks a hybrid strategy shards, to append to its reason; "" for other strategies."""
    if _is_2d(config):
        return "; sharded within a node, replicated over nodes"
    is_hybrid = config["sharding_strategy"].is_hybrid
    return "; on one machine all ranks are one node, without replicas" if is_hybrid else ""


_OF_STRATEGY = (
    case(
        lambda value, config: config["sharding_strategy"] is ShardingStrategy.NO_SHARD,
        target="2-D mesh with one rank on its shard axis",
        reason="every rank keeps full parameters, gradients are averaged by one all-reduce",
        hint="accelerate's FSDP2 has no form for it: there DDP (distributed_type: MULTI_GPU) is the same run",
    ),
    case(
        lambda value, config: config["sharding_strategy"] is not None,
        target=lambda config: (
            f"reshard_after_forward={config['sharding_strategy'].reshards_after_forward} on "
            f"{'a 2-D mesh' if _is_2d(config) else 'one mesh of all ranks'}"
        ),
        reason=lambda config: (
            f"parameters are {'freed' if config['sharding_strategy'].reshards_after_forward else 'kept'} after forward"
            f"{_where(config)}"
        ),
    ),
)
# False in quotes, which a reader that treats any text as true takes for true.
_IN_QUOTES = case(
    lambda value, config: config.reader in TRANSFORMERS and isinstance(value, str) and means_false(value),
    _NEEDS_DECISION,
    reason="transformers treats any text as true, so this was on",
    hint="as trained: true; as written: false, without quotes",
)
_DEGREE_OF_1 = cases(case(lambda value, config: value == 1, _UNNEEDED, reason="1 has no effect"))
VERSION_REASON = "transformers 5 reads it; 4.51.3 does not, and trains with FSDP1"
VERSION_HINT = "under 4.51.3 launch with an accelerate configuration file with fsdp_version: 2"
_ONE_MORE_UNIT = "one more unit is in memory at the peak; NO_PREFETCH spares it"
_LOADING = "under accelerate's FSDP2 cpu_ram_efficient_loading: true does it, and nothing else"
SIZE_REASON = (
    "accelerate's SIZE_BASED_WRAP under FSDP2 chooses module lists as well, for which fully_shard raises, and counts "
    "parameters of inner units"
)
SIZE_HINT = "TRANSFORMER_BASED_WRAP, with the classes of the layers"


def _wrap_policy_cases(policy: str) -> Callable[[Finding, EffectiveConfig], Finding]:
    """Return a ``decide`` function for a key that only the auto-wrap policy ``policy`` uses."""
    wrap_keys = {
        **dict.fromkeys((T1, T2), "auto_wrap in fsdp"),
        **dict.fromkeys((X1, X2), f"auto_wrap_policy: {policy}"),
    }
    return cases(
        case(lambda value, config: config["auto_wrap_policy"] == policy),
        case(lambda value, config: value == 0, _UNNEEDED, reason="0 has no effect"),
        case(
            lambda value, config: config.key_of("auto_wrap_policy") is not None,
            _UNNEEDED,
            reason=lambda config: f"not read under {config['auto_wrap_policy']}",
        ),
        case(
            lambda value, config: config.reader is T1 and "fsdp" not in config.around,
            _NEEDS_DECISION,
            reason="only auto_wrap in fsdp uses it, and whether that was set is not known here",
            hint="with auto_wrap: write fsdp here; without it the whole model was one unit: remove this key",
        ),
        case(
            lambda value, config: True,
            _NEEDS_DECISION,
            reason="no wrapping was set: the whole model was one unit, all of it gathered at once",
            hint=lambda config: (
                "as trained: remove it; as written: " + wrap_keys.get(config.reader, f"fsdp_auto_wrap_policy: {policy}")
            ),
        ),
    )


# FSDP is ZeRO 3 by units; stages 1 and 2 keep parameters unsharded for longer than SHARD_GRAD_OP does. By stage: target
# and reason.
_KEPT_PARAMETERS = "SHARD_GRAD_OP: reshard_after_forward=False on one mesh of all ranks"
_STAGES = {
    0: ("2-D mesh with one rank on its shard axis", "stage 0 shards nothing: every rank keeps full parameters"),
    1: (
        _KEPT_PARAMETERS,
        "stage 1 shards the optimizer's state only; SHARD_GRAD_OP shards gradients too, and parameters between steps: "
        "the same numbers, less memory",
    ),
    2: (
        _KEPT_PARAMETERS,
        "parameters stay gathered from forward to backward; between steps they are sharded, which stage 2 does not "
        "do: the same numbers, less memory",
    ),
}


def _device(which: str) -> Callable[[Finding, EffectiveConfig], Finding]:
    name = f"offload_{which}_device"
    return cases(
        case(lambda value, config: config[name] == "none", **_OFF),
        case(
            lambda value, config: which == "param" and config["zero_stage"] != 3,
            _UNNEEDED,
            reason="DeepSpeed offloads parameters under stage 3 only",
        ),
        case(
            lambda value, config: config[name] == "nvme",
            _NEEDS_DECISION,
            reason="FSDP2 keeps nothing on a disk",
            hint="cpu, which needs the host memory; or none",
        ),
        case(
            lambda value, config: config["offload_optimizer_device"] == config["offload_param_device"] == "cpu",
            Outcome.EXACT,
            reason="all of it rests in host memory, under FSDP2 as well",
        ),
    )


_ROWS_OF_ONE = re.compile(r"\[\d*:?\d*\]$")  # at a pattern's end: the rows of the parameter that are trained
_UNPREFIXED = "the same key without the prefix"
_KEPT = "accelerate reads it for FSDP2 as for FSDP1"


def _instead(trainer: str, launcher: str = "") -> dict[Reader, str]:
    """Return the value of ``Key.instead``.

    Args:
        trainer: The equivalent in a Trainer's arguments for transformers 4.51.3.
        launcher: The equivalent in an accelerate file.
    """
    equivalents = {T1: trainer, X1: trainer, A1: launcher, A2: launcher}
    return {reader: equivalent for reader, equivalent in equivalents.items() if equivalent}


_LAUNCHER = "belongs to DeepSpeed's launcher; torchrun and composer have their own options for the nodes"
# fmt: off
ROWS: tuple[Key, ...] = (
    Key(name="fsdp", takes=FSDP_OPTIONS, group=BESIDE, outcome=Outcome.EXACT,
        target="reshard_after_forward, the mesh, cpu_offload, the wrapped modules", read_by=TRAINERS,
        fields=("reshard_after_forward", "mesh", "cpu_offload", "wrap"),
        decide=cases(
            case(lambda value, config: config["fsdp"].ignored, _NEEDS_DECISION,
                reason=lambda config: "transformers ignores list entries that are not options: "
                + ", ".join(config["fsdp"].ignored), hint=f"keep of {FSDP_OPTIONS.text} those that you mean"),
            *_OF_STRATEGY,
            case(lambda value, config: config.reader is not X2 and value is not True and not config["fsdp"].auto_wrap
                and not config.key_of("auto_wrap_policy"), _APPROXIMATE,
                reason="without auto_wrap early releases of transformers 5 wrap nothing, later ones each layer",
                hint="set auto_wrap_policy in fsdp_config")),
        meaning="turns FSDP on: the strategy, offload, auto_wrap",
        reason="each option has an equivalent in FSDP2"),
    Key(name="distributed_type", takes=ANY, group=BESIDE, outcome=Outcome.EXACT, read_by=LAUNCHERS,
        meaning="FSDP makes accelerate launch read fsdp_config, DEEPSPEED deepspeed_config",
        decide=cases(case(lambda value, config: config.reader is AD,
        reason="turns DeepSpeed on, whose place FSDP2 takes")),
        reason="enables FSDP; in accelerate's files fsdp_version selects FSDP2"),
    Key(name="mixed_precision", takes=PRECISION, group=BESIDE, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype alike", defaults=everywhere("no"), read_by=LAUNCHERS,

        read={"precision": lambda value, config: PRECISIONS[value], "mixed_precision": _mixed_precision,
            # Trained parameters are upcast by accelerate and DeepSpeed, and as axolotl loads them under its FSDP2.
            "stored_dtype": lambda value, config:
                DTYPES[value] if value == "no" or config.reader is X2 else "float32"},
        decide=cases(
            case(lambda value, config: config["mixed_precision"] == "no", target="", reason="no mixed precision"),
            case(lambda value, config: config["mixed_precision"] == "fp8", _APPROXIMATE,
                hint="check that the fp8 library in use takes FSDP2",
                reason="FSDP takes bfloat16; the matrix products in fp8 are another library's")),
        meaning="autocast, and parameters, gradients and buffers of FSDP in this dtype",
        reason="gradients are reduced in the low dtype, too: accelerate uses one dtype for the whole policy"),
    Key(name="bf16", takes=BF16, group=BESIDE, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype bfloat16", defaults=everywhere(False),
        read_by=TRAINERS, fields=("precision", "mixed_precision"),
        decide=cases(
            case(lambda value, config: value == "auto",
                hint="auto is true on every GPU that has bfloat16, and fp16 elsewhere"),
            case(lambda value, config: value == "full", _APPROXIMATE,
                target="mixed_precision: FULL, and parameters in bfloat16",
                reason="no autocast, and no dtype of FSDP's: parameters, gradients and the optimizer are bfloat16",
                hint="create the model in bfloat16, which no fsdp_config key does")),
        meaning="autocast, and parameters, gradients and buffers of FSDP in bfloat16",
        reason="gradients are reduced in bfloat16, too: accelerate uses one dtype for the whole policy"),
    Key(name="fp16", fields=("precision", "mixed_precision"), takes=FLAG, group=BESIDE, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype float16", defaults=everywhere(False),
        meaning="autocast with loss scaling, and parameters, gradients and buffers of FSDP in float16",
        reason="gradients are reduced in float16, too: accelerate uses one dtype for the whole policy"),
    Key(name="fp8", takes=FLAG, group=BESIDE, outcome=Outcome.APPROXIMATE,
        target="precision: amp_fp8; mixed_precision: bfloat16", defaults=everywhere(False), read_by=AXOLOTL,
        fields=("precision",),
        decide=_switch("fp8"), meaning="matrix products in fp8, by torchao",
        reason="FSDP takes bfloat16; the matrix products in fp8 are another library's",
        hint="check that the fp8 library in use takes FSDP2"),
    Key(name="tiled_mlp", takes=FLAG, group=BESIDE, outcome=Outcome.APPROXIMATE,
        target="tiled_mlp", defaults=everywhere(False), read_by=AXOLOTL,
        read={"tiled_chunks": lambda value, config: config["tiled_mlp_num_shards"] if value else None},
        decide=_switch("tiled_mlp"), meaning="MLPs are computed in pieces of the sequence",
        reason="the same MLPs in pieces, each computed once more in backward"),
    Key(name="tiled_mlp_num_shards", takes=PIECES, group=BESIDE, outcome=Outcome.APPROXIMATE, target="tiled_mlp",
        defaults=everywhere(4), read_by=AXOLOTL, fields=("tiled_mlp",), decide=_switch("tiled_mlp"),
        meaning="number of chunks; by default axolotl derives it from the sequence length",
        reason="a detail of tiled_mlp"),
    Key(name="accelerator_config", takes=SYNCS, group=BESIDE, outcome=Outcome.EXACT, target="gradient_sync",
        defaults=everywhere(False), read_by=TRAINERS, read={"accumulation.gradient_sync": syncs},
        decide=cases(case(lambda value, config: not config["accelerator_config"], _UNNEEDED,
        reason="nothing in it is about sharding")),
        meaning="of accelerate's other settings, whether each microbatch reduces gradients "
        "(gradient_accumulation_kwargs: {sync_each_batch: true})",
        reason="each microbatch reduces its gradients, there as here"),
    Key(name="unfrozen_parameters", takes=NAMES, group=BESIDE, outcome=Outcome.EXACT, target="train_only",
        defaults=everywhere(()), read_by=AXOLOTL,
        read={"train_only": lambda value, config: tuple(
            re.sub(r"\.(?!\+)", r"\.", _ROWS_OF_ONE.sub("", each)) for each in value)},
        decide=cases(
            case(lambda value, config: not config["unfrozen_parameters"], **_OFF),
            case(lambda value, config: bool(config.around.get("adapter")), _NEEDS_DECISION,
                reason="axolotl trains the parameters that match beside those of the adapter, which freezes all others",
                hint="create the adapter in the model's code with modules_to_save, and leave train_only out"),
            case(lambda value, config: any(map(_ROWS_OF_ONE.search, config["unfrozen_parameters"])), _NEEDS_DECISION,
                reason="axolotl trains only some rows of a parameter by a range in brackets, for which FSDP2 has no "
                "counterpart", hint="train the whole parameter: remove the range")),
        meaning="patterns of the names of the parameters that are trained; all others are frozen",
        reason="the same parameters, the others frozen before the model is sharded; a pattern that matches no name is "
        "an error"),
    Key(name="activation_offloading", takes=OFFLOADING, group=BESIDE, outcome=Outcome.APPROXIMATE,
        target="activation_checkpointing, and activation_cpu_offload", defaults=everywhere(False), read_by=AXOLOTL,
        fields=("activation_checkpointing",), decide=_switch("activation_offloading"),
        meaning="layers are recomputed, from inputs that rest in host memory",
        reason="the same layers, inside their units; legacy and disk differ in how the inputs are moved"),
    Key(name="gradient_checkpointing", takes=RECOMPUTING, group=BESIDE, outcome=Outcome.APPROXIMATE,
        target="activation_checkpointing", defaults=everywhere(False), read_by=TRAINERS,
        read={"activation_checkpointing": _checkpointing}, decide=cases(
        case(lambda value, config: config["gradient_checkpointing"] in ("offload", "offload_disk"),
            target="activation_checkpointing, and activation_cpu_offload",
            reason="the layers are recomputed from inputs that rest in host memory, inside their units"),
        case(lambda value, config: config.reader is T2 and config["gradient_checkpointing"], Outcome.EXACT,
            reason="the model does it, under FSDP2 as before"),
        case(lambda value, config: not config["gradient_checkpointing"], Outcome.EXACT, **_OFF)),
        meaning="the model recomputes its layers in backward, from outside of their units",
        reason="the same layers are recomputed, but inside their units, which saves a second all-gather"),
    Key(name="gradient_checkpointing_kwargs", fields=("activation_checkpointing.reentrant",), takes=ANY, group=BESIDE,
        outcome=Outcome.EXACT, target="activation_checkpointing: reentrant or not", read_by=TRAINERS,
        meaning="which of torch's implementations recomputes (use_reentrant, true by default; false in axolotl)",
        reason="both implementations run inside a fully_shard unit"),
    Key(name="version", write=lambda run: 2, takes=VERSION, outcome=Outcome.EXACT,
        defaults={T1: 1, A1: 1, X1: 1, T2: 2, A2: 2, X2: 2}, read_by=(A1, A2, T2, X1, X2), decide=cases(
        case(lambda value, config: config.reader is T2, _APPROXIMATE, reason=VERSION_REASON, hint=VERSION_HINT)),
        meaning="which FSDP: 1, or 2", reason="which FSDP the file is for; accelerate's key is fsdp_version: 2"),
    Key(name="sharding_strategy", takes=STRATEGY, outcome=Outcome.EXACT,
        target="reshard_after_forward and the mesh",
        defaults=dict.fromkeys((T1, A1, X1), ShardingStrategy.FULL_SHARD), read_by=(A1,),
        instead=_instead(trainer="the first option in fsdp", launcher="fsdp_reshard_after_forward, and "
        "parallelism_config for replicas"), fields=("reshard_after_forward", "mesh"),
        decide=cases(*_OF_STRATEGY),
        meaning="which state is sharded, and when parameters are freed"),
    Key(name="reshard_after_forward",
        read={"reshard_after_forward": lambda value, config: value or config.reader is X2},
        decide=cases(case(
            lambda value, config: config.reader is X2 and not config["reshard_after_forward"], _APPROXIMATE,
            target="reshard_after_forward: true", reason="axolotl 0.12 to 0.14 exports true only, so parameters were "
            "freed after forward", hint="FSDP_RESHARD_AFTER_FORWARD=false in the environment keeps them")),
        write=lambda run: run.config.reshard_after_forward is not False, takes=RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward", defaults=everywhere(True), read_by=(T2, A2, X2),
        instead=_instead(trainer="full_shard or shard_grad_op in fsdp", launcher="fsdp_sharding_strategy"),
        meaning="whether parameters are freed after forward; FSDP1 did not read it beside a strategy, which there "
        "always is", reason="FSDP2's own key"),
    Key(name="auto_wrap_policy", takes=POLICY, outcome=Outcome.EXACT,
        target="the modules that fully_shard is called on",
        defaults={**dict.fromkeys((T1, A1, A2, X1, X2), "NO_WRAP"), T2: "TRANSFORMER_BASED_WRAP",
        AD: "TRANSFORMER_BASED_WRAP"}, read_by=(A1, A2, T2, X1, X2),
        instead=_instead(trainer="the option auto_wrap in fsdp"), read={"wrap": lambda value, config: wrap_of(config)},
        write=lambda run: _POLICY_OF.get(run.wrap.kind, "TRANSFORMER_BASED_WRAP"), decide=cases(
        case(lambda value, config: config["auto_wrap_policy"] == "SIZE_BASED_WRAP" and config.reader in FSDP2,
            Outcome.UNSUPPORTED, reason=SIZE_REASON, hint=SIZE_HINT),
        case(lambda value, config: config["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
            and not config["transformer_layer_cls_to_wrap"],
            reason="the classes are those of the model's _no_split_modules"),
        case(lambda value, config: wrap_of(config).kind is WrapKind.ROOT,
            reason="the whole model is one unit, all of it gathered at once")),
        meaning="which modules are separate units", reason="the same modules, each a unit"),
    Key(name="transformer_layer_cls_to_wrap", fields=("wrap.classes",),
        write=lambda run: ",".join(run.wrap.classes) or None, takes=CLASSES, outcome=Outcome.EXACT,
        target="fully_shard on each module of these classes", defaults=everywhere(()),
        instead=_instead(trainer=_UNPREFIXED), decide=_wrap_policy_cases("TRANSFORMER_BASED_WRAP"),
        meaning="classes of the modules that are units; by default the model's _no_split_modules",
        reason="the same modules, each a unit"),
    Key(name="min_num_params", fields=("wrap.min_num_params",), write=lambda run: run.wrap.min_num_params or None,
        takes=COUNT, outcome=Outcome.EXACT, target="fully_shard on modules chosen by FSDP1's rule",
        defaults=everywhere(0), instead=_instead(trainer=_UNPREFIXED), decide=_wrap_policy_cases("SIZE_BASED_WRAP"),
        meaning="under SIZE_BASED_WRAP, the minimum number of a unit's parameters, without those of units below it",
        reason="the same modules, each a unit"),
    Key(name="offload_params", read={"cpu_offload": as_is}, write=lambda run: run.config.cpu_offload,
        aliases=("cpu_offload",), takes=BOOL, outcome=Outcome.EXACT, target="CPUOffloadPolicy",
        defaults=everywhere(False), read_by=(A1, A2, T2, X1, X2),
        instead=_instead(trainer="the option offload in fsdp"),
        meaning="parameters, gradients and the optimizer rest in host memory", reason="the same under FSDP2"),
    Key(name="backward_prefetch", takes=PREFETCH, outcome=Outcome.EXACT,
        target="prefetch in backward",
        defaults={**dict.fromkeys((T1, A1, X1), "NO_PREFETCH"), **dict.fromkeys((T2, A2, X2, AD), "BACKWARD_PRE")},
        read_by=(T1, A1, X1),
        checked_by=(A2,),
        instead=_instead(trainer=_UNPREFIXED, launcher="set_modules_to_backward_prefetch in the script"),

        read={"prefetch.backward": lambda value, config: 0 if value == "NO_PREFETCH" else None}, decide=cases(
            case(lambda value, config: config.reader is X1 and config["backward_prefetch"] != "NO_PREFETCH",
                _APPROXIMATE, target="FSDP2's own prefetch",
                reason="axolotl's Trainer went by it up to 0.11; from 0.12 on axolotl drops it, and nothing was "
                "prefetched; no number depends on it", hint=_ONE_MORE_UNIT),
            case(lambda value, config: config["backward_prefetch"] == "NO_PREFETCH", reason="no unit is prefetched",
                hint="accelerate's FSDP2 always prefetches one: one more unit in memory"),
            case(lambda value, config: config["backward_prefetch"] == "BACKWARD_PRE", target="",
                reason="FSDP2 does it by default, in the reverse order of forward"),
            case(lambda value, config: True, _APPROXIMATE, target="FSDP2's own prefetch",
                reason="FSDP2 gathers the next unit before a unit's gradients, not after", hint=_ONE_MORE_UNIT)),
        meaning="when backward gathers the next unit; not at all by default"),
    Key(name="backward_prefetch_policy", takes=ANY, outcome=Outcome.APPROXIMATE, read_by=(),
        instead=_instead(trainer="backward_prefetch", launcher="fsdp_backward_prefetch"),
        meaning="the name of backward_prefetch in accelerate up to 0.34; not read from 1.0 on",
        reason="accelerate up to 0.34 read it, and later releases prefetch nothing; no number depends on it"),
    Key(name="forward_prefetch", takes=BOOL, outcome=Outcome.EXACT,
        target="set_modules_to_forward_prefetch, one unit ahead", defaults=everywhere(False), read_by=(T1, A1),
        instead=_instead(trainer=_UNPREFIXED, launcher="set_modules_to_forward_prefetch in the script"),

        read={"prefetch.forward": lambda value, config: 1 if value else None},
        decide=cases(case(lambda value, config: config["forward_prefetch"], hint="accelerate's FSDP2 has none")),
        meaning="forward prefetches the next unit, in the order of the first step",
        reason="each unit prefetches the next one, as FSDP1 did"),
    Key(name="state_dict_type", read={"state_dict_type": as_is}, write=lambda run: STATE_DICTS[run.state_dict_type],
        takes=STATE_DICT, outcome=Outcome.EXACT, target="state_dict_type",
        defaults={**dict.fromkeys((T1, A1, T2, X1), "full"), **dict.fromkeys((A2, X2, AD), "sharded")},
        read_by=(A1, A2, T2, X1, X2), instead=_instead(trainer="FSDP_STATE_DICT_TYPE in the environment"),
        meaning="the form of checkpoints", reason=_KEPT),
    Key(name="sync_module_states", takes=BOOL, outcome=Outcome.EXACT,
        target="sync_module_states; in accelerate's FSDP2 cpu_ram_efficient_loading does it",
        defaults={**dict.fromkeys((T1, A1, X1, AD), True), **dict.fromkeys((T2, A2, X2), False)}, read_by=(T1, A1),
        instead=_instead(trainer=_UNPREFIXED, launcher="fsdp_cpu_ram_efficient_loading"),
        read={"sync_module_states": as_is}, decide=cases(
            case(lambda value, config: config["sync_module_states"] and means_false(value),
                reason="accelerate set it to true, since cpu_ram_efficient_loading is on", hint=_LOADING),
            case(lambda value, config: config["sync_module_states"], hint=_LOADING),
            case(lambda value, config: True, asks=False, target="",
                reason="each rank begins with its own values, which must be the same")),
        meaning="rank 0 sends its parameters and buffers to all others",
        reason="rank 0's values go out before training"),
    Key(name="cpu_ram_efficient_loading", takes=BOOL, outcome=Outcome.EXACT,
        target="cpu_ram_efficient_loading",
        defaults={**everywhere(False), A1: True, A2: True},
        instead=_instead(trainer=_UNPREFIXED), fields=("sync_module_states",),
        write=lambda run: run.config.sync_module_states is not False, decide=cases(
            case(lambda value, config: config["cpu_ram_efficient_loading"],
                hint="if a target has no such key: LLM Foundry's init_device: mixed, with sync_module_states"),
            case(lambda value, config: True, asks=False, target="", reason="off: each rank reads the weights itself")),
        meaning="only rank 0 reads a pretrained model's weights; the others get them from it", reason=_KEPT),
    Key(name="use_orig_params", takes=BOOL, outcome=Outcome.UNNEEDED, defaults=everywhere(True),
        read_by=(T1, A1, X1), instead=_instead(trainer=_UNPREFIXED),
        meaning="parameters keep their own tensors instead of one flat one a unit",
        reason="FSDP2 has no flat parameters: each parameter is a separate tensor, regardless of this key"),
    Key(name="limit_all_gathers", takes=TRUTH, outcome=Outcome.UNNEEDED, defaults=everywhere(True),
        read_by=(T1, X1), instead=_instead(trainer=_UNPREFIXED),
        meaning="blocks the CPU to limit the memory of queued all-gathers",
        reason="FSDP2 always bounds the memory of gathered parameters, without blocking the CPU"),
    Key(name="activation_checkpointing", takes=TRUTH, outcome=Outcome.EXACT,
        target="checkpoint_wrapper on the wrapped modules", defaults=everywhere(False),
        instead=_instead(trainer=_UNPREFIXED), fields=("activation_checkpointing",),
        write=lambda run: run.config.activation_checkpointing.checkpoint,
        decide=cases(
            case(lambda value, config: not config["activation_checkpointing"], **_OFF),
            _IN_QUOTES,
            case(lambda value, config: wrap_of(config).kind is WrapKind.SIZE, _APPROXIMATE,
                reason="accelerate recomputes the modules that its policy chose by size; here the layers that the "
                "model names are recomputed: the same numbers, another memory"),
            case(lambda value, config: wrap_of(config).kind is WrapKind.ROOT and config.reader in FSDP2,
                _NEEDS_DECISION,
                reason="accelerate recomputes the modules that its policy wraps, and fails without a policy",
                hint="set a policy, or recompute in the model"),
            case(lambda value, config: wrap_of(config).kind is WrapKind.ROOT, _APPROXIMATE,
                reason="without a policy accelerate wrapped every module separately",
                hint="set a policy to recompute whole layers")),
        meaning="wrapped modules are recomputed in backward, by torch's non-reentrant implementation",
        reason="the same modules, inside their units"),
    Key(name="ignored_modules", takes=ANY, outcome=Outcome.NEEDS_DECISION, target="ignored_params", read_by=(),
        instead=_instead(trainer="FullyShardedDataParallelPlugin(ignored_modules=...) in the script"),
        meaning="modules that stay out of FSDP: up to accelerate 1.9 read from the plugin that a script builds; later "
        "a pattern of their paths (fsdp_ignored_modules, from 1.10 with FSDP1, from 1.12 with FSDP2)",
        reason="which modules they are, a script or a pattern decides"),
    Key(name="mixed_precision_policy", takes=ANY, outcome=Outcome.NEEDS_DECISION, target="MixedPrecisionPolicy",
        read_by=(),
        instead=_instead(trainer="FullyShardedDataParallelPlugin(mixed_precision_policy=...) in the script"),
        meaning="the dtypes one by one: read from the plugin that a script builds, never from a file",
        reason="no configuration file sets it"),
    *(
        Key(
            name=name,
            takes=takes,
            meaning="for TPUs: torch_xla's own FSDP",
            outcome=Outcome.UNSUPPORTED,
            reason="torch_xla's FSDP is another system; FSDP2 has no form for it",
            defaults=everywhere(None if takes is ANY else False),
            read_by=(T1, T2),
            instead=_instead(trainer=_UNPREFIXED),
            decide=cases(_IN_QUOTES) if takes is TRUTH else None,
        )
        for name, takes in (
            ("xla", TRUTH),
            ("xla_fsdp_v2", TRUTH),
            ("xla_fsdp_grad_ckpt", TRUTH),
            ("xla_fsdp_settings", ANY),
        )
    ),
    Key(name="dp_replicate_size", fields=("mesh",), takes=DEGREE, group=DEGREES, read_by=tuple(Reader), release="1.10",
        outcome=Outcome.EXACT, target="data_parallel_replicate_degree", defaults=everywhere(1), decide=_DEGREE_OF_1,
        meaning="so many replicas, each sharded over dp_shard_size ranks (FSDP2 only, accelerate 1.10)",
        reason="replicas average their gradients"),
    Key(name="dp_shard_size", takes=DEGREE, group=DEGREES, read_by=tuple(Reader), release="1.10", outcome=Outcome.EXACT,
        target="data_parallel_shard_degree", defaults=everywhere(1), read={"mesh": mesh_of},
        decide=cases(case(lambda value, config: value == 1 and config.reader in AXOLOTL, _UNNEEDED,
            reason="1 has no effect")),
        meaning="over how many ranks parameters are sharded (FSDP2 only, accelerate 1.10)",
        reason="the ranks of one replica"),
    Key(name="tp_size", read={"tensor_parallel": as_is}, takes=DEGREE, group=DEGREES, read_by=tuple(Reader),
        release="1.10", outcome=Outcome.EXACT, meaning="tensor parallelism over so many ranks (accelerate 1.10)",
        reason="a separate axis, beside the shard axis", defaults=everywhere(1), decide=_DEGREE_OF_1),
    Key(name="cp_size", read={"context_parallel_degree": lambda value, config: value * config["sp_size"]}, takes=DEGREE,
        group=DEGREES, read_by=tuple(Reader), release="1.10", outcome=Outcome.EXACT,
        meaning="context parallelism over so many ranks (accelerate 1.10)",
        reason="ranks that share sequences, and shard parameters as well: by a ring there, by "
        "heads here, with the same numbers up to rounding", defaults=everywhere(1), decide=_DEGREE_OF_1),
    Key(name="sp_size", fields=("context_parallel_degree",), takes=DEGREE, group=DEGREES, release="1.12",
        outcome=Outcome.EXACT, target="context_parallel_degree", read_by=(AD,),
        meaning="sequences over so many ranks, by DeepSpeed's Ulysses (accelerate 1.12)",
        reason="ranks that share sequences, and shard parameters as well: attention exchanges heads for sequence, "
        "there as here", defaults=everywhere(1), decide=_DEGREE_OF_1),
    *(Key(name=f"sp_{name}", takes=ANY, group=DEGREES, release="1.12", outcome=Outcome.UNNEEDED,
        defaults=everywhere(None), read_by=(AD,), meaning=f"of DeepSpeed's sequence parallelism, {text}",
        reason="the new run has its own sequence sharding")
        for name, text in (
            ("backend", "who divides sequences"), ("seq_length", "the length that all sequences have"),
            ("seq_length_is_variable", "whether lengths differ"),
            ("attn_implementation", "which attention computes"))),
    *(Key(name=name, takes=ANY, group=DEGREES, release="1.10", outcome=Outcome.APPROXIMATE,
        defaults=everywhere(None), read_by=(T1, T2, A1, A2),
        meaning="how ranks of one sequence get each other's keys and values (accelerate 1.10)",
        reason="another way of communication: the same numbers up to rounding")
        for name in ("cp_backend", "cp_comm_strategy")),
    Key(name="ep_size", read={"expert_parallel": as_is, "has_expert_axis": lambda value, config: value != 1},
        takes=DEGREE, group=DEGREES, outcome=Outcome.EXACT, meaning="experts over so many ranks, by axolotl's plugin",
        reason="a separate axis, beside the shard axis", defaults=everywhere(1), read_by=AXOLOTL, decide=_DEGREE_OF_1),
    Key(name="cpu_offload_pin_memory", takes=BOOL, outcome=Outcome.APPROXIMATE, target="pinned host memory",
        defaults=everywhere(True), read_by=AXOLOTL, decide=cases(
            case(lambda value, config: config["cpu_offload_pin_memory"], _UNNEEDED, reason="pinned, as by default"),
            case(lambda value, config: not config["offload_params"], _UNNEEDED, reason="nothing is offloaded")),
        meaning="whether what rests in host memory is pinned, and so never swapped out",
        reason="offloaded shards are pinned here: faster copies, and the host needs the memory for them"),
    Key(name="final_state_dict_type", takes=STATE_DICT, outcome=Outcome.APPROXIMATE, target="state_dict_type",
        defaults=everywhere(None), read_by=AXOLOTL,
        decide=cases(case(lambda value, config: config["final_state_dict_type"] == config["state_dict_type"], _UNNEEDED,
            reason="the same as state_dict_type")),
        meaning="the form of the model saved at the end, if it differs from the checkpoints'",
        reason="one key applies to all checkpoints",
        hint="composer-fsdp2 checkpoint convert makes the other form of the last one"),
    Key(name="zero_stage", takes=STAGE, group=DEEPSPEED, outcome=Outcome.APPROXIMATE,
        target="FULL_SHARD: reshard_after_forward=True on one mesh of all ranks", defaults=everywhere(2),
        read_by=(AD,), fields=("reshard_after_forward", "mesh"),
        decide=cases(
            case(lambda value, config: config["zero_stage"] == 3),
            case(lambda value, config: True, target=lambda config: _STAGES[config["zero_stage"]][0],
                reason=lambda config: _STAGES[config["zero_stage"]][1])),
        meaning="what DeepSpeed shards: 1 the optimizer's state, 2 gradients too, 3 parameters too",
        reason="all is sharded by both; DeepSpeed gathers parameters one by one, within limits that it sets itself, "
        "FSDP2 unit by unit: the same numbers, other memory"),
    *(
        Key(name=f"offload_{what}_device", takes=DEVICE, group=DEEPSPEED, outcome=Outcome.APPROXIMATE,
        target="CPUOffloadPolicy", defaults=everywhere("none"), read_by=(AD,), fields=("cpu_offload",),
        decide=_device(what), meaning=f"where {text}",
        reason="FSDP2 offloads parameters, gradients and the optimizer's state together")
        for what, text in (("optimizer", "the optimizer's state rests"), ("param", "parameters rest, under stage 3"))
    ),
    Key(name="zero3_init_flag", takes=BOOL, group=DEEPSPEED, outcome=Outcome.EXACT,
        target="sync_module_states", defaults=everywhere(False), read_by=(AD,), fields=("sync_module_states",),
        decide=cases(case(lambda value, config: config["zero_stage"] != 3 or not config["zero3_init_flag"], _UNNEEDED,
            reason="off, or without effect below stage 3")),
        meaning="from_pretrained shards parameters while it creates the model; no rank stores all of them",
        reason="DeepSpeed sends rank 0's values out, and so does sync_module_states",
        hint="where a rank has no memory for the whole model: init_device: mixed in LLM Foundry, meta in a script"),
    Key(name="zero3_save_16bit_model", takes=BOOL, group=DEEPSPEED, outcome=Outcome.APPROXIMATE,
        target="state_dict_type", defaults=everywhere(False), read_by=(AD,), fields=("state_dict_type",),
        decide=_switch("zero3_save_16bit_model"), meaning="save_pretrained writes full weights, in 16 bits",
        reason="full checkpoints, in the parameters' own dtype"),
    Key(name="gradient_clipping", takes=NORM, group=DEEPSPEED, outcome=Outcome.EXACT, target="gradient clipping",
        defaults=everywhere(None) | {AD: 1.0}, read_by=(AD,),
        read={"max_grad_norm": _max_grad_norm},
        decide=cases(case(lambda value, config: not config["gradient_clipping"], _UNNEEDED, reason="0 clips nothing")),
        meaning="to which norm DeepSpeed clips gradients: 1 by default",
        reason="the norm of all gradients, by both"),
    Key(name="gradient_accumulation_steps", takes=STEPS, group=DEEPSPEED, outcome=Outcome.EXACT,
        target="gradient_sync: every from stage 2 on, else last", defaults=everywhere(1), read_by=(AD,),
        fields=("accumulation.gradient_sync",),
        decide=cases(
            case(lambda value, config: config["gradient_accumulation_steps"] == 1, _UNNEEDED,
                reason="one microbatch, or the script's number"),
            case(lambda value, config: True, _NEEDS_DECISION, reason=lambda config: "DeepSpeed took from here how many "
                "microbatches make a step; nothing else does, and without it the global batch is "
                f"{config['gradient_accumulation_steps']} times smaller",
                hint=lambda config: "Accelerator(gradient_accumulation_steps={0}) in the script, or "
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS={0} in its environment; in Composer a batch of {0} "
                "device_train_microbatch_size; a Trainer's own gradient_accumulation_steps applies as "
                "before".format(config["gradient_accumulation_steps"]))),
        meaning="how many microbatches make a step", reason="stages 2 and 3 reduce gradients in each microbatch"),
    Key(name="deepspeed_config_file", takes=ANY, group=DEEPSPEED, outcome=Outcome.NEEDS_DECISION, read_by=(AD,),
        defaults=everywhere(None), meaning="DeepSpeed's own settings, in a separate file, which takes precedence",
        reason="the file is neither in the working directory nor beside this one",
        hint="migrate where it is launched; or write its zero_optimization.stage here as zero_stage, offload_... as "
        "offload_optimizer_device and offload_param_device, and remove this"),
    *(
        Key(name=name, takes=ANY, group=DEEPSPEED, outcome=Outcome.UNNEEDED, read_by=(AD,),
            release="1.12" if name.startswith("seq") else "", defaults=everywhere(None), meaning=meaning,
            reason=reason)
        for name, meaning, reason in (  # keys that do not affect FSDP2
            ("deepspeed_multinode_launcher", "who starts the processes of several nodes", _LAUNCHER),
            ("deepspeed_hostfile", "the nodes", _LAUNCHER),
            ("deepspeed_exclusion_filter", "nodes and GPUs to leave out", _LAUNCHER),
            ("deepspeed_inclusion_filter", "nodes and GPUs to take", _LAUNCHER),
            ("offload_optimizer_nvme_path", "where a disk takes the optimizer's state",
                "of use with the device nvme only"),
            ("offload_param_nvme_path", "where a disk takes parameters", "of use with the device nvme only"),
            (
                "deepspeed_moe_layer_cls_names",
                "layers that ZeRO 3 gathers as wholes, since ranks use other experts in them",
                "FSDP2 gathers units as wholes, whichever experts a rank uses",
            ),
            (
                "seq_parallel_communication_data_type",  # accelerate 1.12
                "of what ranks of one sequence exchange",
                "belongs to DeepSpeed's sequence parallelism",
            ),
        )
    ),
    Key(name="per_device_train_batch_size", takes=ANY, group=BESIDE, outcome=Outcome.EXACT, read_by=TRAINERS,
        target="device_train_microbatch_size", read={"microbatch_size": _rows, "num_microbatches": _microbatches},
        meaning="rows of a rank's microbatch; gradient_accumulation_steps microbatches make a step",
        reason="as many rows"),
    Key(name="max_steps", takes=ANY, group=BESIDE, outcome=Outcome.EXACT, read_by=TRAINERS, target="max_duration",
        read={"max_duration": _duration},
        decide=cases(case(lambda value, config: count(value) is None, _UNNEEDED, reason="the epochs count")),
        meaning="steps of the optimizer; -1: as many as num_train_epochs has", reason="as many batches"),
    Key(name="num_train_epochs", takes=ANY, group=BESIDE, outcome=Outcome.EXACT, read_by=TRAINERS,
        target="max_duration", fields=("max_duration",), decide=cases(
        case(lambda value, config: count(config["max_steps"]) is not None, _UNNEEDED, reason="max_steps counts")),
        meaning="epochs", reason="as many epochs"),
    Key(name="optim", takes=ANY, group=BESIDE, outcome=Outcome.EXACT, read_by=TRAINERS, target="optimizer",
        read={"optimizer": lambda name, config: optimizer_of(
            {"name": _optimizer(name, config), **{option: config[key] for key, option in OF_TRAINERS.items()}})},
        meaning="the optimizer",
        reason="the same formula"),
    Key(name="weight_decay", takes=ANY, group=BESIDE, outcome=Outcome.EXACT, read_by=TRAINERS, target="optimizer",
        read={"undecayed": lambda value, config: "biases and norms" if number_of(value) else None},
        fields=("optimizer",), meaning="an option of AdamW", reason="the same decay"),
    *(Key(name=name, takes=ANY, group=BESIDE, outcome=Outcome.EXACT, read_by=TRAINERS, target="optimizer",
        fields=("optimizer",), meaning="an option of AdamW", reason="the same value")
        for name in OF_TRAINERS if name != "weight_decay"),
)
# fmt: on
BY_PLACE = {(row.group, name): row for row in ROWS for name in (row.name, *row.aliases)}
# Rows by axolotl's key beside fsdp_config.
OF_AXOLOTL = {
    "fsdp_version": BY_PLACE[SETTINGS, "version"],
    **{name: BY_PLACE[DEGREES, name] for name in ("dp_shard_size", "dp_replicate_size")},
    "tensor_parallel_size": BY_PLACE[DEGREES, "tp_size"],
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_degree"), BY_PLACE[DEGREES, "cp_size"]),
    "expert_parallel_size": BY_PLACE[DEGREES, "ep_size"],
    "micro_batch_size": BY_PLACE[BESIDE, "per_device_train_batch_size"],
    "num_epochs": BY_PLACE[BESIDE, "num_train_epochs"],
    "optimizer": BY_PLACE[BESIDE, "optim"],
}
