"""Ranks that compute one batch together have the same one: compared, sent, or gathered."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.cases import for_each
from support.examples import examples
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.rnn import pad_sequence

from composer_fsdp2 import (
    ConfigError,
    plan_sharding,
    prepare_fully_shard,
    translate,
)
from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.parallel.batches import check_batch, share_batch
from composer_fsdp2.parallel.contents import digest_of, parts_of
from composer_fsdp2.parallel.joining import join_rows
from composer_fsdp2.training.run import find_batch_group

pytestmark = pytest.mark.any_torch

NAN = float("nan")


@dataclasses.dataclass
class Image:
    pixels: torch.Tensor
    caption: str


Pair = namedtuple("Pair", "x y")


class Opaque:
    """A batch's own type, with a set, whose order differs between processes."""

    def __init__(self, number: int) -> None:
        self.tags, self.numbers = {"one", "two", "three", "four"}, torch.full((2,), float(number))


def batches(number: int) -> dict[str, Any]:
    """By structure, a batch of some rank."""
    ones, ids = torch.full((2, 3), float(number)), torch.arange(6).reshape(2, 3) + number
    return {
        "tensor": ones,
        "mapping": {"input_ids": ids, "names": ["a", f"b{number}"], "scale": 0.5},
        "like a mapping": UserDict(input_ids=ids, attention_mask=torch.ones_like(ids)),
        "tuple": (ones, ids),
        "nested": [{"x": ones}, (ids, [ids, ones])],
        "named": Pair(ones, ids),
        "dataclass": Image(ones, f"caption {number}"),
        "own type": Opaque(number),
        "text": ["a", f"text {number}\n"],
        "of many dtypes": [ids.to(dtype) for dtype in (torch.bfloat16, torch.bool, torch.uint8, torch.complex64)],
        "scalar, empty, not contiguous": [torch.tensor(number), torch.empty(0, 3), ids.T],
        "not a number": torch.tensor([NAN, 1.0, float(number)]),
        "sparse": torch.diag(torch.arange(3.0) + number).to_sparse(),
    }


def is_same(a: Any, b: Any) -> bool:
    return digest_of(parts_of(a)) == digest_of(parts_of(b))


def groups_of_two() -> dist.ProcessGroup:
    """Of ranks 0 and 1, 2 and 3: this rank's. Called on all ranks."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    return groups[dist.get_rank() // 2]


# --- what a batch holds


@on_ranks(2)
def test_the_same_batch_is_the_same_in_every_process(folder: str) -> None:
    """Hash seeds, addresses and NaN do not make ranks with one batch raise."""
    torch.manual_seed(dist.get_rank())  # what a batch is does not depend on it
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {name: parts_of(batch) for name, batch in batches(0).items()})
    assert everywhere[0] == everywhere[1], "the same batch has other contents in another process"


def test_a_batch_that_differs_anywhere_is_another_one():
    """A difference that is not seen trains the model on parts of different samples."""
    for (name, ours), theirs in zip(batches(0).items(), batches(1).values(), strict=True):
        assert is_same(ours, ours), name
        assert not is_same(ours, theirs), name
    ids = torch.arange(6)
    others = (ids.reshape(2, 3), ids.int(), ids.double(), ids.tolist(), {"x": ids}, (ids,), ids[:5], ids.flip(0), None)
    assert len({digest_of(parts_of(each)) for each in (ids, *others)}) == 1 + len(others)
    assert is_same({"a": 1, "b": 2}, {"b": 2, "a": 1}), "no more than the order of keys"
    assert not is_same(["a", "b"], ["ab"]) and not is_same({"a": 1}, {"a": True})
    itself: list[Any] = [1]
    itself.append(itself)
    assert parts_of(itself), "one that contains itself ends"


# --- the first rank's


@on_ranks(4)
def test_the_first_ranks_batch_goes_to_its_group_whatever_its_structure(folder: str) -> None:
    """broadcast_batch: first makes any loader right, and no group takes another's batch."""
    rank, group = dist.get_rank(), groups_of_two()
    first = rank // 2 * 2

    def check(name: str) -> None:
        own, expected = batches(rank)[name], batches(first)[name]
        received = share_batch(own, group, "first")
        assert type(received) is type(own)
        assert is_same(received, expected), f"{parts_of(received)}\n{parts_of(expected)}"
        assert (received is own) == (rank == first), "the first rank keeps its own"

    for_each(check, {name: (name,) for name in batches(0)})
    assert share_batch("own", group, False) == "own"
    shared = share_batch({"rank": rank})
    assert shared == {"rank": 0}, f"without a group: all ranks, {shared}"


