"""The house stands: what is installed, which room imports from which, what no file may say."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

# Each line imports only from lines above it; files on one line (a folder that ends in "/") may import each other.
# A new file takes the highest place that its imports allow.
ORDER = [
    "errors",
    "_torch/api",
    "_torch/parts",
    "_torch/names",
    "_torch/groups",
    "_torch/collectives",
    "_torch/backward",
    "_torch/reset",
    "_torch/units",
    "_torch/scaler",
    "_torch/repairs",
    "_torch/__init__",
    "findings",
    "config",
    "fsdp1/keys",
    "fsdp1/legacy",
    "fsdp1/values",
    "fsdp1/translate",
    "fsdp1/unit_settings",
    "fsdp1/__init__",
    "tying",
    "units",
    "wrap",
    "activation_checkpointing",
    "optimizer",
    "plan",
    "planning",
    "agreement",
    "node",
    "control",
    "mesh",
    "materialize",
    "buffers",
    "sharded",
    "microbatching",
    "out_of_memory",
    "guard",
    "apply",
    "full_params",
    "fsdp1/attributes",
    "checkpoint/pickles/__init__",
    "checkpoint/pickles/values",
    "checkpoint/pickles/allowed",
    "checkpoint/pickles/opcodes",
    "checkpoint/pickles/finishing",
    "checkpoint/pickles/trust",
    "checkpoint/storage/__init__",
    "checkpoint/storage/crc",
    "checkpoint/storage/archive",
    "checkpoint/storage/archive_writer",
    "checkpoint/names",
    "checkpoint/target",
    "checkpoint/exchange",
    "checkpoint/inside",
    "checkpoint/inventory",
    "checkpoint/reading",
    "checkpoint/records",
    "checkpoint/describe",
    "checkpoint/foreign",
    "checkpoint/formats/",
    "checkpoint/locate",
    "checkpoint/flat",
    "checkpoint/same_bytes",
    "checkpoint/loading/__init__",
    "checkpoint/loading/differences",
    "checkpoint/loading/optimizer_plan",
    "checkpoint/loading/plan",
    "checkpoint/inspect",
    "checkpoint/opening",
    "checkpoint/loading/content",
    "checkpoint/loading/replicated",
    "checkpoint/loading/staging",
    "checkpoint/load",
    "checkpoint/rounds",
    "checkpoint/staged_file",
    "checkpoint/save",
    "checkpoint/conversion/__init__",
    "checkpoint/conversion/writers/",
    "checkpoint/conversion/copying",
    "checkpoint/conversion/optimizer_order",
    "checkpoint/conversion/hugging_face",
    "checkpoint/conversion/state",
    "checkpoint/conversion/plan",
    "checkpoint/conversion/unfinished",
    "checkpoint/conversion/meeting",
    "checkpoint/convert",
    "checkpoint/verification/__init__",
    "checkpoint/verification/faults",
    "checkpoint/verification/checksums",
    "checkpoint/verification/structure",
    "checkpoint/verification/comparing",
    "checkpoint/verify",
    "checkpoint/__init__",
    "reductions",
    "clipping",
    "prepare",
    "__init__",
    "compat/migration/text_edit",
    "compat/migration/yaml_document",
    "compat/migration/yaml_edit",
    "compat/migration/toml_edit",
    "compat/dialects/",
    "compat/explain",
    "compat/migration/interpolation",
    "compat/migration/targets",
    "compat/migration/changes",
    "compat/migration/shared_parts",
    "compat/migration/migrate",
    "compat/migration/files",
    "compat/migration/__init__",
    "compat/",
    "cli/",
    "__main__",
]

ENGINE_MAY_IMPORT = sys.stdlib_module_names | {"composer_fsdp2", "numpy", "omegaconf", "torch"}
ONLY_COMPAT_MAY_IMPORT = {"composer", "llmfoundry", "streaming"}


# --- what is installed


def package_folder(package: str) -> Path:
    """Where the source of an installed package lies in the checkout."""
    return ROOT / SETUPTOOLS["package-dir"].get(package, package.replace(".", "/"))


def folders_with_code() -> set[Path]:
    link = ROOT / "composer_fsdp2" / "compat"
    files = [*(ROOT / "composer_fsdp2").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]
    return {file.parent for file in files if not file.is_relative_to(link)}


def test_every_folder_of_code_is_an_installed_package():
    """A room missing from `packages` works in the checkout and is gone from the wheel."""
    declared = {package_folder(package) for package in SETUPTOOLS["packages"]}
    assert {str(f.relative_to(ROOT)) for f in folders_with_code()} == {str(f.relative_to(ROOT)) for f in declared}
    assert [str(f) for f in declared if not (f / "__init__.py").is_file()] == []


def test_wheel_holds_everything_under_one_name(tmp_path: Path):
    """Installing the project puts no `compat` beside other people's packages, and leaves none of ours out; also from
    what unpacking a zip of the repository may leave, a file in place of the link."""
    contents = wheel_of(tmp_path / "link")
    assert wheel_of(tmp_path / "file", link_is_file=True) == contents

    top_level = {name.split("/")[0] for name in contents}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"composer_fsdp2"}
    missing = {module.replace(".", "/") for module in modules()} - {name.removesuffix(".py") for name in contents}
    assert missing == set()
    assert "composer_fsdp2/py.typed" in contents

    # -I: neither the environment nor the current folder may supply the modules.
    site = tmp_path / "file" / "site"
    script = "import sys; sys.path.insert(0, sys.argv[1]); import composer_fsdp2.compat as c; print(c.__file__)"
    imported_from = run([sys.executable, "-I", "-c", script, site], cwd=tmp_path).strip().splitlines()[-1]
    assert Path(imported_from).is_relative_to(site)


def wheel_of(folder: Path, *, link_is_file: bool = False) -> dict[str, bytes]:
    """The files of a wheel that is built in ``folder`` and unpacked into its ``site``."""
    folder.mkdir()
    source, wheels = folder / "source", folder / "wheels"
    copy_sources(source)
    if link_is_file:
        (source / "composer_fsdp2/compat").unlink()
        (source / "composer_fsdp2/compat").write_text("../compat")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", wheels, source], cwd=folder)
    [wheel] = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
        return {name: archive.read(name) for name in archive.namelist()}


def copy_sources(destination: Path) -> None:
    """The files that a build reads; built in a copy, because setuptools leaves its work in the source folder."""
    destination.mkdir()
    without_caches = shutil.ignore_patterns("__pycache__")
    for folder in ("composer_fsdp2", "compat"):
        shutil.copytree(ROOT / folder, destination / folder, symlinks=True, ignore=without_caches)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, destination)


def run(command: list[str | Path], *, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_compat_refuses_its_folder_name():
    """`import compat` from the checkout would be a second copy of the seams, whose install() the first never sees."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import compat"
    done = subprocess.run([sys.executable, "-I", "-c", script, ROOT], text=True, capture_output=True)
    assert done.returncode != 0
    last_line = done.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError")
    assert "composer_fsdp2.compat" in last_line


