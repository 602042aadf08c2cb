"""The files and metadata of a release: a source distribution, and a wheel built from it. `make release` runs these."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_house import ROOT, modules, project_files, run

import composer_fsdp2

pytestmark = pytest.mark.slow


def test_changelog_and_citation_name_the_version_and_its_date():
    """A user who cites a release or reads its changes finds the version that pip installed and one date."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.split()) <= 900  # details are in migration_docs
    version, date = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", text, flags=re.MULTILINE)[0]
    assert version == composer_fsdp2.__version__
    assert f"\nversion: {version}\ndate-released: {date}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def source_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution of a checkout whose link composer_fsdp2/compat is a file, as after unpacking a zip."""
    folder = tmp_path_factory.mktemp("sdist")
    copy_project(folder / "source")
    (folder / "source/composer_fsdp2/compat").write_text("../compat")
    script = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", script, folder], cwd=folder / "source")
    [archive] = folder.glob("*.tar.gz")
    return archive


def test_source_distribution_holds_what_its_tests_read(source_archive: Path):
    """A packager of another system can run all tests from the source distribution."""
    with tarfile.open(source_archive) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {str(file.relative_to(ROOT)) for file in project_files()}
    assert {name for name in tracked - held if name[0] != "."} == set()  # hidden files are the repository's


def test_wheel_holds_everything_under_one_name(source_archive: Path, tmp_path: Path):
    """The wheel installs all of our packages and no top-level `compat`, whether built from a checkout or an sdist."""
    copy_project(tmp_path / "checkout")
    (tmp_path / "checkout/composer_fsdp2/compat").symlink_to("../compat")
    contents = wheel_of(tmp_path / "checkout", tmp_path / "from checkout")
    with tarfile.open(source_archive) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / source_archive.name.removesuffix(".tar.gz")
    assert wheel_of(unpacked, tmp_path / "from sdist") == contents

    top_level = {name.split("/")[0] for name in contents}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"composer_fsdp2"}
    missing = {module.replace(".", "/") for module in modules()} - {name.removesuffix(".py") for name in contents}
    assert missing == set()
    assert "composer_fsdp2/py.typed" in contents
    schemas = {"migration/migrate", "migration/explain", "comparing/compare", "estimate/plan"}
    assert {f"composer_fsdp2/{name}.schema.json" for name in schemas} <= set(contents)
    [metadata] = [text.decode() for name, text in contents.items() if name.endswith(".dist-info/METADATA")]
    assert f"\nVersion: {composer_fsdp2.__version__}\n" in metadata

    # -I: no module comes from PYTHONPATH or the current folder.
    site = tmp_path / "from sdist" / "site"
    script = "import sys; sys.path.insert(0, sys.argv[1]); import composer_fsdp2.compat as c; print(c.__file__)"
    imported_from = run([sys.executable, "-I", "-c", script, site], cwd=tmp_path).strip().splitlines()[-1]
    assert Path(imported_from).is_relative_to(site)


def copy_project(destination: Path) -> None:
    """Copy all files except the link; a build writes into the copy."""
    for file in project_files():
        (destination / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, destination / file.relative_to(ROOT))


def wheel_of(source: Path, folder: Path) -> dict[str, bytes]:
    """Build a wheel from ``source``, unpack it into ``folder / "site"``, and return the content of each file."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, source], cwd=source)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
        return {name: archive.read(name) for name in archive.namelist()}
