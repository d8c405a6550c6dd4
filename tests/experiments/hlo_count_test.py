"""Counting kernels and bytes: small programs by hand, and XLA's own text."""

import pathlib

import jax
import pytest
from jax import numpy as jnp

from experiments.stages import hlo_count, hlo_text

KB = 1024

# One program with every case; sizes are such that each byte can be told.
PROGRAM = pathlib.Path(__file__).with_name("hlo_count_program.txt").read_text()


@pytest.fixture(name="program", scope="module")
def fixture_program():
  gathers = {"score_rows": 2 * KB}
  return hlo_count.count(PROGRAM, gathers)


def named(program, name):
  (kernel,) = [k for k in program.kernels if k.name == name]
  return kernel


def test_a_gather_is_charged_with_its_rows_and_not_with_its_table(program):
  # Four rows and ids in, four rows out.
  assert named(program, "rows").bytes == 4 * KB + 16 + 4 * KB


def test_an_update_in_place_is_charged_with_what_it_writes(program):
  # The row in and out, and where it goes.
  assert named(program, "new").bytes == KB + 4 + KB


def test_a_product_reads_one_slice_of_stacked_weights(program):
  product = named(program, "start")
  assert product.kind == "triton_gemm"
  assert product.bytes == 4 * KB + 256 * 128 * 2 + 4 + 4 * 128 * 4
  assert product.flops == 2 * 4 * 128 * 256


def test_a_librarys_workspace_is_no_traffic(program):
  library = named(program, "lt")
  assert library.kind == "__cublas$lt$matmul"
  assert library.bytes == 4 * KB + 3 * 256 * 128 * 2 + 4 * 128 * 4
  assert library.flops == 2 * 4 * 128 * 256


def test_a_custom_kernel_has_its_name_and_reads_what_it_was_said_to(program):
  kernel = named(program, "score_rows")
  assert kernel.kind == "triton_kernel_call"
  assert kernel.bytes == 4 * KB + 2 * KB + 4 * KB
  whole = hlo_count.count(PROGRAM)
  assert named(whole, "score_rows").bytes == 4 * KB + 1000 * KB + 4 * KB


def test_loops_count_their_trips_and_say_where_they_do_not_know(program):
  copies = [k for k in program.kernels if k.name == "y"]
  assert [k.launches for k in copies] == [5, 1]
  assert [k.op_name for k in copies] == ["jit(f)/while", "jit(f)/search"]
  assert sorted(note.split(" ")[0] for note in program.notes) == [
    "%endless",
    "FLOPs",
  ]


def test_a_conditional_counts_its_largest_branch(program):
  assert named(program, "t").bytes == 8 * KB


def test_totals_and_parts_add_up(program):
  # rows, row, new, start, lt, score_rows, carried, y x 6, t.
  total = hlo_count.total(program.kernels)
  assert total.kernels == 7 + 6 + 1
  parts = hlo_count.by_part(
    program.kernels, ("draft", "cache", "verify", "commit")
  )
  # The innermost scope counts; what XLA made belongs to where it is used.
  names = {part: {k.name for k in group} for part, group in parts.items()}
  assert names == {
    "draft": {"rows", "score_rows"},
    "cache": {"start"},
    "verify": {"lt"},
    "commit": {"new", "row"},
    "other": {"carried", "y", "t"},
  }
  sums = [hlo_count.total(group) for group in parts.values()]
  assert sum(x.bytes for x in sums) == total.bytes
  assert sum(x.flops for x in sums) == total.flops


def test_scopes_are_found_through_transformations():
  parts = ("draft", "verify")
  assert hlo_count.part_of("jit(f)/transpose(jvp(draft))/dot", parts) == "draft"
  assert hlo_count.part_of("jit(f)/draft/vmap(verify)/x", parts) == "verify"
  assert hlo_count.part_of("jit(f)/drafter/dot", parts) == "other"
  assert hlo_count.part_of("", parts) == "other"


def test_the_text_of_a_real_program_is_read():
  def f(x, w):
    with jax.named_scope("layers"):
      return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)

  arguments = jnp.ones((8, 16)), jnp.ones((16, 16))
  program = hlo_count.count(jax.jit(f).lower(*arguments).compile().as_text())
  parts = hlo_count.by_part(program.kernels, ("layers",))
  assert not program.notes
  assert hlo_count.total(parts["layers"]).flops == 5 * 2 * 8 * 16 * 16


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match="no ENTRY computation"):
    hlo_text.parse("HloModule nothing\n")


def test_shapes_of_all_widths():
  text = "(bf16[2,3]{1,0}, pred[], f8e4m3fn[4]{0}, s4[10]{0}, f32[<=8,2])"
  shapes = hlo_text._shapes(text)
  assert [shape.bytes for shape in shapes] == [12, 1, 4, 5, 64]
