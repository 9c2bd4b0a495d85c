"""Measuring drafters against plain decoding, prompt by prompt."""
