"""Messages and replies through the `renderers` package, where it is installed; what is said where it is not."""

import importlib.util
import logging
from pathlib import Path

import numpy as np
import pytest

from jaxrl.batching import rollout_to_samples
from jaxrl.config.env import SamplingConfig
from jaxrl.envs.session import PolicySession
from jaxrl.errors import ConfigError
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.known_models import KnownModel, KnownReplyParser, _ends, _registered, load_renderer
from jaxrl.inference.rendering.tokenizer_files import load_tokenizer
from jaxrl.inference.rendering.turns import RenderedTurn, RenderState
from tests.envs.policies import make_rollout
from tests.fakes import ScriptedEndpoint

TEMPLATES = Path(__file__).parents[2] / "golden" / "templates"
QWEN3 = TEMPLATES / "qwen3"
is_installed = importlib.util.find_spec("renderers") is not None
needs_package = pytest.mark.skipif(not is_installed, reason="needs the `renderers` extra")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 8}}\n</tool_call>'


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def tool(text: str) -> dict:
    return {"role": "tool", "name": "add", "tool_call_id": "call_0_0", "content": text}


def answered(renderer: Renderer, turn: RenderedTurn, text: str) -> RenderState:
    return renderer.close_turn(turn, renderer.encode(text, add_special_tokens=False))


def bodies(renderer: Renderer, turn: RenderedTurn) -> list[str]:
    return [renderer.decode(span[mask]) for span, mask in zip(turn.spans, turn.content_masks, strict=True)]


def check_pieces(turn: RenderedTurn, seen: np.ndarray) -> None:
    """The pieces of a turn make up its prompt, behind what the model saw."""
    np.testing.assert_array_equal(np.concatenate([seen, *turn.spans, turn.generation_prompt]), turn.prompt_ids)
    assert turn.prompt_ids.dtype == np.int32
    assert len(turn.spans) == len(turn.content_masks)


@pytest.fixture(scope="module")
def qwen3() -> Renderer:
    return load_renderer(str(QWEN3), renderer="qwen3")


def test_a_token_that_is_nobodys_belongs_to_the_message_after_it_and_the_last_ones_to_the_reply() -> None:
    assert _ends(np.array([-1, 0, 0, -1, 1, -1, -1]), 2).tolist() == [3, 5]
    assert _ends(np.array([0, 2, 2, 1, -1]), 3).tolist() == [1, 1, 4]  # results of tools in another order, and a message without tokens
    assert _ends(np.array([2, 0, 1]), 3).tolist() == [0, 0, 3]
    assert _ends(np.array([-1, -1]), 1).tolist() == [0]
    assert _ends(np.array([], np.int64), 2).tolist() == [0, 0]


def test_the_own_template_is_taken_where_the_package_is_not_asked_or_does_not_know_the_name() -> None:
    assert _registered("Qwen/Qwen3-0.6B", "template") is None
    assert _registered("/somewhere/Qwen3-0.6B", "auto") is None


@pytest.mark.skipif(is_installed, reason="the `renderers` extra is installed")
def test_a_name_without_the_package_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"`model.renderer`='qwen3' .* not installed; pip install 'jaxrl\[renderers\]', or set it to"):
        load_renderer(str(QWEN3), renderer="qwen3")
    assert _registered("Qwen/Qwen3-0.6B", "auto") is None


@needs_package
def test_the_very_name_of_a_model_finds_it_and_a_revision_is_no_other_model() -> None:
    assert _registered("Qwen/Qwen3-0.6B", "auto") == "qwen3"
    assert _registered("Qwen/Qwen3-0.6B@main", "auto") == "qwen3"
    assert _registered("someone/Qwen3-0.6B", "auto") is None
    assert _registered("someone/Qwen3-0.6B", "qwen3") == "qwen3"


@needs_package
@pytest.mark.parametrize("name", ["qwen", "default", "custom"])
def test_a_name_that_is_no_model_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`model.renderer`='{name}' is no model .* qwen3, .* or set it to 'auto' or 'template'"):
        load_renderer(str(QWEN3), renderer=name)


