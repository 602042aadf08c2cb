"""Read settings outside a section that affect it: arguments of the Trainer, and values that LLM Foundry or FSDP1 always
set.

Which release accepts a key next to the section was read in the Trainer's signature of mosaicml 0.11 to 0.32.1.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import POSITIVE_INT, Row, idle, takes_if
from composer_fsdp2.fsdp1.parsing import PRECISIONS
from composer_fsdp2.fsdp1.policy_values import AUTO
from composer_fsdp2.migration.dialect import Section, implicit
from composer_fsdp2.migration.effective import Effective
from composer_fsdp2.migration.interpolated import has_interpolation
from composer_fsdp2.migration.lens import Lens, case, cases
from composer_fsdp2.migration.paths import find_at, value_at
from composer_fsdp2.migration.run import RunConfig
from composer_fsdp2.migration.training import adamw_of, count, number_of, optimizer_of

Given = Mapping[str, Any]
# Composer's default for a GPU, on which nearly all of these files were trained.
_DEFAULT_PRECISION = "amp_bf16"
# Composer's names until 0.12 (composer/trainer/trainer.py, 0.13.5).
_OLD_PRECISIONS = {"fp16": "amp_fp16", "amp": "amp_fp16", "bf16": "amp_bf16"}


def mappings_above(section: Section) -> list[Given]:
    """Return the mappings that contain the section, outermost first."""
    depths = range(max(len(section.path), 1))
    above = (value_at(section.around, section.path[:depth]) for depth in depths)
    return [each for each in above if isinstance(each, Mapping)]


def around_of(section: Section) -> Given:
    """Return the Trainer's other arguments: entries of the mapping that contains the section, and of the mappings
    around it."""
    return {key: value for each in mappings_above(section) for key, value in each.items()}


def precision_of(around: Given) -> tuple[str, Finding | None]:
    """Return the precision that is set next to the section or above it, and a finding if the value is invalid."""
    given = around.get("precision", _DEFAULT_PRECISION)
    given = given.lower() if isinstance(given, str) else given
    if str(given) in PRECISIONS:
        return given, None
    old = _OLD_PRECISIONS.get(str(given))
    finding = Finding(
        key="precision",
        value=given,
        outcome=Outcome.NEEDS_DECISION,
        reason="mixed_precision depends on it, and Composer has no such precision",
        hint=f"say {old}" if old else f"say one of {', '.join(PRECISIONS)}",
    )
    return _DEFAULT_PRECISION, finding


# ---------------------------------------------------------------------------------------------------------------------
# Clipping, batches, steps and the optimizer


def clipping_of(around: Given) -> Given:
    """Return the arguments of Composer's gradient clipping in an LLM Foundry file; empty if gradients are not
    clipped."""
    algorithms = around.get("algorithms")
    clipping = algorithms.get("gradient_clipping") if isinstance(algorithms, Mapping) else None
    return clipping if isinstance(clipping, Mapping) else {}


def clipping_problem(around: Given) -> Finding | None:
    """Return a finding if the threshold is not a positive number."""
    clipping = clipping_of(around)
    threshold = clipping.get("clipping_threshold")
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool) and threshold > 0
    if not clipping or is_number or has_interpolation(threshold):
        return None
    return Finding(
        key="algorithms.gradient_clipping.clipping_threshold",
        value=threshold,
        outcome=Outcome.NEEDS_DECISION,
        reason="it takes a positive number",
        hint="write one, or remove gradient_clipping to clip nothing",
    )


def _clipping_fields(around: Given) -> tuple[float | None, str | None]:
    """Return the clipping norm (None without), and a description of any clipping that is not by a known norm."""
    clipping = clipping_of(around)
    kind, threshold = clipping.get("clipping_type"), clipping.get("clipping_threshold")
    if not clipping or (kind == "norm" and not has_interpolation(threshold)):
        return threshold, None
    return None, f"{kind} {threshold}"


def _clipping(run: RunConfig) -> Given | None:
    norm = run.max_grad_norm or 0
    return {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": norm}} if norm > 0 else None


def _tp_config(run: RunConfig) -> Given | None:
    """Return LLM Foundry's ``tp_config`` for a run, with the strategy ``auto`` (the layer plan of a known model)."""
    degree = run.tensor_parallel
    return {"strategy": AUTO, "tensor_parallel_degree": degree} if degree > 1 else None


