"""A training script as a Composer user wrote it for FSDP1, without composer_fsdp2.

The tests run it under plain Python (FSDP1, with ``FSDP1_ON_CPU=1``) and under ``composer-fsdp2 run``.
"""

import argparse
import json
import os

import torch
import torch.nn.functional as F
from composer import Callback, ComposerModel, Trainer
from composer.algorithms import GradientClipping
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.ln(x))))


class Net(nn.Module):
    def __init__(self, d: int = 8, vocabulary: int = 13) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList([Block(d) for _ in range(2)])
        self.lm_head = nn.Linear(d, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x):
        h = self.wte(x)
        for block in self.blocks:
            h = block(h)
        return self.lm_head(h)

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)

    activation_checkpointing_fn = fsdp_wrap_fn


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.model = Net()

    def forward(self, batch):
        return self.model(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch[0].flatten())

    def eval_forward(self, batch, outputs=None):
        return outputs if outputs is not None else self.forward(batch)

    def get_metrics(self, is_train=False):
        return {}

    def update_metric(self, batch, outputs, metric):
        pass


class Record(Callback):
    """Records losses of every batch, averaged over ranks, and the types of parameters after an eval."""

    def __init__(self) -> None:
        self.losses, self.parameter_types = [], []

    def batch_end(self, state, logger):
        loss = state.device.tensor_to_device(torch.as_tensor(state.total_loss_dict["loss/train/total"]))
        dist.all_reduce(loss)
        self.losses.append(loss.item() / dist.get_world_size())

    def eval_end(self, state, logger):
        self.parameter_types.append(sorted({type(p).__name__ for p in state.model.parameters()}))


def data(n: int = 96) -> TensorDataset:
    return TensorDataset(torch.randint(0, 13, (n, 5), generator=torch.Generator().manual_seed(3)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--fsdp", default="{}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--save-folder")
    parser.add_argument("--load-path")
    parser.add_argument("--eval", action="store_true")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--exit-code", type=int, default=0)
    args = parser.parse_args()

    if os.environ.get("FSDP1_ON_CPU"):  # FSDP1 requires a CUDA device even without a GPU
        torch.cuda.current_device = lambda: torch.device("cpu")

    model = Model()
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = data()
    record = Record()
    evaluation = data(16)
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=DataLoader(
            dataset, batch_size=4, sampler=dist.get_sampler(dataset, shuffle=True, drop_last=True)
        ),
        eval_dataloader=DataLoader(evaluation, batch_size=4, sampler=dist.get_sampler(evaluation))
        if args.eval
        else None,
        eval_interval="3ba" if args.eval else 1,
        max_duration=f"{args.batches}ba",
        device=args.device,
        device_train_microbatch_size=args.microbatch,
        parallelism_config={"fsdp": json.loads(args.fsdp)},
        algorithms=[GradientClipping("norm", args.clip)] if args.clip else [],
        callbacks=[record],
        save_folder=args.save_folder,
        save_interval=f"{args.batches}ba",
        load_path=args.load_path,
        progress_bar=False,
        log_to_console=False,
        seed=17,
    )
    trainer.fit()
    if args.out and dist.get_global_rank() == 0:
        kinds = sorted(
            {
                cls.__name__
                for m in model.modules()
                for cls in type(m).__mro__
                if "FSDP" in cls.__name__ or "FullyS" in cls.__name__
            }
        )
        with open(args.out, "w") as file:
            json.dump({"losses": record.losses, "types": record.parameter_types, "kinds": kinds}, file)
    raise SystemExit(args.exit_code)


if __name__ == "__main__":
    main()
