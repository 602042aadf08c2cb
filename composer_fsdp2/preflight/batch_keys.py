"""The keys with which other systems set batch, sequence length and optimizer, and their defaults."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.text import short
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.paths import Path, find_at
from composer_fsdp2.preflight.preflight_run import OptimizerChoice
from composer_fsdp2.preflight.run_file import assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchKeys:
    """The keys of one system.

    Of several, the first one set applies, searched from the sharding section to the top of the file.

    Args:
        microbatch, accumulation, rank_batch, global_batch, sequence, optimizer: Dotted keys. ``rank_batch`` is the
            number of rows of a rank per step, an alternative to ``accumulation``.
        defaults: The defaults of the system, by field of this class or optimizer option.
        options: torch's name of an optimizer option -> the system's key; ``implementation`` is TorchTitan's key for
            ``fused`` and ``foreach``.
    """

    microbatch: tuple[str, ...]
    accumulation: tuple[str, ...] = ()
    rank_batch: tuple[str, ...] = ()
    global_batch: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    defaults: Mapping[str, Any]
    options: Mapping[str, str]


_LENGTHS = ("max_seq_length", "max_length", "sequence_length", "max_seq_len", "cutoff_len", "model_max_length")
_ADAM = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
_OPTIONS = ("lr", "weight_decay", "eps", "betas", "momentum", "nesterov", "amsgrad", "foreach", "fused")
_OF_COMPOSER = "device_train_microbatch_size"
_TRAINER = BatchKeys(
    microbatch=("per_device_train_batch_size",),
    accumulation=("gradient_accumulation_steps",),
    sequence=_LENGTHS,
    optimizer=("optim",),
    defaults={"microbatch": 8, "accumulation": 1, "optimizer": "adamw_torch"},
    options=_ADAM,
)
BATCH_KEYS: Mapping[str, BatchKeys] = {
    # A migrated file still contains the original system's keys next to the migrated section.
    "composer": BatchKeys(
        microbatch=(
            _OF_COMPOSER,
            "per_device_train_batch_size",
            "training_args.per_device_train_batch_size",
            "micro_batch_size",
        ),
        accumulation=("gradient_accumulation_steps", "training_args.gradient_accumulation_steps"),
        global_batch=("global_train_batch_size", "train_batch_size"),
        sequence=("max_seq_len", *_LENGTHS, "sequence_len"),
        optimizer=("optimizer.name", "optim"),
        defaults={},
        options={name: f"optimizer.{name}" for name in _OPTIONS},
    ),
    "huggingface": _TRAINER,
    "axolotl": BatchKeys(
        microbatch=("micro_batch_size",),
        accumulation=("gradient_accumulation_steps",),
        rank_batch=("batch_size",),
        sequence=("sequence_len",),
        optimizer=("optimizer",),
        defaults={"microbatch": 1, "accumulation": 1, "optimizer": "adamw_torch", "sequence": 2048},
        options=_ADAM,
    ),
    "roll": BatchKeys(
        microbatch=("training_args.per_device_train_batch_size",),
        accumulation=("training_args.gradient_accumulation_steps",),
        sequence=("sequence_length",),
        defaults={"microbatch": 8, "accumulation": 1, "optimizer": "adamw_torch"},
        options={name: f"training_args.{key}" for name, key in _ADAM.items()},
    ),
    "torchtitan": BatchKeys(
        microbatch=("training.local_batch_size", "training.batch_size"),
        global_batch=("training.global_batch_size",),
        sequence=("training.seq_len",),
        optimizer=("optimizer.name",),
        defaults={"microbatch": 8, "sequence": 2048, "optimizer": "AdamW", "implementation": "fused"},
        options={name: f"optimizer.{name}" for name in ("lr", "weight_decay", "eps", "fused", "implementation")},
    ),
}
_OPTIMIZERS = {"adamw_torch": "AdamW", "adamw_hf": "AdamW", "sgd": "SGD"}
_USUAL = {"microbatch": 1, "accumulation": 1, "sequence": 2048, "optimizer": "AdamW"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A rank's microbatches and optimizer, with findings for assumed values."""

    microbatch: int
    num_microbatches: int
    sequence: int
    optimizer: OptimizerChoice
    findings: tuple[Finding, ...]


