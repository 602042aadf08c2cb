"""Checkpoints of the real Trainer: what was saved resumes bit for bit, FSDP1's too; state can be read after an eval."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import for_each
from support.comparing import assert_same, full_parameters
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.trainers import (
    build_model,
    build_on_rank_0,
    build_unlike_on_rank_1,
    fit,
    largest_difference,
    make_trainer,
    result,
)

pytestmark = pytest.mark.composer

SAVED_AT, LAST = 2, 4
SAVING: dict[str, Any] = {"batches": LAST, "optimizer": "adamw", "save_interval": f"{SAVED_AT}ba"}
RESUMING: dict[str, Any] = {"batches": LAST, "optimizer": "adamw"}
TYPES = ("full", "sharded")


def checkpoint(folder: str, state_dict_type: str) -> str:
    return f"{folder}/ep0-ba{SAVED_AT}" + ("-rank0.pt" if state_dict_type == "full" else "")


# --- save and resume

ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "CPU offload": {"cpu_offload": True},
    "reentrant checkpointing": {"activation_checkpointing": True},
    "checkpointing": {"activation_checkpointing": True, "activation_checkpointing_reentrant": False},
    "untied": {},
}
ON_FOUR_RANKS: dict[str, dict[str, Any]] = {
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2},
}


def check_resumption(folder: str, cases: dict[str, dict[str, Any]]) -> None:
    each = {f"{name}, {kind}": (folder, name, keys, kind) for name, keys in cases.items() for kind in TYPES}
    for_each(check_one_resumption, each)


def check_one_resumption(folder: str, name: str, keys: dict[str, Any], state_dict_type: str) -> None:
    tied, path = name != "untied", f"{folder}/{name}-{state_dict_type}"
    config = {**keys, "state_dict_type": state_dict_type}
    continuous = fit(FSDP2, dict(config), tied=tied, save_folder=path, **SAVING)
    resumed = fit(FSDP2, dict(config), tied=tied, load_path=checkpoint(path, state_dict_type), **RESUMING)
    assert resumed.shards == {"FSDPModule"}
    assert resumed.losses == continuous.losses[SAVED_AT:], f"{resumed.losses}, {continuous.losses}"
    assert_same(resumed.parameters, continuous.parameters)


def test_resumed_run_goes_on_bit_for_bit(tmp_path: Path):
    """A run that is stopped and resumed is the run that was never stopped; parameters, optimizer and data come back."""
    run_ranks(check_resumption, 2, str(tmp_path), ON_TWO_RANKS)


def test_replicas_resume_bit_for_bit(tmp_path: Path):
    """With replicas, only the first of them saves, and all of them load."""
    run_ranks(check_resumption, 4, str(tmp_path), ON_FOUR_RANKS)


def check_autoresume(folder: str) -> None:
    def check(state_dict_type: str) -> None:
        config = {"state_dict_type": state_dict_type}
        options = {**SAVING, "autoresume": True, "run_name": "again", "save_folder": f"{folder}/{state_dict_type}"}
        continuous = fit(FSDP2, dict(config), **RESUMING)
        first = fit(FSDP2, dict(config), **{**options, "batches": SAVED_AT})
        second = fit(FSDP2, dict(config), **options)
        assert first.losses + second.losses == continuous.losses

    for_each(check, {state_dict_type: (state_dict_type,) for state_dict_type in TYPES})


def test_autoresume_finds_the_latest(tmp_path: Path):
    """A run that the scheduler restarts goes on by itself from its newest checkpoint."""
    run_ranks(check_autoresume, 2, str(tmp_path))


def check_weights(folder: str) -> None:
    saving = {**SAVING, "save_weights_only": True}
    trained = fit(FSDP2, {}, save_folder=f"{folder}/full", **saving)
    fit(FSDP2, {"state_dict_type": "sharded"}, save_folder=f"{folder}/sharded", **saving)
    full, sharded = f"{folder}/full/ep0-ba{LAST}-rank0.pt", f"{folder}/sharded/ep0-ba{LAST}"

    def check(path: str, parallelism: Any) -> None:
        with FSDP2():
            trainer = make_trainer(parallelism, load_path=path, load_weights_only=True)
            loaded = full_parameters(trainer.state.model)
            trainer.close()
        loaded = {name.removeprefix("module."): parameter for name, parameter in loaded.items()}  # DDP's
        assert_same(loaded, trained.parameters)

    cases = {
        "sharded": (full, {}),
        "whole": (full, {"sharding_strategy": "NO_SHARD"}),
        "DDP": (full, None),
        "sharded from shards": (sharded, {"state_dict_type": "sharded"}),
    }
    for_each(check, cases)


def test_weights_alone_load_with_and_without_sharding(tmp_path: Path):
    """A full file is what people publish and evaluate: it holds full tensors under the model's own names."""
    run_ranks(check_weights, 2, str(tmp_path))