@needs_package
def test_a_model_that_the_tokenizer_is_not_of_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`model.renderer`='qwen3.5' does not fit the tokenizer of .*; set it to 'template'"):
        load_renderer(str(QWEN3), renderer="qwen3.5")


@needs_package
def test_tokens_are_those_of_the_chat_template_and_every_message_has_its_own(qwen3: Renderer) -> None:
    messages = [{"role": "system", "content": "Be short."}, user("8 + 3 = 😀 日本"), {"role": "assistant", "content": "11"}, user("<b>")]
    turn = qwen3.open_turn(None, messages)
    own = Renderer.from_pretrained(QWEN3).open_turn(None, messages)
    assert turn.prompt_ids.tolist() == own.prompt_ids.tolist()
    texts = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    assert [qwen3.decode(span) for span in turn.spans] == texts
    assert qwen3.decode(turn.generation_prompt) == "<|im_start|>assistant\n"
    assert bodies(qwen3, turn) == ["Be short.", "8 + 3 = 😀 日本", "11<|im_end|>", "<b>"]  # of an assistant, all that it would sample
    assert turn.text == own.text == qwen3.prompt_text(messages)
    check_pieces(turn, np.zeros(0, np.int32))


@needs_package
def test_a_list_of_text_parts_is_not_an_empty_turn(qwen3: Renderer) -> None:
    parts = qwen3.open_turn(None, [{"role": "user", "content": [{"type": "text", "text": "8 "}, {"type": "text", "text": "+ 3"}]}])
    assert bodies(qwen3, parts) == ["8 + 3"]


@needs_package
@pytest.mark.parametrize("history", ["template", "keep"])
def test_within_a_cycle_of_tools_the_sampled_tokens_stay_thinking_included(qwen3: Renderer, history: str) -> None:
    first = qwen3.open_turn(None, [user("8 + 3")], tools=TOOLS, history=history)
    assert '"name": "add"' in first.text
    state = answered(qwen3, first, f"<think>\nadd\n</think>\n\n{CALL}<|im_end|>")
    assert [(call.id, call.name, call.arguments) for call in state.reply.tool_calls] == [("call_0_0", "add", {"a": 8})]
    assert state.reply.reasoning == "add"
    second = qwen3.open_turn(state, [tool("11"), tool("12")], tools=TOOLS, history=history)
    assert not second.is_fork
    check_pieces(second, state.token_ids)
    assert [message["role"] for message in second.messages[-len(second.spans) :]] == ["tool", "tool"]
    assert bodies(qwen3, second) == ["11", "12"]
    # Parallel results stand in one turn of the user.
    results = "<|im_start|>user\n<tool_response>\n11\n</tool_response>\n<tool_response>\n12\n</tool_response><|im_end|>\n"
    assert second.text == f"{first.text}<think>\nadd\n</think>\n\n{CALL}<|im_end|>\n{results}<|im_start|>assistant\n"


@needs_package
def test_a_new_question_forks_where_thinking_is_dropped_and_goes_on_where_history_is_kept(qwen3: Renderer) -> None:
    first = qwen3.open_turn(None, [user("8 + 3")])
    state = answered(qwen3, first, "<think>\nadd\n</think>\n\n11<|im_end|>")
    forked = qwen3.open_turn(state, [user("and 1")])
    assert forked.is_fork and "add" not in forked.text
    assert [message["role"] for message in forked.messages[-len(forked.spans) :]] == ["user", "assistant", "user"]
    check_pieces(forked, np.zeros(0, np.int32))
    kept = qwen3.open_turn(state, [user("and 1")], history="keep")
    assert not kept.is_fork and kept.text.startswith(state.text)
    assert bodies(qwen3, kept) == ["and 1"]
    check_pieces(kept, state.token_ids)