@on_ranks(2)
def test_a_batch_that_cannot_be_sent_is_an_error_on_every_rank(folder: str) -> None:
    """One rank's lambda leaves no other waiting for its batch."""
    own = {"x": torch.ones(2), "f": lambda: 0} if dist.get_rank() == 0 else {"x": torch.ones(2)}
    for how in ("first", "gather"):
        with pytest.raises(ConfigError, match=r"a batch cannot be sent \(.*lambda.*num_replicas.*replication"):
            share_batch(own, how=how)


# --- the rows of all


PAD = 9


def collated(rows: list[torch.Tensor], side: str) -> dict[str, Any]:
    """What a collator makes of rows of text."""
    lengths = torch.tensor([len(row) for row in rows])

    def padded(values: list[torch.Tensor], fill: int) -> torch.Tensor:
        return pad_sequence(values, batch_first=True, padding_value=fill, padding_side=side)

    return {
        "input_ids": padded(rows, PAD),
        "attention_mask": padded([torch.ones_like(row) for row in rows], 0),
        "labels": padded([row + 1 for row in rows], -100),
        "sequence_id": padded([torch.zeros_like(row) for row in rows], -1),
        "total_tokens": lengths.tolist(),
        "kind": lengths,  # one number a row
        "scale": 0.5,
    }


def texts(lengths: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 8, (length,), generator=generator) for length in lengths]


def test_rows_without_padding_are_padded_where_each_token_has_a_label():
    """A classifier takes the last token that is no padding, and token 0 for one."""
    rows = [torch.ones(1, length, dtype=torch.long) for length in (3, 5)]
    learned = [{"input_ids": row, "attention_mask": row, "labels": row} for row in rows]
    assert join_rows(learned)["input_ids"][0].tolist() == [1, 1, 1, 0, 0]
    classified = [each | {"labels": torch.tensor([1])} for each in learned]
    with pytest.raises(ConfigError, match=r"batch\['input_ids'\] is not padded on any rank, .* broadcast_batch: first"):
        join_rows(classified)


def test_a_mask_of_booleans_is_padded_as_one_of_numbers():
    """What a collator gives as a mask is not the same everywhere."""
    boolean = [{"input_ids": torch.ones(1, n), "attention_mask": torch.ones(1, n).bool()} for n in (2, 3)]
    assert join_rows(boolean)["attention_mask"].tolist() == [[True, True, False], [True, True, True]]


def test_a_list_in_a_mapping_keeps_a_value_for_each_row():
    """As many images as channels are not taken for parts of the batch, whose rows would be put together."""
    images = [[torch.full((3, 2), float(3 * rank + row)) for row in range(3)] for rank in range(2)]
    joined = join_rows([{"input_ids": torch.ones(3, 4), "images": each} for each in images])["images"]
    assert [(list(each.shape), float(each[0, 0])) for each in joined] == [([3, 2], float(n)) for n in range(6)]


def test_a_batch_of_as_many_parts_as_rows_is_no_list_of_rows():
    """Of two images and their boxes, ranks took the first one's images alone, or put boxes of other images together."""
    for counts in ((3, 1), (2, 2)):  # boxes in each image
        targets = [
            [{"boxes": torch.full((n, 4), float(2 * rank + row))} for row, n in enumerate(counts)] for rank in range(2)
        ]
        images, found = join_rows([(torch.full((2, 3), float(rank)), targets[rank]) for rank in range(2)])
        assert images[:, 0].tolist() == [0, 0, 1, 1]
        assert is_same(found, [*targets[0], *targets[1]])


