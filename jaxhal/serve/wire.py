"""What the server is told and what it says: version 1 of its contract.

Names and types are those of OpenAI's completions where these have them; what jaxhal
adds stands under ``jaxhal``.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

#: Of the contract; a change that an older client would not understand raises it.
VERSION = "1"
#: Types of JSON Lines, which have none of their own, and a body of them in OpenAPI.
LINES = ("application/x-ndjson", "application/jsonl")
LINES_BODY: dict[str, Any] = {
    "required": True,
    "content": {kind: {"schema": {"type": "string"}} for kind in LINES},
}


class _Told(BaseModel):
    """A request; what it holds is of the type it should be, or an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Part(_Told):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Called(_Told):
    """A function of a call, and what it is given."""

    name: str
    arguments: str = Field(description="A JSON object as text.")


class Call(_Told):
    """What an assistant asked of a tool."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


class Message(_Told):
    """What somebody said in a conversation; parts are lines of their own."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = Field(
        None, description="Null only of an assistant that calls tools."
    )
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class VerdictRequest(_Told):
    """An answer, with what it should rest on; or ``rows`` of such, each an object.

    Rows are read as ``jaxhal detect`` reads them: keys are those below, or their other
    names, one that is nearly such a name is an error of its row, and others are passed
    over.
    """

    model: str | None = Field(None, description="A reader; by default the first.")
    id: str | int | None = None
    response: str | None = Field(None, description="The answer.")
    answer: str | None = Field(None, description="The same as response.")
    context: str | list[str] | None = Field(None, description="What it rests on.")
    contexts: list[str] | None = Field(None, description="The same as context.")
    question: str | None = None
    prompt: str | None = Field(None, description="In place of context and question.")
    templated: bool | None = Field(
        None, description="The prompt went through a chat template."
    )
    messages: list[Message] | None = Field(
        None, description="A conversation that ends with the answer, in place of all."
    )
    tools: list[dict[str, Any]] | None = Field(
        None, description="Definitions of those that messages may call."
    )
    label: Any = Field(
        None, description="Of labelled files; checked, and changes nothing."
    )
    labels: Any = Field(None, description="Checked, and changes nothing.")
    source: Any = Field(None, description="Checked, and changes nothing.")
    rows: list[dict[str, Any]] | None = Field(
        None, description="Answers, each an object with these keys."
    )
    tokens: bool = Field(False, description="Say the score of every token.")
    all: bool = Field(False, description="Say what every detector finds.")
    relevance: bool = Field(
        False, description="Say what each span rests on; a pass back for each."
    )

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The rows, or the one that the request is."""
        if self.rows is not None:
            return self.rows
        names = {"model", "rows", "tokens", "all", "relevance"}
        return [self.model_dump(exclude_unset=True, exclude=names)]


class StopOn(_Told):
    """When an answer goes no further."""

    probability: float = Field(
        gt=0, le=1, description="That the answer so far is hallucinated."
    )
    then: Literal["end", "regenerate"] = Field(
        "end", description="regenerate writes what was not shown again, three times."
    )


class StreamOptions(_Told):
    """What a stream says beside the text."""

    include_usage: bool | None = Field(
        None, description="At the end, how many tokens it took."
    )
    include_obfuscation: bool | None = Field(None, description="Changes nothing.")


class TextFormat(_Told):
    """The one form that answers have."""

    type: Literal["text"]


def _unknown(value: Any) -> None:
    if value is not None:
        raise ValueError("this is not supported; leave it out")


Stop = Annotated[str, Field(max_length=200)]  # looked for at every token
_Unknown = Annotated[None, BeforeValidator(_unknown)]


class _Written(_Told):
    """What completions of both kinds are asked with."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Unknown]  # pyright: ignore[reportIncompatibleVariableOverride]

    model: str | None = Field(None, description="A reader; by default the first.")
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop_on: StopOn | None = Field(None, description="An addition of jaxhal's.")
    # What clients of OpenAI's say and changes nothing: other values are not taken.
    n: int | None = Field(None, ge=1, le=1)
    best_of: int | None = Field(None, ge=1, le=1)
    echo: Literal[False] | None = None
    store: Literal[False] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    tools: list[Any] | None = Field(None, max_length=0)
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    # Who asks, and of how many things.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with how many tokens it took."""
        options = self.stream_options
        return options is not None and bool(options.include_usage)


class ChatRequest(_Written):
    """A conversation to go on with."""

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False


class CompletionRequest(_Written):
    """A text to go on with, as it is: control tokens in it are control tokens."""

    prompt: str = Field(min_length=1)
    logprobs: int | None = Field(None, ge=0, le=1)


# --- what is said ---------------------------------------------------------------------


class Piece(BaseModel):
    """A sentence or a word that a span rests on: characters of a text that was sent."""

    of: str = Field(
        description="context, question, prompt, messages[n], or response before the "
        "span; what was sent as a list is one text."
    )
    start: int
    end: int
    text: str
    share: float = Field(
        description="Of the relevance of all before the span, in [-1, 1]: above 0 it "
        "speaks for the span, below 0 against it."
    )


class Relevance(BaseModel):
    """What the reader rests a span on, the largest shares in size first."""

    rules: str = Field(description="Of layer-wise relevance propagation.")
    sentences: list[Piece] = Field(description="Three at most.")
    words: list[Piece] = Field(description="Fifty at most.")


class Span(BaseModel):
    """Characters of an answer held for made up."""

    start: int
    end: int
    text: str
    confidence: float
    relevance: Relevance | None = None


class Token(BaseModel):
    """A token of an answer: its characters, and its score by detector."""

    text: str
    start: int
    end: int
    scores: dict[str, float]


class Verdict(BaseModel):
    """What is said of one answer, or why nothing can be."""

    id: str
    verdict: Literal["hallucinated", "unsure", "supported"] | None
    probability: float | None
    by: str | None
    spans: list[Span]
    error: str | None
    tokens: list[Token] | None = None
    basis: dict[str, Any] | None = None
    promise: str | None = None
    undecided: str | None = None
    detector: str | None = None
    scores: dict[str, float] | None = None
    probabilities: dict[str, float] | None = None
    flagged: list[str] | None = None
    helpers: dict[str, str] | None = None


class Verdicts(BaseModel):
    """What is said of many, in their order."""

    object: Literal["list"] = "list"
    data: list[Verdict]


class Problem(BaseModel):
    """What is wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Failure(BaseModel):
    error: Problem


class Deciding(BaseModel):
    """A reader, and the detectors that judge with it."""

    name: str
    decides: str | None = Field(description="The detector whose verdict counts.")
    because: str = Field(description="What it was measured on, or why none decides.")
    rides: str | None = Field(description="The detector that judges while it writes.")
    detectors: dict[str, str] = Field(description="All of them: what each measures.")
    context: int = Field(description="Tokens that prompt and answer may have.")


class About(BaseModel):
    jaxhal: str
    contract: str
    readers: list[Deciding]


class Ready(BaseModel):
    """Whether verdicts can be had, and how much waits."""

    status: Literal["ready", "unready"]
    why: str | None = None
    writing: int
    waiting: int
