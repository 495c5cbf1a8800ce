"""What is trained: spans of a conversation's one text, and of prompt and completion, by published chat templates."""

# ruff: noqa: E501 - templates as they are published
from __future__ import annotations

import dataclasses
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from toolkit.core.errors import DataError
from toolkit.data.files import Document
from toolkit.data.tokenization import Encoded, Encoder

# Templates -------------------------------------------------------------------------------------------------------------

PUBLISHED = [
    "chatml", "llama_2", "llama_3", "mistral", "gemma", "qwen_25", "qwen_3", "phi_3", "zephyr", "deepseek_r1", "llama_3_first",
    "gpt_oss", "smolvlm",
]  # fmt: skip
(
    CHATML, LLAMA_2, LLAMA_3, MISTRAL, GEMMA, QWEN_25, QWEN_3, PHI_3, ZEPHYR, DEEPSEEK_R1, LLAMA_3_FIRST, HARMONY, PARTS,
) = (Path(__file__).with_name("chat_templates").joinpath(f"{name}.jinja").read_text(encoding="utf-8") for name in PUBLISHED)  # fmt: skip
"""As they are published, some without their parts for tools, GPT-OSS's (`HARMONY`) without its system text. Their last byte counts."""

HASHES = (
    "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_WITHOUT_END = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
END_ONCE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ALWAYS_PROMPTS = NO_PROMPT + "{{ '<|im_start|>assistant\n' }}"
THINK_PROMPT = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
MARKERS = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<｜User｜>", "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>",
]  # fmt: skip
WORDS = ["hi", "yes", "why", "no", "### assistant: yes no hi why a b c."]
TEXTS = [*WORDS, "user: hi\n\n### user: why\n\nassistant\n\nyes"] * 9


def byte_level(prefix: bool = False, trim: bool = False) -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", *MARKERS]
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    bpe.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, special_tokens=special, **options))
    if trim:
        bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<s>"
    )


