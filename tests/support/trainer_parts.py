"""Every algorithm, callback and optimizer of Composer and LLM Foundry, and the result of a sharded run with it.

``ROWS`` is a claim that ``tests/compat/test_trainer_parts.py`` measures, and ``tools/generate_docs.py`` writes into
migration_docs/algorithms.md; so it imports nothing. Each row names the class's arguments, so that the test can make it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Kind(Enum):
    """The modules that define a kind of class, by the Trainer argument that takes it."""

    ALGORITHM = "algorithms"
    CALLBACK = "callbacks"
    OPTIMIZER = "optimizers"


class Beside(Enum):
    """The reference run."""

    FSDP1 = "FSDP1"
    NO_SHARD = "FSDP1 without shards"
    DDP = "DDP"


class Ours(Enum):
    """The result of our run."""

    EQUAL = "the same bits"
    CLOSE = "the same to 1e-6"
    REFUSED = "refused"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One class, or one way to use it.

    Args:
        name: The class's name.
        use: A short description of the use, if a class has several rows.
        model: A key of ``MODELS`` in the test; empty if the row is not run.
        arguments: The class's arguments; ``FOLDER`` is an empty folder.
        trainer: Arguments of ``run`` in the test; rows with the same ones may share a run.
        fsdp1: Under FSDP1: "trains", "hangs" (not run), or a part of its error.
        beside: The reference run, if FSDP1's cannot be.
        ours: The quantity compared with the reference.
        error: A part of our error, if it is refused.
        why: The reason why FSDP1 is no reference or the row is not run, or an alternative.
        test: The test that compares it, unless the table's own test does.
    """

    name: str
    kind: Kind
    package: str
    use: str = ""
    model: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    fsdp1: str = "trains"
    beside: Beside = Beside.FSDP1
    ours: Ours = Ours.EQUAL
    error: str = ""
    why: str = ""
    test: str = ""

    @property
    def is_slow(self) -> bool:
        """Run only in `make test-all`: it affects neither modules, parameters nor steps, or a faster row is similar."""
        return bool(self.trainer.get("shared")) or self.title in _SLOW

    @property
    def title(self) -> str:
        return f"{self.name} ({self.use})" if self.use else self.name

    @property
    def is_run(self) -> bool:
        return bool(self.model)


FOLDER = "{folder}"
_SLOW = (
    "Alibi (BERT)", "ChannelsLast", "CutMix", "LowPrecisionGroupNorm", "LowPrecisionGroupNorm (apply_at AFTER_LOAD)",
    "MixUp", "SqueezeExcite2d", "SqueezeExciteConv2d", "StochasticDepth (sample)",
    "LayerFreezing", "EarlyStopper", "ImageVisualizer", "ThresholdStopper",
    "EvalGauntlet", "EvalOutputLogging", "FDiffMetrics", "LossPerpVsContextLengthLogger",
    "DecoupledSGDW", "NoOp",
    # tests/compat compares them with the same references: test_steps.py,
    "GradientClipping (adaptive)", "GradientClipping (norm)", "DecoupledAdamW",
    # test_tensor_parallel.py, test_preflight.py and test_monitors.py.
    "SAM", "ExportForInferenceCallback", "SWA", "OptimizerMonitor", "DecoupledAdaLRLion", "DecoupledClipLion",
)  # fmt: skip
_EPOCHS = {"duration": "2ep", "batch": 16, "microbatch": 16}
_SHARED = {"shared": True}  # with others that change the data only
_TOGETHER = {"together": True}  # with others that do not interfere with it
_LARGE = {**_TOGETHER, "batch": 8, "microbatch": 4}  # GhostBatchNorm splits it into two
_DRAWS = {**_TOGETHER, "draws": True}
_PICTURES = {**_SHARED, "data": "pictures"}
_EVALUATES = {"eval_interval": "1ba"}
_STOPS = {"eval_interval": "2ba", "duration": "6ba"}  # stops after the first evaluation
_LABEL = "task/0-shot"
_ON_GPUS_ONLY = "measures a GPU's memory; on a CPU it switches itself off"
_BF16 = {"precision": "amp_bf16"}
_DRAWN_ALIKE = "beside an FSDP1 whose ranks were made to draw the same new weights"
_NO_BF16_CHECK = "in amp_bf16, with Composer's check for a GPU removed"


