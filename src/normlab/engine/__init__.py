"""The contract between moments, rules and coefficients, and ``normalize``. Knows no statistics and no device."""
