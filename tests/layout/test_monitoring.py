"""Rules and panels parse, and ask for metrics, labels and values that the service has."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from engine.scheduling.wait_causes import CAUSES
from loraplex.metrics.names import all_metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
SERIES = {series: metric for metric in all_metrics() for series in metric.series}
TARGET_LABELS = {"job", "instance"}
STEPS = ("expr", "lhs", "rhs", "param", "vector_selector")


def _rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def _panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def _queries() -> dict[str, str]:
    found = {f"rule {rule.get('record') or rule['alert']}": rule["expr"] for rule in _rules()}
    for path in DASHBOARDS:
        for panel in _panels(path):
            for target in panel["targets"]:
                name = f"{path.stem}: {panel['title']} {target['refId']}"
                found[name] = target["expr"]
    return found


def _parse(query: str) -> Any:
    plain = query.replace("$__rate_interval", "5m").replace("$adapter", ".*")
    assert "$" not in plain, "a variable that no dashboard has"
    return promql_parser.parse(plain)


def _walk(node: Any) -> Iterator[Any]:
    yield node
    below = [getattr(node, step, None) for step in STEPS]
    for child in chain(below, getattr(node, "args", None) or ()):
        if child is not None:
            yield from _walk(child)


def _selectors(node: Any) -> list[promql_parser.VectorSelector]:
    return [each for each in _walk(node) if isinstance(each, promql_parser.VectorSelector)]


def _recorded() -> dict[str, set[str]]:
    """Names of recording rules, with the labels that they keep."""
    kept: dict[str, set[str]] = {}
    for rule in _rules():
        if "record" in rule:
            by = [
                set(node.modifier.labels)
                for node in _walk(_parse(rule["expr"]))
                if isinstance(node, promql_parser.AggregateExpr)
            ]
            kept[rule["record"]] = set.union(*by) - {"le"}
    return kept


def _labels_of(name: str, recorded: dict[str, set[str]]) -> set[str]:
    if name in recorded:
        return recorded[name]
    metric = SERIES[name]
    return {*metric.labels, *TARGET_LABELS, *(["le"] if name.endswith("_bucket") else [])}


@pytest.mark.parametrize(("name", "query"), _queries().items(), ids=_queries().keys())
def test_a_query_asks_for_metrics_and_labels_that_there_are(name: str, query: str):
    recorded = _recorded()
    tree = _parse(query)
    selectors = _selectors(tree)
    assert selectors, "a query of no metric"
    unknown = {s.name for s in selectors if s.name not in SERIES and s.name not in recorded}
    assert unknown == set()
    for node in _walk(tree):
        if isinstance(node, promql_parser.VectorSelector):
            labels = {matcher.name for matcher in node.matchers.matchers}
            assert labels <= _labels_of(str(node.name), recorded)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            below = (_labels_of(str(s.name), recorded) for s in _selectors(node.expr))
            assert set(node.modifier.labels) <= set().union(*below)


def test_counters_and_histograms_are_asked_for_by_their_rate():
    for name, query in _queries().items():
        inside = {
            str(each.name)
            for node in _walk(_parse(query))
            if isinstance(node, promql_parser.MatrixSelector)
            for each in [node.vector_selector]
        }
        for selector in _selectors(_parse(query)):
            metric = SERIES.get(str(selector.name))
            if metric is not None and metric.kind != "gauge":
                assert str(selector.name) in inside, f"{name}: {selector.name} without a range"


def test_causes_that_a_query_names_are_causes():
    named = chain.from_iterable(re.findall(r'cause=~?"([^"]*)"', q) for q in _queries().values())
    causes = {cause for pattern in named for cause in pattern.split("|")}
    assert causes and causes <= set(CAUSES)


def test_rules_are_such_as_prometheus_reads():
    """Where there is a `promtool`, it says so too."""
    for rule in _rules():
        assert ("record" in rule) != ("alert" in rule)
        assert rule.keys() <= {"record", "alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", rule.get("record") or rule["alert"])
        assert re.fullmatch(r"([0-9]+(ms|[smhdwy]))+", rule.get("for", "0s"))
        for text in rule.get("annotations", {}).values():
            assert text.count("{{") == text.count("}}") and "\n" not in text.strip()
    if promtool := shutil.which("promtool"):
        for kind, name in (("rules", "rules.yaml"), ("config", "prometheus.yaml")):
            command = [promtool, "check", kind, str(DEPLOY / "prometheus" / name)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_is_wrong_and_what_to_do():
    alerts = [rule for rule in _rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 5
    for rule in alerts:
        assert rule["labels"]["severity"] in {"page", "warn"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["for"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_of_a_dashboard_do_not_overlap_and_name_its_data_source(path: Path):
    taken: set[tuple[int, int]] = set()
    for panel in _panels(path):
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"


def test_what_is_composed_mounts_files_that_there_are_and_pins_its_images():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) >= {"loraplex", "postgres", "redis", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["image"] == "loraplex" or re.search(r":v?\d", service["image"]), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume


def test_what_is_composed_can_be_scraped_where_the_service_serves_metrics():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    command = services["loraplex"]["command"]
    port = command[command.index("--metrics-port") + 1]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    targets = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == [f"127.0.0.1:{port}"]
    assert services["prometheus"]["network_mode"] == "service:loraplex"
    assert [(DEPLOY / "prometheus" / name).exists() for name in scraped["rule_files"]] == [True]
