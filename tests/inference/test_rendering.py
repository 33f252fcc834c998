"""Messages to ids exactly once, replies kept as they were sampled, and what a model directory must hold."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jaxrl.errors import EnvError, ModelLoadError
from jaxrl.inference.rendering import Renderer

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer"
IM_END, ENDOFTEXT = 2, 0
CHATML = json.loads((GOLDEN / "tokenizer_config.json").read_text())["chat_template"]
BOS_TEMPLATE = "{{ bos_token }}" + CHATML
THINK_STRIPPING = CHATML.replace(
    "message['content']", "(message['content'].split('</think>')[-1] if not loop.last else message['content'])"
)
"""Like the templates of thinking models: the thinking of earlier turns is not shown again."""
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")
NO_THINKING = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think></think>' }}{% endif")
"""A generation prompt that holds more than the history will."""


def model_directory(tmp_path: Path, *, adds_bos: bool = False, generation: dict | None = None, **config: object) -> Path:
    """Copy the golden tokenizer with another tokenizer_config; a value of None removes the key."""
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN, directory)
    merged = json.loads((directory / "tokenizer_config.json").read_text()) | config
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if adds_bos:
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
        }
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def with_template(template: str) -> Renderer:
    """A renderer over the golden tokenizer with another template."""
    golden = Renderer.from_pretrained(GOLDEN)
    return Renderer(golden._tokenizer, template, golden.stop_ids)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ids_of(renderer: Renderer, text: str) -> np.ndarray:
    return np.asarray(renderer._backend.encode(text, add_special_tokens=False).ids, np.int32)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.from_pretrained(GOLDEN)


CONVERSATION = [
    {"role": "system", "content": "Be short."},
    user("8 + 3 = 😀 日本"),
    {"role": "assistant", "content": "<think>8+3=11</think>11"},
    user(""),
]


def test_ids_equal_those_of_the_tokenizers_own_chat_template(renderer: Renderer) -> None:
    ours = renderer.open_turn(None, CONVERSATION).prompt_ids
    theirs = renderer._tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True)["input_ids"]
    assert ours.tolist() == theirs
    assert ours.dtype == np.int32


@pytest.mark.parametrize("adds_bos", [False, True])
def test_there_is_exactly_one_bos_whether_or_not_the_tokenizer_would_add_another(tmp_path: Path, adds_bos: bool) -> None:
    directory = model_directory(tmp_path, adds_bos=adds_bos, bos_token="<think>", chat_template=BOS_TEMPLATE)
    renderer = Renderer.from_pretrained(directory)
    turn = renderer.open_turn(None, [user("hi")])
    assert turn.prompt_ids[0] == 3 and (turn.prompt_ids == 3).sum() == 1
    assert (turn.prompt_ids == 1).sum() == 2  # the post-processor's <|im_start|> is not among them
    assert renderer.stop_ids == (ENDOFTEXT, IM_END)
    state = renderer.close_turn(turn, np.array([70, IM_END], np.int32))
    assert (renderer.open_turn(state, [user("again")]).prompt_ids == 3).sum() == 1


def test_a_token_is_bos_if_the_template_writes_it_once_before_everything(renderer: Renderer) -> None:
    assert renderer.bos_id is None  # every message begins with <|im_start|>
    assert with_template("<think>" + CHATML).bos_id == 3
    assert with_template("plain " + CHATML).bos_id is None  # a text is no special token


def test_a_message_that_nobody_answers_has_no_generation_prompt_after_it(renderer: Renderer) -> None:
    system = {"role": "system", "content": "Be short."}
    assert renderer.decode(renderer.message_ids([system])) == "<|im_start|>system\nBe short.<|im_end|>\n"
    whole = renderer.open_turn(None, [system, user("hi")]).prompt_ids.tolist()
    assert whole[: len(renderer.message_ids([system]))] == renderer.message_ids([system]).tolist()
    with pytest.raises(EnvError, match="needs a `role`"):
        renderer.message_ids([{"role": "system"}])


def test_each_message_has_the_ids_of_its_own_text_and_the_pieces_make_up_the_prompt(renderer: Renderer) -> None:
    turn = renderer.open_turn(None, CONVERSATION)
    texts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CONVERSATION]
    assert [renderer.decode(span) for span in turn.spans] == texts
    assert renderer.decode(turn.generation_prompt) == "<|im_start|>assistant\n"
    np.testing.assert_array_equal(np.concatenate([*turn.spans, turn.generation_prompt]), turn.prompt_ids)


def test_the_next_prompt_is_the_previous_ids_the_sampled_ids_and_only_the_new_suffix(renderer: Renderer) -> None:
    first = renderer.open_turn(None, [user("hi")])
    single_letters = np.concatenate([ids_of(renderer, c) for c in "assistant"])
    assert len(single_letters) > len(ids_of(renderer, "assistant"))  # encoding the decoded reply again would give other ids
    sampled = np.append(single_letters, IM_END).astype(np.int32)
    second = renderer.open_turn(renderer.close_turn(first, sampled), [user("ok")])
    suffix = ids_of(renderer, "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n")
    np.testing.assert_array_equal(second.prompt_ids, np.concatenate([first.prompt_ids, sampled, suffix]))
    assert not second.is_fork and len(second.spans) == 1
    assert renderer.decode(second.spans[0]) == "\n<|im_start|>user\nok<|im_end|>\n"


def test_a_reply_cut_by_the_token_limit_is_closed_by_ids_that_nobody_sampled(renderer: Renderer) -> None:
    first = renderer.open_turn(None, [user("hi")])
    second = renderer.open_turn(renderer.close_turn(first, ids_of(renderer, "abc")), [user("ok")])
    assert renderer.decode(second.spans[0]) == "<|im_end|>\n<|im_start|>user\nok<|im_end|>\n"


def test_a_stop_id_other_than_the_templates_stays_and_the_templates_follows_it(renderer: Renderer) -> None:
    first = renderer.open_turn(None, [user("hi")])
    sampled = np.array([70, ENDOFTEXT], np.int32)
    state = renderer.close_turn(first, sampled)
    second = renderer.open_turn(state, [user("ok")])
    assert state.messages[-1]["content"] == renderer.decode([70])
    assert renderer.decode(second.prompt_ids[len(first.prompt_ids) + 1 :]).startswith("<|endoftext|><|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("reply", [[], [IM_END]])
def test_an_empty_reply_is_legal_and_the_conversation_goes_on(renderer: Renderer, reply: list[int]) -> None:
    first = renderer.open_turn(None, [user("hi")])
    state = renderer.close_turn(first, np.array(reply, np.int32))
    assert renderer.reply_text(np.array(reply, np.int32)) == ""
    second = renderer.open_turn(state, [user("ok")])
    expected = "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    assert second.text.endswith(expected) and not second.is_fork
    assert renderer.decode(second.prompt_ids) == second.text


def test_half_an_emoji_reads_as_a_replacement_character_and_keeps_its_ids(renderer: Renderer) -> None:
    emoji = ids_of(renderer, "😀")
    assert len(emoji) == 4
    half = np.append(emoji[:2], IM_END).astype(np.int32)
    first = renderer.open_turn(None, [user("hi")])
    second = renderer.open_turn(renderer.close_turn(first, half), [user("ok")])
    assert "�" in renderer.reply_text(half)
    np.testing.assert_array_equal(second.prompt_ids[len(first.prompt_ids) :][:3], half)


def test_a_template_that_drops_earlier_thinking_forks_and_a_reply_without_thinking_does_not() -> None:
    renderer = with_template(THINK_STRIPPING)
    first = renderer.open_turn(None, [user("hi")])
    plain = renderer.open_turn(renderer.close_turn(first, ids_of(renderer, "4<|im_end|>")), [user("ok")])
    assert not plain.is_fork
    thought = renderer.close_turn(first, ids_of(renderer, "<think>2+2</think>4<|im_end|>"))
    forked = renderer.open_turn(thought, [user("ok")])
    assert forked.is_fork
    assert [m["role"] for m in forked.span_messages] == ["user", "assistant", "user"]
    assert "<think>" not in forked.text
    np.testing.assert_array_equal(forked.prompt_ids, ids_of(renderer, forked.text))


def test_a_generation_prompt_that_the_history_does_not_repeat_forks_and_is_never_doubled() -> None:
    renderer = with_template(NO_THINKING)
    first = renderer.open_turn(None, [user("hi")])
    assert renderer.decode(first.generation_prompt) == "<|im_start|>assistant\n<think></think>"
    forked = renderer.open_turn(renderer.close_turn(first, ids_of(renderer, "4<|im_end|>")), [user("ok")])
    assert forked.is_fork and forked.text.count("<think>") == 1


replies = st.lists(st.integers(min_value=3, max_value=319), max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    template=st.sampled_from([CHATML, BOS_TEMPLATE.replace("bos_token", "'<think>'"), THINK_STRIPPING, TRIMMING, NO_THINKING]),
    turns=st.lists(st.tuples(st.text(max_size=6), replies, st.sampled_from([[], [IM_END], [ENDOFTEXT]])), min_size=2, max_size=4),
)
def test_every_prompt_extends_what_the_model_saw_or_is_a_whole_rendering(
    template: str, turns: list[tuple[str, list[int], list[int]]]
) -> None:
    renderer = with_template(template)
    state = None
    for text, body, stop in turns:
        turn = renderer.open_turn(state, [user(text)])
        np.testing.assert_array_equal(
            turn.prompt_ids[len(turn.prompt_ids) - sum(map(len, turn.spans)) - len(turn.generation_prompt) :],
            np.concatenate([*turn.spans, turn.generation_prompt]),
        )
        if state is not None and not turn.is_fork:
            np.testing.assert_array_equal(turn.prompt_ids[: len(state.token_ids)], state.token_ids)
        else:
            np.testing.assert_array_equal(turn.prompt_ids, ids_of(renderer, turn.text))
        state = renderer.close_turn(turn, np.array(body + stop, np.int32))
        np.testing.assert_array_equal(state.token_ids, np.concatenate([turn.prompt_ids, np.array(body + stop, np.int32)]))


def test_content_given_as_text_parts_is_joined(renderer: Renderer) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}
    assert renderer.open_turn(None, [parts]).text == renderer.open_turn(None, [user("42")]).text


@pytest.mark.parametrize("content", [None, 4, [], ["4"], [{"type": "image", "url": "x"}], [{"text": "4"}, {"type": "image"}]])
def test_content_that_is_no_text_is_refused_rather_than_rendered_empty(renderer: Renderer, content: object) -> None:
    with pytest.raises(EnvError, match="text parts"):
        renderer.open_turn(None, [{"role": "user", "content": content}])


def test_a_turn_needs_a_message_and_messages_are_not_changed(renderer: Renderer) -> None:
    with pytest.raises(EnvError, match="at least one"):
        renderer.open_turn(None, [])
    message = {"role": "user", "content": [{"text": "4"}]}
    renderer.open_turn(None, [message])
    assert message == {"role": "user", "content": [{"text": "4"}]}


def test_a_conversation_that_the_template_refuses_is_the_environments_error() -> None:
    renderer = with_template("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML)
    with pytest.raises(EnvError, match=r"roles \['system', 'user'\]: no system role"):
        renderer.open_turn(None, [{"role": "system", "content": "x"}, user("hi")])


def test_todays_date_never_enters_a_prompt() -> None:
    renderer = with_template("{{ strftime_now('%Y-%m-%d') }}" + CHATML)
    assert renderer.open_turn(None, [user("hi")]).text == "01 Jan 2025<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_truncation_that_a_tokenizer_file_asks_for_is_switched_off(tmp_path: Path) -> None:
    directory = model_directory(tmp_path)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert len(Renderer.from_pretrained(directory).open_turn(None, [user("0123456789")]).prompt_ids) > 10


def test_stop_ids_are_the_generation_configs_the_tokenizers_and_the_templates_turn_end(tmp_path: Path) -> None:
    only_template = model_directory(tmp_path / "a", eos_token=None, generation={})
    assert Renderer.from_pretrained(only_template).stop_ids == (IM_END,)
    all_three = model_directory(tmp_path / "b", eos_token="<|endoftext|>", generation={"eos_token_id": 7})
    assert Renderer.from_pretrained(all_three).stop_ids == (ENDOFTEXT, IM_END, 7)


def test_a_template_whose_turn_end_is_no_token_is_refused(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, chat_template=CHATML.replace("<|im_end|>", "<|eot|>"))
    with pytest.raises(ModelLoadError, match=r"ends an assistant turn with '<\|eot\|>\\n', which holds no special token"):
        Renderer.from_pretrained(directory)


def test_a_directory_without_chat_template_or_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no chat template"):
        Renderer.from_pretrained(model_directory(tmp_path, chat_template=None))
    with pytest.raises(ModelLoadError, match=r"nothing` is not a directory on this machine"):
        Renderer.from_pretrained(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"expected a Hugging Face directory with a tokenizer\.json"):
        Renderer.from_pretrained(tmp_path / "empty")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        Renderer.from_pretrained(tmp_path / "model")


def test_a_special_token_that_the_model_has_no_embedding_for_is_refused(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, eos_token="<|new_eos|>")
    (directory / "config.json").write_text(json.dumps({"vocab_size": 320}))
    with pytest.raises(ModelLoadError, match=r"has 321 ids but config\.json says `vocab_size`=320.*<\|new_eos\|>"):
        Renderer.from_pretrained(directory)


def test_the_text_of_a_token_is_what_it_adds_to_a_text_its_space_included(renderer: Renderer) -> None:
    text = "<|im_start|>user\nHow are you, 42?"
    assert "".join(map(renderer.token_text, renderer.encode(text).tolist())) == text
    backend = Tokenizer(models.WordLevel({"\u2581hi": 0, "\u2581you": 1, "<end>": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<end>"])
    spaced = Renderer(PreTrainedTokenizerFast(tokenizer_object=backend), "", [2])
    assert spaced.decode([1]) == "you" and spaced.token_text(1) == " you", "a decoder of this kind eats the space that begins a text"