# --- which room imports from which


@functools.cache
def modules() -> dict[str, Path]:
    """Every file of the project, by what it must be called in ORDER after `composer_fsdp2.`: dotted name → path."""
    return {
        f"{package}.{file.stem}": file
        for package in SETUPTOOLS["packages"]
        for file in sorted(package_folder(package).glob("*.py"))
    }


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


def imports(module: str, file: Path) -> Iterator[tuple[int, str]]:
    """Line number and absolute dotted name of all that a file imports, inside functions too."""
    package = module.rpartition(".")[0]
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def torch_attributes(file: Path) -> Iterator[tuple[int, str]]:
    """Line number and dotted name of every `torch.a.b` that a file spells out."""
    for node in nodes(file):
        names, value = [], node
        while isinstance(value, ast.Attribute):
            names, value = [value.attr, *names], value.value
        if names and isinstance(value, ast.Name) and value.id == "torch":
            yield node.lineno, ".".join(["torch", *names])


def resolve(dotted: str, known: dict[str, Path]) -> str:
    """The module of ours that a dotted name comes from: itself, or the longest part of it that is a file."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        for candidate in (".".join(parts[:length]), ".".join([*parts[:length], "__init__"])):
            if candidate in known:
                return candidate
    raise AssertionError(f"{dotted} is not a file of the project")


def place(module: str) -> int | None:
    """The line of ORDER on which a module stands."""
    path = module.removeprefix("composer_fsdp2.").replace(".", "/")
    for number, line in enumerate(ORDER):
        if path == line or (line.endswith("/") and path.startswith(line)):
            return number
    return None


def is_engine(module: str) -> bool:
    return not module.startswith(("composer_fsdp2.compat.", "composer_fsdp2.cli.", "composer_fsdp2.__main__"))


def test_every_file_has_its_place():
    """A file outside ORDER could import from anywhere."""
    missing = [str(file.relative_to(ROOT)) for module, file in modules().items() if place(module) is None]
    assert not missing, f"give each a line in ORDER, below all that it imports: {missing}"


def test_imports_run_one_way():
    """Whoever reads a file needs to know only the files above it; a cycle would end that."""
    known = modules()
    wrong = {}  # as an ordered set: one line may import two names from one file
    for module, file in known.items():
        for line, dotted in imports(module, file):
            if dotted.split(".")[0] != "composer_fsdp2":
                continue
            target = resolve(dotted, known)
            here, there = place(module), place(target)
            if here is None or there is None:  # test_every_file_has_its_place names it
                continue
            inside_folder = here == there and ORDER[here].endswith("/")
            if there >= here and not inside_folder:
                wrong[f"{file.relative_to(ROOT)}:{line} imports {target}, which stands below it"] = None
    assert not wrong, "\n".join(wrong)


def test_engine_needs_torch_alone():
    """The engine serves scripts that have no Composer, and imports in their environments."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {dotted}"
        for module, file in modules().items()
        for line, dotted in imports(module, file)
        if (is_engine(module) and dotted.split(".")[0] not in ENGINE_MAY_IMPORT)
        or (dotted.split(".")[0] in ONLY_COMPAT_MAY_IMPORT and not module.startswith("composer_fsdp2.compat."))
    ]
    assert not wrong, "\n".join(wrong)


def test_private_torch_is_used_in_one_folder():
    """A new torch release can break one folder, not ten."""
    wrong = []
    for module, file in modules().items():
        if module.startswith("composer_fsdp2._torch"):
            continue
        for line, dotted in {*imports(module, file), *torch_attributes(file)}:
            parts = dotted.split(".")
            if parts[0] == "torch" and any(re.match(r"_(?!_)", part) for part in parts):
                wrong.append(f"{file.relative_to(ROOT)}:{line} uses {dotted}; give it a name in _torch/")
    assert not wrong, "\n".join(sorted(wrong))


# --- what no file may say

# Pieces are joined here, so that this file does not find itself.
REGISTRIES = ["py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org", "conda" + ".anaconda.org"]
REGISTRY = re.compile("|".join([*map(re.escape, REGISTRIES), "--(?:extra-)?index" + "-url", "--find" + "-links"]))
# A path on one machine; `docs/work/x` and `https://host/home/` are none.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:tmp|work|root|home|Users)/")


def project_files() -> list[Path]:
    """All files that git tracks or would; all but environments and caches where git cannot say."""
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
    """The project installs from whatever index pip is set to, in whatever folder it lies."""
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for file in project_files()
        for number, line in enumerate(text_lines(file), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)
