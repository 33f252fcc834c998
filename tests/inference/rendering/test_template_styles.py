"""The committed templates render what their first lines say, so that what is tested over them is what it claims to be."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl.errors import EnvError
from jaxrl.inference.rendering import renderer as rendering
from jaxrl.inference.rendering.chat_template import ChatTemplate
from tests.golden.make_templates import DIRECTORY, make
from tests.inference.rendering.styles import ADD, STYLES, assistant, call_of, renderer_of, result, their_ids, their_text, tokenizer_of, user

SYSTEM = {"role": "system", "content": " Be brief. "}
CALL = call_of("add", {"a": 1, "b": None, "is_exact": True})
TURNS = [user("1 + 2? "), assistant("3", thought="easy"), user("Sure?")]
LOOP = [user("1 + 2?"), assistant(calls=[CALL]), result("3")]
PARALLEL = [user("1 + 2?"), assistant(calls=[CALL, call_of("add", {}, "call00002")]), result("3"), result("4", "call00002")]
JSON_CALL = '{"name": "add", "arguments": {"a": 1, "b": null, "is_exact": true}}'
TURN_TEXTS = {
    "chatml": "<|im_start|>user\n1 + 2? <|im_end|>\n<|im_start|>assistant\n<think>easy</think>3<|im_end|>\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1 + 2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n3<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen3": "<|im_start|>user\n1 + 2? <|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\n1 + 2?<end_of_turn>\n<start_of_turn>model\n3<end_of_turn>\n"
    "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] 1 + 2? [/INST] 3</s>[INST] Sure?[/INST]",
    "no_turn_end": "<s>USER: 1 + 2? \nASSISTANT: 3</s>USER: Sure?\nASSISTANT: ",
    "strips_thinking": "<|im_start|>user\n1 + 2? <|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "dated": "<|im_start|>system\nToday is 01 Jan 2025.<|im_end|>\n<|im_start|>user\n1 + 2? <|im_end|>\n"
    "<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
    "opens_thinking": "<|begin|><|User|>1 + 2? <|Assistant|>3<|end|><|User|>Sure?<|Assistant|><think>\n",
    "channels": "<|start|>user<|message|>1 + 2? <|end|><|start|>assistant<|channel|>final<|message|>3<|end|>"
    "<|start|>user<|message|>Sure?<|end|><|start|>assistant<|channel|>final<|message|>",
}
LOOP_ENDS = {
    "chatml": f"<|im_start|>assistant\n<tool_call>{JSON_CALL}</tool_call><|im_end|>\n"
    "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n",
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": null, "is_exact": true}}<|eot_id|>'
    "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen3": f"<|im_start|>assistant\n<tool_call>\n{JSON_CALL}\n</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "mistral": f'[/INST][TOOL_CALLS] [{JSON_CALL[:-1]}, "id": "call00001"}}]</s>'
    '[TOOL_RESULTS] {"content": "3", "call_id": "call00001"}[/TOOL_RESULTS]',
    "opens_thinking": '<|Assistant|><|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{"a": 1, "b": null, "is_exact": true}'
    "<|tool_call_end|><|tool_calls_end|><|end|><|tool_outputs_begin|><|tool_output_begin|>3<|tool_output_end|><|tool_outputs_end|>"
    "<|Assistant|><think>\n",
}


@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_reads_as_the_style_has_it(style: str) -> None:
    assert their_text(style, TURNS) == TURN_TEXTS[style]


@pytest.mark.parametrize("style", LOOP_ENDS)
def test_a_call_and_its_answer_read_as_the_style_has_them(style: str) -> None:
    assert their_text(style, LOOP, tools=[ADD]).endswith(LOOP_ENDS[style])


def test_what_is_peculiar_to_a_style_is_in_its_template() -> None:
    both = "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert their_text("qwen3", PARALLEL).endswith(both)
    thinking = [user("1?"), assistant(thought="one", calls=[CALL]), result("3")]
    assert "<think>\none\n</think>" in their_text("qwen3", thinking) and "one" not in their_text("strips_thinking", thinking)
    assert their_text("qwen3", [*TURNS[:1], assistant("3")], asks=False).endswith("<think>\n\n</think>\n\n3<|im_end|>\n")
    tools_first = their_text("mistral", [*TURNS[:2], user("Sure?")], tools=[ADD])
    assert tools_first.index("[AVAILABLE_TOOLS]") > tools_first.index("1 + 2?"), "the tools stand before the last question"
    assert their_text("channels", TURNS[:2], asks=False).endswith("easy<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>")
    for style, refused in [("gemma", [SYSTEM, *TURNS]), ("gemma", LOOP), ("llama3", PARALLEL), ("mistral", [TURNS[0], TURNS[0]])]:
        with pytest.raises(EnvError, match="the chat template refused"):
            renderer_of(style).prompt_text(refused)
    with pytest.raises(Exception, match="exactly nine"):
        their_text("mistral", [user("1?"), assistant(calls=[call_of("add", {}, "1")]), result("3", "1")])


@pytest.mark.parametrize("style", STYLES)
def test_a_bos_stands_once_before_a_conversation_on_both_ways_to_ids(style: str) -> None:
    renderer, tokenizer = renderer_of(style), tokenizer_of(style)
    ours = renderer.open_turn(None, TURNS).prompt_ids.tolist()
    assert ours == their_ids(style, TURNS) == renderer.encode(renderer.prompt_text(TURNS), add_special_tokens=False).tolist()
    assert renderer.decode(ours) == TURN_TEXTS[style]
    if tokenizer.bos_token_id is not None:
        assert ours.count(tokenizer.bos_token_id) == 1 and ours[0] == tokenizer.bos_token_id == renderer.bos_id
        doubled = tokenizer(their_text(style, TURNS))["input_ids"]
        assert doubled[:2] == [tokenizer.bos_token_id] * 2, "encoding the text as a bare one adds another"


def test_an_end_of_turn_that_only_the_template_knows_ends_replies() -> None:
    renderer = renderer_of("llama3")
    generation = json.loads((DIRECTORY / "llama3" / "generation_config.json").read_text())
    assert renderer.decode([generation["eos_token_id"]]) == "<|end_of_text|>"
    assert renderer.decode([renderer.turn_end_id]) == "<|eot_id|>"
    assert renderer.stop_ids == (generation["eos_token_id"], renderer.turn_end_id)


@pytest.mark.parametrize("style", STYLES)
def test_the_committed_files_are_what_the_script_makes(style: str, tmp_path: Path) -> None:
    make(style, tmp_path)
    for file in tmp_path.iterdir():
        committed = (DIRECTORY / style / file.name).read_bytes()
        assert file.read_bytes() == committed, "run `python -m tests.golden.make_templates` and commit what it makes"


ODDLY_SPELT = ["<think>\none\n</think>\n\n2", "3", "\n\n4", "5 ", "<think>six</think>6", "7", " 8"]
REPEATED = [message for text in ODDLY_SPELT for message in (user(text), assistant(text))] + [user("9?")]


@pytest.mark.parametrize("style", STYLES)
def test_where_messages_end_is_found_in_as_many_renderings_whatever_the_number_of_messages(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, num_renderings, apply = renderer_of(style), 0, ChatTemplate._apply

    def counting(*args: Any, **options: Any) -> str:
        nonlocal num_renderings
        num_renderings += 1
        return apply(*args, **options)

    def spans(messages: list[dict[str, Any]]) -> tuple[list[list[int]], int]:
        before = num_renderings
        return [span.tolist() for span in renderer.open_turn(None, messages).spans], num_renderings - before

    monkeypatch.setattr(ChatTemplate, "_apply", counting)
    (_, few), (_, many) = spans([*[user("a"), assistant("b")] * 10, user("c")]), spans([*[user("a"), assistant("b")] * 40, user("c")])
    assert many == few < 10
    quick = spans(REPEATED)[0]
    monkeypatch.setattr(rendering, "_gap", lambda *_: None)  # a rendering for each message
    assert quick == spans(REPEATED)[0]
