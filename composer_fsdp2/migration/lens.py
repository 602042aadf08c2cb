"""A key as a lens between a system's files and a run, and what a system's files cannot hold of a run.

``read`` takes a file's effective configuration to values of a run's fields, ``write`` a run to the key's value. What a
target loses of a run is computed: the fields that writing the run and reading it again changes. A ``Limitation`` is the
prose of such a field, or of one that the target carries out in its own way.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, idle, undecided
from composer_fsdp2.migration.run import NOT_CONFIGURED, RunConfig, WrapKind, fields_of

# From a key's value in effect, and the effective configuration, to the value of a field.
Read = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lens(Row):
    """A key that is read into a run and written from one.

    Args:
        read: By field of a run, its value; ``fields`` names the fields that the key decides without setting them.
        write: The key's value; None leaves the key out.
        is_told: Whether a file without the key asks for something all the same, by the key's default.
    """

    read: Mapping[str, Read] = field(default_factory=dict)
    write: Callable[[RunConfig], Any] = lambda run: None
    is_told: bool = False

    @property
    def decides(self) -> tuple[str, ...]:
        names = ("tiled_mlp" if name == "tiled_chunks" else name for name in (*self.read, *self.fields))
        return tuple(name for name in names if name not in NOT_CONFIGURED)


def decides(row: Row) -> tuple[str, ...]:
    """The fields of a run that a key decides, the most important first."""
    return row.decides if isinstance(row, Lens) else row.fields


_KINDS = ("mesh", "wrap", "mixed_precision", "activation_checkpointing", "tiled_mlp", "expert_parallel", "batch")
_OF_KIND = {
    "precision": "mixed_precision",
    "has_expert_axis": "expert_parallel",
    **dict.fromkeys(("num_microbatches", "global_batch_size"), "batch"),
}


def kind_of(name: str) -> str:
    """The group of fields that one key of most systems decides."""
    first = _OF_KIND.get(name, name.partition(".")[0])
    return first if first in _KINDS else name


def decides_alone(row: Row) -> bool:
    """Whether a key decides fields of one kind."""
    return len(set(map(kind_of, decides(row)))) == 1


def as_is(value: Any, settings: Any) -> Any:
    """Reads a key whose value is the field's."""
    return value


def unless(default: Any, value: Any) -> Any:
    """Writes a value where it is not the default."""
    return None if value == default else value


# ---------------------------------------------------------------------------------------------------------------------
# Prose by value

Text = str | Callable[[Any], str]


def case(
    applies: Callable[[Any, Any], bool],
    outcome: Outcome | None = None,
    reason: Text | None = None,
    hint: Text | None = None,
    target: Text | None = None,
    asks: bool | None = None,
) -> tuple[Callable[[Any, Any], bool], Mapping[str, Any]]:
    """The outcome and prose of values for which ``applies(value, settings)``; None keeps the usual one.

    A text may be a function of the settings.
    """
    changes = {"outcome": outcome, "reason": reason, "hint": hint, "target": target, "asks": asks}
    return applies, {name: change for name, change in changes.items() if change is not None}


def cases(*each: tuple[Callable[[Any, Any], bool], Mapping[str, Any]]) -> Callable[[Finding, Any], Finding]:
    """``Row.decide`` by the first case that applies."""

    def decide(finding: Finding, settings: Any) -> Finding:
        prose = next((prose for applies, prose in each if applies(finding.value, settings)), {})
        changes = {name: text(settings) if callable(text) else text for name, text in prose.items()}
        if changes.get("outcome") is Outcome.UNNEEDED:
            finding = idle(finding, finding.reason)
        if changes.get("outcome") is Outcome.NEEDS_DECISION:
            finding = undecided(finding, finding.reason)
        return replace(finding, **changes)

    return decide


# ---------------------------------------------------------------------------------------------------------------------
# What a target loses

