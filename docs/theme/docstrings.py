"""The docstrings of sparkkeras as Markdown: names in single backticks become links, literal blocks become code blocks."""

import re
from typing import Any

import griffe

NAME = re.compile(r"(?<!`)`(?P<name>[A-Za-z_][\w.]*)`(?!`)")
LITERAL_BLOCK = re.compile(r"^(?P<lead>.*?) ?::\n\n(?P<code>(?:    .*\n?|\n)+)", re.MULTILINE)
PUBLIC_MODULES = ("hyperopt", "ml", "runner", "events")
MODULE = re.compile(rf"^sparkkeras\.(?:(?:{'|'.join(PUBLIC_MODULES)})\.)?")


class Docstrings(griffe.Extension):
    """Rewrites all docstrings once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstrings of a package."""
        if pkg.name == "sparkkeras":
            self._public = _public_names(pkg)
            self._rewrite(pkg, set())

    def _rewrite(self, parent: griffe.Object | griffe.Alias, seen: set[str]) -> None:
        for item in [parent, *parent.members.values()]:
            if item.is_alias or item.path in seen:
                continue
            seen.add(item.path)
            if item.docstring is not None:
                item.docstring.value = self._as_markdown(item.docstring.value, item)
            if item.is_module or item.is_class:
                self._rewrite(item, seen)

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


def _is_shown(item: Any, name: str) -> bool:
    member = item.members.get(name)
    return member is not None and not name.startswith("_") and not member.is_alias and member.has_docstring


def _code_block(found: re.Match[str]) -> str:
    lead = found["lead"].strip()
    code = "\n".join(line.removeprefix("    ") for line in found["code"].rstrip().split("\n"))
    language = "python" if not re.search("[│├└]", code) else "text"
    title = {"": "", "Example": "**Example**\n\n"}.get(lead, f"{found['lead']}:\n\n")
    return f"{title}```{language}\n{code}\n```\n\n"
