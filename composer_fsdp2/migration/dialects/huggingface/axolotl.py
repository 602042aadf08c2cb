"""axolotl: Hugging Face's words, with an effect of axolotl's own.

What axolotl does with an ``fsdp_config``: up to 0.11 it exported the keys with the prefix ``fsdp_`` as accelerate's
environment variables; from 0.12 on it takes the prefix off, says that it is deprecated, and exports the same. So they
hold either way, where a Trainer by itself passes over them. What it exports is less than accelerate reads: no strategy,
which the words of ``fsdp`` decide, and no prefetching. It gives the section to its Trainer as well, which exports what
it reads once more. Up to 0.11 the keys went there through ``lstrip("fsdp_")``, which takes letters and not a prefix:
``backward_prefetch`` arrived, ``forward_prefetch`` and ``sync_module_states`` lost their first one and did not. From
0.12 on a schema lets no prefetching pass, and ``sync_module_states`` arrives. Under FSDP2 (``fsdp_version: 2``) axolotl
puts a function of its own in place of accelerate's, which recomputes whole layers.

Sources: axolotl 0.8 to 0.13 (``utils/trainer.py``: ``setup_fsdp_envs``, ``setup_parallelism_envs``;
``utils/schemas/fsdp.py`` and ``validation.py``; ``core/trainer_builder.py``, later ``core/builders/``;
``monkeypatch/accelerate/fsdp2.py``; ``docs/multi-gpu.qmd``), transformers 4.51.3 and accelerate 1.8.1 for the rest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import Aspect, Row
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.capabilities import Lack, lacking
from composer_fsdp2.migration.dialect import (
    MappingEdit,
    Question,
    Reading,
    Section,
    Setting,
    implicit,
)
from composer_fsdp2.migration.dialects.fingerprints import is_axolotl
from composer_fsdp2.migration.dialects.huggingface.accelerate_words import (
    DTYPES,
    OF_FSDP1,
    OF_OTHERS,
    STATE_DICTS,
    STORED_AS_CREATED,
    WORDS_BY_PRECISION,
    degrees_of,
    precision_differences,
    wrap_settings,
)
from composer_fsdp2.migration.dialects.huggingface.held import GivenKey, Held
from composer_fsdp2.migration.dialects.huggingface.held_findings import as_own, keeps_own_values
from composer_fsdp2.migration.dialects.huggingface.huggingface import HuggingFaceDialect
from composer_fsdp2.migration.dialects.huggingface.places import BESIDE, DEGREES_PREFIX, PREFIX, SETTINGS
from composer_fsdp2.migration.dialects.huggingface.readers import NOBODY, X1, X2, reads
from composer_fsdp2.migration.dialects.huggingface.reading import held_by
from composer_fsdp2.migration.dialects.huggingface.rewriting import GONE, Replacements, edit_in_place
from composer_fsdp2.migration.dialects.huggingface.table import OF_AXOLOTL, ROWS
from composer_fsdp2.migration.paths import Path, merged, nested
from composer_fsdp2.migration.run import RunConfig

# What axolotl takes and passes on to nobody, or in some releases only.
_NOT_PASSED_ON = ("sharding_strategy", "forward_prefetch", "sync_module_states")
_EXACT, _APPROXIMATE, _UNNEEDED, _UNSUPPORTED, _NEEDS_DECISION = Outcome
# What accelerate's files cannot say, and axolotl's can; or what it does otherwise.
_SAYS = frozenset(
    (
        "activation_checkpointing",
        "activation offloading",
        "gradient clipping",
        "model only",
        "compile",
        "expert parallelism",
        "number of ranks",
        "further units",
        "dtype of stored parameters",
        "tiled MLP",
    )
)

# fmt: off
_LACKS: tuple[Lack, ...] = (
    *(lack for lack in (*OF_FSDP1, *OF_OTHERS) if lack.asked not in _SAYS),
    STORED_AS_CREATED,
    Lack(asked="dtype of stored parameters", outcome=_NEEDS_DECISION,
        when=lambda run: run.precision != "fp32" and run.stored_dtype != _loaded_in(run),
        reason="axolotl's FSDP2 stores trained parameters, and the optimizer's state, in the low dtype that it loads "
        "the model in, and the run stores them in {value}: FSDP1 and accelerate upcast them to float32",
        hint="--to accelerate keeps float32, as fsdp_version: 1 does; --force writes it, to train in the low dtype"),
    Lack(asked="gradient clipping", when=lambda run: run.max_grad_norm is not None and not run.max_grad_norm > 0,
        outcome=_NEEDS_DECISION, target="max_grad_norm",
        reason="axolotl clips nothing at a norm of {value}, with which the run trains nothing, or in the wrong "
        "direction", hint="set a positive norm, or 0 to clip nothing"),
    Lack(asked="classes of tiled MLPs", outcome=_APPROXIMATE, target="tiled_mlp",
        reason="axolotl tiles the MLPs of the model that it loads, and takes no classes: the same numbers"),
    Lack(asked="further units", outcome=_APPROXIMATE,
        reason="axolotl has no word for {value}, which become parts of the root's unit",
        hint="add their classes to transformer_layer_cls_to_wrap"),
    Lack(asked="mesh", when=lambda run: run.config.mesh.is_grouped, outcome=_UNSUPPORTED,
        reason="axolotl shards over all ranks, or replicas of them"),
    Lack(asked="mesh", when=lambda run: not run.config.mesh.is_grouped and run.config.mesh.shard_degree == 1,
        outcome=_UNSUPPORTED, reason="axolotl's FSDP2 has no run without shards (NO_SHARD)",
        hint="leave fsdp_config out, which is DDP"),
    Lack(asked="mesh", when=lambda run: _is_open(run), outcome=_NEEDS_DECISION, target="dp_shard_size",
        reason="axolotl takes all sizes of a mesh with replicas, and the number of ranks is not known here",
        hint="dp_shard_size: GPUs of a replica, dp_replicate_size: number of replicas"),
    Lack(asked="activation offloading", when=lambda run: not run.config.activation_checkpointing.checkpoint,
        outcome=_APPROXIMATE, target="activation_offloading",
        reason="axolotl offloads what recomputation starts from, and recomputes: the same numbers, more computation"),
    Lack(asked="reentrant checkpointing", outcome=_APPROXIMATE, target="activation_checkpointing",
        reason="axolotl's FSDP2 recomputes without reentering: the same numbers"),
    Lack(asked="mesh", when=lambda run: _is_for_so_many_ranks(run), outcome=_APPROXIMATE, target="num_processes",
        reason="axolotl shards over as many ranks as it is launched with", hint="launch {shard_degree}"),
)
# fmt: on


def _loaded_in(run: RunConfig) -> str | None:
    """The dtype that axolotl loads a model in."""
    return DTYPES[WORDS_BY_PRECISION[run.precision]]


def _is_open(run: RunConfig) -> bool:
    """Whether there are replicas, or another axis, and no number of ranks to count them by."""
    mesh = run.config.mesh
    has_axes = mesh.has_replicas or max(run.tensor_parallel, run.context_parallel, run.expert_parallel) > 1
    return not mesh.is_grouped and has_axes and mesh.shard_degree != 1 and mesh.shape != (1, -1) and not degrees_of(run)


def _is_for_so_many_ranks(run: RunConfig) -> bool:
    """Whether it shards over all ranks of a number that no word of axolotl's holds it to."""
    mesh = run.config.mesh
    is_counted = not mesh.is_grouped and mesh.shard_degree > 1 and run.num_ranks is None
    return is_counted and not _is_open(run) and not degrees_of(run)


