"""Agents that answer from passages of their domain."""

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxhal.io.checks import at_least
from jaxhal.io.files import replacing
from jaxhal.models.encoders.encoding import embed, kept_encoder
from jaxhal.models.registry import private_cache
from jaxhal.reading.keys import digest, fingerprint
from jaxhal.texts import filled
from jaxhal.watchdog.agents import Agent, Pieces, Reply, streamed
from jaxhal.watchdog.conversation import Conversation
from jaxhal.watchdog.index import Index

#: The prompt of :class:`RagAgent`.
FROM_PASSAGES = """\
{passages}

Answer the question from the passages above, in one or two sentences.

Question: {query}
"""


class Passages:
    """Texts that are found by likeness of their vectors, which are kept."""

    def __init__(
        self,
        texts: Sequence[str],
        encoder: str = "all-minilm-l6-v2",
        *,
        progress: bool | None = None,
    ):
        self.texts, self.encoder = list(dict.fromkeys(texts)), encoder
        known = kept_encoder(encoder)
        about = [fingerprint(known), str(known.pooling), *map(digest, self.texts)]
        path = private_cache("passages") / f"{digest(' '.join(about))}.npy"
        if path.is_file():
            vectors = np.load(path)
        else:
            vectors = embed(known, self.texts, progress=progress)
            with replacing(path, binary=True, private=True) as file:
                np.save(file, vectors)
        self._index = Index(vectors)

    def __len__(self) -> int:
        return len(self.texts)

    def search(self, queries: Sequence[str], k: int) -> list[list[str]]:
        """For each query the ``k`` most similar passages, the nearest first."""
        vectors = embed(kept_encoder(self.encoder), queries, progress=False)
        _, rows = self._index.search(vectors, min(k, len(self)))
        return [[self.texts[row] for row in some] for some in rows]


class RagAgent:
    """An agent that answers from ``k`` passages of its domain for each query.

    The prompt has ``{passages}`` and ``{query}`` in it.
    """

    def __init__(
        self,
        agent: Agent,
        passages: Passages,
        *,
        k: int = 3,
        prompt: str = FROM_PASSAGES,
    ):
        if "{query}" not in prompt or "{passages}" not in prompt:
            raise ValueError(
                f"prompt is {prompt!r}; it must hold {{passages}} and {{query}}"
            )
        at_least(1, k=k)
        self.agent, self.passages, self.k, self.prompt = agent, passages, k, prompt
        self.name = f"{agent.name} with {len(passages)} passages"
        self.settings = {
            "agent": getattr(agent, "settings", None),
            "passages": digest(repr(passages.texts)),
            "encoder": passages.encoder,
            "k": k,
            "prompt": prompt,
        }
        # Whether what answers is told what a conversation wishes.
        self.hears_wishes = getattr(agent, "hears_wishes", False)

    async def respond(
        self, queries: Sequence[str], n: int = 1, temperature: float = 1.0
    ) -> list[list[Reply]]:
        """The passages come back as the context."""
        contexts, asked = await self._prompts(queries)
        replies = await self.agent.respond(asked, n, temperature)
        return [
            [dataclasses.replace(one, context=context) for one in some]
            for some, context in zip(replies, contexts, strict=True)
        ]

    async def stream(self, query: str, temperature: float = 1.0) -> Pieces:
        (context,), (asked,) = await self._prompts([query])
        async for piece in streamed(self.agent, asked, temperature):
            yield dataclasses.replace(piece, context=context)

    async def _prompts(
        self, queries: Sequence[str]
    ) -> tuple[list[str], list[Conversation]]:
        """The passages of each query, and what is asked with them."""
        talks = [*map(Conversation.of, queries)]
        last = [one.query for one in talks]
        found = await asyncio.to_thread(self.passages.search, last, self.k)
        contexts = ["\n\n".join(some) for some in found]
        return contexts, [
            Conversation(
                [
                    *one.turns[:-1],
                    ("user", filled(self.prompt, passages=context, query=one.query)),
                ],
                one.wishes,
            )
            for one, context in zip(talks, contexts, strict=True)
        ]
