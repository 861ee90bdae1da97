"""Memory of the host that a process may use."""

import jax
import pytest

from paged_jax.engine import device_memory
from paged_jax.engine.device_memory import DeviceMemory


@pytest.mark.parametrize(
    "own, limits",
    [
        ("0::/app/worker\n", {"app/memory.max": "4096", "app/worker/memory.max": "max"}),
        ("0::/\n", {"memory.max": "4096"}),
        (
            "8:memory:/app\n3:cpuset:/\n0::/\n",
            {
                "memory/app/memory.limit_in_bytes": "4096",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "cpuset/memory.limit_in_bytes": "1",
            },
        ),
    ],
    ids=["version 2", "version 2 in a namespace", "version 1"],
)
def test_host_memory_is_limited_by_the_container(monkeypatch, tmp_path, own, limits) -> None:
    (tmp_path / "own").write_text(own)
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit + "\n")
    monkeypatch.setattr(device_memory, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(device_memory, "_CGROUPS", tmp_path)
    assert device_memory.host_memory() == 4096
    assert device_memory.device_memory(jax.devices("cpu")[0]) == DeviceMemory(4096, 0)


def test_host_memory_without_a_container_is_the_memory_of_the_machine(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(device_memory, "_OWN_CGROUPS", tmp_path / "none")
    assert (device_memory.host_memory() or 0) > 1 << 28
