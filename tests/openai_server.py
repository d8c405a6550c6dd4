"""An OpenAI-compatible server for tests, a real process with a real socket.

  python -m tests.openai_server --port_file=FILE [--target=FOLDER]

With --target it answers with that target's own greedy decoding, else with the
words of the question in reverse order, which needs no JAX: the same answer to
the same messages in either case. Faults are made on request, and so that a
killed server can be started again, its port may be given.

A prompt that holds REFUSE is refused (400), one with POISON fails (500), one
with SILENCE is answered without a word.
"""

import argparse
import contextlib
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = "served"


class Faults:
  """What goes wrong, counted over all prompts.

  Args:
    busy: the first so many get 429 with `Retry-After: 0.2`.
    unavailable: the next so many get 503.
    dropped: of the next so many the connection is closed without a reply.
    aborted: the next so many answers end in "abort".
    slow_s: seconds that every answer takes beyond its decoding.
  """

  def __init__(self, busy=0, unavailable=0, dropped=0, aborted=0, slow_s=0.0):
    self._kinds = iter(
      ["busy"] * busy
      + ["unavailable"] * unavailable
      + ["dropped"] * dropped
      + ["aborted"] * aborted
    )
    self.slow_s = slow_s

  def next(self) -> str:
    return next(self._kinds, "")


def reversed_words(messages: list[dict[str, str]], limit: int) -> Any:
  """(text, tokens of the prompt, tokens of the answer, whether it ended)."""
  words = messages[-1]["content"].split()[::-1]
  asked = sum(len(message["content"].split()) for message in messages)
  return " ".join(words[:limit]), asked, len(words), len(words) <= limit


def target_answers(folder: str) -> Callable[[list[dict[str, str]], int], Any]:
  """Greedy answers of a target; prompts are padded to one length."""
  import jax
  import numpy as np
  from jax import numpy as jnp

  from dspine_jax import configs
  from dspine_jax.decoding import generate
  from experiments import targets

  target = targets.load(folder)
  width = target.model.cfg.max_positions // 2
  keys = jax.random.split(jax.random.key(0), 1)

  def answer(messages, limit):
    prompt = targets.encode_chat(target, messages)
    if len(prompt) > width:
      raise ValueError(f"longer than the context length of {width} tokens")
    decode = configs.DecodeConfig(
      max_new_tokens=limit, stop_tokens=target.model.cfg.eos_token_ids
    )
    out = generate.autoregressive(
      target.model,
      jnp.asarray(np.pad(prompt, (0, width - len(prompt)))[None]),
      jnp.asarray(np.asarray([len(prompt)], np.int32)),
      decode=decode,
      keys=keys,
    )
    count = int(np.asarray(out.num_tokens)[0])
    made = np.asarray(out.tokens)[0, :count].tolist()
    ended = made[-1] in target.model.cfg.eos_token_ids
    text = target.tokenizer.decode(made[:-1] if ended else made)
    return text, len(prompt), count, ended

  return answer


