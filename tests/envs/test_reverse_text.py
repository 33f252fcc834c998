"""The environment that is there to be copied."""

from jaxrl.config.env import ReverseTextEnvConfig
from jaxrl.envs.play import play_rollout
from jaxrl.envs.reverse_text import prompt, reverse_text, score
from tests.envs.policies import make_rollout, open_session, saying


def test_texts_have_the_lengths_and_the_alphabet_asked_for_and_repeat_with_the_seed() -> None:
    config = ReverseTextEnvConfig(min_chars=2, max_chars=4, alphabet="xyz", num_tasks=50, seed=3)
    specs = reverse_text(config).tasks()
    assert specs == reverse_text(config).tasks() != reverse_text(config.model_copy(update={"seed": 4})).tasks()
    assert {len(spec["text"]) for spec in specs} == {2, 3, 4} and set("".join(s["text"] for s in specs)) == set("xyz")
    assert len({spec["id"] for spec in specs}) == 50


def test_only_the_reversed_text_is_worth_something() -> None:
    spec = {"id": "0", "text": "abc"}
    assert prompt(spec) == "Write this text backwards: abc"
    assert [score(spec, text) for text in ("cba", " cba\n", "abc", "cba!", "")] == [1.0, 1.0, 0.0, 0.0, 0.0]


async def test_it_plays_with_its_name_and_system_prompt() -> None:
    env = reverse_text(ReverseTextEnvConfig(name="mirror", system_prompt="Reply with the text only."))
    spec = env.tasks()[0]
    rollout = make_rollout(spec)
    await play_rollout(env, rollout, open_session(saying(spec["text"][::-1]), rollout), 10.0)
    assert env.name == "mirror" and rollout.reward == 1.0 and rollout.nodes[0].role == "system"
