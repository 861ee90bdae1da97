"""Tests that the page on deployment and its files match the options and routes of the server."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paged_jax import Engine, bench, serve
from paged_jax.models.hub import is_model_name
from paged_jax.server import Service, Settings, create_app
from tests.support import ROOT
from tests.support.tiny_model import SIZES

PAGE = ROOT / "docs" / "deploy.md"
FILES = [PAGE, ROOT / "examples" / "kubernetes.yaml", ROOT / "Dockerfile"]
# Options of docker, apt-get, pip, hf and kubectl.
OTHERS = {
    "--tag", "--build-arg", "--publish", "--env", "--volume", "--gpus", "--yes", "--uid",
    "--no-install-recommends", "--no-cache-dir", "--create-home", "--directory", "--owner",
    "--from-literal", "--memory", "--interval", "--timeout", "--start-period", "--exclude",
    "--file", "--build",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_options_exist(path: Path) -> None:
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text())) - OTHERS
    parsers = (serve.make_parser(), bench.make_parser())
    assert options and options <= {name for each in parsers for name in each._option_string_actions}


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text()))


def test_pod_uses_the_routes_of_the_server(tiny_model) -> None:
    deployment, service = documents()
    pod = deployment["spec"]["template"]["spec"]
    [server] = pod["containers"]
    args = serve.make_parser().parse_args(server["args"])
    wait = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait + args.drain_timeout
    app = create_app(Service(Engine(tiny_model, **SIZES), Settings(model_name="tiny")))
    paths = {getattr(route, "path", None) for route in app.routes}
    assert {
        server[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")
    } <= paths
    [port] = server["ports"]
    own_port = serve.ServerOptions().port
    assert args.port is None and port["containerPort"] == own_port
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    text = (ROOT / "Dockerfile").read_text()
    assert f"EXPOSE {own_port}\n" in text
    assert f"--uid {pod['securityContext']['runAsUser']} " in text
    names = {each["name"] for each in server["env"]}
    assert names == {serve._API_KEY, serve._ADMIN_KEY, "HF_HOME"}
    # The server finds the model that the first container downloads.
    [loader] = pod["initContainers"]
    assert loader["command"][2] == args.model and is_model_name(args.model)
    assert loader["env"][0] == server["env"][0]


def test_compose_files_fit_together() -> None:
    folder = ROOT / "examples" / "compose"
    files = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    services = files["compose"]["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in files["compose"]["volumes"] or (folder / source).is_file(), source
    assert (folder / services["server"]["build"]["context"] / "Dockerfile").is_file()
    port = serve.ServerOptions().port
    [scraped] = files["prometheus"]["scrape_configs"][0]["static_configs"]
    assert scraped["targets"] == [f"server:{port}"] and "server" in services
    assert files["prometheus"]["scrape_configs"][0]["authorization"] == {
        "credentials": services["server"]["environment"][serve._API_KEY]
    }
    [source] = files["datasources"]["datasources"]
    assert source["url"].split("/")[2].partition(":")[0] in services
    [provider] = files["dashboards"]["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"])
    assert f"../grafana.json:{home}:ro" in services["grafana"]["volumes"]


def test_options_of_the_composed_server_are_valid(monkeypatch) -> None:
    services = yaml.safe_load((ROOT / "examples" / "compose" / "compose.yaml").read_text())
    server = services["services"]["server"]
    for name, value in server["environment"].items():
        monkeypatch.setenv(name, value)
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert entry is not None
    _, _, module, *options = json.loads(entry[1])
    assert module == "paged_jax.serve"
    serve.server_options(serve.make_parser().parse_args([*options, *server.get("command", [])]))


@pytest.mark.slow
def test_image_can_be_built() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("no Docker here")
    subprocess.run([docker, "build", "--tag", "paged-jax-test", "."], cwd=ROOT, check=True)
    command = [docker, "run", "--rm", "paged-jax-test", "--version"]
    assert "paged_jax" in subprocess.run(command, capture_output=True, text=True).stdout