# --- from and to FSDP1


def check_fsdp1s(folder: str) -> None:
    # Composer refused CPU offload under FSDP1.
    for_each(check_one_of_fsdp1s, {name: (folder, name) for name in ON_TWO_RANKS if name != "CPU offload"})


def check_one_of_fsdp1s(folder: str, name: str) -> None:
    tied, path = name != "untied", f"{folder}/{name}"
    config = {**ON_TWO_RANKS[name], "state_dict_type": "sharded"}
    theirs = fit(FSDP1, dict(config), tied=tied, save_folder=path, **SAVING)
    assert theirs.shards == {"FullyShardedDataParallel"}
    ours = fit(FSDP2, dict(config), tied=tied, load_path=checkpoint(path, "sharded"), **RESUMING)
    assert ours.shards == {"FSDPModule"}
    difference = largest_difference(ours.losses, theirs.losses[SAVED_AT:])
    assert difference <= 1e-6, f"{difference}: {ours.losses}, FSDP1 {theirs.losses}"


def test_fsdp1s_sharded_checkpoint_resumes(tmp_path: Path):
    """The run in flight moves over: weights, Adam's moments, scheduler and data order come from FSDP1's own files."""
    run_ranks(check_fsdp1s, 2, str(tmp_path))


def check_way_back(folder: str) -> None:
    config = {"state_dict_type": "sharded"}
    ours = fit(FSDP2, dict(config), save_folder=folder, **SAVING)
    theirs = fit(FSDP1, dict(config), load_path=checkpoint(folder, "sharded"), **RESUMING)
    assert theirs.shards == {"FullyShardedDataParallel"}
    difference = largest_difference(theirs.losses, ours.losses[SAVED_AT:])
    assert difference <= 1e-6, f"{theirs.losses}, FSDP2 {ours.losses}"


def test_fsdp1_resumes_ours(tmp_path: Path):
    """Moving over is no one-way street: what we saved still resumes on FSDP1."""
    run_ranks(check_way_back, 2, str(tmp_path))


# --- one file, read by rank 0


def check_monolith(folder: str) -> None:
    from composer.utils import FSDP2Config

    continuous = fit(FSDP2, {}, save_folder=folder, **SAVING)
    stopped = fit(FSDP2, {}, **{**SAVING, "batches": SAVED_AT})
    keys = {"load_monolith_rank0_only": True, "state_dict_type": "full"}
    # FSDP2Config has no sync_module_states; Composer lets only FSDPConfig's go on with it.
    ask: dict[str, Callable[[], Any]] = {
        "dict": lambda: {**keys, "sync_module_states": True},
        "FSDP2Config": lambda: FSDP2Config(**keys),
    }

    def check(config: Callable[[], Any], build: Callable[[], Any]) -> None:
        with FSDP2():
            trainer = make_trainer(config(), model=build(), load_path=checkpoint(folder, "full"), **RESUMING)
            assert_same(full_parameters(trainer.state.model), stopped.parameters, "loaded")
            trainer.fit()
            resumed = result(trainer)
            trainer.close()
        assert resumed.shards == {"FSDPModule"}
        assert resumed.losses == continuous.losses[SAVED_AT:], f"{resumed.losses}, {continuous.losses}"
        assert_same(resumed.parameters, continuous.parameters, "trained")

    builds = (build_model, build_unlike_on_rank_1, build_on_rank_0)
    for_each(check, {f"{way}, {build.__name__}": (ask[way], build) for way in ask for build in builds})


def test_load_monolith_rank0_only(tmp_path: Path):
    """Only rank 0 has the memory for the whole file; the others get weights and optimizer state, and nobody waits."""
    run_ranks(check_monolith, 2, str(tmp_path), timeout_s=120)


def check_monolith_without_file() -> None:
    monolith = {"load_monolith_rank0_only": True, "sync_module_states": True}
    expected = fit(FSDP2, {})

    def check(build: Callable[[], Any]) -> None:
        trained = fit(FSDP2, dict(monolith), model=build())
        assert trained.shards == {"FSDPModule"}
        assert trained.losses == expected.losses

    for_each(check, {build.__name__: (build,) for build in (build_unlike_on_rank_1, build_on_rank_0)})


