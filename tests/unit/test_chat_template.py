"""The chat template: as transformers renders it, sandboxed, and refused clearly."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from nereid.errors import InvalidRequestError, ModelLoadError
from nereid.tokenization.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello\n{{ not a template }} é 🙂"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]


@cache
def reference_of(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:2], MESSAGES[1:]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(
    smollm2_directory: Path, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    reference = reference_of(smollm2_directory)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    template = ChatTemplate(smollm2_directory)
    assert template.render(messages, add_generation_prompt=add_generation_prompt) == expected


def write(directory: Path, template: str) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "<s>"}))
    return directory


def test_a_template_of_its_own_file_goes_first(tmp_path: Path) -> None:
    write(tmp_path, "one")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}two")
    assert ChatTemplate(tmp_path).render(MESSAGES) == "<s>two"


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    template = ChatTemplate(write(tmp_path, "{{ raise_exception('no system role') }}"))
    with pytest.raises(InvalidRequestError, match="no system role"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{{ 'a' + messages[0].missing_number }}", None),
        ("{{ 'a' + tools }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ [1, 2].index(3) }}", "ValueError"),
    ],
)
def test_a_template_that_fails_does_not_show_python(tmp_path: Path, source: str, kind: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(write(tmp_path, source)).render(MESSAGES)
    fails = f"messages: the model's chat template fails on them ({kind})"
    refuses = "messages: the model's chat template refuses them: 'dict object' has no attribute 'missing_number'"
    assert str(caught.value) == (refuses if kind is None else fails)


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    template = ChatTemplate(write(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(InvalidRequestError):
        template.render(MESSAGES)


@pytest.mark.parametrize("text", ["{", "{}", '{"chat_template": "{% for %}"}', '{"chat_template": 5}'])
def test_a_directory_without_a_usable_template_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="no usable chat_template"):
        ChatTemplate(tmp_path)


def test_of_several_templates_that_for_tools_serves_requests_with_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0] }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = ChatTemplate(tmp_path)
    assert (template.render(MESSAGES), template.render(MESSAGES, tools=["t"])) == ("plain", "t")


LLAMA_3_1 = "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{% if tools %}x{% endif %}"


@pytest.mark.parametrize(
    ("source", "warns"),
    [
        ("{{ messages[0].content }}", True),
        ("{# tools #}{{ 'tools' }}", True),
        ("{% for tool in tools or [] %}{{ tool }}{% endfor %}", False),
        ("{% if tools is defined %}x{% endif %}", False),
        (LLAMA_3_1, False),
    ],
)
def test_tools_that_a_template_does_not_show_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str, warns: bool
) -> None:
    template = ChatTemplate(write(tmp_path, source))
    for tools in (None, list[Any]()):
        template.render(MESSAGES, tools=tools)
    assert not caplog.records
    for _ in range(3):
        template.render(MESSAGES, tools=[{"type": "function"}])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warns
    assert ("tokenizer_config.json does not show" in caplog.text) is warns


def test_only_the_template_that_is_rendered_is_asked_for_tools(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0] }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    ChatTemplate(tmp_path).render(MESSAGES, tools=["t"])
    assert not caplog.records


def test_smollm2s_template_drops_tools(smollm2_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    ChatTemplate(smollm2_directory).render(MESSAGES, tools=["t"])
    assert "they have no effect" in caplog.text


def test_a_template_finds_what_it_finds_in_transformers(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ thinking }}{{ pad_token }}{{ strftime_now('%%') }}{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}"
    )
    template = ChatTemplate(write(tmp_path, source))
    rendered = template.render([{"role": "user", "content": "<é>"}], variables={"thinking": "x"})
    assert rendered == '"<é>"x%{\n "b": 1,\n "a": [\n  2\n ]\n}'


@pytest.mark.parametrize(("template", "expected"), [("{{ messages[0].content | trim }}!", "a b"), ("no", None)])
def test_a_prompt_may_end_in_the_last_message(tmp_path: Path, template: str, expected: str | None) -> None:
    rendered = ChatTemplate(write(tmp_path, template))
    messages = [{"role": "assistant", "content": " a b "}]
    if expected is None:
        with pytest.raises(InvalidRequestError, match="continue_final_message: got true"):
            rendered.render(messages, continue_final_message=True)
    else:
        assert rendered.render(messages, continue_final_message=True) == expected


@pytest.mark.parametrize("content", ["end", "im", "\n", "<|im_end|>", "assistant", "a b ", "\U000f0000"])
def test_a_prompt_ends_in_the_last_message_whatever_it_says(tmp_path: Path, content: str) -> None:
    """Also where the template itself says the same behind it."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    rendered = ChatTemplate(write(tmp_path, template)).render(messages, continue_final_message=True)
    assert rendered == f"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{content}"
