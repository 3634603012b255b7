"""Put the norm of the weights into some rows, and end a run whose weights are not finite."""
