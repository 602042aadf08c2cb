"""Launching a file of LLM Foundry on FSDP2: by hand, by an MCLI run file, and with its root-level keys."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest
from support.commands import LAUNCHERS

from composer_fsdp2.config.findings import Finding, Origin
from composer_fsdp2.migration.migrate import migrate_text
from tests.migration.file_cases import APPROXIMATE, EXACT, NEEDS_DECISION, Case, each_case

TRAINS = "model: {name: mpt_causal_lm}\ntokenizer: {name: gpt2}\ntrain_loader: {name: text}\nmax_duration: 1ep\n"
SECTION = "fsdp_config:\n  sharding_strategy: SHARD_GRAD_OP\n"
PARAMETERS = "/mnt/config/parameters.yaml"


def run_file(*command: str, trains: str = TRAINS) -> str:
    """An MCLI run file."""
    script, parameters = ("\n".join(text) for text in (command, [trains + SECTION]))
    below = {"command": indent(script, "  "), "parameters": indent(parameters, "  ")}
    return "name: run\ncommand: |\n{command}\nparameters:\n{parameters}".format(**below)


def told(text: str, key: str) -> list[Finding]:
    return [each for each in migrate_text(text, "run.yaml").sections[0].findings if each.key == key]


# --- the command

CASES = {
    "a training file names its command": Case(
        file=TRAINS + SECTION,
        told={"(implicit) launch": (EXACT, "composer -m composer_fsdp2 train FILE")},
        blocking=[],
        after=f"{TRAINS}fsdp_config:\n  reshard_after_forward: false\n",
    ),
    "a section behind an interpolation is launched, too": Case(
        file=f"{TRAINS}variables:\n  sharding: {{limit_all_gathers: true}}\nfsdp_config: ${{variables.sharding}}\n",
        told={"(implicit) launch": (EXACT, "composer_fsdp2")},
    ),
    "what blocks the section leaves the command": Case(
        file=f"{TRAINS}fsdp_config: {{state_dict_type: local}}\n",
        told={"(implicit) launch": (EXACT,), "state_dict_type": (NEEDS_DECISION,)},
    ),
    "keys that contradict each other leave the command": Case(
        file=f"{TRAINS}fsdp_config: {{sharding_strategy: [FULL_SHARD]}}\n",
        told={"(implicit) launch": (EXACT,), "sharding_strategy": (NEEDS_DECISION,)},
    ),
    "another system has another command": Case(
        file=f"data_local: x\n{TRAINS}{SECTION}", to="accelerate", untold=("launch", "data_local")
    ),
    "a script of one's own": Case(file=f"model: {{name: x}}\n{SECTION}other: 1\n", untold=("launch", "other")),
    "a Trainer's argument": Case(
        file=f"{TRAINS}other: 1\nparallelism_config: {{fsdp: {{verbose: true}}}}\n", untold=("launch", "other")
    ),
    "an evaluation": Case(file=f"models: [{{model: {{name: x}}}}]\nicl_tasks: []\n{SECTION}", untold=("launch",)),
    "a run file's command": Case(
        file=run_file("cd llm-foundry/scripts", f"composer train/train.py {PARAMETERS}"),
        told={"command": (APPROXIMATE, "integrations", "pip_install: '.[foundry]'")},
        became={"command": f"composer -m composer_fsdp2 train {PARAMETERS}"},
        untold=("launch",),
        blocking=[],
        has=(f"  composer train/train.py {PARAMETERS}\n", "    reshard_after_forward: false\n"),
    ),
    "a run file that was changed": Case(
        file=run_file(f"composer -m composer_fsdp2 train {PARAMETERS}"), untold=("command", "launch")
    ),
    "a shell's variable is no interpolation": Case(
        file=run_file(f"composer train/train.py {PARAMETERS} save_folder=${{FOLDER}}"),
        became={"command": f"composer -m composer_fsdp2 train {PARAMETERS} save_folder=${{FOLDER}}"},
        blocking=[],
    ),
    "a command that is no text": Case(
        file="command: [x]\nparameters: {fsdp_config: {verbose: true}}", untold=("command",), told={"verbose": (EXACT,)}
    ),
}


@each_case(CASES)
def test_launch(case: Case):
    """Without its command a migrated file trains on FSDP1, which ignores FSDP2's keys."""
    case.check()


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("composer -n 8 scripts/train/train.py F || (exit 1)", "composer -n 8 -m composer_fsdp2 train F || (exit 1)"),
        (
            "cd x && FSDP_VERSION=2 composer train.py F \\",
            "cd x && FSDP_VERSION=2 composer -m composer_fsdp2 train F \\",
        ),
        ("composer eval/eval.py F", "composer -m composer_fsdp2 run eval/eval.py F"),
        # No line of Composer's launcher: only the user knows the command.
        ("cd composer && python train.py F", f"composer -m composer_fsdp2 train {PARAMETERS}"),
        ("bash train.sh", f"composer -m composer_fsdp2 train {PARAMETERS}"),
        ("composer", f"composer -m composer_fsdp2 train {PARAMETERS}"),
    ],
)
def test_line_of_a_run_file(line: str, new: str):
    """The new line starts the same run, with the launcher's options and the script's arguments."""
    (finding,) = told(run_file("python data_prep/convert.py", line), "command")
    assert (finding.value, finding.target, finding.where) == (line, new, "run.yaml:2")


