"""The paths in plain torch, without Triton."""
