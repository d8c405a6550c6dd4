"""What the releases use and the papers report, to lay beside our figures."""

# Slots of a block, the anchor's included (baselines, section 1).
BLOCKS = {
  "dflash": 16,
  "domino": 16,
  "dspark": 7,
  "dflash2": 8,
  "dspine": 16,
}

# How they draft and accept above temperature 0, where that is not what we use
# for all: rejection with the best proposal (baselines, sections 1 and 7).
RULES = {
  "dflash": {"rule": "exact_match", "proposal": "greedy"},
  "domino": {"rule": "exact_match", "proposal": "sampled"},
  "dflash2": {"rule": "rejection", "proposal": "candidates"},
}

# Advancement of DSpine over the other, mean of seven benchmarks (dspine, 8).
DSPINE_OVER = {"dflash": 1.278, "dflash2": 1.098}
