"""Tensor parallelism through the real Trainer: ``parallelism_config.tp`` as Composer has it, on FSDP2."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from support.cases import for_each
from support.checkpoints.corruptions import flip
from support.commands import run_forked
from support.comparing import assert_same as assert_same_values
from support.comparing import full_parameters
from support.language import layer_plan, sequence_plan
from support.language_trainer import Run, composer_model, grouped, train
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.saved import read
from support.trainers import largest_difference, on_gpu, optimizer_state
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

from composer_fsdp2 import ComposerFSDP2Error, load_checkpoint

pytestmark = pytest.mark.composer

FULL = {"mixed_precision": "FULL"}
TENSOR = 2


def split(config: dict[str, Any] | None = None, plan: Any = layer_plan, degree: int = TENSOR) -> dict[str, Any]:
    from composer.utils import TPConfig

    tensor: Any = {"tensor_parallel_degree": degree, "layer_plan": plan()}
    return {"fsdp": FULL | (config or {}), "tp": TPConfig(**tensor) if plan is layer_plan else tensor}


def alone(options: dict[str, Any]) -> Run:
    """One process; under the shim for what it mends in checkpoints."""
    with FSDP2():
        return train(None, **options)


def under_tensor_parallelism(options: dict[str, Any], parallelism: dict[str, Any], version: str = "1") -> Run:
    """``version``: that of Composer's FSDP_VERSION, or FSDP2Config for an object."""
    from composer.utils import FSDP2Config

    given = split(**parallelism)
    if version == "FSDP2Config":
        given["fsdp"], version = FSDP2Config(**given["fsdp"]), "1"
    with FSDP2(), mock.patch.dict(os.environ, FSDP_VERSION=version):
        return train(given, tensor_degree=TENSOR, **options)


Case = tuple[dict[str, Any], dict[str, Any], str]


def runs() -> dict[str, Case]:
    from composer.algorithms import SAM

    replicas = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
    return {
        "several groups, norm clipped": ({"make": grouped, "num_microbatches": 2}, {}, "1"),
        "tied, sequence, recomputed": (
            {"tied": True},
            {"plan": sequence_plan, "config": {"activation_checkpointing": True}},
            "FSDP2Config",
        ),
        "adaptive clipping, replicas": ({"clip": ("adaptive", 0.02)}, {"config": replicas}, "2"),
        "SAM": (
            {"make": grouped, "clip": None, "algorithms": (SAM(rho=0.5),), "num_batches": 3, "num_microbatches": 2},
            {},
            "1",
        ),
    }


def runs_alone() -> list[Run]:
    return [alone(options) for options, *_ in runs().values()]


def runs_split() -> dict[str, Run]:
    return for_each(under_tensor_parallelism, runs())


def assert_same(found: Run, expected: Run, *, atol: float = 1e-12) -> None:
    assert largest_difference(found.losses, expected.losses) <= atol
    torch.testing.assert_close(found.eval_loss, expected.eval_loss, rtol=0, atol=max(atol, 1e-6))  # fp32 metrics
    assert found.parameters.keys() == expected.parameters.keys()
    for name, value in found.parameters.items():
        torch.testing.assert_close(value, expected.parameters[name], rtol=0, atol=atol, msg=lambda t, n=name: n + t)


def test_a_trainer_splits_layers_and_trains_as_one_process():
    """With what Composer refuses beside it: several groups, ties; clipped, and by SAM climbed, by the right norm; in
    each form of Composer's configurations, of which its own FSDP2 raises beside split layers."""
    [expected] = run_ranks(runs_alone, 1)
    for (name, found), wanted in zip(run_ranks(runs_split, 4)[0].items(), expected, strict=True):
        try:
            assert_same(found, wanted)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        # Composer adds up what the ranks read, also where they read the same (A batch's samples are counted TENSOR
        # times, as under FSDP1).
        assert found.timestamp["sp"] == TENSOR * wanted.timestamp["sp"]


# --- what reads and changes parameters beside the optimizer


