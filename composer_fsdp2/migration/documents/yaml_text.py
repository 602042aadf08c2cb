"""Parse a YAML text once to values and their positions.

The parser is PyYAML, because all source systems use it: no run starts from a file that PyYAML rejects. Called by
``migrate``; does not access files.
"""

from collections.abc import Iterator
from typing import Any

import yaml
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from composer_fsdp2.migration.documents.edits import MAX_DEPTH, MERGE, TOO_DEEP, Entry

# A PyYAML that was built without libyaml is ten times as slow.
_PARSERS: tuple[Any, ...] = (Composer, yaml.CSafeLoader) if yaml.__with_libyaml__ else (yaml.SafeLoader,)
_MAX_NODES_OF_ALIASES = 100_000  # a configuration has hundreds; ten lines of aliases of aliases make billions


class YamlEntries(*_PARSERS):  # type: ignore[misc]
    """The documents of a YAML text: their values as parsed by PyYAML (YAML 1.1), and their entries.

    Limits depth and size.

    Attributes:
        roots: The root entry of each document.
        scalars: The spans of all scalars, in the order of the text.
    """

    def __init__(self, text: str) -> None:
        _PARSERS[-1].__init__(self, text)
        Composer.__init__(self)
        self._text = text
        self.roots: list[Entry] = []
        self.scalars: list[tuple[int, int]] = []
        self.has_aliases = False
        self._below: dict[Node, list[Entry]] = {}
        self._sizes: dict[Node, int] = {}  # of a node and its descendants, with aliases expanded
        self._size = self._depth = 0  # up to here
        self._end = 0  # of the last value

    def values(self) -> list[Any]:
        """Return the values of all documents."""
        nodes = []
        while self.check_node():
            nodes.append(self.get_node())
        return [self.construct_document(node) for node in nodes]

    def compose_node(self, parent: Node | None, index: Any) -> Node:
        event, before = self.peek_event(), self._size
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, TOO_DEEP, event.start_mark)
        self._depth += 1
        node: Node = super().compose_node(parent, index)
        self._depth -= 1
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and node not in self._sizes:
            raise ComposerError(None, None, "an alias stands in what it is an alias of", event.start_mark)
        self._size += self._sizes[node] if is_alias else 1
        size = self._sizes[node] = self._size - before
        if size > _MAX_NODES_OF_ALIASES + len(self._sizes):
            problem = f"aliases of aliases stand for {size} values, which is too many"
            raise ComposerError(None, None, problem, event.start_mark)
        if is_alias:
            self.has_aliases = True
            self._end = event.end_mark.index
        elif isinstance(node, ScalarNode):
            self.scalars.append((node.start_mark.index, node.end_mark.index))
            self._end = self._end_of(node)
        elif node.flow_style:  # a block collection's end mark is behind the comments that follow it
            self._end = node.end_mark.index
        if parent is None or index is not None:
            self._add_entry(parent, index, node, event)
        return node

    def _end_of(self, node: ScalarNode) -> int:
        start, end = node.start_mark.index, node.end_mark.index
        if start == end:  # an empty value: behind the colon or the dash, if it has one
            return end if self._text[end - 1 : end] in (":", "-") else self._end
        return start + len(self._text[start:end].rstrip()) if node.style in ("|", ">") else end

    def _add_entry(self, parent: Node | None, index: Any, node: Node, event: yaml.Event) -> None:
        key, start, below = index, event.start_mark.index, self._below.get(node, [])
        if parent is None:
            key = ""
        elif isinstance(index, Node):
            start = index.start_mark.index
            mark = self._text[:start].rstrip(" \t")
            start = len(mark) - 1 if mark.endswith("?") else start  # written as `? key`
            is_merge = index.tag == "tag:yaml.org,2002:merge"
            key = MERGE if is_merge else self.construct_object(index)
            below = [*self._merged(index, node)] if is_merge else below
        entry = Entry(
            key=key,
            start=start,
            end=self._end,
            value=node.start_mark.index,
            below=below,
            in_braces=isinstance(node, ScalarNode) or bool(node.flow_style),
        )
        (self.roots if parent is None else self._below.setdefault(parent, [])).append(entry)

    def _merged(self, key: Node, node: Node) -> Iterator[Entry]:
        """Yield the entries that a merge (``<<``) adds. If it has several mappings, the first takes precedence."""
        mappings = node.value if isinstance(node, SequenceNode) else [node]
        if not all(isinstance(each, MappingNode) for each in mappings):
            raise ComposerError(None, None, "<< takes a mapping, or a list of them", key.start_mark)
        for mapping in reversed(mappings):
            for each in sorted(self._below.get(mapping, []), key=lambda each: each.key != MERGE):
                yield from each.below if each.key == MERGE else [each]

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError) as error:  # an invalid date
            problem = f"{str(node.value)[:40]} is not a value: {error}"
            raise ConstructorError(None, None, problem, node.start_mark) from error
