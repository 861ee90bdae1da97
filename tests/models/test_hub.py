"""Tests of models by name, with the Hub's own client and a server that stands in for the Hub."""

import hashlib
import http.server
import json
import subprocess
import sys
import threading

import pytest

from paged_jax import Engine
from paged_jax.models.hub import find_model, is_model_name
from tests.support import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """The two routes of the Hub that a download uses: the list of files, and each file."""

    files: dict[str, bytes] = {}
    requested: list[str] = []

    def do_GET(self) -> None:
        self.requested.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/secret"):
            self.answer(403, {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/org/tiny/tree"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": oid(data)}
                for name, data in self.files.items()
            ]
            self.answer(200, body=json.dumps(entries).encode())
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
            self.answer(200, body=json.dumps(info).encode())
        elif path.startswith("/org/tiny/resolve/") and path.split("/", 5)[5] in self.files:
            data = self.files[path.split("/", 5)[5]]
            self.answer(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{oid(data)}"'}, data)
        else:
            self.answer(404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="module")
def hub(tiny_folder):
    """Serve the tiny model as org/tiny, with files that must not be downloaded."""
    Hub.files = {path.name: path.read_bytes() for path in tiny_folder.iterdir()}
    Hub.files |= {"pytorch_model.bin": b"?", "original/model.safetensors": b"?", "a.gguf": b"GGUF"}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(program: str, hub: str, home) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, because the client reads its settings when imported."""
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    setup = f"import os; os.environ.update({settings!r}); "
    command = [sys.executable, "-c", setup + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ("gpt2", "Names on the Hub have two parts"),
        ("llama3.2:1b", "Names on the Hub have two parts"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Give the name alone"),
        ("./model.gguf", "There is no such file or folder in "),
        ("~/model", "There is no such file or folder."),
    ],
)
def test_missing_models_are_explained(model, advice) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Engine(model)
    message = str(caught.value)
    assert message.startswith("Engine: model must be a folder, a GGUF file or a name on")
    assert f"got {model!r}. " in message and advice in message


def test_paths_are_not_names(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert is_model_name("org/other") and is_model_name("org/other/q4.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not is_model_name("~/org") and find_model("~/org") == tmp_path / "org"
    for path in ("org/model", "./org/other", "/org/other", "other", "a/b/c", "../a"):
        assert not is_model_name(path)
        assert (
            str(find_model(path)) == str(find_model(path, download=True)) == path.removeprefix("./")
        )
    with pytest.raises(
        ValueError, match=r"revision must only be set for the name .* path org/model"
    ):
        find_model("org/model", revision="v1")


def test_named_model_is_downloaded_once_and_then_found_without_the_network(hub, tmp_path) -> None:
    find = "from paged_jax.models.hub import find_model; print(find_model({}))"
    missing = run(find.format("'org/tiny'"), hub, tmp_path)
    assert not Hub.requested
    error = missing.stderr.splitlines()[-1]
    assert error.startswith(
        "FileNotFoundError: org/tiny: there is no file or folder of this name, and"
    )
    assert f"{tmp_path}/hub" in error and "--download" in error
    fetched = run(find.format("'org/tiny', download=True"), hub, tmp_path)
    assert fetched.returncode == 0, fetched.stderr
    folder = fetched.stdout.strip()
    assert folder.endswith(f"models--org--tiny/snapshots/{COMMIT}")
    Hub.requested.clear()
    found = run(
        "from pathlib import Path; from paged_jax.models.hub import find_model; "
        "folder = find_model('org/tiny'); print(folder, *sorted(x.name for x in folder.iterdir()))",
        hub,
        tmp_path,
    )
    path, *names = found.stdout.split()
    assert path == folder and not Hub.requested
    assert {"config.json", "model.safetensors"} <= {*names}
    assert not {"pytorch_model.bin", "original", "a.gguf"} & {*names}
    file = run(find.format("'org/tiny/a.gguf', download=True"), hub, tmp_path)
    assert file.stdout.strip() == f"{folder}/a.gguf", file.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "org/nobody",
            "OSError: org/nobody: the Hugging Face Hub has no model of this name, or",
        ),
        ("org/secret", "OSError: org/secret: this model requires permission. Accept its terms"),
    ],
)
def test_download_says_why_it_fails(hub, tmp_path, name, message) -> None:
    program = f"from paged_jax.models.hub import find_model; find_model({name!r}, download=True)"
    assert run(program, hub, tmp_path).stderr.splitlines()[-1].startswith(message)


@pytest.mark.slow
def test_engine_and_command_line_take_names(hub, tmp_path) -> None:
    program = (
        "from paged_jax.__main__ import main; import sys; "
        "sys.exit(main(['generate', '--model', 'org/tiny', '--download', '--prompt', 'ab', "
        "'--max-tokens', '3', '--max-model-len', '32', '--no-compilation-cache']))"
    )
    done = run(program, hub, tmp_path)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
