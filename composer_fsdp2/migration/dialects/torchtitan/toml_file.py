"""What a file says, by table and name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.rows import Row
from composer_fsdp2.config.text import nearest_names
from composer_fsdp2.migration.dialect import Section

TABLES = ("parallelism", "training", "activation_checkpoint", "checkpoint", "compile")
# Keys of the five tables that have to do with neither sharding nor memory, in any release up to v0.2.2.
OTHERS = frozenset(
    f"{table}.{name}"
    for table, names in {
        "training": "dataset dataset_path local_batch_size global_batch_size batch_size seq_len steps gc_freq gc_debug "
        "seed deterministic debug_moe_force_load_balance dataloader warmup_steps",
        "checkpoint": "folder interval interval_type initial_load_path initial_load_in_hf "
        "initial_load_in_hf_quantized load_step exclude_from_loading enable_first_step_checkpoint load_only "
        "create_seed_checkpoint enable_ft_dataloader_checkpoints",
    }.items()
    for name in names.split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """What a file says, by table and name.

    Args:
        own: The table that is the section; its keys are named without it in the report.
        model: The name of the model, which has its own units.
        extension: A module with keys of its own; "" if the file names none.
        known: The rows of the table, by their names and aliases.
    """

    given: Mapping[str, Any]
    own: str
    model: str
    extension: str
    known: Mapping[str, Row]

    @classmethod
    def of(cls, section: Section, known: Mapping[str, Row]) -> File:
        own = ".".join(map(str, section.path))
        given = {f"{own}.{key}": value for key, value in section.given.items()}
        for name in known:
            table, _, key = name.rpartition(".")
            others = at(section.around, table)
            if table != own and isinstance(others, Mapping) and key in others:
                given[name] = others[key]
        for table in TABLES:  # misspelt keys of the other tables; their other keys have nothing to do with sharding
            others = section.around.get(table)
            if others is not None and not isinstance(others, Mapping):
                given[table] = others
            for key, value in others.items() if table != own and isinstance(others, Mapping) else ():
                name = f"{table}.{key}"
                if name not in given and name not in OTHERS and nearest_names(name, known, 1, likeness=0.85):
                    given[name] = value
        extensions = ("job.custom_config_module", "experimental.custom_args_module")
        return cls(
            given=given,
            own=own,
            model=str(at(section.around, "model.name") or ""),
            extension=next((str(name) for key in extensions if (name := at(section.around, key))), ""),
            known=known,
        )

    def __getitem__(self, name: str) -> Any:
        row = self.known[name]
        return next((self.given[each] for each in (name, *row.aliases) if each in self.given), row.default)

    def rows(self) -> Iterator[tuple[str, Row]]:
        yield from ((key, self.known[key]) for key in self.given if key in self.known)

    def is_on(self, condition: str) -> bool:
        name, _, values = condition.partition(" = ")
        return self[name] in values.split(" or ") if values else not self.known[name].is_neutral(self[name])

    @property
    def has_fp8_layers(self) -> bool:
        """Whether a converter makes layers of float8 or MX."""
        names = self["model.converters"]
        names = [names] if isinstance(names, str) else names
        return self["float8.enable_float8_linear"] or any("float8" in name or "mx" in name for name in names)

    def is_read(self, row: Row) -> bool:
        return not row.only_with or self.is_on(row.only_with)

    def short(self, name: str) -> str:
        return name.removeprefix(f"{self.own}.")


def at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values
