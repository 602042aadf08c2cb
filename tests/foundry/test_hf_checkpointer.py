"""LLM Foundry's HuggingFaceCheckpointer on a sharded model: FSDP1's files, which transformers and peft load."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.comparing import full_parameters
from support.foundry_runs import BATCHES, YAML, assert_alike, evaluating, hugging_face_yaml, train
from support.oracle import FSDP2, FSDP1_saving
from support.ranks import run_ranks

pytestmark = pytest.mark.foundry


@dataclass(frozen=True)
class Case:
    """A model to train, and what its files must say.

    Args:
        model: In place of the YAML's; None keeps the MPT.
        options: Overrides for the FSDP2 run alone.
    """

    architecture: str
    config: dict[str, Any] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()


LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}
SMALL = {"vocab_size": 512, "initializer_range": 0.2}
GPT2 = {**SMALL, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "tie_word_embeddings": True}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LLAMA = {**SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES = {
    "mpt": Case("MPTForCausalLM", options=("model.init_device=mixed",)),
    "gpt2": Case("GPT2LMHeadModel", GPT2, options=("fsdp_config.state_dict_type=full",)),
    "lora": Case("LlamaForCausalLM", LLAMA, {"peft_config": LORA}),
}


def write_yaml(folder: str, name: str, case: Case) -> Path:
    from transformers import GPT2Config, LlamaConfig

    if case.config is None:
        return YAML
    kind = GPT2Config if "n_embd" in case.config else LlamaConfig
    config = kind(architectures=[case.architecture], **case.config)
    return hugging_face_yaml(folder, f"{name}-yaml", config, **case.model)


def check_runs(folder: str, name: str) -> None:
    case = CASES[name]
    yaml = write_yaml(folder, name, case)
    # An evaluation at the same batch comes first, and leaves parameters gathered.
    evals = [
        "optimizer.eps=1.0e-3",  # the key's bias has a gradient of rounding noise, which a small one makes steps of
        *evaluating(folder, BATCHES),
    ]
    runs = {}
    for who, under, options in (("fsdp1", FSDP1_saving, ()), ("fsdp2", FSDP2, case.options)):

        def keep(trainer: Any, place: str = f"{folder}/{name}-{who}") -> None:
            parameters = full_parameters(trainer.state.model)
            if dist.get_rank() == 0:
                torch.save(parameters, f"{place}.pt")

        runs[who] = train(
            under,
            yaml,
            folder,
            f"{name}-{who}",
            *evals,
            *options,
            f"callbacks.hf_checkpointer.save_folder={folder}/{name}-{who}",
            f"callbacks.hf_checkpointer.save_interval={BATCHES}ba",
            after=keep,
        )
    assert_alike(runs["fsdp2"], runs["fsdp1"], name)
    if dist.get_rank() == 0:
        check_files(folder, name)


def check_files(folder: str, name: str) -> None:
    from safetensors.torch import load_file

    case = CASES[name]
    theirs, ours = (Path(folder, f"{name}-{who}") for who in ("fsdp1", "fsdp2"))
    names = {path.relative_to(theirs) for path in theirs.rglob("*")}
    assert {path.relative_to(ours) for path in ours.rglob("*")} == names
    last = Path("huggingface", f"ba{BATCHES}")
    for path in names:
        if path.suffix == ".safetensors":
            assert_tensors(load_file(ours / path), load_file(theirs / path), f"{name}, {path}")
        elif path.suffix == ".json":
            left, right = (json.loads((place / path).read_text()) for place in (ours, theirs))
            for content in (left, right):
                content.pop("init_device", None)
            assert left == right, f"{name}, {path}: {left}, {right}"
    trained = torch.load(f"{ours}.pt")
    loaded = load_with_transformers(ours / last, case, trained)
    assert_tensors(loaded, {key.removeprefix("model."): value for key, value in trained.items()}, name, exact=True)


def load_with_transformers(place: Path, case: Case, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    if case.model:
        from peft import PeftModel
        from transformers import LlamaConfig, LlamaForCausalLM

        base = LlamaForCausalLM(LlamaConfig(**case.config))
        prefix = "model.base_model.model."
        of_base = {k.removeprefix(prefix).replace("base_layer.", ""): v for k, v in trained.items() if "lora" not in k}
        base.load_state_dict(of_base)
        return dict(PeftModel.from_pretrained(base, place).named_parameters())
    config = json.loads((place / "config.json").read_text())
    assert config["architectures"] == [case.architecture], config["architectures"]
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    assert type(model).__name__ == case.architecture
    return dict(model.named_parameters())


def assert_tensors(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str, *, exact: bool = False
) -> None:
    assert ours.keys() == theirs.keys(), f"{what}: {ours.keys() ^ theirs.keys()}"
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, **tolerance, msg=lambda text, n=name: f"{what}, {n}: {text}")


@pytest.mark.parametrize("name", ["lora", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mpt", "gpt2"))])
def test_transformers_loads_what_was_trained(folder: str, name: str):
    """The model that is handed on has the weights at the end of training, and a class that transformers knows."""
    if name == "lora":
        pytest.importorskip("peft")
    with mock.patch.dict("os.environ", {"HF_MODULES_CACHE": f"{folder}/modules"}):
        run_ranks(check_runs, 2, folder, name)
