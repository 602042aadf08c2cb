"""Give TP and CP peers the same batch in a Trainer: broadcast, gather or compare it before they train on it.

[Note: what is counted] A Trainer counts a batch's samples and tokens when its dataloader returns it, and sums them over
all ranks. Batches are broadcast or gathered afterwards, so each rank counts the samples that its own dataloader read.
Under ``gather`` every sample is counted once, although several ranks train on it. If peers read the same data, or
``first`` drops the other ranks' data, a sample is counted once for each rank that read it, as with Composer's FSDP1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from composer.core import DataSpec, Event, State
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.parallel.batches import check_batch, check_values, share_batch, sync_random_states
from composer_fsdp2.parallel.contents import BatchValue, batch_values
from composer_fsdp2.sharding.agree import agree
from composer_fsdp2.training.run import BatchGroup, find_batch_group

from .seams import seam

# Events after a batch is counted and before it is first used.
_BATCHES = {
    Event.AFTER_DATALOADER: "the first batch of fit, or of its epoch",
    Event.EVAL_BATCH_START: "the first batch of an evaluation",
    Event.PREDICT_BATCH_START: "the first batch of predict",
}
# The next batch after these events is a loader's first.
_FIRST_BATCH_AFTER = {
    Event.FIT_START: Event.AFTER_DATALOADER,
    Event.EPOCH_START: Event.AFTER_DATALOADER,
    Event.EVAL_START: Event.EVAL_BATCH_START,
    Event.PREDICT_START: Event.PREDICT_BATCH_START,
}
_SAME_WHEN_READ = (
    "They were the same when the loader returned them: an algorithm or microbatch_transforms that draws random "
    "numbers, such as MixUp, made them different, because Composer seeds each rank differently. Remove it, or do the "
    "same in the dataset"
)


@dataclass(slots=True)
class _Compared:
    """Tracks which batches of a model are still to be compared.

    Args:
        due: Events whose next batch is the first one of a dataloader.
        microbatches: Inputs of each microbatch of the batch that is being compared; None between comparisons.
    """

    due: set[Event] = field(default_factory=set)
    microbatches: list[list[BatchValue]] | None = None


_compared_of: WeakKeyDictionary[nn.Module, _Compared] = WeakKeyDictionary()


def before_event(state: State, event: Event) -> None:
    """Broadcast, gather or compare a batch before it is used. Called on all ranks before each event."""
    block = find_batch_group(state.model)
    if block is None:
        return
    compared = _compared(state)
    if event in _FIRST_BATCH_AFTER:
        compared.due.add(_FIRST_BATCH_AFTER[event])
    if event is Event.EVAL_START:
        _begin_evaluation(state, block)
    elif event in _BATCHES:
        _replace_batch(state, event, block, is_first=event in compared.due)
    elif event is Event.BEFORE_TRAIN_BATCH and compared.microbatches is not None:
        compared.microbatches.clear()  # left from an attempt that ran out of memory
    elif event is Event.AFTER_TRAIN_BATCH and compared.microbatches is not None:
        parts, compared.microbatches = [part for each in compared.microbatches for part in each], None
        check_values(parts, block.group, what="the first batch's forward", alternatives=_SAME_WHEN_READ)


def after_event(state: State, event: Event) -> None:
    """Compare the first batch of a dataloader after algorithms have changed it.

    Called on all ranks after each event.
    """
    block = find_batch_group(state.model)
    if block is None:
        return
    compared = _compared(state)
    if event in compared.due and event in _BATCHES:
        compared.due.remove(event)
        if block.check and event is Event.AFTER_DATALOADER:
            check_values(batch_values(state.batch), block.group, what=_BATCHES[event], alternatives=_SAME_WHEN_READ)
            compared.microbatches = []
    elif event is Event.BEFORE_FORWARD and compared.microbatches is not None:
        # Compared later: a rank may run out of memory here, and the other ranks would hang in a comparison.
        number = len(compared.microbatches)
        compared.microbatches.append(batch_values(state.batch, f"microbatch {number}"))
    elif event is Event.EVAL_END:
        _end_evaluation()


def _compared(state: State) -> _Compared:
    return _compared_of.setdefault(state.model, _Compared())


def _replace_batch(state: State, event: Event, block: BatchGroup, *, is_first: bool) -> None:
    """Replace this rank's batch by its group's."""

    def share() -> Any:
        if event is Event.EVAL_BATCH_START and _evaluation is not None and _evaluation.state is state:
            return _evaluation.share(state.batch)
        return share_batch(state.batch, block.group, block.how)

    # Errors are agreed on for a loader's first batch only, which shows them; later, a rank that raises ends the run.
    state.batch = agree(share, lambda _: "", ConfigError) if is_first else share()
    # Loaders that read different data may have drawn different numbers
    if is_first or block.how is not BroadcastBatch.OFF:
        sync_random_states(block)
    if is_first and block.check and block.how is BroadcastBatch.OFF:
        check_batch(state.batch, block.group, what=_BATCHES[event])


# ---------------------------------------------------------------------------------------------------------------------
# Padding of samplers in evaluations


class _GroupSampler(DistributedSampler[Any]):
    """The DistributedSampler that Composer sees in an evaluation, so it counts the samples that all ranks together
    read.

    A sampler repeats samples so each rank has the same number. Composer drops the repeated sample from the last batch
    of the last ranks, which is correct only if each rank has its own batch. Here each rank sets whether the batch of
    its TP and CP peers ends with a repeated sample.
    """

    def __init__(self, sampler: DistributedSampler[Any], num_read: int, is_padded: bool) -> None:
        self._sampler = sampler
        self.dataset = range(num_read)  # type: ignore[assignment]
        self.set_padded(is_padded)

    def set_padded(self, is_padded: bool) -> None:
        """Make Composer drop the last sample on this rank, or not.

        Composer drops it on the last ``total_size - len(dataset)`` ranks, which is set to all ranks or none.
        """
        self.total_size = len(self.dataset) + (dist.get_world_size() if is_padded else 0)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


@dataclass(slots=True)
class _Evaluation:
    """The evaluation in progress, of a model whose ranks share batches."""

    state: State
    block: BatchGroup
    spec: DataSpec
    sampler: DistributedSampler[Any] | None = None
    wrapped: _GroupSampler | None = None

    def wrap(self, sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
        """The sampler that Composer gets instead of the loader's."""
        num_samples, size = _length(sampler), len(self.block.ranks)
        if num_samples is None:
            return sampler
        num_padded, world_size = sampler.total_size - num_samples, dist.get_world_size()
        if sampler.num_replicas * size == world_size:  # all ranks of a group read the same data
            is_padded = sampler.rank >= sampler.num_replicas - num_padded
            return _GroupSampler(sampler, num_samples * size, is_padded)
        if sampler.num_replicas != world_size or self.block.how is BroadcastBatch.OFF:
            return sampler
        is_padded = self.block.how is BroadcastBatch.FIRST and self.block.ranks[0] >= world_size - num_padded
        self.sampler, self.wrapped = sampler, _GroupSampler(sampler, num_samples, is_padded)
        return self.wrapped

    def share(self, batch: Any) -> Any:
        """Return the batch that this rank's peers use. A gathered batch omits samples that the sampler repeated.

        Called on all ranks.
        """
        counts = True
        if self.block.how is BroadcastBatch.GATHER and self.sampler is not None and self._is_last(self.sampler):
            assert self.wrapped is not None
            num_samples = _length(self.sampler)
            assert num_samples is not None
            first_padded = dist.get_world_size() - (self.sampler.total_size - num_samples)
            num_rows = int(self.spec.get_num_samples_in_batch(batch))
            if dist.get_global_rank() >= first_padded:
                counts = num_rows > 1
                batch = self.spec.split_batch(batch, num_rows - 1)[0] if counts else batch
            # Composer does not update metrics with a batch that consists of padding.
            self.wrapped.set_padded(num_rows == 1 and self.block.ranks[0] >= first_padded)
        return share_batch(batch, self.block.group, self.block.how, counts=counts)

    def _is_last(self, sampler: DistributedSampler[Any]) -> bool:
        loader = self.spec.dataloader
        drops = isinstance(loader, DataLoader) and loader.drop_last
        return not drops and int(self.state.eval_timestamp.batch) + 1 == len(loader)


_evaluation: _Evaluation | None = None


def _begin_evaluation(state: State, block: BatchGroup) -> None:
    global _evaluation
    specs = [evaluator.dataloader for evaluator in state.evaluators]
    spec = next((spec for spec in specs if spec.dataloader is state.dataloader), None)
    _evaluation = None if spec is None else _Evaluation(state, block, spec)


def _end_evaluation() -> None:
    global _evaluation
    _evaluation = None


@seam(
    "composer.trainer.trainer",
    "_get_distributed_sampler",
    why="an evaluation dropped a sampler's padding on some ranks of those that share a batch",
)
def get_distributed_sampler(
    original: Callable[..., DistributedSampler[Any] | None], dataloader: DataLoader[Any]
) -> DistributedSampler[Any] | None:
    sampler = original(dataloader)
    if sampler is None or _evaluation is None or _evaluation.spec.dataloader is not dataloader:
        return sampler
    return _evaluation.wrap(sampler)


def _length(sampler: DistributedSampler[Any]) -> int | None:
    """The length of the sampler's dataset; None if unknown."""
    try:
        return len(sampler.dataset)  # type: ignore[arg-type]
    except (AttributeError, TypeError):
        return None