def sentencepiece(scheme: str) -> Any:
    """As transformers converts Llama's: Metaspace, or a normalizer that prepends."""
    pieces = ["▁", "h", "i", "▁h", "▁hi", "y", "e", "s", "▁y", "▁ye", "▁yes", "ye", "yes", "Q", "▁Q", ":", "[", "]"]
    merges = [("▁", "h"), ("▁h", "i"), ("▁", "y"), ("▁y", "e"), ("▁ye", "s"), ("y", "e"), ("ye", "s"), ("▁", "Q")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: number for number, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "normalizer":
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    bpe.add_special_tokens(["<s>", "</s>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


BYTES = byte_level()


def encode(content: dict[str, Any], template: str | None = None, tokenizer: Any = BYTES, **how: Any) -> Encoded:
    (kind,) = {"messages", "prompt", "text"} & content.keys()
    encoder = Encoder(tokenizer=tokenizer, template=template, **{"mask_prompts": True, **how})
    (encoded,) = encoder.encode([Document(kind=kind, content=content, where="chat.jsonl, line 7")])
    return dataclasses.replace(encoded, trained=list(map(bool, encoded.trained)))


def trained(encoded: Encoded, tokenizer: Any = BYTES) -> list[str]:
    pairs = zip(encoded.ids, encoded.trained, strict=True)
    return [tokenizer.decode([token for token, _ in run]) for flag, run in groupby(pairs, lambda pair: pair[1]) if flag]


def chat(*contents: str, first: str = "user", **more: Any) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


TWO = chat("hi", "yes", "why", "no")
TEMPLATES: dict[str, tuple[str, list[dict[str, Any]], list[str], set[str]]] = {
    "ChatML": (CHATML, TWO, ["yes<|im_end|>\n", "no<|im_end|>\n"], set()),
    "Llama 2": (LLAMA_2, TWO, [" yes </s>", " no </s>"], set()),
    "Llama 3": (LLAMA_3, TWO, ["yes<|eot_id|>", "no<|eot_id|>"], set()),
    "the first Llama 3": (LLAMA_3_FIRST, TWO, ["yes<|eot_id|>", "no<|eot_id|>"], set()),
    "GPT-OSS": (
        HARMONY, TWO, ["<|channel|>final<|message|>yes<|end|>", "<|channel|>final<|message|>no<|return|>"], set()
    ),
    "a user after GPT-OSS": (HARMONY, chat("hi", "yes", "why"), ["<|channel|>final<|message|>yes<|end|>"], set()),
    "Mistral": (MISTRAL, TWO, ["yes</s>", "no</s>"], set()),
    "Gemma": (GEMMA, TWO, ["yes<end_of_turn>\n", "no<end_of_turn>\n"], set()),
    "Qwen2.5 with a default system text": (QWEN_25, TWO, ["yes<|im_end|>\n", "no<|im_end|>\n"], set()),
    "Qwen3": (QWEN_3, TWO, ["yes<|im_end|>\n", "<think>\n\n</think>\n\nno<|im_end|>\n"], set()),
    "Phi-3": (PHI_3, TWO, ["yes<|end|>\n", "no<|end|>\n</s>"], set()),
    "Zephyr": (ZEPHYR, TWO, ["yes</s>\n", "no</s>\n"], set()),
    "DeepSeek-R1": (DEEPSEEK_R1, TWO, ["yes<｜end▁of▁sentence｜>", "no<｜end▁of▁sentence｜>"], {"prompt"}),
    "a prompt that opens <think>": (THINK_PROMPT, TWO, ["yes<|im_end|>\n", "no<|im_end|>\n"], {"prompt"}),
    "### assistant:": (HASHES, TWO, [" yes\n\n", " no\n\n"], {"end"}),
    "an end once": (END_ONCE, TWO, [" yes\n", " no\n</s>"], set()),
    "generation": (MARKED, TWO, ["yes", "no"], {"end"}),
    "generation without an end": (MARKED_WITHOUT_END, TWO, [" yes", " no"], {"end"}),
    "no generation prompt": (NO_PROMPT, TWO, ["yes<|im_end|>\n", "no<|im_end|>\n"], set()),
    "always a generation prompt": (ALWAYS_PROMPTS, TWO, ["yes<|im_end|>\n", "no<|im_end|>\n"], set()),
    "begins with the assistant": (
        QWEN_25, chat("yes", "hi", "no", first="assistant"), ["yes<|im_end|>\n", "no<|im_end|>\n"], set()
    ),
    "ends with the user": (QWEN_3, chat("hi", "yes", "why"), ["yes<|im_end|>\n"], set()),
    "repeated texts": (CHATML, chat("yes", "yes", "yes", "yes"), ["yes<|im_end|>\n"] * 2, set()),
    "markers as text": (
        CHATML, chat("a<|im_end|>\n<|im_start|>assistant\nb", "yes", "c", "no"), ["yes<|im_end|>\n", "no<|im_end|>\n"], set()
    ),
    "whitespace around": (LLAMA_3, chat(" hi\n", "\n yes ", "why", "no"), ["yes<|eot_id|>", "no<|eot_id|>"], set()),
    "an empty answer": (CHATML, chat("hi", "", "why", "no"), ["<|im_end|>\n", "no<|im_end|>\n"], set()),
    "whitespace kept": (CHATML, chat("hi", "\n yes \n"), ["\n yes \n<|im_end|>\n"], set()),
    "whitespace kept without a prompt": (NO_PROMPT, chat("hi", "\n\nyes \n"), ["\n\nyes \n<|im_end|>\n"], set()),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_turn_trains(name: str) -> None:
    template, messages, expected, remarks = TEMPLATES[name]
    encoded = encode({"messages": messages}, template)
    assert trained(encoded) == expected
    assert set(encoded.remarks) == remarks
    text = BYTES.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert list(encoded.ids) == BYTES(text, add_special_tokens=False)["input_ids"], "the text is tokenized once"


def test_a_token_over_the_border_belongs_to_the_answer() -> None:
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)| ?\w+| ?[^\w\s]+[\r\n]*|\s+"), "isolated")  # as Llama 3's
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["</s>"], show_progress=False)
    bpe.train_from_iterator(TEXTS + ["a\n\nb", "a:\n"] * 20, trainer)
    tokenizers = [transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")]
    bpe = Tokenizer.from_str(bpe.to_str())
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizers.append(transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>"))
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
    for tokenizer in tokenizers:
        encoded = encode({"messages": chat("hi", "\nyes", "hi", "\nyes")}, template, tokenizer)
        assert trained(encoded, tokenizer) == ["\n\nyes\n", "\n\nyes\n"]
        pair = encode({"prompt": "a:", "completion": "\nb"}, None, tokenizer)
        assert trained(pair, tokenizer) == [":\nb</s>"]
        assert tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_word_after_a_trained_blank_is_not_trained() -> None:
    vicuna = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    messages = [*chat("hi", "yes"), {"role": "assistant", "content": "no"}]
    assert trained(encode({"messages": messages}, vicuna)) == [" yes", " no "]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}
CALLED = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'


@pytest.mark.parametrize("template", [QWEN_25, QWEN_3])
@pytest.mark.parametrize("content", ["", "yes"])
def test_calls_of_tools_are_trained_and_results_are_not(template: str, content: str) -> None:
    call = {**CALL, "content": content}
    result = {"role": "tool", "content": "no"}
    messages = [
        *chat("hi"),
        call,
        result,
        call,
        result,
        result,
        {"role": "assistant", "content": "why"},
        *chat("a", "b"),
    ]
    expected = (f"{content}\n" if content else "") + CALLED
    last = "<think>\n\n</think>\n\nb" if template == QWEN_3 else "b"
    spans = trained(encode({"messages": messages, "tools": TOOLS}, template))
    assert spans == [expected, expected, "why<|im_end|>\n", f"{last}<|im_end|>\n"]
    with pytest.raises(DataError, match="line 7: has 'tool_calls', which the chat template does not use"):
        encode({"messages": messages}, CHATML)
    with pytest.raises(DataError, match="line 7: has 'tools', which the chat template does not use"):
        encode({"messages": TWO, "tools": TOOLS}, CHATML)


def test_reasoning_is_trained_where_the_template_writes_it() -> None:
    for field in ("reasoning_content", "thinking"):
        messages = [*chat("hi"), {"role": "assistant", "content": "yes", field: "a b"}]
        encoded = encode({"messages": messages}, QWEN_3)
        assert trained(encoded) == ["<think>\na b\n</think>\n\nyes<|im_end|>\n"]
        assert encoded.remarks == []
        assert set(encode({"messages": messages}, CHATML).remarks) == {"reasoning"}
        assert set(encode({"messages": [*messages, *chat("why", "no")]}, QWEN_3).remarks) == {"reasoning"}
        assert set(encode({"messages": messages}, CHATML, mask_prompts=False).remarks) == {"reasoning"}
    within = chat("hi", "<think>\na b\n</think>\n\nyes")
    encoded = encode({"messages": within}, QWEN_3)
    assert (trained(encoded), encoded.remarks) == (["<think>\na b\n</think>\n\nyes<|im_end|>\n"], [])
    encoded = encode({"messages": within}, DEEPSEEK_R1)
    assert trained(encoded) == ["\n\nyes<｜end▁of▁sentence｜>"]
    assert set(encoded.remarks) == {"prompt", "reasoning"}
    assert trained(encode({"messages": within}, THINK_PROMPT)) == ["a b\n</think>\n\nyes<|im_end|>\n"]


def test_content_that_the_template_looks_at() -> None:
    messages = chat("hi", "yes", "<tool_response>why</tool_response>", "no")
    expected = ["<think>\n\n</think>\n\nno<|im_end|>\n"]
    assert trained(encode({"messages": messages}, QWEN_3)) == ["yes<|im_end|>\n", *expected]


def test_a_content_that_stands_elsewhere_too_is_not_mistaken() -> None:
    long = "a sentence of more than twenty characters"
    assert trained(encode({"messages": chat(long, long, f"again: {long}", f"{long}.")}, CHATML)) == [
        f"{long}<|im_end|>\n",
        f"{long}.<|im_end|>\n",
    ]
    shown = f"You answer with: {long}. {CHATML}"
    assert trained(encode({"messages": chat("what is the answer to all of it?", long)}, shown)) == [
        f"{long}<|im_end|>\n"
    ]
    last = "{% for m in messages %}{% if m.role == 'user' or loop.last %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
    with pytest.raises(DataError, match=r"message 1: .* cannot be located"):
        encode({"messages": chat(f"say: {long}", f"{long}, too", f"Is it {long}, too?", f"{long[::-1]}")}, last)


def test_a_chosen_turn() -> None:
    weighted = [{**message, "weight": 0} if message["content"] == "yes" else message for message in TWO]
    for template, last in ((CHATML, "no<|im_end|>\n"), (MARKED, "no")):
        assert trained(encode({"messages": TWO}, template, train_on="last-turn")) == [last]
        assert trained(encode({"messages": weighted}, template)) == [last]
        assert not any(encode({"messages": chat("hi")}, template).trained)
    with pytest.raises(DataError, match="message 1 has weight 0, and --no-mask-prompts trains everything"):
        encode({"messages": weighted}, CHATML, mask_prompts=False)
    first = MARKED.replace("m.role == 'assistant' %}{%", "m.role == 'assistant' and loop.last %}{%")
    with pytest.raises(DataError, match=r"message 1 \(1 parts are marked of 2 answers\)"):
        encode({"messages": weighted}, first)


def test_an_end_token_is_added() -> None:
    for template, expected in (
        (MARKED, ["yes<|im_end|>", "no<|im_end|>"]),
        (MARKED_WITHOUT_END, [" yes", " no</s>"]),
        (HASHES, [" yes\n\n", " no\n\n</s>"]),
        (CHATML, ["yes<|im_end|>\n", "no<|im_end|>\n"]),
    ):
        encoded = encode({"messages": TWO}, template, add_end_token=True)
        assert (trained(encoded), encoded.remarks) == (expected, [])


def test_turns_that_cannot_be_located() -> None:
    forgetful = "{% for m in messages %}{% if m.role == 'user' or loop.last %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    upper = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}\n{% endfor %}"
    twice = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.content }}\n{% endfor %}"
    sizes = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.content | length }}\n{% endfor %}"
    for template in (forgetful, twice, sizes, upper):
        with pytest.raises(DataError, match=r"line 7: message 1: .* cannot be located .*generation.*--no-mask-prompts"):
            encode({"messages": TWO}, template)
        assert all(encode({"messages": TWO}, template, mask_prompts=False).trained)
    ignores = "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
    encoded = encode({"messages": [*chat("hi", "yes"), {"role": "tool", "content": "no"}]}, ignores)
    assert set(encoded.remarks) == {"messages", "end"}


