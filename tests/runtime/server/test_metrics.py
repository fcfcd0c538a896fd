"""Figures for Prometheus."""

import re
from dataclasses import fields
from importlib.metadata import version
from platform import python_version

from pi_runtime.engine.stats import EngineStats
from pi_runtime.execution.executor import DiskStats
from pi_runtime.server.metrics import Histogram, Metrics


def test_a_histogram_counts_all_values_up_to_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value, times in ((0.05, 1), (0.1, 2), (0.5, 1), (7.0, 3)):
        histogram.count(value, times)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="0.1"} 3',
        'x_bucket{le="1.0"} 4',
        'x_bucket{le="+Inf"} 7',
        f"x_sum {0.05 + 0.1 * 2 + 0.5 + 7.0 * 3}",
        "x_count 7",
    ]


def test_before_the_engine_is_there_its_figures_are_left_out() -> None:
    metrics = Metrics()
    metrics.requests["/health", 503] += 1
    text = metrics.text(None, slots=8, open_requests=0)
    assert "pi_slots 8\n" in text
    assert 'pi_http_requests_total{route="/health",status="503"} 1\n' in text
    assert "pi_running_answers" not in text
    assert re.search(r"^# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds \d+\.\d+$", text, re.M)
    assert f'pi_build_info{{version="{version("pi-toolchain")}",python="{python_version()}"}} 1\n' in text


def test_what_came_from_disk_is_shown_where_something_can() -> None:
    none = {field.name: 0 for field in fields(EngineStats)} | {"busy_s": 0.0}
    disk = DiskStats(tokens=4, seconds=2.0, seconds_waited=0.5, hits=90, misses=10, bytes_read=4096)
    text = Metrics().text(EngineStats(**{**none, "disk": disk}), slots=1, open_requests=0)
    for line in (
        "pi_disk_tokens_total 4",
        "pi_disk_seconds_total 2.0",
        "pi_disk_wait_seconds_total 0.5",
        "pi_disk_row_hits_total 90",
        "pi_disk_row_misses_total 10",
        "pi_disk_read_bytes_total 4096",
    ):
        assert f"{line}\n" in text
    assert "pi_disk" not in Metrics().text(EngineStats(**{**none, "disk": None}), slots=1, open_requests=0)
