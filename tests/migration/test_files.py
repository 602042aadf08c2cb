"""Folders of any files: each file has its own result, and no other file on the machine is touched."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration import files
from composer_fsdp2.migration.files import Destination, FileResult, migrate_files, sources_of
from composer_fsdp2.migration.migrate import Migration, migrate_text
from composer_fsdp2.migration.targets import TARGETS

GOOD = "fsdp_config:\n  sharding_strategy: FULL_SHARD\n  limit_all_gathers: true\n"
MIGRATED = "fsdp_config:\n  reshard_after_forward: true\n"


def results(folder: Path, destination: Destination | None = None, **options: object) -> dict[str, FileResult]:
    destination = destination or Destination()
    sources = sources_of([folder], output=destination.output)
    found = migrate_files(sources, destination, **options)  # type: ignore[arg-type]
    each = [(str(Path(result.path).relative_to(folder)), result) for result in found]
    assert len({name for name, _ in each}) == len(each) == len(sources)
    return dict(each)


def named(path: Path, destination: Destination | None = None) -> FileResult:
    (result,) = migrate_files(sources_of([path]), destination or Destination())
    return result


def write(folder: Path, texts: dict[str, str | bytes]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


# Files found beside configurations. Each once caused a traceback or an error.
WITHOUT_SECTION: dict[str, str | bytes] = {
    "list.yaml": "- 1\n- {a: b}\n",
    "empty.yaml": "",
    "comments.yaml": "# about FSDP\n",
    "null.json": "null\n",
    "documents.yaml": "a: 1\n---\nb: 2\n",
    "helm.yaml": "{{- if .Values.fsdp }}\nname: {{ .Release.Name }}\n{{- end }}\n",
    "workflow.yml": "jobs:\n  test:\n    runs-on: ${{ matrix.os }}\n    name: fsdp\n",
    "dollar.yaml": 'a: "${"\nb: ${unterminated\nc: ${run}\n2024-01-02: x\n~: y\nrun: "fsdp"\n',
    "tags.yaml": "a: !Ref b\n",
    "comments.json": '{\n  // about FSDP\n  "strict": true\n}\n',
    "bytes.yaml": b"a: \xff\n",
    "wide.yaml": "a: 1\n".encode("utf-16"),
    "control.yaml": "a: \x00\n",
    "tabs.yaml": "a:\n\tb: 1\n",
    "broken.toml": "a = [\n",
    "deep.yaml": "a: " + "[" * 3000 + "]" * 3000,
    ".git/config.yaml": GOOD,
    ".venv/lib/run.yaml": GOOD,
}


def test_a_folder_of_anything(tmp_path: Path):
    """One workflow template or one list must not end a run over a thousand files, nor fail a CI job permanently."""
    write(
        tmp_path, {**WITHOUT_SECTION, "a.yaml": GOOD, "z/B.YAML": GOOD, "c.json": '{"fsdp_config": {"verbose": true}}'}
    )
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "itself.yaml").symlink_to(tmp_path / "itself.yaml")
    (tmp_path / "again.yaml").symlink_to(tmp_path / "a.yaml")
    found = results(tmp_path)
    assert {name: result.error for name, result in found.items() if result.exit_code} == {}
    assert {name for name, result in found.items() if not result.is_skipped} == {"a.yaml", "c.json", "z/B.YAML"}
    assert not {name for name in found if name.startswith((".git", ".venv", "circle"))}


# Files named by the user, and files with a section, are never skipped.
UNUSABLE: dict[str, tuple[str | bytes, str]] = {
    "documents.yaml": (f"a: 1\n---\n{GOOD}", "documents.yaml:3:1: here is a second document"),
    "list.yaml": ("- fsdp_config: {verbose: true}\n", "list.yaml:1:1: a mapping is expected"),
    "twice.yaml": (GOOD + GOOD, "twice.yaml:4:1: fsdp_config stands in line 1, too"),
    "above.yaml": ("t: {a: 1}\nt: {fsdp_config: {verbose: true}}\n", "above.yaml:2:1: t stands in line 1, too"),
    "twice.json": ('{"fsdp_config": {}, "fsdp_config": {}}', "twice.json:1:21: fsdp_config stands in line 1, too"),
    "merge.yaml": ("a: &a 1\nfsdp_config:\n  <<: *a\n", "merge.yaml:3:3: << takes a mapping"),
    "deep.yaml": ("fsdp_config: " + "[" * 3000 + "]" * 3000, "deep.yaml:1:"),
    "block.yaml": ("".join(f"{' ' * n}fsdp:\n" for n in range(3000)), "block.yaml:65:65: values are nested more than"),
    "deep.json": ('{"fsdp_config": ' + "[" * 3000 + "]" * 3000 + "}", "deep.json:1:1: values are nested more than"),
    "deep.toml": ("[parallelism]\n" + ".".join("a" * 3000) + " = 1", "deep.toml:1:1: values are nested more than"),
    "laughs.yaml": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True))
        + GOOD,
        "laughs.yaml:6:4: aliases of aliases stand for",
    ),
    "itself.yaml": ("a: &a [*a]\n" + GOOD, "itself.yaml:1:8: an alias stands in what it is an alias of"),
    "wide.yaml": (GOOD.encode("utf-16"), "wide.yaml:1:1: the file is in UTF-16"),
    "bytes.yaml": (b"fsdp_config: \xff\n", "bytes.yaml:1:14: no UTF-8"),
    "nul.yaml": (GOOD + "x: \x00\n", "nul.yaml:4:4: control characters are not allowed"),
    "tabs.yaml": ("fsdp_config:\n\tverbose: true\n", "tabs.yaml:2:1: "),
    "tag.yaml": (GOOD + "a: !Ref b\n", "tag.yaml:4:4: could not determine a constructor for the tag '!Ref'"),
}


def test_what_is_wrong_with_a_file_with_a_section_is_told_at_once(tmp_path: Path):
    """A file that hangs, exhausts memory or is silently skipped would be noticed only when the job fails to start."""
    write(tmp_path, {name: text for name, (text, _) in UNUSABLE.items()} | {"good.yaml": GOOD})
    began = time.process_time()
    found = results(tmp_path)
    assert time.process_time() - began < 10  # about a second for all of them on an idle machine
    assert found["good.yaml"].exit_code == 0
    for name, (_, message) in UNUSABLE.items():
        assert (found[name].exit_code, found[name].is_skipped) == (2, False), name
        assert found[name].error.removeprefix(f"{tmp_path}/").startswith(message), found[name].error
    write(tmp_path, {"named.yaml": "- 1\n"})
    assert named(tmp_path / "named.yaml").error.endswith("named.yaml:1:1: a mapping is expected at the top of the file")


def test_an_unexpected_error_is_one_files_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An internal error in one file must not lose the results of a thousand others."""
    write(tmp_path, {"a.yaml": GOOD, "bad.yaml": GOOD, "c.yaml": GOOD})

    def sometimes(text: str, name: str, **options: object) -> Migration:
        if name.endswith("bad.yaml"):
            raise ZeroDivisionError("nobody\x1b[31m thought of it")
        return migrate_text(text, name)

    monkeypatch.setattr(files, "migrate_text", sometimes)
    found = results(tmp_path, Destination(in_place=True))
    assert [found[name].exit_code for name in ("a.yaml", "bad.yaml", "c.yaml")] == [0, 2, 0]
    error = found["bad.yaml"].error
    assert "bad.yaml: ZeroDivisionError in test_files.py:" in error and "please report it" in error
    assert "\x1b" not in error and "nobody\\x1b[31m thought" in error


