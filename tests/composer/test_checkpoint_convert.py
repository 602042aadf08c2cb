"""Converted checkpoints with those who read them: stock Composer with FSDP1, transformers; and the command."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import BIN, LAUNCHERS, PYTHON, run_all
from support.legacy import FOLDER, checkpoint_of, legacy_model
from support.oracle import FSDP1
from support.ranks import run_ranks
from support.trainers import fit

from composer_fsdp2 import CheckpointError
from composer_fsdp2.checkpoint.convert import convert_checkpoint

pytestmark = pytest.mark.composer

SAVED_AT, LAST = 3, 6
TRAINING: dict[str, Any] = {"batches": LAST, "optimizer": "decoupled_adamw"}


def check_stock_composer(folder: str) -> None:
    path, sharded = Path(folder), {"state_dict_type": "sharded"}
    continuous = fit(FSDP1, dict(sharded), save_folder=folder, save_interval=f"{SAVED_AT}ba", **TRAINING)
    saved = path / f"ep0-ba{SAVED_AT}"
    convert_checkpoint(saved, path / "full.pt", to="monolithic")
    convert_checkpoint(path / "full.pt", path / "two", to="dcp", files=2)
    convert_checkpoint(saved, path / "three", to="dcp", files=3)
    for name in ("two", "three"):
        resumed = fit(FSDP1, dict(sharded), load_path=str(path / name), **TRAINING)
        assert resumed.shards == {"FullyShardedDataParallel"}
        assert resumed.losses == continuous.losses[SAVED_AT:], name
        for key, parameter in continuous.parameters.items():
            assert torch.equal(resumed.parameters[key], parameter), f"{name}: {key}"
    full = fit(FSDP1, {"state_dict_type": "full"}, load_path=str(path / "full.pt"), **TRAINING)
    assert full.losses == continuous.losses[SAVED_AT:]


def test_stock_composer_goes_on_from_what_was_converted(tmp_path: Path):
    """FSDP1 itself trains on from a converted folder or file as from its own, bit for bit: the way back is open."""
    run_ranks(check_stock_composer, 2, str(tmp_path))


def test_flat_parameters_become_the_named_ones(tmp_path: Path):
    """A ``local`` checkpoint of Composer 0.17 becomes what the same run saved whole, given its model."""
    model = legacy_model("c172/local-flat")
    convert_checkpoint(checkpoint_of("c172/local-flat"), tmp_path / "new.pt", to="monolithic", model=model)
    found = torch.load(tmp_path / "new.pt", weights_only=False)["state"]
    expected = torch.load(checkpoint_of("c172/full"), weights_only=False)["state"]
    parameters = dict(model.named_parameters())
    assert set(parameters) <= set(found["model"]) <= set(expected["model"])
    for name, tensor in found["model"].items():
        assert torch.equal(tensor, expected["model"][name]), name
    state, saved = (value["optimizers"]["DecoupledAdamW"]["state"] for value in (found, expected))
    assert set(state) == set(saved)
    for name in saved:
        for key, value in saved[name].items():
            assert torch.equal(state[name][key], value), (name, key)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face


@contextlib.contextmanager
def saved_gpt2(folder: Path) -> Iterator[Any]:
    """A tiny GPT-2 after two steps of Composer's Trainer on one device, and its checkpoint in ``folder``."""
    import transformers
    from composer import Trainer
    from composer.models import HuggingFaceModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch.utils.data import DataLoader

    words = {word: number for number, word in enumerate(["<unk>", "a", "b", "c", "d"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=23)
    torch.manual_seed(0)
    model = HuggingFaceModel(
        transformers.GPT2LMHeadModel(config),
        tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"),
        use_logits=True,
    )
    ids = torch.randint(0, 23, (4, 6))
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones(6, dtype=torch.long)} for row in ids]
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        train_dataloader=DataLoader(data, batch_size=2),
        max_duration="2ba",
        device="cpu",
        save_folder=str(folder),
        save_interval="2ba",
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    trainer.close()
    yield model.model.eval(), ids


