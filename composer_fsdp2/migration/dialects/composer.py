"""Composer and LLM Foundry: ``fsdp_config``, ``parallelism_config.fsdp``; FSDP1's keys in, FSDP2's out.

The keys of a section are in ``fsdp1/keys.py``. Here is what stands elsewhere in a file and changed the section, what
FSDP1 did without being told, and what no ``fsdp_config`` can say. Composer 0.32.1, LLM Foundry 0.22.0.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.mesh import AxisRole, MeshSpec
from composer_fsdp2.config.rows import POSITIVE_INT, Aspect, Row, idle, takes_if, undecided, unknown_key
from composer_fsdp2.config.sharding import GradientDtype, MixedPrecision, ShardingConfig
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.keys import IGNORED_BY_COMPOSER, KEYS, KEYS_BY_NAME, KeyGroup
from composer_fsdp2.fsdp1.parallel_words import idle_towers_words, tiled_words
from composer_fsdp2.fsdp1.parsing import PRECISIONS, BackwardPrefetch, GivenPrecision, mixed_precision_of
from composer_fsdp2.fsdp1.policy_words import checkpointed_words, freeze_words, wrap_policy_words
from composer_fsdp2.fsdp1.translate import Translation, translate
from composer_fsdp2.migration.capabilities import Lack
from composer_fsdp2.migration.dialect import (
    Dialect,
    Expression,
    Frame,
    MappingEdit,
    Question,
    Reading,
    Section,
    Setting,
    implicit,
)
from composer_fsdp2.migration.dialects.fingerprints import is_hugging_face
from composer_fsdp2.migration.paths import Path, value_at
from composer_fsdp2.migration.run import RunConfig

# Composer's default for a GPU, on which nearly all of these files were trained.
_DEFAULT_PRECISION = "amp_bf16"
# What Composer called them until 0.12 (composer/trainer/trainer.py, 0.13.5).
_OLD_PRECISIONS = {"fp16": "amp_fp16", "amp": "amp_fp16", "bf16": "amp_bf16"}
Given = Mapping[str, Any]


def _around(section: Section) -> Given:
    """The mapping that the section lies in, with what it inherits from those around it; a Trainer's other arguments."""
    values: Any = section.around
    found = dict(values)
    for key in section.path[:-1]:
        values = values[key]
        if isinstance(values, Mapping):
            found |= values
    return found


def _precision(around: Given) -> tuple[str, Finding | None]:
    """Given beside the section or above it; a finding if that is not a precision."""
    given = around.get("precision", _DEFAULT_PRECISION)
    given = given.lower() if isinstance(given, str) else given
    if isinstance(given, str) and given in PRECISIONS:
        return given, None
    is_old = isinstance(given, str) and given in _OLD_PRECISIONS
    finding = Finding(
        key="precision",
        value=given,
        outcome=Outcome.NEEDS_DECISION,
        reason="mixed_precision depends on it, and Composer has no such precision",
        hint=f"say {_OLD_PRECISIONS[given]}" if is_old else f"say one of {', '.join(PRECISIONS)}",
    )
    return _DEFAULT_PRECISION, finding


def _clipping(around: Given) -> Given:
    """The arguments of Composer's gradient clipping, as LLM Foundry takes them; empty if there is none."""
    algorithms = around.get("algorithms")
    clipping = algorithms.get("gradient_clipping") if isinstance(algorithms, Mapping) else None
    return clipping if isinstance(clipping, Mapping) else {}


# ---------------------------------------------------------------------------------------------------------------------
# LLM Foundry


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundryRule:
    """A key that LLM Foundry sets whatever the section says, if ``applies`` to the model's section and this one.

    Source: ``process_init_device`` in llmfoundry/utils/config_utils.py, ``validate_config`` in
    llmfoundry/command_utils/train.py.
    """

    key: str
    applies: Callable[[Given, Given], bool]
    value: Callable[[Given], Any]
    reason: str


_SMALL = ("bf16", "fp16", "float16", "bfloat16", "amp_fp16", "amp_bf16")
_REENTRANT = "activation_checkpointing_reentrant"


def _lacks_sync(model: Given, given: Given) -> bool:
    return model.get("init_device") == "mixed" and not given.get("sync_module_states")


def _lacks_monolith(model: Given, given: Given) -> bool:
    return model.get("init_device") == "mixed" and "load_monolith_rank0_only" not in given


