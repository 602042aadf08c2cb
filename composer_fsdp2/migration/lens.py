"""Keys that are both read from files and written to files (``Lens``), and fields of a run that a system's files lose.

``read`` converts a file's effective configuration to fields of a run, and ``write`` converts a run to the value of the
key. A field is lost if its value changes when a run is written as keys of the target and read again. A ``Limitation``
describes such a field for the report, or a field that the target implements differently.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, idle, undecided
from composer_fsdp2.migration.run import NOT_CONFIGURED, RunConfig, WrapKind, fields_of

# Converts a key's effective value, and the effective configuration, to the value of a field.
Read = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lens(Row):
    """A row whose key is read into fields of a run, and written from a run.

    Args:
        read: For each field that the key sets, the function that computes its value; ``fields`` names the fields that
            the key decides without setting them.
        write: Returns the key's value for a run; None omits the key.
        wrong: Returns the reason why a value that the key takes is wrong beside the other settings, or "".
        reports_default: Whether the key's default has an effect, and is reported for a file without the key.
    """

    read: Mapping[str, Read] = field(default_factory=dict)
    write: Callable[[RunConfig], Any] = lambda run: None
    wrong: Callable[[Any, Any], str] = lambda value, settings: ""
    reports_default: bool = False

    @property
    def decides(self) -> tuple[str, ...]:
        names = ("tiled_mlp" if name == "tiled_chunks" else name for name in (*self.read, *self.fields))
        return tuple(name for name in names if name not in NOT_CONFIGURED)


def decides(row: Row) -> tuple[str, ...]:
    """Return the fields of a run that a key sets or affects, the most important first."""
    return row.decides if isinstance(row, Lens) else row.fields


_KINDS = ("mesh", "wrap", "mixed_precision", "activation_checkpointing", "tiled_mlp", "expert_parallel", "batch")
_OF_KIND = {
    "precision": "mixed_precision",
    "has_expert_axis": "expert_parallel",
    **dict.fromkeys(("num_microbatches", "global_batch_size"), "batch"),
}


def kind_of(name: str) -> str:
    """Return the group of a field. In most systems, one key sets all fields of a group."""
    first = _OF_KIND.get(name, name.partition(".")[0])
    return first if first in _KINDS else name


def as_is(value: Any, settings: Any) -> Any:
    """Read a key whose value is the value of the field."""
    return value


def unless(default: Any, value: Any) -> Any:
    """Return a value to write, or None if it is the default."""
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
    """Return an argument of ``cases``: changes of the finding if ``applies(value, settings)`` is true.

    Attributes that are None are those of the row's default finding. A text may be a function of the settings.
    """
    changes = {"outcome": outcome, "reason": reason, "hint": hint, "target": target, "asks": asks}
    return applies, {name: change for name, change in changes.items() if change is not None}


def cases(*each: tuple[Callable[[Any, Any], bool], Mapping[str, Any]]) -> Callable[[Finding, Any], Finding]:
    """Return a function for ``Row.decide`` that applies the first matching case."""

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
# Losses of a target

ANYTHING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limitation:
    """Fields of a run that a target cannot configure, or implements differently, and the finding that reports this.

    Args:
        fields: Names of fields, or prefixes of names. The first determines whether the limitation applies; the others
            are reported with it.
        outcome: The outcome of the finding.
        reason: The reason. ``{value}`` is replaced by the value of the first field, and ``{shard_degree}`` and
            ``{replicate_degree}`` by those of the mesh; also in ``target`` and ``hint``.
        was, now: Values of the first field, before and after writing and reading, for which the limitation applies.
        is_kept: Whether it applies if the field is preserved, not if it is lost.
        beside: Values of other fields, without which it does not apply.
        is_any: Whether it applies if any of the fields is lost, not only the first.
        title: The title in the report; by default the title of the first field.
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
        """Return the field to which the limitation applies, or None.

        Args:
            run: The values of the run's fields.
            lost: Lost fields that are not reported yet -> value after writing and reading.
            kept: The fields that are not lost.
        """
        if any(run[name] != value for name, value in self.beside.items()):
            return None
        for name in filter(lambda name: covers(self.fields if self.is_any else self.fields[:1], name), run):
            is_default = self.was is ANYTHING and run[name] == _DEFAULT_FIELDS[name]
            is_candidate = (name in kept and not is_default) if self.is_kept else name in lost
            if is_candidate and self.was in (ANYTHING, run[name]) and self.now in (ANYTHING, lost.get(name)):
                return name
        return None

    def finding(self, run: RunConfig, name: str, value: Any) -> Finding:
        target, reason, hint = (_filled_template(each, run, value) for each in (self.target, self.reason, self.hint))
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
    """Return a row of a table of limitations."""
    return Limitation(fields=fields, outcome=outcome, **prose)


