"""What is pooled, and what becomes of it: one file for each kind of statistics."""
