"""What a worker's part of a file says, by the names of the table."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.rows import Row
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects.roll.roll_words import dtype_of
from composer_fsdp2.migration.paths import value_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What one worker's part of the file says, by the names of the table.

    Args:
        num_ranks: None if device_mapping does not tell.
        top: The whole file, for what holds for all workers.
        rows: The table, by name: with what holds where the file says nothing.
    """

    given: Mapping[str, Any]
    num_ranks: int | None
    top: Mapping[str, Any]
    rows: Mapping[str, Row]

    @classmethod
    def of(cls, section: Section, rows: Mapping[str, Row]) -> "Worker":
        has_worker = "strategy_args" in section.path
        around = value_at(section.around, section.path[: section.path.index("strategy_args")]) if has_worker else {}
        given = dict(_flat(section.given, ("wrap_policy",)))
        if section.path[-1:] == ("strategy_args",):  # there is no strategy_config, or it is null
            given = {"strategy_name": section.given["strategy_name"]}
        elif (strategy := around.get("strategy_args")) is not None:
            given = {"strategy_name": strategy.get("strategy_name")} | given
        model = around.get("model_args")
        beside = (("strategy_config", section.given.get("strategy_config")), ("model_args", model))
        given |= {name: value for name, value in beside if value is not None and not isinstance(value, Mapping)}
        for name, value in model.items() if isinstance(model, Mapping) else ():
            if f"model_args.{name}" in rows:
                given[f"model_args.{name}"] = value
        if "device_mapping" in around:
            given["device_mapping"] = around["device_mapping"]
        return cls(given=given, num_ranks=_count(around.get("device_mapping")), top=section.around, rows=rows)

    @property
    def misshapen(self) -> tuple[str, ...]:
        """What must be a mapping, and is none."""
        names = ("strategy_config", "model_args")
        return tuple(name for name in names if not isinstance(self.given.get(name, {}), Mapping))

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.rows[name].default)

    @property
    def is_training(self) -> bool:
        return bool(self["strategy_name"] != "fsdp2_infer")

    @property
    def wraps_experts(self) -> bool:
        return self["apply_expert_patch"] is True or self["ep_size"] != 1

    def is_on(self, name: str) -> bool:
        row = self.rows[name]
        return not row.is_neutral(self[name])


def frozen_in(worker: Worker) -> list[str]:
    """The prefixes as ROLL compares them with names of parameters: a list, or a text divided at commas."""
    given = worker["model_args.freeze_module_prefix"]
    return [str(each) for each in given] if isinstance(given, list) else str(given or "").split(",")


def reduced_in(worker: Worker) -> str:
    return dtype_of(worker.given.get("reduce_dtype"), "float32" if worker["enable_mix_precision"] else "bfloat16")


def _flat(given: Mapping[str, Any], nested: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        if key in nested and isinstance(value, Mapping) and value:
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield str(key), value


def _count(devices: Any) -> int | None:
    """How many devices: ROLL evaluates the string; here lists, ranges and their sums are understood."""
    if isinstance(devices, str):
        try:
            return len(_listed(ast.parse(devices.strip(), mode="eval").body))
        except (SyntaxError, ValueError, TypeError, MemoryError):
            return None
    return len(devices) if isinstance(devices, list) else None


def _listed(node: ast.expr) -> Sequence[Any]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "list" and len(node.args) == 1:
            return _listed(node.args[0])
        if node.func.id == "range":
            return range(*(ast.literal_eval(argument) for argument in node.args))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_listed(node.left), *_listed(node.right)]
    value = ast.literal_eval(node)
    if not isinstance(value, list | tuple):
        raise ValueError("no list")
    return value
