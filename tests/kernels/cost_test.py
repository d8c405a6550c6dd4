import numpy as np

from kernels import cost

DEVICE = cost.Device("D", flops=100.0, bandwidth=10.0)


def test_a_stage_takes_the_longer_of_its_work_and_its_traffic():
  stages = [cost.Stage("a", 200.0, 10.0), cost.Stage("b", 100.0, 50.0)]
  assert cost.seconds(stages, DEVICE) == 2.0 + 5.0
  assert cost.seconds([], DEVICE) == 0.0


def test_the_gain_is_the_ratio_of_the_sums():
  floor = cost.Stage("floor", 0.0, 0.0)
  one = cost.OpCost(
    floor,
    triton=[cost.Stage("k", 200.0, 1.0)],
    xla=[cost.Stage("x", 200.0, 1.0), cost.Stage("y", 0.0, 30.0)],
  )
  np.testing.assert_allclose(cost.gain(one, DEVICE), 2.5)


def test_a_product_reads_and_writes_each_operand_once():
  stage = cost.matmul("m", 2, 3, 5)
  assert stage == ("m", 2 * 2 * 3 * 5, 2 * (2 * 3 + 3 * 5 + 2 * 5))