ANYTHING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limitation:
    """Fields of a run that a target cannot configure, or carries out in its own way.

    Args:
        fields: By name, or prefixes of them; the first decides whether it applies, the others are told with it.
        outcome: What becomes of them.
        reason: With ``{value}`` for the value of the first, and ``{shard_degree}``, ``{replicate_degree}`` and
            ``{size}`` for the mesh's; as ``target`` and ``hint``.
        was, now: Of which values of the first one, before and after, it is true.
        is_kept: Whether it is about a value that the target's file keeps.
        beside: The values of other fields with which it applies.
        is_any: Whether any of the fields decides, not the first.
        title: In the report; by default the first field's.
    """

    fields: tuple[str, ...]
    outcome: Outcome
    reason: str
    target: str = ""
    hint: str = ""
    was: Any = ANYTHING
    now: Any = ANYTHING
    is_kept: bool = False
    beside: Mapping[str, Any] = field(default_factory=dict)
    is_any: bool = False
    title: str = ""

    def applies(self, run: Mapping[str, Any], lost: Mapping[str, Any], kept: Collection[str]) -> str | None:
        """The field that it is told of; None if it is not.

        Args:
            lost: The lost fields that are left to tell, with their values after; as ``kept`` those that are not lost.
        """
        if any(run[name] != value for name, value in self.beside.items()):
            return None
        for name in filter(lambda name: covers(self.fields if self.is_any else self.fields[:1], name), run):
            is_usual = self.was is ANYTHING and run[name] == _USUAL[name]
            is_own = (name in kept and not is_usual) if self.is_kept else name in lost
            if is_own and self.was in (ANYTHING, run[name]) and self.now in (ANYTHING, lost.get(name)):
                return name
        return None

    def finding(self, run: RunConfig, name: str, value: Any) -> Finding:
        target, reason, hint = (_filled(each, run, value) for each in (self.target, self.reason, self.hint))
        return Finding(
            key=self.title or title_of(name),
            value=value,
            outcome=self.outcome,
            target=target,
            reason=reason,
            hint=hint,
            origin=Origin.LACKING,
        )


def limits(outcome: Outcome, *fields: str, **prose: Any) -> Limitation:
    """A row of a table of limitations."""
    return Limitation(fields=fields, outcome=outcome, **prose)


def covers(fields: Iterable[str], name: str) -> bool:
    """Whether a field is one of these, or nested in one."""
    return any(name == each or name.startswith(f"{each}.") for each in fields)


