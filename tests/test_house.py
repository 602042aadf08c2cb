"""Structure of the project: installed packages, imports between rooms, strings that no file may contain."""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The other rooms and packages that the files of a folder, or a single file, may import."""

    rooms: frozenset[str]
    packages: frozenset[str]


def room(rooms: str = "", *, packages: str = "") -> Room:
    return Room(rooms=frozenset(rooms.split()), packages=frozenset(packages.split()))


# Each room imports only from rooms above it, and only those that it names.
ROOMS = {
    "errors": room(),
    "atomic": room(),
    "config": room("errors"),
    "_torch": room("errors config", packages="torch"),
    "sharding": room("errors config _torch", packages="torch"),
    "training": room("errors config _torch sharding", packages="torch"),
    "parallel": room("errors config _torch sharding training", packages="torch"),
    "estimate": room("errors config _torch sharding parallel", packages="torch"),
    "fsdp1": room("errors config _torch sharding training", packages="omegaconf torch"),
    "checkpoint": room("errors atomic config _torch sharding", packages="numpy torch"),
    "prepare": room("errors config _torch sharding training parallel fsdp1", packages="torch"),
    "fsdp": room("errors config _torch sharding training parallel fsdp1", packages="torch"),
    "__init__": room("errors config _torch sharding training parallel estimate fsdp1 checkpoint prepare fsdp"),
    "migration": room("errors atomic config fsdp1", packages="omegaconf yaml"),
    "comparing": room("errors config _torch sharding estimate checkpoint", packages="torch"),
    "compat": room(
        "errors atomic config _torch sharding training parallel estimate fsdp1 checkpoint prepare fsdp comparing",
        packages="composer llmfoundry omegaconf torch torchmetrics transformers",
    ),
    "preflight": room(
        "errors config _torch sharding parallel estimate fsdp1 prepare migration comparing compat",
        packages="huggingface_hub omegaconf torch transformers",
    ),
    "cli": room(
        "errors atomic config estimate checkpoint fsdp __init__ migration comparing compat preflight",
        packages="rich torch typer",
    ),
    "__main__": room("cli"),
}


# --- installed packages


def package_folder(package: str) -> Path:
    """The source folder of an installed package in the checkout."""
    return ROOT / SETUPTOOLS["package-dir"].get(package, package.replace(".", "/"))


def folders_with_code() -> set[Path]:
    link = ROOT / "composer_fsdp2" / "compat"
    files = [*(ROOT / "composer_fsdp2").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]
    return {file.parent for file in files if not file.is_relative_to(link)}


def test_every_folder_of_code_is_an_installed_package():
    """A room missing from `packages` works in the checkout and is missing from the wheel."""
    declared = {package_folder(package) for package in SETUPTOOLS["packages"]}
    assert {str(f.relative_to(ROOT)) for f in folders_with_code()} == {str(f.relative_to(ROOT)) for f in declared}
    assert [str(f) for f in declared if not (f / "__init__.py").is_file()] == []


def run(command: list[str | Path], *, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_compat_refuses_its_folder_name():
    """`import compat` from the checkout would be a second copy of the seams, unaware of the first one's install()."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import compat"
    done = subprocess.run([sys.executable, "-I", "-c", script, ROOT], text=True, capture_output=True)
    assert done.returncode != 0
    last_line = done.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError")
    assert "composer_fsdp2.compat" in last_line


# --- imports between rooms


@functools.cache
def modules() -> dict[str, Path]:
    """Every file of the package: dotted name → path."""
    return {
        f"{package}.{file.stem}": file
        for package in SETUPTOOLS["packages"]
        for file in sorted(package_folder(package).glob("*.py"))
    }


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


def imports(module: str, file: Path) -> Iterator[tuple[int, str]]:
    """Line number and absolute dotted name of each import of a file, including those inside functions."""
    package = module.rpartition(".")[0]
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def torch_attributes(file: Path) -> Iterator[tuple[int, str]]:
    """Line number and dotted name of every `torch.a.b` expression in a file."""
    for node in nodes(file):
        names, value = [], node
        while isinstance(value, ast.Attribute):
            names, value = [value.attr, *names], value.value
        if names and isinstance(value, ast.Name) and value.id == "torch":
            yield node.lineno, ".".join(["torch", *names])