def _uses_te(model: Given, given: Given) -> bool:
    feed_forward = model.get("ffn_config")
    kind = feed_forward.get("ffn_type", "") if isinstance(feed_forward, Mapping) else ""
    is_te = model.get("fc_type", "torch") == "te" or "te" in str(kind)
    return is_te and given.get("activation_checkpointing") is True and given.get(_REENTRANT) is True


def _has_small_weights(model: Given, given: Given) -> bool:
    return bool(given) and model.get("master_weights_dtype") in _SMALL


def _master_weights(given: Given) -> dict[str, Any]:
    asked = given.get("mixed_precision")
    dtypes = asked if isinstance(asked, Mapping) else {}
    return {"param_dtype": None} | {name: dtypes.get(name) for name in ("reduce_dtype", "buffer_dtype")}


_MIXED_INIT = "LLM Foundry sets it to true, since the model is created on rank 0 only (init_device: mixed)"
# fmt: off
_FOUNDRY: tuple[_FoundryRule, ...] = (
    _FoundryRule(key="sync_module_states", applies=_lacks_sync, value=lambda given: True, reason=_MIXED_INIT),
    _FoundryRule(key="load_monolith_rank0_only", applies=_lacks_monolith, value=lambda given: True, reason=_MIXED_INIT),
    _FoundryRule(key=_REENTRANT, applies=_uses_te, value=lambda given: False,
        reason="LLM Foundry sets it to false for Transformer Engine's layers"),
    _FoundryRule(key="mixed_precision", applies=_has_small_weights, value=_master_weights,
        reason="LLM Foundry takes the dtypes of master_weights_dtype, and of this key at most reduce_dtype and "
        "buffer_dtype"),
)
# fmt: on


def _foundrys(around: Given) -> Given | None:
    """The model's section of a file of LLM Foundry's; None in other files."""
    model = around.get("model")
    return model if isinstance(model, Mapping) and "name" in model else None


def _set_by_foundry(section: Section) -> dict[str, tuple[Any, str]]:
    """What LLM Foundry sets, by key, each with why; nothing in a file that is none of its."""
    model, given = _foundrys(_around(section)), section.given
    rules = [] if model is None else [rule for rule in _FOUNDRY if rule.applies(model, given)]
    return {rule.key: (rule.value(given), rule.reason) for rule in rules}


# ---------------------------------------------------------------------------------------------------------------------
# Keys beside the section: which releases took them was read in the Trainer's signature of mosaicml 0.11 to 0.32.1

_BESIDE = "beside fsdp_config"
_DEGREE = "tensor_parallel_degree"
_TENSOR = takes_if(
    "a mapping with tensor_parallel_degree",
    lambda value: isinstance(value, Mapping) and POSITIVE_INT.fits(value.get(_DEGREE, 1)),
)


def _tensor_degree(section: Section, around: Given) -> int:
    """Over how many ranks layers are split."""
    given: Given = next((value for _, value in _given_beside(_ROWS_BY_NAME["tp_config"], section, around)), {})
    return given.get(_DEGREE, 1) if _TENSOR.fits(given) else 1


def _tensor(finding: Finding, section: Section) -> Finding:
    given: Any = finding.value
    if not _TENSOR.fits(given):
        return undecided(finding, f"it takes {_TENSOR.text}, a number from 1 on")
    if given.get(_DEGREE, 1) == 1:
        return idle(finding, "one rank splits no layer; Composer turns it off")
    if given.get("strategy") == "ffn":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="FSDP1 trained the ranks that split a layer apart, each on data of its own; here they train as one "
            "process does, on what all of them read",
            hint="broadcast_batch: first, if they read the same",
        )
    return finding


