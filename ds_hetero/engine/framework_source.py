"""Read what a framework has, release by release, from its source: signatures, and digests of bodies.

    Source(folder).surface(["deepspeed.runtime.engine:DeepSpeedEngine.backward"])
    # {"deepspeed.runtime.engine:DeepSpeedEngine.backward": "(self, loss, **kwargs) 1f3a90c2d4"}

Nothing is imported, so that releases can be read that are not installed, and only files that are asked for are read.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

ABSENT = "absent"
Surface = dict[str, str]
"""By name: ``absent``, or the signature and a digest of the body, such as ``(self, step=None) 1f3a90c2d4``."""


@dataclass(frozen=True)
class Source:
    """Source of one release of a package, read as text."""

    folder: Path  # of the package, such as site-packages/deepspeed
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)
    _owners: dict[tuple[str, str], Definition | None] = field(default_factory=dict)  # by module and name in it

    @cached_property
    def package(self) -> str:
        """Name of the package."""
        return self.folder.name

    def surface(self, names: Iterable[str]) -> Surface:
        """State of every name."""
        return {name: self._state(name) for name in names}

    def _state(self, name: str) -> str:
        module, _, attributes = name.partition(":")
        owner = (module, attributes.partition(".")[0])
        if owner not in self._owners:  # finding transformers' Trainer takes a walk over the files of all its models
            self._owners[owner] = self._in_module(*owner)
        place = self._owners[owner]
        for attribute in attributes.split(".")[1:]:
            if place and isinstance(place.node, ast.Pass):
                place = self._in_module(place.module, attribute)
            else:
                place = self._in_class(place, attribute) if place else None
        return _state_of(place.node) if place else ABSENT

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            parts = module.split(".")[1:]
            file = self.folder.joinpath(*parts)
            # Of a compiled module the types are read.
            files = (file.with_suffix(".py"), file / "__init__.py", file.with_suffix(".pyi"), file / "__init__.pyi")
            path = next((each for each in files if each.is_file()), None)
            self._trees[module] = ast.parse(path.read_text()) if path else None
        return self._trees[module]

    def _in_module(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Definition | None:
        """Where a module, or the module that it imports the name from, defines it; its last definition counts.

        Star imports are followed last: that of all models in transformers takes half a minute.
        """
        tree = self._tree(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        found = None
        stars: list[str] = []
        for node in _statements(tree.body):
            if name in _defined_names(node):
                found = Definition(module, node)
            elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                stars.append(_absolute(module, node, is_package=self._is_package(module)))
            elif isinstance(node, ast.ImportFrom):
                found = self._imported(module, node, name, seen) or found
        if (found is None or isinstance(found.node, ast.ImportFrom)) and self._tree(f"{module}.{name}"):
            found = Definition(f"{module}.{name}", ast.Pass())
        for source in reversed(stars):
            if found is None and source.partition(".")[0] == self.package:
                found = self._in_module(source, name, seen)
        return found

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str, seen: frozenset[tuple[str, str]]
    ) -> Definition | None:
        """Where an import statement of a module gets the name from; None if it imports other names."""
        source = _absolute(module, node, is_package=self._is_package(module))
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                is_own = source.partition(".")[0] == self.package
                # Of another package, or of a compiled module: there is no source to look at.
                return (self._in_module(source, alias.name, seen) if is_own else None) or Definition(module, node)
        return None

    def _is_package(self, module: str) -> bool:
        return (self.folder.joinpath(*module.split(".")[1:]) / "__init__.py").is_file()

    def _in_class(self, place: Definition, name: str) -> Definition | None:
        """Where the class or function at a place, or a base of the class, defines an attribute."""
        node = place.node
        if isinstance(node, ast.Assign | ast.AnnAssign):  # NAME = Class() or NAME = OtherName
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            of_value = self._in_module(place.module, value.id) if isinstance(value, ast.Name) else None
            return self._in_class(of_value, name) if of_value else None
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            return None
        plain = name.removeprefix(f"_{node.name.lstrip('_')}") if "__" in name[1:] else name  # of a mangled name
        if isinstance(node, ast.ClassDef):
            in_body = [each for each in _statements(node.body) if plain in _defined_names(each)]
            if in_body:
                return Definition(place.module, in_body[-1])
        set_in_methods = [each for each in ast.walk(node) if _sets_attribute(each, plain)]
        if set_in_methods:
            return Definition(place.module, set_in_methods[0])
        for base in getattr(node, "bases", []):
            of_base = self._in_module(place.module, ast.unparse(base).rpartition(".")[2])
            found = self._in_class(of_base, name) if of_base else None
            if found:
                return found
        return None


@dataclass(frozen=True)
class Definition:
    """Where a name is defined."""

    module: str
    node: ast.AST  # ast.Pass: the module itself; ast.ImportFrom: of another package, whose source is not read


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, and of the branches of ``if``, ``try`` and ``with`` in it."""
    for node in body:
        yield node
        for branch in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, branch, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _defined_names(node: ast.AST) -> set[str]:
    """Names that a statement defines in its scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {name for target in node.targets for name in _assigned_names(target)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def _assigned_names(target: ast.expr) -> set[str]:
    """Variables that a target of an assignment names; ``Class.attribute = ...`` names none."""
    if isinstance(target, ast.Tuple | ast.List):
        return {name for each in target.elts for name in _assigned_names(each)}
    return {target.id} if isinstance(target, ast.Name) else set()


def _sets_attribute(node: ast.AST, name: str) -> bool:
    """Whether a node sets the attribute of an object, or defines a nested class or function of that name."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name == name
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    parts = chain.from_iterable(map(ast.walk, targets))  # ``self.a, self.b = ...`` has its attributes inside a tuple
    return any(isinstance(part, ast.Attribute) and part.attr == name for part in parts)


