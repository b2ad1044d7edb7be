"""The contract between moments, rules and coefficients, and ``normalize``. It knows no statistics and no device."""