# fmt: off
_BESIDE_ROWS: tuple[Row, ...] = (
    Row(name="tp_config", group=_BESIDE, aliases=("parallelism_config.tp",), outcome=Outcome.EXACT,
        target="tp_config", takes=_TENSOR, decide=_tensor,
        meaning="tensor parallelism: over how many ranks layers are split (tensor_parallel_degree), and by which layer "
        "plan, LLM Foundry's strategy or a script's layer_plan",
        reason="layers are split by the same plan, before the model is sharded",
        hint="the ranks that split a layer must read one batch: they compare it, and broadcast_batch lets them share "
        "what they read",
        elsewhere="plain Composer 0.32.1's FSDP2 fails with it if there is an optimizer"),
    Row(name="deepspeed_config", group=_BESIDE, outcome=Outcome.UNSUPPORTED,
        reason="DeepSpeed instead of FSDP; Composer's Trainer has had no such argument since 0.28",
        hint="remove it; its ZeRO stage 3 is sharding_strategy FULL_SHARD, stage 2 SHARD_GRAD_OP"),
    Row(name="fsdp_auto_wrap", group=_BESIDE, outcome=Outcome.NEEDS_DECISION, neutral=(True,),
        reason="the script wrapped the model itself (Composer's Trainer took it from 0.14 to 0.25)",
        hint="remove it, and the Trainer shards the model; or let the script call prepare_fully_shard before"),
    Row(name="grad_accum", group=_BESIDE, outcome=Outcome.NEEDS_DECISION,
        reason="Composer's Trainer has had no such argument since 0.14",
        hint="device_train_microbatch_size: the batch of one rank divided by it"),
)
# fmt: on
_ROWS_BY_NAME = {row.name: row for row in _BESIDE_ROWS}


def _findings_beside(section: Section, around: Given) -> Iterator[Finding]:
    """For what stands beside the section and decides about parallelism, too."""
    for row in _BESIDE_ROWS:
        for key, value in _given_beside(row, section, around):
            finding = row.usual(key, dict(value) if isinstance(value, Mapping) else value)
            finding = idle(finding) if row.is_neutral(value) else finding
            yield finding if row.decide is None else row.decide(finding, section)


def _given_beside(row: Row, section: Section, around: Given) -> Iterator[tuple[str, Any]]:
    """The row's key as it stands there, and what it holds."""
    is_alone = section.path[-2:-1] == ("parallelism_config",)
    short_names = [alias.rpartition(".")[2] for alias in row.aliases] if is_alone else []
    for key in (row.name, *short_names):
        value = around.get(key)
        if value is not None and value != {}:
            yield key, value


# ---------------------------------------------------------------------------------------------------------------------
# What no key says


def _is_argument_of_a_script(section: Section, around: Given) -> bool:
    return section.path[-1:] == ("fsdp_config",) and _foundrys(around) is None


def _leaves_backward_prefetch(section: Section, around: Given) -> bool:
    return "backward_prefetch" not in section.given and "reshard_after_forward" not in section.given


def _casts(section: Section, around: Given) -> bool:
    return section.given.get("mixed_precision", "DEFAULT") != "FULL"


def _leaves_units_to_hooks(section: Section, around: Given) -> bool:
    return section.given.get("wrap_policy") is None


def _leaves_state_dict_type(section: Section, around: Given) -> bool:
    return "state_dict_type" not in section.given


def _clips_by_value(section: Section, around: Given) -> bool:
    return _clipping(around).get("clipping_type") == "value"


_IN_PARALLELISM_CONFIG = implicit(
    "parallelism_config",
    Outcome.UNNEEDED,
    "Composer's Trainer has taken no argument fsdp_config since 0.26; a script hands the section over in "
    "parallelism_config, LLM Foundry does so by itself",
    value="fsdp_config",
    target="parallelism_config={'fsdp': ...}",
)
# What FSDP1 did without being told, and FSDP2 does otherwise by itself, with what keeps it or compensates.
# fmt: off
_IMPLICIT: tuple[tuple[Callable[[Section, Given], bool], Finding], ...] = (
    (_leaves_backward_prefetch, implicit("backward_prefetch", Outcome.APPROXIMATE,
        "FSDP2 gathers the next unit before a unit's gradients, FSDP1 by default after: the same numbers, one more "
        "unit in memory at the peak",
        "backward_prefetch: NONE spares it, at the price of speed",
        value="BACKWARD_POST", target="FSDP2's own prefetch")),
    (_casts, implicit("casting of inputs and buffers", Outcome.EXACT,
        "as FSDP1 did; FSDP2 by itself casts each unit's inputs, and no buffer, which plain Composer leaves so",
        target="inputs cast at roots only, buffers cast")),
    (_leaves_state_dict_type, implicit("state_dict_type", Outcome.EXACT,
        "checkpoints are full ones, as FSDP1's were by default; plain Composer's FSDP2 saves sharded ones",
        "say state_dict_type: full to have it there, too",
        value="full", target="state_dict_type: full")),
    (_leaves_units_to_hooks, implicit("wrapping", Outcome.EXACT,
        "the same modules become units, each around its own checkpointing as under FSDP1; plain Composer puts the "
        "checkpointing outside",
        target="the model's fsdp_wrap_fn, _fsdp_wrap and activation_checkpointing_fn")),
    (_clips_by_value, implicit("clipping by value", Outcome.EXACT,
        "as under FSDP1; plain Composer's FSDP2 clips each element instead",
        "clipping_type: norm is the same everywhere",
        value="clipping_type: value", target="scaled by the largest absolute value")),
)
# fmt: on