_USUAL = fields_of(RunConfig.of_fields({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A finding for fields of a run.

    Args:
        fields: The one that the finding is about, and others that its limitation names.
        covered: All lost ones that are told with it.
        is_kept: Whether the target's file keeps them.
        is_fault: Whether no limitation of the target covers them.
    """

    fields: tuple[str, ...]
    covered: tuple[str, ...] = ()
    finding: Finding
    is_kept: bool = False
    is_fault: bool = False


def losses(table: Sequence[Limitation], run: RunConfig, lost: Mapping[str, Any]) -> Iterator[Loss]:
    """What a target makes of fields that its file loses, and of others that it carries out in its own way.

    Args:
        lost: Each with its value when it is read again.
    """
    values, left = fields_of(run.with_degrees()), dict(lost)
    kept = values.keys() - lost.keys()
    for each in table:
        name = each.applies(values, left, kept)
        if name is not None:
            told = [other for other in left if covers(each.fields, other)]
            others = told if each.is_any else [other for other in each.fields if other in _USUAL]
            texts = dict.fromkeys(str(shown(run, other)) for other in told) if each.is_any else ()
            found = each.finding(run, name, ", ".join(texts) or shown(run, name))
            yield Loss(
                fields=tuple(dict.fromkeys((name, *others))), covered=tuple(told), finding=found, is_kept=each.is_kept
            )
            left = {other: now for other, now in left.items() if other not in told}
            kept -= {name}
    left.pop("num_ranks", None)  # the launcher's, unless the target's files have it
    for name, now in left.items():
        reason = f"the new text, read again, has {_in_words(name, now)} for it"
        yield Loss(fields=(name,), finding=fault(name, shown(run, name), reason), is_fault=True)


def fault(key: str, value: object, reason: str) -> Finding:
    """For a text that is not as it was meant."""
    hint = "write it by hand, and please report the file as a fault of composer-fsdp2's"
    outcome = Outcome.NEEDS_DECISION
    return Finding(key=key, value=value, outcome=outcome, reason=reason, hint=hint, origin=Origin.WRITING)


def shown(run: RunConfig, name: str) -> Any:
    """The value of a field in a report."""
    if name.startswith("mesh."):
        return run.config.mesh.text
    if name in ("wrap.kind", "wrap.classes", "wrap.min_num_params"):
        return _units(run)
    if name.startswith("wrap."):
        return ", ".join(run.wrap.others)
    return run.expert_parallel if name == "has_expert_axis" else _in_words(name, fields_of(run)[name])


def _in_words(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):  # an optimizer
        return f"{value['name']}, lr {value['lr']}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "as the model says"
    if value is None:
        return "as created" if name.endswith("dtype") else _NONE.get(name, "none")
    return value.value if isinstance(value, Enum) else value


def _units(run: RunConfig) -> str:
    wrap = run.wrap
    if wrap.kind is WrapKind.CLASSES:
        return ", ".join(wrap.classes) or "as the model says"
    named = {WrapKind.HOOKS: "the model's own hooks", WrapKind.ROOT: "one unit"}
    return named.get(wrap.kind, f"modules of {wrap.min_num_params} parameters or more")


def _filled(text: str, run: RunConfig, value: object) -> str:
    mesh = run.config.mesh
    for name in ("shard_degree", "replicate_degree", "size"):
        if f"{{{name}}}" in text:  # groups of ranks have no degrees
            text = text.replace(f"{{{name}}}", str(getattr(mesh, name)))
    return text.replace("{value}", str(value))


# What None is in a report.
_NONE = {
    "num_ranks": "not known",
    "max_grad_norm": "off",
    "activation_checkpointing.classes": "chosen by the model's hooks",
    "sync_module_states": "where some ranks have none",
}
# The names of fields in reports, where these are others.
_TITLES = {
    "wrap.embeddings": "further units",
    "wrap.output": "further units",
    "wrap.experts": "expert units",
    "wrap": "units",
    "mesh": "mesh",
    "mixed_precision.output_dtype": "dtype of outputs",
    "mixed_precision.cast_forward_inputs": "casting of inputs",
    "mixed_precision.cast_root_inputs": "casting of the root's inputs",
    "mixed_precision.gradients": "keep_low_precision_grads",
    "precision": "autocast",
    "stored_dtype": "dtype of stored parameters",
    "activation_checkpointing.checkpoint": "activation_checkpointing",
    "activation_checkpointing.classes": "recomputed modules",
    "activation_checkpointing.reentrant": "reentrant checkpointing",
    "activation_checkpointing.cpu_offload": "activation offloading",
    "activation_checkpointing.transformer_engine": "Transformer Engine",
    "selective_checkpointing": "selective checkpointing",
    "prefetch.forward": "prefetch in forward",
    "prefetch.backward": "prefetch in backward",
    "save_only_model": "model only",
    "max_grad_norm": "gradient clipping",
    "other_clipping": "clipping by value",
    "freeze": "frozen parameters",
    "train_only": "trained parameters",
    "tensor_parallel": "tensor parallelism",
    "context_parallel_degree": "context parallelism",
    "pipeline_parallel": "pipeline parallelism",
    "has_expert_axis": "expert parallelism",
    "expert_parallel": "expert parallelism",
    "expert_parallel_degree": "split experts",
    "idle_experts": "idle experts",
    "idle_towers": "idle towers",
    "tiled_mlp.chunks": "tiled MLP",
    "tiled_mlp.classes": "classes of tiled MLPs",
    "num_ranks": "number of ranks",
    "num_microbatches": "microbatches of a step",
    "global_batch_size": "global batch size",
    "microbatch_size": "microbatch size",
    "max_duration": "duration",
    "undecayed": "weight decay",
}


def title_of(name: str) -> str:
    """The name of a field in a report."""
    found = next((title for each, title in _TITLES.items() if covers((each,), name)), None)
    return name.rpartition(".")[2] if found is None else found
