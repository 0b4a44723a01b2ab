"""What the API reference shows of sparkkeras.

In docstrings, names in single backticks become links and literal blocks become code blocks. In signatures, aliases of types
(``Columns``) are replaced by what they stand for, and internal base classes and private fields are left out: the reference
describes none of these.
"""

import ast
import copy
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import griffe

GIVEN = re.compile(r"^( *)\*\*given: See `(\w+)`\.$", re.MULTILINE)
NAME = re.compile(r"(?<!`)`(?P<name>[A-Za-z_][\w.]*)`(?!`)")
LITERAL_BLOCK = re.compile(r"^(?P<lead>.*?) ?::\n\n(?P<code>(?:    .*\n?|\n)+)", re.MULTILINE)
PUBLIC_MODULES = ("hyperopt", "ml", "runner", "events")
MODULE = re.compile(rf"^sparkkeras\.(?:(?:{'|'.join(PUBLIC_MODULES)})\.)?")

MEMBERS_OF_BASE = dict.fromkeys(
    ("hyperopt.search.HyperParamModel", "hyperopt.ask_tell.Search"), "hyperopt.results.SearchView"
)
"""The classes that are shown with the members of an internal base class."""


class Docstrings(griffe.Extension):
    """Rewrites all docstrings and signatures once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstrings and the signatures of a package."""
        if pkg.name == "sparkkeras":
            for name in MEMBERS_OF_BASE:
                _take_members(pkg[name], pkg[MEMBERS_OF_BASE[name]])
            self._public = _public_names(pkg)
            self._shown_paths = {item.path for _, item in self._public.values()}
            self._rewrite(pkg, set())

    def _rewrite(self, parent: griffe.Object | griffe.Alias, seen: set[str]) -> None:
        for item in [parent, *parent.members.values()]:
            if item.is_alias or item.path in seen:
                continue
            seen.add(item.path)
            if item.is_function:
                _expand_declared(item)
            if item.docstring is not None:
                text = GIVEN.sub(functools.partial(_described, item), item.docstring.value)
                item.docstring.value = self._as_markdown(text, item)
            if item.is_function:
                _expand_signature(item)
            elif item.is_attribute:
                item.annotation = _expanded(item.annotation, item.package)
            if item.is_class:
                item.bases = [base for base in item.bases if self._is_shown_base(base)]
            if item.is_module or item.is_class:
                self._rewrite(item, seen)

    def _is_shown_base(self, base: str | griffe.Expr) -> bool:
        path = base if isinstance(base, str) else base.canonical_path
        return not path.startswith("sparkkeras.") or path in self._shown_paths

    def _as_markdown(self, text: str, item: griffe.Object | griffe.Alias) -> str:
        text = LITERAL_BLOCK.sub(_code_block, text + "\n")
        parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)  # every second one is a code block
        parts[::2] = [NAME.sub(lambda found: self._link(found["name"], item), part) for part in parts[::2]]
        return "".join(parts).rstrip("\n")

    def _link(self, name: str, item: griffe.Object | griffe.Alias) -> str:
        """A reference to what the name means to ``item``, or only the name if the reference does not have it."""
        first, _, member = MODULE.sub("", name).partition(".")
        owner = item if item.is_class else item.parent
        if first not in self._public and owner is not None and owner.name in self._public:
            first, member = owner.name, first if not member else ""  # a method of the class itself
            if not member:
                return f"`{name}`"
        path, found = self._public.get(first, ("", None))
        if found is None or (member and not _is_shown(found, member)):
            return f"`{name}`"
        return f"[`{name}`][{path}.{member}]" if member else f"[`{name}`][{path}]"


def _public_names(package: griffe.Module) -> dict[str, tuple[str, Any]]:
    """The objects of the API reference: the path under which each is public, and the object, by name."""
    found = {}
    for module in (*(package[name] for name in PUBLIC_MODULES), package):
        for name, item in module.members.items():
            is_own = not item.is_alias or item.target_path.startswith("sparkkeras.")
            if not name.startswith("_") and is_own and (item.is_class or item.is_function) and item.has_docstring:
                found[name] = (f"{module.path}.{name}", item.final_target if item.is_alias else item)
    return found


