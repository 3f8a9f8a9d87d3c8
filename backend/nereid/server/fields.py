"""The table of fields: everything that a request can say, under the one name that it has. Plain data.

A field is read by one function wherever it comes from; README's tables say of each what is said here. Which of them a
deployment declares as input tensors: texts, lists and switches always; what else is one number or truth value, and the
names that only TensorRT-LLM's clients send, where `max_batch_size` is 1 or more, as these clients expect. (The server
converts a key of a /generate body by the type that is declared, and takes no text for a number; what is not declared
reaches the model as it was written.)
"""

from __future__ import annotations

from nereid.server.branching import MAX_SEQUENCES
from nereid.server.field import BOOL, FP32, INT32, MANY, ONE, STRING, UINT64, Field, Group
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
    only,
    only_false,
    only_true,
    real,
    text,
    texts,
    token_ids,
    truncation,
    words,
)

_INT32, _INT64 = 1 << 31, 1 << 63
_MAX_SALT_CHARS = 256
_MAX_GUIDE_CHARS = 1 << 20
_NO_LORA = "adapters (LoRA) are not offered"


def _switch(name: str, meaning: str) -> Field:
    return Field(name, boolean, BOOL, ONE, Group.REPLY, meaning)


def _guide(name: str, meaning: str, aliases: tuple[str, ...] = ()) -> Field:
    return Field(name, GUIDE_READERS[name], STRING, ONE, Group.GUIDE, meaning, aliases)