def test_results_of_an_earlier_run_are_no_sources(tmp_path: Path):
    """Repeated runs with ``-o d/out`` must not nest the output one level deeper each time."""
    write(tmp_path, {"a.yaml": GOOD, "deep/b.yaml": GOOD})
    for _ in range(3):
        assert results(tmp_path, Destination(output=tmp_path / "out")).keys() == {"a.yaml", "deep/b.yaml"}
    assert {str(file.relative_to(tmp_path)) for file in (tmp_path / "out").rglob("*.yaml")} == {
        "out/a.yaml",
        "out/deep/b.yaml",
    }


def test_a_file_that_two_paths_name_is_migrated_once(tmp_path: Path):
    """A second migration would overwrite the backup of the original with the result."""
    write(tmp_path, {"a.yaml": GOOD})
    (tmp_path / "link.yaml").symlink_to("a.yaml")
    paths = [tmp_path, tmp_path / "link.yaml", tmp_path / "a.yaml"]
    (result,) = migrate_files(sources_of(paths), Destination(in_place=True))
    assert result.exit_code == 0 and (tmp_path / "a.yaml").read_text() == MIGRATED
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.yaml", "a.yaml.bak", "link.yaml"]
    write(tmp_path, {"list.yaml": "- 1\n"})
    for order in ([tmp_path, tmp_path / "list.yaml"], [tmp_path / "list.yaml", tmp_path]):
        codes = {Path(each.path).name: each.exit_code for each in migrate_files(sources_of(order), Destination())}
        assert codes["list.yaml"] == 2, "it was named"


