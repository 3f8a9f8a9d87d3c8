"""`tools` and `tool_choice` of a chat -> which functions the model may call, and whether it must. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nereid.gateway.errors import invalid
from nereid.gateway.schemas import GUIDES, ChatRequest, Function, NamedTool, Tool


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """shown: the tools that the model is told of.  functions: those that it may call.  forced: it must call one.
    parallel: it may make several calls."""

    shown: tuple[Tool, ...]
    functions: tuple[Function, ...]
    forced: bool
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)


def plan_tools(body: ChatRequest) -> ToolPlan:
    """Raises GatewayError where the fields do not fit together.

    `none` hides the tools from the model, for what it writes is then text in any case. A named tool is called once.
    """
    functions = tuple(tool.function for tool in body.tools)
    names = [function.name for function in functions]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise invalid(f"tools[{number}].function.name", name, "a name that no tool before has")
    choice = body.tool_choice
    if choice == "none" or (not functions and choice in (None, "auto")):
        return ToolPlan((), (), forced=False, parallel=False)
    if not functions:
        raise invalid("tool_choice", _said(choice), "none or auto where no tools are given")
    if choice in (None, "auto"):
        return ToolPlan(tuple(body.tools), functions, forced=False, parallel=body.parallel_tool_calls)
    _check_no_other_guide(body)
    if isinstance(choice, NamedTool):
        functions = tuple(function for function in functions if function.name == choice.function.name)
        if not functions:
            raise invalid("tool_choice.function.name", choice.function.name, f"a declared tool: {', '.join(names)}")
    several = body.parallel_tool_calls and choice == "required"
    return ToolPlan(tuple(body.tools), functions, forced=True, parallel=several)


def _check_no_other_guide(body: ChatRequest) -> None:
    """A forced call is a guide, and a text can have but one."""
    for name in sorted(GUIDES & body.passed_on.keys()):
        value = body.passed_on[name]
        if value != {"type": "text"}:
            raise invalid(name, value, "nothing where tool_choice forces a call")


def _said(choice: object) -> object:
    return choice.model_dump() if isinstance(choice, NamedTool) else choice
