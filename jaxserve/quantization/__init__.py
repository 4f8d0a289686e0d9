"""How matrices are stored in few bits: what codes and scales stand for. Below layers, which multiply by them."""
