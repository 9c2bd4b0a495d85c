"""A content-addressed prefix cache for MLX models, in memory and on disk."""
