"""async_save: training continues while a snapshot is written; a killed run resumes from the last complete one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.callbacks import callback
from support.cases import for_each
from support.checkpoints.samples import file_size_limit
from support.cuda_played import CudaPlayed
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.ranks import impatient, run_ranks
from support.references import reference
from support.saved import checkpoint_differences, named, read
from support.trainers import fit, make_trainer

from composer_fsdp2.errors import CheckpointError

pytestmark = pytest.mark.composer

TYPES = ("full", "sharded")
WAIT_S = 60.0


def assert_same_checkpoint(ours: str, composers: str) -> None:
    """Checks equality bit for bit, except for the saver's list of its own files, which is one entry shorter in these
    callbacks."""
    found = checkpoint_differences(ours, composers, except_for="all_saved_checkpoints")
    assert not found, f"{ours}: {found}"


def save_by_composer(state: Any, folder: str) -> None:
    """The checkpoint that Composer itself would save now: gathered, synchronously, on the default group. Called on all
    ranks."""
    from composer.utils import checkpoint

    batch = state.timestamp.batch.value
    sharded = state.fsdp_sharded_state_dict_enabled
    file = f"ep0-ba{batch}/__{dist.get_rank()}_0.distcp" if sharded else named("full", batch)
    checkpoint._save_checkpoint.__wrapped__(state, f"{folder}/{file}")


# --- a writer that waits


def writer_waits_for(wait: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """The background thread calls ``wait`` in the middle of a file; writes of the main thread do not wait."""
    from support.killed_runs import writers_call

    def in_the_background() -> None:
        if threading.current_thread().name.startswith("async_save"):  # or the thread that writes for it
            wait()

    return writers_call(in_the_background)


# --- training continues


def check_snapshot(folder: str, kind: str, config: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    from composer.callbacks import CheckpointSaver

    from composer_fsdp2.compat import async_saving

    ours, composers, gate = f"{folder}/ours", f"{folder}/composers", threading.Event()
    seen: dict[str, list[str]] = {}
    listed: dict[str, int] = {}

    def note(state: Any, when: str) -> None:
        dist.barrier()
        seen[when] = [name for name in sorted(os.listdir(ours)) if not name.startswith(".")]
        [saver] = [each for each in state.callbacks if isinstance(each, CheckpointSaver)]
        listed[when] = len(saver.saved_checkpoints)
        dist.barrier()

    def batch_end(state: Any) -> None:
        batch = state.timestamp.batch.value
        note(state, f"step {batch}")
        if batch == 4:
            gate.set()
            assert async_saving._pending is not None
            async_saving._pending.thread.join()
            note(state, "written")
        if batch == 5:  # two steps after it was taken the first snapshot exists and is not removed yet
            if dist.get_rank() == 0:
                assert_same_checkpoint(f"{ours}/{named(kind, 2)}", f"{composers}/{named(kind, 2)}")
            async_saving._pending.thread.join()
            gate.clear()

    def batch_checkpoint(state: Any) -> None:
        if state.timestamp.batch.value in (2, 4, 6):
            save_by_composer(state, composers)

    def fit_end(state: Any) -> None:
        assert os.readlink(f"{ours}/latest-rank0.pt") == named(kind, 4)
        threading.Timer(0.2, gate.set).start()  # by then fit waits for the writer

    expected = reference(fit, FSDP2, config, batches=6, optimizer="adamw")
    with (
        FSDP2(),
        writer_waits_for(lambda: gate.wait(WAIT_S)),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
    ):
        trained = fit(
            FSDP2,
            {**config, "state_dict_type": kind, "async_save": True},
            batches=6,
            optimizer="adamw",
            save_folder=ours,
            save_interval="2ba",
            save_num_checkpoints_to_keep=2,
            callbacks=[callback(batch_end=batch_end, batch_checkpoint=batch_checkpoint, fit_end=fit_end)],
        )
    assert trained.losses == expected.losses, f"{trained.losses}, {expected.losses}"
    # Each process group opens a socket from every rank to every other.
    assert sum(call.kwargs.get("backend") == "gloo" for call in new_group.mock_calls) <= 1, new_group.mock_calls
    # Steps 3 and 4 ran while the snapshot of step 2 was being written: no link, no entry, and no file of that name. The
    # file is renamed when the link is created: if the run ended in between, Composer would refuse to start again beside
    # such a file.
    for when in ("step 3", "step 4", "written"):
        assert seen[when] == ([] if kind == "full" else [named(kind, 2)]), f"{when}: {seen}"
        assert listed[when] == 0, f"{when}: {listed}"
    if dist.get_rank() == 0:
        # The first is removed, because the limit is two.
        assert sorted(os.listdir(ours)) == [named(kind, 4), named(kind, 6), "latest-rank0.pt"], os.listdir(ours)
        assert os.readlink(f"{ours}/latest-rank0.pt") == named(kind, 6)
        for batch in (4, 6):
            assert_same_checkpoint(f"{ours}/{named(kind, batch)}", f"{composers}/{named(kind, batch)}")


@on_ranks(4)
def test_training_of_replicas_goes_on(folder: str):
    """With replicas too: one of them writes, and all of them know when it has finished."""
    with CudaPlayed() as cuda:
        config = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}
        check_snapshot(folder, "sharded", config)
    assert not cuda.events, "memory of a run without a device was pinned"


def check_snapshots(folder: str, kind: str) -> None:
    from composer_fsdp2.compat import async_saving, pinned_copies

    played = ((async_saving, "is_on_device"), (pinned_copies, "is_on_device"), (pinned_copies, "_is_on_cuda"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(async_saving, "_pinned", pinned_copies.PinnedCopies()))
        for module, name in played:
            stack.enter_context(mock.patch.object(module, name, return_value=True))
        cuda = stack.enter_context(CudaPlayed())
        check_snapshot(folder, kind, {})
    # The first of three saves pins memory, and each of them synchronizes once.
    assert [event for event, _ in cuda.events] == ["pin", "wait", "wait", "wait"], cuda.events


@pytest.mark.parametrize("kind", TYPES)
def test_training_goes_on_while_the_snapshot_is_written(tmp_path: Path, kind: str):
    """The GPUs do not wait for the disk. A checkpoint is listed and linked, and old ones are removed, only when it is
    complete, the last one when fit returns. On a GPU a save reuses the copies of the previous one; neither has values
    of another step.

    Without a GPU: host tensors stand for GPU tensors, and CUDA's pinning is mocked. The copies and the writers are
    real.
    """
    run_ranks(check_snapshots, 2, str(tmp_path), kind)


# --- several at a time


def check_several(folder: str, kind: str) -> None:
    from composer.callbacks import CheckpointSaver
    from composer.utils import checkpoint as composers

    from composer_fsdp2.compat import async_saving, checkpoint_saver

    warnings.simplefilter("ignore")
    begun: list[tuple[int, bool]] = []
    start = async_saving.start

    def counted(saver: Any, state: Any, *args: Any) -> None:
        begun.append((state.timestamp.batch.value, saver.weights_only))
        start(saver, state, *args)

    savers = [
        CheckpointSaver(
            folder=f"{folder}/{weights_only}",
            save_interval="1ba",
            weights_only=weights_only,
            remote_file_name=None,
            latest_remote_file_name=None,
        )
        for weights_only in (True, False)
    ]

    def batch_end(state: Any) -> None:
        if state.timestamp.batch.value == 2:  # the writer is busy with the first
            composers.save_checkpoint(state, f"{folder}/hand/by-hand.pt")
            save_by_composer(state, f"{folder}/composers")

    slow = writer_waits_for(lambda: time.sleep(2e-3))
    with slow, mock.patch.object(checkpoint_saver, "start", counted), FSDP2():
        trainer = make_trainer(
            {"state_dict_type": kind, "async_save": True},
            batches=3,
            optimizer="adamw",
            eval_interval="1ba",
            callbacks=[*savers, callback(batch_end=batch_end)],
        )
        trainer.fit()
        assert begun == [(batch, weights) for batch in (1, 2, 3) for weights in (True, False)], begun
        trainer.save_checkpoint_to_save_folder()
        assert async_saving._pending is None, "it is still being written"
        trainer.close()
    if dist.get_rank() == 0:
        hand = "by-hand.pt" if kind == "full" else "ep0-ba2"
        assert_same_checkpoint(f"{folder}/hand/{hand}", f"{folder}/composers/{named(kind, 2)}")
        for weights_only in (True, False):
            names = sorted(os.listdir(f"{folder}/{weights_only}"))
            assert names == [*(named(kind, batch) for batch in (1, 2, 3)), "latest-rank0.pt"], names
            for name in names:
                state = read(f"{folder}/{weights_only}/{name}")["state"]
                assert state["model"] and ("optimizers" in state) != weights_only, name


@pytest.mark.parametrize("kind", TYPES)
def test_saves_in_quick_succession(tmp_path: Path, kind: str):
    """Two savers, every step, with evaluations and a manual save in between: all checkpoints are complete, and no send
    is received by another save."""
    run_ranks(check_several, 2, str(tmp_path), kind)


@on_ranks(2)
def test_one_save_for_each_batch(folder: str):
    """The end of an epoch is also the end of a batch: its checkpoint is written once."""
    for_each(check_once_for_each_batch, {f"async {is_async}": (folder, is_async) for is_async in (False, True)})


def check_once_for_each_batch(folder: str, is_async: bool) -> None:
    from composer_fsdp2.compat import async_saving, saving

    warnings.simplefilter("ignore")
    written: list[int] = []
    write = async_saving.write_full

    def counted(state_dict: Any, *args: Any) -> None:
        written.append(state_dict["state"]["timestamp"]["Timestamp"]["batch"])
        write(state_dict, *args)

    with mock.patch.object(saving, "write_full", counted), mock.patch.object(async_saving, "write_full", counted):
        fit(
            FSDP2,
            {"async_save": is_async},
            batches=3,
            train_subset_num_batches=2,  # an epoch, whose last batch calls save_interval twice
            save_folder=f"{folder}/{is_async}",
            save_interval=lambda state, event: state.timestamp.batch.value in (1, 2),
        )
    assert written == [1, 2], written


# --- errors


def check_full_disk(folder: str, kind: str) -> None:
    from composer_fsdp2.compat import async_saving

    warnings.simplefilter("ignore")
    failing_rank, batches = (0 if kind == "full" else 1), []
    saving_options: dict[str, Any] = {
        "optimizer": "adamw",
        "save_folder": folder,
        "save_interval": lambda state, event: state.timestamp.batch.value in (1, 2),
    }
    config = {"state_dict_type": kind, "async_save": True}

    def batch_end(state: Any) -> None:
        batches.append(state.timestamp.batch.value)
        if async_saving._pending is not None:
            async_saving._pending.thread.join()  # the error exists before the step ends
            stack.close()  # the ranks' store is also a file here, and must not see the full disk

    with contextlib.ExitStack() as stack:

        def batch_checkpoint(state: Any) -> None:
            if state.timestamp.batch.value == 2 and dist.get_rank() == failing_rank:
                stack.enter_context(file_size_limit(2048))

        words = "File too large" if kind == "full" else "rank 1: OSError.*File too large"
        watch = callback(batch_end=batch_end, batch_checkpoint=batch_checkpoint)
        with pytest.raises(CheckpointError, match=words):
            fit(FSDP2, dict(config), batches=6, callbacks=[watch], **saving_options)
    assert batches == [1, 2, 3], f"the error came after step {batches[-1]}"
    if dist.get_rank() == 0:
        assert os.readlink(f"{folder}/latest-rank0.pt") == named(kind, 1)
        assert read(f"{folder}/latest-rank0.pt")
    dist.barrier()
    resumed = fit(FSDP2, dict(config), batches=2, autoresume=True, run_name="again", **saving_options)
    assert len(resumed.losses) == 1
    if dist.get_rank() == 0:
        assert os.readlink(f"{folder}/latest-rank0.pt") == named(kind, 2)


@pytest.mark.parametrize("kind", TYPES)
def test_a_full_disk_ends_the_next_step(tmp_path: Path, kind: str):
    """All ranks stop one step later, not at the end of the run, and the next run loads the last valid checkpoint."""
    run_ranks(check_full_disk, 2, str(tmp_path), kind)


@on_ranks(2)
def test_a_rank_with_a_slow_disk():
    """fit waits for the last checkpoint, and the saver for uploads. Finished ranks waited in a collective,
    which ended the job after dist_timeout with a partially uploaded checkpoint."""
    # Rank 1 writes and uploads for longer than the collectives' timeout.
    from composer_fsdp2.compat import async_saving, checkpoint_saver
    from composer_fsdp2.training.control import control_group

    def slow(*args: Any) -> None:
        time.sleep(1.5 * dist.get_rank())

    done = mock.Mock()
    pending = async_saving._Pending(mock.Mock(), control_group(), slow, mock.Mock(), done)
    saver = mock.Mock(latest_filename=None, num_checkpoints_to_keep=0)
    with impatient(1.0):
        pending.start()
        pending.finish()
        checkpoint_saver._finish_save(saver, None, slow, mock.Mock(fsdp_sharded_state_dict_enabled=True))
    done.assert_called_once()
    saver._rotate_checkpoints.assert_called_once()
