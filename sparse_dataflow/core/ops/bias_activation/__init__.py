"""A bias and an activation as one op, whose gradient has the bias's sum."""
