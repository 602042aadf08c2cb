"""The drawing of the package's folders in CONTRIBUTING.md, made from the imports of their files.

`tools/generate_docs.py` writes it between two markers, and `--check` compares it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from test_house import imports, imports_of_ours, modules  # type: ignore[import-not-found]  # noqa: E402

FRAMEWORKS = ("torch", "composer", "llmfoundry", "transformers")


def drawing() -> Iterator[str]:
    """The lines of a mermaid flowchart: an arrow from each folder to the folders that it imports.

    An arrow from A to C is left out where arrows lead from A to B and from B to C.
    """
    imported: dict[str, set[str]] = {_folder(module): set() for module in sorted(modules())}
    for _, module, target in imports_of_ours():
        imported[_folder(module)] |= {_folder(target)} - {_folder(module)}
    graph = {folder: sorted(others) for folder, others in imported.items()}
    packages = _packages()
    yield "```mermaid"
    yield "flowchart TD"
    for folder in reversed([*TopologicalSorter(graph).static_order()]):
        yield f'    {_node(folder)}["{"<br/>".join([folder, *packages[folder]])}"]'
    for folder, others in _without_implied(graph).items():
        if others:
            yield f"    {_node(folder)} --> {' & '.join(map(_node, others))}"
    yield "```"


def _packages() -> dict[str, list[str]]:
    """By folder, which of ``FRAMEWORKS`` its files import, and whether by private names."""
    found: dict[str, set[str]] = {}
    for module, file in modules().items():
        of_folder = found.setdefault(_folder(module), set())
        for _, dotted in imports(module, file):
            of_folder.add(dotted.split(".")[0])
            if re.match(r"torch\..*\b_(?!_)", dotted):
                of_folder.add("private torch")
    return {
        folder: [f"<i>{name}</i>" for name in (*FRAMEWORKS, "private torch") if name in names]
        for folder, names in found.items()
    }


def _folder(module: str) -> str:
    """``estimate/_torch`` of ``composer_fsdp2.estimate._torch.fake``; a file beside the folders stands for itself."""
    _, name, *inside = module.split(".")
    return f"{name}/_torch" if inside[:1] == ["_torch"] else name


def _without_implied(graph: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The transitive reduction of a graph without cycles."""
    reached: dict[str, set[str]] = {}
    for node in TopologicalSorter(graph).static_order():
        reached[node] = set(graph[node]).union(*(reached[each] for each in graph[node]))
    return {
        node: [each for each in others if not any(each in reached[other] for other in others)]
        for node, others in graph.items()
    }


def _node(folder: str) -> str:
    """A name that mermaid takes."""
    return folder.strip("_").replace("/", "")


if __name__ == "__main__":
    print("\n".join(drawing()))