def handler(answer, faults: Faults) -> type[http.server.BaseHTTPRequestHandler]:
  lock = threading.Lock()

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
      if self.path != "/v1/models":
        return self.reply(404, {"detail": "Not Found"})
      self.reply(200, {"object": "list", "data": [{"id": MODEL}]})

    def do_POST(self):
      size = int(self.headers["Content-Length"])
      request = json.loads(self.rfile.read(size))
      if self.path != "/v1/chat/completions":
        return self.reply(404, {"detail": "Not Found"})
      if request["model"] != MODEL:
        told = f"The model `{request['model']}` does not exist."
        return self.reply(404, {"error": {"message": told}})
      time.sleep(faults.slow_s)
      with lock:
        # The client's own question, asked alone, is spared.
        is_prompt = request["messages"][-1]["content"] != "Hi"
        kind = faults.next() if is_prompt else ""
      if kind == "busy":
        self.reply(429, {"message": "too many"}, retry_after="0.2")
      elif kind == "unavailable":
        self.reply(503, {"message": "loading"})
      elif kind == "dropped":
        self.close_connection = True
      else:
        self.complete(request, aborted=kind == "aborted")

    def complete(self, request, aborted):
      messages, limit = request["messages"], request["max_tokens"]
      assert request["temperature"] == 0 and 0 <= request["seed"] < 2**31
      assert request["chat_template_kwargs"] == {"enable_thinking": False}
      said = messages[-1]["content"]
      if "POISON" in said:
        return self.reply(500, {"error": {"message": "internal"}})
      try:
        if "REFUSE" in said:
          raise ValueError("longer than the context length")
        with lock:
          text, asked, made, ended = answer(messages, limit)
      except ValueError as error:
        told = {"object": "error", "message": f"This prompt is {error}."}
        return self.reply(400, told)
      text = "" if "SILENCE" in said else text
      reason = "stop" if ended else "length"
      choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "abort" if aborted else reason,
      }
      usage = {"prompt_tokens": asked, "completion_tokens": made}
      self.reply(200, {"choices": [choice], "usage": usage})

    def reply(self, status, content, retry_after=None):
      body = json.dumps(content).encode()
      self.send_response(status)
      self.send_header("Content-Type", "application/json")
      self.send_header("Content-Length", str(len(body)))
      if retry_after:
        self.send_header("Retry-After", retry_after)
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, *_):
      pass

  return Handler


class Server(http.server.ThreadingHTTPServer):
  request_queue_size = 512
  daemon_threads = True

  def handle_error(self, *_):
    pass  # Clients that are killed hang up.


@contextlib.contextmanager
def here(**faults) -> Iterator[str]:
  """A server in a thread of this process; gives its URL."""
  server = Server(("127.0.0.1", 0), handler(reversed_words, Faults(**faults)))
  thread = threading.Thread(target=server.serve_forever, args=(0.05,))
  thread.start()
  try:
    yield f"http://127.0.0.1:{server.server_port}"
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


class Process:
  """A server in a process of its own, to be killed and started again."""

  def __init__(self, folder: pathlib.Path, **options):
    self._port_file, self._port = folder / "port", 0
    self._options = options
    self.start()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self._port}"

  def start(self) -> None:
    """Starts it, at the port it had, and waits until it listens."""
    self._port_file.unlink(missing_ok=True)
    options = {"port": self._port, "port_file": self._port_file}
    options |= self._options
    self._process = subprocess.Popen(
      [sys.executable, "-m", "tests.openai_server"]
      + [f"--{name}={value}" for name, value in options.items()],
      cwd=ROOT,
      env=os.environ
      | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    while not self._port_file.exists():
      assert self._process.poll() is None
      time.sleep(0.01)
    self._port = int(self._port_file.read_text())

  def kill(self) -> None:
    self._process.send_signal(signal.SIGKILL)
    self._process.wait()


@contextlib.contextmanager
def process(folder: pathlib.Path, **options) -> Iterator[Process]:
  """A `Process` that is killed at the end."""
  folder.mkdir(parents=True, exist_ok=True)
  server = Process(folder, **options)
  try:
    yield server
  finally:
    server.kill()


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--target", default="")
  parser.add_argument("--port", type=int, default=0)
  parser.add_argument("--port_file", required=True)
  faults = ("busy", "unavailable", "dropped", "aborted")
  for name in faults:
    parser.add_argument(f"--{name}", type=int, default=0)
  parser.add_argument("--slow_s", type=float, default=0.0)
  flags = parser.parse_args()
  answer = target_answers(flags.target) if flags.target else reversed_words
  chosen = {name: getattr(flags, name) for name in faults}
  made = Faults(**chosen, slow_s=flags.slow_s)
  server = Server(("127.0.0.1", flags.port), handler(answer, made))
  port_file = pathlib.Path(flags.port_file)
  partial = port_file.with_suffix(".partial")
  partial.write_text(str(server.server_port))
  partial.replace(port_file)
  server.serve_forever()


if __name__ == "__main__":
  main()
