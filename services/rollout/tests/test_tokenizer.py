"""Text to ids: exactly one BOS, whatever template and tokenizer do."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vime_rollout.engines.hf_tokenizer import HfTokenizer

from .conftest import make_tokenizer

WITH_BOS = "<bos>{% for m in messages %}{{ m['content'] }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]


def tokenizer(adds_bos: bool, template: str | None) -> Any:
    vocab = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"<bos>": 256, "<eos>": 257}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_k34_a_rendered_chat_has_one_bos_whether_template_or_tokenizer_writes_it(template: str) -> None:
    ids = HfTokenizer(tokenizer(True, template)).encode_chat(MESSAGES, None, {})
    assert ids.count(256) == 1
    assert ids[0] == 256
    assert len(ids) == 3


def test_k34_plain_text_has_one_bos_also_where_the_text_begins_with_it() -> None:
    ours = HfTokenizer(tokenizer(True, None))
    assert ours.encode_text("hi") == ours.encode_text("<bos>hi") == ours.encode_text("<bos><bos>hi")
    assert ours.encode_text("hi")[0] == 256


def test_a_tokenizer_that_adds_no_bos_gets_what_the_template_writes_and_nothing_else() -> None:
    assert HfTokenizer(tokenizer(False, WITH_BOS)).encode_chat(MESSAGES, None, {}).count(256) == 1
    assert HfTokenizer(tokenizer(False, WITHOUT_BOS)).encode_chat(MESSAGES, None, {}).count(256) == 0
    assert HfTokenizer(make_tokenizer()).encode_text("hi") == make_tokenizer()("hi")["input_ids"]


def test_decoding_gives_the_text_back_with_or_without_special_tokens() -> None:
    ours = HfTokenizer(tokenizer(True, WITH_BOS))
    ids = [*ours.encode_text("hé , it 's"), 257]
    assert ours.decode(ids) == "<bos>hé , it 's<eos>"
    assert ours.decode(ids, skip_special_tokens=True) == "hé , it 's"


def test_the_digest_is_of_the_template() -> None:
    digests = {HfTokenizer(tokenizer(True, t)).chat_template_digest() for t in (WITH_BOS, WITHOUT_BOS, None)}
    assert len(digests) == 3
    assert all(len(digest) == 32 for digest in digests)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['tool'].name.x }}", "cannot render"),
    ],
)
def test_messages_that_cannot_be_rendered_are_an_error_with_the_reason(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HfTokenizer(tokenizer(True, template)).encode_chat(MESSAGES, None, {})


def test_tools_and_template_arguments_reach_the_template() -> None:
    template = "{{ tools | length }}{{ mode }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    ours = HfTokenizer(tokenizer(False, template))
    assert ours.decode(ours.encode_chat(MESSAGES, [tool], {"mode": "x"})) == "1xhi"


def test_the_longest_token_bounds_what_a_context_can_hold() -> None:
    assert HfTokenizer(make_tokenizer()).longest_token == len("<|endoftext|>")


TALKATIVE = (
    "{% set ns = namespace(n=0) %}"
    "{% generation %}{{ bos_token }}{% for m in messages %}{% if loop.index > limit|default(9) %}{% break %}{% endif %}"
    "{{ m['content'] }}{% endfor %}{% endgeneration %}{% if enable_thinking %}<think>{% endif %}{{ tools|tojson }}"
)


def test_template_arguments_are_data_that_the_template_reads() -> None:
    ours = HfTokenizer(tokenizer(False, TALKATIVE))
    assert ours.decode(ours.encode_chat(MESSAGES, None, {"enable_thinking": True})).endswith("<think>null")
    assert ours.decode(ours.encode_chat(MESSAGES, None, {"limit": 0, "add_generation_prompt": False})) == "<bos>null"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"chat_template": "7{{ 3*3 }}"},
            "no argument 'chat_template', it has: add_gen[a-z_]+, continue_final_message, enable_thinking, limit$",
        ),
        ({"tools": [1]}, "no argument 'tools'"),
        ({"messages": []}, "no argument 'messages'"),
        ({"bos_token": "x"}, "no argument 'bos_token'"),
        ({"tokenizer_kwargs": {}}, "no argument 'tokenizer_kwargs'"),
        ({"tokenize": True}, "no argument 'tokenize'"),
        ({"enable_thinkin": True}, "no argument 'enable_thinkin', it has: .*enable_thinking, limit"),
        ({"add_generation_prompt": "{{ 3*3 }}"}, "must be true or false"),
        ({"limit": []}, "cannot render these messages"),
    ],
)
def test_other_template_arguments_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HfTokenizer(tokenizer(False, TALKATIVE)).encode_chat(MESSAGES, None, options)
