"""LLM Foundry's MonolithicCheckpointSaver, which asks FSDP1 for full state, on a model sharded by ``fully_shard``."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.oracle import FSDP2, FSDP1_saving
from support.ranks import run_ranks

pytestmark = pytest.mark.foundry


def check_saver(folder: str) -> None:
    from support.saved import form
    from support.trainers import full_optimizer_state, make_trainer

    warnings.simplefilter("ignore")
    from llmfoundry.callbacks.monolithic_ckpt_callback import MonolithicCheckpointSaver

    def check(keep_optimizers: bool) -> None:
        dist.barrier()  # rank 0 has read the last case's files
        files, live = {}, {}
        for who, under in (("FSDP1", FSDP1_saving), ("FSDP2", FSDP2)):
            saver = MonolithicCheckpointSaver(f"{folder}/{who}", 2, keep_optimizers=keep_optimizers)
            config = {"state_dict_type": "sharded", "activation_checkpointing": True}
            with under():
                trainer = make_trainer(config, batches=2, optimizer="adamw", run_name="run", callbacks=[saver])
                trainer.fit()
                live[who] = full_optimizer_state(trainer) if who == "FSDP2" else {}
                trainer.close()
            files[who] = f"{folder}/{who}/ep0-ba2.pt"
        if dist.get_rank() == 0:
            theirs, ours = (torch.load(path, weights_only=False) for path in files.values())
            assert not form(ours).items() ^ form(theirs).items(), form(ours).items() ^ form(theirs).items()
            assert ("optimizers" in ours["state"]) == keep_optimizers
            for name, tensor in theirs["state"]["model"].items():
                torch.testing.assert_close(ours["state"]["model"][name], tensor, msg=name)
            if keep_optimizers:
                [saved], [of_fsdp1] = (each["state"]["optimizers"].values() for each in (ours, theirs))
                assert saved["param_groups"] == of_fsdp1["param_groups"]
                # With its run's own: FSDP1 on the CPU writes exp_avg_sq in the place of exp_avg, too (torch 2.7).
                torch.testing.assert_close(saved["state"], live["FSDP2"], rtol=0, atol=0)

    for_each(check, {f"keep_optimizers={kept}": (kept,) for kept in (False, True)})


@pytest.mark.filterwarnings("ignore")
def test_its_file_is_fsdp1s(tmp_path: Path):
    """A run that saves sharded, and a monolithic file now and then, keeps doing so: it ended in a KeyError."""
    run_ranks(check_saver, 2, str(tmp_path), timeout_s=300)
