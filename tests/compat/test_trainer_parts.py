"""Every algorithm, callback and optimizer of Composer and LLM Foundry compared with FSDP1: the claims of the table,
measured."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.callbacks import algorithm
from support.cases import for_each
from support.comparing import assert_same, differences, full_parameters, own_name
from support.on_ranks import on_ranks
from support.oracle import FSDP1, FSDP2, UNSHARDED, Under
from support.ranks import run_ranks
from support.trainer_parts import FOLDER, ROWS, Beside, Kind, Ours, Row
from support.trainers import build_model, build_optimizer, close, objects_of_ranks
from torch import nn
from torch.utils.data import DataLoader

from composer_fsdp2.errors import UnsupportedError

pytestmark = pytest.mark.foundry

ROOT = Path(__file__).resolve().parents[2]
SHARDED = {"state_dict_type": "sharded"}  # FSDP1's full form is broken on a CPU
TIMED = ("time/", "throughput/", "wall_clock/", "cpu_", "disk_", "network_", "memory/")
NUM_CLASSES, VOCABULARY, LENGTH = 5, 60, 16

# ---------------------------------------------------------------------------------------------------------------------
# Models and data


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.batch_norm, self.group_norm = nn.BatchNorm2d(width), nn.GroupNorm(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.group_norm(self.batch_norm(self.conv(x))))


class Images(nn.Module):
    """The modules that the image algorithms replace: convolutions, pools, norms, dropout and linear layers."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stem, self.pool, self.blocks = stem, nn.MaxPool2d(2), nn.ModuleList(blocks)
        self.hidden, self.dropout, self.head = nn.Linear(16, 24), nn.Dropout(0.1), nn.Linear(24, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(torch.relu(self.hidden(x.mean((2, 3))))))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return any(module is block for block in self.blocks)


def classifier(row: Row) -> Any:
    import composer.algorithms
    from composer.models import ComposerClassifier
    from torchvision.models.resnet import Bottleneck

    stem: nn.Module = nn.Conv2d(3, 16, 3, padding=1)
    if row.name == "SqueezeExcite2d":
        stem = nn.Sequential(stem, composer.algorithms.SqueezeExcite2d(16, 4))
    elif row.name == "SqueezeExciteConv2d":
        stem = composer.algorithms.SqueezeExciteConv2d(3, 16, 3, padding=1, latent_channels=4)
    blocks = [Bottleneck(16, 4) if row.model == "bottlenecks" else ConvBlock(16) for _ in range(2)]
    return ComposerClassifier(Images(stem, blocks), num_classes=NUM_CLASSES)


def transformer(row: Row) -> Any:
    import transformers
    from composer.metrics import LanguageCrossEntropy
    from composer.models import HuggingFaceModel

    eager = {"attn_implementation": "eager"}
    if row.model == "bert":
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=LENGTH, **eager,
        )  # fmt: skip
        model: Any = transformers.BertForMaskedLM(config)
        blocks = list(model.bert.encoder.layer)
    else:
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH, **eager
        )
        model = transformers.GPT2LMHeadModel(config)
        blocks = list(model.transformer.h)
    model.fsdp_wrap_fn = lambda module: any(module is block for block in blocks)
    return HuggingFaceModel(model, tokenizer=tokenizer(), use_logits=True, eval_metrics=[LanguageCrossEntropy()])


def mpt(row: Row) -> Any:
    from llmfoundry.models.mpt.modeling_mpt import ComposerMPTCausalLM

    return ComposerMPTCausalLM(
        d_model=16, n_heads=2, n_layers=2, expansion_ratio=2, max_seq_len=LENGTH, vocab_size=VOCABULARY,
        init_device="cpu", loss_fn="torch_crossentropy", attn_config={"attn_impl": "torch"},
    )  # fmt: skip


