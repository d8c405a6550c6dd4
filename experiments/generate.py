"""Continues or answers a prompt, printing accepted tokens as they come.

  python -m experiments.generate --prompt="def read_config(path):"

A target with a chat template answers the prompt as a user's turn, thinking off;
with --raw it continues it like any other. Each round's tokens have a colour of
their own: long stretches of one colour are drafts that the target accepted at
once. At the end: mean advancement (the bonus token counted), tokens per second,
and with --compare the same for plain autoregressive decoding, whose output must
be equal at temperature 0.
"""

import itertools
import sys
import time

import jax
import numpy as np
from absl import flags
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate as generate_lib
from dspine_jax.decoding import metrics
from experiments import run_io, targets
from experiments.stages import evaluation

_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue, or question.")
_RAW = flags.DEFINE_bool(
  "raw", False, "Continue the prompt as it is, without a chat template."
)
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
_DRAFTER = flags.DEFINE_string(
  "drafter", targets.EMBEDDED, "`embedded`, or a folder of a drafter."
)
_NEW = flags.DEFINE_integer(
  "max_new_tokens", 128, "Most tokens to generate.", lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the argmax.")
_TOP_K = flags.DEFINE_integer("sampling_top_k", 0, "Tokens kept; 0: all.")
_TOP_P = flags.DEFINE_float("sampling_top_p", 1.0, "Mass kept; 1: all.")
_RULE = flags.DEFINE_enum(
  "rule",
  None,
  configs.VERIFY_RULES,
  "Verification; default: greedy at temperature 0, else rejection.",
)
_PROPOSAL = flags.DEFINE_string(
  "proposal", None, "How the draft is drawn; default: the method's first."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.", lower_bound=0)
_COLOR = flags.DEFINE_enum(
  "color", "auto", ["auto", "always", "never"], "Colour tokens by round."
)
_COMPARE = flags.DEFINE_bool(
  "compare", False, "Also decode autoregressively, and compare."
)

_COLORS = ("\033[36m", "\033[33m", "\033[32m", "\033[35m")
_RESET = "\033[0m"


class TokenPrinter:
  """Prints the text of a growing token list, a colour per call.

  A byte-level token may end inside a character; such bytes wait for the next.
  """

  def __init__(self, tokenizer, stream, colored: bool):
    self._tokenizer, self._stream, self._colored = tokenizer, stream, colored
    self._tokens: list[int] = []
    self._printed = ""
    self._colors = itertools.cycle(_COLORS)

  def add(self, tokens: list[int], *, last: bool = False) -> None:
    """Prints what `tokens` add to the text."""
    self._tokens += tokens
    text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
    if not last:
      text = text.rstrip("\ufffd")
    new, self._printed = text[len(self._printed) :], text
    if self._colored and new:
      new = f"{next(self._colors)}{new}{_RESET}"
    self._stream.write(new)
    self._stream.flush()


def stream_rounds(target, drafter, prompt: np.ndarray, decode, seed: int):
  """Yields the tokens of the prefill and of every round, from Python."""
  state = generate_lib.start(
    target,
    drafter,
    jnp.asarray(prompt)[None],
    jnp.asarray([len(prompt)]),
    decode=decode,
    keys=jax.random.key(seed)[None],
  )
  before = 0
  while True:
    count = int(state.num_tokens[0])
    # On the host: a slice on the device is a new program for each length.
    yield np.asarray(state.tokens)[0, before:count].tolist()
    before = count
    if bool(state.done[0]):
      return
    state = generate_lib.step(target, drafter, state, decode=decode)


def encode_prompt(target: targets.NamedTarget, text: str) -> np.ndarray:
  """Token ids of a user's turn or of plain text; ValueError if it is empty."""
  if not text:
    raise ValueError("--prompt is empty")
  if is_chat(target):
    return targets.encode_chat(target, [{"role": "user", "content": text}])
  return np.asarray(target.tokenizer.encode(text).ids, np.int32)


def is_chat(target: targets.NamedTarget) -> bool:
  """Whether the prompt is a user's turn."""
  return target.chat_template is not None and not _RAW.value


def main(unused_argv):
  if _PROMPT.value is None:
    raise ValueError("--prompt is needed")
  target = targets.load(_TARGET.value)
  drafter = evaluation.load_drafter(_DRAFTER.value, target)
  prompt = encode_prompt(target, _PROMPT.value)
  rule = _RULE.value or ("greedy" if _TEMPERATURE.value == 0 else "rejection")
  decode = configs.DecodeConfig(
    max_new_tokens=_NEW.value,
    stop_tokens=target.model.cfg.eos_token_ids,
    sampling=configs.SamplingConfig(
      temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value
    ),
    rule=rule,
    proposal=_PROPOSAL.value,
  )

  def rounds():
    return stream_rounds(target.model, drafter, prompt, decode, _SEED.value)

  # Compiles, so that what is timed below is decoding.
  for _ in itertools.islice(rounds(), 2):
    pass
  colored = _COLOR.value == "always" or (
    _COLOR.value == "auto" and sys.stdout.isatty()
  )
  printer = TokenPrinter(target.tokenizer, sys.stdout, colored)
  sys.stdout.write(_PROMPT.value + ("\n\n" if is_chat(target) else ""))
  start = time.perf_counter()
  streamed = []
  for tokens in rounds():
    printer.add(tokens)
    streamed.append(tokens)
  elapsed = time.perf_counter() - start
  printer.add([], last=True)
  lengths = [len(tokens) for tokens in streamed[1:]]
  total = sum(len(tokens) for tokens in streamed)
  mean = metrics.mean_advancement([lengths])["pooled"]
  print(
    f"\n\n{total} tokens in {len(lengths)} rounds: mean advancement {mean:.2f},"
    f" {total / elapsed:.0f} tokens/s"
  )
  if _COMPARE.value:
    tokens = list(itertools.chain(*streamed))
    compare(target.model, prompt, decode, tokens, total / elapsed)


def compare(target, prompt, decode, streamed: list[int], speed: float) -> None:
  """Decodes the same prompt autoregressively and prints the difference."""

  def run():
    out = generate_lib.autoregressive(
      target,
      jnp.asarray(prompt)[None],
      jnp.asarray([len(prompt)]),
      decode=decode,
      keys=jax.random.key(_SEED.value)[None],
    )
    return jax.block_until_ready(out)

  run()
  start = time.perf_counter()
  out = run()
  elapsed = time.perf_counter() - start
  count = int(out.num_tokens[0])
  plain = count / elapsed
  print(f"autoregressive: {plain:.0f} tokens/s, ratio {speed / plain:.2f}")
  if decode.sampling.temperature == 0:
    equal = streamed == [int(token) for token in out.tokens[0, :count]]
    print("outputs are equal" if equal else "OUTPUTS DIFFER")
    if not equal:
      raise ValueError("speculative and autoregressive outputs differ")


if __name__ == "__main__":
  run_io.run_app(main)
