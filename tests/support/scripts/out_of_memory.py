"""A run on GPUs with less memory than its batch needs: ``out_of_memory.py MICROBATCH GIB_OF_MEMORY PRECISION``.

The last line of its output is JSON: the final microbatch size, the loss of each batch, and MemoryMonitor's peak
reserved memory in GB.
"""

import json
import sys

import torch
import torch.nn.functional as F
from composer import Callback, ComposerModel, Trainer
from composer.callbacks import MemoryMonitor
from composer.loggers import InMemoryLogger
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, TOKENS, SAMPLES = 256, 4096, 16


class Block(nn.Module):
    """Its activations take 10 times its input's memory, 40 MiB a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.blocks(x)).mean(dim=(1, 2))

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Net()

    def forward(self, batch):
        return self.model(batch[0].expand(-1, TOKENS, -1))

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch[1])


class Record(Callback):
    def __init__(self) -> None:
        self.losses = []

    def batch_end(self, state, logger):
        self.losses.append(float(state.total_loss_dict["loss/train/total"]))


def main() -> None:
    microbatch, gib, precision = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    dist.initialize_dist("gpu", timeout=60)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)
    generator = torch.Generator().manual_seed(dist.get_global_rank())
    data = TensorDataset(
        torch.randn(4 * SAMPLES, 1, WIDTH, generator=generator), torch.randn(4 * SAMPLES, generator=generator)
    )
    model, record, logger = Model(), Record(), InMemoryLogger()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=1e-3),
        train_dataloader=DataLoader(data, batch_size=SAMPLES),
        max_duration="4ba",
        device="gpu",
        precision=precision,
        device_train_microbatch_size=microbatch if microbatch == "auto" else int(microbatch),
        parallelism_config={"fsdp": {}},
        callbacks=[record, MemoryMonitor()],
        loggers=[logger],
        progress_bar=False,
        dist_timeout=60,
    )
    trainer.fit()
    if dist.get_global_rank() == 0:
        size, reserved = trainer.state.device_train_microbatch_size, logger.data["memory/peak_reserved_mem"]
        print(json.dumps({"size": size, "losses": record.losses, "reserved_gb": [float(gb) for _, gb in reserved]}))


if __name__ == "__main__":
    main()
