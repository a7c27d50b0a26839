"""What the kernel says of memory, as values."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.memory_use import ControlGroup, MemoryUse, host_memory
from lockstep.records import from_known

uses = st.builds(MemoryUse, *[st.none() | st.integers(0, 1 << 50)] * 6)


@given(uses)
def test_values_come_back(use):
    assert from_known(MemoryUse, use.values()) == use
    assert from_known(MemoryUse, {**use.values(), "of a later version": 1}) == use


def test_what_is_something_else_is_refused():
    with pytest.raises(ValueError, match="no MemoryUse"):
        from_known(MemoryUse, [1])


def written(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_free_is_what_both_the_host_and_the_group_leave(tmp_path):
    written(
        tmp_path,
        {
            "proc/self/status": "Name:\tpython\nVmHWM:\t    3000 kB\nVmRSS:\t    2000 kB\n",
            "proc/meminfo": "MemTotal: 90 kB\nMemAvailable:    7000 kB\n",
            "proc/self/cgroup": "0::/job\n",
            "sys/job/memory.max": f"{9 << 20}\n",
            "sys/job/memory.current": f"{6 << 20}\n",
            "sys/job/memory.stat": f"inactive_file {1 << 20}\n",
        },
    )
    assert host_memory(tmp_path / "proc", tmp_path / "sys") == MemoryUse(2000 << 10, 3000 << 10, 4 << 20)
    (tmp_path / "sys/job/memory.max").write_text("max\n")
    assert host_memory(tmp_path / "proc", tmp_path / "sys").host_free == 7000 << 10


@pytest.mark.parametrize(
    ("line", "root", "limit", "used"),
    [
        ("0::/job/step", "", "memory.max", "memory.current"),
        ("5:cpu,memory:/job/step", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_free_is_what_the_fullest_group_leaves(tmp_path, line, root, limit, used):
    written(
        tmp_path / root,
        {f"job/{limit}": "1000\n", f"job/{used}": "400\n", f"job/step/{limit}": "800\n", f"job/step/{used}": "150\n"},
    )
    written(tmp_path, {"cgroup": f"{line}\n3:pids:/other\n"})
    group = ControlGroup.read(tmp_path / "cgroup", tmp_path)
    assert (group.limit_bytes, group.used_bytes, group.free_bytes) == (800, 150, 600)
    (tmp_path / root / "job/step" / limit).write_text("max\n")
    assert ControlGroup.read(tmp_path / "cgroup", tmp_path).free_bytes == 600
    assert ControlGroup.read(tmp_path / "nowhere", tmp_path).free_bytes is None


def test_nothing_is_known_where_the_kernel_says_nothing(tmp_path):
    assert host_memory(tmp_path, tmp_path) == MemoryUse()


def test_of_this_process_the_kernel_says_all():
    used = host_memory()
    assert 1 << 20 < used.host <= used.host_peak
    assert used.host_free > 0