@pytest.mark.filterwarnings("ignore")  # of transformers and Composer
def test_from_pretrained_loads_a_converted_gpt2(tmp_path: Path):
    """A Composer run becomes a folder for ``from_pretrained``: equal logits, its tokenizer, ties once."""
    import transformers

    with saved_gpt2(tmp_path / "run") as (model, ids):
        source = tmp_path / "run" / "ep0-ba2-rank0.pt"
        convert_checkpoint(source, tmp_path / "hf", to="safetensors")
        convert_checkpoint(source, tmp_path / "folder", to="dcp", files=2)
        sharded = convert_checkpoint(tmp_path / "folder", tmp_path / "hf2", to="safetensors", files=3)
        half = convert_checkpoint(source, tmp_path / "half", to="safetensors", dtype=torch.bfloat16)
        with torch.no_grad():
            expected = model(ids).logits
            for folder in ("hf", "hf2"):
                found, said = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder, output_loading_info=True)
                assert not any(said.values()), said
                for name, tensor in model.state_dict().items():
                    assert torch.equal(found.state_dict()[name], tensor), f"{folder}: {name}"
                # Not to the bit: where tensors lie in memory decides which kernel runs.
                torch.testing.assert_close(found.eval()(ids).logits, expected, rtol=0, atol=1e-6)
            auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", torch_dtype="auto")
            assert auto.dtype == torch.bfloat16 and type(auto) is type(model)
            assert torch.equal(auto.transformer.wte.weight, model.transformer.wte.weight.bfloat16())
            convert_checkpoint(tmp_path / "half", tmp_path / "whole", to="safetensors", dtype=torch.float32)
            auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", torch_dtype="auto")
            assert auto.dtype == torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("b d zebra")["input_ids"] == [2, 4, 0]
    for report in (sharded, half):
        assert [text for text in report.remarks if "tied" in text] == [
            "leaves out lm_head.weight (tied to transformer.wte.weight), which is the same bytes"
        ]
    assert len(list((tmp_path / "hf2").glob("*.safetensors"))) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("noted", "architectures"),
    [
        ("transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel", ["GPT2LMHeadModel"]),
        ("torch.distributed.fsdp._fully_shard._fully_shard.FSDPGPT2LMHeadModel", ["GPT2LMHeadModel"]),
        ("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel", None),
    ],
    ids=["one device", "Composer's FSDP2", "FSDP1"],
)
def test_the_architecture_of_a_sharded_run(tmp_path: Path, noted: str, architectures: list[str] | None):
    """Composer notes the class of the module that it saved, which is no model's once it is sharded."""
    with saved_gpt2(tmp_path / "run"):
        source = torch.load(tmp_path / "run" / "ep0-ba2-rank0.pt", weights_only=False)
    entry = source["state"]["integrations"]["huggingface"]["model"]["config"]
    assert entry["class"].endswith("GPT2LMHeadModel")
    entry["class"] = noted
    entry["content"]["architectures"] = None
    torch.save(source, tmp_path / "noted.pt")
    convert_checkpoint(tmp_path / "noted.pt", tmp_path / "hf", to="safetensors")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()).get("architectures") == architectures


@pytest.mark.filterwarnings("ignore")
def test_the_names_of_a_single_device_run(tmp_path: Path):
    """GPT-2's tied weights leave one way to name what the optimizer keyed by position; Composer's are those."""
    with saved_gpt2(tmp_path / "run") as (model, _):
        convert_checkpoint(tmp_path / "run" / "ep0-ba2-rank0.pt", tmp_path / "folder", to="dcp")
        convert_checkpoint(tmp_path / "folder", tmp_path / "new.pt", to="monolithic")
    found = torch.load(tmp_path / "new.pt", weights_only=False)["state"]["optimizers"]["AdamW"]
    source = torch.load(tmp_path / "run" / "ep0-ba2-rank0.pt", weights_only=False)["state"]["optimizers"]["AdamW"]
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    keys = source["param_groups"][0]["params"]
    assert found["param_groups"][0]["params"] == names
    for name, key in zip(names, keys, strict=True):
        assert torch.equal(found["state"][name]["exp_avg"], source["state"][key]["exp_avg"]), name


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_the_command(tmp_path: Path):
    """What the help says: a plan, a report, several processes, a model for flat files, and exit codes for scripts."""
    command = [*PYTHON, "-m", "composer_fsdp2", "checkpoint", "convert"]
    source = FOLDER / "c220/sharded/ep0-ba3"
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parents[1])]!r}\n"
        "from support.legacy import legacy_model\n"
        "def build():\n    return legacy_model('c172/local-flat')\n"
    )
    ended = run_all(
        {
            "dry": [*command, source, "dry.pt", "--to", "monolithic", "--dry-run", "--no-optimizer"],
            "json": [*command, source, "new.pt", "--to", "monolithic", "--json", "--dtype", "bf16"],
            "ranks": [*LAUNCHERS["torchrun"], "checkpoint", "convert", source, "two", "--to", "dcp", "--files", "2"],
            "flat": [
                *(*command, FOLDER / "c172/local-flat/ep0-ba3", "flat.pt", "--to", "monolithic"),
                *("--model", "mine.py:build", "--include", "*.wte.*"),
            ],
        },
        tmp_path,
    ) | run_all(
        {
            "missing": [*command, "nowhere", "x.pt", "--to", "monolithic"],
            "exists": [*command, source, "mine.py", "--to", "monolithic"],
            "dtype": [*command, source, "x.pt", "--to", "monolithic", "--dtype", "bf61"],
            "console script": [BIN / "composer-fsdp2", "checkpoint", "convert", "--help"],
        },
        tmp_path,
    )
    codes = {name: command.code for name, command in ended.items()}
    bad = {"missing": 2, "exists": 1, "dtype": 2}
    assert codes == {name: bad.get(name, 0) for name in ended}, {name: command.err for name, command in ended.items()}
    assert "leaves out (1)\n    state.optimizers.DecoupledAdamW" in ended["dry"].out
    assert not (tmp_path / "dry.pt").exists() and not (tmp_path / "x.pt").exists()
    report = json.loads(ended["json"].out)
    assert report["destination"] == str(tmp_path / "new.pt") and report["num_tensors"] == 65
    loaded = torch.load(tmp_path / "new.pt", weights_only=False)["state"]["model"]
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert ended["ranks"].out.count("two: 65 tensors") == 1
    assert list(torch.load(tmp_path / "flat.pt", weights_only=False)["state"]["model"]) == ["model.wte.weight"]
    assert "nowhere" in ended["missing"].err and "bf61" in ended["dtype"].err
    assert all("Traceback" not in command.err for command in ended.values())


def test_the_error_for_flat_files_names_the_way(tmp_path: Path):
    """Who converts a ``local`` checkpoint without its model learns what to add to the command."""
    with pytest.raises(CheckpointError, match="--model module:function"):
        convert_checkpoint(checkpoint_of("c172/local-flat"), tmp_path / "new.pt", to="monolithic")