def resolve(dotted: str, known: dict[str, Path]) -> str:
    """Our module that contains a dotted name: itself, or the longest prefix that is a file."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        for candidate in (".".join(parts[:length]), ".".join([*parts[:length], "__init__"])):
            if candidate in known:
                return candidate
    raise AssertionError(f"{dotted} is not a file of the project")


def room_of(module: str) -> str:
    """``config`` for ``composer_fsdp2.config.mesh``; a file beside the rooms is its own room."""
    return module.removeprefix("composer_fsdp2.").partition(".")[0]


def walked(module: str, file: Path) -> Iterator[tuple[int, str]]:
    """Imports of the files that a module finds and imports by listing its own folder.

    Except in a folder's ``__init__``, whose listed files belong to it.
    """
    package, _, stem = module.rpartition(".")
    for node in nodes(file):
        if isinstance(node, ast.Attribute) and node.attr == "iter_modules" and stem != "__init__":
            beside = (other.stem for other in file.parent.glob("*.py") if other.stem not in ("__init__", stem))
            yield from ((node.lineno, f"{package}.{other}") for other in beside)


def imports_of_ours() -> Iterator[tuple[str, str, str]]:
    """Importing module, imported module and room, for every import between our files."""
    known = modules()
    for module, file in known.items():
        for line, dotted in (*imports(module, file), *walked(module, file)):
            target = resolve(dotted, known) if dotted.split(".")[0] == "composer_fsdp2" else module
            if target != module:
                yield f"{file.relative_to(ROOT)}:{line}", module, target


def test_every_file_has_its_room():
    """A file outside the rooms could import anything, and a room without files would hide a move."""
    assert {room_of(module) for module in modules()} == set(ROOMS)


def test_imports_run_one_way():
    """To understand a file, a reader needs only its direct and indirect imports; a cycle would end that."""
    names = list(ROOMS)
    assert all(names.index(above) < names.index(name) for name, room in ROOMS.items() for above in room.rooms)
    wrong = {}  # an ordered set, since one line may import two names from one file
    imported: dict[str, set[str]] = {}
    for where, module, target in imports_of_ours():
        room, other = room_of(module), room_of(target)
        if room != other and other not in ROOMS[room].rooms:
            wrong[f"{where} imports {target}: {room}/ has nothing of {other}/"] = None
        imported.setdefault(module, set()).add(target)
    assert not wrong, "\n".join(wrong)
    TopologicalSorter(imported).prepare()  # raises CycleError, listing the cycle's files


def test_a_room_needs_only_its_packages():
    """The engine must work in scripts without Composer, and migration without Composer and torch."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {dotted}"
        for module, file in modules().items()
        for line, dotted in imports(module, file)
        if dotted.split(".")[0] not in sys.stdlib_module_names | {"composer_fsdp2"} | ROOMS[room_of(module)].packages
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_imported_is_installed_with_the_project():
    """In an environment with only torch, pip installs all dependencies of the engine and the command line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w.-]", requirement)[0] for requirement in project["dependencies"]}
    imported = {package for name, room in ROOMS.items() if name != "compat" for package in room.packages}
    assert declared == {{"yaml": "pyyaml"}.get(package, package) for package in imported - OPTIONAL}


# Requirements of the user's own model; a user who plans it has them. Functions import them, and raise if one is
# missing.
OPTIONAL = {"huggingface_hub", "transformers"}


def test_optional_packages_are_imported_by_functions_only():
    """Without the optional packages, all features that do not use them work."""
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in modules().values()
        for node in nodes(file)[0].body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and OPTIONAL
        & {name.split(".")[0] for name in (getattr(node, "module", ""), *(each.name for each in node.names)) if name}
    ]
    assert not wrong, "\n".join(wrong)


def imported_without_torch(*rooms: str, then: str) -> set[str]:
    """Our modules in sys.modules after importing all files of some rooms and running ``then``."""
    names = [module.removesuffix(".__init__") for module in modules() if module.startswith(rooms)]
    script = """
import importlib, json, sys
sys.modules["torch"] = None
for name in sys.argv[1].split():
    importlib.import_module(name)