def read_batches(
    dialect: str,
    section: Section,
    *,
    num_data_ranks: int,
    microbatch: int | None,
    sequence: int | None,
    longest: int | None = None,
) -> Batches:
    """Read a rank's microbatches and the optimizer from a file.

    Args:
        num_data_ranks: The number of ranks that read different batches.
        microbatch, sequence: Values of the command line, which override the file.
        longest: The model's maximum sequence length in tokens.
    Raises:
        ConfigError: a value is not a positive integer, or the global batch is not divisible by ``num_data_ranks``.
    """
    known, findings = BATCH_KEYS[dialect], list[Finding]()

    def number(field: str, given: int | None = None) -> Any:
        path, value = _first(section, getattr(known, field)) if given is None else ((), given)
        key = ".".join(map(str, path))
        if value == "auto":
            value = None
        if value is None:
            key = (*getattr(known, field), field)[0]
            value = known.defaults.get(field, _USUAL[field])
            value = min(value, longest) if field == "sequence" and longest else value
            why = "the system's own default" if field in known.defaults else "assumed"
            option = {"microbatch": "give --microbatch", "sequence": "give --sequence"}.get(field, "")
            findings.append(assumed(key, value, f"no key of the file sets it; {why}", option))
        return value if field == "optimizer" else _positive_int(key, value)

    rows, tokens = number("microbatch", microbatch), number("sequence", _lengths(section, sequence))
    path, batch = _first(section, known.global_batch)
    of_rank, rank_batch = _first(section, known.rank_batch)
    key = ".".join(map(str, path))
    if batch not in (None, "auto", -1):  # -1 is TorchTitan's default: all ranks' microbatches, without accumulation
        batch = _positive_int(key, batch)
        if batch % num_data_ranks:
            raise ConfigError(
                f"{key} {batch} is not a multiple of the {num_data_ranks} ranks that read batches of their own"
            )
        rank_rows = batch // num_data_ranks
        rows = min(rows, rank_rows)
        count = -(-rank_rows // rows)
    elif of_rank:
        count = max(_positive_int(str(of_rank[-1]), rank_batch) // rows, 1)
    else:
        count = number("accumulation") if known.accumulation else 1
    name = str(number("optimizer"))
    found = {own: _first(section, [key])[1] for own, key in known.options.items()}
    options = {own: known.defaults.get(own) if value is None else value for own, value in found.items()}
    return Batches(
        microbatch=rows,
        num_microbatches=count,
        sequence=tokens,
        optimizer=OptimizerChoice(
            name=_OPTIMIZERS.get(name, name),
            options={own: value for own, value in options.items() if value is not None},
        ),
        findings=tuple(findings),
    )


def _positive_int(key: str, value: Any) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and value >= 1 and value % 1 == 0):  # also False for NaN and infinity
        raise ConfigError(f"{key} is {short(value)}; give a whole number above 0")
    return int(value)


def _lengths(section: Section, given: int | None) -> int | None:
    """ROLL's sequence length is that of the prompt plus the response."""
    parts = [_first(section, [name])[1] for name in ("prompt_length", "response_length")]
    return sum(parts) if given is None and all(isinstance(each, int) for each in parts) else given


def batch_keys(dialect: str, section: Section, *, rows: int, number: int, global_rows: int) -> dict[Path, Any]:
    """Return the keys to write for a microbatch size, by path, so the global batch does not change.

    Empty if the file has no key for the batch.

    Args:
        rows: Rows of one microbatch.
        number: Microbatches per batch of a rank.
        global_rows: Rows of the global batch.
    """
    known = BATCH_KEYS[dialect]
    if dialect == "torchtitan":  # without global_batch_size, a rank's batch would be one microbatch
        keys = {"batch_size": None, "local_batch_size": rows, "global_batch_size": global_rows}
        return {("training", key): value for key, value in keys.items()}
    path, _ = _first(section, (*known.microbatch, *known.global_batch))
    if not path:
        return {}
    *above, key = path
    if key == _OF_COMPOSER or key in known.global_batch:
        return {(*above, _OF_COMPOSER): rows}
    of_rank, _ = _first(section, known.rank_batch)  # axolotl rejects both of rank_batch and accumulation
    return {path: rows, (*above, "gradient_accumulation_steps"): number, **({of_rank: None} if of_rank else {})}


def _first(section: Section, names: Iterable[str]) -> tuple[Path, Any]:
    """Return the path and value of the first key in ``names`` that is set, or () and None.

    Each name is searched from the sharding section to the top of the file.
    """
    depths = range(len(section.path), -1, -1)
    paths = ((*section.path[:depth], *name.split(".")) for name in names for depth in depths)
    path = next((each for each in paths if find_at(section.around, each) is not None), ())
    return path, find_at(section.around, path) if path else None
