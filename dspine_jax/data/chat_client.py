"""One connection to an OpenAI-compatible server, and what to do when it fails.

`POST /v1/chat/completions` as SGLang and vLLM serve it, thinking off. What may
pass by itself is waited for: a server that is away, that is busy (429) or that
fails (5xx), a broken connection, an aborted answer. What cannot is told: a
refused prompt, or a server that refuses everything (a wrong key, an unknown
path). Many conversations at a time are `data/completions.py`.
"""

import dataclasses
import http.client
import json
import math
import random
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dspine_jax import configs

# Whole answers. Others, such as "abort" of a server that shuts down, are not.
_FINISHED = ("stop", "length")
# About the prompt: asking again would be answered alike.
_REFUSED = (400, 413, 422)
# About the moment. 500 may also be about the prompt, see `_MOST_FAULTS`.
_PASSING = (408, 425, 429, 500, 502, 503, 504, 529)
_MOST_FAULTS = 5
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 8.0
CONNECT_TIMEOUT_S = 10.0
# A question that no server refuses for its content.
PROBE = ({"role": "user", "content": "Hi"},)

type Messages = Sequence[dict[str, str]]


class ServerError(ValueError):
  """Asking on is of no use: the server is away, or it refuses everything."""


class AwayError(ServerError):
  """The server did not answer for as long as it was waited for."""


class NoPathError(ServerError):
  """The server knows no such path (404)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
  """Where and how to ask.

  Attributes:
    url: `http://HOST:PORT`, with a path in front of `/v1` if there is one.
    concurrency: requests under way at a time.
    patience_s: seconds without any answer, from the first failure on, before
      the server is given up.
    timeout_s: seconds that one answer may take.
    api_key: sent as a bearer token.
  """

  url: str
  concurrency: int = 64
  patience_s: float = 900.0
  timeout_s: float = 1200.0
  api_key: str | None = dataclasses.field(default=None, repr=False)

  def __post_init__(self):
    try:
      parts = urllib.parse.urlsplit(self.url)
      usable = parts.scheme in ("http", "https") and bool(parts.hostname)
      usable = usable and not (parts.query or parts.fragment)
      _ = parts.port
    except ValueError:
      usable = False
    if not usable:
      raise ValueError(f"url={self.url}: not like http://localhost:30000")
    for name in ("concurrency", "patience_s", "timeout_s"):
      value = getattr(self, name)
      if not 0 < value < math.inf:
        raise ValueError(f"{name}={value}: must be positive and finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What is the same in every request.

  Attributes:
    model: name under which the model is served.
    new_tokens: most tokens of an answer.
    sampling: temperature, top_k and top_p.
    seed: turn t of conversation i is drawn with a seed made of (seed, i, t).
  """

  model: str
  new_tokens: int
  sampling: configs.SamplingConfig
  seed: int = 0

  def body(self, messages: Messages, conversation: int, turn: int) -> bytes:
    """The JSON of one request."""
    entropy = np.random.SeedSequence((self.seed, conversation, turn))
    fields: dict[str, Any] = {
      "model": self.model,
      "messages": list(messages),
      "max_tokens": self.new_tokens,
      "temperature": self.sampling.temperature,
      "top_p": self.sampling.top_p,
      "seed": int(entropy.generate_state(1)[0] >> 1),
      "chat_template_kwargs": {"enable_thinking": False},
    }
    if self.sampling.top_k:
      fields["top_k"] = self.sampling.top_k
    return json.dumps(fields).encode()


class Answer(NamedTuple):
  """What the server said to one prompt.

  Attributes:
    text: without special tokens; may be empty.
    finish_reason: "stop", or "length" if it was cut.
    prompt_tokens: read by the server; 0 if it does not count.
    answer_tokens: written by the server.
  """

  text: str
  finish_reason: str
  prompt_tokens: int
  answer_tokens: int


class RefusedError(Exception):
  """The server does not answer this prompt."""


class PassingError(Exception):
  """It may go better later."""

  def __init__(self, why: str, after_s: float = 0.0):
    super().__init__(why)
    self.after_s = after_s


class FaultError(PassingError):
  """As above, unless it is the prompt's fault."""


class Patience:
  """How long the server has not answered, over all threads.

  Attributes:
    stop: set when everything shall end.
  """

  def __init__(self, server: Server):
    self.stop = threading.Event()
    self._server, self._lock = server, threading.Lock()
    self._since_s: float | None = None
    self._why = ""

  def succeeded(self) -> None:
    with self._lock:
      self._since_s, self._why = None, ""

  def failed(self, why: str) -> None:
    """Raises ServerError when the patience is at its end."""
    now_s = time.monotonic()
    with self._lock:
      if self._since_s is None:
        self._since_s = now_s
      self._why = why
      gone_s = now_s - self._since_s
    if gone_s > self._server.patience_s:
      raise AwayError(
        f"{self._server.url}: no answer for {gone_s:.0f} s ({why})"
      )

  def reason(self) -> str:
    """Why there is no answer, and for how long; empty if all is well."""
    with self._lock:
      if self._since_s is None:
        return ""
      return f"{self._why} for {time.monotonic() - self._since_s:.0f} s"


