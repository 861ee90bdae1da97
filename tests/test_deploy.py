"""Tests that the page on deployment and its files match the options and routes of the server."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paged_jax import Engine, serve
from paged_jax.server import Service, Settings, create_app
from tests.support import ROOT
from tests.support.tiny_model import SIZES

PAGE = ROOT / "docs" / "deploy.md"
FILES = [PAGE, ROOT / "examples" / "kubernetes.yaml", ROOT / "Dockerfile"]
# Options of docker, apt-get, pip and kubectl.
OTHERS = {
    "--tag", "--build-arg", "--publish", "--env", "--volume", "--gpus", "--yes", "--uid",
    "--no-install-recommends", "--no-cache-dir", "--create-home", "--directory", "--owner",
    "--from-literal", "--memory",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_options_exist(path: Path) -> None:
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text())) - OTHERS
    assert options and options <= set(serve._parser()._option_string_actions)


def documents() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text()))


def test_pod_uses_the_routes_of_the_server(tiny_model) -> None:
    deployment, service = documents()
    pod = deployment["spec"]["template"]["spec"]
    [server] = pod["containers"]
    args = serve._parser().parse_args(server["args"])
    wait = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait + args.drain_timeout
    app = create_app(Service(Engine(tiny_model, **SIZES), Settings(model_name="tiny")))
    paths = {getattr(route, "path", None) for route in app.routes}
    assert {
        server[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")
    } <= paths
    [port] = server["ports"]
    assert port["containerPort"] == args.port
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    text = (ROOT / "Dockerfile").read_text()
    assert f"EXPOSE {args.port}\n" in text
    assert f"--uid {pod['securityContext']['runAsUser']} " in text
    names = {each["name"] for each in server["env"]}
    assert names == {serve._API_KEY, serve._ADMIN_KEY}


@pytest.mark.slow
def test_image_can_be_built() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("no Docker here")
    subprocess.run([docker, "build", "--tag", "paged-jax-test", "."], cwd=ROOT, check=True)
    command = [docker, "run", "--rm", "paged-jax-test", "--version"]
    assert "paged_jax" in subprocess.run(command, capture_output=True, text=True).stdout
