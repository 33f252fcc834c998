import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "measure.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_measure", PATH)
assert SPEC is not None and SPEC.loader is not None
measure = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = measure
SPEC.loader.exec_module(measure)


def test_cases_are_timed_in_turn_and_warm_ups_are_left_out():
    order = []

    def case(name: str, seconds: float) -> Any:
        return measure.Case(name, lambda: order.append(name) or seconds, 10.0, "token")

    figures = measure.interleave([case("a", 2.0), case("b", 4.0)], repeats=2)
    assert order == ["a", "b"] * 3
    assert figures["a"].rates == [5.0, 5.0]
    assert figures["b"].median == 2.5


def test_a_ratio_is_the_median_over_rounds_and_not_the_ratio_of_medians(tmp_path):
    report = measure.Report("toy", settings={}, packages=())
    report.figures = {
        "ours": measure.Figure("ours", "token", rates=[2.0, 30.0, 8.0], seconds=[1.0] * 3),
        "theirs": measure.Figure("theirs", "token", rates=[1.0, 10.0, 2.0], seconds=[1.0] * 3),
    }
    report.ratio("ours / theirs", "ours", "theirs")
    assert report.ratios == {"ours / theirs": 3.0}
    written = json.loads(report.publish(tmp_path / "toy.json").read_text())
    assert written["figures"]["ours"] == {"unit": "token/s", "median": 8.0, "min": 2.0, "max": 30.0, "n": 3, "seconds": [1.0] * 3}


def test_a_peer_answers_line_by_line_and_its_death_is_told(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "print(json.dumps({'version': 1}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    if request['x'] == 0: sys.exit(3)\n"
        "    print(json.dumps({'double': 2 * request['x']}), flush=True)\n"
    )
    peer = measure.Peer(script, python=sys.executable)
    assert peer.hello == {"version": 1}
    assert [peer.call(x=x)["double"] for x in (1, 4)] == [2, 8]
    with pytest.raises(SystemExit, match="ended with code 3"):
        peer.call(x=0)
    peer.close()
