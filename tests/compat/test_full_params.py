"""``summon_full_params`` as scripts, Composer and Hugging Face reach it: under the Trainer, and past the unwrapping."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.oracle import FSDP1, FSDP2, Under
from support.ranks import run_ranks
from support.training import FULL
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.composer


# --- a script's callback under the Trainer


def train(under: Under, parallelism: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A run whose callback reads and changes full weights and gradients, as it was written for FSDP1."""
    from composer import Callback, State
    from support.comparing import own_name
    from support.trainers import fit

    seen: list[Any] = []

    class Surgery(Callback):
        def after_backward(self, state: State, logger: Any) -> None:
            root = state.model.model
            assert root.module is not None
            with FullyShardedDataParallel.summon_full_params(state.model, with_grads=True):
                norms = [p.grad.norm() for p in root.parameters() if p.grad is not None]
                seen.append(("gradients", float(torch.stack(norms).norm())))
                for parameter in root.parameters():
                    if parameter.grad is not None:
                        parameter.grad.clamp_(-0.05, 0.05)

        def batch_end(self, state: State, logger: Any) -> None:
            root = state.model.model
            with torch.no_grad(), root.summon_full_params(root, recurse=False):
                root.module.lm_head.weight.mul_(0.9)
            self.note("batch", state)

        def eval_end(self, state: State, logger: Any) -> None:
            self.note("eval", state)

        def note(self, when: str, state: State) -> None:
            root = state.model.model
            with root.summon_full_params(state.model, writeback=False, offload_to_cpu=False):
                assert root._fsdp_wrapped_module.lm_head.weight.shape == (13, 8)
                for name, parameter in state.model.named_parameters():
                    seen.append(
                        (when, own_name(name), tuple(parameter.shape), float(parameter.detach().square().sum()))
                    )
                    if when == "batch":  # not after an eval, where FSDP1 runs the next forward on what it discards
                        parameter.detach().zero_()

    trained = fit(under, parallelism, callbacks=[Surgery()], eval_interval="2ba")
    return trained, seen


def check_trainer(parallelism: dict[str, Any]) -> tuple[Any, Any]:
    return train(FSDP1, parallelism), train(FSDP2, parallelism)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_callback_written_for_fsdp1(strategy: str):
    """Clipping of full gradients, surgery on weights and reading them after an eval: the same run on FSDP2, without a
    line changed."""
    from support.trainers import largest_difference

    for (theirs, their_notes), (ours, our_notes) in run_ranks(check_trainer, 2, {"sharding_strategy": strategy}):
        assert theirs.shards == {"FullyShardedDataParallel"} and ours.shards == {"FSDPModule"}
        assert largest_difference(ours.losses, theirs.losses) <= 1e-6
        assert [note[:-1] for note in our_notes] == [note[:-1] for note in their_notes]
        assert [note[-1] for note in our_notes] == pytest.approx([note[-1] for note in their_notes], rel=1e-5)
        assert {note[0] for note in our_notes} == {"gradients", "batch", "eval"}
        torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-5, atol=1e-7)


# --- where it is reached from


def check_static_form() -> None:
    from composer_fsdp2 import prepare_fully_shard

    original = vars(FullyShardedDataParallel)["summon_full_params"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    prepare_fully_shard(model, None, FULL, device="cpu")
    with FSDP2():
        with FullyShardedDataParallel.summon_full_params(model, recurse=True, writeback=False):
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole, strict=True))
        with FullyShardedDataParallel.summon_full_params(nn.Linear(3, 4)):
            pass
        # A model of FSDP1's, say a reward model that a script wraps itself, is FSDP1's.
        other = nn.Linear(3, 4)
        weight = other.weight.detach().clone()
        wrapped = FullyShardedDataParallel(other, device_id=torch.device("cpu"), use_orig_params=True)
        assert wrapped.module.weight.shape != weight.shape
        for around in (wrapped, nn.ModuleList([wrapped])):
            with FullyShardedDataParallel.summon_full_params(around):
                assert torch.equal(wrapped.module.weight, weight)
        with wrapped.summon_full_params(wrapped):
            assert torch.equal(wrapped.module.weight, weight)
    assert vars(FullyShardedDataParallel)["summon_full_params"] is original
    with FullyShardedDataParallel.summon_full_params(model):
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_static_form():
    """`FullyShardedDataParallel.summon_full_params(model)` shows shards without the shim; with it a model that FSDP1
    wraps is still FSDP1's."""
    run_ranks(check_static_form, 2)


def check_composers_call() -> None:
    """EMA's own function; Composer asks for FSDP1 first, and answers no."""
    from composer.algorithms.ema import ema
    from composer.models import ComposerClassifier

    from composer_fsdp2 import prepare_fully_shard

    torch.manual_seed(0)
    model = ComposerClassifier(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), num_classes=2)
    weight = model.module[0].weight.detach().clone()
    prepare_fully_shard(model, None, FULL, device="cpu")
    with mock.patch("composer.utils.misc.is_model_fsdp", return_value=True):
        context = ema.get_model_context_manager(model)
    with context:
        assert torch.equal(model.module[0].weight, weight)
    assert isinstance(model.module[0].weight, DTensor)