def _algorithm(name: str, model: str, **values: Any) -> Row:
    return Row(name=name, kind=Kind.ALGORITHM, package="composer", model=model, **values)


def _callback(name: str, model: str = "language", package: str = "composer", **values: Any) -> Row:
    return Row(name=name, kind=Kind.CALLBACK, package=package, model=model, **values)


def _late_norm(name: str, model: str) -> Row:
    return _algorithm(
        name, model, use="apply_at AFTER_LOAD", arguments={"apply_at": "AFTER_LOAD"}, trainer=_BF16, fsdp1="hangs",
        ours=Ours.REFUSED, error="leave apply_at at its default",
        why="it copies a sharded weight, which FSDP1's own shapes do not fit on every rank; leave `apply_at` out",
    )  # fmt: skip


ALGORITHMS = (
    _algorithm("Alibi", "gpt2", arguments={"max_sequence_length": 16, "train_sequence_length_scaling": 0.5}),
    _algorithm("Alibi", "bert", use="BERT",
               arguments={"max_sequence_length": 16, "train_sequence_length_scaling": 0.5}),
    _algorithm("AugMix", "images", trainer=_PICTURES),
    _algorithm("AugmentAndMixTransform", "images", trainer={**_PICTURES, "transform": True}),
    _algorithm("BlurPool", "images", trainer=_LARGE, arguments={"min_channels": 4}),
    _algorithm("ChannelsLast", "images", trainer=_TOGETHER, ours=Ours.CLOSE,
               why="the cause was not looked for"),
    _algorithm("ColOut", "images", trainer=_SHARED, arguments={"p_row": 0.2, "p_col": 0.2}),
    _algorithm("ColOutTransform", "images", trainer={**_PICTURES, "transform": True}),
    _algorithm("CutMix", "images"),
    _algorithm("CutOut", "images", trainer=_SHARED),
    _algorithm("EMA", "images", trainer=_LARGE, arguments={"half_life": "2ba"},
               why="each rank averages its own shards"),
    _algorithm("Factorize", "images", why=_DRAWN_ALIKE, trainer=_DRAWS,
               arguments={"min_channels": 4, "latent_channels": 4, "min_features": 4, "latent_features": 4}),
    _algorithm("GatedLinearUnits", "bert", why=_DRAWN_ALIKE, trainer=_DRAWS),
    _algorithm("GhostBatchNorm", "images", arguments={"ghost_batch_size": 2}, trainer=_LARGE),
    _algorithm("GradientClipping", "images", use="norm", ours=Ours.CLOSE, trainer=_TOGETHER,
               arguments={"clipping_type": "norm", "clipping_threshold": 0.1}),
    _algorithm("GradientClipping", "images", use="value", trainer=_LARGE,
               arguments={"clipping_type": "value", "clipping_threshold": 0.01},
               why="by the largest absolute value, as under FSDP1"),
    _algorithm("GradientClipping", "images", use="adaptive", beside=Beside.DDP, ours=Ours.CLOSE,
               arguments={"clipping_type": "adaptive", "clipping_threshold": 0.01},
               fsdp1="clipping type must be 'norm' or 'value'"),
    _algorithm("GyroDropout", "images", trainer=_LARGE, arguments={"p": 0.5, "sigma": 4, "tau": 2}),
    _algorithm("LabelSmoothing", "images", trainer=_SHARED),
    _algorithm("LayerFreezing", "images", arguments={"freeze_start": 0.0}, trainer=_EPOCHS),
    _algorithm("LowPrecisionGroupNorm", "images", trainer=_BF16, why=_NO_BF16_CHECK),
    _late_norm("LowPrecisionGroupNorm", "images"),
    _algorithm("LowPrecisionLayerNorm", "bert", trainer=_BF16, why=_NO_BF16_CHECK),
    _late_norm("LowPrecisionLayerNorm", "bert"),
    _algorithm("MixUp", "images"),
    _algorithm("NoOpModel", "binary", ours=Ours.REFUSED, error="train without fsdp_config",
               why="FSDP1 left its one number to DDP; to measure a data loader, train without `fsdp_config`"),
    _algorithm("ProgressiveResizing", "images", trainer=_SHARED, arguments={"size_increment": 2}),
    _algorithm("RandAugment", "images", trainer=_PICTURES),
    _algorithm("RandAugmentTransform", "images", trainer={**_PICTURES, "transform": True}),
    _algorithm("SAM", "images", beside=Beside.NO_SHARD, ours=Ours.CLOSE,
               why="climbs by the norm of the full gradient; FSDP1's ranks took the norms of their parts"),
    _algorithm("SWA", "images", ours=Ours.REFUSED, error="use the algorithm EMA", trainer=_EPOCHS,
               arguments={"swa_start": "0.2dur", "swa_end": "0.8dur"},
               fsdp1="cannot pickle", why="copies the model; EMA averages shards"),
    _algorithm("SelectiveBackprop", "images", trainer=_LARGE, arguments={"start": 0.2, "interrupt": 0}),
    _algorithm("SeqLengthWarmup", "bert", trainer=_DRAWS,
               arguments={"duration": 0.5, "min_seq_length": 4, "max_seq_length": 16, "step_size": 8}),
    _algorithm("SqueezeExcite", "images", why=_DRAWN_ALIKE, trainer=_DRAWS,
               arguments={"latent_channels": 4, "min_channels": 4}),
    _algorithm("SqueezeExcite2d", "squeezed"),
    _algorithm("SqueezeExciteConv2d", "squeezed"),
    _algorithm("StochasticDepth", "bottlenecks", use="sample",
               arguments={"target_layer_name": "ResNetBottleneck", "stochastic_method": "sample", "drop_rate": 0.5}),
    _algorithm("StochasticDepth", "", use="block", fsdp1="hangs", ours=Ours.NOT_RUN,
               why="ranks skip different blocks, and wait for each other for ever where units are among them (FSDP1 "
               "made one of each BatchNorm); `collective_guard` names the block, `stochastic_method: sample` trains"),
    _algorithm("WeightStandardization", "images", trainer=_LARGE),
)  # fmt: skip
CALLBACKS = (
    _callback("ActivationMonitor", arguments={"interval": "1ba"},
              why="under FSDP1's names with `fsdp1_metric_names`, else under the model's own"),
    _callback("CheckpointSaver", arguments={"folder": FOLDER, "save_interval": "2ba"},
              why="what it saves is compared in tests/compat/test_saving.py"),
    _callback("EarlyStopper", "images", trainer=_STOPS,
              arguments={"monitor": "MulticlassAccuracy", "dataloader_label": _LABEL, "patience": "1ba"}),
    _callback("ExportForInferenceCallback", "images", ours=Ours.REFUSED, error="ExportForInferenceCallback copies",
              arguments={"save_format": "torchscript", "save_path": f"{FOLDER}/exported"},
              fsdp1="exporting a FSDP wrapped module is not supported",
              why="export in one process, from a checkpoint: `composer.utils.export_for_inference`"),
    _callback("FreeOutputs"),
    _callback("Generate", "gpt2", arguments={"prompts": ["w3 w4"], "interval": "2ba", "max_new_tokens": 3}),
    _callback("ImageVisualizer", "images", trainer=_STOPS, arguments={"interval": "1ba"}),
    _callback("LRMonitor"),
    _callback("LoadCheckpoint", "", test="tests/compat/test_trainer_parts.py::test_a_checkpoint_is_loaded_at_an_event"),
    _callback("MLPerfCallback", "", ours=Ours.NOT_RUN, why="needs mlperf_logging, which its repository alone has"),
    _callback("MemoryMonitor", why=_ON_GPUS_ONLY),
    _callback("MemorySnapshot", why=_ON_GPUS_ONLY),
    _callback("NaNMonitor"),
    _callback("OOMObserver", why=_ON_GPUS_ONLY),
    _callback("OptimizerMonitor", ours=Ours.CLOSE, arguments={"batch_log_interval": 1},
              trainer={"optimizer": "decoupled_adamw"},
              why="beside DecoupledAdamW; with other optimizers FSDP1 logged each rank's part"),
    _callback("RuntimeEstimator"),
    _callback("SpeedMonitor", arguments={"window_size": 2}),
    _callback("SystemMetricsMonitor"),
    _callback("ThresholdStopper", "images", trainer=_STOPS,
              arguments={"monitor": "MulticlassAccuracy", "dataloader_label": _LABEL, "threshold": 0.1}),
)  # fmt: skip


