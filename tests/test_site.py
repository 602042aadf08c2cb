"""The pages as a site: what `make site` builds, and what of it can be seen without mkdocs."""

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_readme import anchors, broken_links, prose

ROOT = Path(__file__).resolve().parent.parent
IN_OTHERS = {"benchmarks/published.md"}  # a template: its text is in migration_docs/published-runs.md


def load_hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "tools" / "site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load_hooks()


def site_pages(nav: Any) -> Iterator[str]:
    """The pages of mkdocs.yml's nav, at any depth."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from site_pages(entry)


def test_the_navigation_has_every_page_once():
    """A page that the site's navigation lacks is found by nobody."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert Counter(site_pages(nav)) == Counter(map(HOOKS.site_path, HOOKS.repository_pages()))


def project_pages() -> list[Path]:
    folders = ("", "benchmarks", "migration_docs", "yamls", "tests/fsdp", "tests/fixtures")
    found = [path for folder in folders for path in sorted((ROOT / folder).glob("*.md"))]
    return [path for path in found if path.relative_to(ROOT).as_posix() not in IN_OTHERS]


@pytest.mark.parametrize("page", project_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_every_page_lead_somewhere(page: Path):
    """A reader on GitHub who follows a link arrives at the file and the heading."""
    assert [*broken_links(page)] == []


def test_anchors_of_the_site_are_those_of_github():
    """A link to a heading works in both places."""
    keys = ROOT / "migration_docs" / "keys.md"
    names = HOOKS.Anchors()
    titles = [line.lstrip("#").strip() for line in prose(keys).splitlines() if line.startswith("#")]
    assert {names.next(title, "-") for title in titles} == anchors(keys)


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("migration_docs/plan.md", "[a](pictures/plan.png)", "[a](pictures/plan.png)"),
        ("migration_docs/plan.md", "[a](../benchmarks/README.md#on-gpus)", "[a](project/benchmarks/README.md#on-gpus)"),
        ("README.md", "![a](migration_docs/pictures/plan.png)", "![a](../pictures/plan.png)"),
        ("README.md", "[a](migration_docs/plan.md)", "[a](../plan.md)"),
        ("benchmarks/README.md", "[a](models.py)", "[a](models.py)"),
        ("migration_docs/parity.md", "[tests](../tests/parity)", "tests"),
        ("README.md", "[a](#limits) [b](https://example.org)", "[a](#limits) [b](https://example.org)"),
        ("README.md", "```\n[a](migration_docs/plan.md)\n```", "```\n[a](migration_docs/plan.md)\n```"),
    ],
)
def test_links_of_the_site(page: str, link: str, wanted: str):
    """Pages link as on GitHub, and arrive in the site, whose folders are others."""
    assert HOOKS.site_links(link, page) == wanted


@pytest.mark.parametrize(
    ("fence", "wanted"),
    [
        ("```python file=net.py", '```python title="net.py"'),
        ("```text output", "```text"),
        ("```text error=unknown-key", "``` { .text .error }"),
        ('```yaml migrated="a.yaml --to roll" exit=1', '```yaml title="composer-fsdp2 migrate a.yaml --to roll"'),
        ('```console skip="needs 8 GPUs"', "```console"),
        ("```console", "```console"),
    ],
)
def test_fences_of_the_site(fence: str, wanted: str):
    """What a block is for the tests is a title for readers; as it is, mkdocs would not highlight it."""
    assert HOOKS.titled_fences(fence) == wanted


def python_with_mkdocs() -> str | None:
    """An interpreter that has mkdocs-material: this one, or that of `make venv-site`."""
    if importlib.util.find_spec("material") and importlib.util.find_spec("mkdocs"):
        return sys.executable
    installed = ROOT / ".venv-site" / "bin" / "python"
    return str(installed) if installed.exists() else None


def test_the_site_builds(tmp_path: Path):
    """`make site` ends without a warning: no dead link, no page outside of the navigation."""
    python = python_with_mkdocs()
    if python is None:
        pytest.skip("mkdocs-material is not installed: make venv-site")
    command = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built = (tmp_path / "composer.html").read_text()
    assert '<span class="filename">train.py</span>' in built and "file=" not in built
    searched = (tmp_path / "search" / "search_index.json").read_text()
    assert all(f'"{Path(page).with_suffix(".html")}' in searched for page in ("composer.md", "keys.md", "plan.md"))
