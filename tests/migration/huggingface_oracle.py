"""Settings that transformers, accelerate and axolotl themselves derive from a section: cases and results as JSON on
stdin and stdout.

Run as a script in its own process, because they read and change the environment. It is run by ``ask``, with the
installed releases or with others of `support.other_releases`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def ask(cases: Sequence[tuple[str, dict[str, Any]]], *releases: str) -> list[dict[str, Any]]:
    """Results of transformers ("trainer"), accelerate's launcher ("accelerate") and axolotl; one process for all cases.

    Args:
        releases: Releases that replace the installed ones.
    """
    from support.forked_scripts import run_script
    from support.other_releases import run_with
    from support.ranks import WITH_COMPOSER

    written = json.dumps([{"system": system, "said": written} for system, written in cases], default=str)
    if releases:
        done = run_with(releases, Path(__file__), stdin=written)
    else:
        done = run_script(WITH_COMPOSER, Path(__file__), stdin=written)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


Read = tuple[Any, str, set[str]]  # a plugin, its mixed precision, and unread keys
_VARIABLES = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """The plugin's settings, or the reason why it was not made."""
    for name in list(os.environ):
        if name.startswith(_VARIABLES):
            del os.environ[name]
    readers = {"trainer": _trainer, "accelerate": _launcher, "axolotl": _axolotl}
    try:
        plugin, mixed_precision, unread = readers[case["system"]](case["said"])
        return {**_of_plugin(plugin, mixed_precision), "unread": sorted(unread)}
    except Exception as error:  # any exception is the result
        return {"error": f"{type(error).__name__}: {error}"}


def _trainer(written: dict[str, Any]) -> Read:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", **written)
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        raise ValueError("FSDP is off")
    plugin = FullyShardedDataParallelPlugin()
    # Like Trainer.create_accelerator_and_postprocess.
    for name in ("limit_all_gathers", "activation_checkpointing"):
        setattr(plugin, name, arguments.fsdp_config.get(name, getattr(plugin, name)))
    if plugin.activation_checkpointing and arguments.gradient_checkpointing:
        raise ValueError("both kinds of checkpointing")
    return plugin, os.environ["ACCELERATE_MIXED_PRECISION"], set()


def _launcher(written: dict[str, Any]) -> Read:
    import yaml
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yaml")
        with open(path, "w") as file:
            yaml.safe_dump(written, file)
        given = launch_command_parser().parse_args(["--config_file", path, "script.py"])
        options = {*vars(given)}
        arguments, _, _ = _validate_launch_command(given)
        # The launcher turns an unknown key into an attribute that nothing reads.
        unread = {*vars(arguments)} - options - _NO_OPTIONS
    environment = prepare_multi_gpu_env(arguments)
    if environment.get("ACCELERATE_USE_FSDP") != "true":
        raise ValueError("FSDP is off")
    os.environ.update({key: str(value) for key, value in environment.items() if key.startswith(_VARIABLES)})
    plugin = FullyShardedDataParallelPlugin()
    _check_sizes(plugin, arguments.num_processes)
    return plugin, os.environ["ACCELERATE_MIXED_PRECISION"], unread


# Fields of a cluster's file that are not options of ``accelerate launch``.
_NO_OPTIONS = frozenset(["command_file", "commands", "tpu_env", "tpu_name", "tpu_vm", "tpu_zone", "use_cpu"])


def _check_sizes(plugin: Any, num_processes: int) -> None:
    """Like Accelerator; a release before 1.10 has no such sizes."""
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        from accelerate.parallelism_config import ParallelismConfig

        accelerator: Any = SimpleNamespace(
            num_processes=num_processes,
            multi_device=False,
            is_fsdp2=plugin.fsdp_version == 2,
            distributed_type="FSDP",
            is_main_process=True,
        )
        ParallelismConfig()._validate_accelerator(accelerator)


def _axolotl(written: dict[str, Any]) -> Read:
    """Through its schema, and the environment variables that it sets for accelerate."""
    for name in ("numba", "ring_flash_attn"):  # for its batches and its attention, which are not used here
        sys.modules.setdefault(name, SimpleNamespace(njit=lambda function: function))  # type: ignore[arg-type]
    from accelerate import FullyShardedDataParallelPlugin
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.distributed import _get_parallel_config_kwargs
    from axolotl.utils.schemas.config import AxolotlConfigWCapabilities
    from axolotl.utils.trainer import prepare_optim_env

    gpus = {"bf16": True, "n_gpu": 8, "n_node": 1, "compute_capability": "sm_90"}
    read = AxolotlConfigWCapabilities(**written, capabilities=gpus, env_capabilities={"torch_version": "2.7.0"})
    config = DictDefault(read.model_dump(exclude_none=True))
    prepare_optim_env(config)
    plugin = FullyShardedDataParallelPlugin()
    names = ("tensor_parallel_size", "context_parallel_size", "dp_shard_size", "dp_replicate_size")
    sizes = [config[name] for name in names]
    num_processes = math.prod(size or 1 for size in sizes) if any(sizes) else 8
    _get_parallel_config_kwargs(num_processes, *sizes, is_fsdp=True)
    _check_sizes(plugin, num_processes)
    return plugin, "fp16" if config.fp16 else "bf16" if config.bf16 else "no", set()


def _of_plugin(plugin: Any, mixed_precision: str) -> dict[str, Any]:
    is_fsdp2 = plugin.fsdp_version == 2
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    policy = plugin.mixed_precision_policy
    wrap = getattr(plugin.auto_wrap_policy, "__name__", None)
    # A size of 0 is ignored once the model is prepared (set_auto_wrap_policy).
    wrap = None if wrap == "size_based_auto_wrap_policy" and not plugin.min_num_params else wrap
    prefetch = plugin.backward_prefetch
    return {
        "version": plugin.fsdp_version,
        "strategy": None if is_fsdp2 else plugin.sharding_strategy.name,
        "reshard": plugin.reshard_after_forward if is_fsdp2 else None,
        "offload": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
        if is_fsdp2
        else plugin.cpu_offload.offload_params,
        "wrap": {None: "ROOT", "transformer_auto_wrap_policy": "CLASSES", "size_based_auto_wrap_policy": "SIZE"}[wrap],
        "classes": list(plugin.transformer_cls_names_to_wrap or []) if wrap and "transformer" in wrap else [],
        "min_num_params": plugin.min_num_params if wrap and "size" in wrap else 0,
        "backward_prefetch": None if is_fsdp2 else prefetch and prefetch.name,
        "forward_prefetch": bool(plugin.forward_prefetch),
        "state_dict_type": plugin.state_dict_type.name,
        "sync": plugin.cpu_ram_efficient_loading if is_fsdp2 else plugin.sync_module_states,
        "activation_checkpointing": bool(plugin.activation_checkpointing),
        "dtypes": [
            str(getattr(policy, name, None)).removeprefix("torch.")
            for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
        ],
        "casts": getattr(policy, "cast_forward_inputs", None),
    }


def main() -> None:
    import accelerate.utils.dataclasses
    import accelerate.utils.launch
    import torch

    # sync_module_states requires a device, to make parameters on.
    accelerate.utils.dataclasses.is_cuda_available = lambda: True  # type: ignore[assignment]
    accelerate.utils.launch.is_fp8_available = lambda: True  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        answers = [settings_of(case) for case in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