def _take_members(item: griffe.Class, base: griffe.Class) -> None:
    for name, member in base.members.items():
        if not name.startswith("_") and isinstance(member, griffe.Object) and member.docstring is not None:
            taken = copy.copy(member)
            taken.docstring = griffe.Docstring(member.docstring.value, lineno=member.docstring.lineno, parent=taken)
            item.set_member(name, taken)


def _is_shown(item: Any, name: str) -> bool:
    member = item.members.get(name)
    return member is not None and not name.startswith("_") and not member.is_alias and member.has_docstring


def _expand_declared(function: griffe.Function) -> None:
    """Have a signature list the arguments that a `TypedDict` declares, instead of ``**given``."""
    parameters = list(function.parameters)
    annotation = parameters[-1].annotation if parameters else None
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Unpack":
        for name, kind, default, _ in _declared(_found(function, str(annotation.slice))):
            added = griffe.Parameter(name, annotation=kind, kind=griffe.ParameterKind.keyword_only, default=default)
            parameters.insert(-1, added)
        function.parameters = griffe.Parameters(*parameters[:-1])


def _described(item: griffe.Object, found: re.Match[str]) -> str:
    """The lines of a docstring that describe the arguments of a `TypedDict`."""
    return "\n".join(f"{found[1]}{name}: {doc}" for name, _, _, doc in _declared(_found(item, found[2])))


def _found(item: griffe.Object, name: str) -> griffe.Class:
    """The class with a name that a module knows."""
    return item.package[item.module.resolve(name).partition(".")[2]]


def _declared(kind: griffe.Class) -> Iterator[tuple[str, Any, str, str]]:
    """What a `TypedDict` and its bases declare: names, types, defaults and descriptions of arguments."""
    for base in kind.bases:
        if str(base) != "TypedDict":
            yield from _declared(_found(kind, str(base)))
    for each in kind.members.values():
        if each.is_attribute:
            annotation, call = each.annotation.slice.elements
            default, _, doc, *_ = [getattr(argument, "value", argument) for argument in call.arguments]
            text = repr(str(default)) if isinstance(default, griffe.ExprName) else str(default)  # a string counts as a type
            yield each.name, annotation, text, " ".join(ast.literal_eval(str(doc)).split())


def _expand_signature(function: griffe.Function) -> None:
    shown = [parameter for parameter in function.parameters if not parameter.name.startswith("_")]
    function.parameters = griffe.Parameters(*shown)  # without the private fields of a dataclass
    for parameter in shown:
        parameter.annotation = _expanded(parameter.annotation, function.package)
    function.returns = _expanded(function.returns, function.package)


def _expanded(node: Any, package: griffe.Module) -> Any:
    """An annotation, or a part of one, with what the aliases of types in it stand for."""
    if isinstance(node, list):
        return [_expanded(part, package) for part in node]
    if isinstance(node, griffe.ExprName):
        meaning = _meaning(node, package)
        return node if meaning is None else _expanded(meaning, package)
    if not isinstance(node, griffe.Expr) or isinstance(node, griffe.ExprAttribute):
        return node
    parts = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return dataclasses.replace(node, **{name: _expanded(part, package) for name, part in parts.items()})


def _meaning(name: griffe.ExprName, package: griffe.Module) -> griffe.Expr | None:
    """The type that an alias stands for; ``None`` for other names, and for an alias of ``Any``, which says less than it."""
    path = name.canonical_path.removeprefix(f"{package.name}.")
    item = package[path] if path != name.canonical_path else None
    if item is None or item.is_alias or not item.is_attribute or not isinstance(item.value, griffe.Expr):
        return None
    return None if str(item.value) == "Any" else item.value


def _code_block(found: re.Match[str]) -> str:
    lead = found["lead"].strip()
    code = "\n".join(line.removeprefix("    ") for line in found["code"].rstrip().split("\n"))
    language = "python" if not re.search("[│├└]", code) else "text"
    title = {"": "", "Example": "**Example**\n\n"}.get(lead, f"{found['lead']}:\n\n")
    return f"{title}```{language}\n{code}\n```\n\n"
