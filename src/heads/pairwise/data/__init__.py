"""Pairs from files and data sets, as tokens, in batches; features of a frozen encoder, kept."""