exec(sys.argv[2])
print(json.dumps([name for name in sys.modules if name.startswith("composer_fsdp2")]))
"""
    return set(json.loads(run([sys.executable, "-c", script, " ".join(names), then], cwd=ROOT)))


def test_values_translation_and_migration_need_no_torch():
    """`migrate` and `explain` must not spend seconds on importing torch."""
    words = [f"composer_fsdp2.fsdp1.{name}" for name in ("keys", "read", "translate")]
    given = {"mixed_precision": {"param_dtype": "bf16"}, "process_group": "set2", "cpu_offload": False}
    then = f"from composer_fsdp2.fsdp1.translate import translate; translate({given}, device='cpu').to_json()"
    there = imported_without_torch("composer_fsdp2.config", "composer_fsdp2.migration", *words, then=then)
    assert there >= {"composer_fsdp2.migration.files", "composer_fsdp2.fsdp1.translate"}


def test_tests_mirror_the_rooms():
    """The tests of a file are in the folder with the same name."""
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    assert folders <= {*ROOMS, "benchmarks", "foundry", "gpu", "parity", "support", "tools"}
    assert {room for room in ROOMS if (ROOT / "composer_fsdp2" / room).is_dir()} <= folders


def test_nothing_asks_for_a_layout_by_name():
    """No other file depends on the name of a layout."""
    from composer_fsdp2.checkpoint.layouts import LAYOUTS

    names, wrong = {layout.name for layout in LAYOUTS}, []
    for module, file in modules().items():
        if module.startswith("composer_fsdp2.checkpoint.layouts"):
            continue
        for line, dotted in imports(module, file):
            if dotted.startswith("composer_fsdp2.checkpoint.layouts.") and dotted.split(".")[3] in LAYOUT_FILES:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {dotted}")
        for node in nodes(file):
            if isinstance(node, ast.Compare) and names & {part for side in sides(node) for part in texts_in(side)}:
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} asks for a layout")
    assert not wrong, "\n".join(wrong)


def sides(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]


def texts_in(node: ast.expr) -> Iterator[str]:
    """A string, or those in a tuple, list or set."""
    for part in getattr(node, "elts", [node]):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


LAYOUT_FILES = {file.stem for file in (ROOT / "composer_fsdp2/checkpoint/layouts").glob("[!_]*.py")}


def test_private_torch_is_used_in_two_folders():
    """A new torch release can break only code on FSDP's units and tracing code, in two folders instead of ten."""
    wrong = []
    for module, file in modules().items():
        if module.startswith(("composer_fsdp2._torch", "composer_fsdp2.estimate._torch")):
            continue
        for line, dotted in {*imports(module, file), *torch_attributes(file)}:
            parts = dotted.split(".")
            if parts[0] == "torch" and any(re.match(r"_(?!_)", part) for part in parts):
                wrong.append(f"{file.relative_to(ROOT)}:{line} uses {dotted}; give it a name in _torch/")
    assert not wrong, "\n".join(sorted(wrong))


# --- forbidden strings

# Joined from pieces, so that this file does not match itself.
REGISTRIES = ["py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org", "conda" + ".anaconda.org"]
REGISTRY = re.compile("|".join([*map(re.escape, REGISTRIES), "--(?:extra-)?index" + "-url", "--find" + "-links"]))
# A path on one machine; `docs/work/x` and `https://host/home/` do not match.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:tmp|work|root|home|Users)/")


def project_files() -> list[Path]:
    """All files that git tracks or would track; without git, all except environments and caches."""
    files = []
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True).stdout
        files = [ROOT / name for name in listed.split("\0") if name]
    if not files:
        made = re.compile(r"build|dist|__pycache__|.*\.egg-info|\.git|\.venv.*|\..*_cache|\.hypothesis")
        files = [f for f in ROOT.rglob("*") if not any(map(made.fullmatch, f.relative_to(ROOT).parts))]
    return [file for file in files if file.is_file() and not file.is_symlink()]


def text_lines(file: Path) -> list[str]:
    data = file.read_bytes()
    return [] if b"\0" in data else data.decode(errors="replace").splitlines()


@pytest.mark.parametrize("pattern", [REGISTRY, MACHINE_PATH], ids=["registry", "path"])
def test_no_file_depends_on_one_machine(pattern: re.Pattern[str]):
    """The project installs from any package index, in any folder."""
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for file in project_files()
        for number, line in enumerate(text_lines(file), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)
