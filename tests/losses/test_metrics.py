import numpy as np

from jaxrl.losses import MetricSums, finish_metrics, merge_metrics


def _sums(total, numerator, count, maximum):
    return MetricSums(
        totals={"loss/rl": np.float32(total)},
        means={"entropy/mean": (np.float32(numerator), np.float32(count))},
        maxima={"mismatch/ratio/max": np.float32(maximum)},
    )


def test_totals_add_up_means_divide_once_and_maxima_take_the_largest():
    merged = finish_metrics(merge_metrics(_sums(0.5, 9.0, 9, 1.5), _sums(-0.25, 0.0, 1, 3.0)))
    assert {name: float(value) for name, value in merged.items()} == {
        "loss/rl": 0.25,
        "entropy/mean": np.float32(0.9),
        "mismatch/ratio/max": 3.0,
    }


def test_nothing_measured_is_neutral_and_a_mean_over_nothing_is_zero():
    some, none = _sums(0.5, 2.0, 4, 1.5), _sums(0, 0, 0, 0)
    assert finish_metrics(merge_metrics(some, none)) == finish_metrics(some)
    assert float(finish_metrics(none)["entropy/mean"]) == 0.0
