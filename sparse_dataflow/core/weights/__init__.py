"""A weight is a value: a pytree that multiplies, whatever it stores."""
