"""PyTorch's process groups in processes that run functions of users."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "torch.distributed.distributed_c10d"


def keep_process_groups() -> None:
    """Keep all process groups that PyTorch creates in this process from now on until it ends.

    Without this, the last reference, which is often a model of DistributedDataParallel in a function that has destroyed its
    groups and returns, deletes a group while it holds the lock of the interpreter (GIL), and waits for threads of the group.
    A thread that waits for the same lock then waits forever: https://github.com/pytorch/pytorch/issues/56297.
    """
    if _MODULE in sys.modules:
        _patch(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _OnImport())


class _OnImport(MetaPathFinder):
    """Patches the module when it is imported, and removes itself."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch(module: Any) -> None:
    kept: list[Any] = []

    def keeping(create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def created(*args: Any, **kwargs: Any) -> Any:
            group = create(*args, **kwargs)
            kept.extend((group, module.group.WORLD))
            return group

        return created

    for name in ("init_process_group", "new_group"):
        create = keeping(getattr(module, name))
        for owner in (module, sys.modules.get("torch.distributed")):
            if hasattr(owner, name):
                setattr(owner, name, create)
