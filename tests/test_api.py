"""The public API: names, signatures and defaults. ``python -m tests.test_api`` accepts what has changed."""

import difflib
import importlib
import inspect
import re
from pathlib import Path

import sparkkeras

SNAPSHOT = Path(__file__).with_name("api.txt")
MODULES = ("sparkkeras", *(f"sparkkeras.{name}" for name in sparkkeras._PUBLIC_MODULES))


def test_the_public_api_is_the_accepted_one():
    changes = difflib.unified_diff(SNAPSHOT.read_text().splitlines(), api(), "accepted", "found", lineterm="", n=0)
    assert list(changes) == []


def api():
    """A line for each public name, and for each public member that this package defines."""
    return [line for module in MODULES for line in _of_module(importlib.import_module(module))]


def _of_module(module):
    own = (name for name, found in vars(module).items() if getattr(found, "__module__", "") == module.__name__)
    for name in getattr(module, "__all__", None) or sorted(name for name in own if not name.startswith("_")):
        found = getattr(module, name)
        yield f"{module.__name__}.{name}{_signature(found)}"
        if inspect.isclass(found):
            for member in sorted(dir(found)):
                if not member.startswith("_") and _is_ours(found, member):
                    yield f"    {member}{_signature(inspect.getattr_static(found, member))}"


def _is_ours(kind, member):
    return next(each for each in kind.__mro__ if member in vars(each)).__module__.startswith("sparkkeras")


def _signature(found):
    """The parameters and their defaults, without types; for what is not called, its kind or value."""
    if isinstance(found, (classmethod, staticmethod)):
        return f"{_signature(found.__func__)} {type(found).__name__}"
    if not callable(found):
        return f": {type(found).__name__}"
    try:
        signature = inspect.signature(found)
    except ValueError:  # a class with the constructor of an exception
        return "(...)"
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    shown = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    return re.sub(r" at 0x\w+", "", str(shown))


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in api()))
