import contextlib
import http.server
import json
import threading
import time

import pytest

from dspine_jax import configs
from dspine_jax.data import chat_client, completions
from tests import openai_server

SAMPLING = configs.SamplingConfig(temperature=0.7, top_k=20, top_p=0.8)


def request(**changes):
  fields = {"model": "served", "new_tokens": 9, "sampling": SAMPLING}
  return chat_client.Request(**(fields | changes))


def server(url, **changes):
  return chat_client.Server(url=url, **({"concurrency": 4} | changes))


@contextlib.contextmanager
def scripted(*replies):
  """A server that gives these replies, then the last again; (url, requests).

  A reply is (status, body, headers) or a function of the request's body.
  """
  seen, lock = [], threading.Lock()

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
      with lock:
        seen.append((time.monotonic(), dict(self.headers), body))
        reply = replies[min(len(seen), len(replies)) - 1]
      status, content, headers = reply(body) if callable(reply) else reply
      self.send_response(status)
      for name, value in headers.items():
        self.send_header(name, value)
      self.send_header("Content-Length", str(len(content)))
      self.end_headers()
      self.wfile.write(content)

    def log_message(self, *_):
      pass

  made = openai_server.Server(("127.0.0.1", 0), Handler)
  thread = threading.Thread(target=made.serve_forever, args=(0.02,))
  thread.start()
  try:
    yield f"http://127.0.0.1:{made.server_port}", seen
  finally:
    made.shutdown()
    thread.join()
    made.server_close()


def said(text="yes", reason="stop", **usage):
  choice = {"message": {"content": text}, "finish_reason": reason}
  reply = {"choices": [choice], "usage": usage}
  return 200, json.dumps(reply).encode(), {}


def talk(url, *conversations, asked=None, **changes):
  made = completions.converse(
    server(url, **changes), asked or request(), enumerate(conversations)
  )
  return sorted(made)


def test_a_request_says_everything_that_decides_its_answer():
  body = json.loads(request(seed=3).body([{"role": "user"}], 5, 1))
  seed = body.pop("seed")
  assert body == {
    "model": "served",
    "messages": [{"role": "user"}],
    "max_tokens": 9,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "chat_template_kwargs": {"enable_thinking": False},
  }
  seeds = {
    json.loads(request(seed=s).body([], i, t))["seed"]
    for s, i, t in ((3, 5, 1), (3, 5, 2), (3, 6, 1), (4, 5, 1), (3, 1, 5))
  }
  assert seed in seeds and len(seeds) == 5
  greedy = request(sampling=configs.SamplingConfig()).body([], 0, 0)
  assert "top_k" not in json.loads(greedy)


def test_each_turn_follows_the_served_answers_before_it():
  def count(body):
    return said(f"{len(body['messages'])} before", prompt_tokens=2)

  with scripted(count) as (url, seen):
    (found,) = talk(url, ["a", "b"], api_key="secret")
  assert [m["content"] for m in found.messages] == [
    *("a", "1 before", "b", "3 before")
  ]
  assert (found.prompt_tokens, found.answer_tokens) == (4, 0)
  assert all(h["Authorization"] == "Bearer secret" for _, h, _ in seen)
  assert "secret" not in repr(server(url, api_key="secret"))


def test_no_more_requests_are_under_way_than_allowed():
  under_way, most, lock = [0], [0], threading.Lock()

  def slow(body):
    del body  # Unused.
    with lock:
      under_way[0] += 1
      most[0] = max(most[0], under_way[0])
    time.sleep(0.01)
    with lock:
      under_way[0] -= 1
    return said()

  with scripted(slow) as (url, _):
    found = talk(url, *([["a"]] * 30), concurrency=3)
  assert [one.id for one in found] == list(range(30))
  assert most[0] == 3


def test_retry_after_is_waited_for():
  with scripted((429, b"busy", {"Retry-After": "0.7"}), said()) as (url, seen):
    talk(url, ["a"])
  (first, *_), (second, *_) = seen
  assert second - first >= 0.7


