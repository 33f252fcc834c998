"""The curriculum: the numbers of the shared cases, what moves a probability and what does not, and how draws follow from them."""

import json
import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.tasks import CurriculumTasksConfig
from jaxrl.tasks import CurriculumSampler, UniformSampler, build_task_sampler, signal_of

CASES = json.loads((Path(__file__).parents[1] / "golden" / "tasks" / "curriculum_cases.json").read_text())
"""Closed-form decayed sums and binomial tails, from an implementation that was written apart from this package."""
fast = settings(max_examples=25, deadline=None)

rewards_of_a_group = st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=4)
groups = st.lists(st.tuples(st.sampled_from("abc"), rewards_of_a_group), max_size=12)


def tiers(*keys: object, size: int = 1) -> list[dict[str, Any]]:
    """Return `size` tasks of each difficulty, named by it and a number."""
    return [{"id": f"{key}-{n}", "difficulty": key} for key in keys for n in range(size)]


def per_key(sampler: CurriculumSampler, name: str) -> dict[str, float]:
    return {
        metric.split("/")[1]: value
        for metric, value in sampler.metrics().items()
        if metric.startswith("key/") and metric.endswith(f"/{name}")
    }


def told(sampler: CurriculumSampler, happened: list, rewards: list | None = None) -> CurriculumSampler:
    for key, own in happened:
        sampler.update({"id": f"{key}-0"}, rewards or own)
    return sampler


def chi_square(counts: Counter, probs: dict[str, float], num: int) -> float:
    return sum((counts[key] - num * prob) ** 2 / (num * prob) for key, prob in probs.items())


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_rates_signals_probabilities_and_counters_are_those_of_the_cases(case: dict) -> None:
    config, expected = case["config"], case["expected"]
    sampler = CurriculumSampler(
        [{"id": key, "group": key} for key in case["keys"]],
        config["group_size"],
        key="group",
        gamma=config["gamma"],
        eps=config["eps"],
        success_threshold=config["success_threshold"],
    )
    for update in case["updates"]:
        sampler.update({"id": update["key"]}, update["rewards"], update.get("costs"))
    assert config["prior_a"] == config["prior_b"] == 1 and config["signal_tol"] == 0, "what a sampler has no settings for"
    metrics, saved = sampler.metrics(), sampler.state_dict()["stats"]
    for key, numbers in expected["per_key"].items():
        for name in ("p_hat", "signal", "prob"):
            assert metrics[f"key/{key}/{name}"] == pytest.approx(numbers[name], rel=1e-12, abs=0), (key, name)
        if key in saved:
            assert (saved[key]["successes"], saved[key]["failures"]) == pytest.approx((numbers["s"], numbers["f"]), rel=1e-12)
        else:
            assert numbers["n_obs"] == 0
    for name, value in expected["counters"].items():
        assert metrics.get(name) == (value if value is None else pytest.approx(value, rel=1e-12)), name
    for key, mean in expected.get("mean_cost_per_key", dict.fromkeys(case["keys"])).items():
        cost = metrics.get(f"key/{key}/cost")
        assert (cost if cost is None else cost / metrics[f"key/{key}/episodes"]) == mean


@given(st.floats(0, 1), st.integers(1, 64))
def test_the_signal_is_symmetric_largest_at_a_half_and_in_its_range(p: float, size: int) -> None:
    signal, highest = signal_of(p, size), 1 - 2.0 ** (1 - size)
    assert 0 <= signal <= highest * (1 + 1e-15)
    assert signal == pytest.approx(signal_of(1 - p, size), abs=2e-14)
    assert signal == pytest.approx(1 - p**size - (1 - p) ** size, abs=1e-14)
    assert signal_of(0.5, size) == pytest.approx(highest, rel=1e-15)


def test_the_signal_of_a_group_of_one_is_exactly_zero_and_that_of_rare_successes_does_not_cancel() -> None:
    assert [signal_of(p, 1) for p in (0.0, 0.1, 0.3, 1 / 3, 1.0)] == [0.0] * 5
    assert signal_of(1e-18, 8) == pytest.approx(8e-18, rel=1e-12)
    assert signal_of(0.0, 8) == signal_of(1.0, 8) == 0.0
    for arguments in ((1.5, 8), (-0.1, 8), (math.nan, 8), (0.5, 0)):
        with pytest.raises(ValueError, match="a rate from 0 to 1"):
            signal_of(*arguments)


