"""Agents of three libraries, with tools and an output type, as their users write them."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic


class Report(pydantic.BaseModel):
    """Output type of the agents."""

    city: Literal["Oslo", "Rome"]
    is_warm: bool


class Counter:
    """The tool of the agents: it counts its calls, and checks their arguments."""

    def __init__(self) -> None:
        self.num_calls = 0

    def weather(
        self, city: Literal["Oslo", "Rome"], days: Annotated[int, pydantic.Field(ge=1, le=9)]
    ) -> str:
        """Return the weather of a city.

        Args:
            city: The city.
            days: The number of days.
        """
        assert city in ("Oslo", "Rome") and 1 <= days <= 9
        self.num_calls += 1
        return "warm"


# A model that is unsure may call the tool for ever, so it sees the tool until the first call.
QUESTION = "Is it warm in Rome?"
MAX_TURNS = 6
# Sampling parameters of all agents.
SAMPLING: dict[str, Any] = {"seed": 5}


def run_openai_agents(
    url: str, model: str, *, is_stream: bool, temperature: float
) -> tuple[Report, Counter, Any]:
    """Run an agent of openai-agents. Return its result, its tool and its usage."""
    import agents
    import openai

    counter = Counter()

    def until_called(context: Any, agent: Any) -> bool:
        return not counter.num_calls

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            agent = agents.Agent(
                name="Reporter",
                instructions="Ask for the weather, then report.",
                model=agents.OpenAIResponsesModel(model, openai_client=client),
                tools=[agents.function_tool(counter.weather, is_enabled=until_called)],
                output_type=Report,
                # The library resets the choice to "auto" after the first call.
                model_settings=agents.ModelSettings(
                    tool_choice="required",
                    parallel_tool_calls=False,
                    temperature=temperature,
                    store=False,
                    extra_body=SAMPLING,
                ),
            )
            options: Any = {
                "max_turns": MAX_TURNS,
                "run_config": agents.RunConfig(tracing_disabled=True),
            }
            if not is_stream:
                return await agents.Runner.run(agent, QUESTION, **options)
            streamed = agents.Runner.run_streamed(agent, QUESTION, **options)
            kinds = [event.type async for event in streamed.stream_events()]
            assert "raw_response_event" in kinds and "run_item_stream_event" in kinds
            return streamed

    result = asyncio.run(run())
    return result.final_output, counter, result.context_wrapper.usage


def run_pydantic_ai(
    url: str, model: str, *, is_native: bool, temperature: float
) -> tuple[Report, Counter, Any]:
    """Run an agent of Pydantic AI over responses. Return its result, its tool and its usage.

    Args:
      url: address of the server.
      model: name of the model.
      is_native: whether the output is text with a schema; if not, it is the call of a tool.
      temperature: the temperature.
    """
    import openai
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    counter = Counter()
    output: Any = pydantic_ai.NativeOutput(Report) if is_native else Report

    async def until_called(context: Any, definition: Any) -> Any:
        return None if counter.num_calls else definition

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            agent = pydantic_ai.Agent(
                OpenAIResponsesModel(model, provider=OpenAIProvider(openai_client=client)),
                output_type=output,
                instructions="Ask for the weather, then report.",
                tools=[pydantic_ai.Tool(counter.weather, prepare=until_called)],
                model_settings={
                    "temperature": temperature,
                    "parallel_tool_calls": False,
                    "extra_body": SAMPLING,
                },
            )
            limits = pydantic_ai.UsageLimits(request_limit=MAX_TURNS)
            return await agent.run(QUESTION, usage_limits=limits)

    result = asyncio.run(run())
    usage: Any = result.usage  # a method in older versions
    return result.output, counter, usage() if callable(usage) else usage


def run_langchain(
    url: str, model: str, *, uses_responses: bool, temperature: float
) -> tuple[Report, Counter, Any]:
    """Run an agent of LangChain. Return its result, its tool and its messages."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain.agents.structured_output import ToolStrategy
    from langchain_openai import ChatOpenAI

    counter = Counter()

    @wrap_model_call
    def until_called(request: Any, handler: Any) -> Any:
        return handler(request.override(tools=[]) if counter.num_calls else request)

    options: Any = {"extra_body": SAMPLING}
    chat = ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key="any",  # pyright: ignore[reportArgumentType]
        temperature=temperature,
        use_responses_api=uses_responses,
        **options,
    )
    tools: list[Callable[..., Any]] = [counter.weather]
    agent = create_agent(
        chat, tools=tools, response_format=ToolStrategy(Report), middleware=[until_called]
    )
    question: Any = {"messages": [{"role": "user", "content": QUESTION}]}
    state = agent.invoke(question, {"recursion_limit": 4 * MAX_TURNS})
    return state["structured_response"], counter, state["messages"]
