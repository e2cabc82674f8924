"""The implementations in plain torch, without Triton."""