@pytest.mark.parametrize(
  "reply",
  [
    (200, b"<html>", {}),
    (200, b"{}", {}),
    (200, b'{"choices": []}', {}),
    said(reason="abort"),
    said(reason=None),
    (502, b"", {}),
  ],
)
def test_replies_that_are_no_answers_are_asked_for_again(reply):
  with scripted(reply, said("at last")) as (url, seen):
    (found,) = talk(url, ["a"])
  assert found.messages[-1]["content"] == "at last"
  assert len(seen) == 2


def test_a_prompt_that_always_fails_is_refused_if_others_do_not(monkeypatch):
  monkeypatch.setattr(chat_client, "_FIRST_DELAY_S", 0.01)

  def fail(body):
    if body["messages"][-1]["content"] == "bad":
      return 500, b'{"message": "boom"}', {}
    return said()

  with scripted(fail) as (url, _):
    bad, good = talk(url, ["bad"], ["good"])
  assert (bad.ended, bad.note) == ("refused", "5 times: 500 boom")
  assert good.ended == ""
  with scripted((500, b"", {})) as (url, _):  # Here the server is at fault.
    with pytest.raises(chat_client.ServerError, match="no answer for"):
      talk(url, ["bad"], patience_s=0.5)


@pytest.mark.parametrize(
  ("body", "told"),
  [
    (b'{"error": {"message": "too  long"}}', "400 too long"),
    (b'{"object": "error", "message": "too long"}', "400 too long"),
    (b'{"detail": "too long"}', "400 too long"),
    (b'{"error": "too long"}', "400 too long"),
    (b"too long", "400 too long"),
  ],
)
def test_a_refused_prompt_shows_what_the_server_said(body, told):
  with scripted((400, body, {})) as (url, _):
    (found,) = talk(url, ["a", "b"])
    assert (found.ended, found.note, found.messages) == ("refused", told, [])
    with pytest.raises(chat_client.ServerError, match="refuses any request"):
      completions.check(server(url), request())


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_what_holds_for_every_request_ends_all_at_once(status):
  with scripted((status, b"no", {})) as (url, seen):
    with pytest.raises(chat_client.ServerError, match=f"{status} no"):
      talk(url, *([["a"]] * 100), concurrency=4)
  assert len(seen) <= 4


def test_an_answer_that_takes_too_long_is_asked_for_again():
  def slow(body):
    time.sleep(0.5)
    return said("late")

  with scripted(slow, said("soon")) as (url, _):
    (found,) = talk(url, ["a"], timeout_s=0.2)
  assert found.messages[-1]["content"] == "soon"


def test_who_stops_listening_ends_all_requests():
  def slow(body):
    time.sleep(3.0)
    return said()

  with scripted(said(), slow) as (url, seen):
    made = completions.converse(
      server(url), request(), ((i, ["a"]) for i in range(100))
    )
    next(made)
    start_s = time.monotonic()
    made.close()
    assert time.monotonic() - start_s < 2.0
    time.sleep(0.3)
    assert len(seen) <= 1 + 4  # What was under way; the server reads it late.


@pytest.mark.parametrize(
  "url", ["", "localhost:1", "ftp://a", "http://", "http://a:b", "http://a?b"]
)
def test_addresses_that_are_none_are_told(url):
  with pytest.raises(ValueError, match="not like http"):
    server(url)


def test_patience_counts_from_the_last_answer(monkeypatch):
  now = iter([0.0, 50.0, 101.0])
  monkeypatch.setattr(chat_client.time, "monotonic", lambda: next(now))
  patience = chat_client.Patience(
    server("http://localhost:1", patience_s=100.0)
  )
  patience.failed("away")
  patience.failed("away")
  patience.succeeded()
  patience.failed("away")  # A hundred seconds after the first, not the last.
