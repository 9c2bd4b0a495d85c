"""Drafters for lossless speculative decoding on MLX: DSpark, DFlash, EAGLE3 and n-gram lookup."""
