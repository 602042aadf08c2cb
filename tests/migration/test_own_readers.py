"""The target system can read migrate's output: generated files of every system, for each target."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from support.examples import examples
from support.foundry_runs import YAML, as_foundry_reads
from support.other_releases import needs

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.migrate import Migration, find_sections, migrate_text
from tests.migration import huggingface_oracle, torchtitan_oracle
from tests.migration.file_cases import asked_at
from tests.migration.generated import ANY_FILE, UNSET, File

NUM_FILES = 400
Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """A file, its migrated file, and the section in each."""

    file: File
    migration: Migration
    before: Section
    section: Section

    @property
    def has_sizes(self) -> bool:
        return "parallelism_config" in self.section.given


@cache
def written_for(to: str) -> Sequence[Written]:
    """For files of every system, the same in every run: outputs that a user may take unchanged, or with ``--force``,
    accepting the reported losses."""
    found: dict[str, Written] = {}

    @examples(NUM_FILES)
    @given(ANY_FILE)
    def draw(file: File) -> None:
        migration = migrate_text(file.text, f"run{file.suffix}", to=to)
        is_whole = all(each.origin is Origin.LACKING and not is_without_shards(each) for each in migration.blocking)
        if is_whole and (migration.is_changed or migration.is_new_file):
            (_, before), *_ = find_sections(file.text, f"run{file.suffix}")[1]
            (_, section), *_ = find_sections(migration.after, f"run{migration.suffix}")[1]
            found[migration.after] = Written(file, migration, before, section)

    draw()
    return tuple(found.values())


def is_without_shards(finding: Finding) -> bool:
    """Most systems have no FSDP2 form for such a run, so its file is unchanged."""
    return finding.key == "mesh" and finding.outcome is Outcome.UNSUPPORTED


def check(written: Sequence[Written], answers: Sequence[Answer], at_least: int) -> None:
    """Each can be read; the error shows the shortest that cannot."""
    assert len(written) >= at_least
    refused = [(each, answer["error"]) for each, answer in zip(written, answers, strict=True) if "error" in answer]
    if refused:
        each, error = min(refused, key=lambda pair: len(pair[0].migration.after))
        parts = (f"{len(refused)} of {len(written)}: {error}", each.file.text, each.migration.after)
        pytest.fail("\n\n".join((*parts, *map(str, each.migration.blocking))))


# --- accelerate, and a Trainer


def launched(written: Written) -> tuple[str, dict[str, Any]]:
    """The file passed to its system; for accelerate, with the number of processes that a user adds."""
    given = {str(key): value for key, value in written.section.given.items()}
    if "distributed_type" not in given:
        return "trainer", {key: given[key] for key in ("fsdp", "fsdp_config", "bf16") if key in given}
    return "accelerate", {"num_processes": math.prod(given.get("parallelism_config", {8: 8}).values()), **given}


def check_accelerate(written: Sequence[Written], *releases: str) -> None:
    answers = huggingface_oracle.ask([launched(each) for each in written], *releases)
    check(written, answers, at_least=NUM_FILES // 20)
    assert not [answer["unread"] for answer in answers if answer["unread"]]
    of_accelerate = [answer for each, answer in zip(written, answers, strict=True) if launched(each)[0] != "trainer"]
    assert {answer["version"] for answer in of_accelerate} == {2}


def test_accelerate_1_8() -> None:
    """Otherwise users would notice only when the launcher refuses the file. The sizes of parallelism_config are a
    decision, because that release refuses them."""
    written = [each for each in written_for("accelerate") if not each.has_sizes]
    check_accelerate(written)


@pytest.mark.others
def test_accelerate_1_10() -> None:
    """This release also reads parallelism_config, and checks it against the number of processes."""
    releases = ("accelerate-1.10.1", "transformers-4.55.2")
    needs(*releases)
    written = written_for("accelerate")
    assert any(each.has_sizes for each in written)
    check_accelerate(written, *releases)


# --- axolotl

WITH_AXOLOTL = ("axolotl-0.12.2", "accelerate-1.10.1", "transformers-4.55.2")
# Keys that axolotl requires; flash attention for context parallelism, which its own files turn on as well.
REST_OF_AXOLOTL = {
    "base_model": "m",
    "datasets": [{"path": "d", "type": "alpaca"}],
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
    "flash_attention": True,
}


@pytest.mark.others
def test_axolotl() -> None:
    """axolotl's schema accepts the file, and so does accelerate with the variables that it sets."""
    releases = WITH_AXOLOTL
    needs(*releases)
    written = written_for("axolotl")
    own = [each for each in written if each.migration.sections[0].dialect == "axolotl"]
    before = asked_of_axolotl([each.before for each in own], releases)
    refused = [each for each, answer in zip(own, before, strict=True) if "error" in answer]  # for another reason
    written = [each for each in written if each not in refused]
    answers = asked_of_axolotl([each.section for each in written], releases)
    check(written, answers, at_least=NUM_FILES // 20)
    assert {answer["version"] for answer in answers} == {2}
    assert {answer["reshard"] for answer in answers} == {True}  # of axolotl's too: it exports no false


OF_FSDP1 = """\
base_model: m
micro_batch_size: 1
datasets: [{path: d, type: alpaca}]
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""
QUANTIZED = "adapter: qlora\nload_in_4bit: true\n"
# Keys that axolotl's FSDP1 accepts, and its FSDP2 refuses.
ONLY_WITH_FSDP1 = {
    "optimizer: adamw_bnb_8bit\n": "adamw_torch_8bit",
    "optimizer: adamw_8bit\n": "adamw_torch_8bit",
    f"{QUANTIZED}rl: orpo\n": "fsdp_version",
    QUANTIZED: "cpu_ram_efficient_loading",
}


@pytest.mark.others
def test_what_only_axolotls_fsdp1_takes_is_a_decision() -> None:
    """Otherwise axolotl refuses the new file, after `exact` with exit code 0."""
    needs(*WITH_AXOLOTL)
    for lines, word in ONLY_WITH_FSDP1.items():
        text = f"{OF_FSDP1}{lines}"
        if "cpu_ram_efficient_loading" not in word:
            text = text.replace("loading: true", "loading: false")
        migration = migrate_text(text, to="axolotl")
        sections = [find_sections(each)[1][0][1] for each in (text, migration.after)]
        before, after = asked_of_axolotl(sections, WITH_AXOLOTL)
        assert "error" not in before and word in after["error"], (before, after)
        assert any(word in str(each) for each in migration.blocking), lines


def asked_of_axolotl(sections: Sequence[Section], releases: Sequence[str]) -> Sequence[Answer]:
    """Each section as part of a whole file."""
    values = [{str(key): value for key, value in each.given.items()} for each in sections]
    return huggingface_oracle.ask([("axolotl", REST_OF_AXOLOTL | each) for each in values], *releases)


# --- TorchTitan


@pytest.mark.others
def test_torchtitan() -> None:
    """TorchTitan's ConfigManager refuses unknown tables, names and values."""
    needs("torchtitan-0.2.2")
    written = written_for("torchtitan")
    answers = torchtitan_oracle.ask([each.migration.after for each in written], "torchtitan-0.2.2")
    check(written, answers, at_least=NUM_FILES // 20)
    for each, answer in zip(written, answers, strict=True):
        for table, values in tomllib.loads(each.migration.after).items():
            assert {name: answer[table][name] for name in values} == values, each.migration.after


# --- LLM Foundry


@pytest.mark.foundry
def test_llm_foundry(tmp_path: Path) -> None:
    """LLM Foundry's TrainConfig accepts the file, and the runtime its section."""
    rest = {key: value for key, value in yaml.safe_load(YAML.read_text()).items() if key != "code_paths"}
    # Foundry accepts no environment variables in its files.
    written = [each for each in written_for("composer") if UNSET not in str(each.section.given)]
    answers = [read_by_foundry(each, rest, tmp_path / f"{number}.yaml") for number, each in enumerate(written)]
    check(written, answers, at_least=NUM_FILES // 20)


def read_by_foundry(written: Written, rest: Mapping[str, Any], path: Path) -> Answer:
    """The section as part of a whole file."""
    beside = yaml.safe_load(written.migration.after) if written.migration.is_new_file else {}
    if "tp_config" in beside:  # LLM Foundry's mixed initialization is refused with it
        rest = {**rest, "model": {**rest["model"], "init_device": "meta"}}
    path.write_text(yaml.safe_dump({**rest, **beside, "fsdp_config": dict(written.section.given)}))
    try:
        as_foundry_reads(path, 2)
        assert any(asked_at(path.read_text(), ranks) for ranks in (1, 2, 4, 8, 16))
    except Exception as error:  # any exception is the result
        return {"error": f"{type(error).__name__}: {error}"}
    return {}
