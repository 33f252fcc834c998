"""`jaxrl.monitors.curriculum`: a curriculum in one line."""

from jaxrl.monitors.curriculum import MAX_KINDS, kinds_in_words


def test_every_environment_with_kinds_of_tasks_has_a_line_and_no_other() -> None:
    values = {
        "tasks/sums/groups": 4.0,
        "tasks/words/groups": 4.0,
        "tasks/words/gate/advantage_range/frac": 0.5,
        "tasks/sums/key/short/sums/prob": 0.25,
        "tasks/sums/key/short/sums/p_hat": 0.5,
        "tasks/sums/key/long/prob": 0.7,
        "tasks/sums/others/prob": 0.05,
        "tasks/games/pool/hard/prob": 1.0,
        "tasks/odd/key/a/p_hat": 0.5,
    }
    assert kinds_in_words(values) == [
        "tasks of sums  short/sums: 25% of draws, 0.50 solved; long: 70%; others: 5%",
        "tasks of games  hard: 100% of draws",
    ]


def test_of_many_kinds_those_with_the_largest_shares_are_shown_in_their_order() -> None:
    values = {f"tasks/sums/key/{key}/prob": 0.01 * (key % 10) for key in range(20)}
    (line,) = kinds_in_words(values)
    shown = [int(part.split(":")[0].removeprefix("tasks of sums")) for part in line.split("; ")[:MAX_KINDS]]
    assert shown == [6, 7, 8, 9, 16, 17, 18, 19] and line.endswith("; 12 more")
