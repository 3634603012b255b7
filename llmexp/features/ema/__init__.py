"""An exponential moving average of the weights, kept, scored and saved beside them."""
