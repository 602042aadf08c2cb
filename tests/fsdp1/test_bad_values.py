"""Every key with wrong types and values: a valid result, or an error of ours that names the key."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from support.models import Chain, layer
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

from composer_fsdp2 import ComposerFSDP2Error, ShardingConfig, Translation, plan_sharding, translate
from composer_fsdp2.fsdp1.keys import KEYS, KEYS_OF_MODULES
from composer_fsdp2.fsdp1.module_settings import read_overrides

WRONG: dict[str, Any] = {
    "None": None,
    "true": True,
    "false": False,
    "0": 0,
    "1": 1,
    "-1": -1,
    "-2": -2,
    "7": 7,
    "huge": 10**40,
    "1.0": 1.0,
    "nan": math.nan,
    "inf": -math.inf,
    "complex": 1j,
    "empty string": "",
    "word": "sideways",
    "number as a string": "1",
    "true as a string": "true",
    "near miss": "FULL_SHRD",
    "another key's word": "BACKWARD_PRE",
    "local": "local",
    "zero byte": "a\0b",
    "not ASCII": "ﬀ²",
    "set of none": "set0",
    "bytes": b"FULL_SHARD",
    "empty list": [],
    "list": [1, "a", None],
    "list of ranks": [0, 0, -1],
    "nested list": [[[]]],
    "tuple": (0, 1),
    "empty dict": {},
    "dict": {"param_dtype": "sideways"},
    "dict without strings": {1: 2, None: 3},
    "dict of dicts": {"param_dtype": {"reduce_dtype": []}},
    "set": {1},
    "range": range(3),
    "generator": "a generator",  # a new one each time, see `wrong`
    "type": nn.Linear,
    "function": len,
    "object": object(),
    "date": datetime.date(2024, 1, 1),
    "decimal": decimal.Decimal(1),
    "slice": slice(1),
    "ellipsis": ...,
    "exception": ValueError("no"),
    "dtype": torch.bfloat16,
    "integer dtype": torch.int8,
    "device": torch.device("cpu"),
    "tensor": torch.ones(2),
    "scalar tensor": torch.tensor(1),
    "empty tensor": torch.empty(0),
    "array": np.ones(2),
    "numpy number": np.int64(2),
    "numpy bool": np.bool_(True),
    "module": layer(),
    "list of modules": [layer()],
    "module list": nn.ModuleList([layer()]),
    "strategy of torch": ShardingStrategy.SHARD_GRAD_OP,
    "mixed precision": MixedPrecision(),
    "policy": MixedPrecisionPolicy(),
    "integer policy": MixedPrecisionPolicy(param_dtype=torch.int8),
    "offload": CPUOffload(),
    "offload policy": CPUOffloadPolicy(),
    "omegaconf dict": OmegaConf.create({"param_dtype": "bf16"}),
    "omegaconf list": OmegaConf.create([1, 2]),
}


def wrong(case: str) -> Any:
    return (i for i in range(2)) if case == "generator" else WRONG[case]


def error_of(answer: Callable[[], Any]) -> str | None:
    """The text of our error, if there was one; other exceptions propagate."""
    try:
        answer()
    except ComposerFSDP2Error as error:
        return str(error)
    return None


def model_with(answer: Any) -> nn.Module:
    return Chain(net=Chain({"inner": answer}, inner=layer(), other=layer()))


def check_plan(model: nn.Module, config: ShardingConfig) -> None:
    plan = plan_sharding(model, config)
    json.dumps(plan.to_json())
    assert plan.explain()


def of_the_model(case: str, key: str) -> str | None:
    """A typo or a wrong type in a YAML raises our error; accepted values can be planned and reported."""
    translations: list[Translation] = []
    options = {"device": "cpu", "world_size": 2}
    text = error_of(lambda: translations.append(translate({key: wrong(case)}, **options)))
    if text is not None:
        return None if key in text else f"the error does not name the key: {text}"
    [translation] = translations
    json.dumps(translation.to_json())
    assert translation.explain()
    assert key in {finding.key for finding in translation.findings}
    error_of(lambda: check_plan(model_with(False), translation.config))
    return None


def of_one_module(case: str, key: str) -> str | None:
    """Wrong values in a wrap function's dict raise an error with the key and the module."""
    of_settings = error_of(lambda: read_overrides({key: wrong(case)}, "net.inner", config=ShardingConfig()))
    of_plan = error_of(lambda: check_plan(model_with({key: wrong(case)}), ShardingConfig()))
    assert (of_settings is None) == (of_plan is None)
    lost = [name for text in (of_settings, of_plan) if text for name in (key, "net.inner") if name not in text]
    return f"the error does not name {lost[0]}: {of_settings}" if lost else None