def _absolute(module: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    """Module that an import names, relative or not."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _state_of(node: ast.AST) -> str:
    """Signature without annotations, and a digest of the body without docstrings, comments and layout."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"({_arguments(node.args)}) {_digest(node)}"
    if isinstance(node, ast.ClassDef):
        made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
        return f"class({_arguments(made.args) if made else ''})"  # its methods that are used are listed by themselves
    return "value"


def _arguments(arguments: ast.arguments) -> str:
    bare = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0]
    assert isinstance(bare, ast.FunctionDef)
    for each in ast.walk(bare.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(bare.args)


def _digest(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    body = list(function.body)
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    # Not the text of ast.unparse or ast.dump, which depends on the release of Python.
    text = "\n".join(" ".join(_words(node)) for node in body)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _words(node: ast.AST) -> Iterator[str]:
    """Kinds of nodes and what they hold, in order; alike in all releases of Python."""
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        values = value if isinstance(value, list) else [value]
        if not values or values == [None] or name in ("ctx", "kind", "type_comment"):
            continue
        yield name
        for each in values:
            if isinstance(each, ast.AST):
                yield from _words(each)
            else:
                yield repr(each)


def installed(package: str) -> Source:
    """Return the source of what is installed. Imports nothing."""
    spec = importlib.util.find_spec(package)
    assert spec and spec.origin, package
    return Source(Path(spec.origin).parent)


@functools.cache
def digest_of(name: str) -> str:
    """Return the digest of a function's body in what is installed, or `ABSENT`. Imports nothing.

    Args:
        name: such as ``deepspeed.runtime.engine:DeepSpeedEngine.step``.
    """
    package = name.partition(":")[0].partition(".")[0]
    return installed(package).surface([name])[name].rpartition(" ")[2]


def has_name(name: str) -> bool:
    """Return whether what is installed of a package has a name, as in `digest_of`."""
    return digest_of(name) != ABSENT


def differences(before: Surface, after: Surface) -> list[str]:
    """Return what differs between two surfaces, one line a name."""
    lines = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, "not recorded"), after.get(name, "no longer used")
        if old == new:
            continue
        has_one_signature = signature_of(old) == signature_of(new) and " " in old
        lines.append(f"{name}: body changed" if has_one_signature else f"{name}: {old} -> {new}")
    return lines


def signature_of(state: str) -> str:
    """Return the signature in a state of a `Surface`; the state itself if it has none."""
    return state.rpartition(" ")[0] if state.startswith("(") else state


def accepts_calls_of(old: str, new: str) -> bool:
    """Return whether every call that one signature accepts is accepted by another one, and goes to the same parameters.

    Args:
        old: a signature as `signature_of` returns it, such as ``(self, step=None)``.
        new: as ``old``. A parameter with a default may be added, and ``(*args, **kwargs)`` accepts all.
    """
    if old == new:
        return True
    if "(" not in old or "(" not in new or old.startswith("class") != new.startswith("class"):
        return False
    before, after = _parameters(old), _parameters(new)
    if after.vararg and after.kwarg:
        return True
    names, names_after = [_positional(each) for each in (before, after)]
    if names_after[: len(names)] != names:
        return False
    required = len(names) - len(before.defaults)
    only = {each.arg: default for each, default in zip(before.kwonlyargs, before.kw_defaults, strict=True)}
    only_after = {each.arg: default for each, default in zip(after.kwonlyargs, after.kw_defaults, strict=True)}
    return (
        len(names_after) - len(after.defaults) <= required
        and all(name in only_after or name in names_after for name in only)
        and all(default is not None or (name in only and only[name] is None) for name, default in only_after.items())
        and bool(after.vararg) >= bool(before.vararg)
        and bool(after.kwarg) >= bool(before.kwarg)
    )


def _parameters(signature: str) -> ast.arguments:
    function = ast.parse(f"def f{signature.removeprefix('class')}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def _positional(arguments: ast.arguments) -> list[str]:
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