@fast
@given(groups, st.sampled_from(["beta", "variance"]), st.sampled_from([0.0, 0.05]))
def test_probabilities_sum_to_one_and_none_is_zero(happened: list, signal: str, eps: float) -> None:
    sampler = told(CurriculumSampler(tiers(*"abc"), 4, eps=eps, signal=signal), happened)  # type: ignore[arg-type]
    assert sum(per_key(sampler, "prob").values()) == pytest.approx(1)
    assert min(per_key(sampler, "prob").values()) > 0
    assert all(0 < rate < 1 for rate in per_key(sampler, "p_hat").values())


@fast
@given(groups, st.integers(1, 8))
def test_a_group_without_a_reward_changes_no_rate_and_no_probability_and_is_counted(happened: list, size: int) -> None:
    sampler = told(CurriculumSampler(tiers(*"abc"), 4), happened)
    before = sampler.metrics()
    sampler.update({"id": "a-0"}, [None] * size)
    after = sampler.metrics()
    assert [after[f"key/{key}/{name}"] for key in "abc" for name in ("p_hat", "prob")] == [
        before[f"key/{key}/{name}"] for key in "abc" for name in ("p_hat", "prob")
    ]
    assert after["key/a/episodes"] == before["key/a/episodes"] + size and after["unscored_groups"] == before["unscored_groups"] + 1


@fast
@given(groups, st.randoms(use_true_random=False))
def test_the_order_of_updates_of_different_keys_does_not_matter(happened: list, random) -> None:  # type: ignore[no-untyped-def]
    keys = [key for key, _ in happened]
    random.shuffle(keys)
    left = {key: iter([group for group in happened if group[0] == key]) for key in "abc"}
    mixed = [next(left[key]) for key in keys]
    one, other = (told(CurriculumSampler(tiers(*"abc"), 4), updates) for updates in (happened, mixed))
    assert one.metrics() == other.metrics() and one.sample(30) == other.sample(30)


def test_the_order_of_updates_of_one_key_matters() -> None:
    first, last = (told(CurriculumSampler(tiers("a"), 2), [("a", rewards) for rewards in order]) for order in ([[1], [0]], [[0], [1]]))
    assert per_key(first, "p_hat")["a"] == pytest.approx(1.9 / 3.9)
    assert per_key(last, "p_hat")["a"] == pytest.approx(2.0 / 3.9)


def test_an_update_of_one_key_leaves_the_rates_of_the_others() -> None:
    sampler = told(CurriculumSampler(tiers(*"ab"), 4), [("a", [1.0, 1.0, 0.0, 0.0]), *[("b", [1.0] * 4)] * 20])
    assert sampler.state_dict()["stats"]["a"]["successes"] == 2.0


def test_a_success_is_a_reward_that_reaches_the_threshold() -> None:
    sampler = told(CurriculumSampler(tiers("a"), 4, success_threshold=0.5, gamma=1.0), [("a", [0.5, 0.49, 1.0, -2.0])])
    assert (sampler.state_dict()["stats"]["a"]["successes"], sampler.state_dict()["stats"]["a"]["failures"]) == (2, 2)


def test_a_group_with_few_rewards_decays_what_was_known_as_a_whole_group_does() -> None:
    sampler = told(CurriculumSampler(tiers("a"), 8), [("a", [1.0] * 8), ("a", [0.0] + [None] * 7)])
    assert sampler.state_dict()["stats"]["a"]["successes"] == pytest.approx(7.2)


def test_the_share_of_a_solved_key_falls_to_its_floor_and_stays_above_zero() -> None:
    sampler = told(CurriculumSampler(tiers(*range(5)), 8), [(0, [1.0] * 8)] * 200)
    # gamma 0.9: 80 successes; p = 81/82, signal 0.0935.
    assert per_key(sampler, "prob")["0"] == pytest.approx((0.0934968 + 0.05) / (0.0934968 + 4 * 0.9921875 + 5 * 0.05), rel=1e-5)


@pytest.mark.parametrize("happened", [[], [("0", [1.0] * 8)] * 5 + [("3", [0.0] * 8)] * 2 + [("1", [1.0, 0.0])]])
def test_draws_follow_the_probabilities(happened: list) -> None:
    sampler = told(CurriculumSampler(tiers(*range(5), size=3), 8, rng_seed=7), happened)
    counts = Counter(str(task["difficulty"]) for task in sampler.sample(20_000))
    # 4 degrees of freedom: 18.5 is exceeded once in a thousand seeds.
    assert chi_square(counts, per_key(sampler, "prob"), 20_000) < 18.5


