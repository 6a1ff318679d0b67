# SPDX-License-Identifier: Apache-2.0
"""`sglang-dflash doctor`: who serves where, and what is wrong, without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sglang_dflash import cli, doctor, plugin

CPU = doctor._Platform("some.CpuPlatform", "cpu", ("plugin",))
CUDA = doctor._Platform("some.CudaPlatform", "cuda", ("plugin", "upstream"))
SGLANG_CPU = doctor._Platform("some.CpuSRTPlatform", "cpu", ())
FALLBACK = "plugin (auto; SGLang's own worker for what it does not serve)"


@pytest.fixture
def healthy(monkeypatch):
    monkeypatch.setattr(doctor, "_seams", list)
    monkeypatch.setattr(doctor, "_platform", lambda problems: CPU)
    monkeypatch.setattr(doctor, "_version", lambda package: "1.2.3")
    for name in ("SGLANG_PLUGINS", "SGLANG_DFLASH_WORKER"):
        monkeypatch.delenv(name, raising=False)


def printed(capsys) -> dict[str, str]:
    """Return what the command printed, by the label in front."""
    lines = capsys.readouterr().out.splitlines()
    return {line[:18].strip(): line[19:] for line in lines}


@pytest.mark.parametrize(("chosen", "worker"), [(CPU, "plugin"), (CUDA, FALLBACK)])
def test_doctor_says_who_serves(healthy, monkeypatch, capsys, chosen, worker):
    monkeypatch.setattr(doctor, "_platform", lambda problems: chosen)
    assert cli.main(["doctor"]) == 0
    lines = printed(capsys)
    assert lines["DFLASH worker"] == worker
    assert lines["platform"] == f"{chosen.path} ({chosen.device})"
    assert "all well" in lines


@pytest.mark.parametrize(
    ("choice", "chosen", "worker"),
    [
        ("plugin", CPU, "plugin"),
        ("plugin", CUDA, "plugin, or none (SGLANG_DFLASH_WORKER=plugin)"),
        ("upstream", CUDA, "SGLang's own (SGLANG_DFLASH_WORKER=upstream)"),
    ],
)
def test_the_variable_changes_who_serves(healthy, monkeypatch, choice, chosen, worker):
    monkeypatch.setattr(doctor, "_platform", lambda problems: chosen)
    found = doctor.diagnose({"SGLANG_DFLASH_WORKER": choice})
    assert (found.worker, found.problems) == (worker, [])


@pytest.mark.parametrize(
    ("environ", "chosen", "problem"),
    [
        ({"SGLANG_DFLASH_WORKER": "upstream"}, CPU, "SGLang's own worker needs CUDA"),
        ({}, SGLANG_CPU, "unset SGLANG_USE_CPU_ENGINE"),
    ],
)
def test_a_machine_where_nobody_serves_is_a_problem(healthy, monkeypatch, environ, chosen, problem):
    monkeypatch.setattr(doctor, "_platform", lambda problems: chosen)
    found = doctor.diagnose(environ)
    assert found.worker == "none"
    (line,) = found.problems
    assert problem in line


def test_what_cannot_be_loaded_where_nobody_serves_is_not_listed(healthy, monkeypatch):
    monkeypatch.setattr(doctor, "_platform", lambda problems: SGLANG_CPU)
    monkeypatch.setattr(doctor, "_seams", lambda: ["sglang.srt.x: not there"] * 30)
    assert len(doctor.diagnose({}).problems) == 1


def test_the_platform_here_is_the_plugin_s_own() -> None:
    """The suite hides GPUs, so that SGLang asks the plugin for its platform."""
    pytest.importorskip("sglang")
    problems: list[str] = []
    chosen = doctor._platform(problems)
    assert problems == []
    assert chosen == ("sglang_dflash.cpu.platform.CpuPlatform", "cpu", ("plugin",))


def test_doctor_names_the_machine(healthy, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert cli.main(["doctor"]) == 0
    lines = printed(capsys)
    assert lines["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert "core" in lines["CPU"]
    assert lines["accelerator"] == "2 x cuda (NVIDIA H200)"


def test_doctor_says_that_torch_sees_no_accelerator(healthy, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert cli.main(["doctor"]) == 0
    assert printed(capsys)["accelerator"] == "none"


def test_the_cpu_s_flags_are_those_that_linux_lists(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_tile\nbugs\t\t: amx_bf16\n")
    assert doctor.cpu_words(info).endswith(", avx512_bf16 yes, amx_bf16 no")
    assert "avx512" not in doctor.cpu_words(tmp_path / "absent")


def test_doctor_fails_where_sglang_has_moved(healthy, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_seams", lambda: ["sglang.srt.x: not there"])
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert found["problems"] == ["sglang.srt.x: not there"]


def test_doctor_sees_what_the_environment_switches_off(healthy):
    found = doctor.diagnose({"SGLANG_PLUGINS": "other", "SGLANG_DFLASH_WORKER": "mine"})
    assert found.entry_points == {"sglang.srt.plugins": False, "sglang.srt.platforms": False}
    assert "leaves dflash out" in found.problems[0]
    assert any("SGLANG_DFLASH_WORKER" in problem for problem in found.problems)
    left_out = doctor.diagnose({"SGLANG_PLUGINS": "dflash_cpu"})
    assert left_out.worker == "not the plugin: SGLang does not load it"


@pytest.mark.parametrize("error", ["OSError", "RuntimeError", "ImportError"])
def test_a_torch_that_cannot_be_loaded_is_one_problem_and_no_traceback(error):
    code = (
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        f"            raise {error}('libbroken.so: cannot open')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "from sglang_dflash.cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    told = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
    assert [f"torch cannot be loaded ({error}: libbroken.so: cannot open)" in t for t in told] == [
        True
    ]


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_an_sglang_that_cannot_be_loaded_is_told(monkeypatch, error):
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise error("libbroken.so: cannot open")

    def check() -> None:
        raise error("libother.so: cannot open")

    monkeypatch.setattr(doctor, "_version", lambda package: "1.2.3")
    name = "sglang.srt.platforms"
    monkeypatch.setitem(sys.modules, name, Broken(name))
    monkeypatch.setattr(doctor.seams, "check", check)
    found = doctor.diagnose({})
    platform, others = found.problems
    assert "SGLang finds no platform" in platform
    assert "libbroken.so" in platform
    assert "SGLang cannot be loaded" in others
    assert "libother.so" in others
    assert found.worker == "unknown"


def test_the_advice_is_what_can_be_done(monkeypatch):
    """The package is on no index, and another SGLang than the pinned one would not do."""
    monkeypatch.setattr(doctor, "_version", lambda package: "not installed")
    monkeypatch.setattr(doctor, "entry_points", lambda **_: ())
    found = doctor.diagnose({})
    assert "pip install sglang==0.5.23" in " ".join(found.problems)
    assert "install sglang-dflash again from its clone" in " ".join(found.problems)
    assert found.worker == "unknown"


def test_a_plugin_that_cannot_attach_itself_names_the_sglang_to_install(monkeypatch):
    def moved() -> None:
        raise ImportError("no such hook")

    monkeypatch.setattr(plugin, "_register_hooks", moved)
    with pytest.raises(SystemExit, match=r"no such hook.*pip install sglang==0\.5\.23"):
        plugin.register()
