"""Report the command that trains a migrated LLM Foundry file on FSDP2, and top-level keys that LLM Foundry 0.22
rejects.

Neither blocks a migration: the section is valid, and LLM Foundry rejects a key with an error before training.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.text import and_more
from composer_fsdp2.migration.dialect import Section, implicit
from composer_fsdp2.migration.dialects.composer.around import BESIDE_ROWS, Given, foundry_model, mappings_above

# fmt: off
# The fields of TrainConfig in llmfoundry/utils/config_utils.py, 0.22.0; tests/foundry/test_train_config.py compares.
TRAIN_CONFIG = frozenset({
    "accumulate_train_batch_on_tokens", "algorithms", "autoresume", "callbacks", "code_paths",
    "compile_config", "console_log_interval", "cuda_load_lazy", "device_eval_batch_size",
    "device_train_batch_size", "device_train_grad_accum", "device_train_microbatch_size", "dist_timeout",
    "eval_first", "eval_gauntlet", "eval_gauntlet_str", "eval_interval", "eval_loader", "eval_loaders",
    "eval_subset_num_batches", "expandable_segments", "flatten_metadata", "fsdp_config",
    "global_train_batch_size", "icl_seq_len", "icl_subset_num_batches", "icl_tasks", "icl_tasks_str",
    "load_ignore_keys", "load_path", "load_strict_model_weights", "load_weights_only", "log_config",
    "log_to_console", "loggers", "max_duration", "max_seq_len", "max_split_size_mb", "metadata", "model",
    "n_gpus", "only_composer_checkpoint", "only_hf_checkpoint", "optimizer", "precision", "profiler",
    "progress_bar", "python_log_level", "run_name", "save_filename", "save_folder", "save_ignore_keys",
    "save_interval", "save_latest_filename", "save_num_checkpoints_to_keep", "save_overwrite",
    "save_weights_only", "scheduler", "seed", "spin_dataloaders", "tokenizer", "tp_config", "train_loader",
    "train_subset_num_batches", "variables",
})
# fmt: on
# Fields of TrainConfig without a default, and those from which LLM Foundry computes others.
MANDATORY = (
    "model",
    "tokenizer",
    "train_loader",
    "optimizer",
    "scheduler",
    "max_duration",
    "max_seq_len",
    "global_train_batch_size",
    "device_train_microbatch_size",
)
# Keys that scripts/train/train.py read in 2023 (mosaicml/llm-foundry, 00b4bae), and their names in 0.22.0.
_RENAMED = {"model_gauntlet": "eval_gauntlet", "lora": "model.peft_config"}
_BESIDE = {row.name for row in BESIDE_ROWS}  # their findings are in around.py
_COMMAND = "composer -m composer_fsdp2 train"
_PARAMETERS = "/mnt/config/parameters.yaml"  # where MCLI mounts the mapping under parameters
# Composer's launcher with its options, and a script, with no shell operator between them.
_LAUNCH = re.compile(r"(?<!\S)composer (?:(?!(?:&&|\|\||;|\|)(?: |$))\S+ )*?(?P<script>\S+\.py)(?!\S)")


def launch_findings(section: Section) -> Iterator[Finding]:
    """Yield findings for the launch of an LLM Foundry file, including an MCLI run file's ``command``."""
    given = _foundry_config(section)
    command = section.around.get("command") if section.path[:1] == ("parameters",) else None
    if isinstance(command, str):
        yield from _command_findings(command, is_foundry_file=given is not None)
    elif given is not None:
        reason = "key=value arguments may follow, as before; LLM Foundry's own train.py trains the file on FSDP1"
        yield implicit("launch", Outcome.EXACT, reason, target=f"{_COMMAND} FILE")
    yield from _refused_key_findings(given or {})


def unfinished_findings(given: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding if a file converted from another system lacks top-level keys of LLM Foundry, or has others."""
    missing = [key for key in MANDATORY if key not in given]
    refused = [key for key in given if key not in TRAIN_CONFIG | _BESIDE]
    if missing or refused:
        yield Finding(
            key="LLM Foundry",
            value="",
            outcome=Outcome.APPROXIMATE,
            target=", ".join(missing),
            reason="LLM Foundry 0.22 refuses a file without these keys, or with others than its own; scripts need none",
            hint=f"remove {and_more(refused, 4)}, or move them below variables" if refused else "",
            origin=Origin.WRITING,
        )


def _foundry_config(section: Section) -> Given | None:
    """Return LLM Foundry's training configuration that contains the section, or None."""
    if section.path[-1:] != ("fsdp_config",):
        return None
    above = reversed(mappings_above(section))
    return next((each for each in above if foundry_model(each) and {"tokenizer", "train_loader"} <= each.keys()), None)


def _command_findings(command: str, *, is_foundry_file: bool) -> Iterator[Finding]:
    """Yield findings with the new launch command for each line of an MCLI ``command`` that launches training.

    The command is not edited, because the new line depends on the image and the checkout, which only the user knows.
    """
    if "composer_fsdp2" in command:
        return
    lines = [(line.strip(), new) for line in command.splitlines() if (new := _fsdp2_command(line, is_foundry_file))]
    if not lines and is_foundry_file:
        lines = [(command.strip().rpartition("\n")[2], f"{_COMMAND} {_PARAMETERS}")]
    for line, new in lines:
        yield Finding(
            key="command",
            value=line,
            outcome=Outcome.APPROXIMATE,
            target=new,
            reason="it launches without composer_fsdp2, which the section needs; the new line is for you to write",
            hint="an entry of integrations with composer_fsdp2's repository and pip_install: '.[foundry]' installs it "
            "with LLM Foundry 0.22.0 and torch 2.7.0, in place of an older LLM Foundry",
        )


def _fsdp2_command(line: str, is_foundry_file: bool) -> str:
    """Return the shell line that launches the same script on FSDP2; "" if the line does not run Composer's launcher."""
    line = " ".join(line.split())
    launch = _LAUNCH.search(line)
    if launch is None:
        return ""
    is_train = is_foundry_file and launch["script"].rpartition("/")[2] == "train.py"
    verb = "train" if is_train else f"run {launch['script']}"
    return f"{line[: launch.start('script')]}-m composer_fsdp2 {verb}{line[launch.end() :]}"


def _refused_key_findings(given: Mapping[str, Any]) -> Iterator[Finding]:
    for key in (each for each in given if each not in TRAIN_CONFIG | _BESIDE):
        variable = f"variables.{key}"
        new = _RENAMED.get(key, variable)
        yield Finding(
            key=str(key),
            value=given[key],
            outcome=Outcome.APPROXIMATE,
            target=new,
            reason="LLM Foundry 0.22, with which composer_fsdp2 trains, refuses this root-level key",
            hint=f"move it below variables, and write ${{{variable}}} for ${{{key}}}"
            if new == variable
            else f"write its value under {new}",
            origin=Origin.WRITING,
        )
