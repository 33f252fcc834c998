"""`jaxrl.monitors.rollouts`: a rollout as a JSON value."""

import re
from pathlib import Path

import numpy as np
import pytest

from jaxrl.config.monitors import MonitorsConfig
from jaxrl.monitors import MonitorSet
from jaxrl.monitors.rollouts import conversation_record, rollout_record
from jaxrl.monitors.tokens import ORIGINS, REASONS
from jaxrl.types import Boundary, Bucket, Failure, Node, Rollout, Task, ToolCall, Training, TrainingSample
from tests.builders import make_node, make_rollout

TASK = Task(env_name="add", id="t1", spec={"id": "t1", "question": "1+1="})


def question() -> Node:
    return Node(parent=None, role="user", content="1+1=", token_ids=np.array([5, 6], np.int32))


def reply(parent: int, tokens: list[int], version: int, text: str = "2") -> Node:
    num = len(tokens)
    return Node(
        parent=parent, role="assistant", content=text, token_ids=np.array([9, *tokens], np.int32), sampled=True, num_sampled=num,
        logprobs=np.full(num, -0.5, np.float32), versions=np.full(num, version, np.int32), finish_reason="stop",
    )  # fmt: skip


def sample(nodes: list[Node]) -> TrainingSample:
    token_ids = np.concatenate([node.token_ids for node in nodes])
    mask = np.concatenate([np.arange(len(n.token_ids)) >= len(n.token_ids) - n.num_sampled for n in nodes])
    return TrainingSample(
        token_ids=token_ids, loss_mask=mask, inference_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        temperatures=np.ones(len(token_ids), np.float32), env_name="add",
    )  # fmt: skip