@needs_package
def test_a_new_question_goes_on_from_the_sampled_tokens_where_nothing_is_dropped(qwen3: Renderer) -> None:
    first = qwen3.open_turn(None, [user("8 + 3")])
    unusual = np.concatenate([qwen3.encode(letter, add_special_tokens=False) for letter in ("t", "h", "e", "<|im_end|>")])
    assert len(qwen3.encode("the", add_special_tokens=False)) < 3  # encoded anew, these would be other tokens
    state = qwen3.close_turn(first, unusual)
    second = qwen3.open_turn(state, [user("and 1")])
    assert not second.is_fork
    check_pieces(second, state.token_ids)


@needs_package
@pytest.mark.parametrize("text", ["11", "<think>\nadd", ""])
def test_a_reply_without_a_stop_is_closed_before_the_next_message(qwen3: Renderer, text: str) -> None:
    state = answered(qwen3, qwen3.open_turn(None, [user("8 + 3")]), text)
    kept = qwen3.open_turn(state, [user("go on")], history="keep")
    assert not kept.is_fork
    check_pieces(kept, state.token_ids)
    closed = "</think><|im_end|>" if text.startswith("<think>") else "<|im_end|>"
    assert qwen3.decode(kept.spans[0]) == f"{closed}\n<|im_start|>user\ngo on<|im_end|>\n"


@needs_package
def test_history_is_kept_by_the_own_template_where_the_package_would_not_go_on(qwen3: Renderer) -> None:
    # An end of turn inside of the thinking: the package gives up on such a prompt.
    state = answered(qwen3, qwen3.open_turn(None, [user("8 + 3")]), "<think>\nadd<|im_end|>")
    kept = qwen3.open_turn(state, [user("go on")], history="keep")
    assert not kept.is_fork
    check_pieces(kept, state.token_ids)
    assert qwen3.open_turn(state, [user("go on")]).is_fork


@needs_package
def test_a_format_that_only_the_package_knows_is_read_by_it_and_its_conversation_goes_on() -> None:
    tokenizer = load_tokenizer(QWEN3)
    tags = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    tokenizer.add_tokens([*tags, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], special_tokens=True)
    own = Renderer(tokenizer, tokenizer.get_chat_template(), [2])
    known = KnownModel("glm-4.5", "glm", own)
    glm = own.with_known(known, KnownReplyParser(known))
    first = glm.open_turn(None, [user("8 + 3")], tools=TOOLS)
    check_pieces(first, np.zeros(0, np.int32))
    call = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>8</arg_value>\n</tool_call>"
    state = answered(glm, first, f"\n<think>add</think>\n{call}<|observation|>")
    assert [(call.name, call.arguments, call.error) for call in state.reply.tool_calls] == [("add", {"a": 8}, "")]
    assert state.reply.reasoning == "add" and not state.reply.has_unread_call
    second = glm.open_turn(state, [tool("11")], tools=TOOLS)
    assert not second.is_fork
    check_pieces(second, state.token_ids)  # the stop that was sampled also opens the tool's message
    assert bodies(glm, second) == ["11"]


@needs_package
def test_auto_takes_the_package_for_a_name_that_it_knows_if_it_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from renderers.base import MODEL_RENDERER_MAP

    monkeypatch.setitem(MODEL_RENDERER_MAP, str(QWEN3), "qwen3")
    first = [user("8 + 3"), {"role": "assistant", "content": "11"}, user("and 1")]
    assert load_renderer(str(QWEN3)).open_turn(None, first).template_text is None
    monkeypatch.setitem(MODEL_RENDERER_MAP, str(QWEN3), "qwen3.5")  # as if the tokenizer had changed
    assert load_renderer(str(QWEN3)).open_turn(None, first).template_text is not None
    assert "by the tokenizer's own chat template: `model.renderer`='qwen3.5' does not fit" in caplog.text