def watched(degree: int) -> tuple[dict[str, float], Run]:
    """What OptimizerMonitor logs in the last batch, of a run that averages its weights."""
    from composer.algorithms import EMA
    from composer.callbacks import OptimizerMonitor
    from composer.loggers import InMemoryLogger

    logger = InMemoryLogger()
    options: dict[str, Any] = {
        "tied": True,
        "num_batches": 3,
        "clip": ("norm", 0.5),
        "algorithms": (EMA(half_life="2ba", update_interval="1ba"),),
        "callbacks": (OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=1),),
        "loggers": [logger],
    }
    run = alone(options) if degree == 1 else under_tensor_parallelism(options, {"plan": sequence_plan})
    norms = {name: float(values[-1][1]) for name, values in logger.data.items() if name.startswith("l2_norm")}
    return norms, run


def test_monitors_and_averages_see_split_layers_whole():
    """A norm of a part would be logged as the parameter's, and an average of the weights would be one of parts."""
    [(expected, run_alone)] = run_ranks(watched, 1, 1)
    found, run = run_ranks(watched, 4, TENSOR)[0]
    assert len(expected) > 30
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
    assert_same(run, run_alone)


def copies_after_dropping(how: str, source: str) -> dict[str, torch.Tensor]:
    """What a rank holds of the parameters that its group along the tensor axis has in copies, after steps with dropout.

    Under ``gather`` the ranks read other data, and here draw random numbers as they do.
    """
    from composer import Callback, Event

    class Dropping(Callback):
        def run_event(self, event: Event, state: Any, logger: Any) -> None:
            if event is Event.FIT_START:
                state.model.model.layers[0].register_forward_hook(lambda _, args, out: drop(out))
            if event is Event.BATCH_END and how == "gather":
                number = torch.distributed.get_rank() + 1
                _ = torch.rand(number), numpy.random.rand(number), [random.random() for _ in range(number)]

    def drop(x: torch.Tensor) -> torch.Tensor:
        if source == "torch":
            return torch.nn.functional.dropout(x, 0.3)
        return x * (numpy.random.rand() if source == "numpy" else random.random())

    config = {"broadcast_batch": how}
    degree = TENSOR if how == "false" else 1
    with FSDP2():
        parallelism = split(config if degree == 1 else None)
        run = train(parallelism, tensor_degree=degree, callbacks=(Dropping(),), num_batches=3)
    return {name: value for name, value in run.parameters.items() if "norm" in name}


def test_ranks_that_split_layers_draw_the_same_numbers():
    """Composer seeds each rank with its own number, so that a dropout between split layers made their copies differ;
    GyroDropout draws of numpy."""
    for how, source in (("false", "torch"), ("gather", "torch"), ("false", "numpy"), ("gather", "random")):
        copies = run_ranks(copies_after_dropping, 4, how, source)
        for rank in (1, 3):
            for name, value in copies[rank].items():
                assert torch.equal(value, copies[rank - 1][name]), f"{how}, {source}: {name}"


