import sys

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import layers
from dspine_jax.checkpoints import gguf, target_folder
from tests import tiny_gguf, tiny_models

TIED = tiny_gguf.target_config(tie_embeddings=True)
UNTIED = tiny_gguf.target_config()


def load(path):
  return gguf.load_target(gguf.read(path))


def write_changed(path, edit, cfg=UNTIED):
  """A file whose tensors `edit` has changed."""
  tensors = tiny_gguf.arrays(cfg, tiny_models.target_params(cfg))
  edit(tensors)
  return tiny_gguf.write(path, cfg, tensors=tensors)


@pytest.mark.parametrize("cfg", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_file_gives_what_the_hugging_face_folder_gives(cfg, tmp_path):
  params = tiny_models.target_params(cfg)
  target_folder.save_target(tmp_path, params, cfg)
  want = target_folder.load_target(tmp_path)
  path = tiny_gguf.write(tmp_path / "t.gguf", cfg)
  got = load(path)
  assert got.cfg == want.cfg == cfg and got.folder == path
  assert jax.tree.structure(got.params) == jax.tree.structure(want.params)
  jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
  assert {x.dtype for x in jax.tree.leaves(got.params)} == {jnp.float32.dtype}


def test_a_file_may_be_loaded_in_bfloat16(tmp_path):
  file = gguf.read(tiny_gguf.write(tmp_path / "t.gguf", UNTIED))
  got, want = gguf.load_target(file, dtype="bfloat16"), gguf.load_target(file)
  assert got.cfg.dtype == "bfloat16"
  for a, b in zip(
    jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True
  ):
    assert a.dtype == jnp.bfloat16
    np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))


def rotate_neighbours(x, position, theta):
  """RoPE as the file means it: pairs (0, 1), (2, 3), ..."""
  angles = position * theta ** (-np.arange(0, len(x), 2) / len(x))
  turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * angles)
  return np.stack([turned.real, turned.imag], -1).ravel()


def test_scores_are_those_of_neighbouring_pairs_in_the_file(tmp_path):
  cfg, size = UNTIED, UNTIED.head_dim
  file = gguf.read(tiny_gguf.write(tmp_path / "t.gguf", cfg))
  x = np.random.default_rng(0).standard_normal(cfg.hidden_size)
  stored = {
    part: file.tensors[f"blk.1.attn_{part}.weight"].data[-size:] @ x
    for part in "qk"
  }
  want = rotate_neighbours(stored["q"], 9, 1e5) @ rotate_neighbours(
    stored["k"], 5, 1e5
  )
  attend = gguf.load_target(file).params["layers"][1]["self_attn"]
  ours = jnp.stack(
    [x @ attend[f"{part}_proj"]["kernel"][:, -size:] for part in "qk"]
  )
  rope = layers.rope_table(jnp.array([9, 5]), size, 1e5)
  q, k = layers.apply_rope(ours[:, None], rope)[:, 0]
  np.testing.assert_allclose(q @ k, want, rtol=1e-5)


def test_quantised_tensors_are_dequantised(tmp_path):
  name = "token_embd.weight"
  path = tiny_gguf.write(
    tmp_path / "t.gguf",
    UNTIED,
    quantized={
      name: "Q8_0",
      "output.weight": "F16",
      "output_norm.weight": "F16",
    },
  )
  file = gguf.read(path)
  got = gguf.load_target(file).params
  data = file.tensors[name].data.tobytes()
  exact = tiny_models.target_params(UNTIED)
  np.testing.assert_array_equal(
    got["embed_tokens"].ravel(),
    tiny_gguf.q8_0(data, exact["embed_tokens"].size),
  )
  assert np.abs(got["embed_tokens"] - exact["embed_tokens"]).max() < 0.01
  np.testing.assert_array_equal(
    got["lm_head"], np.asarray(exact["lm_head"]).astype(np.float16)
  )


def test_keys_that_may_be_absent_take_the_values_of_the_format(tmp_path):
  cfg = tiny_gguf.target_config(
    head_dim=8, num_kv_heads=4, rope_theta=1e4, bos_token_id=None
  )
  absent = [
    *("attention.key_length", "attention.value_length", "rope.freq_base"),
    *("attention.head_count_kv", "rope.dimension_count"),
  ]
  path = tiny_gguf.write(
    tmp_path / "t.gguf",
    cfg,
    **{f"llama.{key}": None for key in absent},
    **{"tokenizer.ggml.bos_token_id": None, "llama.rope.scaling.type": "none"},
  )
  assert load(path).cfg == cfg


def test_an_end_of_turn_also_stops(tmp_path):
  path = tiny_gguf.write(
    tmp_path / "t.gguf", UNTIED, **{"tokenizer.ggml.eot_token_id": 3}
  )
  assert gguf.target_config(gguf.read(path)).eos_token_ids == (2, 3)