def test_rows_are_those_of_tokens_wherever_they_lie():
    """A processor puts patches of images, of which a row has several, before the tokens."""

    def batch(rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = {"pixel_values": torch.zeros(7, 3), "input_ids": torch.full((2, 3), rank)}
        return inputs, torch.arange(2) + 2 * rank

    inputs, labels = join_rows([batch(0), batch(1)])
    assert inputs["input_ids"][:, 0].tolist() == [0, 0, 1, 1] and labels.tolist() == [0, 1, 2, 3]
    assert inputs["pixel_values"].shape == (14, 3)


def test_what_videos_and_sounds_have_is_that_of_all_ranks():
    """A number for each video, not for each row, was there once where ranks had the same, and else refused."""
    names = ("second_per_grid_ts", "input_features", "feature_attention_mask")
    for name in names:
        joined = join_rows(
            [{"input_ids": torch.full((2, 3), rank), name: torch.ones(3 - rank, 5)} for rank in range(2)]
        )
        assert len(joined[name]) == 5
        same = join_rows([{"input_ids": torch.full((2, 3), rank), name: torch.ones(1)} for rank in range(2)])
        assert len(same[name]) == 2


@examples(60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=4),
    side=st.sampled_from(["right", "left"]),
)
def test_text_of_different_lengths_is_padded_as_one_collator_would(lengths: list[list[int]], side: str):
    """Under gather a row's tokens, labels and places in the sequence are those of a batch of all rows, wherever the
    batches themselves say on which side they are padded."""
    of_ranks = [texts(each, seed) for seed, each in enumerate(lengths)]
    joined = join_rows([collated(rows, side) for rows in of_ranks])
    if not any(len(set(each)) > 1 for each in lengths):  # nothing was padded: either side is right
        side = "right"
    expected = collated([row for rows in of_ranks for row in rows], side)
    if not (expected["input_ids"] == PAD).any() or any(len(set(each)) > 1 for each in lengths):
        assert is_same(joined, expected), f"{joined}\n{expected}"
    mask, own = joined["attention_mask"].bool(), [row.tolist() for rows in of_ranks for row in rows]
    assert [row[keep].tolist() for row, keep in zip(joined["input_ids"], mask, strict=True)] == own
    assert (joined["labels"][~mask] == -100).all()


@on_ranks(4)
def test_the_rows_of_a_group_are_gathered_in_the_order_of_its_ranks(folder: str) -> None:
    """broadcast_batch: gather loses no sample and doubles none."""
    rank, group = dist.get_rank(), groups_of_two()
    first = rank // 2 * 2

    def check(name: str, expected: Any) -> None:
        received = share_batch(batches(rank)[name], group, "gather")
        assert is_same(received, expected), f"{received}\n{expected}"

    a, b = batches(first), batches(first + 1)
    tensor = torch.cat([a["tensor"], b["tensor"]])
    ids = torch.cat([a["tuple"][1], b["tuple"][1]])
    mapping = {"input_ids": ids, "names": ["a", f"b{first}", "a", f"b{first + 1}"], "scale": 0.5}
    cases: dict[str, Any] = {
        "tensor": tensor,
        "mapping": mapping,
        "like a mapping": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "tuple": (tensor, ids),
    }
    for_each(check, {name: (name, expected) for name, expected in cases.items()})
    own = batches(first)["mapping"]
    assert share_batch(own, group, "gather") is own, "what all have read is not there twice"
    alone = share_batch({"x": torch.tensor([rank])}, group, "gather", counts=rank % 2 == 1)
    assert alone["x"].tolist() == [first + 1], f"a rank without rows adds some: {alone}"
    nobody = share_batch({"x": torch.tensor([rank])}, group, "gather", counts=False)
    assert nobody["x"].tolist() == [first], f"nobody's rows: {nobody}"
    weights, pieces = torch.ones(3), torch.full((5 - rank % 2, 2), rank)
    whole = {"x": torch.full((2, 3), rank), "class_weights": weights, "pixel_values": pieces, "grids": [rank, rank]}
    of_all = share_batch(whole, group, "gather")
    assert is_same(of_all["class_weights"], weights), "what is of no row, and the same on all, is there once"
    assert of_all["pixel_values"][:, 0].tolist() == [first] * 5 + [first + 1] * 4, "pictures have any number of pieces"
    text = {"x": torch.full((2, 3), rank), "pixel_values": None}
    mixed = share_batch(text if rank % 2 else text | {"pixel_values": pieces, "image_sizes": weights}, group, "gather")
    assert is_same(mixed["pixel_values"], torch.full((5, 2), first)), "text on one rank, pictures on the other"
    assert is_same(mixed["image_sizes"], weights) and mixed["x"][:, 0].tolist() == [first] * 2 + [first + 1] * 2
    uneven = share_batch({"x": torch.full((1 + rank % 2,), rank)}, group, "gather")
    assert uneven["x"].tolist() == [first, first + 1, first + 1], f"of unequal last batches: {uneven}"


