"""Asking a language model behind an OpenAI-compatible address, each question once."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxhal.files import replacing
from jaxhal.models.registry import cache_dir

# What a server that wants no key is given, since the client insists on one.
_NO_KEY = "none"


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A chat model at an address, static by value.

    The key is taken from $OPENAI_API_KEY; away from api.openai.com it may be unset.

    Args:
      url: the base address, such as ``http://localhost:8000/v1``.
      model: the model's name there.

    Raises:
      ValueError: when the address is no http URL or the model has no name.

    Example:
      >>> Endpoint("http://localhost:8000/v1", "llama").path("Hello?").suffix
      '.json'
    """

    url: str
    model: str

    def __post_init__(self):
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(
                f"endpoint is {self.url!r}; give the base address of a server, such as "
                "'http://localhost:8000/v1'"
            )
        if not self.model:
            raise ValueError(f"model is {self.model!r}; give its name at {self.url}")

    def ask(self, question: str) -> str:
        """The reply at temperature 0; asked once, then found in the cache.

        Raises:
          ModuleNotFoundError: without the ``openai`` package.
          RuntimeError: when the endpoint does not answer, after the client's retries,
            or there is no key for api.openai.com; replies before it are kept.
          ValueError: when a kept reply cannot be read.
        """
        path = self.path(question)
        if path.is_file():
            try:
                return str(json.loads(path.read_text("utf-8"))["reply"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path} holds no reply; delete it to ask again"
                ) from error
        reply = self._ask(question)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            json.dump(self._request(question) | {"reply": reply}, file, indent=1)
        return reply

    def path(self, question: str) -> Path:
        """Where the reply is kept, ``$JAXHAL_CACHE/replies/<hash>.json``."""
        request = json.dumps(self._request(question))
        name = hashlib.sha256(request.encode()).hexdigest()[:32]
        return cache_dir() / "replies" / f"{name}.json"

    def _messages(self, question: str) -> list[Any]:
        return [{"role": "user", "content": question}]

    def _request(self, question: str) -> dict[str, Any]:
        about = {"endpoint": self.url, "model": self.model}
        return about | {"messages": self._messages(question)}

    def _ask(self, question: str) -> str:
        try:
            import openai
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "asking an endpoint needs the openai package; pip install "
                "'jaxhal[prompt]'"
            ) from error
        try:
            # A client of its own each time leaves no connection open behind it.
            with openai.OpenAI(base_url=self.url, api_key=self._key()) as client:
                answer = client.chat.completions.create(
                    model=self.model, messages=self._messages(question), temperature=0
                )
        except openai.OpenAIError as error:
            raise RuntimeError(
                f"{self.url} gave no answer from {self.model!r} ({error}); check the "
                "address, the model's name and $OPENAI_API_KEY, then run the same again"
            ) from error
        reply = answer.choices[0].message.content if answer.choices else None
        if reply is None:
            raise RuntimeError(
                f"{self.url} answered without text from {self.model!r}; run the same "
                "again, or choose another model"
            )
        return reply

    def _key(self) -> str:
        key = os.environ.get("OPENAI_API_KEY")
        if not key and urlsplit(self.url).hostname == "api.openai.com":
            raise RuntimeError(
                f"$OPENAI_API_KEY is not set, which {self.url} needs; set it, or give "
                "the address of another server"
            )
        return key or _NO_KEY
