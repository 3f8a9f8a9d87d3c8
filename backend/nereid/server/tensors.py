"""The tensors that every deployment of Nereid has. Plain data; a user's config.pbtxt need not repeat them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, Triton data type and dims of a tensor; meaning is what README prints."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    meaning: str

    def as_config(self, *, optional: bool) -> dict[str, object]:
        """The entry that Triton's model configuration takes."""
        entry: dict[str, object] = {"name": self.name, "data_type": self.data_type, "dims": list(self.dims)}
        return {**entry, "optional": True} if optional else entry


INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", (1,), "the prompt"),
    TensorSpec("input_ids", "TYPE_INT32", (-1,), "the prompt as token ids, in place of text_input"),
    TensorSpec("stream", "TYPE_BOOL", (1,), "many responses, each with new text; default false: one response"),
    TensorSpec("sampling_parameters", "TYPE_STRING", (1,), "a JSON object; else the request's parameters are used"),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", (1,), "default: false for one response, true for a stream"),
    TensorSpec("return_finish_reason", "TYPE_BOOL", (1,), "fill finish_reason"),
    TensorSpec("return_num_input_tokens", "TYPE_BOOL", (1,), "fill num_input_tokens"),
    TensorSpec("return_num_output_tokens", "TYPE_BOOL", (1,), "fill num_output_tokens"),
)
OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", (-1,), "the text; in a stream, the text since the response before"),
    TensorSpec("finish_reason", "TYPE_STRING", (-1,), "stop, length or timeout; None before the last response"),
    TensorSpec("num_input_tokens", "TYPE_UINT32", (1,), "tokens of the prompt"),
    TensorSpec("num_output_tokens", "TYPE_UINT32", (-1,), "tokens generated; in a stream, since the response before"),
)
