"""A YAML text with its values and the places where they stand; each text is parsed once.

PyYAML reads it, since all systems that we migrate from read by PyYAML: a file that it refuses starts no run. Called by
``migrate``; reads and writes no file.
"""

import bisect
import functools
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeGuard

import yaml
from yaml.composer import Composer, ComposerError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.resolver import Resolver

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import MAX_DEPTH, TOO_DEEP, Edit, apply_edits
from composer_fsdp2.migration.paths import Path

try:
    from yaml.cyaml import CParser as _Parser
except ImportError:  # a PyYAML that was built without libyaml, ten times as slow

    class _Parser(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser):  # type: ignore[no-redef]
        def __init__(self, stream: Any) -> None:
            yaml.reader.Reader.__init__(self, stream)
            yaml.scanner.Scanner.__init__(self)
            yaml.parser.Parser.__init__(self)


_MAX_NODES_OF_ALIASES = 100_000  # a configuration has hundreds; ten lines of aliases of aliases make billions
_COLLECTIONS = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "set", "omap", "pairs")}
_LINE_END = re.compile("[\r\x85\u2028\u2029]")  # of YAML 1.1, beside the line feed
_MERGE = "tag:yaml.org,2002:merge"


def is_mapping(node: Node | None) -> TypeGuard[MappingNode]:
    return isinstance(node, MappingNode)


class _Nodes(Composer, Resolver, _Parser):
    """Composes nodes within limits, and notes where scalars stand."""

    def __init__(self, text: str) -> None:
        _Parser.__init__(self, text)
        Composer.__init__(self)
        Resolver.__init__(self)
        self.scalars: list[tuple[int, int]] = []
        self.has_aliases = False
        self._depth = 0
        self._sizes: dict[int, int] = {}  # of a node with all below it, aliases written out

    def compose_node(self, parent: Node | None, index: Any) -> Node:
        mark = self.peek_event().start_mark
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, TOO_DEEP, mark)
        self._depth += 1
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias:
            self.has_aliases = True
            if id(node) not in self._sizes:
                raise ComposerError(None, None, "an alias stands in what it is an alias of", mark)
        elif isinstance(node, ScalarNode):
            self._sizes[id(node)] = 1
            self.scalars.append((node.start_mark.index, node.end_mark.index))
        else:
            below = [each for pair in node.value for each in pair] if is_mapping(node) else node.value
            size = self._sizes[id(node)] = 1 + sum(self._sizes[id(each)] for each in below)
            if size > _MAX_NODES_OF_ALIASES + len(self._sizes):
                raise ComposerError(None, None, f"aliases of aliases stand for {size} values, which is too many", mark)
        return node