def test_a_trained_rollout_shows_the_task_the_messages_and_every_stream() -> None:
    nodes = [question(), reply(0, [7, 8], version=3)]
    rollout = Rollout(TASK, "g", 1, 4, nodes=nodes, reward=1.0, samples=[sample(nodes)], bucket=Bucket.TRAINED, stop_reason="done")
    rollout.training = Training.APPLIED
    rollout.assign_advantages(0.25)
    rollout.is_frozen = True
    record = rollout_record(12, rollout)
    assert (record["step"], record["env"], record["task"], record["member"]) == (12, "add", {"id": "t1", "question": "1+1="}, 1)
    assert (record["reward"], record["error"], record["bucket"], record["text"]) == (1.0, None, "trained", "2")
    assert record["messages"] == [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert record["samples"] == [
        {
            "nodes": [0, 1],
            "token_ids": [5, 6, 9, 7, 8],
            "loss_mask": [0, 0, 0, 1, 1],
            "versions": [None, None, None, 3, 3],
            "streams": {"inference_logprobs": [None, None, None, -0.5, -0.5], "advantages": [0, 0, 0, 0.25, 0.25]},
            "origin": ["user", "user", "scaffold", "policy", "policy"],
            "why_untrained": ["input", "input", "input", None, None],
            "weights": {"rl": [0, 0, 0, 1, 1]},
        }
    ]


def test_a_failed_rollout_shows_its_error_and_the_tokens_that_it_got_to() -> None:
    rollout = Rollout(TASK, "g", 0, 4, nodes=[question(), reply(0, [7], 2)], failure=Failure(Boundary.ENV, "KeyError", "'x'"))
    rollout.bucket = Bucket.ERRORED
    record = rollout_record(1, rollout)
    assert record["reward"] is None
    assert record["error"] == {"boundary": "env", "type": "KeyError", "message": "'x'"}
    assert record["samples"][0]["token_ids"] == [5, 6, 9, 7]
    assert record["samples"][0]["streams"] == {"inference_logprobs": [None, None, None, -0.5]}


def test_each_branch_is_shown_with_the_sample_that_was_trained_from_it() -> None:
    nodes = [question(), reply(0, [7], 1), reply(0, [8], 2, text="3")]
    rollout = Rollout(TASK, "g", 0, 4, nodes=nodes, reward=0.0, samples=[sample(nodes[:2]), sample([nodes[0], nodes[2]])])
    rollout.samples[1].ce_weights = np.array([0, 0, 0, 2], np.float32)
    record = rollout_record(1, rollout)
    assert [s["token_ids"] for s in record["samples"]] == [[5, 6, 9, 7], [5, 6, 9, 8]]
    assert ["ce_weights" in s["streams"] for s in record["samples"]] == [False, True]
    assert [s["nodes"] for s in record["samples"]] == [[0, 1], [0, 2]]


def test_the_graph_of_a_conversation_is_written_with_its_calls_and_what_a_message_does_not_have_is_left_out() -> None:
    good, bad = ToolCall("c1", "add", {"x": 1}, '{"x": 1}'), ToolCall("c2", "add", None, "{", "the JSON ends too early")
    nodes = [question(), reply(0, [7, 8], 1), Node(1, "tool", "2", np.array([4], np.int32), name="add"), reply(2, [7], 2)]
    nodes[1].tool_calls, nodes[3].source, nodes[2].is_retold = (good, bad), "frozen", True
    nodes[0].is_content = np.array([False, True])
    record = rollout_record(1, Rollout(TASK, "g", 0, 4, nodes=nodes, reward=1.0, turn_rewards=[0.0, 1.0]))
    calls = [
        {"id": "c1", "name": "add", "arguments": {"x": 1}},
        {"id": "c2", "name": "add", "arguments": None, "raw": "{", "error": "the JSON ends too early"},
    ]
    written = {"sampled": True, "finish_reason": "stop"}
    assert record["nodes"] == [
        {"parent": None, "role": "user", "content": "1+1=", "num_tokens": 2, "num_content_tokens": 1},
        {"parent": 0, "role": "assistant", "content": "2", "tool_calls": calls, "num_tokens": 3, "num_sampled": 2} | written,
        {"parent": 1, "role": "tool", "content": "2", "name": "add", "num_tokens": 1, "retold": True},
        {"parent": 2, "role": "assistant", "content": "2", "num_tokens": 2, "num_sampled": 1, "source": "frozen"} | written,
    ]
    assert record["messages"][1:3] == [
        {"role": "assistant", "content": "2", "tool_calls": calls},
        {"role": "tool", "content": "2", "name": "add"},
    ]
    assert record["turn_rewards"] == [0.0, 1.0]


def test_a_rollout_that_failed_before_its_first_token_has_no_branches() -> None:
    record = rollout_record(1, Rollout(TASK, "g", 0, 4, failure=Failure(Boundary.TIMEOUT, "DeadlineError", "late")))
    assert record["samples"] == record["messages"] == record["nodes"] == []


def test_the_document_says_what_each_origin_and_each_reason_means_and_its_program_prints_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([\w<>/]+)` \| (.*) \|$", document, re.MULTILINE))
    assert {(name, meaning) for table in (ORIGINS, REASONS) for name, meaning in table.items()} <= rows
    (program,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    nodes = [question(), reply(0, [7, 8], version=3)]
    rollout = Rollout(TASK, "g", 1, 4, nodes=nodes, reward=1.0, samples=[sample(nodes)], bucket=Bucket.TRAINED, training=Training.APPLIED)
    rollout.assign_advantages(0.25)
    config = MonitorsConfig(terminal=False, plot=False)
    monitors = MonitorSet(tmp_path / "runs" / "quickstart", config, name="run", max_steps=1, decode_token=lambda token_id: f"<{token_id}>")
    monitors.log_rollouts(1, [rollout])
    monitors.close()
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/rollouts.md", "exec"), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed == [["'<5>'", "+0.000", "input"], ["'<6>'", "+0.000", "input"], ["'<9>'", "+0.000", "input"],
                       ["'<7>'", "+0.250"], ["'<8>'", "+0.250"]]  # fmt: skip


def test_messages_are_those_of_the_last_branch() -> None:
    rollout = make_rollout()
    rollout.nodes += [make_node(1, [6]), make_node(2, [7], content="a"), make_node(2, [8], content="b")]
    assert [message["content"] for message in conversation_record(rollout)["messages"]] == ["1 2", "3 4 5", "6", "b"]
    rollout.nodes.append(make_node(None, [9], content="alone"))
    assert conversation_record(rollout)["messages"] == [{"role": "user", "content": "alone"}]
