"""The table of keys compared with the installed Composer: a new release fails here, with the name of the file to
change.

The tests import Composer when they run, because an import at module level would take seconds at collection in each
lane.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from composer_fsdp2 import Outcome, ShardingConfig, translate
from composer_fsdp2.fsdp1.keys import KEYS, KEYS_BY_NAME, KeyGroup
from composer_fsdp2.fsdp1.parsing import DTYPES, PRECISIONS
from composer_fsdp2.sharding.dtypes import torch_dtype

if TYPE_CHECKING:
    from composer.utils import FSDP2Config

pytestmark = pytest.mark.composer

MEND = "composer_fsdp2/fsdp1/keys.py no longer matches the installed Composer"


def fields_of(config_class: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(config_class) if field.name[0] != "_"}


def fsdp2_config(**written: Any) -> FSDP2Config:
    from composer.utils import FSDP2Config

    with warnings.catch_warnings():  # it calls itself experimental on every construction
        warnings.simplefilter("ignore", UserWarning)
        return FSDP2Config(**written)


def config_of(fsdp_config: object, **options: Any) -> ShardingConfig:
    from composer.devices import DeviceCPU

    config = translate(fsdp_config, **{"device": DeviceCPU(), "world_size": 4, **options}).config
    assert config is not None
    return config


# --- the table


def test_every_field_of_fsdp_config_has_its_row():
    """A key of a new Composer release is neither refused as unknown nor translated with another default."""
    from composer.utils import FSDPConfig

    rows = {key.name: key.default for key in KEYS if key.group == KeyGroup.FSDP1}
    assert rows == fields_of(FSDPConfig), MEND


def test_every_field_of_fsdp2_config_has_its_row():
    """A configuration written for Composer's own FSDP2 is read completely."""
    from composer.utils import FSDP2Config

    fields = fields_of(FSDP2Config)
    assert set(fields) <= set(KEYS_BY_NAME), MEND
    own = {key.name: key.default for key in KEYS if key.group == KeyGroup.FSDP2 and key.name in fields}
    assert own == {"reshard_after_forward": fields["reshard_after_forward"], "device_mesh": fields["device_mesh"]}, MEND
    differing = {name for name, default in fields.items() if KEYS_BY_NAME[name].default != default}
    assert differing == {"state_dict_type"}, MEND
    # Its properties for compatibility with FSDP1 are read under the same names.
    properties = {name for name, _ in inspect.getmembers(FSDP2Config, lambda member: isinstance(member, property))}
    assert properties <= set(KEYS_BY_NAME), MEND


def test_every_precision_is_known():
    """A new precision of Composer fails here and not in a user's run."""
    from composer.core import Precision

    assert set(PRECISIONS) == {precision.value for precision in Precision}, (
        "PRECISIONS in composer_fsdp2/fsdp1/parsing.py no longer matches composer.core.Precision"
    )


@pytest.mark.filterwarnings("ignore:We use torch.bfloat16 by default for amp_fp8")
def test_every_spelling_of_a_dtype_means_the_same():
    """A dict of dtypes trains in the dtypes of Composer's own function."""
    from composer.distributed.mosaic_parallelism import _get_torch_dtype

    assert {name: torch_dtype(dtype) for name, dtype in DTYPES.items()} == {n: _get_torch_dtype(n) for n in DTYPES}


@pytest.mark.filterwarnings("ignore:We use torch.bfloat16 by default for amp_fp8")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_mixed_precision_is_composers(precision: str):
    """The dtypes of each precision are compared with Composer's; the Trainer's Precision and its string are equal."""
    from composer.core import Precision
    from composer.distributed.mosaic_parallelism import get_mixed_precision
    from composer.utils import FSDPConfig

    for written in ("FULL", "DEFAULT", "PURE", "pure", {"param_dtype": "bf16"}, {"buffer_dtype": "half"}):
        _, *expected = get_mixed_precision(Precision(precision), written)
        found = config_of(FSDPConfig(mixed_precision=written), precision=Precision(precision)).mixed_precision
        dtypes = (found.param_dtype, found.reduce_dtype, found.buffer_dtype)
        assert [torch_dtype(dtype) for dtype in dtypes] == expected, written
    assert config_of({}, precision=Precision(precision)) == config_of({}, precision=precision)


# --- real objects


def keys_given(fsdp_config: object) -> list[str]:
    return [finding.key for finding in translate(fsdp_config, device="cpu").findings]


def test_only_what_a_user_set_is_reported():
    """An FSDPConfig() is an empty section; Composer's defaults for FSDP2 are not reported as set by the user."""
    from composer.utils import FSDPConfig

    assert keys_given(FSDPConfig()) == keys_given(fsdp2_config()) == []
    assert config_of(FSDPConfig()) == config_of({})
    config = config_of(fsdp2_config())
    assert config.reshard_after_forward is True
    assert config.mixed_precision.param_dtype == "float32"
    written = {"reshard_after_forward": False, "activation_checkpointing": True, "mixed_precision": "FULL"}
    assert keys_given(fsdp2_config(**written)) == list(written)
    said = config_of(fsdp2_config(**written), precision="amp_bf16")
    assert (said.reshard_after_forward, said.mixed_precision.param_dtype) == (False, None)
    assert said.activation_checkpointing.checkpoint


GIVEN: dict[str, Any] = {
    "sharding_strategy": "SHARD_GRAD_OP",
    "mixed_precision": "PURE",
    "activation_checkpointing": True,
    "activation_checkpointing_reentrant": False,
    "sync_module_states": True,
    "data_parallel_replicate_degree": 2,
    "forward_prefetch": True,
    "state_dict_type": "sharded",
    "min_params": 1e9,
}


def test_an_object_says_what_a_mapping_says():
    """FSDPConfig(**section) and the section itself are translated alike, legacy keys included."""
    from composer.core import Precision
    from composer.devices import DeviceCPU
    from composer.utils import FSDPConfig

    by_object = translate(FSDPConfig(**GIVEN), device=DeviceCPU(), precision=Precision.AMP_BF16, world_size=4)
    by_mapping = translate(GIVEN, device="cpu", precision="amp_bf16", world_size=4)
    assert by_object == by_mapping
    assert by_object.config is not None
    assert by_object.config.mesh.shape == (2, 2)
    assert by_object.config.mixed_precision.reduce_dtype == "bfloat16"
    assert {f.key: f.outcome for f in by_object.findings}["min_params"] is Outcome.UNNEEDED
