"""What a writer makes, in the form of OpenAI's completions, whole or streamed."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from jaxhal.models.tokenizer import Tokenizer
from jaxhal.reporting.report import Report
from jaxhal.serve.response import Ended, News, Written
from jaxhal.serve.wire import ChatRequest, CompletionRequest

Told = AsyncIterator[News | Ended]

# Why a text ends, in OpenAI's words.
_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "probability": "content_filter",
}


class Form:
    """How one answer is told.

    Args:
      want: what was asked.
      model: the name of the one that writes.
      told: what it writes.
    """

    def __init__(
        self,
        want: ChatRequest | CompletionRequest,
        model: str,
        tokenizer: Tokenizer,
        told: Told,
    ):
        self.want, self._told, self._tokenizer = want, told, tokenizer
        self._chat = isinstance(want, ChatRequest)
        # Of completions a number: at 0 those of the tokens chosen, as always here.
        self._logprobs = want.logprobs is not None and want.logprobs is not False
        self._offset = 0
        kind = "chatcmpl" if self._chat else "cmpl"
        self._about = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer at once."""
        tokens: list[Written] = []
        ended = None
        async for one in self._told:
            if isinstance(one, News):
                tokens += one.tokens
            else:
                ended = one
        assert ended is not None
        text = "".join(token.text for token in tokens)
        said: dict[str, Any] = {"text": text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = self._choice(said, tokens, _REASONS[ended.why])
        kind = "chat.completion" if self._chat else "text_completion"
        whole = {**self._about, "object": kind, "choices": [choice]}
        return whole | {
            "usage": _usage(ended),
            "jaxhal": _judged(ended),
        }

    async def events(self) -> AsyncIterator[str]:
        """The answer as it grows: the scores of its tokens, last the verdict."""
        chat = self._chat
        if chat:
            yield self._event({"delta": {"role": "assistant", "content": ""}})
        async for one in self._told:
            if isinstance(one, News):
                text = "".join(token.text for token in one.tokens)
                said = {"delta": {"content": text}} if chat else {"text": text}
                yield self._event(said, one.tokens, jaxhal=_scores(one))
                continue
            said = {"delta": {}} if chat else {"text": ""}
            yield self._event(said, [], _REASONS[one.why], _judged(one))
            if self.want.wants_usage:
                yield self._chunk([], usage=_usage(one))
        yield "data: [DONE]\n\n"

    def _event(
        self,
        said: dict[str, Any],
        tokens: list[Written] | None = None,
        reason: str | None = None,
        jaxhal: dict[str, Any] | None = None,
    ) -> str:
        return self._chunk([self._choice(said, tokens or [], reason)], jaxhal=jaxhal)

    def _chunk(self, choices: list[Any], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        whole = {**self._about, "object": kind, "choices": choices, **more}
        return f"data: {json.dumps(whole)}\n\n"

    def _choice(
        self, said: dict[str, Any], tokens: list[Written], reason: str | None
    ) -> dict[str, Any]:
        known = None
        if self._logprobs and tokens:
            known = self._of_chat(tokens) if self._chat else self._of_text(tokens)
        return {"index": 0, **said, "logprobs": known, "finish_reason": reason}

    def _of_chat(self, tokens: list[Written]) -> dict[str, Any]:
        def one(token: Written) -> dict[str, Any]:
            text = self._tokenizer.decode([token.id])
            part = "\N{REPLACEMENT CHARACTER}" in text  # of a character
            known = {"token": text, "bytes": None if part else [*text.encode()]}
            return known | {"logprob": token.logprob, "top_logprobs": []}

        return {"content": [one(token) for token in tokens], "refusal": None}

    def _of_text(self, tokens: list[Written]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [self._tokenizer.decode([token.id]) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _scores(news: News) -> dict[str, Any]:
    tokens = [{"text": one.text, "score": one.score} for one in news.tokens]
    return {"probability": news.probability, "tokens": tokens}


def _judged(ended: Ended) -> dict[str, Any] | None:
    if ended.report is not None:
        return said_of(ended.report)
    if ended.why != "probability":
        return None
    why = "the probability came to the limit before anything was shown"
    return {**unjudged(why), "probability": ended.probability}


def said_of(report: Report) -> dict[str, Any]:
    """What stands under ``jaxhal`` of an answer."""
    return {name: it for name, it in report.to_dict().items() if name != "id"}


def unjudged(why: str | None) -> dict[str, Any]:
    """The same where nothing can be said."""
    none: dict[str, Any] = dict.fromkeys(("verdict", "probability", "by"))
    return {**none, "spans": [], "error": why}


def _usage(ended: Ended) -> dict[str, Any]:
    prompt, own = ended.prompt_tokens, ended.tokens
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": ended.reused},
        "completion_tokens": own,
        "total_tokens": prompt + own,
    }
