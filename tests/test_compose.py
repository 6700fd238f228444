"""docker-compose.yml and what it mounts: valid, pinned, without a secret, and loadable by the processes it starts."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.config import AgentConfig, ServerConfig, load

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker-compose.yml"
DEPLOY = ROOT / "deploy"


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return loaded


def composer() -> list[str] | None:
    """The command that checks a compose file, where there is one."""
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return [docker, "compose"]
    alone = shutil.which("docker-compose")
    return [alone] if alone else None


@pytest.mark.parametrize("password", ["", "secret"])
def test_compose_itself_accepts_the_file_when_the_password_is_set(password: str) -> None:
    command = composer()
    if command is None:
        pytest.skip("neither `docker compose` nor `docker-compose` is installed")
    environment = {key: value for key, value in os.environ.items() if key != "POSTGRES_PASSWORD"}
    if password:
        environment["POSTGRES_PASSWORD"] = password
    checked = subprocess.run(
        [*command, "-f", str(COMPOSE), "config"], capture_output=True, text=True, env=environment, check=False
    )
    assert (checked.returncode == 0) is bool(password), checked.stderr
    assert password or "set POSTGRES_PASSWORD" in checked.stderr


def test_every_part_of_production_is_there() -> None:
    assert set(compose()["services"]) == {
        "postgresql",
        "temporal-schema",
        "temporal",
        "temporal-namespace",
        "temporal-ui",
        "otel-collector",
        "jaeger",
        "prometheus",
        "grafana",
        "worker",
        "gateway",
        "agent",
    }


def test_images_are_pinned_and_what_a_service_waits_for_exists() -> None:
    services = compose()["services"]
    for name, service in services.items():
        tag = service["image"].partition(":")[2]
        assert tag, f"{name}: an image without a tag is another one tomorrow"
        assert tag != "latest", name
        waits = service.get("depends_on", {})
        for other in waits:
            assert other in services, f"{name} waits for {other}"
            if isinstance(waits, dict) and waits[other]["condition"] == "service_healthy":
                assert "healthcheck" in services[other], f"{name} waits for the health of {other}"


def test_ports_are_open_on_this_machine_only_unless_asked() -> None:
    ports = [port for service in compose()["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("${LLMGW_BIND:-127.0.0.1}:") for port in ports)


def test_the_file_holds_no_secret() -> None:
    for key, value in re.findall(r"^\s+(\w*(?:PASSWORD|PWD|TOKEN|KEY)\w*): (.+)$", COMPOSE.read_text(), re.MULTILINE):
        assert value.startswith("${POSTGRES_PASSWORD:?"), f"{key} is written out"


def test_mounted_files_and_named_volumes_exist() -> None:
    document = compose()
    for name, service in document["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), f"{name} mounts {source}"
            else:
                assert source in document["volumes"], f"{name} mounts {source}"


def test_the_settings_it_mounts_are_valid_and_agree_with_it() -> None:
    server = load(DEPLOY / "server.yaml", ServerConfig)
    agent = load(DEPLOY / "agent.yaml", AgentConfig)
    services = compose()["services"]
    assert (server.gateway.host, server.gateway.port) == ("0.0.0.0", 8080)
    assert agent.cell == server.cell
    assert agent.address == services["agent"]["hostname"]
    for name in ("worker", "agent"):
        assert any(volume.split(":")[1] == str(server.mirror.path) for volume in services[name]["volumes"]), name
    assert any(volume.split(":")[1] == str(agent.data) for volume in services["agent"]["volumes"])
    assert server.tracing.endpoint == agent.tracing.endpoint == "http://otel-collector:4317"


def test_the_collector_hands_on_what_it_takes() -> None:
    collector = yaml.safe_load((DEPLOY / "otel-collector.yaml").read_text())
    pipeline = collector["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert pipeline[kind]
        assert set(pipeline[kind]) <= set(collector[kind])
    assert pipeline["processors"][0] == "memory_limiter"


def test_the_image_holds_what_its_containers_run() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert "--require-hashes" in dockerfile
    assert "\nUSER " in dockerfile
    copied = set(re.findall(r"^COPY (?!requirements)(.+) \S+$", dockerfile, re.MULTILINE))
    for package in ("fleet", "runtime", "activities", "workflows", "agent", "gateway"):
        assert package in copied
        assert (ROOT / package).is_dir()
    assert "worker.py LICENSE" in copied


@pytest.mark.parametrize("script", sorted((DEPLOY / "temporal").glob("*.sh")), ids=lambda path: path.name)
def test_the_scripts_are_shell(script: Path) -> None:
    shell = shutil.which("sh")
    assert shell
    assert subprocess.run([shell, "-n", str(script)], check=False).returncode == 0