def on_a_small_device() -> list[int]:
    """device_train_microbatch_size auto, where more than two rows at once do not fit: the sizes that batches had."""
    from composer import Callback

    sizes: list[int] = []

    class Sizes(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            sizes.append(state.device_train_microbatch_size)

    class OutOfMemory(Callback):
        """Rank 3 alone, the second of its group; a fake: there is no device here."""

        def before_forward(self, state: Any, logger: Any) -> None:
            if torch.distributed.get_rank() == 3 and len(state.batch[0]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with FSDP2(), on_gpu():
        run = train(
            split(),
            tensor_degree=TENSOR,
            num_microbatches="auto",
            num_batches=2,
            callbacks=(Sizes(), OutOfMemory()),
        )
    return [*sizes, *[int(1e15 * loss) for loss in run.losses]]


def test_ranks_of_a_group_halve_their_microbatches_together():
    """One rank that runs out of memory before its forward would leave the other at an all-reduce; between the layers
    themselves: ``tests/training/test_out_of_memory.py``."""
    found = run_ranks(on_a_small_device, 4)
    assert found[0] == found[3]
    assert found[0][:2] == [2, 2]


# --- checkpoints

NUM_BATCHES = 4
FORMS: dict[str, dict[str, Any]] = {
    "sharded": {"state_dict_type": "sharded"},
    "full": {"state_dict_type": "full"},
    "async": {"state_dict_type": "sharded", "async_save": True},
}


def save_in_each_form(folder: str) -> dict[str, Run]:
    """Of one run each, after every second batch."""

    def save(form: str) -> Run:
        options = {"save_folder": f"{folder}/{form}", "save_interval": "2ba", "make": grouped}
        with FSDP2():
            return train(split(FORMS[form]), tensor_degree=TENSOR, keep_optimizer=True, **options)

    return for_each(save, {form: (form,) for form in FORMS})


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Their folder, and what each of them had in the end."""
    folder = tmp_path_factory.mktemp("saved")
    found = run_ranks(save_in_each_form, 4, str(folder))[0]
    for run in found.values():
        same_in_bits(run, found["full"])
    return folder, found["full"]


def same_in_bits(found: Any, expected: Run) -> None:
    assert_same_values(found.parameters, expected.parameters)
    assert_same_values(found.optimizer, expected.optimizer)


def saved(folder: str | Path, form: str, batch: int = 2) -> str:
    """What the Trainer wrote after so many batches."""
    [path] = [path for path in Path(folder, form).iterdir() if path.name.startswith(f"ep0-ba{batch}")]
    return str(path)


def resume(folder: str, degree: int) -> dict[str, Run]:
    def resumed(form: str) -> Run:
        parallelism = {"fsdp": FULL | FORMS[form]} if degree == 1 else split(FORMS[form])
        with FSDP2():
            return train(parallelism, tensor_degree=degree, make=grouped, load_path=saved(folder, form))

    return for_each(resumed, {form: (form,) for form in ("async", "full")})


def resume_alone(path: str) -> Run:
    with FSDP2():
        return train(None, make=grouped, load_path=path)


def test_a_checkpoint_of_split_layers_goes_on_anywhere(saved_runs: tuple[Path, Run]):
    """Sharded, in the background, and full, with the optimizer's groups: on the same ranks, without split layers, on
    one process."""
    folder, uninterrupted = saved_runs
    resumed = {
        "split": run_ranks(resume, 4, str(folder), TENSOR)[0],
        "sharded alone": run_ranks(resume, 4, str(folder), 1)[0],
        "one process": {"full": run_ranks(resume_alone, 1, saved(folder, "full"))[0]},
    }
    for name, runs in resumed.items():
        for run in runs.values():
            assert largest_difference(run.losses, uninterrupted.losses[2:]) <= 1e-12, name
            for each, value in run.parameters.items():
                torch.testing.assert_close(value, uninterrupted.parameters[each], rtol=0, atol=1e-12)


# --- the commands

TESTS = Path(__file__).parents[1]
MODELS = """
import torch
from support.language_trainer import composer_model


def unsplit():
    torch.set_default_dtype(torch.float64)
    return composer_model()
"""


def commands(folder: Path, of: dict[str, list[Any]]) -> dict[str, Any]:
    """What ``composer-fsdp2 checkpoint`` said of each; all of it is to be well, but of what is damaged."""
    path = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    arguments = {name: ["checkpoint", *each] for name, each in of.items()}
    ended = run_forked(arguments, folder, variables=dict.fromkeys(of, path))
    for name, each in ended.items():
        assert each.code == ("damaged" in name), f"{name}: {each.out}{each.err}"
    return ended


def damaged(path: str, folder: Path) -> Path:
    """A copy of a sharded checkpoint, one bit of which is another: of a weight of which each rank has a part."""
    from torch.distributed.checkpoint import FileSystemReader

    copy = Path(shutil.copytree(path, folder / "damaged"))
    places = FileSystemReader(path).read_metadata().storage_data
    place = next(place for index, place in places.items() if index.fqn.endswith(f"model.{SPLIT}") and index.offset[1])
    flip(copy / place.relative_path, place.offset + place.length // 2)
    return copy


SPLIT = "model.layers.0.mlp.down.weight"
CONVERTED = {"from sharded": "whole.pt", "from full": "parts", "weights": "weights"}


def load_alone(paths: dict[str, str]) -> dict[str, Loaded]:
    """Into a model that is not split."""

    def load(path: str) -> Loaded:
        torch.set_default_dtype(torch.float64)
        model = composer_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        optimizer = None if path.endswith("weights") else grouped(model)
        load_checkpoint(path, model, optimizer)
        state = {} if optimizer is None else optimizer_state(model, optimizer)
        return Loaded(full_parameters(model), state)

    return for_each(load, {name: (path,) for name, path in paths.items()})


@dataclass(frozen=True)
class Loaded:
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]


def test_every_command_sees_split_layers_whole(saved_runs: tuple[Path, Run], tmp_path: Path):
    """inspect tells the shapes of the model; convert writes the values that were trained, and the optimizer's; verify
    finds what differs, and one bit of a part."""
    folder, run = saved_runs
    (tmp_path / "models.py").write_text(MODELS)
    sharded, full = (saved(folder, form, NUM_BATCHES) for form in ("sharded", "full"))
    bad = damaged(sharded, tmp_path)
    ended = commands(
        tmp_path,
        {
            "inspect sharded": ["inspect", "--json", "--model", "models.py:unsplit", sharded],
            "inspect full": ["inspect", "--json", "--model", "models.py:unsplit", full],
            "from sharded": ["convert", sharded, CONVERTED["from sharded"], "--to", "monolithic"],
            "from full": ["convert", full, CONVERTED["from full"], "--to", "dcp"],
            "weights": ["convert", sharded, CONVERTED["weights"], "--to", "safetensors"],
            "verify full": ["verify", full],
            "verify damaged": ["verify", bad],
        },
    )
    shapes = {name: list(value.shape) for name, value in run.parameters.items()}
    for form in ("sharded", "full"):
        report = json.loads(ended[f"inspect {form}"].out)
        prefix = "state.model."
        told = {each["name"]: each["shape"] for each in report["tensors"] if each["name"].startswith(prefix)}
        assert told == {f"{prefix}{name}": shape for name, shape in shapes.items()}
    assert SPLIT in ended["verify damaged"].out
    again = {
        name: ["verify", path, "--against", sharded if name != "from full" else full]
        for name, path in CONVERTED.items()
    }
    commands(tmp_path, again)
    [loaded] = run_ranks(load_alone, 1, {name: str(tmp_path / path) for name, path in CONVERTED.items()})
    for name, each in loaded.items():
        same_in_bits(each, replace(run, optimizer={}) if name == "weights" else run)


# --- beside Composer's own


def body_plan() -> Any:
    return layer_plan(ends=False)


def under_fsdp1(folder: str) -> dict[str, Run]:
    def fit(**options: Any) -> Run:
        with FSDP1():
            config = {"state_dict_type": "sharded"}
            parallelism = split(config, body_plan)
            return train(parallelism, tensor_degree=TENSOR, dtype=torch.float32, **options)

    saving = {"save_folder": f"{folder}/sharded", "save_interval": "2ba"}
    return {"unclipped": fit(clip=None, make=adamw, **saving), "clipped": fit(num_batches=3)}


def of_one_process(path: str) -> Run:
    """What a converted checkpoint of FSDP1 goes on with, in a model that is not split."""
    with FSDP2():
        return train(None, dtype=torch.float32, clip=None, make=adamw, load_path=path)


def under_fsdp2(folder: str) -> dict[str, Run]:
    def fit(degree: int = TENSOR, **options: Any) -> Run:
        config = {"state_dict_type": "sharded"}
        with FSDP2():
            parallelism = split(config, body_plan) if degree > 1 else {"fsdp": FULL | config}
            return train(parallelism, tensor_degree=degree, dtype=torch.float32, **options)

    loading = {"clip": None, "make": adamw, "load_path": saved(folder, "sharded")}
    return {
        "unclipped": fit(clip=None, make=adamw, num_batches=2),
        "clipped": fit(num_batches=3),
        "resumed": fit(**loading),
        "resumed, not split": fit(degree=1, **loading),
    }


def alone_in_fp32() -> Run:
    with FSDP2():
        return train(None, dtype=torch.float32, num_batches=3)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def test_it_is_what_composer_trained_under_fsdp1(tmp_path: Path):
    """The same curve where FSDP1 was right, and its checkpoints go on, split or not; where it clipped by the norm of
    one rank's parts, the curve is that of one process."""
    theirs = run_ranks(under_fsdp1, 4, str(tmp_path))[0]
    ours = run_ranks(under_fsdp2, 4, str(tmp_path))[0]
    [expected] = run_ranks(alone_in_fp32, 1)
    assert largest_difference(ours["unclipped"].losses, theirs["unclipped"].losses[:2]) <= 1e-6
    old = saved(tmp_path, "sharded")
    ended = commands(
        tmp_path, {"inspect": ["inspect", "--json", old], "convert": ["convert", old, "whole.pt", "--to", "monolithic"]}
    )
    assert {tuple(each["shape"]) for each in json.loads(ended["inspect"].out)["tensors"] if SPLIT in each["name"]} == {
        (16, 32),
        (),
    }
    assert_same_values(
        torch.load(tmp_path / "whole.pt", weights_only=False)["state"]["model"], read(old)["state"]["model"]
    )
    [converted] = run_ranks(of_one_process, 1, str(tmp_path / "whole.pt"))
    for run in (ours["resumed"], ours["resumed, not split"], converted):
        assert largest_difference(run.losses, theirs["unclipped"].losses[2:]) <= 1e-6
    assert largest_difference(ours["clipped"].losses, expected.losses) <= 1e-6
    assert largest_difference(theirs["clipped"].losses, expected.losses) > 1e-4  # FSDP1's defect, which is not ours


def refuse_without_a_section() -> None:
    with FSDP2(), pytest.raises(ValueError, match="requires FSDP to be enabled"):
        train({"tp": {"tensor_parallel_degree": TENSOR, "layer_plan": layer_plan()}}, tensor_degree=TENSOR)


def test_split_layers_without_an_fsdp_section_are_refused():
    """In Composer's words, which name the section to add: nothing would shard the model, nor average its gradients."""
    run_ranks(refuse_without_a_section, 4)


BAD_VALUES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a path that matches nothing": ({}, {"layer_plan": {"model.haed": None}}, "layer_plan['model.haed'] is None"),
    "a style on a container": (
        {},
        {"layer_plan": {"model.layers": SequenceParallel()}},
        "SequenceParallel on 'model.layers'",
    ),
    "the plan of another model": ({}, {"layer_plan": {"layers.*.mlp.up": ColwiseParallel()}}, "did you mean model."),
    "an unknown attention": ({"context_parallel_degree": 2}, {}, "context_parallel_degree: no attention"),
    "a degree in quotes": ({"context_parallel_degree": "2"}, {}, "context_parallel_degree is '2'"),
    "no stacked experts": ({"expert_parallel_degree": 2}, {}, "expert_parallel_degree 2"),
    "a misspelt class": ({"tiled_mlp": {"classes": ["MPL"], "chunks": 2}}, {}, "did you mean MLP?"),
    "a misspelt word": ({"idle_experts": "inorder"}, {}, "did you mean in_order?"),
    "a tower that is not there": ({"idle_towers": ["model.layrs"]}, {}, "did you mean model.layers?"),
    "a batch from nowhere": ({"broadcast_batch": "all"}, {}, "broadcast_batch is 'all'"),
    "a number for a flag": ({"check_data": 1}, {}, "check_data is 1"),
}


def refuse_bad_value(section: dict[str, Any], tensor: dict[str, Any], says: str) -> None:
    parallelism = {
        "fsdp": FULL | section,
        "tp": {"tensor_parallel_degree": TENSOR, "layer_plan": layer_plan()} | tensor,
    }
    with FSDP2(), pytest.raises(ComposerFSDP2Error, match=re.escape(says)):
        train(parallelism, tensor_degree=TENSOR)


def refuse_bad_values() -> None:
    for_each(refuse_bad_value, BAD_VALUES)


def test_bad_values_are_errors_of_the_trainer_on_every_rank():
    """Composer hands the mappings on as they are: what its Trainer says is what prepare_fully_shard says."""
    run_ranks(refuse_bad_values, 4)