@on_ranks(2)
def test_rows_that_do_not_fit_together_are_an_error_on_every_rank(folder: str) -> None:
    """Instead of a hang, or of rows cut to one length, the message names the place and broadcast_batch: first."""
    rank = dist.get_rank()
    ids, mask = torch.ones(2, 3 + rank, dtype=torch.long), torch.ones(2, 3 + rank)
    cases: dict[str, tuple[Any, str]] = {
        "no mask": ({"input_ids": ids}, r"batch has rows of 3 and 4 tokens and no attention_mask"),
        "unknown key": (
            {"input_ids": ids, "attention_mask": mask, "loss_weights": mask},
            r"batch\['loss_weights'\] has rows of 3 places on one rank and 4 on another",
        ),
        "images": (torch.ones(2, 3, 4 + rank), r"batch has rows that do not fit together \(float32 \[2, 3, 4\], "),
        "dtypes": (torch.ones(2, dtype=torch.int64 if rank else torch.int32), r"\(int32 \[2\], int64 \[2\]\)"),
        "named tuples": (Pair(ids[:, :3] * rank, ids), r"batch is not one value per row, and differs .*Pair\(x="),
        "dataclasses": (batches(rank)["dataclass"], r"batch is not one value per row, and differs .*Image\(pixels="),
        "text": (batches(rank)["text"], r"batch\[1\] is not one value per row, .*'text 0\\n' and 'text 1\\n'"),
        "parts in a pair": ((ids[:, :3], [ids[:, :3] * rank] * 3), r"batch\[1\] is not one value per row, and differs"),
        "keys": ({"x": ids[:, :3]} | ({"weights": mask} if rank else {}), r"batch has 'weights' on some ranks only"),
        "packed": ({"x": ids[:, :3], "cu_seq_lens_q": ids[0]}, r"batch\['cu_seq_lens_q'\] holds offsets into"),
        "offsets": (
            {"x": ids[:, :3] * rank, "offsets": torch.tensor([0, 3, 6])},
            r"batch\['offsets'\] has 3 numbers, not one per row, and may hold offsets",
        ),
        "of no row": (
            {"x": ids[:, :3] * rank, "position_ids": ids[:1, :3] * rank},
            r"batch\['position_ids'\] is not one value per row, and differs between ranks \(tensor",
        ),
        "numbers": (
            {"x": ids[:, :3], "scale": rank},
            r"batch\['scale'\] is not one value per row, and differs between ranks \(0 and 1\)",
        ),
        "types": (
            [ids] if rank else (ids,),
            r"batch is not one value per row, and differs between ranks \(\(tensor.* and \[tensor",
        ),
        "lengths": (
            (ids[:, :3],) * (1 + rank),
            r"batch is not one value per row, and differs between ranks \(\(tensor",
        ),
        "in-context learning": (
            {"input_ids": ids[:, :3] * rank, "choice_groupings": [(0, 1)]},
            r"batch\['choice_groupings'\] holds offsets into",
        ),
    }

    def check(batch: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=f"^broadcast_batch: gather: .*{words}.*broadcast_batch: first"):
            share_batch(batch, how="gather")

    for_each(check, cases)


# --- comparing


