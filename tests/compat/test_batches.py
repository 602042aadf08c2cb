"""check_data and broadcast_batch in a real Trainer: the samples that ranks of one batch train on and count, and
errors."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.callbacks import algorithm, callback
from support.cases import for_each
from support.comparing import full_parameters
from support.on_ranks import on_ranks
from support.oracle import FSDP2
from support.synchronisations import Synchronisations
from support.trainers import objects_of_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from composer_fsdp2 import ConfigError, ShardingConfig
from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.parallel.batches import make_batch_group
from composer_fsdp2.training.run import run_of

pytestmark = pytest.mark.composer

NUM_SAMPLES, ROWS, TOKENS, LR = 24, 2, 4, 0.5
OFF, FIRST, GATHER = BroadcastBatch


class Samples(Dataset[Any]):
    """Sample i is four tokens, and its number."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, 16, (num_samples, TOKENS), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[number], "number": number}


def build_net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def build_model() -> Any:
    from composer import ComposerModel
    from torchmetrics import CatMetric

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = build_net(), CatMetric()

        def forward(self, batch: Any) -> Any:
            return self.net(batch["input_ids"])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return loss_of(outputs, batch["input_ids"])

        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            return self.forward(batch) if outputs is None else outputs

        def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
            return {} if is_train else {"seen": self.seen}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(batch["number"].float())

    return Model()


def record() -> Any:
    """A callback that records the samples of every microbatch, and the timestamp after every batch."""
    made = callback(
        before_forward=lambda state: made.microbatches.append(state.batch["number"].tolist()),
        batch_end=lambda state: made.losses.append(float(state.total_loss_dict["loss/train/total"])),
    )
    made.microbatches, made.losses = [], []
    return made


def sampler(dataset: Any, *, replicated: bool, shuffle: bool = True, **options: Any) -> DistributedSampler[Any]:
    """A sampler over all ranks, or the same one on ranks 0 and 1, and on 2 and 3."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replicas = (world_size // 2, rank // 2) if replicated else (world_size, rank)
    return DistributedSampler(dataset, *replicas, shuffle=shuffle, **options)


def make(
    how: BroadcastBatch | None,
    *,
    replicated: bool = False,
    loader: Any = None,
    duration: str = "1ep",
    microbatch: int | str | None = ROWS,
    check: bool | None = None,
    model: Any = None,
    callbacks: Any = (),
    tensor: bool = False,
    **options: Any,
) -> Any:
    """A Trainer in which two ranks share a batch, with tensor parallelism if ``tensor``. Called on all ranks."""
    from composer import Trainer

    model, dataset = build_model() if model is None else model, Samples()
    if loader is None:
        loader = DataLoader(dataset, batch_size=ROWS, sampler=sampler(dataset, replicated=replicated))
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=LR),
        train_dataloader=loader,
        max_duration=duration,
        device="cpu",
        device_train_microbatch_size=microbatch,
        parallelism_config=split_layers(how, check) if tensor else {"fsdp": {}},
        callbacks=[record(), *callbacks],
        progress_bar=False,
        log_to_console=False,
        seed=17,
        **options,
    )
    if not tensor:
        share(trainer, how, check)
    return trainer


def split_layers(how: BroadcastBatch | None, check: bool | None) -> dict[str, Any]:
    """Tensor parallelism over two ranks, with the two keys unless they are None."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    keys = {"broadcast_batch": None if how is None else how.value, "check_data": check}
    plan = {"net.1": ColwiseParallel(output_layouts=Replicate())}
    given = {key: value for key, value in keys.items() if value is not None}
    return {"fsdp": given, "tp": {"layer_plan": plan, "tensor_parallel_degree": 2}}


def share(trainer: Any, how: BroadcastBatch | None, check: bool | None = None) -> None:
    """Shares batches as tensor parallelism over two ranks does, without TP-sharded layers."""
    config = ShardingConfig(context_parallel_degree=2, broadcast_batch=how, check_data=check)
    run_of(trainer.state.model).batch = make_batch_group(config)


@contextlib.contextmanager
def trained(how: BroadcastBatch | None, **options: Any) -> Iterator[Any]:
    """The Trainer of ``make`` after fit; it is closed on exit."""
    with FSDP2():
        trainer = make(how, **options)
        trainer.fit()
    yield trainer
    trainer.close()


def recorded(trainer: Any) -> Any:
    return next(each for each in trainer.state.callbacks if hasattr(each, "microbatches"))


def samples_of(rank: int, num_replicas: int, epoch: int = 0) -> list[list[int]]:
    """The batches of a rank's DistributedSampler in an epoch."""
    own = DistributedSampler(Samples(), num_replicas, rank, shuffle=True)
    own.set_epoch(epoch)
    numbers = list(own)
    return [numbers[at : at + ROWS] for at in range(0, len(numbers), ROWS)]