@pytest.mark.parametrize(
  ("key", "value", "message"),
  [
    ("general.architecture", "gpt2", "architecture='gpt2' is not supported"),
    ("llama.block_count", None, "key 'llama.block_count' is missing"),
    ("llama.block_count", "2", "block_count='2' is no int"),
    ("llama.block_count", 0, "num_layers=0"),
    ("llama.attention.head_count", [4, 4], "head_count=\\[4, 4\\] is no int"),
    ("llama.attention.head_count", 0, "num_heads=0"),
    ("llama.attention.head_count_kv", 3, "num_kv_heads=3: must divide"),
    ("llama.rope.scaling.type", "yarn", "type='yarn' is not implemented"),
    ("llama.rope.dimension_count", 4, "dimension_count=4 is not implemented"),
    ("llama.attention.value_length", 8, "value_length=8 is not implemented"),
    ("llama.expert_count", 8, "expert_count=8 is not implemented"),
    ("tokenizer.ggml.tokens", None, "'tokenizer.ggml.tokens' is missing"),
    ("llama.feed_forward_length", 99, r"ffn_gate.weight has shape \[36, 32\]"),
  ],
)
def test_metadata_that_cannot_be_is_named(tmp_path, key, value, message):
  path = tiny_gguf.write(tmp_path / "t.gguf", UNTIED, **{key: value})
  with pytest.raises(ValueError, match=message) as info:
    load(path)
  assert str(info.value).startswith(f"{path}: ")
  assert str(info.value).count(str(path)) == 1


def put(name, array):
  return lambda tensors: tensors.update({name: np.float32(array)})


@pytest.mark.parametrize(
  ("edit", "message"),
  [
    (lambda t: t.pop("output_norm.weight"), "missing output_norm.weight"),
    (lambda t: t.pop("blk.1.attn_q.weight"), "missing blk.1.attn_q.weight"),
    (
      put("blk.0.attn_q.weight", np.ones((39, 32))),
      r"blk.0.attn_q.weight has shape \[39, 32\], expected \[40, 32\]",
    ),
    (
      put("output_norm.weight", [np.nan] * 32),
      "'output_norm.weight' holds NaN",
    ),
    (put("blk.0.attn_q.bias", np.ones(40)), "'blk.0.attn_q.bias'.* not impl"),
    (put("rope_freqs.weight", np.ones(5)), "'rope_freqs.weight'.* not impl"),
  ],
)
def test_tensors_that_cannot_be_are_named(tmp_path, edit, message):
  path = write_changed(tmp_path / "t.gguf", edit)
  with pytest.raises(ValueError, match=message) as info:
    load(path)
  assert str(info.value).startswith(f"{path}: ")


def test_a_kind_of_number_without_dequantiser_is_named(tmp_path):
  file = gguf.read(tiny_gguf.write(tmp_path / "t.gguf", UNTIED))
  name = "token_embd.weight"
  kind = tiny_gguf.gguf.GGMLQuantizationType.I32
  tensor = file.tensors[name]._replace(tensor_type=kind)
  file = file._replace(tensors=dict(file.tensors) | {name: tensor})
  with pytest.raises(ValueError, match=rf"{file.path}: tensor '{name}': .*I32"):
    gguf.load_target(file)


def test_a_truncated_file_is_told_wherever_it_ends(tmp_path):
  path = tiny_gguf.write(tmp_path / "t.gguf", UNTIED)
  whole = path.read_bytes()
  rng = np.random.default_rng(0)
  ends = {0, 3, 4, 8, 20, 24, len(whole) // 2, len(whole) - 1}
  for end in sorted(ends | set(rng.integers(0, len(whole), 12).tolist())):
    path.write_bytes(whole[:end])
    with pytest.raises(
      ValueError, match="truncated or not a GGUF file"
    ) as info:
      gguf.read(path)
    assert str(info.value).startswith(f"{path}: ")


def test_another_or_no_file_is_told(tmp_path):
  path = tmp_path / "t.gguf"
  with pytest.raises(ValueError, match=f"{path}: no such file"):
    gguf.read(path)
  path.write_bytes(b"PK\3\4" + bytes(100))
  with pytest.raises(ValueError, match=f"{path}: truncated or not a GGUF"):
    gguf.read(path)


def test_without_the_package_the_message_says_what_to_install(
  tmp_path, monkeypatch
):
  monkeypatch.setitem(sys.modules, "gguf", None)
  with pytest.raises(ValueError, match=r"t.gguf: .*pip install gguf"):
    gguf.read(tmp_path / "t.gguf")


def test_loaded_parameters_do_not_keep_the_file_alive(tmp_path):
  path = tiny_gguf.write(tmp_path / "t.gguf", UNTIED)
  got = load(path).params
  want = tiny_models.target_params(UNTIED)
  with path.open("r+b") as file:
    file.write(bytes(path.stat().st_size))
  jax.tree.map(np.testing.assert_array_equal, got, want)