_PROMPT = (
    Field("text_input", any_text, STRING, ONE, Group.PROMPT, "the prompt"),
    Field("input_ids", anything, INT32, MANY, Group.PROMPT, "the prompt as token ids"),
    Field(
        "messages", anything, STRING, ONE, Group.PROMPT,
        "the prompt as a JSON list of chat messages, which the model's chat template renders",
    ),
    Field("tools", json_list, STRING, ONE, Group.PROMPT, "with `messages`: a JSON list of tools for the template"),
    Field(
        "chat_template_kwargs", json_object, STRING, ONE, Group.PROMPT,
        "with `messages`: a JSON object of further variables for the template",
    ),
    Field(
        "add_generation_prompt", boolean, BOOL, ONE, Group.PROMPT,
        "with `messages`: the prompt goes on to where the assistant begins; default true",
    ),
    Field(
        "continue_final_message", boolean, BOOL, ONE, Group.PROMPT,
        "with `messages`: the prompt ends with the last message's content, which the answer continues; default false",
    ),
    Field(
        "truncate_prompt_tokens", truncation, INT32, ONE, Group.PROMPT,
        "keep the last so many tokens of the prompt; -1: as many as the context holds beside one token of output",
    ),
    Field(
        "exclude_input_in_output", boolean, BOOL, ONE, Group.PROMPT,
        "false: a single response begins with the prompt, which is the default for `text_input` and `input_ids`",
    ),
    Field("echo", boolean, BOOL, ONE, Group.PROMPT, "the text begins with the prompt, in a stream too"),
)  # fmt: skip
_SAMPLING = (
    Field(
        "max_tokens", integer(1), INT32, ONE, Group.SAMPLING,
        "1 or more, cut to the room that the context leaves; default 16 (`default_max_tokens`)",
        ("request_output_len",),
    ),
    Field(
        "min_tokens", integer(0), INT32, ONE, Group.SAMPLING,
        "at most `max_tokens`; so many tokens come before the one that stops; default 0", ("min_length",),
    ),
    Field("temperature", real(0.0, 1e6), FP32, ONE, Group.SAMPLING, "0 (greedy) to 1e6; default 1.0"),
    Field("top_k", integer(-1), INT32, ONE, Group.SAMPLING, "-1 and 0 keep all; default -1", ("runtime_top_k",)),
    Field("top_p", real(0.0, 1.0), FP32, ONE, Group.SAMPLING, "0 to 1; default 1.0", ("runtime_top_p",)),
    Field("min_p", real(0.0, 1.0), FP32, ONE, Group.SAMPLING, "0 to 1; default 0.0"),
    Field(
        "seed", integer(-_INT64, 2 * _INT64 - 1), UINT64, ONE, Group.SAMPLING,
        "64 bits; the same seed gives the same tokens, whatever else runs; default: a random one", ("random_seed",),
    ),
    Field(
        "repetition_penalty", real(0.01, 100.0), FP32, ONE, Group.SAMPLING,
        "0.01 to 100; of prompt and output; default 1.0, which is none",
    ),
    Field("frequency_penalty", real(-100.0, 100.0), FP32, ONE, Group.SAMPLING, "-100 to 100; default 0.0"),
    Field("presence_penalty", real(-100.0, 100.0), FP32, ONE, Group.SAMPLING, "-100 to 100; default 0.0"),
    Field(
        "logit_bias", biases, STRING, ONE, Group.SAMPLING,
        'a JSON object `{"token id": bias}`, each bias from -100 to 100; at most 1024',
    ),
    Field("allowed_token_ids", token_ids, INT32, MANY, Group.SAMPLING, "1 to 1024 ids; all others are banned"),
    Field(
        "bad_words", texts, STRING, MANY, Group.SAMPLING,
        "a text or up to 64, whose usual tokens (or those after a space) may not come in a row; empty ones are ignored",
    ),
    Field(
        "stop", texts, STRING, MANY, Group.SAMPLING,
        "a text or up to 64 that end the output and are no part of it; empty ones are ignored", ("stop_words",),
    ),
    Field("stop_token_ids", token_ids, INT32, MANY, Group.SAMPLING, "ids of the vocabulary, up to 1024"),
    Field("include_stop_str_in_output", boolean, BOOL, ONE, Group.SAMPLING, "show the `stop` found; default false"),
    Field("ignore_eos", boolean, BOOL, ONE, Group.SAMPLING, "go on after the model's end; default false"),
    Field("skip_special_tokens", boolean, BOOL, ONE, Group.SAMPLING, "leave control tokens out; default true"),
    Field(
        "logprobs", integer(0), INT32, ONE, Group.SAMPLING,
        "so many of the best tokens are told at each position, beside the chosen one; 0 to 20 (`max_logprobs`)",
    ),
    Field("prompt_logprobs", integer(0), INT32, ONE, Group.SAMPLING, "likewise for the positions of the prompt"),
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
        "guided_decoding_guide_type", any_text, STRING, ONE, Group.GUIDE,
        "`json`, `json_schema`, `regex` or `ebnf_grammar` (TensorRT-LLM's)",
    ),
    Field(
        "guided_decoding_guide", text(_MAX_GUIDE_CHARS), STRING, ONE, Group.GUIDE,
        "the schema, expression or grammar for it",
    ),
)  # fmt: skip
_SEQUENCES = (
    Field(
        "n", integer(1, MAX_SEQUENCES), INT32, ONE, Group.SEQUENCES,
        f"sequences in the answer: 1 to {MAX_SEQUENCES}, and at most `max_num_seqs`; default 1, of a beam search "
        "`beam_width`",
        ("num_return_sequences",),
    ),
    Field(
        "best_of", integer(1, MAX_SEQUENCES), INT32, ONE, Group.SEQUENCES,
        "so many are drawn, of which the `n` with the largest cumulative logprob are told; at least `n`, which is the "
        "default",
    ),
    Field(
        "beam_width", integer(1, MAX_SEQUENCES), INT32, ONE, Group.SEQUENCES,
        "above 1: a beam search of that width, whose `n` best are told; default 1",
    ),
    Field(
        "length_penalty", real(-10.0, 10.0), FP32, ONE, Group.SEQUENCES,
        "a finished beam's cumulative logprob is divided by its length to this power; -10 to 10; default 1.0",
        ("len_penalty",),
    ),
    Field(
        "early_stopping", boolean, BOOL, ONE, Group.SEQUENCES,
        "the search ends with `beam_width` finished beams; default false: when no other can become better",
    ),
    Field(
        "use_beam_search", boolean, BOOL, ONE, Group.SEQUENCES,
        "vLLM's older way to ask for one: its width is `beam_width`, else `best_of`, else `n`",
    ),
)  # fmt: skip
_SCHEDULING = (
    Field("priority", integer(-100, 100), INT32, ONE, Group.SCHEDULING, "-100 to 100, lower goes first; default 0"),
    Field(
        "cache_salt", text(_MAX_SALT_CHARS), STRING, ONE, Group.SCHEDULING,
        f"the tenant: none shares cached blocks with another; up to {_MAX_SALT_CHARS} characters",
    ),
    Field(
        "cache", boolean, BOOL, ONE, Group.SCHEDULING,
        "the prefix cache is asked for the prompt, and keeps what is computed; default true",
    ),
    Field(
        "speculation", boolean, BOOL, ONE, Group.SCHEDULING,
        "no effect yet: there is no speculative decoding; default true",
    ),
    Field(
        "timeout_ms", integer(1, 1 << 40), INT32, ONE, Group.SCHEDULING,
        "the request ends with `timeout` and what it has; default 300000 (`default_timeout_ms`)",
    ),
)  # fmt: skip
_REPLY = (
    Field(
        "stream", boolean, BOOL, ONE, Group.REPLY,
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
    return Field(name, read, data_type, ONE, Group.TENSORRT_LLM, meaning, aliases)


_TENSORRT_LLM = (
    _accepted("end_id", integer(-1), INT32, "ends the output in place of the model's own ids; -1: nothing does"),
    _accepted(
        "pad_id", integer(-_INT32, _INT32 - 1), INT32,
        "what fills rows of `output_ids` that are shorter than others; default: `end_id`, or 0",
    ),
    _accepted("input_lengths", integer(1), INT32, "the number of `input_ids`, which it must equal"),
    _accepted("beam_search_diversity_rate", only(0, "beams are not made to differ"), FP32, "0"),
    _accepted("return_log_probs", boolean, BOOL, "fills `cum_log_probs` and `output_log_probs`"),
    _accepted("return_context_logits", only_false("logits are not given out"), BOOL, "false"),
    _accepted("return_generation_logits", only_false("logits are not given out"), BOOL, "false"),
    Field(
        "embedding_bias_words", words, STRING, MANY, Group.TENSORRT_LLM,
        "texts of one token each, with `embedding_bias_weights`: as `logit_bias`",
    ),
    Field("embedding_bias_weights", numbers, FP32, MANY, Group.TENSORRT_LLM, "a weight for each of them"),
    _accepted("lora_task_id", never(_NO_LORA), UINT64, "refused"),
    _accepted("lora_name", never(_NO_LORA), STRING, "refused"),
    _accepted("detokenize", only_true("text is always made"), BOOL, "true"),
    _accepted("spaces_between_special_tokens", boolean, BOOL, "no effect"),
)  # fmt: skip

FIELDS = (*_PROMPT, *_SAMPLING, *_GUIDE, *_SEQUENCES, *_SCHEDULING, *_REPLY, *_TENSORRT_LLM)