def test_each_line_that_launches():
    """A second training, or an evaluation after it, would still run on FSDP1."""
    found = told(run_file("composer train.py A", "python x.py", "composer eval.py B"), "command")
    assert [each.target for each in found] == [
        "composer -m composer_fsdp2 train A",
        "composer -m composer_fsdp2 run eval.py B",
    ]


def test_train_is_llm_foundrys_alone():
    """A train.py with its own parameters is another script, whose arguments LLM Foundry does not accept."""
    (finding,) = told(run_file("composer train.py F", trains="lr: 1\n"), "command")
    assert finding.target == "composer -m composer_fsdp2 run train.py F"


def test_the_line_is_the_one_that_trains():
    """The finding's command equals the one that tests/foundry/test_train_yaml.py launches."""
    (finding,) = told(run_file("composer -n 2 train.py"), "command")
    assert finding.target.split() == [*(Path(word).name for word in LAUNCHERS["composer"]), "train"]


# --- root-level keys


def refused(text: str) -> dict[str, tuple[str, str]]:
    """By key: its place and its replacement."""
    findings = migrate_text(text, "run.yaml").sections[0].findings
    return {each.key: (each.where, each.target) for each in findings if each.origin is Origin.WRITING}


def test_refused_keys():
    """LLM Foundry refuses them only after the run has its machines."""
    text = f"data_local: ./c4\nmodel_gauntlet: x.yaml\nlora: {{args: {{r: 8}}}}\nseed: 1\n{TRAINS}{SECTION}"
    assert refused(text) == {
        "data_local": ("run.yaml:1", "variables.data_local"),
        "model_gauntlet": ("run.yaml:2", "eval_gauntlet"),
        "lora": ("run.yaml:3", "model.peft_config"),
    }
    (finding,) = told(text, "data_local")
    assert finding.outcome is APPROXIMATE and finding.value == "./c4"
    assert finding.hint == "move it below variables, and write ${variables.data_local} for ${data_local}"
    assert migrate_text(text).exit_code == 0


def test_refused_keys_of_a_run_file():
    """The keys are those of ``parameters``, not MCLI's own beside it."""
    text = run_file("composer train.py F", trains=f"global_seed: 17\nseed: ${{global_seed}}\n{TRAINS}")
    assert refused(text) == {"global_seed": ("run.yaml:5", "variables.global_seed")}


def test_what_a_row_refuses_is_told_once():
    """``grad_accum`` must be replaced; under variables it would have no effect."""
    text = f"grad_accum: 2\n{TRAINS}{SECTION}"
    assert refused(text) == {}
    (finding,) = told(text, "grad_accum")
    assert finding.outcome is NEEDS_DECISION
