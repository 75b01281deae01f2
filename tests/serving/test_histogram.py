"""Bulk histograms hold every observation, as Prometheus counts them, whenever they are taken."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_backend.serving.histogram import Histogram

BOUNDS = [0.005, 0.1, 1.0, 8192.0]
LABELS = ["0.005", "0.1", "1", "8192", "+Inf"]
values = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 1e5))


@given(st.lists(st.lists(st.tuples(values, st.integers(1, 5)), max_size=20), max_size=5))
def test_every_observation_counts_in_all_buckets_above_it(rounds: list[list[tuple[float, int]]]) -> None:
    histogram = Histogram("h", BOUNDS)
    counters: Counter[tuple[str, str]] = Counter()
    for observations in rounds:
        for value, times in observations:
            histogram.observe(value, times)
        counters.update(dict(histogram.take()))
    seen = [value for observations in rounds for value, times in observations for _ in range(times)]
    for label, bound in zip(LABELS, [*BOUNDS, math.inf], strict=True):
        assert counters["h_bucket", label] == sum(value <= bound for value in seen)
    assert counters["h_count", ""] == len(seen)
    assert counters["h_sum", ""] == pytest.approx(math.fsum(seen))


def test_what_is_published_was_registered_and_does_not_grow_with_the_observations() -> None:
    histogram = Histogram("h", BOUNDS)
    registered = [(name, label) for name, labels in histogram.counters() for label in labels]
    assert registered == [*(("h_bucket", label) for label in LABELS), ("h_sum", ""), ("h_count", "")]
    assert not list(histogram.take())
    for i in range(100_000):
        histogram.observe(i % 10)
    assert [key for key, _ in histogram.take()] == registered
