"""Where a request's fields come from: input tensors, the JSON of `sampling_parameters`, request parameters.

Pure functions. Each field is taken from the first of these that gives it, whatever the others say of it; null is "not
given". What results has one name a field, and values that the field's reader has checked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nereid.errors import InvalidRequestError, shorten, suggest
from nereid.server.fields import FIELDS
from nereid.server.readers import json_object

_LOG = logging.getLogger(__name__)
_PARAMETERS = "sampling_parameters"
_FIELDS = {name: field for field in FIELDS for name in (field.name, *field.aliases)}
# Names that mean something to the server, which hands them on among a request's parameters all the same.
_RESERVED = frozenset({"id", "timeout", "headers", "binary_data_output"})
_RESERVED_PREFIX = "triton_"
# Who says this gives and takes token ids.
_TOKENS_ONLY = "request_output_len"


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as the server gave it: input tensors by name, request parameters, arrival in monotonic seconds.

    client_id: what the client calls it; "" where it gave no id.
    """

    inputs: Mapping[str, npt.NDArray[np.generic]]
    parameters: Mapping[str, object]
    arrival_time: float
    client_id: str = ""


@dataclass(frozen=True, slots=True)
class _Given:
    """A field's value, under the name that the client wrote."""

    name: str
    value: object


def read_fields(raw: RawRequest, *, batched: bool, warn_of_unknown: bool) -> dict[str, Any]:
    """What a request says, by field. batched: its tensors have a leading dimension.  warn_of_unknown: unknown names are
    told to the log, and otherwise refused. Raises InvalidRequestError.
    """
    tensors = {name: _plain(name, array, batched=batched) for name, array in raw.inputs.items()}
    parameters = {name: value for name, value in raw.parameters.items() if not _is_reserved(name)}
    text = tensors.pop(_PARAMETERS, parameters.pop(_PARAMETERS, None))
    json_fields = {} if text is None else json_object(_PARAMETERS, text)
    found: dict[str, _Given] = {}
    for source in (tensors, json_fields, parameters):
        found = {**_by_field(source, warn_of_unknown=warn_of_unknown), **found}
    values = {name: _FIELDS[name].read(given.name, given.value) for name, given in found.items()}
    if "max_tokens" in found and found["max_tokens"].name == _TOKENS_ONLY:
        values.setdefault("return_output_ids", True)
    return values


def _is_reserved(name: str) -> bool:
    return name in _RESERVED or name.startswith(_RESERVED_PREFIX)


def _by_field(source: Mapping[str, object], *, warn_of_unknown: bool) -> dict[str, _Given]:
    """One source's values by the fields' own names. Raises InvalidRequestError where two names disagree, once they are
    read: 2 and "2" are the same number."""
    found: dict[str, _Given] = {}
    for name, value in source.items():
        field = _FIELDS.get(name)
        if field is None:
            _meet_unknown(name, warn_of_unknown=warn_of_unknown)
        elif value is not None:
            earlier = found.setdefault(field.name, _Given(name, value))
            if earlier.name != name and field.read(earlier.name, earlier.value) != field.read(name, value):
                message = f"{earlier.name}, {name}: got {shorten(earlier.value)} and {shorten(value)}"
                raise InvalidRequestError(f"{message}; allowed: one of the two, which are names of one field")
    return found


def _meet_unknown(name: str, *, warn_of_unknown: bool) -> None:
    message = f"unknown parameter {shorten(name)}{suggest(name, _FIELDS)}"
    if not warn_of_unknown:
        raise InvalidRequestError(message)
    _LOG.warning("%s; it is disregarded (unknown_parameters)", message)


def _plain(name: str, array: npt.NDArray[np.generic], *, batched: bool) -> object:
    """A tensor's one element, or the list of its elements where it may have many."""
    if batched:
        if array.ndim == 0 or array.shape[0] != 1:
            allowed = "a leading dimension of 1: one prompt a request (requests are batched by the engine)"
            raise InvalidRequestError.of_field(name, f"the shape {list(array.shape)}", allowed)
        array = array[0]
    field = _FIELDS.get(name)
    if field is not None and field.dims == (-1,):
        if array.ndim != 1:
            raise InvalidRequestError.of_field(name, f"the shape {list(array.shape)}", "one dimension")
        return [_decoded(name, element) for element in array.tolist()]
    if array.size != 1:
        raise InvalidRequestError.of_field(name, f"{array.size} elements", "exactly one element")
    return _decoded(name, array.reshape(-1).tolist()[0])


def _decoded(name: str, element: object) -> object:
    if not isinstance(element, bytes):
        return element
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        allowed = f"text in UTF-8 ({error.reason} at byte {error.start})"
        raise InvalidRequestError.of_field(name, element, allowed) from error
