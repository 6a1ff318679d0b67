# SPDX-License-Identifier: Apache-2.0
"""What memory there is inside limited control groups, and how much of it the pools take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from sglang.srt import runtime_context
from sglang.srt.utils import common

from sglang_dflash.cpu import host_memory
from sglang_dflash.cpu.hooks import HOOKS, _share_of_memory
from sglang_dflash.cpu.host_memory import free_memory, total_memory

GiB = 2**30


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of control groups, none limited; this process is in /slice/service."""
    (tmp_path / "own").write_text("0::/slice/service\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "_OWN_CGROUP", tmp_path / "own")
    for folder in "", "slice", "slice/service":
        write(tmp_path / "groups" / folder, "max", 5 * GiB)
    return tmp_path / "groups"


def write(folder: Path, limit: int | str, current: int, cached: int = 0) -> None:
    """Write a group's files; the cached bytes are halved between both lists of the kernel."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    lists = f"inactive_file {cached // 2}\nactive_file {cached - cached // 2}\n"
    (folder / "memory.stat").write_text(f"anon 7\n{lists}shmem 9\n")


def test_without_limits_it_is_the_hosts(cgroups: Path) -> None:
    assert total_memory() == psutil.virtual_memory().total
    assert free_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize("where", ["", "slice", "slice/service"])
def test_the_tightest_group_decides_and_cached_files_give_way(cgroups: Path, where: str) -> None:
    write(cgroups / where, 2**20, 2**19 + 2**18, cached=2**17)
    assert total_memory() == 2**20
    assert free_memory() == 2**18 + 2**17


def test_a_group_over_its_limit_has_nothing(cgroups: Path) -> None:
    write(cgroups / "slice", 2**20, 2**20 + 5)
    assert free_memory() == 0


@pytest.mark.parametrize("said", [None, "4:memory:/slice\n", "0::/elsewhere\n"])
def test_where_no_group_can_be_read_it_is_the_hosts(cgroups: Path, said: str | None) -> None:
    """A host with the first version of control groups, another system, a group out of sight."""
    write(cgroups / "slice", 2**20, 0)
    own = cgroups.parent / "own"
    if said is None:
        own.unlink()
    else:
        own.write_text(said)
    assert total_memory() == psutil.virtual_memory().total


@pytest.mark.parametrize(("name", "content"), [("stat", "anon 7\n"), ("max", None)])
def test_what_a_group_does_not_tell_is_not_assumed(
    cgroups: Path, name: str, content: str | None
) -> None:
    """A kernel without these counters; a group that goes away."""
    write(cgroups / "slice", 2**20, 2**19, cached=2**18)
    file = cgroups / "slice" / f"memory.{name}"
    if content is None:
        file.unlink()
        assert total_memory() == psutil.virtual_memory().total
    else:
        file.write_text(content)
        assert free_memory() == 2**19


class Configurator:
    """What SGLang's sums of memory read of theirs."""

    device, gpu_id, mambaish_config = "cpu", 0, None


@pytest.fixture
def asked(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a server of two ranks' size in a container with 1 MiB, a half of it free."""
    stated: dict[str, Any] = {}
    arguments = SimpleNamespace(_raw_input=stated, tp_size=2, pp_size=1, dp_size=1)
    alone = SimpleNamespace(world_group=SimpleNamespace(world_size=1, cpu_group=None))
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: alone)
    hooked = {target: hook for target, hook, _ in HOOKS}
    replaced = hooked["sglang.srt.utils.common.get_free_cpu_memory"]
    monkeypatch.setattr(common, "get_free_cpu_memory", replaced)
    monkeypatch.setattr(common, "get_cpu_ids_by_node", lambda: ["0,1"])
    write(cgroups / "slice", 2**20, 2**19)
    return stated


def test_the_pools_take_half_of_what_is_free(asked: dict[str, Any]) -> None:
    def not_asked(*_: Any) -> int:
        raise AssertionError("SGLang's sum needs more than there was before")

    assert _share_of_memory(not_asked, Configurator(), 0.0) == pytest.approx(2**17, rel=0.01)


def test_a_stated_fraction_is_sglangs_to_apply(asked: dict[str, Any]) -> None:
    asked["mem_fraction_static"] = 0.7
    assert _share_of_memory(lambda *_: 1000, Configurator(), 0.0) == 500


def test_without_free_memory_the_start_is_refused(asked: dict[str, Any], cgroups: Path) -> None:
    write(cgroups / "slice", 2**20, 2**20)
    with pytest.raises(ValueError, match=r"0\.00 GiB of memory are free"):
        _share_of_memory(lambda *_: 1000, Configurator(), 0.0)