class YamlText:
    """One YAML document: its text, its nodes, and its values as PyYAML reads them (YAML 1.1).

    Args:
        text: Of the whole file.
        name: What messages call it.
    Attributes:
        original: The text as given; ``text`` has line feeds for all its line ends.
        values: Those of a mapping; of a file that is none, whatever it holds, of several documents a list.
        problem: Why no system reads the file as its configuration; "" if one may.
    Raises:
        ConfigError: it is not YAML; names file, line and column.
    """

    def __init__(self, text: str, name: str = "<text>") -> None:
        # Places are those in a text without byte order mark, whose line ends are one character each.
        self.original, self.name = text, name
        bare = text.removeprefix("\ufeff")
        lines = bare.replace("\r\n", "\n")
        self.text = _LINE_END.sub("\n", lines)
        self._first = len(text) - len(bare)
        self._returns = [found.start() - number for number, found in enumerate(re.finditer("\r\n", bare))]
        self._constructor = yaml.constructor.SafeConstructor()
        self._values: dict[int, Any] = {}
        self._entries: dict[int, dict[Any, tuple[Node, Node]]] = {}
        try:
            nodes = _Nodes(lines)
            roots = []
            while nodes.check_node():
                roots.append(nodes.get_node())
            documents = [self._value_of(root) for root in roots]
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else f"{name}:1:1"
            raise ConfigError(f"{place}: {error.problem or error.context}") from error
        except yaml.reader.ReaderError as error:
            raise ConfigError(f"{self._unprintable()}: {error.reason}") from error
        except _BadNode as error:
            mark = error.node.start_mark
            raise ConfigError(f"{name}:{mark.line + 1}:{mark.column + 1}: {error}") from error
        self.scalars, self.has_aliases = sorted(nodes.scalars), nodes.has_aliases
        self.root = roots[0] if roots else MappingNode(Resolver.DEFAULT_MAPPING_TAG, [])
        self.values: Any = documents[0] if len(documents) == 1 else documents
        self.problem = ""
        if len(roots) > 1:
            line = roots[1].start_mark.line + 1
            self.problem = f"{name}:{line}:1: here is a second document, and every system reads files of one only"
        elif not is_mapping(self.root) or not roots:
            self.problem = f"{name}:1:1: a mapping is expected at the top of the file"

    def _unprintable(self) -> str:
        found = yaml.reader.Reader.NON_PRINTABLE.search(self.text)
        position = found.start() if found else 0
        column = position - self.text.rfind("\n", 0, position)
        return f"{self.name}:{self.text.count(chr(10), 0, position) + 1}:{column}"

    def edited(self, edits: Iterable[Edit]) -> str:
        """The original text with edits of ``text``, in the line ends that most of its lines have.

        Raises:
            ValueError: two of them overlap.
        """
        ends = Counter(re.findall("\r\n|\n|\r", self.original))
        newline = max(ends, key=lambda end: ends[end], default="\n")
        return apply_edits(
            self.original,
            (
                Edit(self._original(edit.start), self._original(edit.end), edit.text.replace("\n", newline))
                for edit in edits
            ),
        )

    def _original(self, position: int) -> int:
        return self._first + position + bisect.bisect_left(self._returns, position)

    def node(self, path: Path) -> Node:
        """The node at a path, also one that a merge (``<<``) brings there. Raises KeyError."""
        node: Node | None = self.root
        for key in path:
            node = self._item(node, key)
            if node is None:
                raise KeyError(path)
        assert node is not None
        return node

    def merged(self, path: Path) -> dict[Any, Any]:
        """What merges (``<<``) bring to the mapping at ``path``, also what its own entries override."""
        node = self.node(path)
        merges = [value for name, value in node.value if _is_merge(name)] if is_mapping(node) else []
        return {key: each for value in merges for key, each in self._merge_of(value, node).items()}

    def line_of(self, path: Path) -> int:
        """The line of the key at ``path``, from 1; that of the mapping, where the key came from somewhere else."""
        if not path:
            return int(self.root.start_mark.line) + 1
        node = self.node(path)
        parent = self.node(path[:-1])
        if is_mapping(parent):
            own = self._entries_of(parent).get(path[-1])
            node = own[0] if own else parent
        return int(node.start_mark.line) + 1

    def duplicate(self, path: Path, key: str | int | None = None) -> str:
        """``Document.duplicate``."""
        seen: dict[Any, int] = {}
        node = self.node(path)
        if not is_mapping(node) or len(self._entries_of(node)) == len(node.value):
            return ""
        for name, _ in node.value:
            here, mark = self._key_of(name), name.start_mark
            if _is_merge(name) or key not in (None, here):
                continue
            if here in seen:
                return f"{self.name}:{mark.line + 1}:{mark.column + 1}: {here} stands in line {seen[here]}, too"
            seen[here] = mark.line + 1
        return ""

    @functools.cached_property
    def scalar_starts(self) -> list[int]:
        """Where scalars begin, in order."""
        return [start for start, _ in self.scalars]

    @functools.cached_property
    def indent(self) -> int:
        """The number of spaces by which this file indents a mapping in a mapping."""
        for _, value in self.root.value:
            if is_mapping(value) and not value.flow_style and value.value:
                return int(value.value[0][0].start_mark.column) or 2
        return 2

    # Nodes and values, each looked at once

    def _value_of(self, node: Node) -> Any:
        """As PyYAML has it: yes is true, 1e8 a string."""
        if id(node) not in self._values:
            self._values[id(node)] = self._constructed(node)
        return self._values[id(node)]

    def _constructed(self, node: Node) -> Any:
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if node.tag not in _COLLECTIONS:
            raise _BadNode(f"no system knows the tag {node.tag}", node)
        if isinstance(node, SequenceNode):
            return [self._value_of(each) for each in node.value]
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        for key, value in node.value:
            if _is_merge(key):
                merged |= self._merge_of(value, key)
            else:
                own[self._key_of(key)] = self._value_of(value)
        return merged | own

    def _merge_of(self, node: Node, key: Node) -> dict[Any, Any]:
        """What the value of a ``<<`` brings; of several mappings the first takes precedence."""
        each = node.value if isinstance(node, SequenceNode) else [node]
        if not all(map(is_mapping, each)):
            raise _BadNode("<< takes a mapping, or a list of them", key)
        return {key: value for node in reversed(each) for key, value in self._value_of(node).items()}

    def _scalar(self, node: ScalarNode) -> Any:
        try:
            return self._constructor.construct_object(node)
        except yaml.constructor.ConstructorError as error:  # =, or a tag of somebody's own
            raise _BadNode(f"{_cut(node)}: {error.problem}".removeprefix(": "), node) from error
        except (ValueError, KeyError) as error:  # a date that is none
            raise _BadNode(f"{_cut(node)} is not a value: {error}", node) from error

    def _key_of(self, node: Node) -> Any:
        if not isinstance(node, ScalarNode):
            raise _BadNode("a key that is a list or a mapping", node)
        return "<<" if _is_merge(node) else self._value_of(node)

    def _entries_of(self, node: MappingNode) -> dict[Any, tuple[Node, Node]]:
        """A mapping's own keys and values, by key; of two alike the last."""
        if id(node) not in self._entries:
            self._entries[id(node)] = {self._key_of(key): (key, value) for key, value in node.value}
        return self._entries[id(node)]

    def _item(self, node: Node | None, key: str | int) -> Node | None:
        if isinstance(node, SequenceNode):
            return node.value[key] if isinstance(key, int) and key < len(node.value) else None
        if not is_mapping(node):
            return None
        own = self._entries_of(node).get(key)
        if own is not None:
            return own[1]
        merges = [value for name, value in node.value if _is_merge(name)]
        for merge in reversed(merges):
            for each in merge.value if isinstance(merge, SequenceNode) else [merge]:
                if (found := self._item(each, key)) is not None:
                    return found
        return None


class _BadNode(Exception):
    def __init__(self, message: str, node: Node) -> None:
        super().__init__(message)
        self.node = node


def _cut(node: ScalarNode) -> str:
    text = str(node.value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_merge(node: Node) -> bool:
    return bool(node.tag == _MERGE)
