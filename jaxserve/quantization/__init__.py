"""How quantized matrices are stored: the values of codes and scales. Below layers, which multiply by them."""
