"""Batches of LLM Foundry's loaders for ranks that share one."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.foundry_runs import YAML, train
from support.oracle import FSDP2
from support.ranks import run_ranks
from support.trainers import largest_difference

from composer_fsdp2 import ConfigError
from composer_fsdp2.parallel.contents import batch_values, digest_of
from composer_fsdp2.parallel.joining import join_rows

pytestmark = pytest.mark.foundry

CONTEXT = ("fsdp_config.context_parallel_degree=2",)
# In float64: nothing is cast.
GLU = ("model.ffn_config.ffn_type=mptglu", "model.n_layers=1", "fsdp_config.mixed_precision=FULL")
FFN = ("tp_config.strategy=ffn", "tp_config.tensor_parallel_degree=2")

AUTO = ("tp_config.strategy=auto", FFN[1], "fsdp_config.broadcast_batch=gather")  # the full model


def ffn_split(model: Any) -> set[str]:
    """The feed-forwards' projections that are sharded along a tensor axis."""
    parameters = {name: value for name, value in model.named_parameters() if ".ffn." in name}
    assert len(parameters) == 2 * 3, list(parameters)  # weights and biases, projections
    return {name.split(".")[-2] for name, value in parameters.items() if value.device_mesh.ndim == 2}


def check_yaml(folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    short = "max_duration=2ba"
    log = logging.getLogger("composer_fsdp2.compat.tensor_parallel")  # logs the TP-sharded layers
    alone = train(FSDP2, YAML, folder, "alone", *GLU, short)
    for name, how in {"ffn": FFN, "auto": AUTO, "sequences": CONTEXT}.items():
        times: list[Any] = []
        split: list[set[str]] = []

        def look(trainer: Any) -> None:
            times.append(trainer.state.timestamp)  # noqa: B023
            split.append(ffn_split(trainer.state.model))  # noqa: B023

        with mock.patch.object(log, "handle") as handle:
            gathered = train(FSDP2, YAML, folder, name, *GLU, short, *how, after=look)
        difference = largest_difference(gathered.losses, alone.losses)
        assert difference <= 1e-12, f"{name}, {difference}: {gathered.losses}, {alone.losses}"
        assert (int(times[0].sample), int(times[0].token)) == (2 * 16, 2 * 16 * 64), f"{name}: {times}"
        assert split == [{"up_proj", "gate_proj", "down_proj"} if how in (FFN, AUTO) else set()], f"{name}: {split}"
        if how is FFN and dist.get_rank() == 0:
            [message] = [call.args[0].getMessage() for call in handle.call_args_list]
            assert "FSDP1 trained the ranks" in message and "gate_proj is split as well" in message, message
    one = [*FFN, "model.n_layers=1", "max_duration=1ba"]
    refused = [*one, "fsdp_config.broadcast_batch=false"]
    with pytest.raises(ConfigError, match=r"`replication: 2` in the dataset section of an LLM Foundry YAML"):
        train(FSDP2, YAML, folder, "refused", *refused)
    same = train(FSDP2, YAML, folder, "same", *refused, "train_loader.dataset.replication=2")
    default = train(FSDP2, YAML, folder, "default", *one, "train_loader.dataset.replication=2")
    assert same.losses == default.losses and len(same.losses) == 1, f"{same.losses}, {default.losses}"


def test_a_yaml_whose_ranks_read_different_data_trains_on_all_of_it(folder: str):
    """In float64, tp_config's strategies and context parallelism train on global_train_batch_size samples a step, as
    without them. In a GLU the ffn strategy also shards the gate, which FSDP1's plan did not, and the log mentions
    it."""
    run_ranks(check_yaml, 2, folder)


def collated(examples: list[dict[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """The batch of Foundry's finetuning loaders, which pad a batch to its own longest row."""
    from llmfoundry.data.finetuning.collator import Seq2SeqFinetuningCollator
    from llmfoundry.data.utils import LossGeneratingTokensCollatorWrapper, get_tokens_per_batch_func

    collator = Seq2SeqFinetuningCollator(tokenizer, max_seq_len=64, decoder_only_format=True, pad_to_longest=True)
    batch: dict[str, Any] = LossGeneratingTokensCollatorWrapper(collator, get_tokens_per_batch_func())(examples)
    return batch


def test_finetuning_batches_of_different_lengths_are_those_of_one_collator(folder: str):
    """With prompts and responses padded on either side, a rank's rows have the same tokens, labels and counts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/data/tokenizer")
    lengths = [[(3, 2), (9, 4)], [(1, 1), (2, 3)], [(20, 9), (4, 4)]]
    of_ranks = [
        [{"turns": [{"input_ids": list(range(1, a + 1)), "labels": list(range(1, b + 1))}]} for a, b in of_rank]
        for of_rank in lengths
    ]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        joined = join_rows([collated(examples, tokenizer) for examples in of_ranks])
        expected = collated([each for examples in of_ranks for each in examples], tokenizer)
        assert len({collated(examples, tokenizer)["input_ids"].shape[1] for examples in of_ranks}) > 1
        same = {key: digest_of(batch_values(joined[key])) == digest_of(batch_values(expected[key])) for key in expected}
        assert all(same.values()) and joined.keys() == expected.keys(), f"{side}: {same}\n{joined}\n{expected}"