def test_what_cannot_be_written_is_blamed(tmp_path: Path):
    """The error must name the file that cannot be written; users would look for the fault in a correct one."""
    write(tmp_path, {"run.yaml": GOOD, "file": ""})
    for output, blamed in (("file/new.yaml", "file"), ("file/a/b.yaml", "file")):
        result = named(tmp_path / "run.yaml", Destination(output=tmp_path / output))
        assert result.exit_code == 2 and result.error.startswith(f"{tmp_path / blamed}"), result.error
    (tmp_path / "out" / "run.yaml").mkdir(parents=True)
    result = named(tmp_path / "run.yaml", Destination(output=tmp_path / "out"))
    assert result.error == f"{tmp_path}/out/run.yaml: cannot be written: Is a directory"
    assert (tmp_path / "run.yaml").read_text() == GOOD


def test_a_folder_that_cannot_be_written_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with only some of the files written would have to be repaired by hand."""
    write(tmp_path, {"run.yaml": GOOD})
    usual = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).name == "run.yaml":
            raise PermissionError(13, "Permission denied", str(target))
        usual(source, target)

    monkeypatch.setattr(os, "replace", replace)
    result = named(tmp_path / "run.yaml", Destination(in_place=True))
    assert result.exit_code == 2 and f"{tmp_path}/run.yaml: cannot be written: Permission denied" in result.error
    assert [file.name for file in tmp_path.iterdir()] == ["run.yaml"]


def test_a_file_that_changes_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A change that another person or an editor just saved would be lost."""
    write(tmp_path, {"run.yaml": GOOD})

    def edited_meanwhile(text: str, name: str, **options: object) -> Migration:
        (tmp_path / "run.yaml").write_text(f"{GOOD}saved: now\n")
        return migrate_text(text, name)

    monkeypatch.setattr(files, "migrate_text", edited_meanwhile)
    result = named(tmp_path / "run.yaml", Destination(in_place=True))
    assert result.exit_code == 2 and "changed while it was being migrated" in result.error
    assert (tmp_path / "run.yaml").read_text() == f"{GOOD}saved: now\n"
    assert not (tmp_path / "run.yaml.bak").exists()


def test_line_ends_and_spellings_of_suffixes(tmp_path: Path):
    """Files from Windows, or from an old Mac, keep their line ends."""
    write(
        tmp_path,
        {
            "cr.yaml": GOOD.replace("\n", "\r"),
            "mixed.yaml": f"a: 1\r\nb: |\n  x\r\n  y\n{GOOD}",
            "run.TOML": "[parallelism]\r\ndata_parallel_shard_degree = 2\n",
            "run.YML": "\ufeff" + GOOD,
            "args.JSON": '{"fsdp_config": {"limit_all_gathers": true}}',
        },
    )
    launched = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    new = migrate_text(launched, to="accelerate").after
    assert len(new.splitlines()) > 3  # the new lines end as the others do
    for end in ("\r", "\r\n"):
        assert migrate_text(launched.replace("\n", end), to="accelerate").after == new.replace("\n", end)
    found = results(tmp_path, to="torchtitan")
    assert found["run.TOML"].exit_code == 0
    found = results(tmp_path)
    after = {name: each.migration.after for name, each in found.items() if each.migration is not None}
    assert after["cr.yaml"] == MIGRATED.replace("\n", "\r")
    assert after["mixed.yaml"] == f"a: 1\r\nb: |\n  x\r\n  y\n{MIGRATED}"
    assert after["run.YML"] == "\ufeff" + MIGRATED
    assert after["args.JSON"] == '{"fsdp_config": {}}'


