"""The example for TRL in `docs/evaluation.md` does what it says, on a stand-in for the trainer that calls it."""

import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.config.evals import EvalConfig, EvalParameters
from jaxrl.envs.single_turn import SingleTurnEnvironment

DOCUMENT = Path(__file__).parents[2] / "docs" / "evaluation.md"
EVENTS = ("on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_train_end")
NUM_DIGITS = 4


class TrainerCallback:
    """What `transformers` has callbacks derive from: every event, doing nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in EVENTS:
            return lambda args, state, control, **kwargs: None
        raise AttributeError(name)


class Ids(dict):
    """What a tokenizer returns: arrays by name, which can be moved to a device."""

    def to(self, device: str) -> "Ids":
        assert device == "cpu"
        return self


class Tokenizer:
    """One id per character, padded on the left with 0."""

    def apply_chat_template(self, conversations: list[Any], **options: Any) -> Ids:
        assert options == {"add_generation_prompt": True, "padding": True, "return_dict": True, "return_tensors": "pt"}
        texts = [messages[-1]["content"] for messages in conversations]
        longest = max(map(len, texts))
        return Ids(input_ids=np.array([[0] * (longest - len(text)) + [ord(c) for c in text] for text in texts]))

    def batch_decode(self, ids: np.ndarray, *, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(chr(i) for i in row if i) for row in ids]


class Model:
    """Answers `a=` with a once it was trained for a steps, and with 0 before that."""

    device = "cpu"

    def __init__(self) -> None:
        self.num_steps = 0
        self.calls: list[dict[str, Any]] = []

    def eval(self) -> "Model":
        return self

    def generate(self, input_ids: np.ndarray, **options: Any) -> np.ndarray:
        self.calls.append({"batch_size": len(input_ids), **options})
        asked = [int("".join(chr(i) for i in row if i).rstrip("=")) for row in input_ids]
        said = [str(a if a <= self.num_steps else 0).ljust(NUM_DIGITS, "\0") for a in asked]
        return np.concatenate([input_ids, np.array([[ord(c) for c in text] for text in said])], axis=1)


@dataclass
class TrainerState:
    """What a callback is told of the training."""

    global_step: int = 0
    is_world_process_zero: bool = True


@dataclass
class Trainer:
    """Trains by counting, and calls its callbacks as `transformers` does."""

    callbacks: list[Any]
    model: Model = field(default_factory=Model)
    state: TrainerState = field(default_factory=TrainerState)

    def train(self, num_steps: int) -> None:
        self._call("on_init_end")
        self._call("on_train_begin")
        for _ in range(num_steps):
            self._call("on_step_begin")
            self.state.global_step += 1
            self.model.num_steps += 1
            self._call("on_step_end")
            self._call("on_log", logs={"loss": 0.0})
        self._call("on_train_end")

    def _call(self, event: str, **kwargs: Any) -> None:
        for callback in self.callbacks:
            told = {"model": self.model, "processing_class": Tokenizer(), "optimizer": None, "lr_scheduler": None}
            getattr(callback, event)(object(), self.state, object(), **told, **kwargs)


@pytest.fixture
def callback_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    (example,) = re.findall(r"^```py\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) < 30
    module = types.ModuleType("transformers")
    module.TrainerCallback = TrainerCallback  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    names: dict[str, Any] = {}
    exec(example, names)
    return names["EvalCallback"]


def sums() -> SingleTurnEnvironment:
    tasks = [{"id": str(a), "a": a} for a in range(1, 9)]
    return SingleTurnEnvironment("sums", tasks, lambda spec: f"{spec['a']}=", lambda spec, text: float(text == str(spec["a"])))


def test_the_callback_measures_the_base_policy_every_nth_step_and_the_final_one(callback_class: Any) -> None:
    curve: dict[int, float] = {}
    callback = callback_class(
        sums(), EvalConfig(dataset="sums"), 2, lambda step, result: curve.update({step: result.scores["success_rate"]})
    )
    trainer = Trainer([callback])
    trainer.train(5)
    assert curve == {0: 0.0, 2: 0.25, 4: 0.5, 5: 0.625}
    assert all(call["do_sample"] is False and "temperature" not in call and call["max_new_tokens"] == 256 for call in trainer.model.calls)
    assert sum(call["batch_size"] for call in trainer.model.calls) == 4 * 8
    assert max(call["batch_size"] for call in trainer.model.calls) > 1


def test_the_callback_samples_as_the_configuration_says_and_only_in_one_process(callback_class: Any) -> None:
    parameters = EvalParameters(samples_per_task=2, sampling=SamplingConfig(temperature=0.7, max_tokens=4))
    callback = callback_class(sums(), EvalConfig(dataset="sums", eval_parameters=parameters), 10, None)
    trainer = Trainer([callback])
    trainer.train(1)
    assert {(call["do_sample"], call["temperature"], call["max_new_tokens"]) for call in trainer.model.calls} == {(True, 0.7, 4)}
    second = Trainer([callback], state=TrainerState(is_world_process_zero=False))
    second.train(10)
    assert second.model.calls == []