class Asker:
  """One connection, kept open, and what to do when it fails."""

  def __init__(
    self,
    server: Server,
    patience: Patience,
    request: Request | None = None,
    waiting: Callable[[str], None] = lambda why: None,
  ):
    self._server, self._patience = server, patience
    self._request, self._waiting = request, waiting
    self._url = urllib.parse.urlsplit(server.url)
    self._connection: http.client.HTTPConnection | None = None

  def answer(self, messages: Messages, number: int, turn: int) -> Answer:
    """Asks until there is an answer; RefusedError if there will be none."""
    assert self._request is not None
    body = self._request.body(messages, number, turn)
    return self.retry(lambda: self._complete(body))

  def retry(self, ask: Callable[[], Any]) -> Any:
    """What `ask` returns, once nothing passing stands against it."""
    delay_s, faults = _FIRST_DELAY_S, 0
    while True:
      if self._patience.stop.is_set():
        raise ServerError("stopped")
      try:
        result = ask()
        self._patience.succeeded()
        return result
      except PassingError as error:
        faults += isinstance(error, FaultError)
        if faults >= _MOST_FAULTS and self._is_well():
          raise RefusedError(f"{faults} times: {error}") from None
        self._patience.failed(str(error))
        self._waiting(str(error))
        # Threads that failed together do not come back together.
        wait_s = max(delay_s * random.uniform(0.5, 1.0), error.after_s)
        self._patience.stop.wait(min(wait_s, self._server.patience_s))
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

  def _is_well(self) -> bool:
    """Whether the server answers another question, so that it is the prompt."""
    if self._request is None:
      return False
    try:
      self._complete(self._request.body(PROBE, 0, 0))
    except (PassingError, RefusedError):
      return False
    return True

  def _complete(self, body: bytes) -> Answer:
    told = self._send("POST", "/v1/chat/completions", body)
    try:
      reply = json.loads(told)
      choice, usage = reply["choices"][0], reply.get("usage") or {}
      reason, text = choice["finish_reason"], choice["message"]["content"]
    except (ValueError, LookupError, TypeError, AttributeError):
      raise FaultError(f"no answer in {_message(told)}") from None
    if reason not in _FINISHED:
      raise FaultError(f"finish_reason={reason}")
    return Answer(
      text=text or "",
      finish_reason=reason,
      prompt_tokens=int(usage.get("prompt_tokens") or 0),
      answer_tokens=int(usage.get("completion_tokens") or 0),
    )

  def models(self) -> list[str]:
    """Names of the served models, asked once."""
    try:
      told = self._send("GET", "/v1/models")
    except NoPathError as error:
      raise ServerError(f"{error}; check the URL") from None
    try:
      return [model["id"] for model in json.loads(told)["data"]]
    except (ValueError, LookupError, TypeError):
      raise ServerError(
        f"{self._server.url}/v1/models: no list of models: {_message(told)}"
      ) from None

  def _send(self, method: str, path: str, body: bytes | None = None) -> bytes:
    """The body of one good reply."""
    headers = {"Content-Type": "application/json"}
    if self._server.api_key:
      headers["Authorization"] = f"Bearer {self._server.api_key}"
    prefix = self._url.path.rstrip("/").removesuffix("/v1")
    try:
      connection = self._connected()
      connection.request(method, prefix + path, body, headers)
      reply = connection.getresponse()
      status, text = reply.status, reply.read()
      after_s = _seconds(reply.getheader("Retry-After"))
      if reply.will_close:
        self.close()
    except TimeoutError:
      self.close()
      raise FaultError(f"no reply in {self._server.timeout_s:g} s") from None
    except ssl.SSLCertVerificationError as error:
      raise ServerError(f"{self._server.url}: {error}") from None
    except (OSError, http.client.HTTPException) as error:
      self.close()
      raise PassingError(_told(error)) from None
    if status == http.client.OK:
      return text
    told = f"{status} {_message(text)}"
    if status in _REFUSED:
      raise RefusedError(told)
    if status == http.client.INTERNAL_SERVER_ERROR:
      raise FaultError(told, after_s)
    if status in _PASSING:
      raise PassingError(told, after_s)
    missing = status == http.client.NOT_FOUND
    kind = NoPathError if missing else ServerError
    raise kind(f"{self._server.url}{path}: {told}")

  def _connected(self) -> http.client.HTTPConnection:
    if self._connection is None:
      kind = http.client.HTTPConnection
      if self._url.scheme == "https":
        kind = http.client.HTTPSConnection
      assert self._url.hostname is not None
      timeout_s = min(CONNECT_TIMEOUT_S, self._server.timeout_s)
      made = kind(self._url.hostname, self._url.port, timeout=timeout_s)
      try:
        made.connect()
      except TimeoutError:
        raise ConnectionError(f"no connection in {timeout_s:g} s") from None
      made.sock.settimeout(self._server.timeout_s)
      # A host that went down without a word is noticed in minutes.
      made.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
      if hasattr(socket, "TCP_KEEPIDLE"):
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
      self._connection = made
      # Who sets `stop` aborts the connections there are; this one is younger.
      if self._patience.stop.is_set():
        raise ServerError("stopped")
    return self._connection

  def close(self) -> None:
    """Closes the connection; the next request makes another."""
    connection, self._connection = self._connection, None
    if connection is not None:
      connection.close()

  def abort(self) -> None:
    """Ends a request of another thread, which then fails."""
    connection = self._connection
    sock = connection.sock if connection is not None else None
    if sock is not None:
      try:
        sock.shutdown(socket.SHUT_RDWR)
      except OSError:
        pass  # It is closed.


def _told(error: Exception) -> str:
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  return str(error) or type(error).__name__


def _seconds(header: str | None) -> float:
  """Of Retry-After; a date there is left to the own delays."""
  try:
    return max(float(header or 0.0), 0.0)
  except ValueError:
    return 0.0


def _message(text: bytes) -> str:
  """What an error reply says, in any of the forms that servers have."""
  shown = text.decode("utf-8", "replace")
  try:
    reply = json.loads(shown)
    error = reply.get("error", reply)
    if not isinstance(error, str):
      error = error.get("message") or error.get("detail")
    shown = str(error or shown)
  except (ValueError, AttributeError):
    pass
  return " ".join(shown.split())[:300]