def test_load_monolith_rank0_only_without_a_file():
    """The first start of a run, with nothing to load yet, is sharded too, from rank 0's values."""
    run_ranks(check_monolith_without_file, 2, timeout_s=120)


# --- state after an eval


def read_state(seen: dict[str, int]) -> Any:
    """A callback that reads all state at the end of each eval, as a checkpointing or logging callback does."""
    from composer import Callback
    from torch.distributed.tensor import DTensor

    class Read(Callback):
        def look(self, state: Any, event: str) -> None:
            assert all(isinstance(parameter, DTensor) for parameter in state.model.parameters()), event
            model = state.get_model_state_dict()
            if state.timestamp.batch == 0:
                return  # torch fills an optimizer's empty state by a step that counts, under FSDP1 too
            optimizer = state.get_optim_state_dict()["AdamW"]
            whole = state.state_dict()
            assert whole["model"].keys() == model.keys()
            assert whole["optimizers"]["AdamW"].keys() == optimizer.keys()
            seen[event] = seen.get(event, 0) + 1

        def eval_end(self, state: Any, logger: Any) -> None:
            self.look(state, "eval_end")

        def eval_standalone_end(self, state: Any, logger: Any) -> None:
            self.look(state, "eval_standalone_end")

        def predict_end(self, state: Any, logger: Any) -> None:
            self.look(state, "predict_end")

    return Read()


def check_after_eval(folder: str) -> None:
    from torch.distributed.tensor import DTensor

    plain = fit(FSDP2, {}, **RESUMING)

    def check(strategy: str, state_dict_type: str) -> None:
        what, seen = f"{strategy}, {state_dict_type}", {}
        path = f"{folder}/{what}"
        with FSDP2():
            trainer = make_trainer(
                {"sharding_strategy": strategy, "state_dict_type": state_dict_type},
                callbacks=[read_state(seen)],
                eval_interval="2ba",
                **RESUMING,
            )
            trainer.eval()
            trainer.fit()
            trained = result(trainer)
            assert trained.losses == plain.losses, f"{what}: an eval changed the training"
            model = trainer.state.model
            trainer.eval()
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), what
            saved = trainer.save_checkpoint(f"{path}/after-eval/ep{{epoch}}-ba{{batch}}.pt")
            assert_same(full_parameters(model), trained.parameters, what)
            trainer.predict(trainer.state.train_dataloader, subset_num_batches=1)
            trainer.close()
        assert seen == {"eval_end": 3, "eval_standalone_end": 1, "predict_end": 1}, f"{what}: {seen}"
        with FSDP2():
            again = make_trainer(
                {"sharding_strategy": strategy, "state_dict_type": state_dict_type},
                load_path=str(Path(saved).parent)
                if state_dict_type == "sharded"
                else f"{path}/after-eval/ep0-ba{LAST}.pt",
                **RESUMING,
            )
            assert_same(full_parameters(again.state.model), trained.parameters, what)
            again.close()

    for_each(check, {f"{case}": case for case in itertools.product(("FULL_SHARD", "SHARD_GRAD_OP"), TYPES)})


def test_state_can_be_read_after_an_eval(tmp_path: Path):
    """An eval left roots gathered: callbacks saw plain tensors, and reading the optimizer's state raised KeyError."""
    run_ranks(check_after_eval, 2, str(tmp_path))


def check_own_forward() -> None:
    import torch.distributed as dist

    with FSDP2():
        trainer = make_trainer({}, tied=False, batches=2, optimizer="adamw")
        trainer.fit()
        state = trainer.state
        before = full_parameters(state.model)
        with torch.no_grad():
            state.model([torch.zeros(2, 5, dtype=torch.long)])
        optimizer = state.get_optim_state_dict()["AdamW"]
        with torch.no_grad():
            state.model([torch.zeros(2, 5, dtype=torch.long)])
        model = state.get_model_state_dict()
        if dist.get_rank() == 0:  # full state is rank 0's
            assert optimizer["state"].keys() == before.keys()
            assert_same(model, before, "after a forward of one's own")
        trainer.close()


def test_state_can_be_read_after_a_forward_of_ones_own():
    """A callback that samples from the model without gradients may be followed by a save."""
    run_ranks(check_own_forward, 2)