GET = {"type": "function", "function": {"name": "get", "arguments": {"city": "Paris"}}}
CALLING = [
    *chat("hi"),
    {"role": "assistant", "content": "", "tool_calls": [GET]},
    {"role": "tool", "content": "x"},
    *chat("why", "no")[1:],
]
CALLS: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "GPT-OSS": (
        HARMONY, CALLING, [' to=functions.get<|message|>{"city": "Paris"}<|call|>', "<|channel|>final<|message|>no<|return|>"],
    ),
    "a prompt that opens <think>": (
        QWEN_25.replace("assistant\\n' }}\n{%- endif", "assistant\\n<think>\\n' }}\n{%- endif"), CALLING,
        ['<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n', "no<|im_end|>\n"],
    ),
    "a thought and a call": (
        QWEN_3, [CALLING[0], {**CALLING[1], "content": "<think>\nhm\n</think>\n\n"}, *CALLING[2:]],
        ['<think>\nhm\n</think>\n\n<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n',
         "<think>\n\n</think>\n\nno<|im_end|>\n"],
    ),
    "an empty result": (
        QWEN_25, [*CALLING[:2], {"role": "tool", "content": ""}, *CALLING[3:]],
        ['<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n', "no<|im_end|>\n"],
    ),
    "two messages with a call each": (
        QWEN_25, [*CALLING[:2], *CALLING[1:]],
        [*['<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n'] * 2, "no<|im_end|>\n"],
    ),
    "no text without tools": (
        "{% if tools|length %}{% endif %}" + QWEN_25, CALLING,
        ['<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n', "no<|im_end|>\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_published_templates(name: str) -> None:
    template, messages, expected = CALLS[name]
    tools = {"tools": [{"type": "function", "function": {"name": "get"}}]} if "tools" in template else {}
    assert trained(encode({"messages": messages, **tools}, template)) == expected


def test_texts_and_tools_that_a_template_leaves_out() -> None:
    assert trained(encode({"messages": TWO}, PARTS)) == [" yes<|im_end|>\n", " no<|im_end|>\n"]
    tools = {"tools": [{"type": "function", "function": {"name": "get"}}]}
    with pytest.raises(DataError, match="has 'tools', which the chat template leaves out"):
        encode({"messages": TWO, **tools}, CHATML + "{# tools #}")
    with pytest.raises(DataError, match="renders none of the texts"):
        encode({"messages": TWO}, "{% for m in messages %}{{ m.role }}{% endfor %}", mask_prompts=False)
    beside = [*chat("hi"), {"role": "assistant", "content": "See.", "tool_calls": [GET]}]
    with pytest.raises(DataError, match=r"message 1 \(its content is left out beside its calls of tools"):
        encode({"messages": beside}, HARMONY)
    rome = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}
    both = [CALLING[0], {**CALLING[1], "tool_calls": [GET, rome]}, *CALLING[2:]]
    with pytest.raises(DataError, match=r"message 1 \(a call of get is left out"):
        encode({"messages": both}, HARMONY)
    thought = [CALLING[0], {**CALLING[1], "reasoning_content": "hm"}, *CALLING[2:]]
    assert encode({"messages": thought}, QWEN_25).remarks == ["reasoning"]
    silent = HARMONY.replace("if 'tool_calls' in m", "if m.content is none")
    with pytest.raises(DataError, match=r"message 1 \(a call of get is left out"):
        encode({"messages": CALLING}, silent + "{# tool_calls #}")


def test_blanks_before_an_answer_are_trained() -> None:
    """Also where the generation prompt opens <think>, and the text before the answer does not."""
    code = chat("hi", "    indented code", "why", "no")
    assert trained(encode({"messages": code}, THINK_PROMPT)) == ["    indented code<|im_end|>\n", "no<|im_end|>\n"]


def test_chat_templates_without_a_default() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = {"rag": CHATML, "other": CHATML}
    with pytest.raises(DataError, match="chat templates rag, other, no default"):
        encode({"messages": TWO}, None, tokenizer)


def test_the_first_token_stands_once() -> None:
    tokenizer = sentencepiece("normalizer")
    text, pair = (
        encode({"text": "<s>hi"}, None, tokenizer),
        encode({"prompt": "<s>hi", "completion": " yes</s>\n"}, None, tokenizer),
    )
    assert text.ids[:2].count(1) == pair.ids[:2].count(1) == 1
    assert text.remarks == pair.remarks == ["bos"]
    assert pair.ids.count(2) == 1, "the end is not added behind a line break"
    assert len(text.trained) == len(text.ids)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    assert list(encode({"text": "hi</s>"}, None, tokenizer).ids).count(2) == 1


# Prompt and completion ---------------------------------------------------------------------------------------------------

PAIRS = [
    ("Q:", " yes"),
    ("Q: ", "yes"),
    ("Q:", "é"),
    ("Q:\n", "yes"),
    ("Q: h", "i"),
    ("[Q]", "\n hi  "),
    ("Q: yes ", " hi"),
]
TOKENIZERS = {
    "byte-level": BYTES,
    "byte-level with a blank before": byte_level(prefix=True),
    "byte-level, trimmed offsets": byte_level(trim=True),
    **{scheme: sentencepiece(scheme) for scheme in ("always", "first", "never", "normalizer")},
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("pair", PAIRS)
def test_prompt_and_completion_are_one_text(name: str, pair: tuple[str, str]) -> None:
    tokenizer, (prompt, completion) = TOKENIZERS[name], pair
    encoded = encode({"prompt": prompt, "completion": completion}, tokenizer=tokenizer)
    ids = tokenizer(prompt + completion)["input_ids"]
    assert encoded.ids == [*ids, tokenizer.eos_token_id]
    (span,) = trained(encoded, tokenizer)
    assert span.endswith(f"{completion.strip()}</s>" if completion[-1] != " " else f"{completion.lstrip()}</s>")
    border = encoded.trained.index(True)
    assert len(tokenizer.decode(ids[:border], skip_special_tokens=True).lstrip()) <= len(prompt), (
        "a part is not trained"
    )
    assert len(tokenizer.decode(ids[: border + 1], skip_special_tokens=True).strip()) > len(prompt.strip()) - 1
    assert encode({"prompt": prompt, "completion": completion}, tokenizer=tokenizer, mask_prompts=False).trained == [
        True
    ] * len(encoded.ids)


def test_a_completion_after_a_character() -> None:
    for scheme in ("always", "first", "never", "normalizer"):
        tokenizer = TOKENIZERS[scheme]
        assert trained(encode({"prompt": "Q:", "completion": "é"}, tokenizer=tokenizer), tokenizer) == ["é</s>"]


def test_a_tokenizer_without_offsets_is_refused() -> None:
    slow = transformers.ByT5Tokenizer()
    assert all(encode({"text": "hi"}, tokenizer=slow).trained)
    with pytest.raises(DataError, match=r"line 7: the tokenizer .* has no fast version.*--no-mask-prompts"):
        encode({"prompt": "hi", "completion": "yes"}, tokenizer=slow)
    pair = encode({"prompt": "hi", "completion": "yes"}, tokenizer=slow, seq2seq=True)
    assert pair.ids[pair.split :] == slow("yes")["input_ids"]


PIECES = [
    "a", "u", "yes", "\n", "  ", "assistant", "<|im_end|>", "<|im_start|>assistant\n", "user", "<|eot_id|>", "###", " hi", "\n\n",
    "<think>x</think>", "é", "</s>", "[/INST]", "🙂", "<end_of_turn>\n",
]  # fmt: skip
ENDS = {
    "ChatML": (CHATML, "{}<|im_end|>\n", str), "Llama 3": (LLAMA_3, "{}<|eot_id|>", str.strip),
    "Gemma": (GEMMA, "{}<end_of_turn>\n", str.strip), "Qwen2.5": (QWEN_25, "{}<|im_end|>\n", str),
    "Mistral": (MISTRAL, "{}</s>", str), "Llama 2": (LLAMA_2, " {} </s>", str.strip), "without": (NO_PROMPT, "{}<|im_end|>\n", str),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_any_content_is_located(name: str) -> None:
    template, end, render = ENDS[name]
    generator = random.Random(name)
    for _ in range(100):
        contents = ["".join(generator.choices(PIECES, k=generator.randint(1, 5))) + "a" for _ in range(4)]
        spans = trained(encode({"messages": chat(*contents)}, template))
        assert spans == [end.format(render(content)) for content in contents[1::2]], contents