def test_the_share_of_a_key_does_not_depend_on_how_many_tasks_it_has() -> None:
    tasks = tiers("small", size=1) + tiers("large", size=99)
    sampler = CurriculumSampler(tasks, 8, rng_seed=3)
    assert per_key(sampler, "prob") == {"small": 0.5, "large": 0.5}
    counts = Counter(task["difficulty"] for task in sampler.sample(4000))
    assert chi_square(counts, {"small": 0.5, "large": 0.5}, 4000) < 10.8


@fast
@given(st.integers(1, 6), st.integers(0, 2**40), groups)
def test_no_task_of_a_key_comes_again_before_all_others_have_come(size: int, rng_seed: int, happened: list) -> None:
    sampler = CurriculumSampler(tiers(*"abc", size=size), 4, rng_seed=rng_seed)
    drawn = sampler.sample(20) + told(sampler, happened).sample(60)
    for key in "abc":
        own = [task["id"] for task in drawn if task["difficulty"] == key]
        for start in range(0, len(own), size):
            assert len(set(own[start : start + size])) == len(own[start : start + size])


def test_orders_differ_between_keys_rounds_and_seeds() -> None:
    def orders(rng_seed: int) -> list[list[str]]:
        drawn = CurriculumSampler(tiers(*"ab", size=9), 4, rng_seed=rng_seed).sample(120)
        own = [[task["id"].split("-")[1] for task in drawn if task["difficulty"] == key] for key in "ab"]
        return [own[0][:9], own[0][9:18], own[1][:9], own[1][9:18]]

    seen = orders(1) + orders(2)
    assert len({tuple(order) for order in seen}) == len(seen) and orders(1) == orders(1)


def test_updates_do_not_shift_the_order_inside_a_key() -> None:
    quiet, busy = (CurriculumSampler(tiers(*"ab", size=7), 4, rng_seed=11) for _ in range(2))
    told(busy, [("a", [1.0] * 4)] * 9)
    drawn, other = quiet.sample(80), busy.sample(80)
    assert drawn != other
    for key in "ab":
        order, shifted = ([task["id"] for task in draws if task["difficulty"] == key][:14] for draws in (drawn, other))
        assert order == shifted


def test_by_variance_a_key_is_worth_the_share_of_its_groups_whose_rewards_differ() -> None:
    sampler = CurriculumSampler(tiers(*"abc"), 4, signal="variance", signal_tolerance=0.1, gamma=0.5, eps=0.0)
    told(sampler, [("a", [0.5, 0.7, 0.5, 0.5]), ("a", [0.5, 0.59, 0.5, 0.5]), ("b", [0.2, 0.9, None, None]), ("b", [0.4, None])])
    # a: varied 0.5 of 1.5; b: 1 of 1, and a group with a single reward says nothing of variance; c is not known.
    assert per_key(sampler, "signal") == pytest.approx({"a": 1.5 / 3.5, "b": 2 / 3, "c": 0.5})
    total = 1.5 / 3.5 + 2 / 3 + 0.5
    assert per_key(sampler, "prob")["b"] == pytest.approx(2 / 3 / total)
    assert sampler.metrics()["signal_groups"] == 3, "counted alike by every sampler: rewards that are not all equal"


def test_rewards_that_differ_by_just_the_tolerance_are_equal() -> None:
    wide, exact = (CurriculumSampler(tiers("a"), 4, signal="variance", signal_tolerance=tolerance) for tolerance in (0.25, 0.0))
    for sampler, rewards in ((wide, [0.5, 0.75]), (exact, [0.5, 0.5])):
        assert per_key(told(sampler, [("a", rewards)]), "signal")["a"] == 1 / 3


