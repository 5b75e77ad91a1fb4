"""A replica: one model with everything that feeds it and learns from it."""
