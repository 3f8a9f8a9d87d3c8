"""Field: what there is to say of one thing that a request can say. Plain data; the table of all of them is `fields`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nereid.server.readers import Reader

STRING, BOOL, INT32, FP32, UINT64 = "TYPE_STRING", "TYPE_BOOL", "TYPE_INT32", "TYPE_FP32", "TYPE_UINT64"
ONE, MANY = (1,), (-1,)


class Group(Enum):
    """What a field is about; each is a table of README."""

    PROMPT = "prompt"
    SAMPLING = "sampling"
    GUIDE = "guide"
    SEQUENCES = "sequences"
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
        plain = self.dims == MANY or self.data_type == STRING
        switch = self.data_type == BOOL and self.group in (Group.PROMPT, Group.REPLY)
        return self.group is not Group.TENSORRT_LLM and (plain or switch)
