"""Tests of an engine over two processes, started by the command lines on the loopback address.

They need separate processes, because a process can connect to others only once. Both processes
compile all programs, so a test costs as much as two tests of an engine.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from paged_jax import generate
from tests.support.live_server import wait_until
from tests.support.tiny_model import SIZES

HEARTBEAT = 6
ENGINE = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]


class Processes:
    """Two processes of a command line, each with a device."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[str]] = []

    def start(self, module: str, *arguments: str) -> list[subprocess.Popen[str]]:
        port, pipe = free_port(), subprocess.PIPE
        for number in range(2):
            command = [
                *(sys.executable, "-m", f"paged_jax.{module}", *arguments),
                *(f"--coordinator-address=127.0.0.1:{port}", "--num-processes=2"),
                *(f"--process-id={number}", f"--heartbeat-timeout={HEARTBEAT}"),
            ]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            self.running.append(
                subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
            )
        return self.running


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    for process in processes.running:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def take_outputs(text: str) -> list[list[dict]]:
    """Return the output of ``generate --json`` without probabilities: their rounding differs."""
    keys = ("index", "text", "token_ids", "finish_reason")
    records = [json.loads(line)["outputs"] for line in text.splitlines()]
    return [[{key: sample[key] for key in keys} for sample in each] for each in records]


@pytest.mark.slow
def test_two_processes_generate_the_same_as_a_single_process(
    processes, tiny_folder, tmp_path, capsys
) -> None:
    (tmp_path / "prompts.txt").write_text("the sun in\nan\nthe sun in the")
    arguments = [f"--model={tiny_folder}", f"--prompts-file={tmp_path / 'prompts.txt'}"]
    arguments += ["--seed=5", "--n=2", "--max-tokens=20", "--json", *ENGINE]
    both = processes.start("generate", *arguments)
    (text, log), (nothing, other_log) = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], log + other_log
    assert not nothing  # only process 0 prints
    assert generate.main(arguments) == 0
    assert take_outputs(text) == take_outputs(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_process_exits_with_a_line_if_the_other_is_killed(processes, tiny_folder, killed) -> None:
    http_port = free_port()
    arguments = [f"--model={tiny_folder}", "--no-warmup", f"--port={http_port}", *ENGINE]
    both = processes.start("serve", *arguments)
    url = f"http://127.0.0.1:{http_port}"
    wait_until(lambda: is_ready(url) or any(each.poll() is not None for each in both), 120)
    answer = httpx.post(f"{url}/generate", json={"prompt": "an", "max_tokens": 4}, timeout=120)
    assert answer.status_code == 200, answer.text

    both[killed].kill()
    start_time = time.monotonic()
    _, log = both[1 - killed].communicate(timeout=60)
    assert time.monotonic() - start_time < HEARTBEAT + 6
    assert both[1 - killed].returncode not in (0, None)
    errors = [line for line in log.splitlines() if line.startswith("paged_jax: error: ")]
    assert len(errors) == 1, log
    assert "Traceback" not in log and "@ 0x" not in log, log


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_command_lines_report_missing_arguments(capsys) -> None:
    assert generate.main(["--prompt=a", "--num-processes=2"]) == 1
    assert "must be given together" in capsys.readouterr().err
