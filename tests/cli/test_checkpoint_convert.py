"""Converted checkpoints, read by stock Composer with FSDP1 and by transformers; and the command."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import BIN, run_all, run_forked
from support.comparing import assert_same
from support.legacy import FOLDER, checkpoint_of
from support.on_ranks import on_ranks
from support.oracle import FSDP1
from support.ranks import run_ranks
from support.trainers import fit

from composer_fsdp2.checkpoint.convert.conversion import convert_checkpoint

pytestmark = pytest.mark.composer

SAVED_AT, LAST = 1, 2
TRAINING: dict[str, Any] = {"batches": LAST, "optimizer": "decoupled_adamw"}


@on_ranks(2)
def test_stock_composer_goes_on_from_what_was_converted(folder: str) -> None:
    """FSDP1 itself resumes from a converted folder or file as from its own, bit for bit: the migration can be
    undone."""
    path, sharded = Path(folder), {"state_dict_type": "sharded"}
    continuous = fit(FSDP1, dict(sharded), save_folder=folder, save_interval=f"{SAVED_AT}ba", **TRAINING)
    convert_checkpoint(path / f"ep0-ba{SAVED_AT}", path / "full.pt", to="monolithic")
    convert_checkpoint(path / "full.pt", path / "folder", to="dcp", files=3)
    resumed = fit(FSDP1, dict(sharded), load_path=str(path / "folder"), **TRAINING)
    assert resumed.shards == {"FullyShardedDataParallel"}
    assert resumed.losses == continuous.losses[SAVED_AT:]
    for key, parameter in continuous.parameters.items():
        assert torch.equal(resumed.parameters[key], parameter), key
    full = fit(FSDP1, {"state_dict_type": "full"}, load_path=str(path / "full.pt"), **TRAINING)
    assert full.losses == continuous.losses[SAVED_AT:]


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face


def check_gpt2(folder: str) -> None:
    """A tiny GPT-2 after two steps of Composer's Trainer on one device: its checkpoint and its logits."""
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
        save_folder=folder,
        save_interval="2ba",
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    trainer.close()
    inner = model.model.eval()
    with torch.no_grad():
        held = {
            "ids": ids,
            "logits": inner(ids).logits,
            "weights": inner.state_dict(),
        }
    torch.save(held, Path(folder, "held.pt"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its run."""
    folder = tmp_path_factory.mktemp("gpt2")
    run_ranks(check_gpt2, 1, str(folder))
    return folder


SAVED = "ep0-ba2-rank0.pt"


def check_from_pretrained(run: Path, folder: Path) -> None:
    import transformers

    source, held = run / SAVED, torch.load(run / "held.pt")
    convert_checkpoint(source, folder / "folder", to="dcp", files=2)
    convert_checkpoint(folder / "folder", folder / "hf", to="safetensors", files=3)
    half = convert_checkpoint(source, folder / "half", to="safetensors", dtype=torch.bfloat16)
    found, message = transformers.GPT2LMHeadModel.from_pretrained(folder / "hf", output_loading_info=True)
    assert not any(message.values()), message
    assert_same(dict(found.state_dict()), dict(held["weights"]))
    with torch.no_grad():  # Not bit for bit: the memory alignment of tensors decides which kernel runs.
        torch.testing.assert_close(found.eval()(held["ids"]).logits, held["logits"], rtol=0, atol=1e-6)
    convert_checkpoint(folder / "half", folder / "whole", to="safetensors", dtype=torch.float32)
    for name, dtype in {"half": torch.bfloat16, "whole": torch.float32}.items():
        auto = transformers.AutoModelForCausalLM.from_pretrained(folder / name, torch_dtype="auto")
        assert auto.dtype == dtype and type(auto) is transformers.GPT2LMHeadModel, auto
        wte = held["weights"]["transformer.wte.weight"].bfloat16().to(dtype)
        assert_same(auto.state_dict()["transformer.wte.weight"], wte, name)
    ids = transformers.AutoTokenizer.from_pretrained(folder / "half")("b d zebra")["input_ids"]
    assert ids == [2, 4, 0], ids
    [text] = [text for text in half.remarks if "tied" in text]
    assert text == "leaves out lm_head.weight (tied to transformer.wte.weight), which is the same bytes", text
    assert len([*(folder / "hf").glob("*.safetensors")]) == 3


def test_from_pretrained_loads_a_converted_gpt2(gpt2: Path, tmp_path: Path):
    """A Composer run converts to a folder for ``from_pretrained``: equal logits, its tokenizer, tied weights once."""
    run_ranks(check_from_pretrained, 1, gpt2, tmp_path)


# The class in Composer's file, and the architecture for from_pretrained.
NOTED: dict[str, tuple[str, list[str] | None]] = {
    "one device": ("transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel", ["GPT2LMHeadModel"]),
    "Composer's FSDP2": (
        "torch.distributed.fsdp._fully_shard._fully_shard.FSDPGPT2LMHeadModel",
        ["GPT2LMHeadModel"],
    ),
    "FSDP1": ("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel", None),
}


def check_architecture(run: Path, folder: Path, noted: str, architectures: list[str] | None) -> None:
    source = torch.load(run / SAVED, weights_only=False)
    entry = source["state"]["integrations"]["huggingface"]["model"]["config"]
    assert entry["class"].endswith("GPT2LMHeadModel"), entry["class"]
    entry["class"] = noted
    entry["content"]["architectures"] = None
    torch.save(source, folder.with_suffix(".pt"))
    convert_checkpoint(folder.with_suffix(".pt"), folder, to="safetensors")
    found = json.loads((folder / "config.json").read_text()).get("architectures")
    assert found == architectures, found


def test_the_architecture_of_a_sharded_run(gpt2: Path, tmp_path: Path):
    """Composer saves the class name of its module, which for a sharded model is no model class."""
    for name, case in NOTED.items():
        check_architecture(gpt2, tmp_path / name.replace("'", ""), *case)


# ---------------------------------------------------------------------------------------------------------------------
# The command

CONVERT = ["checkpoint", "convert"]
SOURCE = FOLDER / "c220/sharded/ep0-ba3"
TWO = [*CONVERT, SOURCE, "two", "--to", "dcp", "--files", "2"]


def variables_of_ranks() -> list[dict[str, str]]:
    """The environment variables that a launcher sets for each of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in ("0", "1")
    ]


def test_the_command(tmp_path: Path):
    """The features in the help: a plan, a report, several processes, a model for flat files, and exit codes for
    scripts."""
    (tmp_path / "mine.py").write_text(
        f"import sys\nsys.path[:0] = {[str(Path(__file__).parents[1])]!r}\n"
        "from support.legacy import legacy_model\n"
        "def build():\n    return legacy_model('c172/local-flat')\n"
    )
    forked = {
        "dry": [*CONVERT, SOURCE, "dry.pt", "--to", "monolithic", "--dry-run", "--no-optimizer"],
        "rank 0": TWO,
        "rank 1": TWO,
        "flat": [
            *(*CONVERT, FOLDER / "c172/local-flat/ep0-ba3", "flat.pt", "--to", "monolithic"),
            *("--model", "mine.py:build", "--include", "*.up.weight"),
        ],
        "missing": [*CONVERT, "nowhere", "x.pt", "--to", "monolithic"],
        "exists": [*CONVERT, SOURCE, "mine.py", "--to", "monolithic"],
        "dtype": [*CONVERT, SOURCE, "x.pt", "--to", "monolithic", "--dtype", "bf61"],
        "no layout": [*CONVERT, SOURCE, "x.pt", "--to", "pt"],
        "two files of one": [*CONVERT, SOURCE, "x.pt", "--to", "monolithic", "--files", "2"],
        "help": [*CONVERT, "--help"],
    }
    ended = run_forked(forked, tmp_path, variables=dict(zip(("rank 0", "rank 1"), variables_of_ranks(), strict=True)))
    # Started as a user starts it, because the others' imports preceded them.
    words = [*CONVERT, SOURCE, "new.pt", "--to", "monolithic", "--json", "--dtype", "bf16"]
    ended |= run_all({"installed": [BIN / "composer-fsdp2", *words]}, tmp_path)
    codes = {name: command.code for name, command in ended.items()}
    bad = {"missing": 2, "exists": 1, "dtype": 2, "no layout": 2, "two files of one": 2}
    assert codes == {name: bad.get(name, 0) for name in ended}, {name: command.err for name, command in ended.items()}
    assert "leaves out (1)\n    state.optimizers.DecoupledAdamW" in ended["dry"].out
    assert not (tmp_path / "dry.pt").exists() and not (tmp_path / "x.pt").exists()
    report = json.loads(ended["installed"].out)
    assert report["destination"] == str(tmp_path / "new.pt") and report["num_tensors"] == 65
    loaded = torch.load(tmp_path / "new.pt", weights_only=False)["state"]["model"]
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    two = sorted(path.name for path in (tmp_path / "two").iterdir())
    assert two == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert (ended["rank 0"].out + ended["rank 1"].out).count("two: 65 tensors") == 1
    found, full = (
        torch.load(path, weights_only=False)["state"] for path in (tmp_path / "flat.pt", checkpoint_of("c172/full"))
    )
    names = [f"model.blocks.{number}.up.weight" for number in range(2)]
    assert_same(found["model"], {name: full["model"][name] for name in names})
    state, whole = (each["optimizers"]["DecoupledAdamW"]["state"] for each in (found, full))
    assert_same(state, {name: whole[name] for name in names})
    assert "nowhere" in ended["missing"].err and "bf61" in ended["dtype"].err
    assert all("Traceback" not in command.err for command in ended.values())