def _implicit(section: Section, around: Given, set_by_foundry: Mapping[str, tuple[Any, str]]) -> Iterator[Finding]:
    if _is_argument_of_a_script(section, around):
        yield _IN_PARALLELISM_CONFIG
    for name, (value, reason) in set_by_foundry.items():
        if name not in section.given:
            yield implicit(name, Outcome.EXACT, reason, value=value, target=f"{name}: {str(value).lower()}")
    yield from (finding for applies, finding in _IMPLICIT if applies(section, around))


# ---------------------------------------------------------------------------------------------------------------------
# Sections that contradict themselves


def _contradictions(known: Given, precision: str, error: ConfigError) -> list[Finding]:
    """A finding for each key: its own where it can be read alone, else what is wrong with it, or with all together."""
    findings: list[Finding] = []
    is_told = False
    for name, value in known.items():
        try:
            findings += _alone(name, known, precision)
        except ConfigError as own:
            is_told = True
            findings.append(_wrong(name, value, str(own)))
    if not is_told:  # each key is right, and they contradict each other
        told = next((each.key for each in findings if each.key in error.keys), findings[0].key)
        findings = [_wrong(told, each.value, str(error)) if each.key == told else each for each in findings]
    return findings


def _alone(name: str, known: Given, precision: str) -> tuple[Finding, ...]:
    """The finding of a key, read with no other key of the file but those that it needs.

    Raises:
        ConfigError: it is wrong in itself.
    """

    def read(*names: str) -> tuple[Finding, ...]:
        given = {each: known[each] for each in names} | {"strict": False}
        return translate(given, precision=precision, device="cpu").findings[:1]

    try:
        return read(name)
    except ConfigError as error:
        needed = [each for each in error.keys if each in known and each != name]
        if not needed:
            raise
        return read(name, *needed)


def _wrong(name: str, value: Any, reason: str) -> Finding:
    return Finding(key=name, value=value, outcome=Outcome.NEEDS_DECISION, reason=reason)


# ---------------------------------------------------------------------------------------------------------------------
# A run in the words of an ``fsdp_config`` under composer_fsdp2


def _mesh(mesh: MeshSpec) -> Iterator[tuple[str, Any]]:
    axes = [mesh.axes[number] for role in (AxisRole.SHARD, AxisRole.REPLICATE) for number in mesh.axes_of(role)]
    if mesh.is_grouped:
        groups = [list(axis.groups.ranks) or str(axis.groups) for axis in axes if axis.groups is not None]
        yield "process_group", groups if len(groups) > 1 else groups[0]
        return
    for axis in axes:
        if axis.size != -1 or axis.role is AxisRole.REPLICATE:
            yield axis.key, axis.size