def test_keys_by_id_draw_a_task_that_never_gets_a_reward_less_and_less_until_it_gets_one() -> None:
    sampler = CurriculumSampler([{"id": name} for name in "abcde"], 8, key="id")
    for name in "bcde":
        for _ in range(100):
            sampler.update({"id": name}, [1.0] * 8)
    # A solved task weighs 0.0935 + 0.05. Task `a` would keep 0.992 + 0.05, 64 % of all draws.
    weights = []
    for _ in range(15):
        sampler.update({"id": "a"}, [None] * 8)
        weights.append(per_key(sampler, "prob")["a"] / per_key(sampler, "prob")["b"] * (0.0934968 + 0.05))
    halvings = [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10]
    assert weights == pytest.approx([0.9921875 * 0.5**n + 0.05 for n in halvings], rel=1e-4)
    assert per_key(sampler, "prob")["a"] < per_key(sampler, "prob")["b"]
    sampler.update({"id": "a"}, [1.0] + [None] * 7)
    assert per_key(sampler, "prob")["a"] > 0.6


def test_a_key_of_many_tasks_that_never_gets_a_reward_keeps_its_share_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    sampler = CurriculumSampler(tiers(*"ab", size=3), 8)
    with caplog.at_level(logging.WARNING):
        told(sampler, [("a", [None] * 8)] * 25)
    assert per_key(sampler, "prob") == {"a": 0.5, "b": 0.5}
    assert len(caplog.messages) == 1 and "none of the last 10 groups of difficulty 'a' had a reward" in caplog.text


def test_many_keys_share_metrics_beyond_the_first_32() -> None:
    sampler = CurriculumSampler([{"id": str(n)} for n in range(40)], 8, key="id")
    sampler.update({"id": "39"}, [1.0] * 8, [2.0] * 8)
    sampler.update({"id": "1"}, [0.0] * 4, [3.0] * 4)
    metrics = sampler.metrics()
    assert metrics["key/1/episodes"] == 4 and metrics["key/1/cost"] == 12
    assert list(per_key(sampler, "prob")) == [str(n) for n in range(32)]
    assert metrics["others/episodes"] == 8 and metrics["others/cost"] == 16 and "key/0/cost" not in metrics
    assert metrics["others/p_hat"] == pytest.approx((7 * 0.5 + 0.9) / 8)
    assert metrics["others/signal"] == pytest.approx((7 * 0.9921875 + 0.56953278) / 8)
    assert metrics["others/prob"] + sum(per_key(sampler, "prob").values()) == pytest.approx(1)
    assert not any(name.startswith("others/") for name in CurriculumSampler(tiers(*range(32)), 8).metrics())


def test_a_state_names_only_what_was_touched() -> None:
    sampler = CurriculumSampler([{"id": str(n)} for n in range(1000)], 8, key="id")
    drawn = sampler.sample(3)
    assert set(sampler.state_dict()["stats"]) == {task["id"] for task in drawn}


@pytest.mark.parametrize("stats", [[], {"z": {}}, {"a": {"drawn": 1}}, {"a": None}], ids=str)
def test_a_state_without_what_it_should_hold_is_refused_and_changes_nothing(stats: object) -> None:
    sampler = told(CurriculumSampler(tiers(*"ab"), 4), [("a", [1.0, 0.0])])
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        sampler.load_state_dict({**before, "stats": stats})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    ("name", "value"), [("drawn", -1), ("unscored", True), ("episodes", 0.5), ("successes", -1.0), ("varied", math.nan), ("cost", "1")]
)
def test_numbers_that_cannot_be_are_refused_and_change_nothing(name: str, value: object) -> None:
    sampler = told(CurriculumSampler(tiers(*"ab"), 4), [("a", [1.0, 0.0]), ("b", [1.0, 0.0])])
    state = sampler.state_dict()
    before = told(sampler, [("a", [1.0])]).state_dict()
    with pytest.raises(ValueError, match=f"{name!r} of key 'b' is"):
        sampler.load_state_dict({**state, "stats": {**state["stats"], "b": {**state["stats"]["b"], name: value}}})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    ("setting", "value"),
    [("group_size", 5), ("gamma", 0.8), ("eps", 0.1), ("success_threshold", 0.5), ("signal", "variance"), ("rng_seed", 1), ("key", "id"),
     ("key", lambda task: "x")],
)  # fmt: skip
def test_the_state_of_other_settings_is_refused_and_changes_nothing(setting: str, value: object) -> None:
    sampler = CurriculumSampler(tiers(*"ab"), 4)
    arguments: dict[str, Any] = {"group_size": 4, setting: value}
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="of another task sampler"):
        sampler.load_state_dict(told(CurriculumSampler(tiers(*"ab"), **arguments), [("a", [1.0])]).state_dict())
    assert sampler.state_dict() == before


