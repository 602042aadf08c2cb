"""The LLM Foundry callback ``record_loss``: a line of JSON per batch, loaded by the YAML's ``code_paths``.

The first line names torch's class that shards the model.
"""

import json
from pathlib import Path

import torch
from composer import Callback, Logger, State
from composer.utils import dist
from llmfoundry.registry import callbacks
from torch.distributed.fsdp import FSDPModule

# FSDP1's own: under the shim the public name also matches our sharded modules.
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["RecordLoss"]


class RecordLoss(Callback):
    """Write each batch's loss, averaged over the ranks, to ``path``; one all-reduce of a scalar per batch."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            counts = {
                kind.__name__: sum(isinstance(module, kind) for module in state.model.modules())
                for kind in (FullyShardedDataParallel, FSDPModule)
            }
            self.path.write_text(json.dumps({"modules": counts}) + "\n")

    def batch_end(self, state: State, logger: Logger) -> None:
        loss = torch.as_tensor(state.total_loss_dict["loss/train/total"], dtype=torch.float64)
        loss = state.device.tensor_to_device(loss)
        dist.all_reduce(loss)
        if dist.get_global_rank() == 0:
            line = {"batch": int(state.timestamp.batch), "loss": loss.item() / dist.get_world_size()}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


callbacks.register("record_loss", func=RecordLoss)