def _mixed_precision(run: RunConfig) -> str | dict[str, str]:
    """Composer's word where there is one, else the dtypes."""
    asked = run.config.mixed_precision
    dtypes = {name: getattr(asked, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    for word in ("FULL", "DEFAULT", "PURE"):
        if mixed_precision_of(GivenPrecision(word), run.precision) == MixedPrecision(**dtypes):
            return word
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome


def _leaves_inputs_of_the_root(run: RunConfig) -> bool:
    mixed_precision = run.config.mixed_precision
    return mixed_precision.param_dtype is not None and not mixed_precision.cast_root_inputs


# fmt: off
_LACKS: tuple[Lack, ...] = (
    Lack(asked="expert units", when=lambda run: run.config.idle_experts is None, outcome=_APPROXIMATE,
        target="the units around them",
        reason="experts stay in the unit around them, which every rank gathers whatever its tokens choose: the same "
        "numbers, and more memory while it is gathered"),
    Lack(asked="casting of inputs", when=lambda run: run.config.mixed_precision.cast_forward_inputs,
        outcome=_APPROXIMATE, target="at roots",
        reason="as under FSDP1 inputs are cast at roots only; what a block gets in float32, rotary angles for one, it "
        "keeps so", hint="in a script, mixed_precision can be torch's MixedPrecisionPolicy(cast_forward_inputs=True)"),
    Lack(asked="casting of the root's inputs", when=_leaves_inputs_of_the_root, outcome=_APPROXIMATE, target="at roots",
        reason="the root's floating point inputs are cast to param_dtype; token ids are not"),
    Lack(asked="dtype of outputs", outcome=_APPROXIMATE,
        reason="units give what they compute, as under FSDP1; {value} was asked for",
        hint="in a script, mixed_precision can be torch's MixedPrecisionPolicy(output_dtype=...)"),
    Lack(asked="sync_module_states", when=lambda run: run.config.sync_module_states is None, outcome=_APPROXIMATE,
        target="sync_module_states", reason="without the key no values are sent; true sends rank 0's always",
        hint="set it to true if the model is created on rank 0 only"),
    Lack(asked="ignored_modules", outcome=_NEEDS_DECISION, target="ignored_modules",
        reason="a file cannot name modules", hint="set fsdp_config['ignored_modules'] in the script"),
    Lack(asked="tensor parallelism", outcome=_NEEDS_DECISION, target="tp_config",
        reason="which layers are split, and how, is a layer plan of the model, which stands beside the section and in "
        "code",
        hint="a script: parallelism_config['tp'] = {'tensor_parallel_degree': {value}, 'layer_plan': {path: style}}; "
        "LLM Foundry: tp_config: {strategy: ffn, tensor_parallel_degree: {value}}, which splits MPT's feed-forwards"),
    *(Lack(asked=f"{kind} parallelism", outcome=_UNSUPPORTED, reason=f"composer_fsdp2 has no {kind} parallelism")
        for kind in ("pipeline", "expert")),
    Lack(asked="tiled MLP", when=lambda run: run.config.tiled_mlp is None, outcome=_APPROXIMATE, target="tiled_mlp",
        reason="the file does not name the classes of the MLPs, so that they are computed in one piece: the same "
        "numbers, and more memory in long sequences",
        hint="set tiled_mlp: {classes: [the class of the model's MLPs], chunks: {value}}"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm is not None,
        outcome=_EXACT, target="algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: {value}}}",
        reason="Composer clips by an algorithm, which stands beside the section: LLM Foundry reads it there",
        hint="a script hands it to the Trainer: algorithms=GradientClipping('norm', {value})"),
    Lack(asked="model only", outcome=_APPROXIMATE, target="save_weights_only",
        reason="an argument of Composer's Trainer, outside of this section", hint="save_weights_only: true"),
    Lack(asked="selective checkpointing", outcome=_APPROXIMATE, target="activation_checkpointing_fn of the model",
        reason="entire blocks are recomputed: less memory, more computation, the same numbers",
        hint="the model's activation_checkpointing_fn can choose fewer"),
    Lack(asked="compile", outcome=_APPROXIMATE, target="compile_config",
        reason="an argument of Composer's Trainer, outside of this section; it changes speed and rounding"),
)
# fmt: on

# ---------------------------------------------------------------------------------------------------------------------
# The dialect

_PLACES = ("fsdp_config", "parallelism_config.fsdp", "parallelism_config.fsdp2")
_ELSEWHERE = {row.name: row.elsewhere for row in KEYS if row.elsewhere} | {
    "precision": ""  # the Trainer's own, beside the section
}


class ComposerDialect(Dialect):
    """Sections for Composer and LLM Foundry, read by the table of ``fsdp1/keys.py``."""

    name = target = "composer"
    title = "Composer and LLM Foundry"
    rows = (*KEYS, *_BESIDE_ROWS)
    lacks = _LACKS
    interpolates = True
    keeps_implicit = True
    heads = (("fsdp_config", ()),)
    elsewhere = staticmethod(lambda key: _ELSEWHERE.get(key, IGNORED_BY_COMPOSER))
    silent = (
        Section.at(
            ("fsdp_config",), {"fsdp_config": {}, "algorithms": {"gradient_clipping": {"clipping_type": "value"}}}
        ),
    )

    def find(self, path: Path, values: Given, parent: Given) -> Path | None:
        is_section = path[-1:] == ("fsdp_config",) and not is_hugging_face(parent)
        is_section |= path[-2:-1] == ("parallelism_config",) and path[-1] in ("fsdp", "fsdp2")
        return path if is_section else None

    def read(self, section: Section) -> Reading:
        known = {name: value for name, value in section.given.items() if name in KEYS_BY_NAME}
        unknown = _unknown_keys(section.given)
        around = _around(section)
        precision, problem = _precision(around)
        elsewhere = (*unknown, *([problem] if problem else []), *_findings_beside(section, around))
        by_foundry = _set_by_foundry(section)
        in_effect = known | {name: value for name, (value, _) in by_foundry.items()}
        try:
            translation = translate(known, precision=precision, device="cpu")
            effective = translate(in_effect, precision=precision, device="cpu")
        except ConfigError as error:
            return Reading(run=None, findings=(*_contradictions(known, precision, error), *elsewhere))
        findings = (
            *(_with_foundrys(finding, by_foundry) for finding in translation.findings),
            *elsewhere,
            *_implicit(section, around, by_foundry),
        )
        if any(each.outcome.blocks for each in unknown) or problem or effective.config is None:
            return Reading(run=None, findings=findings)
        aspects = {row.name: row.aspect for row in KEYS if row.aspect is not Aspect.OTHER}
        run = _run(effective.config, effective, known, around)
        run = replace(run, tensor_parallel=_tensor_degree(section, around))
        return Reading(run=run, findings=findings, aspects=aspects, rows=KEYS_BY_NAME)

    def express(self, run: RunConfig) -> Expression:
        """The keys of the section, and Composer's ``precision`` and LLM Foundry's ``algorithms`` beside it."""
        beside = [Setting(aspect=Aspect.PRECISION, key="precision", value=run.precision)]
        if run.max_grad_norm is not None:
            clipping = {"clipping_type": "norm", "clipping_threshold": run.max_grad_norm}
            beside.append(Setting(aspect=Aspect.OTHER, key="algorithms", value={"gradient_clipping": clipping}))
        return replace(super().express(run), beside=tuple(beside))

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        config, checkpointing, prefetch = run.config, run.config.activation_checkpointing, run.config.prefetch
        enabled, reentrant = checkpointing.enabled, checkpointing.reentrant
        keeps = config.mixed_precision.gradients is not GradientDtype.OF_PARAMETER
        for key, value, is_needed in (
            *((key, value, True) for key, value in _mesh(config.mesh)),
            ("reshard_after_forward", config.reshard_after_forward, True),
            ("mixed_precision", _mixed_precision(run), True),
            ("state_dict_type", run.state_dict_type, True),
            ("activation_checkpointing", checkpointing.checkpoint, enabled),
            (_REENTRANT, reentrant, enabled and not reentrant),  # true is FSDP1's default
            ("backward_prefetch", BackwardPrefetch.NONE.value, prefetch.backward == 0),
            ("backward_prefetch_limit", prefetch.backward, prefetch.backward),
            ("forward_prefetch", True, prefetch.forward is not None),
            ("activation_cpu_offload", True, checkpointing.cpu_offload),
            ("te_checkpoint_wrapper", True, checkpointing.transformer_engine),
            ("forward_prefetch_limit", prefetch.forward, (prefetch.forward or 1) != 1),
            ("cpu_offload", True, config.cpu_offload),
            ("sync_module_states", True, config.sync_module_states),
            ("keep_low_precision_grads", True, keeps),
            *_fields_of_our_own(config),
            ("async_save", True, run.async_save),
            ("strict", False, not run.strict),
            ("verbose", True, run.verbose),
        ):
            if is_needed:
                row = KEYS_BY_NAME[key]
                aspect = row.aspect if row.detail_of is Aspect.OTHER else row.detail_of
                yield Setting(aspect=aspect, key=key, value=value)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """FSDP2's words for FSDP1's, in place; what only composer_fsdp2 has a form for keeps its name."""
        replacements = {}
        for name, value in section.given.items():
            row = KEYS_BY_NAME.get(name)
            kept = [(name, value)] if row is not None else []  # a word that did nothing goes
            new = kept if row is None or row.rewrite is None else row.rewrite(row, value, section.given)
            if new != [(name, value)]:
                replacements[name] = new
        return [MappingEdit(path=section.path, replacements=replacements)] if replacements else []

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """The reading's: it is about this very target."""
        return reading.findings

    def is_own(self, finding: Finding) -> bool:
        row = KEYS_BY_NAME.get(finding.key)
        is_ours = row is not None and row.group == KeyGroup.OURS and row.name not in _WORDS
        return row is not None and is_ours and finding.value != row.default

    def keeps(self, key: str) -> bool:
        return key in KEYS_BY_NAME and KEYS_BY_NAME[key].rewrite is None

    def frame(self, section: Section) -> Frame:
        """``parallelism_config`` goes as a whole, if sharding is all that it has."""
        holder = value_at(section.around, section.path[:-1])
        is_alone = section.path[-2:-1] == ("parallelism_config",) and len(holder) == 1
        return Frame(entry=section.path[:-1] if is_alone else section.path, inner=section.path)

    def places(self, row: Row) -> tuple[str, ...]:
        if row.group == _BESIDE:
            return (row.name, *row.aliases)
        return tuple(f"{place}.{row.name}" for place in _PLACES)

    def values(self, row: Row) -> tuple[Any, ...]:
        return row.takes.choices

    def defaults(self, row: Row) -> Given:
        return {"FSDPConfig": row.default, **row.defaults} if row.defaults else {"": row.default}

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        given = {**_COMPANIONS.get(row.name, {}), row.name: value}
        values = {"fsdp_config": {}, **given} if row.group == _BESIDE else {"fsdp_config": given}
        yield Question(section=Section.at(("fsdp_config",), values), key=row.name)


# What must stand beside a key for it to mean something.
_COMPANIONS: dict[str, Given] = {"activation_checkpointing_policy": {"activation_checkpointing": True}}


def _unknown_keys(given: Given) -> list[Finding]:
    reason = "no version of Composer knew this key; FSDPConfig took it and did nothing with it"
    return [
        unknown_key(name, value, KEYS_BY_NAME, reason, hint="") if isinstance(name, str) else _no_text(name, value)
        for name, value in given.items()
        if name not in KEYS_BY_NAME
    ]


def _no_text(name: object, value: Any) -> Finding:
    reason = "YAML does not read this key as text, so that no argument of Composer's FSDPConfig can have it as its name"
    return Finding(
        key=str(name), value=value, outcome=Outcome.NEEDS_DECISION, reason=reason, hint="remove it", known=False
    )


def _run(config: ShardingConfig, translation: Translation, known: Given, around: Given) -> RunConfig:
    clipping = _clipping(around)
    return RunConfig(
        config=config,
        precision=translation.precision,
        state_dict_type=known.get("state_dict_type") or "full",
        strict=translation.strict,
        verbose=translation.verbose,
        async_save=bool(known.get("async_save")),
        max_grad_norm=clipping.get("clipping_threshold") if clipping.get("clipping_type") == "norm" else None,
    )


# What these keys' fields are in a file; other systems have words for them, too.
_WORDS: Mapping[str, Callable[[Any], Any]] = {
    "wrap_policy": wrap_policy_words,
    "activation_checkpointing_policy": checkpointed_words,
    "freeze": freeze_words,
    "tiled_mlp": tiled_words,
    "idle_towers": idle_towers_words,
}


def _as_it_is(value: Any) -> Any:
    return value


def _fields_of_our_own(config: ShardingConfig) -> Iterator[tuple[str, Any, bool]]:
    """The keys of composer_fsdp2 that set a field, its value, and whether a configuration without the key lacks it.

    Experts are units only where idle ones run as well.
    """
    if config.idle_experts is None:
        config = replace(config, wrap=replace(config.wrap, experts=()))
    for row in KEYS:
        if row.group == KeyGroup.OURS and row.sets:
            field = attrgetter(row.sets)(config)
            value = field.value if isinstance(field, Enum) else _WORDS.get(row.name, _as_it_is)(field)
            yield row.name, value, value != row.default


def _with_foundrys(finding: Finding, by_foundry: Mapping[str, tuple[Any, str]]) -> Finding:
    if finding.key not in by_foundry or finding.origin is not Origin.KEY:
        return finding
    value, reason = by_foundry[finding.key]
    return replace(finding, target=f"{finding.key}: {str(value).lower()}", reason=reason)
