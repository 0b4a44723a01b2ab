"""PyTorch's process groups outlive the functions that destroy them."""

import gc
import os
import sys
import weakref

import pytest

from sparkkeras.worker import process_groups
from sparkkeras.worker.process_groups import keep_process_groups


@pytest.mark.core
@pytest.mark.skipif(os.environ.get("KERAS_BACKEND") != "torch", reason="loads PyTorch")
def test_destroyed_groups_are_kept(tmp_path, monkeypatch):
    distributed = pytest.importorskip("torch.distributed")
    for owner in (distributed, distributed.distributed_c10d):
        for name in ("init_process_group", "new_group"):
            monkeypatch.setattr(owner, name, getattr(owner, name))  # to restore them
    keep_process_groups()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    groups = [weakref.ref(distributed.group.WORLD), weakref.ref(distributed.new_group([0]))]
    distributed.destroy_process_group()
    gc.collect()
    assert all(group() is not None for group in groups)


def test_a_module_that_is_imported_later_is_patched(tmp_path, monkeypatch):
    (tmp_path / "groups_of_processes.py").write_text(
        "class group: WORLD = None\n"
        "class Group: pass\n"
        "def init_process_group(): group.WORLD = Group()\n"
        "def new_group(): return Group()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_groups, "_MODULE", "groups_of_processes")
    finders = [finder for finder in sys.meta_path if not isinstance(finder, process_groups._OnImport)]
    monkeypatch.setattr(sys, "meta_path", list(finders))
    keep_process_groups()
    import groups_of_processes as module

    monkeypatch.delitem(sys.modules, "groups_of_processes")
    module.init_process_group()
    groups = [weakref.ref(module.group.WORLD), weakref.ref(module.new_group())]
    module.group.WORLD = None
    gc.collect()
    assert all(group() is not None for group in groups)
    assert sys.meta_path == finders