def covers(fields: Iterable[str], name: str) -> bool:
    """Return whether the field ``name`` is one of ``fields``, or nested in one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in fields)


_DEFAULT_FIELDS = fields_of(RunConfig.of_fields({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The finding for fields of a run that a target loses or implements differently.

    Args:
        fields: The field of the finding first, then other fields of the limitation.
        covered: All lost fields that the finding reports.
        is_kept: Whether the fields are preserved in the file, and implemented differently.
        is_fault: Whether the target has no limitation for the fields, so the loss is a bug of this package.
    """

    fields: tuple[str, ...]
    covered: tuple[str, ...] = ()
    finding: Finding
    is_kept: bool = False
    is_fault: bool = False


def losses(table: Sequence[Limitation], run: RunConfig, lost: Mapping[str, Any]) -> Iterator[Loss]:
    """Yield findings for fields that the target's file loses, and for fields that the target implements differently.

    Args:
        table: The limitations of the target.
        lost: Lost field -> its value after writing and reading.
    """
    values, remaining = fields_of(run.with_degrees()), dict(lost)
    kept = values.keys() - lost.keys()
    for each in table:
        name = each.applies(values, remaining, kept)
        if name is not None:
            reported = [other for other in remaining if covers(each.fields, other)]
            others = reported if each.is_any else [other for other in each.fields if other in _DEFAULT_FIELDS]
            texts = dict.fromkeys(str(shown(run, other)) for other in reported) if each.is_any else ()
            found = each.finding(run, name, ", ".join(texts) or shown(run, name))
            yield Loss(
                fields=tuple(dict.fromkeys((name, *others))),
                covered=tuple(reported),
                finding=found,
                is_kept=each.is_kept,
            )
            remaining = {other: now for other, now in remaining.items() if other not in reported}
            kept -= {name}
    remaining.pop("num_ranks", None)  # set by the launcher, unless the target has a key
    for name, now in remaining.items():
        reason = f"the new text, read again, has {_value_text(name, now)} for it"
        yield Loss(fields=(name,), finding=fault(name, shown(run, name), reason), is_fault=True)


def fault(key: str, value: object, reason: str) -> Finding:
    """Return the finding for a new text that is wrong because of a bug of this package."""
    hint = "write it by hand, and please report the file as a fault of composer-fsdp2's"
    outcome = Outcome.NEEDS_DECISION
    return Finding(key=key, value=value, outcome=outcome, reason=reason, hint=hint, origin=Origin.WRITING)


def shown(run: RunConfig, name: str) -> Any:
    """Return the value of a field as shown in a report."""
    if name.startswith("mesh."):
        return run.config.mesh.text
    if name in ("wrap.kind", "wrap.classes", "wrap.min_num_params"):
        return _units(run)
    if name.startswith("wrap."):
        return ", ".join(run.wrap.others)
    return run.expert_parallel if name == "has_expert_axis" else _value_text(name, fields_of(run)[name])


def _value_text(name: str, value: Any) -> Any:
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


def _filled_template(text: str, run: RunConfig, value: object) -> str:
    # Only degrees in the text are looked up: groups of ranks have none.
    mesh = run.config.mesh
    names = r"\{(value|shard_degree|replicate_degree)\}"
    return re.sub(names, lambda name: str(value if name[1] == "value" else getattr(mesh, name[1])), text)


# Texts for None in reports.
_NONE = {
    "num_ranks": "not known",
    "max_grad_norm": "off",
    "activation_checkpointing.classes": "chosen by the model's hooks",
    "sync_module_states": "where some ranks have none",
}
# Names of fields in reports, where they differ from the last part of the field's name.
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
    """Return the name of a field as shown in a report."""
    found = next((title for each, title in _TITLES.items() if covers((each,), name)), None)
    return name.rpartition(".")[2] if found is None else found