def children_of(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_killed_it_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When a scheduler kills the command, its worker processes must end, too."""
    write(tmp_path, {f"{number}.yaml": GOOD for number in range(40)})

    def slow(text: str, name: str, **options: object) -> Migration:
        time.sleep(600)
        raise AssertionError

    monkeypatch.setattr(files, "migrate_text", slow)
    child = os.fork()
    if child == 0:
        try:
            results(tmp_path, jobs=2)
        finally:
            os._exit(0)
    until(lambda: len(children_of(child)) == 2)
    time.sleep(0.2)  # until they wait for files or process one
    workers = children_of(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: not any(map(is_alive, workers)))


def test_a_worker_that_is_killed_costs_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When a machine out of memory kills a worker, only the result of one file is lost."""
    write(tmp_path, {f"{number:02}.yaml": GOOD for number in range(20)})

    def deadly(text: str, name: str, **options: object) -> Migration:
        if name.endswith("19.yaml"):  # in the last chunk, after some of the others are complete
            os.kill(os.getpid(), signal.SIGKILL)
        return migrate_text(text, name)

    monkeypatch.setattr(files, "migrate_text", deadly)
    found = results(tmp_path, jobs=2)
    assert {name for name, result in found.items() if result.exit_code} == {"19.yaml"}
    assert "killed" in found["19.yaml"].error


SECRET = "hunter2-Of-Nobody"


def test_reports_show_no_values_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reports are pasted into pull requests, so they must not contain the values of environment variables."""
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("STRATEGY", "SHARD_GRAD_OP")
    write(
        tmp_path,
        {
            "direct.yaml": "fsdp_config:\n  sharding_strategy: ${oc.env:SECRET}\n  made_up: ${oc.env:SECRET}\n",
            "by_way.yaml": "v: {s: '${oc.env:SECRET}', n: x}\n"
            "fsdp_config:\n  state_dict_type: ${v.s}\n  made_up: ${v.n}\n",
            "part.yaml": "precision: pre-${oc.env:SECRET}\n"
            "fsdp_config:\n  mixed_precision: {param_dtype: '${oc.env:SECRET}'}\n",
            "decoded.yaml": "fsdp_config:\n  mixed_precision: ${oc.decode:${oc.env:MP}}\n  verbose: true\n",
            "known.yaml": "fsdp_config:\n  sharding_strategy: ${oc.env:STRATEGY}\n  limit_all_gathers: true\n",
            "names.yaml": "fsdp_config:\n  freeze: ['${oc.env:SECRET}.x']\n"
            "  wrap_policy: {transformer_layer_cls_to_wrap: ['${oc.env:CLASS}']}\n",
        },
    )  # fmt: skip
    monkeypatch.setenv("MP", f"{{param_dtype: {SECRET}}}")
    monkeypatch.setenv("CLASS", SECRET.replace("-", ""))
    everywhere = [each for to in TARGETS for each in results(tmp_path, to=to).items()]
    for name, result in everywhere:
        assert result.migration is not None, (name, result.error)
        migration = result.migration
        told = f"{migration}{result.markdown()}{json.dumps(result.to_json())}"
        if migration.sections[0].to == "composer":
            told += migration.diff()
        told += "".join(map(str, migration.blocking))
        assert SECRET.lower() not in told.lower() and SECRET.replace("-", "") not in told, (name, told)
        assert "${" in told, name
        if name == "names.yaml":  # no other system reads variables, so the new file contains the value
            words = {each.key: each for each in migration.sections[0].findings}["wrap_policy"]
            assert (SECRET.replace("-", "") in migration.after) is ("${oc.env:CLASS} has here is written" in words.hint)
        if name == "by_way.yaml":
            assert "made_up: x" in told
        if name == "known.yaml" and migration.sections[0].to == "composer":
            assert "sharding_strategy: ${oc.env:STRATEGY}" in told and result.exit_code == 0
            assert yaml.safe_load(result.migration.after) == {"fsdp_config": {"reshard_after_forward": False}}


def test_a_section_that_is_no_mapping_is_not_passed_over(tmp_path: Path):
    """Composer would raise; in a folder, such a file was mistaken for one without sharding."""
    write(tmp_path, {"word.yaml": "fsdp_config: FULL_SHARD\n", "list.yaml": "a: 1\nfsdp_config: [FULL_SHARD]\n"})
    found = results(tmp_path)
    assert "word.yaml:1:1: fsdp_config is 'FULL_SHARD', and takes a mapping" in found["word.yaml"].error
    assert "list.yaml:2:1: fsdp_config is ['FULL_SHARD'], and takes a mapping" in found["list.yaml"].error
    assert {result.exit_code for result in found.values()} == {2}


ORDINARY = {  # by variable: its value and a line with that value
    "EMPTY": ("", "sharding_strategy: ${oc.env:EMPTY}"),
    "ONE": ("1", "auto_wrap: ${oc.env:ONE}"),
    "YES": ("true", "sync_module_states: ${oc.env:YES}"),
    "STATE": ("full", "state_dict_type: ${oc.env:STATE}"),
}


def test_ordinary_values_of_the_environment_are_left_alone_in_a_report(monkeypatch: pytest.MonkeyPatch):
    """With a variable set to 1, true or an empty string, each such string of the report was replaced by a reference,
    and the report was unreadable."""
    for name, (value, line) in ORDINARY.items():
        monkeypatch.setenv(name, value)
        section = migrate_text(f"fsdp_config:\n  mixed_precision: PURE\n  {line}\n").sections[0]
        for finding in section.findings:
            told = (finding.target, finding.reason, finding.hint.removeprefix(f"the value that ${{oc.env:{name}}}"))
            assert "".join(told).count("${") <= (finding.key in line), finding


def test_a_section_that_the_environment_holds_is_not_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The variable's text would end up in the file and in the diff."""
    monkeypatch.setenv("SHARDING", f"{{limit_all_gathers: true, made_up: {SECRET}}}")
    write(tmp_path, {"run.yaml": "fsdp_config: ${oc.decode:${oc.env:SHARDING}}\n"})
    result = named(tmp_path / "run.yaml")
    assert result.exit_code == 2 and "fsdp_config is ${oc.decode:${oc.env:SHARDING}}" in result.error
    assert SECRET not in result.error


def test_what_is_written_out_keeps_its_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A section defined elsewhere would write a variable's value into the file, and so into its history."""
    monkeypatch.setenv("SECRET", SECRET)
    shared = "{limit_all_gathers: true, save_planner: '${oc.env:SECRET}', verbose: '${v}'}"
    for text in (
        f"v: true\nx: &x {shared}\nfsdp_config: *x\n",
        f"v: true\nx: &x {shared}\nfsdp_config:\n  <<: *x\n",
        f"v: true\nx: {shared}\nfsdp_config: ${{x}}\n",
        f"v: true\ny: {shared}\nx: ${{y}}\nfsdp_config: ${{x}}\n",
    ):
        after = migrate_text(text, "run.yaml").after
        assert SECRET not in after
        assert yaml.safe_load(after)["fsdp_config"] == {"save_planner": "${oc.env:SECRET}", "verbose": "${v}"}


def test_reports_do_not_steer_the_terminal(tmp_path: Path):
    """Keys, values and file names from other people must not clear the screen or hide findings."""
    name = "a\x1b[2Jb\n\u202e.yaml"
    write(
        tmp_path,
        {
            name: 'fsdp_config:\n  "\\e[31mred\\n": "\\e]0;x\\a"\n  sharding_strategy: "\\e[1A"\n',
            "freeze.yaml": 'fsdp_config:\n  freeze: ["\\e[31mred", "a\\u202eb"]\n',
            "a.json": '{"x": "\x9b31m\x7f", "fsdp_config": {"limit_all_gathers": true, "z\\u001b": 1}}',
            "broken\x1b.yaml": "fsdp_config: [\n",
        },
    )
    for result in (result for to in TARGETS for result in results(tmp_path, to=to).values()):
        told = f"{result.path}{result.error}{result.done}{result.markdown()}{json.dumps(result.to_json())}"
        if result.migration is not None:
            told += f"{result.migration}{result.migration.diff()}{''.join(map(str, result.migration.blocking))}"
        assert not [each for each in told if not each.isprintable() and each != "\n"], told


def test_a_text_that_came_out_wrong_reaches_nobody(monkeypatch: pytest.MonkeyPatch):
    """An error in the edits would reach training: neither --write nor a pipe would notice it."""
    from composer_fsdp2.migration.documents.yaml import YamlDocument

    usual = YamlDocument.edited
    for spoil in (
        lambda text: text + "more: 1\n",
        lambda text: text.replace("true", "false"),
        lambda text: text + "a: [\n",
        lambda text: "",
    ):
        monkeypatch.setattr(YamlDocument, "edited", lambda self, edits, spoil=spoil: spoil(usual(self, edits)))
        with pytest.raises(ConfigError, match=r"run.yaml:1:1: the new text would not say what it should"):
            migrate_text(GOOD, "run.yaml")


def test_a_new_text_is_read_in_the_format_of_the_old_one():
    """Standard input has no file extension. A valid text, read as YAML, would be reported as invalid."""
    for suffix, text, after in (
        (".toml", "[fsdp_config]\nlimit_all_gathers = true\n", "[fsdp_config]\n"),
        (".json", '{"a": 1e5, "fsdp_config": {"limit_all_gathers": true}}', '{"a": 1e5, "fsdp_config": {}}'),
    ):
        assert migrate_text(text, "<stdin>", suffix=suffix).after == after


def test_many_keys_and_long_lines_take_their_time_once(tmp_path: Path):
    """3,000 keys in a section took more than two minutes; run time must not grow quadratically."""

    def seconds(count: int) -> float:
        known = "".join(f"  key_number_{number}: ${{x.y}}\n" for number in range(count))
        write(tmp_path, {"run.yaml": f"x: {{y: 1}}\nlong: {'y' * 100 * count}\n{GOOD}{known}"})
        began = time.process_time()
        result = named(tmp_path / "run.yaml")
        assert result.migration is not None and len(result.migration.sections[0].findings) > count
        return time.process_time() - began

    seconds(10)
    few, many = seconds(200), seconds(2000)
    assert many < 40 * max(few, 0.02), (few, many)


def test_names_that_a_file_system_does_not_tell_apart_are_one(tmp_path: Path):
    """On a Mac's disk x.toml and X.toml are one file, and one of two results was lost."""
    for name in ("x.yaml", "X.yml"):
        (tmp_path / name).write_text("fsdp_config: {sharding_strategy: FULL_SHARD}\n")
    sources = sources_of([tmp_path])
    destination = Destination(output=tmp_path / "o", force=True)
    with pytest.raises(ConfigError, match="several files of one name"):
        list(migrate_files(sources, destination, to="torchtitan"))
    assert not (tmp_path / "o").exists()


def test_a_worker_keeps_nothing_of_a_file(tmp_path: Path):
    """A process that migrates a hundred thousand files would otherwise retain memory for each of them."""
    import gc

    def objects_after(count: int) -> int:
        for number in range(count):
            migrate_text(f"a{number}: [1, {{b: c}}, 2024-01-02]\nx: ${{y}}\ny: {number}\n{GOOD}", "run.yaml")
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(5)
    assert objects_after(30) - before < 100


def test_a_section_with_words_of_no_dialect_is_no_candidate():
    """A folder of data would be parsed in full, which takes minutes, without a result."""
    assert not files.may_configure(b'{"rows": [1, 1]}')
    assert files.may_configure(b'"\\u0066sdp_config": {}') and files.may_configure(b"[parallelism]")