def test_a_function_that_makes_other_keys_of_the_same_tasks_is_another_sampler() -> None:
    by_first, by_last = (CurriculumSampler(tiers(*"ab", size=2), 4, key=lambda task, at=at: task["id"][at]) for at in (0, -1))
    assert list(per_key(by_first, "prob")) == ["a", "b"] and list(per_key(by_last, "prob")) == ["0", "1"]
    with pytest.raises(ValueError, match="'keys' is"):
        by_first.load_state_dict(by_last.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 0}, "group_size"),
        ({"group_size": 8.0}, "group_size"),
        ({"group_size": True}, "group_size"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 1.1}, "gamma"),
        ({"gamma": math.nan}, "gamma"),
        ({"eps": -0.1}, "eps"),
        ({"eps": math.inf}, "eps"),
        ({"success_threshold": math.nan}, "success_threshold"),
        ({"signal": "cost"}, "'beta' or 'variance'"),
        ({"signal_tolerance": 0.1}, "for `signal`='variance' alone"),
        ({"signal": "variance", "signal_tolerance": -0.1}, ">= 0"),
        ({"rng_seed": -1}, "rng_seed"),
        ({"rng_seed": 0.5}, "rng_seed"),
        ({"key": "tier"}, "one of difficulty, group, id"),
        ({"group_size": 1, "eps": 0.0}, "no key has any weight"),
        ({"group_size": 1, "eps": 0.0, "signal": "variance"}, "no key has any weight"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CurriculumSampler(tiers("a"), **{"group_size": 8, **arguments})


def test_there_is_no_place_for_a_cost_in_the_settings() -> None:
    with pytest.raises(TypeError, match="cost"):
        CurriculumSampler(tiers("a"), 8, cost=len)  # type: ignore[call-arg]


@pytest.mark.parametrize("signal", ["beta", "variance"])
def test_in_groups_of_one_every_key_is_drawn_equally_often_and_that_is_said(signal: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sampler = told(CurriculumSampler(tiers(*"ab"), 1, signal=signal), [("a", [1.0])] * 9)
    assert per_key(sampler, "prob") == {"a": 0.5, "b": 0.5} and per_key(sampler, "signal") == {"a": 0.0, "b": 0.0}
    assert "a group of one never carries a signal" in caplog.text


def test_a_config_builds_its_curriculum() -> None:
    config = CurriculumTasksConfig(key="group", gamma=0.5, eps=0.1, signal="variance", signal_tolerance=0.2)
    tasks = [{"id": name, "group": name} for name in "ab"]
    built = build_task_sampler(config, tasks, 9, group_size=6, success_threshold=0.7)
    state = built.state_dict()
    assert {name: state[name] for name in ("type", "key", "group_size", "rng_seed", "gamma", "eps", "success_threshold", "signal",
                                           "signal_tolerance")} == {
        "type": "curriculum", "key": "group", "group_size": 6, "rng_seed": 9, "gamma": 0.5, "eps": 0.1, "success_threshold": 0.7,
        "signal": "variance", "signal_tolerance": 0.2,
    }  # fmt: skip
    # Any other sampler may take its place, and it theirs, but not their state.
    with pytest.raises(ValueError, match="'type' is 'curriculum'"):
        UniformSampler(tasks).load_state_dict(state)


def test_settings_rewards_and_costs_may_be_numpys_and_the_state_is_json_all_the_same() -> None:
    tasks = [{"id": str(d), "difficulty": d} for d in (1, 2)]
    plain = CurriculumSampler(tasks, 4, gamma=0.5, success_threshold=0.25)
    numpys = CurriculumSampler(tasks, 4, gamma=np.float32(0.5), success_threshold=np.float32(0.25))
    plain.update(tasks[0], [1.0, 0.0, None, 1.0], [3.0, 1.0, 2.0, 0.5])
    numpys.update(tasks[0], np.array([1.0, 0.0, np.nan, 1.0]), np.array([3, 1, 2, 0.5], np.float32))
    plain.update(tasks[1], [1.0, 0.0], [1.0, 2.0])
    numpys.update(tasks[1], [True, np.int64(0)], [True, np.int64(2)])
    assert json.loads(json.dumps(numpys.state_dict(), allow_nan=False)) == plain.state_dict()
    assert numpys.metrics() == plain.metrics()