def _foundry(name: str, model: str = "language", **values: Any) -> Row:
    return _callback(name, model, package="llmfoundry", **values)


def _elsewhere(name: str, test: str, **values: Any) -> Row:
    return _foundry(name, "", test=f"tests/foundry/{test}", **values)


def _optimizer(name: str, package: str = "llmfoundry", **values: Any) -> Row:
    return Row(name=name, kind=Kind.OPTIMIZER, package=package, model="language",
               arguments={"lr": 1e-3, "weight_decay": 1e-4}, **values)  # fmt: skip


_PARTS_DIFFER = (
    "FSDP1's ranks sum a norm for each parameter of which they store a part, and wait for each other for ever"
)
FOUNDRY = (
    _elsewhere("AsyncEval", "test_callbacks.py::test_evaluations_of_checkpoints_are_launched",
               why="the platform that it launches runs on is played"),
    _elsewhere("CurriculumLearning", "test_callbacks.py::test_datasets_change"),
    _elsewhere("DatasetSwap", "test_callbacks.py::test_datasets_change"),
    _foundry("EnvironmentLoggingCallback", arguments={"workspace_dir": FOLDER}),
    _foundry("EvalGauntlet", "images", trainer=_EVALUATES, arguments={
        "benchmark_sizes": {},  # required, because it refuses its own default weighting
        "logger_keys": [f"metrics/{_LABEL}/MulticlassAccuracy"],
        "categories": [{"name": "all", "benchmarks": [{"name": "task", "num_fewshot": 0, "random_baseline": 0.2}]}]}),
    _foundry("EvalOutputLogging", "gpt2", arguments={"log_tokens": True}, trainer=_EVALUATES),
    _foundry("FDiffMetrics", "images", arguments={"diff_train_metrics": True}, trainer=_EVALUATES),
    _elsewhere("GlobalLRScaling", "test_callbacks.py::test_learning_rates_are_scaled_on_resumption"),
    _elsewhere("HuggingFaceCheckpointer", "test_callbacks.py::test_transformers_loads_what_was_trained"),
    _foundry("KillLossSpike", arguments={"log_only": False, "window_size": 2}),
    _elsewhere("LayerFreezing", "test_callbacks.py::test_layers_freeze_under_either_name"),
    _foundry("LossPerpVsContextLengthLogger", "mpt", arguments={"log_batch_interval": 1, "compute_batch_interval": 1}),
    _foundry("MegaBlocksMoE_TokPerExpert", "", ours=Ours.NOT_RUN, why="needs megablocks, which needs a GPU"),
    _elsewhere("MonolithicCheckpointSaver", "test_callbacks.py::test_its_file_is_fsdp1s"),
    _foundry("RunTimeoutCallback", arguments={"timeout": 1000}),
    _foundry("ScheduledGarbageCollector", arguments={"batch_interval": 2}),
)  # fmt: skip
OPTIMIZERS = (
    _optimizer("DecoupledAdamW", "composer"),
    _optimizer("DecoupledSGDW", "composer"),
    _optimizer("DecoupledAdaLRLion", fsdp1="hangs", beside=Beside.DDP, why=_PARTS_DIFFER),
    _optimizer("DecoupledClipLion", fsdp1="hangs", beside=Beside.DDP, why=_PARTS_DIFFER),
    _optimizer("DecoupledLionW"),
    Row(name="NoOp", kind=Kind.OPTIMIZER, package="llmfoundry", model="language"),
)
ROWS = (*ALGORITHMS, *CALLBACKS, *FOUNDRY, *OPTIMIZERS)