MODELS = {
    "images": classifier,
    "binary": classifier,
    "squeezed": classifier,
    "bottlenecks": classifier,
    "bert": transformer,
    "gpt2": transformer,
    "mpt": mpt,
    "language": lambda row: build_model(),
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2", unk_token="w0")


class Tokens(list[Any]):
    """Rows of tokens, and the tokenizer."""

    tokenizer: Any = None


def dataset_of(row: Row, made: Sequence[Any]) -> Any:
    """The rows of a model's data, the same in each run; images for the algorithms that transform them."""
    from support.scripts.train_with_trainer import data
    from torchvision import datasets, transforms

    generator = torch.Generator().manual_seed(3)
    if row.trainer.get("data") == "pictures":
        steps = [*(made if row.trainer.get("transform") else []), transforms.ToTensor()]
        return datasets.FakeData(96, (3, 16, 16), NUM_CLASSES, transform=transforms.Compose(steps))
    if MODELS[row.model] is classifier:
        images = torch.randn(96, 3, 16, 16, generator=generator)
        num_classes = 2 if row.model == "binary" else NUM_CLASSES
        return torch.utils.data.TensorDataset(images, torch.randint(0, num_classes, (96,), generator=generator))
    if row.model == "language":
        return data()
    tokens = Tokens(
        {"input_ids": each, "labels": each, "attention_mask": torch.ones_like(each, dtype=torch.bool)}
        for each in torch.randint(3, VOCABULARY, (96, LENGTH), generator=generator)
    )
    tokens.tokenizer = tokenizer()
    return tokens


# ---------------------------------------------------------------------------------------------------------------------
# Runs


@dataclass(frozen=True)
class Left:
    """The results of a run."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    logged: dict[str, list[Any]]
    tables: dict[str, str]


@functools.cache
def classes() -> dict[tuple[Kind, str, str], Any]:
    """Every algorithm, callback and optimizer that the two packages export or register, by kind, package and name."""
    from composer.core import Callback
    from llmfoundry import registry

    modules = {
        Kind.ALGORITHM: ["composer.algorithms"],
        Kind.CALLBACK: ["composer.callbacks", "llmfoundry.callbacks"],
        Kind.OPTIMIZER: ["composer.optim", "llmfoundry.optim"],
    }
    registries = {
        Kind.ALGORITHM: [registry.algorithms],
        Kind.CALLBACK: [registry.callbacks, registry.callbacks_with_config],
        Kind.OPTIMIZER: [registry.optimizers],
    }
    bases = {
        Kind.ALGORITHM: (object,),
        Kind.CALLBACK: (Callback,),
        Kind.OPTIMIZER: (torch.optim.Optimizer,),
    }
    found = {}
    for kind in Kind:
        exported = [
            getattr(module, name) for module in map(importlib.import_module, modules[kind]) for name in module.__all__
        ]
        registered = [each for one in registries[kind] for each in one.get_all().values()]
        for each in (*exported, *registered):
            if isinstance(each, type) and issubclass(each, bases[kind]):
                package = each.__module__.partition(".")[0]
                if package in ("composer", "llmfoundry"):  # without the classes that an earlier test registered
                    found[kind, package, each.__name__] = each
    return found


def make(row: Row, folder: str, *arguments: Any) -> Any:
    from composer.core import Event

    options = {
        key: value.replace(FOLDER, folder) if isinstance(value, str) else value for key, value in row.arguments.items()
    }
    if "apply_at" in options:
        options["apply_at"] = Event[options["apply_at"]]
    return classes()[row.kind, row.package, row.name](*arguments, **options)


def tables_logger() -> Any:
    """MLflow's logger without its server; the only logger to which a callback logs tables."""
    from composer.loggers import MLFlowLogger

    class Tables(MLFlowLogger):
        def __init__(self) -> None:
            self.tables: dict[str, Any] = {}

        def log_table(self, columns: Any, rows: Any, name: str = "Table", step: Any = None) -> None:
            self.tables[f"{name}, {step}"] = (columns, rows)

        def init(self, *unused: Any) -> None: ...

        log_metrics = log_hyperparameters = after_load = post_close = close = fit_end = init

    return Tables()


def run(under: Under, rows: Sequence[Row], folder: str, **keys: Any) -> Left:
    """One run with all of ``rows``, which have the same model and options. Called on all ranks."""
    from composer import Evaluator, Trainer
    from composer.core import Algorithm
    from composer.distributed import dist_strategy
    from composer.loggers import InMemoryLogger
    from composer.trainer import trainer as composer_trainer
    from composer.utils import dist as composer_dist
    from support.scripts.train_with_trainer import Record

    row = rows[0]
    options = row.trainer
    memory, record, more_tables = InMemoryLogger(), Record(), tables_logger()
    torch.manual_seed(9)
    model = MODELS[row.model](row)
    made = [make(each, folder) for each in rows if each.kind is not Kind.OPTIMIZER and each.model != "squeezed"]
    dataset = dataset_of(row, made)
    if row.kind is Kind.OPTIMIZER:
        optimizer = make(row, folder, model.parameters())
    else:
        optimizer = build_optimizer(options.get("optimizer", "sgd"), model)

    def loader() -> Any:
        sampler = composer_dist.get_sampler(dataset, shuffle=True, drop_last=True)
        return DataLoader(dataset, batch_size=options.get("batch", 4), sampler=sampler)

    metrics = list(model.get_metrics(is_train=False))
    evaluator = Evaluator(label="task/0-shot", dataloader=loader(), metric_names=metrics, subset_num_batches=2)
    # Composer refuses bfloat16 on a CPU.
    unasked = [mock.patch.object(module, "_validate_precision") for module in (composer_trainer, dist_strategy)]
    with under(), unasked[0], unasked[1]:
        trainer = Trainer(
            model=model,
            optimizers=optimizer,
            train_dataloader=loader(),
            eval_dataloader=evaluator if "eval_interval" in options else None,
            eval_interval=options.get("eval_interval", 1),
            max_duration=options.get("duration", "2ba"),
            device="cpu",
            precision=options.get("precision", "fp32"),
            device_train_microbatch_size=options.get("microbatch", 2),
            parallelism_config={"fsdp": keys} if keys else None,
            algorithms=[each for each in made if isinstance(each, Algorithm)],
            callbacks=[record, *(each for each in made if rows[0].kind is Kind.CALLBACK)],
            loggers=[memory, *([more_tables] if row.model == "mpt" else [])],
            progress_bar=False,
            log_to_console=False,
            seed=17,
            run_name="parts",
            **options.get("options", {}),
        )
        try:
            trainer.fit()
            parameters = full_parameters(trainer.state.model)
        finally:
            trainer.close()
    return Left(
        record.losses,
        {own_name(name): value for name, value in parameters.items()},
        {
            name: [] if name.startswith(TIMED) else [float(value) for _, value in values]
            for name, values in memory.data.items()
        },
        {**memory.tables, **{name: str(table) for name, table in more_tables.tables.items()}},
    )


@contextlib.contextmanager
def drawn_alike() -> Iterator[None]:
    """FSDP1 with the same new weights on every rank; otherwise each rank initializes different ones and keeps its shard
    of these."""
    from composer.core import Engine, Event
    from composer.utils import reproducibility

    original = Engine._run_algorithms

    def run_algorithms(self: Any, event: Any) -> Any:
        with reproducibility.seed_context(17) if event is Event.INIT else contextlib.nullcontext():
            return original(self, event)

    with FSDP1(), mock.patch.object(Engine, "_run_algorithms", run_algorithms):
        yield


def reference_of(rows: Sequence[Row], folder: str) -> Left:
    row = rows[0]
    if row.beside is Beside.DDP:
        left = run(UNSHARDED, rows, folder)
        return replace(left, parameters={name.removeprefix("module."): v for name, v in left.parameters.items()})
    under = drawn_alike if row.trainer.get("draws") else FSDP1
    without_shards = {"sharding_strategy": "NO_SHARD"} if row.beside is Beside.NO_SHARD else {}
    return run(under, rows, folder, **SHARDED, **without_shards)


# ---------------------------------------------------------------------------------------------------------------------
# The table


def measured(ours: Left, theirs: Left) -> Ours:
    """The row's value for the difference from the reference; raises if it is larger than the table allows."""
    if not list(differences(ours, theirs, in_bits=True)):
        return Ours.EQUAL
    assert close(ours.losses, theirs.losses), f"{ours.losses}, {theirs.losses}"
    assert ours.parameters.keys() == theirs.parameters.keys()
    for name, value in theirs.parameters.items():
        difference = ((ours.parameters[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)).item()
        assert difference <= 1e-6, f"{name}: {difference}"
    assert ours.tables == theirs.tables
    return Ours.CLOSE


def error_of(under: Under, rows: Sequence[Row], folder: str) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011  the caller checks which
        run(under, rows, folder, **SHARDED)
    return raised.value


def check_fsdp1(rows: Sequence[Row], folder: str) -> None:
    """The result of FSDP1 for a row with another reference, or with none."""
    [row] = rows
    if row.fsdp1 == "trains":
        run(FSDP1, rows, folder, **SHARDED)
    else:
        text = str(error_of(FSDP1, rows, folder))
        assert row.fsdp1 in text, f"FSDP1 raises {text}"


def check_rows(rows: Sequence[Row], folder: str) -> None:
    row = rows[0]
    place = f"{folder}/{row.title}".replace(" ", "-")
    if row.ours is Ours.REFUSED:
        error = error_of(FSDP2, rows, f"{place}-1")
        assert isinstance(error, UnsupportedError), repr(error)
        assert row.name in str(error) and row.error in str(error), str(error)
        return
    theirs = reference_of(rows, f"{place}-2")
    ours = run(FSDP2, rows, f"{place}-3", **SHARDED, fsdp1_metric_names=True)
    if row.beside is not Beside.FSDP1:
        ours, theirs = (replace(each, logged={}) for each in (ours, theirs))
    assert len(theirs.losses) > 1, "no training"
    found = measured(ours, theirs)
    assert {each.ours for each in rows} == {found}, f"the table has {row.ours}, measured {found}"


def together(row: Row) -> Any:
    """A key for rows that share a run: callbacks that do not change training, and rows that the table marks."""
    is_callback = row.kind is Kind.CALLBACK and row.ours is Ours.EQUAL and row.fsdp1 == "trains"
    is_shared = is_callback or row.trainer.keys() & {"shared", "together"}
    return (row.kind, row.model, repr(row.trainer)) if is_shared else row.title


def check_table(folder: str, is_slow: bool) -> None:
    warnings.simplefilter("ignore")
    listed = {(row.kind, row.package, row.name) for row in ROWS}
    assert listed == classes().keys(), f"in one of table and packages: {listed ^ classes().keys()}"
    groups: dict[Any, list[Row]] = {}
    for row in ROWS:
        if row.is_run and row.is_slow == is_slow:
            groups.setdefault(together(row), []).append(row)
        if is_slow and row.is_run and row.fsdp1 != "hangs" and (row.fsdp1 != "trains" or row.ours is Ours.REFUSED):
            groups["FSDP1", row.title] = [row]
    cases = {
        f"{'FSDP1: ' * (key[0] == 'FSDP1')}{', '.join(row.title for row in rows)}": (
            check_fsdp1 if key[0] == "FSDP1" else check_rows,
            rows,
        )
        for key, rows in groups.items()
    }
    for_each(lambda check, rows: check(rows, folder), cases)


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_every_algorithm_callback_and_optimizer(tmp_path: Path, is_slow: bool):
    """A run with a part that the table calls equal would train differently, or fail with an error without a next
    step."""
    for row in ROWS:
        if row.test:
            file, _, name = row.test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), f"{row.title}: no test {row.test}"
        assert row.is_run or row.test or row.why, f"{row.title} is not run, and nothing tells why"
    run_ranks(check_table, 2, str(tmp_path), is_slow, timeout_s=500)


# ---------------------------------------------------------------------------------------------------------------------
# Surgery


def row_of(name: str, **values: Any) -> Row:
    return replace(next(row for row in ROWS if row.name == name), **values)


@on_ranks(2)
def test_replicas_get_the_same_new_weights(folder: str):
    """Replicas reduce gradients, never weights: with different new weights each would silently train another model."""
    left = run(FSDP2, [row_of("SqueezeExcite")], folder, **SHARDED, sharding_strategy="NO_SHARD")
    weights = {name: value for name, value in left.parameters.items() if ".se." in name}
    assert weights
    for each in objects_of_ranks(weights):
        assert_same(each, weights, "replicas train different models", in_bits=True)


def surgeon(at: str) -> Any:
    """A user's own algorithm, which does not update the optimizer."""

    def widen(state: Any) -> None:
        torch.manual_seed(0)
        state.model.module.head = nn.Linear(24, NUM_CLASSES)

    return algorithm("Widen", at, widen)


@on_ranks(2)
def test_own_surgery(folder: str):
    """The optimizer trains the new modules, as under FSDP1. After sharding, no rank would average their gradients."""
    row = row_of("BlurPool")  # for its model
    with mock.patch.dict(globals(), make=lambda *_: surgeon("init")):
        theirs, ours = (run(under, [row], folder, **SHARDED) for under in (FSDP1, FSDP2))
    assert close(ours.losses, theirs.losses), f"{ours.losses}, {theirs.losses}"
    torch.testing.assert_close(ours.parameters, theirs.parameters)
    with mock.patch.dict(globals(), make=lambda *_: surgeon("fit_start")):
        message = str(error_of(FSDP2, [row], folder))
    assert "Widen replaces parameters of a model that is sharded" in message and "Event.INIT" in message


SAVED_AT = 1


def saving(row: Row, folder: str) -> Row:
    return replace(row, trainer={**row.trainer, "options": {"save_folder": folder, "save_interval": f"{SAVED_AT}ba"}})


def loading(row: Row, folder: str) -> Row:
    return replace(row, trainer={**row.trainer, "options": {"load_path": f"{folder}/ep0-ba{SAVED_AT}"}})


@on_ranks(2)
def test_surgery_that_a_checkpoint_asks_for(folder: str):
    """Composer applies surgery while loading a checkpoint, after sharding: each rank would silently train different new
    weights."""
    warnings.simplefilter("ignore")
    squeezing = replace(row_of("SqueezeExcite"), trainer={})
    whole = run(FSDP2, [saving(squeezing, folder)], folder, **SHARDED)
    resumed = run(FSDP2, [loading(squeezing, folder)], folder, **SHARDED)
    assert close(resumed.losses, whole.losses[SAVED_AT:]), f"{resumed.losses}, {whole.losses}"
    error = error_of(FSDP2, [loading(row_of("LabelSmoothing"), folder)], folder)
    assert isinstance(error, UnsupportedError)
    assert "pass algorithms=[SqueezeExcite(latent_channels=4,min_channels=4)] to the Trainer" in str(error)
    assert "load_exclude_algorithms" in str(error)


# ---------------------------------------------------------------------------------------------------------------------
# LoadCheckpoint


@on_ranks(2)
def test_a_checkpoint_is_loaded_at_an_event(folder: str):
    """With the callback LoadCheckpoint, the run continues from the checkpoint, as under FSDP1."""
    warnings.simplefilter("ignore")
    run(FSDP1, [saving(row_of("LabelSmoothing"), folder)], folder, **SHARDED)
    rows = {
        event: [row_of("LoadCheckpoint", model="images", arguments={"load_path": f"{folder}/ep0-ba1", "event": event})]
        for event in ("BEFORE_LOAD", "AFTER_LOAD")
    }
    theirs = run(FSDP1, rows["BEFORE_LOAD"], folder, **SHARDED)
    assert len(theirs.losses) == 1, "nothing was loaded"
    for event in rows:
        assert measured(run(FSDP2, rows[event], folder, **SHARDED), theirs) is Ours.EQUAL, event