class AxolotlDialect(HuggingFaceDialect):
    """Files of axolotl's, each with one section; its FSDP2 words have no prefix."""

    name = target = title = "axolotl"
    rows = tuple(row for row in ROWS if reads(X1, row) or reads(X2, row) or row.name in _NOT_PASSED_ON)
    lacks = _LACKS
    readers = (X1, X2)
    silent = (
        Section.at((), {"base_model": "m", "micro_batch_size": 1, "fsdp": ["full_shard"], "bf16": "auto"}),
        Section.at((), {"base_model": "m", "micro_batch_size": 1, "fsdp_config": {"state_dict_type": None}}),
    )

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """The whole file; one that leaves ``fsdp`` and ``fsdp_config`` empty is not sharded."""
        return path if is_axolotl(values) and (values.get("fsdp") or values.get("fsdp_config")) else None

    def held(self, section: Section) -> Held:
        return held_by(section.given, X2 if _version(section.given) == "2" else X1)

    def read(self, section: Section) -> Reading:
        reading = super().read(section)
        findings = (*reading.findings, *_of_the_model(section.given))
        return replace(reading, findings=findings)

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        sizes = {name.removeprefix(DEGREES_PREFIX): size for name, size in degrees_of(run).items()}
        clips = 0.0 if run.max_grad_norm is None else run.max_grad_norm  # without the key a Trainer clips to 1
        for aspect, key, value, is_needed in (
            (Aspect.OTHER, "fsdp_version", 2, True),
            (Aspect.RESHARD, "fsdp_config", _settings_of(run), True),
            *((Aspect.PRECISION, word, True, run.precision == name) for name, word in _PRECISIONS.items()),
            *((Aspect.MESH, _SIZES.get(name, name), size, size > 1) for name, size in sizes.items()),
            (Aspect.MESH, "expert_parallel_size", run.expert_parallel, run.expert_parallel > 1),
            (Aspect.CHECKPOINTING, "activation_offloading", True, run.config.activation_checkpointing.cpu_offload),
            (Aspect.OTHER, "max_grad_norm", clips, clips != 1.0),
            (Aspect.OTHER, "save_only_model", True, run.save_only_model),
            (Aspect.OTHER, "torch_compile", True, run.compile),
            (Aspect.TILING, "tiled_mlp", True, run.mlp_chunks is not None),
            (Aspect.TILING, "tiled_mlp_num_shards", run.mlp_chunks, run.mlp_chunks is not None),
        ):
            if is_needed:
                yield Setting(aspect=aspect, key=key, value=value)

    def differences(self, run: RunConfig) -> Iterator[Finding]:
        yield from lacking(self.lacks, run)
        yield from precision_differences(run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """FSDP2's words for FSDP1's, without the prefix, as axolotl's page on several GPUs has them."""
        held: Held = reading.details
        keeps_all = held.settings["sharding_strategy"] is ShardingStrategy.NO_SHARD
        if reading.run is None or keeps_all or held.reader is X2:
            return []
        old = [name for name in ("fsdp_version", "fsdp", "fsdp_config") if name in section.given]
        beside: Replacements = {name: [] for name in old if name != "fsdp_config"}
        if not any(map(_stays, held.given)):
            beside |= {name: [] for name in old}
            beside[old[0]] = [("fsdp_version", 2), ("fsdp_config", _new_settings(held))]
            return [MappingEdit(path=section.path, replacements=beside)]
        first = "base_model" if "base_model" in section.given else str(next(iter(section.given)))
        place = first if old[0] == "fsdp_config" else old[0]
        kept = [(place, section.given[place])] if place == first else []  # its comment stands behind it
        beside[place] = [("fsdp_version", 2), *kept]
        return [MappingEdit(path=section.path, replacements=beside), _settings_edit(section, held)]

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """The reading's, and what axolotl's FSDP2 has no word for or does otherwise than its FSDP1."""
        findings = tuple(map(as_own, (each for each in reading.findings if each.key != _TRAINED)))  # a key that stays
        if reading.run is None or reading.details.reader is X2:
            return findings
        return (*findings, *self.differences(reading.run), *keeps_own_values(reading.details))

    def places(self, row: Row) -> tuple[str, ...]:
        beside = tuple(name for name, each in OF_AXOLOTL.items() if each is row)
        if row.group == BESIDE:
            return (row.name,)
        inner = tuple(prefix + row.name for prefix in ("fsdp_config.", f"fsdp_config.{PREFIX}"))
        return beside + (inner if row.group == SETTINGS else ())

    def aliases(self, row: Row) -> tuple[str, ...]:
        return tuple(name for name, each in OF_AXOLOTL.items() if each is row and name != row.name)

    def read_by(self, row: Row) -> tuple[str, ...]:
        return tuple(reader.value for reader in self.readers if reads(reader, row)) or (NOBODY,)

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        place = self.places(row)[0]
        by_version = (X2 if str(value) == "2" else X1,)  # the key itself says whose file it is
        for reader in by_version if row.name == "version" else self.readers:
            base: dict[str, Any] = {"base_model": "m", "micro_batch_size": 1, "fsdp_version": 1 if reader is X1 else 2}
            base |= {"fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
            values = merged(merged(base, _COMPANIONS.get(row.name, {})), nested(place, value))
            if reads(reader, row) or self.read_by(row) == (NOBODY,):
                yield Question(section=Section.at((), values), key=place, reader=reader.value)


_TRAINED = "trained parameters"
# What must stand beside a key for axolotl to look at it.
_COMPANIONS: dict[str, dict[str, Any]] = {
    "min_num_params": {"fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}},
    "auto_wrap_policy": {"fsdp_config": {"min_num_params": 1}},
    "cpu_offload_pin_memory": {"fsdp_config": {"offload_params": True}},
}
# Composer's precisions, by the key that is true for them; fp32 has none.
_PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "amp_fp8": "fp8"}
_SIZES = {"tp_size": "tensor_parallel_size", "cp_size": "context_parallel_size"}


def _version(values: Mapping[str, Any]) -> str:
    settings = values.get("fsdp_config")
    inner = settings if isinstance(settings, Mapping) else {}
    versions = (values.get("fsdp_version"), inner.get("fsdp_version"), inner.get("version"))
    return str(next((version for version in versions if version), 1))


def _settings_of(run: RunConfig) -> dict[str, Any]:
    checkpointing = run.config.activation_checkpointing
    wrap = {name.removeprefix(PREFIX): value for name, value in wrap_settings(run.wrap).items()}
    if wrap["auto_wrap_policy"] == "NO_WRAP":  # axolotl's schema has no such word
        del wrap["auto_wrap_policy"]
    recomputing = (
        {"activation_checkpointing": True} if checkpointing.checkpoint and not checkpointing.cpu_offload else {}
    )
    return {
        "reshard_after_forward": run.config.reshard_after_forward is not False,
        **wrap,
        "offload_params": run.config.cpu_offload,
        "state_dict_type": STATE_DICTS[run.state_dict_type],
        "cpu_ram_efficient_loading": run.config.sync_module_states is not False,
        **recomputing,
    }


def _of_the_model(values: Mapping[str, Any]) -> Iterator[Finding]:
    """What of the model a fully_shard of its own must know, and no fsdp_config says."""
    if values.get("unfrozen_parameters"):
        yield implicit(
            _TRAINED,
            Outcome.NEEDS_DECISION,
            "axolotl trains only those whose names match these patterns, and freezes all others",
            "freeze takes prefixes of the names that are not trained; say them there, or in the model's code",
            value=values["unfrozen_parameters"],
        )
    if values.get("adapter"):
        yield implicit(
            "adapter",
            Outcome.EXACT,
            "adapters are made where the model is made; frozen and trained parameters of one dtype share a unit",
            "LLM Foundry's models take a peft_config",
            value=values["adapter"],
            target="the model's code",
        )


def _stays(each: GivenKey) -> bool:
    gone = (*GONE, "version")
    return each.key.startswith("fsdp_config.") and each.row is not None and each.is_read and each.row.name not in gone


def _new_settings(held: Held) -> dict[str, Any]:
    """What FSDP1's words said elsewhere, or FSDP2 would do otherwise by itself."""
    new: dict[str, Any] = {"reshard_after_forward": held.settings["reshard_after_forward"]}
    if held.key_of("state_dict_type") is None:
        new["state_dict_type"] = STATE_DICTS[held.settings["state_dict_type"]]
    if held.key_of("offload_params") is None and held.settings["offload_params"]:
        new["offload_params"] = True
    if held.key_of("auto_wrap_policy") is None and held.settings["auto_wrap_policy"] != "NO_WRAP":
        new["auto_wrap_policy"] = held.settings["auto_wrap_policy"]
    return new


def _settings_edit(section: Section, held: Held) -> MappingEdit:
    """In place: what stays loses its prefix, what FSDP2 has no use for goes."""
    replacements: Replacements = {}
    for each in held.given:
        where, _, key = each.key.partition(".")
        if where != "fsdp_config" or key not in section.given["fsdp_config"]:
            continue  # no setting, or a number, which stays where it is
        plain = key.removeprefix(PREFIX)
        if not _stays(each):
            replacements[key] = []
        elif plain != key:
            replacements[key] = [(plain, each.value)]
    new = list(_new_settings(held).items())
    return edit_in_place(section, replacements, new, places=("sharding_strategy",))
