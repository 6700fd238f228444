"""deploy/'s Prometheus and Grafana: valid, about numbers that there are, and joined to each other and to compose.

Grafana itself is not run here: its own reader takes the dashboard, what it needs beside that is checked field by
field, and the expressions by Prometheus's promtool where there is one.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from fleet.metrics import METRICS
from runtime.config import AgentConfig, ServerConfig, load

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "llmgw.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
PROMTOOL = os.environ.get("LLMGW_TEST_PROMTOOL") or shutil.which("promtool")


def named(expression: str) -> set[str]:
    """The metrics of an expression, labels left out."""
    bare = re.sub(r"by \([^)]*\)|\{[^}]*\}|\[[^]]*\]", " ", expression)
    return set(re.findall(r"\b(?:llmgw|gen_ai|http|temporal|otel)_\w+", bare))


def test_it_has_what_grafana_needs_to_load_it() -> None:
    assert DASHBOARD["uid"] == DASHBOARD["title"] == "llmgw"
    assert DASHBOARD["schemaVersion"] >= 39
    [variable] = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["type"] in ("row", "stat", "timeseries")
        assert set(panel["gridPos"]) == {"h", "w", "x", "y"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == ["A", "B"][: len(panel["targets"])]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_each_number_of_ours_that_it_shows_is_one_that_we_measure_and_most_are_shown() -> None:
    measured = {name: metric for metric in METRICS for name in metric.scraped}
    shown = {name for expression in EXPRESSIONS for name in named(expression)}
    assert {name for name in shown if not name.startswith("temporal_")} <= measured.keys()
    assert {measured[name].name for name in shown & measured.keys()} == {metric.name for metric in METRICS}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_labels_are_those_of_the_number(expression: str) -> None:
    labels = {label.replace(".", "_") for metric in METRICS for label in metric.labels}
    used = set(re.findall(r"\{(\w+)", expression))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        used |= {label.strip() for label in group.split(",")}
    assert used <= labels | {"le", "task_queue", "operation"}


def test_grafanas_own_reader_finds_all_of_it() -> None:
    """By the types that Grafana makes of its schema: nothing is lost on the way in, and only defaults are added."""
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(DASHBOARD)))
    assert lost(DASHBOARD, read) == []


def lost(written: Any, read: Any, place: str = "") -> list[str]:
    """What stands in one and not, or not so, in the other."""
    if isinstance(written, dict) and isinstance(read, dict):
        gone = [f"{place}/{key}" for key in written.keys() - read.keys()]
        both = written.keys() & read.keys()
        return gone + [one for key in both for one in lost(written[key], read[key], f"{place}/{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [one for at, pair in enumerate(zip(written, read, strict=True)) for one in lost(*pair, f"{place}/{at}")]
    return [] if written == read else [place]


def test_promtool_takes_every_expression(tmp_path: Path) -> None:
    if not PROMTOOL:
        pytest.skip("promtool is not installed: Debian's package `prometheus` has it")
    rules = [
        {"record": f"check:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run([PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    config = [PROMTOOL, "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml")]
    checked = subprocess.run(config, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_prometheus_reads_the_pages_where_the_containers_show_them() -> None:
    server, agent = load(DEPLOY / "server.yaml", ServerConfig), load(DEPLOY / "agent.yaml", AgentConfig)
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert [target for group in job["static_configs"] for target in group["targets"]] == [
        f"worker:{server.metrics.port}",
        f"gateway:{server.gateway.metrics_port}",
        f"agent:{agent.metrics.port}",
    ]
    assert server.metrics.enabled
    assert agent.metrics.enabled
    assert {server.metrics.host, agent.metrics.host} == {"0.0.0.0"}


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    [provider] = yaml.safe_load((provisioning / "dashboards" / "llmgw.yaml").read_text())["providers"]
    grafana = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())["services"]["grafana"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in grafana["volumes"]}
    assert mounted[f"{provider['options']['path']}/llmgw.json"] == "./deploy/grafana/llmgw.json"
    assert mounted["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
