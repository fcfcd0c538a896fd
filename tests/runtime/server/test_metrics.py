"""Figures for Prometheus."""

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
