"""Conversations with an OpenAI-compatible server, many at a time.

Users' turns are asked one after another, each behind the served answers before
it. A refused or empty answer ends its conversation. Threads ask, the caller's
thread collects; nothing is printed, and what is kept is the caller's matter.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

from dspine_jax.data import chat_client


class Conversation(NamedTuple):
  """One conversation as far as it was answered.

  Attributes:
    id: its number, as given.
    messages: {"role", "content"}: user and assistant in turn; the last is an
      answer. Empty if there is no answer.
    finish_reasons: of each answer: "stop", or "length" if it was cut.
    prompt_tokens: read by the server, all turns together.
    answer_tokens: written by the server.
    ended: why turns are missing: "refused", "empty" (an answer without text),
      or "" if none is.
    note: what the server said to a refused turn.
  """

  id: int
  messages: list[dict[str, str]]
  finish_reasons: list[str]
  prompt_tokens: int = 0
  answer_tokens: int = 0
  ended: str = ""
  note: str = ""


type _Finished = queue.SimpleQueue[Conversation | BaseException | None]


def served_models(
  server: chat_client.Server, waiting: Callable[[str], None] = lambda why: None
) -> list[str]:
  """Names of `GET /v1/models`, in the server's order.

  Args:
    server: where to ask.
    waiting: told, now and then, why there is no answer yet.

  Raises:
    ServerError: it stays away, or that is no such server.
  """
  asker = chat_client.Asker(
    server, chat_client.Patience(server), waiting=waiting
  )
  try:
    return asker.retry(asker.models)
  except chat_client.RefusedError as error:
    raise chat_client.ServerError(f"{server.url}: {error}") from None
  finally:
    asker.close()


def check(
  server: chat_client.Server,
  request: chat_client.Request,
  waiting: Callable[[str], None] = lambda why: None,
) -> None:
  """Asks one short question in the way of `request`.

  Raises:
    ServerError: the server stays away, or refuses such requests at all.
  """
  asker = chat_client.Asker(
    server, chat_client.Patience(server), request, waiting
  )
  try:
    asker.answer(chat_client.PROBE, 0, 0)
  except chat_client.RefusedError as error:
    raise chat_client.ServerError(
      f"{server.url}: refuses any request: {error}"
    ) from None
  finally:
    asker.close()


def converse(
  server: chat_client.Server,
  request: chat_client.Request,
  conversations: Iterable[tuple[int, Sequence[str]]],
  waiting: Callable[[str], None] = lambda why: None,
) -> Generator[Conversation, None, None]:
  """Asks every turn of every conversation, `server.concurrency` at a time.

  Args:
    server: where to ask.
    request: how to ask.
    conversations: number and user turns of each; taken as they are needed.
    waiting: called once a second while nothing is finished, with the reason if
      the server fails, else "".

  Yields:
    Conversations, as they are finished.

  Raises:
    ServerError: the server stayed away longer than `server.patience_s`, or
      refuses everything.
  """
  patience = chat_client.Patience(server)
  source, lock = iter(conversations), threading.Lock()
  finished: _Finished = queue.SimpleQueue()

  def take() -> tuple[int, Sequence[str]] | None:
    with lock:
      return None if patience.stop.is_set() else next(source, None)

  askers = [
    chat_client.Asker(server, patience, request)
    for _ in range(server.concurrency)
  ]
  threads = [
    threading.Thread(target=_work, args=(asker, take, finished), daemon=True)
    for asker in askers
  ]
  try:
    for thread in threads:
      thread.start()
    going = len(threads)
    while going:
      try:
        item = finished.get(timeout=1.0)
      except queue.Empty:
        waiting(patience.reason())
        continue
      if isinstance(item, BaseException):
        raise item
      if item is None:
        going -= 1
      else:
        yield item
  finally:
    patience.stop.set()
    for asker in askers:
      asker.abort()
    for thread in threads:
      thread.join(timeout=chat_client.CONNECT_TIMEOUT_S)


def _work(
  asker: chat_client.Asker,
  take: Callable[[], tuple[int, Sequence[str]] | None],
  finished: _Finished,
) -> None:
  """One thread: asks until there is nothing to take, then puts None."""
  try:
    while (taken := take()) is not None:
      finished.put(_talk(asker, *taken))
  except BaseException as error:  # Raised again by the caller's thread.
    finished.put(error)
  finally:
    asker.close()
    finished.put(None)


def _talk(
  asker: chat_client.Asker, number: int, turns: Sequence[str]
) -> Conversation:
  talk = Conversation(number, [], [])
  for turn, text in enumerate(turns):
    asked = [*talk.messages, {"role": "user", "content": text}]
    try:
      answer = asker.answer(asked, number, turn)
    except chat_client.RefusedError as error:
      return talk._replace(ended="refused", note=str(error))
    talk = talk._replace(
      prompt_tokens=talk.prompt_tokens + answer.prompt_tokens,
      answer_tokens=talk.answer_tokens + answer.answer_tokens,
    )
    if not answer.text.strip():
      return talk._replace(ended="empty")
    talk = talk._replace(
      messages=[*asked, {"role": "assistant", "content": answer.text}],
      finish_reasons=[*talk.finish_reasons, answer.finish_reason],
    )
  return talk