@on_ranks(4)
def test_ranks_of_one_group_with_different_batches_are_an_error_on_all_ranks(folder: str) -> None:
    """Rank 3 alone reads something else: no rank trains, and the message says what to set."""
    rank, group = dist.get_rank(), groups_of_two()
    for name, batch in batches(rank // 2).items():
        check_batch(batch, group, what=name)
    ids = torch.arange(6).reshape(2, 3)
    other = ids + (rank == 3)
    cases: dict[str, tuple[Any, str]] = {
        "values": ({"input_ids": other}, r"batch\['input_ids'\], int64 \[2, 3\], has other values"),
        "shape": (ids[: 2 - (rank == 3)], r"batch is int64 \[2, 3\] in one, int64 \[1, 3\] in the other"),
        "dtype": (ids.int() if rank == 3 else ids, r"int64 \[2, 3\] in one, int32 \[2, 3\]"),
        "keys": ({"x": ids} | ({"y": 1} if rank == 3 else {}), r"one of them alone has batch\['y'\]"),
        "not a number": (torch.tensor([NAN, float(rank == 3)]), "has other values"),
    }

    def check(batch: Any, words: str) -> None:
        with pytest.raises(ConfigError) as raised:
            check_batch(batch, group, what="the first batch")
        ranks = "" if rank in (2, 3) else "rank 2 could not go on: .*"
        said = rf"^{ranks}ranks 2 and 3 compute one batch together .* at the first batch: .*{words}"
        raised.match(rf"(?s){said}.*num_replicas=world_size // 2.*replication=2.*broadcast_batch.*check_data")

    for_each(check, cases)


# --- the configuration


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_gathering_is_the_default_where_sequences_are_divided_and_only_there():
    """Who divides sequences loses no samples; who does not, trains as before."""
    for keys, size, how, check in (
        ({}, 1, BroadcastBatch.OFF, None),
        ({"context_parallel_degree": 2}, 2, BroadcastBatch.GATHER, None),
        ({"context_parallel_degree": 2, "broadcast_batch": False}, 2, BroadcastBatch.OFF, None),
        ({"context_parallel_degree": 2, "broadcast_batch": None, "check_data": None}, 2, BroadcastBatch.GATHER, None),
        (
            {"context_parallel_degree": 4, "broadcast_batch": "first", "check_data": False},
            4,
            BroadcastBatch.FIRST,
            False,
        ),
    ):
        config = translate(keys, device="cpu").config
        assert (config.data_block_size, config.effective_broadcast_batch, config.check_data) == (size, how, check), keys


def split_layers() -> dict[str, Any]:
    return {"0": ColwiseParallel(), "1": RowwiseParallel()}


def test_the_plan_says_who_shares_a_batch():
    """A run's report shows it, ranks that were told otherwise do not begin, and a key without effect is told of."""
    plans = {}
    for how in (False, "first", "gather"):
        config = translate({"broadcast_batch": how}, device="cpu", tensor_parallel_degree=2).config
        plans[how] = plan_sharding(small(), config, tensor_parallel=split_layers())
        assert not any("broadcast_batch" in note for note in plans[how].notes)
    assert "batches: each 2 ranks share one, that of the first of them; compared" in plans["first"].explain()
    assert len({plan.digest for plan in plans.values()}) == 3
    config = translate({"broadcast_batch": "first", "check_data": True}, device="cpu").config
    alone = plan_sharding(small(), config)
    assert alone.notes == (
        "check_data true and broadcast_batch first: no ranks share a batch (no tensor or context axis is above 1); "
        "nothing to do",
    )
    assert "batches:" not in alone.explain()


@on_ranks(4)
def test_a_sharded_model_knows_which_ranks_share_its_batch(folder: str) -> None:
    """And who sends it."""
    rank = dist.get_rank()
    model = small()
    prepare_fully_shard(model, None, {}, device="cpu")
    assert find_batch_group(model) is None
    for how in ("first", False):
        model, tensor = small(), {"tensor_parallel_degree": 2, "layer_plan": split_layers()}
        prepare_fully_shard(model, None, {"broadcast_batch": how}, device="cpu", tensor_parallel=tensor)
        block = find_batch_group(model)
        first = rank // 2 * 2
        assert block.ranks == (first, first + 1) == tuple(dist.get_process_group_ranks(block.group))
        assert (block.how, block.check) == (BroadcastBatch(how), True)
        assert share_batch(rank, block.group, block.how) == (first if how else rank)
