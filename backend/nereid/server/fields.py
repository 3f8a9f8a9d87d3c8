"""The table of fields: everything that a request can say, under the one name that it has. Plain data.

A field is read by one function wherever it comes from; README's tables say of each what is said here. Which of them a
deployment declares as input tensors: texts, lists and switches always; what else is one number or truth value, and the
names that only TensorRT-LLM's clients send, where `max_batch_size` is 1 or more, as these clients expect. (The server
converts a key of a /generate body by the type that is declared, and takes no text for a number; what is not declared
reaches the model as it was written.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nereid.server.guides import GUIDE_READERS
from nereid.server.readers import (
    Reader,
    any_text,
    anything,
    biases,
    boolean,
    integer,
    json_list,
    json_object,
    never,
    numbers,
    one_answer,
    one_of,
    only_false,
    only_true,
    real,
    text,
    texts,
    token_ids,
    truncation,
    words,
)

_INT64 = 1 << 63
_MAX_SALT_CHARS = 256
_MAX_GUIDE_CHARS = 1 << 20


class Group(Enum):
    """What a field is about; each is a table of README."""

    PROMPT = "prompt"
    SAMPLING = "sampling"
    GUIDE = "guide"
    SCHEDULING = "scheduling"
    REPLY = "reply"
    TENSORRT_LLM = "tensorrt_llm"  # names of other engines that say what no field of ours does


@dataclass(frozen=True, slots=True)
class Field:
    """data_type, dims: of its tensor, as Triton's model configuration has them.  meaning: what README prints.
    aliases: other names for it; no two fields share one."""

    name: str
    read: Reader
    data_type: str
    dims: tuple[int, ...]
    group: Group
    meaning: str
    aliases: tuple[str, ...] = ()

    @property
    def always_declared(self) -> bool:
        """Whether every deployment has its tensor."""
        plain = self.dims == _MANY or self.data_type == _STRING
        switch = self.data_type == _BOOL and self.group in (Group.PROMPT, Group.REPLY)
        return self.group is not Group.TENSORRT_LLM and (plain or switch)


_STRING, _BOOL, _INT32, _FP32, _UINT64 = "TYPE_STRING", "TYPE_BOOL", "TYPE_INT32", "TYPE_FP32", "TYPE_UINT64"
_ONE, _MANY = (1,), (-1,)
_NO_LORA = "adapters (LoRA) are not offered"
_NO_BEAMS = "there is no beam search"


def _switch(name: str, meaning: str) -> Field:
    return Field(name, boolean, _BOOL, _ONE, Group.REPLY, meaning)


def _guide(name: str, meaning: str, aliases: tuple[str, ...] = ()) -> Field:
    return Field(name, GUIDE_READERS[name], _STRING, _ONE, Group.GUIDE, meaning, aliases)


_PROMPT = (
    Field("text_input", any_text, _STRING, _ONE, Group.PROMPT, "the prompt"),
    Field("input_ids", anything, _INT32, _MANY, Group.PROMPT, "the prompt as token ids"),
    Field(
        "messages", anything, _STRING, _ONE, Group.PROMPT,
        "the prompt as a JSON list of chat messages, which the model's chat template renders",
    ),
    Field("tools", json_list, _STRING, _ONE, Group.PROMPT, "with `messages`: a JSON list of tools for the template"),
    Field(
        "chat_template_kwargs", json_object, _STRING, _ONE, Group.PROMPT,
        "with `messages`: a JSON object of further variables for the template",
    ),
    Field(
        "add_generation_prompt", boolean, _BOOL, _ONE, Group.PROMPT,
        "with `messages`: the prompt goes on to where the assistant begins; default true",
    ),
    Field(
        "continue_final_message", boolean, _BOOL, _ONE, Group.PROMPT,
        "with `messages`: the prompt ends with the last message's content, which the answer continues; default false",
    ),
    Field(
        "truncate_prompt_tokens", truncation, _INT32, _ONE, Group.PROMPT,
        "keep the last so many tokens of the prompt; -1: as many as the context holds beside one token of output",
    ),
    Field(
        "exclude_input_in_output", boolean, _BOOL, _ONE, Group.PROMPT,
        "false: a single response begins with the prompt, which is the default for `text_input` and `input_ids`",
    ),
    Field("echo", boolean, _BOOL, _ONE, Group.PROMPT, "the text begins with the prompt, in a stream too"),
)  # fmt: skip
_SAMPLING = (
    Field(
        "max_tokens", integer(1), _INT32, _ONE, Group.SAMPLING,
        "1 or more, cut to the room that the context leaves; default 16 (`default_max_tokens`)",
        ("request_output_len",),
    ),
    Field(
        "min_tokens", integer(0), _INT32, _ONE, Group.SAMPLING,
        "at most `max_tokens`; so many tokens come before the one that stops; default 0", ("min_length",),
    ),
    Field("temperature", real(0.0, 1e6), _FP32, _ONE, Group.SAMPLING, "0 (greedy) to 1e6; default 1.0"),
    Field("top_k", integer(-1), _INT32, _ONE, Group.SAMPLING, "-1 and 0 keep all; default -1", ("runtime_top_k",)),
    Field("top_p", real(0.0, 1.0), _FP32, _ONE, Group.SAMPLING, "0 to 1; default 1.0", ("runtime_top_p",)),
    Field("min_p", real(0.0, 1.0), _FP32, _ONE, Group.SAMPLING, "0 to 1; default 0.0"),
    Field(
        "seed", integer(-_INT64, 2 * _INT64 - 1), _UINT64, _ONE, Group.SAMPLING,
        "64 bits; the same seed gives the same tokens, whatever else runs; default: a random one", ("random_seed",),
    ),
    Field(
        "repetition_penalty", real(0.01, 100.0), _FP32, _ONE, Group.SAMPLING,
        "0.01 to 100; of prompt and output; default 1.0, which is none",
    ),
    Field("frequency_penalty", real(-100.0, 100.0), _FP32, _ONE, Group.SAMPLING, "-100 to 100; default 0.0"),
    Field("presence_penalty", real(-100.0, 100.0), _FP32, _ONE, Group.SAMPLING, "-100 to 100; default 0.0"),
    Field(
        "logit_bias", biases, _STRING, _ONE, Group.SAMPLING,
        'a JSON object `{"token id": bias}`, each bias from -100 to 100; at most 1024',
    ),
    Field("allowed_token_ids", token_ids, _INT32, _MANY, Group.SAMPLING, "1 to 1024 ids; all others are banned"),
    Field(
        "bad_words", texts, _STRING, _MANY, Group.SAMPLING,
        "a text or up to 64, whose usual tokens (or those after a space) may not come in a row; empty ones are ignored",
    ),
    Field(
        "stop", texts, _STRING, _MANY, Group.SAMPLING,
        "a text or up to 64 that end the output and are no part of it; empty ones are ignored", ("stop_words",),
    ),
    Field("stop_token_ids", token_ids, _INT32, _MANY, Group.SAMPLING, "ids of the vocabulary, up to 1024"),
    Field("include_stop_str_in_output", boolean, _BOOL, _ONE, Group.SAMPLING, "show the `stop` found; default false"),
    Field("ignore_eos", boolean, _BOOL, _ONE, Group.SAMPLING, "go on after the model's end; default false"),
    Field("skip_special_tokens", boolean, _BOOL, _ONE, Group.SAMPLING, "leave control tokens out; default true"),
    Field(
        "logprobs", integer(0), _INT32, _ONE, Group.SAMPLING,
        "so many of the best tokens are told at each position, beside the chosen one; 0 to 20 (`max_logprobs`)",
    ),
    Field("prompt_logprobs", integer(0), _INT32, _ONE, Group.SAMPLING, "likewise for the positions of the prompt"),
)  # fmt: skip
_GUIDE = (
    _guide(
        "guided_decoding",
        'a JSON object: `{"json": schema}`, `{"json_object": true}`, `{"regex": text}`, `{"grammar": text}` or '
        '`{"choice": [texts]}`',
        ("structured_outputs",),
    ),
    _guide("guided_json", "a JSON schema"),
    _guide("guided_regex", "a regular expression"),
    _guide("guided_grammar", "a grammar in Lark or EBNF"),
    _guide("guided_choice", "a JSON list of texts"),
    _guide("response_format", "as in OpenAI's API"),
    Field(
        "guided_decoding_guide_type", any_text, _STRING, _ONE, Group.GUIDE,
        "`json`, `json_schema`, `regex` or `ebnf_grammar` (TensorRT-LLM's)",
    ),
    Field(
        "guided_decoding_guide", text(_MAX_GUIDE_CHARS), _STRING, _ONE, Group.GUIDE,
        "the schema, expression or grammar for it",
    ),
)  # fmt: skip
_SCHEDULING = (
    Field("priority", integer(-100, 100), _INT32, _ONE, Group.SCHEDULING, "-100 to 100, lower goes first; default 0"),
    Field(
        "cache_salt", text(_MAX_SALT_CHARS), _STRING, _ONE, Group.SCHEDULING,
        f"the tenant: none shares cached blocks with another; up to {_MAX_SALT_CHARS} characters",
    ),
    Field("cache", boolean, _BOOL, _ONE, Group.SCHEDULING, "no effect yet: there is no prefix cache; default true"),
    Field(
        "speculation", boolean, _BOOL, _ONE, Group.SCHEDULING,
        "no effect yet: there is no speculative decoding; default true",
    ),
    Field(
        "timeout_ms", integer(1, 1 << 40), _INT32, _ONE, Group.SCHEDULING,
        "the request ends with `timeout` and what it has; default 300000 (`default_timeout_ms`)",
    ),
)  # fmt: skip
_REPLY = (
    Field(
        "stream", boolean, _BOOL, _ONE, Group.REPLY,
        "many responses, each with what is new since the one before; default false: one response", ("streaming",),
    ),
    _switch("return_finish_reason", "`finish_reason`"),
    _switch("return_stop_reason", "`stop_reason`"),
    _switch("return_cumulative_logprob", "`cumulative_logprob`"),
    _switch("return_logprobs", "`logprobs`, whose number the field `logprobs` says"),
    _switch("return_prompt_logprobs", "`prompt_logprobs`, likewise"),
    _switch("return_num_input_tokens", "`num_input_tokens`"),
    _switch("return_num_output_tokens", "`num_output_tokens`"),
    _switch("return_num_cached_tokens", "`num_cached_tokens`"),
    _switch("return_output_ids", "`output_ids`"),
    _switch("return_sequence_index", "`sequence_index`"),
    _switch("return_perf_metrics", "the last response's times and counts"),
)  # fmt: skip


def _accepted(name: str, read: Reader, data_type: str, meaning: str, aliases: tuple[str, ...] = ()) -> Field:
    return Field(name, read, data_type, _ONE, Group.TENSORRT_LLM, meaning, aliases)


_TENSORRT_LLM = (
    _accepted("end_id", integer(-1), _INT32, "ends the output in place of the model's own ids; -1: nothing does"),
    _accepted("pad_id", integer(-(1 << 31)), _INT32, "no effect: nothing is padded"),
    _accepted("input_lengths", integer(1), _INT32, "the number of `input_ids`, which it must equal"),
    _accepted("beam_width", one_answer, _INT32, "1"),
    _accepted("num_return_sequences", one_answer, _INT32, "1", ("n", "best_of")),
    _accepted("length_penalty", one_of((0, 1), _NO_BEAMS), _FP32, "0 or 1, which are none", ("len_penalty",)),
    _accepted("early_stopping", only_false(_NO_BEAMS), _BOOL, "false"),
    _accepted("use_beam_search", only_false(_NO_BEAMS), _BOOL, "false"),
    _accepted("beam_search_diversity_rate", one_of((0,), _NO_BEAMS), _FP32, "0"),
    _accepted("return_log_probs", boolean, _BOOL, "fills `cum_log_probs` and `output_log_probs`"),
    _accepted("return_context_logits", only_false("logits are not given out"), _BOOL, "false"),
    _accepted("return_generation_logits", only_false("logits are not given out"), _BOOL, "false"),
    Field(
        "embedding_bias_words", words, _STRING, _MANY, Group.TENSORRT_LLM,
        "texts of one token each, with `embedding_bias_weights`: as `logit_bias`",
    ),
    Field("embedding_bias_weights", numbers, _FP32, _MANY, Group.TENSORRT_LLM, "a weight for each of them"),
    _accepted("lora_task_id", never(_NO_LORA), _UINT64, "refused"),
    _accepted("lora_name", never(_NO_LORA), _STRING, "refused"),
    _accepted("detokenize", only_true("text is always made"), _BOOL, "true"),
    _accepted("spaces_between_special_tokens", boolean, _BOOL, "no effect"),
)  # fmt: skip

FIELDS = (*_PROMPT, *_SAMPLING, *_GUIDE, *_SCHEDULING, *_REPLY, *_TENSORRT_LLM)