@needs_package
@pytest.mark.parametrize(("history", "num_forks"), [("template", 1), ("keep", 0)])
async def test_a_rollout_trains_each_sampled_token_once_and_knows_what_is_a_results_own_text(
    qwen3: Renderer, history: str, num_forks: int
) -> None:
    texts = [f"<think>\nadd\n</think>\n\n{CALL}<|im_end|>", "<think>\nso\n</think>\n\n11<|im_end|>", "12<|im_end|>"]
    sampled = [qwen3.encode(text, add_special_tokens=False).tolist() for text in texts]
    endpoint = ScriptedEndpoint(lambda request, _: sampled[int(request.request_id.rpartition("/")[2])])
    rollout = make_rollout()
    pool = PolicyPool([endpoint], 0)
    session = PolicySession(pool, qwen3, rollout, SamplingConfig(), run_seed=0, seed_scope="toy", window=4096, history=history)
    for messages in ([user("8 + 3")], [tool("11")], [user("and 1")]):
        await session.ask(messages, tools=TOOLS)
    assert rollout.metrics["forks"] == num_forks
    samples = rollout_to_samples(rollout)
    assert len(samples) == num_forks + 1
    trained = [sample.token_ids[sample.loss_mask].tolist() for sample in samples]
    assert [token for one in trained for token in one] == [token for one in sampled for token in one]
    (node,) = [node for node in rollout.nodes if node.role == "tool" and node.parent == 1]
    assert node.is_content is not None and qwen3.decode(node.token_ids[node.is_content]) == "11"


@needs_package
def test_other_tools_begin_anew(qwen3: Renderer) -> None:
    state = answered(qwen3, qwen3.open_turn(None, [user("8 + 3")], tools=TOOLS), "11<|im_end|>")
    for history in ("template", "keep"):
        assert qwen3.open_turn(state, [user("and 1")], history=history).is_fork


@needs_package
def test_the_packages_parser_reads_what_ours_does_and_words_what_is_broken(qwen3: Renderer) -> None:
    own = Renderer.from_pretrained(QWEN3)
    parser = KnownReplyParser(KnownModel("qwen3", str(QWEN3), own))
    text = f'<think>\nadd\n</think>\n\nSo: {CALL}\n<tool_call>\n{{"name": "add", "arguments": {{"a": 1\n</tool_call>'
    said = parser.parse(own.encode(text, add_special_tokens=False), turn=3)
    assert (said.reasoning, said.content.strip()) == ("add", "So:")
    good, broken = said.tool_calls
    assert (good.id, good.name, good.arguments) == ("call_3_0", "add", {"a": 8})
    assert broken.arguments is None and broken.id == "call_3_1" and "the call cannot be read: " in broken.error
    nan = parser.parse(own.encode('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', add_special_tokens=False), turn=0)
    assert nan.tool_calls[0].arguments is None and "NaN is no JSON" in nan.tool_calls[0].error


@needs_package
def test_the_packages_parser_never_raises() -> None:
    own = Renderer.from_pretrained(QWEN3)
    parser = KnownReplyParser(KnownModel("qwen3", str(QWEN3), own))
    rng = np.random.default_rng(0)
    tags = own.encode("<tool_call></tool_call><think></think>", add_special_tokens=False)
    for _ in range(200):
        ids = np.where(rng.random(20) < 0.3, rng.choice(tags, 20), rng.integers(0, own.vocab_size, 20))
        parser.parse(ids.astype(np.int32), turn=0)


@needs_package
def test_replies_of_a_format_that_we_read_are_read_by_our_parser(qwen3: Renderer) -> None:
    assert not isinstance(qwen3.parser, KnownReplyParser)
    assert qwen3.parser.format.name == "hermes"


@needs_package
def test_the_log_says_what_renders_and_where_it_parts_from_the_template(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="jaxrl.inference.rendering.known_models"):
        load_renderer(str(QWEN3), renderer="template")
        load_renderer(str(QWEN3), renderer="qwen3")
        load_renderer(str(TEMPLATES / "llama3"), renderer="llama-3")  # the package writes a date, this template none
    said = [record.getMessage() for record in caplog.records]
    read = "calls of tools are read as 'hermes': it reads what the chat template writes"
    assert said[:2] == [
        f"messages become tokens by the tokenizer's own chat template; {read}",
        f"messages become tokens by the renderer 'qwen3' of the `renderers` package; {read}",
    ]
    assert "the renderer 'llama-3' writes a plain question in other tokens than the chat template" in said[2]
