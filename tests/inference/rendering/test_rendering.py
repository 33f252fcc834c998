"""Messages to ids exactly once, replies kept as they were sampled, and what a model directory must hold."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.errors import EnvError, ModelLoadError
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.replies import ParsedReply
from tests.inference.rendering.handmade import (
    ADD,
    BOS,
    CALL_TEXT,
    CHATML,
    ENDOFTEXT,
    GOLDEN,
    IM_END,
    WRITES_TOOLS,
    added,
    after,
    ids_of,
    result,
    user,
    with_template,
)


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
    directory = model_directory(tmp_path, adds_bos=adds_bos, bos_token="<think>", chat_template=BOS)
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
    single_letters = np.concatenate([ids_of(c) for c in "assistant"])
    assert len(single_letters) > len(ids_of("assistant"))  # encoding the decoded reply again would give other ids
    sampled = np.append(single_letters, IM_END).astype(np.int32)
    second = renderer.open_turn(renderer.close_turn(first, sampled), [user("ok")])
    suffix = ids_of("\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n")
    np.testing.assert_array_equal(second.prompt_ids, np.concatenate([first.prompt_ids, sampled, suffix]))
    assert not second.is_fork and len(second.spans) == 1
    assert renderer.decode(second.spans[0]) == "\n<|im_start|>user\nok<|im_end|>\n"


def test_a_stop_id_other_than_the_templates_stays_and_the_templates_follows_it(renderer: Renderer) -> None:
    first = renderer.open_turn(None, [user("hi")])
    sampled = np.array([70, ENDOFTEXT], np.int32)
    state = renderer.close_turn(first, sampled)
    second = renderer.open_turn(state, [user("ok")])
    assert state.messages[-1]["content"] == renderer.decode([70])
    assert renderer.decode(second.prompt_ids[len(first.prompt_ids) + 1 :]).startswith("<|endoftext|><|im_end|>\n<|im_start|>user")


def test_half_an_emoji_reads_as_a_replacement_character_and_keeps_its_ids(renderer: Renderer) -> None:
    emoji = ids_of("😀")
    assert len(emoji) == 4
    half = np.append(emoji[:2], IM_END).astype(np.int32)
    first = renderer.open_turn(None, [user("hi")])
    second = renderer.open_turn(renderer.close_turn(first, half), [user("ok")])
    assert "�" in renderer.reply_text(half)
    np.testing.assert_array_equal(second.prompt_ids[len(first.prompt_ids) :][:3], half)


def test_a_conversation_that_the_template_refuses_is_the_environments_error() -> None:
    renderer = with_template("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML)
    with pytest.raises(EnvError, match=r"roles \['system', 'user'\]: no system role"):
        renderer.open_turn(None, [{"role": "system", "content": "x"}, user("hi")])


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


def test_a_template_that_ends_turns_without_a_token_leaves_it_to_eos(tmp_path: Path) -> None:
    template = CHATML.replace("<|im_end|>", "")
    eos = Renderer.from_pretrained(model_directory(tmp_path / "a", chat_template=template, eos_token="<|endoftext|>", generation={}))
    assert eos.turn_end_id == ENDOFTEXT and eos.stop_ids == (ENDOFTEXT,)
    named = model_directory(tmp_path / "b", chat_template=template, eos_token=None, generation={"eos_token_id": [7, IM_END]})
    assert Renderer.from_pretrained(named).turn_end_id == IM_END
    nobody = model_directory(tmp_path / "c", chat_template=template, eos_token=None, generation={})
    with pytest.raises(ModelLoadError, match=r"ends an assistant turn with '\\n', which holds no special token"):
        Renderer.from_pretrained(nobody)


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


def test_a_reply_is_taken_apart_by_the_parser_that_reads_what_the_template_writes(renderer: Renderer) -> None:
    state = after(renderer, renderer.open_turn(None, [user("hi")]), f"<think>easy</think>I add.{CALL_TEXT}")
    assert state.messages[-1] == {"role": "assistant", "content": f"<think>easy</think>I add.{CALL_TEXT}"}
    assert (state.reply.content, state.reply.reasoning) == ("I add.", "easy")
    call = state.reply.tool_calls[0]
    assert (call.id, call.name, call.arguments) == ("call_0_0", "add", {"a": 1})
    later = after(renderer, renderer.open_turn(state, [result("3")]), CALL_TEXT)
    assert later.reply.tool_calls[0].id == "call_1_0" and later.replies[1] is state.reply


def test_a_conversation_whose_beginning_was_cut_off_gives_no_id_of_a_call_twice(renderer: Renderer) -> None:
    call = {"id": "call_2_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    kept = [user("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}, result("3")]
    second = after(renderer, renderer.open_turn(None, kept), CALL_TEXT)
    third = after(renderer, renderer.open_turn(second, [result("4")]), CALL_TEXT)
    # The third reply has two before it, as the one had that is call_2_0.
    assert [state.reply.tool_calls[0].id for state in (second, third)] == ["call_1_0", "call_3_0"]


def test_another_parser_may_read_replies_and_is_told_the_ids_without_the_stop_and_the_turn(renderer: Renderer) -> None:
    class Recording:
        how = "as they are"

        def __init__(self) -> None:
            self.heard: list[tuple[list[int], int]] = []

        def parse(self, token_ids: np.ndarray, *, turn: int) -> ParsedReply:
            self.heard.append((token_ids.tolist(), turn))
            return ParsedReply("said")

    parser = Recording()
    own = Renderer(renderer.tokenizer, CHATML, renderer.stop_ids, parser=parser)
    state = own.close_turn(own.open_turn(None, [user("hi")]), np.array([70, 71, IM_END], np.int32))
    own.close_turn(own.open_turn(state, [user("ok")]), np.array([IM_END], np.int32))
    assert own.parser is parser and parser.heard == [([70, 71], 0), ([], 1)] and state.reply.content == "said"


def test_tools_reach_the_template_and_every_way_to_render_shows_the_same(renderer: Renderer) -> None:
    own = with_template(WRITES_TOOLS)
    assert own.writes_tools and not renderer.writes_tools
    for one in (own, renderer):
        turn = one.open_turn(None, [user("hi")], tools=[ADD])
        assert turn.tools == (ADD,) and turn.text == one.prompt_text([user("hi")], [ADD]) and '"add"' in turn.text
        whole = one.decode(one.message_ids([user("hi")], [ADD]))
        assert turn.text == whole + "<|im_start|>assistant\n" and len(turn.spans) == 1
        state = after(one, turn, CALL_TEXT)
        assert added(one.open_turn(state, [result("3")], tools=[ADD]), state).startswith("\n<|im_start|>tool\n3")


def test_the_text_that_follows_a_special_token_is_encoded_as_it_is_behind_one() -> None:
    """Some tokenizers put a space at the beginning of a text, and some special tokens take the white space behind them."""
    backend = Tokenizer(models.WordLevel({"\u2581hi": 0, "hi": 1, "\u2581": 2, "<unk>": 3, "\n": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("<end>", normalized=False), AddedToken("<eats>", rstrip=True, normalized=False)])
    end, eats = backend.token_to_id("<end>"), backend.token_to_id("<eats>")
    for token, expected in (("<end>", [1, end]), ("<eats>", [1, eats])):
        template = f"{{% for m in messages %}}{{{{ m.content + '{token}' }}}}{{% endfor %}}"
        renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=backend), template, [end, eats])
        state = renderer.close_turn(renderer.open_turn(None, [user("hi")]), np.array([1, expected[-1]], np.int32))
        assert renderer.open_turn(state, [user("hi")]).prompt_ids[len(state.token_ids) :].tolist() == expected


def test_an_added_token_that_is_not_read_everywhere_is_no_beginning_for_what_follows() -> None:
    backend = Tokenizer(models.WordLevel({"hi": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.add_tokens([AddedToken("stop", single_word=True)])
    template = "{% for m in messages %}{{ m.content + ' stop' if m.role == 'assistant' else m.content }}{% endfor %}"
    renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=backend), template, [2])
    state = renderer.close_turn(renderer.open_turn(None, [user("hi")]), np.array([0, 2], np.int32))
    assert renderer.open_turn(state, [user("hi")]).prompt_ids.tolist() == [0, 0, 2, 0]
