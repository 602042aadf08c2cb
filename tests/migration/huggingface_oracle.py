"""What transformers and accelerate themselves make of a section: cases as JSON on stdin, their settings on stdout.

Run as a script, in a process of its own: both go by the environment, and leave their mark on it. ``ask`` runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def ask(cases: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What transformers ("trainer") and accelerate's launcher ("accelerate") make of each; one process for all."""
    from support.forked_scripts import run_script
    from support.ranks import WITH_COMPOSER

    written = json.dumps([{"system": system, "said": written} for system, written in cases])
    done = run_script(WITH_COMPOSER, Path(__file__), stdin=written)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """The plugin's settings, or why there is none."""
    for name in list(os.environ):
        if name.startswith(("FSDP_", "ACCELERATE_")):
            del os.environ[name]
    try:
        return _of_plugin(*(_trainer if case["system"] == "trainer" else _launcher)(case["said"]))
    except Exception as error:  # whatever they raise is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def _trainer(written: dict[str, Any]) -> tuple[Any, str]:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", **written)
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        raise ValueError("FSDP is off")
    plugin = FullyShardedDataParallelPlugin()
    # As Trainer.create_accelerator_and_postprocess does.
    for name in ("limit_all_gathers", "activation_checkpointing"):
        setattr(plugin, name, arguments.fsdp_config.get(name, getattr(plugin, name)))
    if plugin.activation_checkpointing and arguments.gradient_checkpointing:
        raise ValueError("both kinds of checkpointing")
    return plugin, os.environ["ACCELERATE_MIXED_PRECISION"]


def _launcher(written: dict[str, Any]) -> tuple[Any, str]:
    import yaml
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yaml")
        with open(path, "w") as file:
            yaml.safe_dump(written, file)
        arguments, _, _ = _validate_launch_command(
            launch_command_parser().parse_args(["--config_file", path, "script.py"])
        )
    environment = prepare_multi_gpu_env(arguments)
    if environment.get("ACCELERATE_USE_FSDP") != "true":
        raise ValueError("FSDP is off")
    os.environ.update({key: value for key, value in environment.items() if key.startswith(("FSDP_", "ACCELERATE_"))})
    return FullyShardedDataParallelPlugin(), os.environ["ACCELERATE_MIXED_PRECISION"]


def _of_plugin(plugin: Any, mixed_precision: str) -> dict[str, Any]:
    is_fsdp2 = plugin.fsdp_version == 2
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    policy = plugin.mixed_precision_policy
    wrap = getattr(plugin.auto_wrap_policy, "__name__", None)
    # A size of 0 is passed over when the model comes (set_auto_wrap_policy).
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
    import torch

    # sync_module_states asks for a device, to make parameters on.
    accelerate.utils.dataclasses.is_cuda_available = lambda: True  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        answers = [settings_of(case) for case in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
