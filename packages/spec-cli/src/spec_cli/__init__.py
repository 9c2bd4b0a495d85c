"""The `spec` command: lossless speculative decoding for MLX from a terminal."""