def test_composers_own_call():
    """`model.module.summon_full_params(model.module)`, where `model.module` is a root and the model's own child."""
    run_ranks(check_composers_call, 2)


# --- Hugging Face


def gpt2(*, adapters: bool = False) -> Any:
    from composer.models import HuggingFaceModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16, n_head=2, n_layer=2, n_positions=32, vocab_size=67, bos_token_id=1, eos_token_id=2, use_cache=False
    )
    inner = GPT2LMHeadModel(config)
    inner.fsdp_wrap_fn = lambda module: isinstance(module, GPT2Block)
    peft_config = None
    if adapters:
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=3, task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
        )
    return HuggingFaceModel(inner, tokenizer=None, use_logits=True, peft_config=peft_config)


def sharded(**options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model, and the full weights that it had."""
    from composer_fsdp2 import prepare_fully_shard

    model = gpt2(**options)
    state = {name: value.detach().clone() for name, value in model.model.state_dict().items()}
    prepare_fully_shard(model, None, FULL, device="cpu")
    assert isinstance(model.model, FSDPModule)
    return model, state


def check_unwrapping() -> None:
    """Each with the model, and with a unit within it."""
    import accelerate.utils
    from peft.tuners.lora.corda import get_model_device
    from transformers import modeling_utils

    model, _ = sharded()
    for unit in (model.model, model.model.transformer.h[0]):
        children = dict(unit.named_modules())
        assert modeling_utils.unwrap_model(unit) is unit
        assert modeling_utils.unwrap_model(unit, recursive=True) is unit
        with mock.patch.object(modeling_utils, "is_accelerate_available", return_value=False):
            assert modeling_utils.unwrap_model(unit) is unit
        for recursive in (False, True):
            assert accelerate.utils.extract_model_from_parallel(unit, recursive=recursive) is unit
            assert accelerate.utils.extract_model_from_parallel(unit, keep_fp32_wrapper=False) is unit
        assert get_model_device(unit) == "cpu"
        assert unit.module is unit  # for a script
        assert dict(unit.named_modules()) == children


def test_hugging_faces_unwrapping():
    """transformers' and accelerate's functions take wrappers off for as long as there is a `module`: saving a model
    would end in a RecursionError, or never."""
    run_ranks(check_unwrapping, 2)


def check_save_pretrained(folder: str, options: dict[str, Any]) -> bool:
    from transformers import GPT2LMHeadModel

    from composer_fsdp2 import summon_full_params

    model, state = sharded()
    root = model.model
    assert root._fsdp_wrapped_module.module is root
    with summon_full_params(model, **options):
        is_whole = not isinstance(root.lm_head.weight, DTensor)
        if dist.get_rank() == 0:
            root.save_pretrained(folder)
    dist.barrier()
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    torch.testing.assert_close(dict(loaded.state_dict()), state, rtol=0, atol=0)
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())
    return is_whole


@pytest.mark.parametrize("options", [{}, {"rank0_only": True, "writeback": False, "offload_to_cpu": True}], ids=str)
def test_save_pretrained(tmp_path: Path, options: dict[str, Any]):
    """The way in which most scripts wrote a Hugging Face model under FSDP1; tied weights are written once."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        assert run_ranks(check_save_pretrained, 2, folder, options) == [True, not options]


def check_save_adapters(folder: str) -> None:
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file

    model, state = sharded(adapters=True)
    root = model.model
    assert isinstance(root, PeftModel)
    expected = {name.replace(".default", ""): value for name, value in state.items() if "lora" in name}
    with root.summon_full_params(root, writeback=False):
        torch.testing.assert_close(get_peft_model_state_dict(root), expected, rtol=0, atol=0)
        if dist.get_rank() == 0:
            root.save_pretrained(folder)
    dist.barrier()
    torch.testing.assert_close(load_file(Path(folder, "adapter_model.safetensors")), expected, rtol=0, atol=0)


def test_save_adapters(tmp_path: Path):
    """peft writes its adapters, whole, and asks no unit what it wraps."""
    pytest.importorskip("peft")
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        run_ranks(check_save_adapters, 2, folder)


def check_generate(adapters: bool) -> None:
    """As newer releases of Composer write it, and as Hugging Face's Seq2SeqTrainer does."""
    model, state = sharded(adapters=adapters)
    reference = gpt2(adapters=adapters)
    reference.model.load_state_dict(state)
    x = torch.randint(3, 67, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    for each in (model, reference):
        each.eval()
    expected = reference.generate(x, **options)
    with FSDP2():
        for summoned in ({"writeback": False, "recurse": False}, {}):
            with FullyShardedDataParallel.summon_full_params(model.model, **summoned):
                tokens = model.model.generate(input_ids=x, **options)
                assert torch.equal(tokens, expected), f"{summoned}: {tokens}, unsharded {expected}"
        assert torch.equal(model.generate(x, **options), expected)
    with model.model.summon_full_params(model.model):
        torch.testing.assert_close(dict(model.model.state_dict()), state, rtol=0, atol=0)


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
def test_generate_within_a_block(adapters: bool):
    """Text of a run would be that of other weights, or the model would be, afterwards."""
    run_ranks(check_generate, 2, adapters)