def trained_by_blocks(how: BroadcastBatch, *, replicated: bool, epoch: int = 0) -> list[list[list[int]]]:
    """The samples to be trained on by batch and group, on four ranks."""
    if replicated:
        of_blocks = [samples_of(block, 2, epoch) for block in range(2)]
    else:
        of_ranks = [samples_of(rank, 4, epoch) for rank in range(4)]
        if how is FIRST:
            of_blocks = [of_ranks[0], of_ranks[2]]
        else:
            of_blocks = [[a + b for a, b in zip(of_ranks[first], of_ranks[first + 1], strict=True)] for first in (0, 2)]
    return [list(each) for each in zip(*of_blocks, strict=True)]


def one_process(batches: list[list[list[int]]]) -> list[float]:
    """The losses of one process that trains on all samples of each batch."""
    net, dataset, losses = build_net(), Samples(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for of_blocks in batches:
        tokens = dataset.tokens[[number for block in of_blocks for number in block]]
        optimizer.zero_grad()
        loss = loss_of(net(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def samples_in(trainer: Any) -> list[int]:
    return [number for each in recorded(trainer).microbatches for number in each]


def assert_same_losses(trainer: Any, expected: list[float]) -> None:
    assert recorded(trainer).losses == pytest.approx(expected, rel=1e-5, abs=1e-6)


# --- training samples and their counts


WAYS = {
    "the same data": (OFF, True),
    "first": (FIRST, False),
    "gather": (GATHER, False),
    "gather of the same": (GATHER, True),
}


@on_ranks(4)
def test_ranks_that_share_a_batch_train_as_one_process_on_its_samples():
    """In every mode the losses equal those of one process, no sample is lost under gather, and the Trainer counts the
    samples and tokens of each rank's loader."""
    block = dist.get_rank() // 2

    def check(how: BroadcastBatch, replicated: bool, microbatch: int | None, tensor: bool) -> None:
        batches = trained_by_blocks(how, replicated=replicated)[:2]
        options: dict[str, Any] = {"duration": "2ba", "microbatch": microbatch, "tensor": tensor}
        with trained(how, replicated=replicated, **options) as trainer:
            seen, rows, time = recorded(trainer).microbatches, len(batches[0][block]), trainer.state.timestamp
        assert samples_in(trainer) == [number for each in batches for number in each[block]], f"{seen}, not {batches}"
        assert len(seen) == 2 * (1 if microbatch == 4 or rows == 2 else 2), f"microbatches: {seen}"
        assert_same_losses(trainer, one_process(batches))
        counted = [int(each.value) for each in (time.batch, time.sample, time.token)]
        assert counted == [2, 2 * 4 * ROWS, 2 * 4 * ROWS * TOKENS], f"batches, samples, tokens: {counted}"

    cases: dict[str, tuple[BroadcastBatch, bool, int | None, bool]] = {
        name: (*way, ROWS, tensor) for (name, way), tensor in zip(WAYS.items(), (True, False) * 2, strict=True)
    }
    cases |= {
        "gather in one microbatch": (GATHER, False, 4, True),
        "gather in microbatches of the loader": (GATHER, False, None, False),
    }
    for_each(check, cases)


@on_ranks(4)
def test_durations_are_in_what_loaders_read():
    """An epoch is one pass of every loader; a duration in samples or tokens ends at the same batch as without the
    keys."""

    def check(how: BroadcastBatch, replicated: bool, duration: str, batches: int, epochs: int, samples: int) -> None:
        options = {"train_subset_num_batches": 2} if duration == "subset" else {}
        with trained(how, replicated=replicated, duration="2ep" if options else duration, **options) as trainer:
            time = trainer.state.timestamp
        found = (int(time.batch), int(time.epoch), int(time.sample))
        assert found == (batches, epochs, samples), f"batches, epochs, samples: {found}"
        if how is GATHER and duration == "2ep":
            of_ranks = objects_of_ranks(samples_in(trainer))
            assert Counter(of_ranks[0] + of_ranks[2]) == dict.fromkeys(range(NUM_SAMPLES), 2), (
                "each sample once an epoch"
            )

    cases = {
        "an epoch of the same data": (OFF, True, "1ep", 6, 1, 48),
        "two epochs of gather": (GATHER, False, "2ep", 6, 2, 48),
        "samples of first": (FIRST, False, "16sp", 2, 0, 16),
        "tokens": (GATHER, False, "64tok", 2, 0, 16),
        "a subset": (GATHER, False, "subset", 4, 2, 32),
    }
    for_each(check, cases)


# --- different data is an error


def refused(trainer: Any, words: str, batches: int = 0) -> None:
    """Checks that fit raises on this rank after ``batches`` batches. Called on all ranks."""
    before = copy.deepcopy(full_parameters(trainer.state.model))
    with pytest.raises(ConfigError) as raised:
        trainer.fit()
    raised.match(rf"(?s)ranks \d and \d compute one batch together .*{words}.*check_data: false")
    assert int(trainer.state.timestamp.batch) == batches
    after = full_parameters(trainer.state.model)
    same = [torch.equal(before[name], after[name]) for name in before]
    assert all(same) if batches == 0 else not all(same)
    trainer.close()


class ChangesLater(DistributedSampler[Any]):
    """Differs between ranks from some epoch on."""

    def __iter__(self) -> Iterator[Any]:
        rank, self.rank = self.rank, dist.get_rank() % 2 if self.epoch >= 1 else 0
        yield from list(super().__iter__())
        self.rank = rank


@on_ranks(4)
def test_different_data_in_a_group_is_an_error_before_anything_is_trained():
    """Losses of parts of different samples are finite; different data in one group, or from a later epoch on, cost a
    run."""
    remedies = r"num_replicas=world_size // 2.*replication=2.*broadcast_batch: first or gather"
    with FSDP2():
        refused(make(OFF), rf"the first batch of fit.*batch\['input_ids'\], int64 \[2, 4\], has other.*{remedies}")
        refused(make(OFF, duration="2ba", microbatch=1), remedies)
        refused(make(None, tensor=True), remedies)  # by default
        dataset = Samples()
        rank = dist.get_rank()
        odd = DataLoader(dataset, ROWS, sampler=DistributedSampler(dataset, 4, max(rank, 1) // 2 * 2 + (rank == 3)))
        refused(make(OFF, loader=odd), remedies)  # ranks 0 and 1 have the same
        later = ChangesLater(dataset, 2, 0, shuffle=False)
        refused(make(OFF, loader=DataLoader(dataset, ROWS, sampler=later), duration="2ep"), "its epoch", batches=6)
    with trained(OFF, check=False, duration="1ba", tensor=True):
        pass


def random_algorithm(event: str) -> Any:
    def mix(state: Any) -> None:
        state.batch = {**state.batch, "input_ids": torch.randint(0, 16, state.batch["input_ids"].shape)}

    return algorithm("Mixes", event, mix)


@on_ranks(2)
def test_an_algorithm_that_draws_other_numbers_on_each_rank_is_an_error():
    """With context parallelism, MixUp would mix different samples on each rank of a group, and train on them."""
    words = "algorithm or microbatch_transforms that draws random numbers.*Composer seeds each rank"
    for how, event in ((OFF, "before_forward"), (FIRST, "after_dataloader"), (GATHER, "before_forward")):
        with FSDP2():
            trainer = make(how, duration="2ba", algorithms=[random_algorithm(event)], replicated=how is OFF)
            refused(trainer, words)
        seen = recorded(trainer).microbatches
        assert bool(seen) == (event == "before_forward"), f"a forward of other shapes would hang: {seen}"


@on_ranks(2)
def test_an_algorithm_draws_the_same_numbers_on_the_ranks_that_split_a_layer():
    """Otherwise MixUp could not be used with tensor parallelism at all."""
    for how, event in ((OFF, "after_dataloader"), (GATHER, "before_forward")):
        options = {"algorithms": [random_algorithm(event)], "replicated": how is OFF}
        with trained(how, duration="2ba", tensor=True, **options):
            pass


@on_ranks(4)
def test_a_run_that_resumes_within_an_epoch_goes_on_with_the_next_samples(folder: str):
    """Its data is compared again, because data that was equal before the restart may differ after it."""
    block = dist.get_rank() // 2

    def check(how: BroadcastBatch, replicated: bool) -> None:
        saved, options = f"{folder}/{how.name}", {"replicated": replicated}
        batches = trained_by_blocks(how, replicated=replicated)[:2]
        with trained(how, duration="1ba", save_folder=saved, save_interval="1ba", **options):
            pass
        with trained(how, duration="2ba", load_path=f"{saved}/ep0-ba1-rank0.pt", **options) as resumed:
            assert samples_in(resumed) == batches[1][block]
            assert_same_losses(resumed, one_process(batches)[1:])

    for_each(check, {how.name: (how, how is OFF) for how in BroadcastBatch})
    with FSDP2():
        resumed = make(OFF, duration="2ba", load_path=f"{folder}/{OFF.name}/ep0-ba1-rank0.pt")
        with pytest.raises(ConfigError, match=r"the first batch of fit"):
            resumed.fit()
        assert int(resumed.state.timestamp.batch) == 1
        resumed.close()


# --- loaders of different lengths, or without a DistributedSampler


class Stream(IterableDataset[Any]):
    """Endless except on the last rank; the numbers differ between ranks."""

    def __init__(self, ends_after: int) -> None:
        self.ends_after = ends_after

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank()
        last = rank == dist.get_world_size() - 1
        for number in range(self.ends_after if last else 1000):
            yield {"input_ids": torch.full((TOKENS,), number % 16), "number": 1000 * rank + number}


@on_ranks(2)
def test_loaders_that_end_at_different_batches_end_the_epoch_on_all_ranks():
    """No rank waits for the batch of a rank whose data has ended, and a smaller last batch is no error."""
    for how, rows in ((FIRST, 2), (GATHER, 3)):
        loader = DataLoader(Stream(ends_after=3), batch_size=ROWS, drop_last=False)
        with trained(how, loader=loader, train_subset_num_batches=5, microbatch=4) as trainer:
            seen, time = recorded(trainer).microbatches, trainer.state.timestamp
        assert (int(time.epoch), int(time.batch)) == (1, 2), time
        assert seen[0] == ([0, 1] if how is FIRST else [0, 1, 1000, 1001]), seen
        assert len(seen[1]) == rows, f"the last rank's second batch has one row: {seen}"


# --- evaluations and predictions


@on_ranks(4)
def test_an_evaluation_sees_every_sample_as_often_as_ranks_compute_it():
    """A sampler repeats samples to give all ranks the same number. If some ranks of a group drop the repetitions, their
    batches have different shapes; if repetitions count, they change a metric."""
    from composer import Evaluator

    model = build_model()
    with FSDP2():
        trainer = make(OFF, replicated=True, duration="1ba", model=model)

    def check(how: BroadcastBatch, replicated: bool, num_samples: int, rows: int) -> None:
        share(trainer, how)
        dataset = Samples(num_samples)
        own = sampler(dataset, replicated=replicated, shuffle=False)
        loader = DataLoader(dataset, batch_size=rows, sampler=own, drop_last=False)
        with FSDP2():
            trainer.eval(
                Evaluator(label="all", dataloader=loader, metric_names=["seen"], device_eval_microbatch_size=2)
            )
        seen = Counter(trainer.state.eval_metrics["all"]["seen"].compute().int().reshape(-1).tolist())
        read = range(num_samples)
        expected = dict.fromkeys([number for number in read if number % 4 in (0, 2)] if how is FIRST else read, 2)
        assert seen == expected, f"{num_samples} samples in batches of {rows}: {dict(seen)}, not {expected}"

    sizes = ((5, 1), (6, 2), (7, 2))  # samples, and rows of a batch
    cases = {f"{how.name}, {size}": (how, how is OFF, *size) for how in BroadcastBatch for size in sizes}
    for_each(check, cases | {"nothing repeated": (FIRST, False, 8, 1), "GATHER of the same": (GATHER, True, 7, 2)})
    trainer.close()


@on_ranks(2)
def test_different_data_in_an_evaluation_or_prediction_is_an_error():
    """A metric of parts of different samples looks plausible."""
    loader = DataLoader(Samples(), ROWS, sampler=sampler(Samples(), replicated=False))
    with FSDP2():
        trainer = make(OFF, replicated=True)
        for act, what in ((trainer.eval, "an evaluation"), (trainer.predict, "predict")):
            with pytest.raises(ConfigError, match=f"the first batch of {what}"):
                act(loader)
        trainer.close()


# --- device synchronizations


@on_ranks(2)
def test_nothing_of_a_check_waits_after_the_first_batch():
    """A comparison of each batch would make the host synchronize with the GPU in every step."""
    found = Synchronisations()

    def batch_end(state: Any) -> None:
        """Collects from the second batch on."""
        if int(state.timestamp.batch) == 1:
            found.__enter__()

    def fit_end(state: Any) -> None:
        if int(state.timestamp.batch) == 2:
            found.__exit__(None, None, None)

    with FSDP2():
        trainer = make(OFF, replicated=True, duration="2ba", callbacks=[callback(batch_end=batch_end, fit_end=fit_end)])
        trainer.fit()
        assert not (waits := found.of_packages("composer_fsdp2", "composer_fsdp2.compat")), waits
        with Synchronisations() as of_first:
            trainer.fit(duration="1ba")
        assert of_first.of_packages("composer_fsdp2", "composer_fsdp2.compat"), "the first batch of a fit is compared"
        trainer.close()
