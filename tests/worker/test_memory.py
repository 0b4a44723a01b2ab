"""What messages say about the memory of a machine."""

from unittest.mock import Mock

import pytest

from sparkkeras.worker import processes

MACHINE = "MemTotal: 25165824 kB\nMemFree: 1048576 kB\nMemAvailable: 20971520 kB\n"


@pytest.mark.parametrize(
    ("ended", "ran_out", "message"),
    [
        (3, False, "20.0 of 24.0 GB of memory are available now, and the operating system has ended no process for lack"),
        (4, True, "the operating system has ended 1 process for lack of memory meanwhile, perhaps this one"),
        (None, None, "20.0 of 24.0 GB of memory are available now"),
    ],
)
def test_memory_ran_out_if_linux_has_ended_a_process_since(monkeypatch, ended, ran_out, message):
    files = {"/proc/meminfo": MACHINE, "/proc/vmstat": "" if ended is None else f"pgfault 17\noom_kill {ended}\n"}
    monkeypatch.setattr(processes, "Path", lambda path: Mock(read_text=lambda: files[path]))
    monkeypatch.setattr(processes, "_ended_before", 3)
    assert processes.ran_out() is ran_out
    assert message in processes.describe_memory()


def test_nothing_is_said_where_nothing_is_known(monkeypatch):
    monkeypatch.setattr(processes, "Path", Mock(side_effect=FileNotFoundError))
    assert (processes.ran_out(), processes.describe_memory()) == (None, "")
