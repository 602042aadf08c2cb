"""torch's own objects in a configuration: strategies, meshes and policies of the installed torch."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
import torch
from support.translations import config_of, finding_of, refused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer_fsdp2 import MeshSpec, Outcome, translate
from composer_fsdp2.sharding.dtypes import mixed_precision_policy

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOAT, HALF, LOW = "float32", "float16", "bfloat16"


@pytest.fixture
def fake_ranks():
    """Four ranks, with this process as the first; nothing is sent."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("fake_ranks")
def test_a_device_mesh_says_what_the_degrees_said():
    """Composer's State replaces the degrees by the mesh that it built; the layout must not change."""
    one, two = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert config_of({"device_mesh": one}).mesh == MeshSpec.of_degrees(shard=4)
    assert config_of({"device_mesh": two}).mesh == MeshSpec.of_degrees(shard=2, replicate=2)
    assert config_of({"device_mesh": one, "sharding_strategy": "NO_SHARD"}).mesh == MeshSpec.of_degrees(
        shard=1, replicate=4
    )
    built = types.SimpleNamespace(data_parallel_replicate_degree=2, device_mesh=two)  # like Composer's State
    assert config_of(built).mesh == MeshSpec.of_degrees(shard=2, replicate=2)
    assert finding_of({"device_mesh": one}, "device_mesh").outcome is Outcome.EXACT


@pytest.mark.usefixtures("fake_ranks")
def test_a_device_mesh_that_cannot_be_used():
    """A mesh on other devices than the run's is refused; one with another order of ranks is used unchanged."""
    turned = DeviceMesh("cpu", torch.tensor([1, 0, 2, 3]))
    cubic = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert config_of({"device_mesh": turned}).mesh.is_grouped
    assert "3 axes" in refused({"device_mesh": cubic})
    assert "on cpu, but the model's device is cuda" in refused({"device_mesh": two}, device="cuda")
    assert "have the same meaning" in refused({"device_mesh": two, "data_parallel_shard_degree": 2})
    assert "world size is 8" in refused({"device_mesh": two}, world_size=8)
    assert "stopped taking lists in 0.24" in refused({"device_mesh": [2, 2]})


@pytest.mark.parametrize("key", ["mixed_precision", "mp_policy"])
def test_mixed_precision_policy_goes_through(key: str):
    """FSDP2's own policy is used unchanged: it casts at every unit, root or not, if set so."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32)
    config = config_of({key: policy}, precision="amp_fp16")
    assert mixed_precision_policy(config.mixed_precision) == policy
    assert config.mixed_precision.cast_root_inputs
    assert config.mixed_precision.buffer_dtype is None


class OwnConfig:
    """A subclass of FSDPConfig with other class defaults."""

    sharding_strategy = "FULL_SHARD"
    mp_policy = MixedPrecisionPolicy(param_dtype=F16)
    cpu_offload = True

    def __init__(self, **given: Any) -> None:
        for key, value in given.items():
            setattr(self, key, value)


def test_what_a_class_says_gives_way_to_what_is_given():
    """The class's default policy was not set by the user; offload_policy: false was, and overrides the class's
    cpu_offload."""
    assert config_of(OwnConfig(), precision="amp_bf16").mixed_precision.param_dtype == LOW
    assert config_of(OwnConfig()).cpu_offload and not config_of(OwnConfig(offload_policy=False)).cpu_offload


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("sharding_strategy", "FUL_SHARD"),
        ("mixed_precision", "PUR"),
        ("forward_prefetch_limit", 0),
        ("verbose", "no"),
        ("sharding_strategy", None),
        ("mixed_precision", None),
        ("gradient_sync", None),
        ("reshard_after_forward", "no"),
        ("data_parallel_shard_degree", None),
    ],
)
def test_a_class_that_says_something_wrong(name: str, default: object):
    """An invalid default of a configuration's class is named, too, instead of training with another value."""
    config = type("OwnConfig", (OwnConfig,), {name: default})()
    assert f"fsdp_config.{name} is {default!r}" in refused(config)


def test_a_report_has_modules_as_texts():
    """A JSON report shows an ignored ModuleList as print does, and works for one with parameters."""
    containers = [nn.Sequential(nn.Linear(2, 2)), nn.ParameterList([nn.Parameter(torch.tensor(1.0))])]
    translation = translate({"ignored_modules": containers}, device="cpu")
    told = json.loads(json.dumps(translation.to_json()))
    assert told["findings"][0]["value"] == repr(containers)
    assert told["config"]["ignored_modules"] == [repr(container) for container in containers]
