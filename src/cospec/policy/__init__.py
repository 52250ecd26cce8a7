"""The policy: a torchtitan model on packed, context-parallel attention, with taps."""