def of_a_wrap_function(case: str) -> str | None:
    """A wrap function that forgets its return, or returns a mask, raises an error with the module that it was called
    on."""
    text = error_of(lambda: check_plan(model_with(wrong(case)), ShardingConfig()))
    is_named = case in ("true", "false", "empty dict") or (text and "net.inner" in text)
    return None if is_named else f"the error does not name the module: {text}"


def of_translate(case: str, argument: str) -> str | None:
    """A wrong argument beside the configuration raises an error that names it."""
    options = {"device": "cpu", "world_size": 2, argument: wrong(case)}
    text = error_of(lambda: translate({}, **options).explain())
    is_named = text is None or argument in text or argument.replace("_", " ") in text
    return None if is_named else f"the error does not name {argument}: {text}"


def of_a_key(case: str) -> str | None:
    """Any value as a key."""
    try:
        hash(WRONG[case])
    except TypeError:
        return None  # cannot be a key
    texts = [
        error_of(lambda: translate({WRONG[case]: 1}, device="cpu")),
        error_of(lambda: read_overrides({WRONG[case]: 1}, "net.inner", config=ShardingConfig())),
    ]
    return None if all(texts) else f"accepted: {texts}"


CHECKS: list[tuple[Callable[..., str | None], tuple[Any, ...]]] = [
    *((of_the_model, (key.name,)) for key in KEYS),
    *((of_one_module, (key,)) for key in KEYS_OF_MODULES),
    (of_a_wrap_function, ()),
    *((of_translate, (argument,)) for argument in ("precision", "device", "world_size")),
    (of_a_key, ()),
]


@pytest.mark.parametrize(
    ("check", "arguments"), CHECKS, ids=[f"{check.__name__} {arguments}" for check, arguments in CHECKS]
)
def test_every_wrong_value(check: Callable[..., str | None], arguments: tuple[Any, ...]):
    """Wrong values raise our error with the key, not an internal traceback, and all mistakes are reported together."""
    problems = {}
    for case in WRONG:
        try:
            problems[case] = check(case, *arguments)
        except Exception as error:
            problems[case] = f"{type(error).__name__}: {error}"
    lines = [f"{case} ({WRONG[case]!r:.60}): {problem}" for case, problem in problems.items() if problem]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("part", ["param_dtype", "reduce_dtype", "buffer_dtype"])
def test_dtypes_that_nothing_trains_in(part: str, dtype: torch.dtype):
    """Integer parameters would fail in the first forward, integer gradients in the first backward: after hours in a
    queue."""
    forms: list[dict[str, Any]] = [
        {"mixed_precision": {part: dtype}},
        {"mixed_precision": MixedPrecision(**{part: dtype})},
    ]
    if part != "buffer_dtype":
        forms += [{key: MixedPrecisionPolicy(**{part: dtype})} for key in ("mp_policy", "mixed_precision")]
    accepted = []
    for written in forms:
        of_model = error_of(lambda written=written: translate(written, device="cpu"))  # type: ignore[misc]
        of_unit = error_of(lambda written=written: read_overrides(written, "net", config=ShardingConfig()))  # type: ignore[misc]
        accepted += [written for text in (of_model, of_unit) if text is None or part not in text]
    assert accepted == []
