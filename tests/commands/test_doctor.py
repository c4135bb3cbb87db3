"""The doctor finds what is wrong, and says what to do."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path

import pytest
import torch

from megahead.commands import doctor
from support.commands import call, free_port
from support.forked import run_script


def test_this_machine_is_ready_to_train(tmp_path: Path) -> None:
    done = run_script("tools/doctor.py", "--output-dir", tmp_path, "--port", free_port())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ready to train" in done.stdout
    for subject in ("Python", "torch", "deepspeed", "GPU", "disk", "shared memory", "collectives"):
        assert subject in done.stdout
    assert torch.__version__ in done.stdout


def test_outside_of_the_environment_it_says_how_to_get_in() -> None:
    done = call(sys.executable, "-S", "tools/doctor.py")  # -S: without site-packages
    assert done.returncode == 1
    assert done.stderr.startswith("error: psutil must be installed, but is not; run `make install`")


def test_a_port_that_is_taken() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        finding = doctor.port(holder.getsockname()[1])
    assert finding.state == "problem"
    assert "--master_port" in finding.advice
    assert [doctor.port(number).detail for number in (0, 70_000)] == ["0 is no port", "70000 is no port"]


def test_ports_of_root_and_a_torch_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", refuse)
        assert doctor.port(80).advice == "pass a --master_port from 1024 on"
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_nccl_available")
    assert doctor.collectives().state == "problem"


def test_a_package_that_is_missing_or_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.package("no_such_package", "note", "install it").state == "note"
    finding = doctor.package("broken_package", "problem", "install it")
    assert (finding.state, finding.detail) == ("problem", "OSError: libcudart.so.12: cannot open")


def test_hosts_of_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# nodes\nlocalhost slots=2\nnowhere.invalid\tslots=8\nlocalhost\n")
    monkeypatch.setattr(
        socket, "gethostbyname", lambda name: {"localhost": "127.0.0.1"}[name] if "." not in name else _no()
    )
    findings = list(doctor.hosts(path))
    assert [finding.subject for finding in findings] == ["host localhost", "host nowhere.invalid", "hostfile"]
    assert [finding.state for finding in findings[1:]] == ["problem", "problem"]
    assert findings[2].advice == "write HOST slots=N"
    assert next(iter(doctor.hosts(tmp_path / "none"))).state == "problem"
    path.write_bytes(b"\xff\xfe")
    assert next(iter(doctor.hosts(path))).detail == f"{path}: no text"


def test_a_name_that_no_host_can_have_has_no_address() -> None:
    assert doctor.host("x" * 64 + ".invalid").detail == "no address"


def test_a_hostfile_without_hosts_and_a_file_for_runs_are_problems(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# nobody\n\n")
    assert [finding.detail for finding in doctor.hosts(hostfile)] == [f"{hostfile}: no host"]
    assert doctor.disk(hostfile).state == doctor.disk(hostfile / "runs").state == "problem"


def test_a_package_may_have_another_name_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "renamed.py").write_text("__version__ = '3.7'")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.package("renamed", "note", "") == doctor.Finding("renamed", "ok", "3.7")


def test_advice_is_shown_as_it_is_written() -> None:
    finding = doctor.Finding("flash_attn", "note", "none", "pip install -e '.[gpu]'")
    (cell,) = doctor.table([finding]).columns[3].cells
    assert str(cell) == finding.advice


def test_a_host_that_answers_and_one_that_does_not() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        answers = doctor.host("localhost", lambda _, timeout: socket.create_connection(address, timeout))
    assert answers.state == "ok"
    refused = doctor.host("localhost", lambda _, timeout: socket.create_connection(address, timeout))
    assert (refused.state, "srun" in refused.advice) == ("note", True)


def _no() -> str:
    raise OSError("Name or service not known")