def _duration(value: Any, around: Effective) -> str | None:
    return value if isinstance(value, str) else f"{value}ep" if count(value) else None


def _composer_duration(run: RunConfig) -> str | None:
    """Return the duration, or None for a fraction of an epoch: Composer takes whole epochs only."""
    return run.max_duration if run.max_duration and count(run.max_duration.rstrip("abep")) else None


# Defaults of DecoupledAdamW (composer/optim/decoupled_weight_decay.py, 0.32.1).
_DEFAULTS = {"name": "", "lr": 1e-3, "weight_decay": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def _optimizer(given: Any, around: Effective) -> Given | None:
    if not isinstance(given, Mapping):
        return None
    betas, name = given.get("betas"), given.get("name")
    first, second = betas if isinstance(betas, list) and len(betas) == 2 else (None, None)
    numbers = {option: number_of(given.get(option)) for option in ("lr", "weight_decay", "eps")}
    other_options = [
        option
        for option, value in given.items()
        if option not in ("name", "betas", *numbers) or (value is not None and numbers.get(option, 0) is None)
    ]
    if other_options:
        name = f"{name} with {', '.join(sorted(map(str, other_options)))}"
    found = optimizer_of({"name": name, **numbers, "beta1": first, "beta2": second}, _DEFAULTS)
    if found is None or not found["lr"]:
        return found
    return {**found, "weight_decay": number_of(found["weight_decay"] / found["lr"])}


def _decoupled_adamw(run: RunConfig) -> Given | None:
    """Return LLM Foundry's AdamW with all options, as its defaults differ from torch's; None for other optimizers."""
    found = adamw_of(run)
    if not found:
        return None
    return {
        "name": "decoupled_adamw",
        "lr": found["lr"],
        "betas": [found["beta1"], found["beta2"]],
        "eps": found["eps"],
        "weight_decay": number_of(found["weight_decay"] * found["lr"]),
    }


_EXACT = Outcome.EXACT
# fmt: off
# A Trainer's arguments, read and written as keys beside the section. No part of ``explain``.
TRAINER_ROWS: tuple[Lens, ...] = (
    Lens(name="precision", fields=("precision",), write=lambda run: run.precision, outcome=_EXACT),
    Lens(name="algorithms", read={"max_grad_norm": lambda value, around: _clipping_fields(around.given)[0],
        "other_clipping": lambda value, around: _clipping_fields(around.given)[1]}, write=_clipping, outcome=_EXACT),
    Lens(name="tp_config", fields=("tensor_parallel",), write=_tp_config, outcome=_EXACT),
    Lens(name="device_train_microbatch_size", read={"microbatch_size": count},
        write=lambda run: run.microbatch_size, outcome=_EXACT),
    Lens(name="global_train_batch_size", read={"global_batch_size": count}, fields=("num_microbatches",),
        write=lambda run: run.with_batches().global_batch_size, outcome=_EXACT),
    Lens(name="max_duration", read={"max_duration": _duration}, write=_composer_duration, outcome=_EXACT),
    Lens(name="optimizer", read={"optimizer": _optimizer}, write=_decoupled_adamw, outcome=_EXACT),
)
# fmt: on
NUMBERS_OF_TRAINING = ("device_train_microbatch_size", "global_train_batch_size", "max_duration")


def training_of(around: Given) -> dict[str, Any]:
    """Return the fields of a run that keys outside the section set; None for values that are unset or unknown."""
    return Effective(given=around, rows={row.name: row for row in TRAINER_ROWS}, around=around).fields()


def runtime_training_findings(around: Given, training: Given) -> Iterator[Finding]:
    """Yield a finding for each number of batches or steps that is an unresolved interpolation."""
    for row in TRAINER_ROWS:
        if row.name in NUMBERS_OF_TRAINING and around.get(row.name) is not None and training[row.decides[0]] is None:
            reason = "its value is known at run time only, and is not in the new keys"
            yield implicit(row.name, Outcome.APPROXIMATE, reason, value=around[row.name])


# ---------------------------------------------------------------------------------------------------------------------
# Other forms of parallelism

BESIDE = "beside fsdp_config"
_DEGREE = "tensor_parallel_degree"
_TENSOR = takes_if(
    "a mapping with tensor_parallel_degree",
    lambda value: isinstance(value, Mapping) and POSITIVE_INT.fits(value.get(_DEGREE, 1)),
)

# fmt: off
_TENSOR_CASES = cases(
    case(lambda given, around: not _TENSOR.fits(given), Outcome.NEEDS_DECISION,
        reason=f"it takes {_TENSOR.text}, a number from 1 on"),
    case(lambda given, around: given.get(_DEGREE, 1) == 1, Outcome.UNNEEDED,
        reason="degree 1, the default, splits no layer; Composer disables it"),
    case(lambda given, around: given.get("strategy") == "ffn", Outcome.APPROXIMATE,
        reason="FSDP1 trained the ranks that share a layer separately, each on its own data; here they train like one "
        "process, on the data of all of them; the gate_proj of a GLU is split as well",
        hint="broadcast_batch: first, if they read the same"),
)
BESIDE_ROWS: tuple[Row, ...] = (
    Row(name="tp_config", group=BESIDE, aliases=("parallelism_config.tp",), outcome=Outcome.EXACT,
        nested=("tensor_parallel_degree", "layer_plan", "strategy"),
        target="tp_config", takes=_TENSOR, decide=_TENSOR_CASES,
        meaning="tensor parallelism: over how many ranks layers are split (tensor_parallel_degree), and by which layer "
        "plan, LLM Foundry's strategy or a script's layer_plan; auto: the plan of a known model",
        reason="layers are split by the same plan, before the model is sharded",
        hint="the ranks that split a layer must read one batch: they compare it, and broadcast_batch lets them share "
        "what they read",
        elsewhere="plain Composer 0.32.1's FSDP2 fails with it and an optimizer"),
    Row(name="deepspeed_config", group=BESIDE, outcome=Outcome.UNSUPPORTED,
        reason="DeepSpeed instead of FSDP; Composer's Trainer has no such argument from 0.28 on",
        hint="remove it; its ZeRO stage 3 is sharding_strategy FULL_SHARD, stage 2 SHARD_GRAD_OP"),
    Row(name="fsdp_auto_wrap", group=BESIDE, outcome=Outcome.NEEDS_DECISION, neutral=(True,),
        reason="the script wrapped the model itself (Composer's Trainer took it from 0.14 to 0.25)",
        hint="remove it, and the Trainer shards the model; or let the script call prepare_fully_shard before"),
    Row(name="grad_accum", group=BESIDE, outcome=Outcome.NEEDS_DECISION,
        reason="Composer's Trainer has no such argument from 0.14 on",
        hint="device_train_microbatch_size: the batch of one rank divided by it"),
)
# fmt: on


def tensor_degree(around: Given) -> int:
    """Return the number of ranks over which layers are split."""
    given = _tensor_config(around)
    return given.get(_DEGREE, 1) if _TENSOR.fits(given) else 1


def has_automatic_plan(around: Given) -> bool:
    """Return whether layers are TP-sharded by the plan of a known model, which requires no script."""
    given = _tensor_config(around)
    return _TENSOR.fits(given) and AUTO in (given.get("strategy"), given.get("layer_plan"))


def _tensor_config(around: Given) -> Given:
    return next((value for _, value in _given_values(BESIDE_ROWS[0], around)), {})


def parallelism_findings(around: Given) -> Iterator[Finding]:
    """Yield a finding for each key in the file that is outside the section and affects parallelism
    (``BESIDE_ROWS``)."""
    for row in BESIDE_ROWS:
        for key, value in _given_values(row, around):
            finding = row.usual(key, dict(value) if isinstance(value, Mapping) else value)
            finding = idle(finding) if row.is_neutral(value) else finding
            yield finding if row.decide is None else row.decide(finding, around)


def _given_values(row: Row, around: Given) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each key by which the file sets ``row``, including aliases."""
    for name in (row.name, *row.aliases):
        value = find_at(around, name.split("."))
        if value not in (None, {}):
            yield name.rpartition(".")[2], value


# ---------------------------------------------------------------------------------------------------------------------
# Set by LLM Foundry, or by FSDP1's defaults

_LOW_DTYPES = ("bf16", "fp16", "float16", "bfloat16", "amp_fp16", "amp_bf16")
_REENTRANT = "activation_checkpointing_reentrant"
_MIXED_INIT = "LLM Foundry sets it to true, since the model is created on rank 0 only (init_device: mixed)"


def foundry_model(around: Given) -> Given | None:
    """Return the ``model`` section if the file is one of LLM Foundry, else None."""
    model = around.get("model")
    return model if isinstance(model, Mapping) and "name" in model else None


def set_by_foundry(model: Given, given: Given) -> dict[str, Finding]:
    """Return findings for keys of the section whose values LLM Foundry overrides, by key.

    Source: ``process_init_device`` in llmfoundry/utils/config_utils.py, ``validate_config`` in
    llmfoundry/command_utils/train.py.
    """
    found: dict[str, tuple[Any, str]] = {}
    if model.get("init_device") == "mixed":
        if not given.get("sync_module_states"):
            found["sync_module_states"] = True, _MIXED_INIT
        if "load_monolith_rank0_only" not in given:
            found["load_monolith_rank0_only"] = True, _MIXED_INIT
    feed_forward = model.get("ffn_config")
    kind = feed_forward.get("ffn_type") if isinstance(feed_forward, Mapping) else ""
    has_te_layers = model.get("fc_type") == "te" or "te" in str(kind)
    if has_te_layers and given.get("activation_checkpointing") is True and given.get(_REENTRANT) is True:
        found[_REENTRANT] = False, "LLM Foundry sets it to false for Transformer Engine's layers"
    if given and model.get("master_weights_dtype") in _LOW_DTYPES:
        precision = given.get("mixed_precision")
        given_dtypes = precision if isinstance(precision, Mapping) else {}
        dtypes = {"param_dtype": None, "reduce_dtype": given_dtypes.get("reduce_dtype")}
        found["mixed_precision"] = (
            {**dtypes, "buffer_dtype": given_dtypes.get("buffer_dtype")},
            "LLM Foundry takes the dtypes of master_weights_dtype, and of this key at most reduce_dtype and "
            "buffer_dtype",
        )
    return {
        name: implicit(name, Outcome.EXACT, reason, value=value, target=f"{name}: {str(value).lower()}")
        for name, (value, reason) in found.items()
    }


_IN_PARALLELISM_CONFIG = implicit(
    "parallelism_config",
    Outcome.UNNEEDED,
    "Composer's Trainer has no argument fsdp_config from 0.26 on; a script passes the section in parallelism_config, "
    "as LLM Foundry does",
    value="fsdp_config",
    target="parallelism_config={'fsdp': ...}",
)
# fmt: off
# Implicit defaults of FSDP1, each with its condition on the section and the Trainer's arguments.
_IMPLICIT: tuple[tuple[Callable[[Given, Given], bool], Finding], ...] = (
    (lambda given, around: not {"backward_prefetch", "reshard_after_forward"} & given.keys(),
        implicit("backward_prefetch", Outcome.APPROXIMATE,
        "FSDP2 gathers the next unit before a unit's gradients, FSDP1 by default after: the same numbers, one more "
        "unit in memory at the peak",
        "backward_prefetch: NONE spares it, at the price of speed",
        value="BACKWARD_POST", target="FSDP2's own prefetch")),
    (lambda given, around: given.get("mixed_precision", "DEFAULT") != "FULL",
        implicit("casting of inputs and buffers", Outcome.EXACT,
        "as in FSDP1; FSDP2's default, also in plain Composer, casts each unit's inputs, and no buffer",
        target="inputs cast at roots only, buffers cast")),
    (lambda given, around: "state_dict_type" not in given,
        implicit("state_dict_type", Outcome.EXACT,
        "checkpoints are full ones, as FSDP1's were by default; plain Composer's FSDP2 saves sharded ones",
        "set state_dict_type: full for full checkpoints there, too",
        value="full", target="state_dict_type: full")),
    (lambda given, around: given.get("wrap_policy") is None,
        implicit("wrapping", Outcome.EXACT,
        "the same modules are units, each outside its own checkpointing as in FSDP1; plain Composer applies "
        "checkpointing outside",
        target="the model's fsdp_wrap_fn, _fsdp_wrap and activation_checkpointing_fn")),
    (lambda given, around: clipping_of(around).get("clipping_type") == "value",
        implicit("clipping by value", Outcome.EXACT,
        "as under FSDP1; plain Composer's FSDP2 clips each element instead",
        "clipping_type: norm is the same everywhere",
        value="clipping_type: value", target="scaled by the largest absolute value")),
)
# fmt: on


def implicit_findings(section: Section, around: Given) -> Iterator[Finding]:
    """Yield findings for implicit defaults of FSDP1."""
    if section.path[-1:] == ("fsdp_config",) and foundry_model(around) is None:  # an argument of a script
        yield _IN_PARALLELISM_CONFIG
    yield from (finding for applies, finding in _IMPLICIT if applies(section.given, around))
