"""The outer step of a module, and the bytes of outer gradients and updates."""
