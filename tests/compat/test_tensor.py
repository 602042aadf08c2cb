"""Tensor parallelism through the real Trainer: ``parallelism_config.tp`` as Composer has it, on FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.language import layer_plan, sequence_plan
from support.language_trainer import Run, grouped, train
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference, on_gpu

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


def under_tensor_parallelism(options: dict[str, Any], parallelism: dict[str, Any]) -> Run:
    with FSDP2():
        return train(split(**parallelism), tensor_degree=TENSOR, **options)


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "several groups, norm clipped": ({"make": grouped}, {}),
    "tied, sequence, recomputed": (
        {"tied": True},
        {"plan": sequence_plan, "config": {"activation_checkpointing": True}},
    ),
    "adaptive clipping, replicas": (
        {"clip": ("adaptive", 0.02)},
        {"config": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}},
    ),
}


def runs_alone() -> list[Run]:
    return [alone(options) for options, _ in RUNS.values()]


def runs_split() -> list[Run]:
    return list(for_each(under_tensor_parallelism, RUNS).values())


def assert_same(found: Run, expected: Run, *, atol: float = 1e-12) -> None:
    assert largest_difference(found.losses, expected.losses) <= atol
    torch.testing.assert_close(found.eval_loss, expected.eval_loss, rtol=0, atol=max(atol, 1e-6))  # fp32 metrics
    assert found.parameters.keys() == expected.parameters.keys()
    for name, value in found.parameters.items():
        torch.testing.assert_close(value, expected.parameters[name], rtol=0, atol=atol, msg=lambda t, n=name: n + t)


def test_a_trainer_splits_layers_and_trains_as_one_process():
    """With what Composer refuses beside it: several groups, ties; and clipped by the right norm."""
    [expected] = run_ranks(runs_alone, 1)
    for name, found, wanted in zip(RUNS, run_ranks(runs_split, 4)[0], expected, strict=True):
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
            microbatch="auto",
            num_batches=2,
            callbacks=(Sizes(), OutOfMemory()),
        )
    return [*sizes, *[int(1e15 * loss) for loss in run.losses]]


def test_ranks_of_a_group_halve_their_microbatches_together():
    """One rank that runs out of memory in the midst of split layers would leave the other at an all-reduce."""
    found = run_ranks(on_a_small_device, 4)
    assert found[0] == found[3]
    assert found[0][:2] == [2, 2]


# --- checkpoints


def save_and_go_on(folder: str, form: str, num_batches: int) -> Run:
    """Saves after every second batch."""
    config = {"state_dict_type": form}
    options = {"save_folder": f"{folder}/{form}", "save_interval": "2ba", "num_batches": num_batches, "make": grouped}
    with FSDP2():
        return train(split(config), tensor_degree=TENSOR, **options)


def saved(folder: str, form: str) -> str:
    """What the Trainer wrote after two batches."""
    [path] = [path for path in Path(folder, form).iterdir() if path.name.startswith("ep0-ba2")]
    return str(path)


def resume(folder: str, degree: int, num_batches: int) -> list[Run]:
    runs = []
    for form in ("sharded", "full"):
        parallelism = {"fsdp": FULL | {"state_dict_type": form}} if degree == 1 else split({"state_dict_type": form})
        with FSDP2():
            runs.append(
                train(
                    parallelism,
                    tensor_degree=degree,
                    num_batches=num_batches,
                    make=grouped,
                    load_path=saved(folder, form),
                )
            )
    return runs


def save_both(folder: str, num_batches: int) -> list[Run]:
    return [save_and_go_on(folder, form, num_batches) for form in ("sharded", "full")]


def resume_alone(folder: str, num_batches: int) -> Run:
    with FSDP2():
        return train(None, num_batches=num_batches, make=grouped, load_path=saved(folder, "full"))


def test_a_checkpoint_of_split_layers_goes_on_anywhere(tmp_path: Path):
    """Sharded and full, with the optimizer's groups: on the same ranks, without split layers, on one process."""
    num_batches = 4
    [uninterrupted, _] = run_ranks(save_both, 4, str(tmp_path), num_batches)[0]
    resumed = {
        "split": run_ranks(resume, 4, str(tmp_path), TENSOR, num_batches)[0],
        "sharded alone": run_ranks(resume, 4, str(tmp_path), 1, num_batches)[0],
        "one process": run_ranks(resume_alone, 1, str(tmp_path), num_batches),
    }
    for name, runs in resumed.items():
        for run in runs:
            assert largest_difference(run.losses, uninterrupted.losses[2:]) <= 1e-12, name
            for each, value in run.parameters.items():
                torch.testing.assert_close(value, uninterrupted.parameters[each], rtol=0, atol=1e-12)


# --- beside Composer's own


def body_plan() -> Any:
    return layer_plan(ends=False)


def under_fsdp1(folder: str) -> dict[str, Run]:
    def fit(**options: Any) -> Run:
        with FSDP1():
            config = {"state_dict_type": "sharded"}
            parallelism = split(config, body_plan)
            return train(parallelism, tensor_degree=TENSOR, dtype=torch.float32, num_batches=4, **options)

    saving = {"save_folder": f"{folder}/sharded", "save_interval": "2ba"}
    return {"unclipped": fit(clip=None, make=adamw, **saving), "clipped": fit()}


def under_fsdp2(folder: str) -> dict[str, Run]:
    def fit(degree: int = TENSOR, **options: Any) -> Run:
        config = {"state_dict_type": "sharded"}
        with FSDP2():
            parallelism = split(config, body_plan) if degree > 1 else {"fsdp": FULL | config}
            return train(parallelism, tensor_degree=degree, dtype=torch.float32, num_batches=4, **options)

    loading = {"clip": None, "make": adamw, "load_path": saved(folder, "sharded")}
    return {
        "unclipped": fit(clip=None, make=adamw),
        "clipped": fit(),
        "resumed": fit(**loading),
        "resumed, not split": fit(degree=1, **loading),
    }


def alone_in_fp32() -> Run:
    with FSDP2():
        return train(None, dtype=torch.float32, num_batches=4)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def test_it_is_what_composer_trained_under_fsdp1(tmp_path: Path):
    """The same curve where FSDP1 was right, and its checkpoints go on, split or not; where it clipped by the norm of
    one rank's parts, the curve is that of one process."""
    theirs = run_ranks(under_fsdp1, 4, str(tmp_path))[0]
    ours = run_ranks(under_fsdp2, 4, str(tmp_path))[0]
    [expected] = run_ranks(alone_in_fp32, 1)
    assert largest_difference(ours["unclipped"].losses, theirs["unclipped"].losses) <= 1e-6
    for name in ("resumed", "resumed, not split"):
        assert largest_difference(ours[name].losses, theirs["unclipped"].losses[2:]) <= 1e-6
    assert largest_difference(ours["clipped"].losses, expected.losses) <= 1e-6
    assert largest_difference(theirs["clipped"].losses, expected.losses) > 1e-4  # FSDP1's defect, which is not ours


def refuse_without_a_section() -> None:
    with FSDP2(), pytest.raises(ValueError, match="requires FSDP to be enabled"):
        train({"tp": {"tensor_parallel_degree": TENSOR, "layer_plan": layer_plan()}}, tensor_degree=TENSOR)


def test_split_layers_without_an_fsdp_section_are_refused():
    """In Composer's words, which name the section to add: nothing would shard the model, nor average its gradients."""
    run_ranks(refuse_without_a_section, 4)
